"""What this batcher tells of itself once a second: BatcherStatus for the policy and people, gauges for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from paceline import telemetry, wire
from paceline.telemetry import Metrics
from services.batcher.live import Live

FIELDS = ("drafted", "accepted", "filled", "stale", "committed")


class Facts(Protocol):
    """Where the numbers come from."""

    @property
    def partition_count(self) -> int: ...

    def load(self) -> dict[str, int]: ...

    def waiting(self) -> int: ...

    def overhead_ms_p50(self) -> float: ...


def worked(live: Live) -> Counter[str]:
    """What this batcher did for the session, earlier owners' work left out."""
    now, before = live.session.counters, live.base
    return Counter(
        drafted=sum(now.drafted.values()) - sum(before.drafted.values()),
        accepted=sum(now.accepted.values()) - sum(before.accepted.values()),
        filled=now.filled - before.filled,
        stale=now.stale - before.stale,
        committed=max(0, live.session.tip - live.first_tip),
    )


class Reporting:
    def __init__(self, instance: str, model: str, metrics: Metrics, facts: Facts, unix: Callable[[], float]) -> None:
        self._instance = instance
        self._model = model
        self._metrics = metrics
        self._facts = facts
        self._unix = unix
        self._past: Counter[str] = Counter()

    def ended(self, live: Live) -> None:
        """The session leaves this batcher, by whatever way."""
        self._past.update(worked(live))

    def finished(self, finish: str | None) -> None:
        self._metrics.add(telemetry.FINISHES, finish=finish or telemetry.OTHER)

    def status(self, sessions: Iterable[Live]) -> wire.BatcherStatus:
        lives = list(sessions)
        total = sum((worked(live) for live in lives), Counter(self._past))
        parked, waiting = sum(live.session.parked for live in lives), self._facts.waiting()
        self._gauges(len(lives), parked, waiting)
        return wire.BatcherStatus(
            batcher=self._instance,
            model=self._model,
            sessions=len(lives),
            parked=parked,
            waiting=waiting,
            partitions=self._facts.partition_count,
            **{name: total[name] for name in FIELDS},
            placements=self._facts.load(),
            overhead_ms_p50=self._facts.overhead_ms_p50(),
            t_sent=self._unix(),
        )

    def _gauges(self, live: int, parked: int, waiting: int) -> None:
        for state, value in (("live", live), ("parked", parked), ("waiting", waiting)):
            self._metrics.set(telemetry.SESSIONS, value, state=state)
        self._metrics.set(telemetry.PARTITIONS, self._facts.partition_count)
