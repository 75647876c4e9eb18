"""Counters of what verify steps did to drafts: rates follow from them, each place of a chain over its own rounds."""

from __future__ import annotations

import time
from typing import cast

import pytest

from paceline.session import Commit, Plan
from paceline.telemetry import (
    ACCEPTED_PLACES,
    ACCEPTED_TOKENS,
    COMMITTED_TOKENS,
    REJECTED_TOKENS,
    VERIFIED_PLACES,
    VERIFIED_TOKENS,
    Metrics,
)
from services.batcher.landing import Landing, Outlet
from services.batcher.overhead import Overhead


def test_rates_and_places_of_four_rounds() -> None:
    """(drafted, accepted, emitted): (4, 4, 5), (4, 1, 2), (4, 0, 1), and (2, 2, 2), whose second accepted one ends the
    text: nothing comes behind it."""
    metrics = Metrics()
    landing = Landing(cast(Outlet, None), metrics, Overhead(metrics), time.monotonic)
    rounds = [(4, "eeeeb"), (4, "ec"), (4, "c"), (2, "ee")]
    for drafted, kinds in rounds:
        claims = ((("edge", 0.9),),) * drafted
        landing._count(Plan(7, tuple(range(drafted)), claims), Commit(7, tuple(range(len(kinds))), kinds))
    verified = metrics.value(VERIFIED_TOKENS, source="edge")
    accepted = metrics.value(ACCEPTED_TOKENS, source="edge")
    assert (verified, accepted, metrics.value(REJECTED_TOKENS)) == (14, 7, 2)
    assert accepted / verified == 0.5
    emitted = sum(metrics.value(COMMITTED_TOKENS, kind=kind) for kind in ("accepted", "corrected", "bonus", "filled"))
    assert emitted / len(rounds) == 2.5
    places = [
        metrics.value(ACCEPTED_PLACES, place=str(place)) / metrics.value(VERIFIED_PLACES, place=str(place))
        for place in range(1, 5)
    ]
    assert places == pytest.approx([0.75, 0.5, 1 / 3, 1 / 3])
    assert metrics.value(VERIFIED_PLACES, place="5") == 0


def test_places_behind_the_last_named_one_are_counted_together() -> None:
    metrics = Metrics()
    landing = Landing(cast(Outlet, None), metrics, Overhead(metrics), time.monotonic)
    landing._count(Plan(7, tuple(range(20)), ((("lookup", 0.9),),) * 20), Commit(7, tuple(range(21)), "l" * 20 + "b"))
    assert metrics.value(ACCEPTED_PLACES, place="16") == 1
    assert metrics.value(ACCEPTED_PLACES, place="other") == 4
