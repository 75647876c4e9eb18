"""When the next batch of a verifier may be sent, and what its answers teach."""

from __future__ import annotations

import pytest

from services.batcher.lane import FIRST_TIMEOUT_S, LONGEST_TIMEOUT_S, SHORTEST_TIMEOUT_S, Flight, Lane


def sent(lane: Lane, at: float, predicted_s: float | None = 0.1) -> Flight:
    flight = Flight(f"b{at}", [], at, predicted_s)
    lane.departed(flight)
    return flight


def test_a_free_verifier_gets_its_batch_at_once_and_one_in_trouble_after_a_pause() -> None:
    lane = Lane("v")
    assert lane.next_batch_at() == 0.0
    lane.pause_until = 5.0
    assert lane.next_batch_at() == 5.0


def test_the_second_batch_arrives_at_the_end_of_the_running_step() -> None:
    lane = Lane("v")
    lane.landed(sent(lane, 0.0), step_s=0.1, now=0.104)
    assert lane.hop_s == pytest.approx(0.002)
    running = sent(lane, 1.0)
    assert lane.next_batch_at() == pytest.approx(1.1), "it starts a hop after it was sent, and so will the second"
    behind = sent(lane, 1.1)
    assert (running.behind, behind.behind) == (False, True)
    assert lane.next_batch_at() is None, "two are enough"
    lane.landed(running, step_s=0.1, now=1.104)
    assert not behind.behind
    assert behind.sent == pytest.approx(1.1), "as if it had been sent to arrive at that end"
    assert lane.next_batch_at() == pytest.approx(1.2)


def test_what_nobody_can_predict_is_waited_for() -> None:
    lane = Lane("v")
    flight = sent(lane, 0.0)
    assert lane.next_batch_at() is None, "the bus is not known yet"
    lane.landed(flight, step_s=0.1, now=0.104)
    sent(lane, 1.0, predicted_s=None)
    assert lane.next_batch_at() is None


def test_one_that_waited_teaches_nothing_of_the_bus() -> None:
    lane = Lane("v")
    lane.landed(sent(lane, 0.0), step_s=0.1, now=0.104)
    running, behind = sent(lane, 1.0), sent(lane, 1.05)
    lane.landed(running, step_s=0.1, now=1.104)
    lane.landed(behind, step_s=0.1, now=1.3)
    assert lane.hop_s == pytest.approx(0.002)
    assert lane.slowest_s == pytest.approx(0.104, rel=0.02), "nor does its wait count as a slow step"


def test_when_the_running_one_is_lost_the_other_one_runs() -> None:
    lane = Lane("v")
    lane.landed(sent(lane, 0.0), step_s=0.1, now=0.104)
    running, behind = sent(lane, 1.0), sent(lane, 1.05)
    lane.ended(running, 2.0)
    assert lane.flights == [behind]
    assert not behind.behind


def test_timeouts_follow_the_slowest_step_and_double_in_a_row() -> None:
    lane = Lane("v")
    assert lane.timeout_s() == FIRST_TIMEOUT_S
    lane.landed(sent(lane, 0.0), step_s=0.01, now=0.012)
    assert lane.timeout_s() == SHORTEST_TIMEOUT_S
    lane.landed(sent(lane, 1.0), step_s=2.0, now=3.0)
    assert lane.timeout_s() == pytest.approx(40.0)
    lane.patience = 16
    assert lane.timeout_s() == LONGEST_TIMEOUT_S
    lane.landed(sent(lane, 4.0), step_s=0.01, now=4.012)
    assert lane.patience == 1
