"""Predictions from measured quantities. Pure."""

from __future__ import annotations

import pytest

from loadgen.jobs import Run
from loadgen.predict import acceptance, predicted, step_at
from paceline import theory
from paceline.wire import Counters

CURVE = {1: 25.0, 5: 50.0, 9: 75.0}


def run(accepted: int, rejected: int, steps: int = 10, step_tokens: int = 50) -> Run:
    counters = Counters(accepted={"edge": accepted}, rejected=rejected, steps=steps, step_tokens=step_tokens)
    return Run(tokens=(), text="", kinds="", chunks=(), finish="length", prompt_tokens=1, counters=counters)


def test_acceptance_is_of_what_was_judged() -> None:
    assert acceptance([run(30, 10), run(50, 10)]) == 0.8
    assert acceptance([run(0, 0)]) is None


def test_the_step_curve_is_linear_between_its_points_and_flat_beyond() -> None:
    assert [step_at(CURVE, n) for n in (1, 3, 9, 40)] == [25, 37.5, 75, 75]
    assert step_at({}, 1) is None


def test_predictions_are_the_closed_forms_at_the_measured_values() -> None:
    modes = {"cloud": [run(0, 0)], "sync": [run(40, 10)], "deep": [run(40, 10)]}
    got = predicted(modes, rtt_ms=100, block=4, draft_ms=16, step_ms=CURVE)
    assert got["cloud"] == 25
    assert got["sync"] == pytest.approx(theory.synchronous(0.8, 4, 16, 100, 50))
    assert got["deep"] == pytest.approx(theory.deep(0.8, 16, 100, 50))
    assert got["paceline"] == 25


def test_what_was_not_measured_is_left_out() -> None:
    assert predicted({}, rtt_ms=0, block=4, draft_ms=None, step_ms={}) == {}
    assert predicted({"deep": [run(0, 0)]}, rtt_ms=0, block=4, draft_ms=16, step_ms=CURVE) == {"cloud": 25}
