"""When the next block is expected, and what a plain step in the meantime is worth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import theory
from paceline.fill_rule import Arrivals, worth_of_filling, worth_of_joining
from paceline.step_curve import StepTimes

CPU = StepTimes((1, 2, 3, 4, 6, 8, 16), (34, 48, 55, 62, 75, 85, 158))
GPU = StepTimes((1, 256, 512), (20.0, 21.0, 42.0))


def stream(arrivals: Arrivals, *, gap: float = 0.08, blocks: int = 10, nodes: int = 4, start: float = 0.0) -> float:
    """Blocks at an even pace; the time of the last one."""
    for n in range(blocks):
        arrivals.on_block(start + n * gap, nodes)
    return start + (blocks - 1) * gap


def test_nothing_is_expected_before_anything_came() -> None:
    arrivals = Arrivals()
    assert arrivals.next_in(0.0) is None
    assert arrivals.nodes == 1.0
    arrivals.on_block(1.0, 3)
    assert arrivals.next_in(1.1) is None, "one block has no pace"
    assert arrivals.nodes == 3.0


def test_a_stream_goes_on_at_its_pace() -> None:
    arrivals = Arrivals()
    last = stream(arrivals)
    assert arrivals.next_in(last + 0.03) == pytest.approx(0.05)
    assert arrivals.next_in(last + 0.08) == pytest.approx(0.0, abs=1e-6)
    assert arrivals.next_in(last + 0.14) == pytest.approx(0.06), "late by .06: as far away again"
    assert arrivals.next_in(last + 0.25) is None, "overdue"


def test_an_uneven_stream_is_never_expected_at_once() -> None:
    arrivals = Arrivals()
    now = 0.0
    for n in range(40):
        now += 0.04 if n % 2 else 0.12
        arrivals.on_block(now, 4)
    expected = arrivals.next_in(now + 0.08)
    assert expected == pytest.approx(0.04, rel=0.15)


def test_a_pause_is_no_pace() -> None:
    arrivals = Arrivals()
    last = stream(arrivals)
    arrivals.on_block(last + 60.0, 4)
    expected = arrivals.next_in(last + 60.0)
    assert expected is not None
    assert expected < 0.12


def test_after_a_rejection_the_return_time_counts() -> None:
    arrivals = Arrivals()
    last = stream(arrivals)
    arrivals.on_tip(last + 0.01, False)
    assert arrivals.next_in(last + 0.03) == pytest.approx(0.05), "an accepted block changes nothing"
    arrivals.on_tip(last + 0.02, True)
    assert arrivals.next_in(last + 0.03) is None, "never seen yet how long a return takes"
    arrivals.on_block(last + 0.05, 0)
    arrivals.on_block(last + 0.24, 2)
    assert arrivals.next_in(last + 0.24) == pytest.approx(0.08), "the stream runs again"
    arrivals.on_tip(last + 0.30, True)
    arrivals.on_block(last + 0.32, 0)
    assert arrivals.next_in(last + 0.40) == pytest.approx(0.12), ".22 after the rejection, whatever stale block comes"
    assert arrivals.next_in(last + 0.30 + 0.67) is None


def test_a_source_behind_the_tip_is_not_waited_for() -> None:
    arrivals = Arrivals()
    last = stream(arrivals)
    arrivals.on_block(last + 0.08, 0)
    assert arrivals.next_in(last + 0.09) is None
    arrivals.on_block(last + 0.16, 2)
    assert arrivals.next_in(last + 0.16) == pytest.approx(0.08)


# --- the worth ---


def worth(wait_s: float | None, *, nodes: float = 4, a: float = 0.71, times: StepTimes | None = CPU) -> float:
    return worth_of_filling(wait_s=wait_s, nodes=nodes, acceptance=a, times=times, context=0)


def test_it_is_one_where_nothing_is_known_or_comes() -> None:
    assert worth(None) == 1.0
    assert worth(0.0, times=None) == 1.0
    assert worth(float("inf")) == 1.0


def test_where_verifier_time_is_dear_a_block_that_nobody_would_verify_is_not_waited_for() -> None:
    values = {"wait_s": 0.01, "nodes": 3, "acceptance": 0.71, "times": CPU, "context": 0}
    assert worth_of_filling(**values) < 0.2
    assert worth_of_filling(**values, price=0.71) == pytest.approx(worth_of_filling(**{**values, "nodes": 1}))
    assert worth_of_filling(**values, price=0.72) == 1.0


def test_by_hand() -> None:
    """Two nodes in 50 ms. At .71 both pay: E(2) = 2.2141 in 55 ms against E(1) = 1.71 in 48. Waiting: 2.2141 / (50 +
    55). Filling once: (1 + .71 E(1)) / (50 + 48); twice: (2 + .71² E(0)) / (68 + 34); for ever: 1 / 34."""
    waiting = 2.2141 / 105
    assert waiting < (1 + 0.71 * 1.71) / 98 < 2.5041 / 102 < 1 / 34
    assert worth(0.05, nodes=2) == pytest.approx(1 - waiting * 34)
    a, nodes = 0.9, 3
    waiting = theory.expected_tokens(a, 3) / (20 + 62)
    filling = max(1 / 34, (1 + a * theory.expected_tokens(a, 2)) / (34 + 55))
    assert waiting > filling
    assert worth(0.02, nodes=nodes, a=a) == 0.0


@pytest.mark.parametrize("times", [CPU, GPU])
def test_what_is_about_to_come_is_waited_for_and_what_is_far_away_is_not(times: StepTimes) -> None:
    assert worth(0.0, times=times) == 0.0
    assert worth(0.005, times=times) == 0.0
    assert worth(1.0, times=times) > 0.9
    assert worth(10.0, times=times) > 0.98


def test_a_long_block_is_worth_a_longer_wait_where_tokens_are_free() -> None:
    assert worth(0.1, nodes=2, a=0.9, times=GPU) > worth(0.1, nodes=12, a=0.9, times=GPU) > 0.0
    assert worth(0.1, nodes=4) == worth(0.1, nodes=40), "on a CPU the rest of a long block is not verified"


def test_drafts_that_never_fit_are_not_waited_for() -> None:
    assert worth(0.05, a=0.0) == 1.0
    assert worth(0.05, a=0.0) > worth(0.05, a=0.9)


@given(
    st.floats(0.0, 100.0),
    st.floats(0.0, 1e4),
    st.floats(0.0, 1.0),
    st.integers(0, 100_000),
    st.sampled_from([CPU, GPU]),
)
def test_it_is_between_none_and_one_token_and_grows_far_away(
    wait: float, nodes: float, a: float, context: int, times: StepTimes
) -> None:
    value = worth_of_filling(wait_s=wait, nodes=nodes, acceptance=a, times=times, context=context)
    assert 0.0 <= value <= 1.0
    later = worth_of_filling(wait_s=wait + 1e6, nodes=nodes, acceptance=a, times=times, context=context)
    assert later > 0.99 >= min(value, 0.99)


# --- joining a step ---


@pytest.mark.parametrize("a", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("m", [1, 2, 8])
def test_a_row_in_a_step_that_goes_on_anyway_loses_nothing_of_the_block(a: float, m: int) -> None:
    """The plain row, then what is left of the block, or another plain row where it does not agree: m + 1 rows, as many
    as the whole block takes."""
    joined = 1 + a * theory.expected_tokens(a, m - 1) + (1 - a)
    gained = joined - theory.expected_tokens(a, m)
    assert worth_of_joining(acceptance=a, price=0.0) == pytest.approx(gained)


def test_what_joining_costs_is_saved_later() -> None:
    assert worth_of_joining(acceptance=0.75, price=0.5) == pytest.approx(0.75)
    assert worth_of_joining(acceptance=0.75, price=0.3) == pytest.approx(0.55)
    assert worth_of_joining(acceptance=0.75, price=0.9) == 1.0
    assert worth_of_joining(acceptance=1.5, price=0.0) == 0.0
