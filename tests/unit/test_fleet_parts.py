"""Traces, hardware, meter and clock of the fleet simulation."""

from __future__ import annotations

import math
import random

import pytest

from paceline import fleet_traces
from paceline.fleet_clock import Clock
from paceline.fleet_hardware import DRAFTERS, GPUS, LLMS, StepCost, drafting_head
from paceline.fleet_meter import Link, Meter, Way
from paceline.fleet_traces import Course, Record, true_token

NAMES = ("smollm2-t0.0", "smollm2-t0.8")


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_has_the_recorded_acceptance(name):
    trace = fleet_traces.load(name)
    assert [len(prompt) for prompt in trace.prompts] == [64] * 8
    assert trace.recorded_acceptance == pytest.approx(0.71, abs=0.01)
    drawn = trace.draw(512, random.Random(3))
    assert sum(record.rank == 0 for record in drawn) == round(512 * trace.recorded_acceptance)


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.9, 1.0])
def test_a_stated_acceptance_is_met_with_recorded_confidences(acceptance):
    trace = fleet_traces.load(NAMES[1]).at(acceptance)
    drawn = trace.draw(4000, random.Random(3))
    assert sum(record.rank == 0 for record in drawn) / 4000 == pytest.approx(acceptance, abs=0.02)
    assert set(drawn) <= set(trace.records)


def test_sure_drafts_are_right_more_often():
    records = fleet_traces.load(NAMES[0]).records
    sure = [record.rank == 0 for record in records if record.gap > 4]
    unsure = [record.rank == 0 for record in records if record.gap < 0.5]
    assert sum(sure) / len(sure) > 0.95 > 0.6 > sum(unsure) / len(unsure)


def test_the_target_choice_stands_where_the_rank_says():
    ranks = [0, 1, 3, -1]
    course = Course([Record(0.5, 1.0, rank) for rank in ranks], prompt_length=4)
    for index, rank in enumerate(ranks):
        guess = course.guess(course.truth(4 + index))
        tokens = [guess.token, *(token for token, _ in guess.alternatives)]
        assert len(set(tokens)) == 5
        assert (tokens.index(true_token(4 + index)) if rank >= 0 else -1) == rank
        gaps = [gap for _, gap in guess.alternatives]
        assert gaps == sorted(gaps) and gaps[0] == 1.0


def test_nothing_fits_on_a_wrong_path():
    course = Course([Record(1.0, 9.0, 0)] * 8, prompt_length=4)
    path = [*course.truth(6), true_token(6) + 1]
    for _ in range(4):
        guess = course.guess(path)
        assert true_token(len(path)) not in {guess.token, *(token for token, _ in guess.alternatives)}
        assert course.accepted(6, [*path[6:], guess.token]) == 0
        path.append(guess.token)
    assert course.accepted(6, [true_token(6), true_token(7), 3]) == 2


def test_a_step_reads_the_weights_once_and_the_cache_of_each_session():
    cost = StepCost(GPUS["A100-80"], LLMS["llama-8b"], bandwidth_share=1.0, peak_share=1.0, overhead_s=0.0)
    assert cost.step_s(1, 0) == pytest.approx(16.06e9 / 2.039e12)
    assert cost.step_s(64, 0) == cost.step_s(1, 0)
    assert cost.step_s(1000, 0) == pytest.approx(1000 * 16.06e9 / 312e12)
    assert cost.saturating_tokens == pytest.approx(312e12 / 2.039e12, rel=1e-6)
    assert cost.step_s(1, 8192) - cost.step_s(1, 0) == pytest.approx(8192 * 131072 / 2.039e12)
    assert cost.step_s(1, 8192, per_session=4) == cost.step_s(1, 8192)
    assert cost.sessions(1000) == int((72e9 - 16.06e9) / 131072 / 1000)
    assert cost.sessions(1000, DRAFTERS["llama-8b"]) == int((72e9 - 18.54e9) / 163840 / 1000)
    assert cost.sessions(10**6) == 0


def test_every_target_has_a_smaller_drafter_and_a_head_that_is_smaller_still():
    for name, llm in LLMS.items():
        assert DRAFTERS[name].parameters < llm.parameters / 5
        assert drafting_head(llm).kv_per_token < DRAFTERS[name].kv_per_token < llm.kv_per_token


def test_eight_bit_weights_are_half_as_large_and_faster_only_where_there_is_arithmetic_for_them():
    wide, narrow = (StepCost(GPUS["A100-80"], LLMS[name]) for name in ("llama-8b", "llama-8b-fp8"))
    assert narrow.step_s(1, 0) < wide.step_s(1, 0)
    assert narrow.step_s(4096, 0) == wide.step_s(4096, 0)
    wide, narrow = (StepCost(GPUS["H200"], LLMS[name]) for name in ("llama-8b", "llama-8b-fp8"))
    assert narrow.step_s(4096, 0) < 0.6 * wide.step_s(4096, 0)


def test_latency_counts_tokens_not_chunks():
    meter = Meter()
    meter.chunk(1, 1.0, 1)
    meter.chunk(1, 1.3, 3)
    meter.chunk(2, 1.35, 4)
    meter.chunk(1, 1.4, 1)
    assert meter.latencies_ms(0.0, 2.0) == pytest.approx((100.0, 100.0, 100.0))
    meter.chunk(1, 2.0, 1)
    mean, p50, p99 = meter.latencies_ms(0.0, 3.0)
    assert (mean, p50) == pytest.approx((200.0, 100.0)) and 500 < p99 <= 600
    assert all(math.isnan(value) for value in meter.latencies_ms(5.0, 6.0))


def test_messages_take_half_a_round_trip_and_never_overtake():
    still = Way(Link(0.1), random.Random(1))
    assert [still.arrival(now) for now in (0.0, 1.0)] == [0.05, 1.05]
    shaky = Way(Link(0.1, 0.02), random.Random(1))
    arrivals = [shaky.arrival(0.001 * index) for index in range(500)]
    assert arrivals == sorted(arrivals)
    lone = [Way(Link(0.1, 0.02), random.Random(seed)).arrival(0.0) for seed in range(500)]
    assert min(lone) > 0.05 and sum(lone) / 500 == pytest.approx(0.07, abs=0.003)


def test_the_clock_keeps_order():
    clock, heard = Clock(), []
    clock.after(2.0, lambda: heard.append("late"))
    clock.after(1.0, lambda: clock.at(0.0, lambda: heard.append(clock.now)))
    clock.after(1.0, lambda: heard.append("second"))
    clock.run(lambda: False)
    assert heard == ["second", 1.0, "late"]
