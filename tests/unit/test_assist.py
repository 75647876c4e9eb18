"""When the cloud's own drafter helps a session that has an edge: where that promises something, and keeps it."""

from __future__ import annotations

import pytest

from paceline.step_curve import StepTimes
from paceline.theory import colocated
from services.batcher.assist import FIRST_REST_S, MEASURED_TOKENS, OTHERS, Assist, Pace, predicted_s

TIMES = StepTimes((1, 2, 4, 8), (30.0, 32.0, 36.0, 44.0), samples=100)


def test_the_prediction_is_that_of_the_best_block() -> None:
    wanted = min(colocated(0.8, block, 0.005, TIMES.at(block + 1) / 1000) for block in range(1, 9))
    assert predicted_s(0.8, 0.005, TIMES, 8, 0) == pytest.approx(wanted)
    assert predicted_s(0.8, 0.005, TIMES, 1, 0) > wanted


def committed(assist: Assist, since: float, gap_s: float, tokens: int = MEASURED_TOKENS + 2) -> float:
    for _ in range(tokens):
        since += gap_s
        assist.pace.committed(1, since)
    return since


def test_the_pace_is_that_of_the_last_tokens() -> None:
    pace, now = Pace(), 0.0
    for number in range(200):
        now += 0.1 if number < 100 else 0.05
        pace.committed(2, now)
        if number == 5:
            assert pace.token_s is None
    assert pace.token_s == pytest.approx(0.025)
    pace.committed(1, now + 60.0)
    assert pace.token_s is None, "somebody was away"


def started() -> tuple[Assist, float]:
    assist = Assist()
    assert not assist.may_start(0.0, others=0), "nothing was measured"
    now = committed(assist, 0.0, 0.03)
    assert assist.may_start(now, others=OTHERS)
    assert assist.decide(now, promised_s=0.026, others=0) is None, "too little"
    assert assist.decide(now, promised_s=0.02, others=0) == "start"
    assert assist.on
    return assist, now


def test_what_helps_goes_on() -> None:
    assist, now = started()
    now = committed(assist, now, 0.05)
    assert assist.decide(now, promised_s=None, others=0) is None, "its first block is not here yet"
    assist.block_came()
    now = committed(assist, now, 0.02)
    assert assist.decide(now, promised_s=None, others=0) is None
    now = committed(assist, now, 0.05)
    assert assist.decide(now, promised_s=None, others=0) is None, "it was proven"
    assert assist.on


def test_what_does_not_help_stops_and_is_tried_again_after_pauses_that_double() -> None:
    assist, now = started()
    for rest in (FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S):
        assist.block_came()
        now = committed(assist, now, 0.03)
        assert assist.decide(now, promised_s=None, others=0) == "stop"
        ended = now
        now = committed(assist, now, 0.03)
        assert not assist.may_start(ended + rest - 0.1, others=0)
        assert assist.may_start(ended + rest, others=0)
        assert assist.decide(ended + rest, promised_s=0.01, others=0) == "start"
        now = ended + rest


def test_no_help_where_others_want_the_verifier() -> None:
    assist, now = started()
    assert assist.decide(now, promised_s=None, others=OTHERS + 1) == "stop"
    now = committed(assist, now, 0.03)
    assert not assist.may_start(now + 100.0, others=OTHERS + 1)
    assert assist.may_start(now + 100.0, others=OTHERS)


def test_a_drafter_that_stays_silent_has_failed() -> None:
    assist, now = started()
    assert assist.failed(now) == "stop"
    committed(assist, now, 0.03)
    assert not assist.may_start(now + FIRST_REST_S - 0.1, others=0)
