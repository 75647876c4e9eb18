"""From runs to figures, divergences with their margins, and the report's shape. Pure."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadgen_kit import run
from rich.console import Console

from loadgen import report
from loadgen.compare import Plan
from loadgen.divergence import Split, first_difference, margin
from loadgen.figures import draft_ms, figures, gaps_ms, itl_ms, ratio
from loadgen.jobs import Connect, Connected, Job, Run, Trouble, decode_command, decode_reply, encode
from loadgen.margins import margin_at
from loadgen.modes import CLOUD, DEEP, EDGE, PACELINE, SYNC_BLOCKS, sync
from loadgen.prompts import PROMPTS
from paceline.coupling import noise
from paceline.wire import Counters, LogprobEntry


def test_latency_counts_tokens_and_not_chunks() -> None:
    one_by_one = run((100, 1), (120, 1), (140, 1), (160, 1), (180, 1))
    in_two = run((100, 1), (180, 4))
    assert itl_ms([one_by_one]) == itl_ms([in_two]) == 20
    assert gaps_ms(in_two) == [20, 20, 20, 20]


def test_tokens_that_came_with_the_first_cost_nothing() -> None:
    assert gaps_ms(run((100, 3), (130, 1))) == [0, 0, 30]


@given(st.lists(st.tuples(st.floats(0, 1e4), st.integers(1, 9)), min_size=2, max_size=30))
def test_the_mean_gap_is_last_minus_first_over_tokens_minus_one(steps: list[tuple[float, int]]) -> None:
    now, chunks = 0.0, []
    for wait, count in steps:
        now += wait
        chunks.append((now, count))
    tokens = sum(count for _, count in chunks)
    assert itl_ms([run(*chunks)]) == pytest.approx((chunks[-1][0] - chunks[0][0]) / (tokens - 1), abs=1e-6)


def test_figures_of_a_mode() -> None:
    counters = Counters(drafted={"edge": 12}, verified=10, accepted={"edge": 8}, rejected=2, steps=3, step_tokens=13)
    sizes = {"bytes_up": 96, "nodes_up": 12, "bytes_down": 150, "tokens_down": 10}
    fast = run((50, 1), (150, 10), counters=counters, **sizes)
    slow = run((60, 1), (260, 10), counters=counters, **sizes)
    shown = figures([[fast], [slow], [fast]])
    assert shown["itl_ms_mean"] == 10
    assert shown["spread"] == [10, 20]
    assert shown["ttft_ms_p50"] == 50
    assert shown["acceptance"] == pytest.approx(0.8)
    assert shown["verifier_steps_per_token"] == pytest.approx(3 / 11)
    assert shown["verifier_tokens_per_token"] == pytest.approx(13 / 11)
    assert shown["bytes_up_per_drafted_token"] == 8
    assert shown["bytes_down_per_committed_token"] == 15
    assert shown["tokens_per_s"] == pytest.approx(1e3 * 33 / (150 + 260 + 150))


def test_what_cannot_be_told_is_null_and_never_a_division_by_zero() -> None:
    shown = figures([[run((50, 1), (70, 1))]])
    assert shown["acceptance"] is None
    assert shown["bytes_up_per_drafted_token"] is None
    assert ratio(1, 0) is None
    assert draft_ms([run((1, 1))]) is None
    assert draft_ms([run((1, 1), draft_ms=9.0), run((1, 1), draft_ms=11.0)]) == 10


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_the_first_difference_is_the_first(one: list[int], other: list[int]) -> None:
    split = first_difference(one, other)
    if one == other:
        assert split is None
        return
    assert split is not None
    assert one[: split.position] == other[: split.position]
    assert (split.one, split.other) == tuple(
        tokens[split.position] if split.position < len(tokens) else None for tokens in (one, other)
    )


def test_margins_at_temperature_zero_are_differences_of_logprobs() -> None:
    known = {7: -1.0, 9: -1.25}
    assert margin(Split(3, 7, 9), known, 0.0, seed=1) == pytest.approx(0.25)
    assert margin(Split(3, 9, 7), known, 0.0, seed=1) == pytest.approx(0.25)


def test_margins_when_sampling_hold_the_noise_of_the_place() -> None:
    drawn = noise(5, 0, 3, np.array([7, 9], dtype=np.int64))
    expected = abs((-1.0 / 0.8 + drawn[0]) - (-1.25 / 0.8 + drawn[1]))
    assert margin(Split(3, 7, 9), {7: -1.0, 9: -1.25}, 0.8, seed=5) == pytest.approx(expected)


def test_a_margin_between_what_is_not_known_is_unknown() -> None:
    assert margin(Split(3, 7, 9), {7: -1.0}, 0.0, seed=1) is None
    assert margin(Split(3, 7, None), {7: -1.0}, 0.0, seed=1) is None


class Target:
    """Chooses `best` at position 1, and `next` where that is barred. Both are less likely than token 5."""

    def __init__(self, best: int, next_: int) -> None:
        self.best, self.next, self.jobs = best, next_, list[Job]()

    async def run(self, job: Job) -> Run:
        self.jobs.append(job)
        logprobs = {self.best: -4.0, self.next: -4.25}
        chosen = self.next if self.best in job.logit_bias else self.best
        entries = [LogprobEntry(logprob=ms, top=((5, -0.5),)) for ms in (-0.5, logprobs[chosen])]
        return run((1.0, 1), (2.0, 1), tokens=(5, chosen), logprobs=tuple(entries))


@pytest.mark.parametrize(("other", "expected"), [(9, 0.25), (8, None)])
async def test_the_margin_of_an_unlikely_token_is_had_by_barring_the_one_that_won(
    other: int, expected: float | None
) -> None:
    target = Target(7, 9)
    job = Job(prompt="x", max_tokens=8, speculation=CLOUD.speculation)
    assert await margin_at(target, job, Split(1, 7, other)) == expected
    assert [(one.max_tokens, one.logit_bias) for one in target.jobs] == [(2, {}), (2, {7: -100})]
    likely = Target(7, 9)
    assert await margin_at(likely, job, Split(1, 7, 5)) == 3.5
    assert len(likely.jobs) == 1, "nothing had to be barred"


def test_jobs_and_replies_travel_as_lines() -> None:
    job = Job(prompt="line\nbreak", max_tokens=8, speculation=sync(4).speculation)
    for command in (Connect("http://127.0.0.1:1", "key", "toy"), job):
        line = encode(command)
        assert line.count(b"\n") == 1
        assert decode_command(line) == command
    for reply in (Connected(simulated=True), Trouble("no"), run((1, 1), (2, 3), counters=Counters(steps=2))):
        assert decode_reply(encode(reply)) == reply


def test_the_modes_are_settings_of_one_code_path() -> None:
    assert not CLOUD.speculation.enabled
    assert (sync(6).speculation.depth, sync(6).speculation.max_draft, sync(6).speculation.fill) == (1, 6, False)
    assert (DEEP.speculation.depth, DEEP.speculation.fill) == (0, False)
    assert PACELINE.speculation.fill
    assert EDGE.alone


def test_a_plan_counts_its_runs() -> None:
    plan = Plan(rtts_ms=(0.0, 100.0), prompts=PROMPTS[:8], repeats=3)
    probes, warm_up, measured = len(SYNC_BLOCKS) * 2, 5, 5 * 8 * 3
    assert plan.runs == 2 * (probes + warm_up + measured)
    assert Plan(rtts_ms=(60.0,), prompts=PROMPTS[:2], repeats=1, blocks=(6,), deep=False, edge=False).runs == 3 + 6


def test_answers_are_held_to_a_fixed_length() -> None:
    job = Plan(tokens=96).job(DEEP, 2, 0.8)
    assert (job.min_tokens, job.max_tokens, job.temperature, job.prompt) == (96, 96, 0.8, PROMPTS[2])


def test_there_are_enough_prompts_and_all_differ() -> None:
    assert len(set(PROMPTS)) == len(PROMPTS) >= 24


def cell(**modes: Mapping[str, object]) -> dict[str, object]:
    return {"pair": "toy", "rtt_ms": 60.0, "temperature": 0.0, "simulated": True, "modes": modes}


def shown(item: object) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(item)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_table_says_that_it_is_simulated_and_shows_tokens_per_step() -> None:
    modes: dict[str, Mapping[str, object]] = {
        "cloud": figures([[run((1, 1), (21, 1), counters=Counters(steps=2))]]),
        "sync": {"g": 6},
    }
    text = shown(report.table(cell(**modes)))
    assert "simulated" in text
    assert "20.0" in text
    assert "1.00" in text
    assert "sync, blocks of 6" in text


def test_the_verdict_names_the_modes_and_the_largest_margin() -> None:
    assert "identical" in shown(report.verdict({"cells": [{}], "divergences": []}, ("cloud", "sync")))
    assert "nothing was measured" in shown(report.verdict({"cells": [], "divergences": []}, ("cloud",)))
    near = {"cells": [{}], "divergences": [{"margin": 0.002}, {"margin": 0.01}]}
    assert report.only_near_ties(near)
    assert "2 near ties (margins 0.01, 0.002)" in shown(report.verdict(near, ("cloud", "sync")))


@pytest.mark.parametrize("margin", [0.2, None])
def test_a_difference_that_is_no_near_tie_is_called_one(margin: float | None) -> None:
    found = {"cells": [{}], "divergences": [{"margin": 0.002}, {"margin": margin}]}
    assert not report.only_near_ties(found)
    assert "2 differ" in shown(report.verdict(found, ("cloud",)))


def test_a_report_names_its_command_machine_and_commit(tmp_path: Path) -> None:
    made = report.header(time.time() - 5)
    assert made["command"][:3] == ["python", "-m", "loadgen"]
    assert made["machine"]["cores"] >= 1
    assert made["machine"]["memory_gib"] > 0
    assert made["commit"]
    assert made["seconds"] == pytest.approx(5, abs=2)
    file = tmp_path / "new" / "report.json"
    report.write({**made, "cells": [{"x": 1 / 3, "none": None}]}, file)
    read = orjson.loads(file.read_bytes())
    assert read["cells"] == [{"x": 0.3333, "none": None}]
    assert not math.isnan(read["seconds"])
