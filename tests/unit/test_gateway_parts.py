"""What the gateway knows of the others, what an edge is told, and how speed is measured."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from paceline.telemetry import CHUNK_GAP_SECONDS, FIRST_TOKEN_SECONDS, TOKEN_SECONDS, Metrics
from paceline.wire import BatcherStatus, Counters, Timing, Verdict, VerifierStatus
from services.gateway.edge_frames import EdgeView
from services.gateway.fleet import FRESH_S, Fleet
from services.gateway.meter import Meter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def verifier(state: str, name: str = "v") -> VerifierStatus:
    return VerifierStatus(
        verifier=name, model="m", fingerprint="", engine="e", simulated=True, state=state, context=1, cells_total=1,  # type: ignore[arg-type]
        cells_used=0, sessions=0, busy=0, queue=0, steps=0, step_tokens=0,
    )  # fmt: skip


BATCHER = BatcherStatus(
    batcher="b", model="m", sessions=0, parked=0, waiting=0, partitions=1, committed=0, drafted=0, accepted=0, filled=0,
    stale=0,
)  # fmt: skip


def test_everything_is_missing_until_it_is_heard_of() -> None:
    clock = Clock()
    fleet = Fleet(clock)
    assert fleet.missing().keys() == {"batcher", "verifier"}
    fleet.heard(BATCHER)
    assert fleet.missing().keys() == {"verifier"}
    fleet.heard(verifier("ready"))
    assert fleet.missing() == {}
    clock.now += FRESH_S + 0.1
    assert fleet.missing().keys() == {"batcher", "verifier"}


@pytest.mark.parametrize(
    ("state", "serves", "hopeless"),
    [("ready", True, None), ("loading", False, None), ("draining", False, None), ("failed", False, "verifier"),
     ("stopped", False, "verifier")],
)  # fmt: skip
def test_which_verifiers_can_answer(state: str, serves: bool, hopeless: str | None) -> None:
    fleet = Fleet(Clock())
    fleet.heard(BATCHER)
    fleet.heard(verifier(state))
    assert ("verifier" not in fleet.missing()) is serves
    assert fleet.hopeless() == hopeless
    fleet.heard(verifier("ready", "other"))
    assert fleet.missing() == {}


def test_names_that_are_gone_are_forgotten() -> None:
    clock = Clock()
    fleet = Fleet(clock)
    for number in range(100):
        clock.now += FRESH_S
        fleet.heard(verifier("ready", f"v{number}"))
    assert len(fleet._verifiers) < 15


def verdict(**fields: Any) -> Verdict:
    return Verdict(session="s", epoch=1, **{"at": 5, **fields})


def test_an_edge_sees_only_its_own_share() -> None:
    shown = EdgeView().see(
        verdict(
            tokens=(1,),
            kinds="e",
            counters=Counters(steps=3),
            seen={"edge": (1, 4), "hosted": (9, 9)},
            gap=("hosted", "edge"),
        )
    )
    assert shown is not None
    assert (shown.counters, shown.seen, shown.gap) == (None, {"edge": (1, 4)}, ("edge",))


def test_counters_come_with_the_finish() -> None:
    shown = EdgeView().see(verdict(finish="stop", counters=Counters(steps=3)))
    assert shown is not None
    assert shown.counters == Counters(steps=3)


def test_a_verdict_without_news_is_not_sent() -> None:
    view = EdgeView()
    first = verdict(seen={"edge": (1, 4)})
    assert view.see(first) is not None
    assert view.see(first) is None
    assert view.see(replace(first, seen={"edge": (1, 4), "hosted": (1, 7)}, gap=("hosted",))) is None
    assert view.see(replace(first, seen={"edge": (1, 5)})) is not None


@pytest.mark.parametrize(
    "news",
    [{"price": 0.5}, {"timing": Timing(t_sent=1, wait_ms=1, step_ms=1)}, {"window_cap": 0}, {"fed": 3},
     {"gap": ("edge",)}, {"epoch": 2}, {"finish": "stop"}, {"tokens": (1,)}],
)  # fmt: skip
def test_every_kind_of_news_is_sent(news: dict[str, Any]) -> None:
    view = EdgeView()
    view.see(verdict(seen={"edge": (1, 4)}))
    assert view.see(replace(verdict(seen={"edge": (1, 4)}), **news)) is not None


def test_a_gap_names_what_was_seen_even_if_it_did_not_move() -> None:
    view = EdgeView()
    view.see(verdict(seen={"edge": (1, 4)}))
    shown = view.see(verdict(seen={"edge": (1, 4)}, gap=("edge",)))
    assert shown is not None
    assert shown.seen == {"edge": (1, 4)}


def test_time_per_token_counts_tokens_and_not_chunks() -> None:
    clock, metrics = Clock(), Metrics()
    meter = Meter(metrics, clock)
    clock.now += 0.5
    meter.tokens(1)
    for _ in range(9):
        clock.now += 0.2
        meter.tokens(4)
    meter.tokens(0)
    meter.end()

    def total(name: str) -> float:
        return metrics.registry.get_sample_value(f"paceline_{name}_sum") or 0.0

    assert total("first_token_seconds") == pytest.approx(0.5)
    assert total("token_seconds") == pytest.approx(0.05)
    assert total("chunk_gap_seconds") == pytest.approx(1.8)
    counts = [metrics.value(metric) for metric in (FIRST_TOKEN_SECONDS, TOKEN_SECONDS, CHUNK_GAP_SECONDS)]
    assert counts == [1, 1, 9]
