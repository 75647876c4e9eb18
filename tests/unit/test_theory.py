"""The closed forms against values worked out by hand, against each other, and against simulated time."""

from __future__ import annotations

import random

import pytest
from draft_kit import Machine, measured
from hypothesis import given
from hypothesis import strategies as st

from paceline import theory

rates = st.floats(0.0, 0.99)
times = st.floats(0.1, 200.0)


def test_values_worked_out_by_hand() -> None:
    assert theory.expected_tokens(0.5, 3) == pytest.approx(1.875)
    assert theory.expected_tokens(1.0, 4) == 5
    assert theory.expected_tokens(0.0, 4) == 1
    assert theory.colocated(0.5, 3, t_s=2, t_v=9) == pytest.approx(8.0)
    assert theory.synchronous(0.5, 3, t_d=5, round_trip=100, t_v=35) == pytest.approx(80.0)
    assert theory.one_ahead(0.5, 1, t_d=20, round_trip=90, t_v=30) == pytest.approx(130 / 1.5)
    assert theory.deep(0.8, t_d=10, round_trip=100, t_v=30) == pytest.approx(36.0)
    assert theory.deep_with_alternatives(0.8, 10, 100, 30, hit=0.8, branch=2) == pytest.approx(180 / 6.952)
    assert theory.filled(36.0, t_1=30) == 30
    assert theory.break_even_round_trip(0.85, 5, t_d=10, t_v=35, t_1=30) == pytest.approx(39.57, abs=0.01)


def test_a_rate_or_length_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"acceptance 1\.2"):
        theory.expected_tokens(1.2, 3)
    with pytest.raises(ValueError, match="-1"):
        theory.expected_tokens(0.5, -1)


@given(rates, st.integers(0, 30))
def test_expected_tokens_is_the_mean_of_the_truncated_geometric_law(a: float, g: int) -> None:
    law = [a**k * (1 - a) for k in range(g)] + [a**g]
    assert theory.expected_tokens(a, g) == pytest.approx(sum((k + 1) * p for k, p in enumerate(law)))


@given(rates, times, times, times)
def test_alternatives_never_slow_a_deep_window(a: float, t_d: float, round_trip: float, t_v: float) -> None:
    plain = theory.deep(a, t_d, round_trip, t_v)
    assert theory.deep_with_alternatives(a, t_d, round_trip, t_v, hit=0.0, branch=3) == pytest.approx(plain)
    assert theory.deep_with_alternatives(a, t_d, round_trip, t_v, hit=0.7, branch=3) < plain


@given(rates, st.integers(1, 12), times, times, times)
def test_at_the_break_even_round_trip_both_are_equal(a: float, g: int, t_d: float, t_v: float, t_1: float) -> None:
    even = theory.break_even_round_trip(a, g, t_d, t_v, t_1)
    assert theory.synchronous(a, g, t_d, even, t_v) == pytest.approx(t_1, abs=1e-6)


def test_a_roofline_is_flat_until_the_arithmetic_takes_over() -> None:
    gpu = theory.Roofline(bytes_read=14e9, flops_per_token=14e9, bandwidth=2e12, peak=300e12, overhead=0.001)
    assert gpu.step_s(1) == gpu.step_s(100) == pytest.approx(0.008)
    assert gpu.saturating_tokens() == pytest.approx(150)
    assert gpu.step_s(300) == pytest.approx(0.015)


def test_the_best_block_is_short_where_tokens_cost_and_long_where_they_are_free() -> None:
    assert theory.best_block(0.8, [25 + 6 * m for m in range(17)]) in range(3, 6)
    assert theory.best_block(0.8, [25.0] * 17) == 16


@pytest.mark.parametrize(("a", "g", "round_trip"), [(0.79, 4, 100.0), (0.6, 6, 60.0), (0.9, 9, 20.0)])
def test_synchronous_blocks_in_simulated_time(a: float, g: int, round_trip: float) -> None:
    chance, t_d, t_v = random.Random(3), 16.0, 50.0
    tokens = elapsed = 0.0
    for _ in range(20_000):
        accepted = next((k for k in range(g) if chance.random() >= a), g)
        tokens, elapsed = tokens + accepted + 1, elapsed + g * t_d + round_trip + t_v
    assert elapsed / tokens == pytest.approx(theory.synchronous(a, g, t_d, round_trip, t_v), rel=0.02)


def test_a_deep_window_in_simulated_time() -> None:
    """The product's own draft state and session, in virtual time: within 15 % of the closed form."""
    machine = Machine(acceptance=0.8)
    for round_trip in (0.06, 0.1, 0.2):
        deep = measured(round_trip, machine=machine, fill=False, alternatives=False, lookup=False, assist=False)
        step_ms = machine.times.at(1 / deep.steps)
        predicted = theory.deep(0.8, 1000 * machine.draft_s, 1000 * round_trip, step_ms)
        assert deep.ms == pytest.approx(predicted, rel=0.15)
