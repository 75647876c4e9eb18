"""The learned step time: what it tells of curves that it was shown, and of nonsense."""

from __future__ import annotations

import json
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.step_curve import KNOTS, StepCurve, StepTimes, isotonic
from paceline.wire import StepTable

CPU = StepTimes((1, 2, 3, 4, 6, 8, 16), (34, 48, 55, 62, 75, 85, 158))
GPU = StepTimes((1, 256, 512), (20.0, 21.0, 42.0))
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


def taught(
    truth: StepTimes, sizes: tuple[int, ...], *, rounds: int = 400, seed: int = 1, hiccups: float = 0.0
) -> StepCurve:
    """A curve after steps of these sizes with 3 % noise and some that take three times as long."""
    rng, curve = random.Random(seed), StepCurve()
    for _ in range(rounds):
        size, context = rng.choice(sizes), rng.randint(0, 4000)
        slow = 3.0 if rng.random() < hiccups else 1.0
        curve.learn(size, context, truth.at(size, context) * rng.gauss(1.0, 0.03) * slow)
    return curve


def known(curve: StepCurve) -> StepTimes:
    times = curve.times()
    assert times is not None
    return times


def test_times_between_and_beyond_the_knots() -> None:
    assert [CPU.at(n) for n in (0, 1, 2, 5, 16, 20)] == pytest.approx([34, 34, 48, 68.5, 158, 194.5])
    assert StepTimes((4,), (9.0,)).at(100) == 9.0
    assert StepTimes((1, 2), (10.0, 12.0), context_ms=0.01).at(3, 200) == pytest.approx(16.0)


@given(st.lists(st.floats(0.0, 3000.0), min_size=1, max_size=9))
def test_many_sizes_at_once_are_the_same_times(sizes: list[float]) -> None:
    times = StepTimes(CPU.tokens, CPU.ms, context_ms=0.002)
    assert times.over(np.array(sizes), np.array(sizes)) == pytest.approx([times.at(n, n) for n in sizes])


@pytest.mark.parametrize(
    ("tokens", "ms", "context_ms"),
    [
        ((), (), 0.0), ((1, 2), (1.0,), 0.0), ((2, 2), (1.0, 2.0), 0.0), ((1, 2), (2.0, 1.0), 0.0),
        ((1,), (float("nan"),), 0.0), ((1,), (0.0,), 0.0), ((1,), (1.0,), -1.0),
    ],
)  # fmt: skip
def test_what_is_no_table_of_times(tokens: tuple[int, ...], ms: tuple[float, ...], context_ms: float) -> None:
    with pytest.raises(ValueError, match=r"."):
        StepTimes(tokens, ms, context_ms)
    assert StepTimes.of(StepTable(tokens=tokens, ms=ms, context_ms=context_ms)) is None


def test_a_table_goes_there_and_back() -> None:
    times = StepTimes((1, 4), (3.5, 9.0), 0.25, 77)
    assert StepTimes.of(times.table()) == times
    assert StepTimes.of(None) is None


def test_nothing_is_known_before_the_first_step() -> None:
    curve = StepCurve()
    curve.learn(0, 0, 5.0)
    curve.learn(1, 0, float("nan"))
    curve.learn(1, 0, -1.0)
    curve.learn(KNOTS[-1] + 1, 0, 5.0)
    assert curve.times() is None
    curve.learn(1, 100, 34.0)
    assert known(curve).tokens == (1,)
    assert known(curve).at(1, 100) == pytest.approx(34.0, rel=0.01)


@pytest.mark.parametrize("truth", [CPU, GPU], ids=["cpu", "gpu"])
def test_it_learns_the_curve_with_its_jump_and_its_flat_part(truth: StepTimes) -> None:
    sizes = SIZES if truth is CPU else (1, 2, 7, 16, 40, 90, 128, 200, 256, 300, 384, 512)
    times = known(taught(truth, sizes))
    for size in sizes:
        assert times.at(size) == pytest.approx(truth.at(size), rel=0.03)


def test_it_learns_what_a_token_of_context_costs() -> None:
    truth = StepTimes(CPU.tokens, CPU.ms, context_ms=0.005)
    times = known(taught(truth, SIZES, rounds=800))
    assert times.context_ms == pytest.approx(0.005, rel=0.15)
    assert times.at(4, 3000) == pytest.approx(77.0, rel=0.03)


def test_more_context_never_makes_a_step_faster() -> None:
    curve = StepCurve()
    for n in range(200):
        curve.learn(1 + n % 4, 10 * n, CPU.at(1 + n % 4) * (1.0 - n / 1000))
    assert known(curve).context_ms == 0.0


def test_a_ladder_of_ten_steps_is_a_curve_already() -> None:
    curve = StepCurve()
    for size in (1, 2, 4, 8, 16) * 2:
        curve.learn(size, 0, CPU.at(size))
    times = known(curve)
    for size in (1, 2, 4, 8, 16):
        assert times.at(size) == pytest.approx(CPU.at(size), rel=0.02)
    assert times.at(3) == pytest.approx(CPU.at(3), rel=0.06)
    assert times.at(6) == pytest.approx(CPU.at(6), rel=0.06)
    assert times.samples == 10


def test_hiccups_do_not_bend_it() -> None:
    times = known(taught(CPU, SIZES, rounds=1000, hiccups=0.03))
    for size in SIZES:
        assert times.at(size) == pytest.approx(CPU.at(size), rel=0.04)


@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_single_hiccup_moves_it_by_little(size: int) -> None:
    curve = taught(CPU, SIZES)
    before = known(curve).at(size)
    curve.learn(size, 0, 3 * before)
    assert known(curve).at(size) == pytest.approx(before, rel=0.02)


def test_a_first_measurement_that_was_a_hiccup_is_taken_back() -> None:
    curve = StepCurve()
    for size in (1, 2, 4, 8, 1, 2, 4, 8):
        curve.learn(size, 0, CPU.at(size))
    curve.learn(16, 0, 3 * 158.0)
    curve.learn(16, 0, 158.0)
    curve.learn(16, 0, 158.0)
    assert known(curve).at(16) == pytest.approx(158.0, rel=0.1)


def test_a_machine_that_became_slower_is_followed() -> None:
    curve = taught(CPU, SIZES)
    for n in range(400):
        size = SIZES[n % len(SIZES)]
        curve.learn(size, 0, 2 * CPU.at(size))
    assert known(curve).at(8) == pytest.approx(170.0, rel=0.1)


def test_the_time_of_a_rare_size_is_kept_while_others_are_learned() -> None:
    curve = taught(CPU, SIZES)
    for _ in range(3000):
        curve.learn(1, 0, 34.0)
    assert known(curve).at(16) == pytest.approx(158.0, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 100_000), st.floats(0.01, 1e5)), max_size=60))
def test_whatever_it_is_told_it_stays_a_curve(steps: list[tuple[int, int, float]]) -> None:
    """StepTimes itself refuses what falls or is no time."""
    curve = StepCurve()
    for tokens, context, ms in steps:
        curve.learn(tokens, context, ms)
    times = curve.times()
    assert (times is None) == (not steps)
    assert StepCurve.load(json.loads(json.dumps(curve.dump()))).times() == times


def test_the_estimate_is_kept_until_something_is_new() -> None:
    curve = taught(CPU, SIZES, rounds=20)
    assert curve.times() is curve.times()
    before = curve.times()
    curve.learn(1, 0, 40.0)
    assert curve.times() is not before


@pytest.mark.parametrize(
    "kept",
    [
        None, 3, [], {}, {"version": 2}, {"version": 1, "samples": 5, "spread": 0.1, "segments": {"1": [1, 2]}},
        {"version": 1, "samples": 5, "spread": 0.1, "segments": {"5": [1.0] * 12}},
        {"version": 1, "samples": 5, "spread": 0.1, "segments": {"1": ["x"] * 12}},
        {"version": 1, "samples": 5, "spread": float("nan"), "segments": {}},
        {"version": 1, "samples": 5, "spread": 0.1, "segments": {"1": [float("inf")] * 12}},
        {"version": 1, "samples": 5, "spread": 0.1, "segments": {"1": [1.0] + [0.0] * 11}},
        {"version": 1, "samples": 5, "spread": 0.1, "segments": {"1": [1.0] * 10 + [0.0, 1.0]}},
        {"version": 1, "samples": 5, "spread": 0.1, "segments": {"1": [1.0] * 11 + [0.0]}},
        {"version": 1, "samples": 5, "spread": 0.1, "segments": {"1": [1.0, *[1e308] * 11]}},
        {"version": 1, "samples": 10**30, "spread": 0.1, "segments": {"1": [1.0] * 12}},
    ],
)  # fmt: skip
def test_nonsense_that_was_kept_is_a_fresh_curve(kept: object) -> None:
    curve = StepCurve.load(kept)
    assert curve.times() is None
    curve.learn(1, 0, 34.0)
    assert known(curve).samples == 1


@given(st.data())
def test_a_kept_curve_with_any_numbers_changed_is_a_curve_that_goes_on_learning(data: st.DataObject) -> None:
    kept = json.loads(json.dumps(taught(CPU, SIZES, rounds=5).dump()))
    odd = st.sampled_from([0, -1, 1e-300, 1e12, 1e99, 1e308, 10**400, float("nan"), float("inf"), True, None, "1", []])
    for _ in range(data.draw(st.integers(1, 4))):
        segment = kept["segments"][data.draw(st.sampled_from(sorted(kept["segments"])))]
        segment[data.draw(st.integers(0, 11))] = data.draw(odd)
    if data.draw(st.booleans()):
        kept[data.draw(st.sampled_from(["samples", "spread", "segments", "version"]))] = data.draw(odd)
    curve = StepCurve.load(kept)
    for _ in range(30):
        curve.learn(4, 16, 60.0)
    table = known(curve).table()
    assert StepTimes.of(msgspec.json.decode(msgspec.json.encode(table), type=StepTable)) == known(curve)


def test_the_nearest_sequence_that_never_falls() -> None:
    assert isotonic(np.array([1.0, 3.0, 2.0, 4.0]), np.ones(4)) == pytest.approx([1, 2.5, 2.5, 4])
    assert isotonic(np.array([3.0, 2.0, 1.0]), np.array([2.0, 1.0, 1.0])) == pytest.approx([2.25] * 3)


def test_short_sessions_do_not_give_the_time_of_tokens_to_their_context():
    chance = random.Random(5)
    curve = StepCurve()
    for _ in range(30):
        for tokens, ms in ((64, 350.0), *((size, _cpu(size)) for size in [1] * 40 + [2, 3, 4] * 3)):
            context = chance.randrange(60, 170)
            curve.learn(tokens, context, ms * chance.uniform(0.8, 1.3))
    times = curve.times()
    assert times is not None
    for tokens in (1, 2, 4, 64):
        assert times.at(tokens) == pytest.approx(1.05 * _cpu(tokens), rel=0.2)
        assert times.context_ms * 150 < 0.2 * times.at(tokens)


def _cpu(tokens: int) -> float:
    return {1: 34.0, 2: 48.0, 3: 55.0, 4: 62.0, 64: 350.0}[tokens]
