"""Predictions from measured quantities. Pure."""

from __future__ import annotations

import pytest

from loadgen.jobs import Run
from loadgen.predict import Measured, acceptance, held_beyond, predicted, step_at, step_curve, step_ms
from paceline import theory
from paceline.wire import Counters, StepTable, VerifierStatus

CURVE = {1: 25.0, 5: 50.0, 9: 75.0}


def run(accepted: int, rejected: int, step: float | None = None, source: str = "edge", **values: object) -> Run:
    """`step`: mean milliseconds of eight of its ten steps. 40 drafts came for them, and 30 were verified."""
    timed = {} if step is None else {"timed_steps": 8, "step_ms": 8 * step}
    counters = Counters(
        drafted={source: 40}, verified_by={source: 30}, accepted={source: accepted}, rejected=rejected, steps=10,
        step_tokens=50, **timed,
    )  # fmt: skip
    whole = {"tokens": (), "text": "", "kinds": "", "chunks": (), "finish": "length", "prompt_tokens": 1, **values}
    return Run(counters=counters, **whole)  # type: ignore[arg-type]


def test_acceptance_is_of_what_was_judged() -> None:
    assert acceptance([run(30, 10), run(50, 10)]) == 0.8
    assert acceptance([run(0, 0)]) is None


def test_the_step_curve_is_linear_between_its_points_and_goes_on_beyond() -> None:
    assert [step_at(CURVE, n) for n in (0.5, 1, 3, 9, 13)] == [25, 25, 37.5, 75, 100]
    assert step_at({1: 20.0, 4: 18.0}, 9) == 18
    assert step_at({}, 1) is None


def test_the_learned_curve_wins_over_single_sizes_and_counts_the_context() -> None:
    values = {"verifier": "v", "model": "m", "fingerprint": "", "engine": "llama", "simulated": False, "state": "ready",
              "context": 1, "cells_total": 1, "cells_used": 0, "sessions": 0, "busy": 0, "queue": 0, "steps": 0,
              "step_tokens": 0, "step_ms": {1: 30.0}}  # fmt: skip
    assert step_curve(VerifierStatus(**values), 100) == {1: 30}  # type: ignore[arg-type]
    curve = StepTable(tokens=(1, 8), ms=(25.0, 60.0), context_ms=0.01)
    assert step_curve(VerifierStatus(**values, curve=curve), 100) == {1: 26, 8: 61}  # type: ignore[arg-type]


def test_the_step_time_is_the_mean_of_the_steps_that_read_no_prompt() -> None:
    assert step_ms([run(3, 1, 20.0), run(3, 1, 40.0), run(3, 1)]) == 30
    assert step_ms([run(3, 1)]) is None


def test_predictions_are_the_closed_forms_at_the_measured_values() -> None:
    """Each mode's at its own; a synchronous block of 5 that takes 1.25 steps waits for one round trip."""
    modes = {
        "cloud": [run(0, 0, 25)], "sync": [run(18, 6, 50, draft_ms=15)], "deep": [run(40, 10, 45, draft_ms=16)],
    }  # fmt: skip
    got = predicted(modes, Measured(100, sync_block=5))
    assert got["cloud"] == 25
    assert got["sync"] == pytest.approx((4 * 15 + 80 + 50) / theory.expected_tokens(0.75, 3))
    assert got["deep"] == pytest.approx(theory.deep(0.8, 16, 100, 45))
    assert got["paceline"] == 25
    alone = predicted({"sync": modes["sync"]}, Measured(100, sync_block=3))
    assert alone["sync"] == pytest.approx((4 * 15 + 100 + 50) / theory.expected_tokens(0.75, 3))


def test_the_way_to_a_step_is_part_of_every_turn() -> None:
    names = {"cloud": "edge", "sync": "edge", "deep": "edge", "deep_alt": "edge", "colocated": "hosted"}
    fast, slow = ({name: [run(40, 10, ms, source, draft_ms=16)] for name, source in names.items()} for ms in (50, 53))
    with_way = predicted(fast, Measured(100, 3, server_draft_ms=10, sync_block=4))
    assert with_way == pytest.approx(predicted(slow, Measured(100, server_draft_ms=10, sync_block=4)))
    assert with_way.keys() == {*names, "paceline"}
    assert with_way["cloud"] == 53


def test_what_alternatives_bring_is_what_comes_sooner_than_a_draft_after_the_verdict() -> None:
    # a mismatch at 100, three tokens of a held branch by 150 (its own end included), a fresh block at 260; one at 400
    chunks = ((100.0, 3), (130.0, 2), (150.0, 1), (260.0, 4), (400.0, 1), (520.0, 2))
    one = run(9, 2, chunks=chunks, kinds="eececceeebcee")
    assert held_beyond([one], 110) == 1.5
    assert held_beyond([one, one], 20) == 1 / 3
    assert held_beyond([run(9, 0, chunks=((10.0, 2),), kinds="eb")], 110) == 0


def test_alternatives_and_the_hosted_drafter_enter_with_what_was_measured_of_them() -> None:
    chunks = ((10.0, 1), (20.0, 2), (90.0, 3), (200.0, 1))
    modes = {"cloud": [run(0, 0, 80)], "deep": [run(80, 20, 90, draft_ms=10)]}
    modes["deep_alt"] = [run(40, 10, 100, chunks=chunks, kinds="eeceebe")]
    modes["colocated"] = [run(30, 10, 95, "hosted")]
    got = predicted(modes, Measured(100, server_draft_ms=4))
    assert got["deep_alt"] == pytest.approx(theory.deep_with_alternatives(0.8, 10, 100, 100, hit=3, branch=0))
    assert got["colocated"] == pytest.approx((4 * 4 + 95) / theory.expected_tokens(0.75, 3))
    assert got["paceline"] == min(got.values())


def test_what_was_not_measured_is_left_out() -> None:
    assert predicted({}, Measured(0, sync_block=4)) == {}
    assert predicted({"deep": [run(0, 0, 9)], "cloud": [run(0, 0, 25)]}, Measured(0)) == {"cloud": 25}
    assert predicted({"sync": [run(9, 1, 9)], "deep": [run(9, 1, 9)]}, Measured(0, sync_block=4)) == {}
