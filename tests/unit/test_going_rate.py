"""What a verifier's time earns as a whole."""

from __future__ import annotations

import pytest

from paceline.batch_choice import Want, choose
from paceline.going_rate import KNOWN_AFTER_S, PAUSE_S, GoingRate
from paceline.step_curve import StepTimes

CPU = StepTimes((1, 2, 3, 4, 6, 8, 16), (34.0, 48.0, 55.0, 62.0, 75.0, 85.0, 158.0))


def test_idle_time_counts():
    rate = GoingRate()
    for step in range(200):
        rate.note(0.1 * step, 2)
    assert rate.value(19.9) == pytest.approx(2 / 100, rel=0.03)


def test_the_reading_of_prompts_is_left_out():
    rate = GoingRate()
    for step in range(200):
        rate.note(0.1 * step, 2, reading_s=0.05)
    assert rate.value(19.9) == pytest.approx(2 / 50, rel=0.06)


def test_it_follows_a_change_within_some_seconds():
    rate = GoingRate()
    for step in range(100):
        rate.note(0.1 * step, 1)
    for step in range(100, 200):
        rate.note(0.1 * step, 3)
    assert rate.value(19.9) == pytest.approx(3 / 100, rel=0.05)


def test_it_is_not_known_at_first_nor_after_a_pause():
    rate = GoingRate()
    assert rate.value(0.0) is None
    rate.note(1.0, 5)
    assert rate.value(1.0) is None
    rate.note(1.0 + KNOWN_AFTER_S, 5)
    assert rate.value(1.3) == pytest.approx(5 / (1000 * KNOWN_AFTER_S))
    assert rate.value(1.3 + PAUSE_S + KNOWN_AFTER_S) is None
    rate.note(9.0, 5)
    assert rate.value(9.0) is None


def test_while_bubbles_stay_empty_a_chain_is_verified_further():
    want = Want("s", "t", chain=(0.8, 0.6, 0.8, 0.7, 0.6))

    def drafts(going_rate: float | None) -> int:
        return choose([want], times=CPU, step_tokens=64, chunk_tokens=64, going_rate=going_rate).shares[0].draft

    assert drafts(None) == drafts(1.0)
    assert drafts(None) < drafts(0.02) <= drafts(0.002) == 5
