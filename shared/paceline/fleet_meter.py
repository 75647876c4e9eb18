"""Figures of a simulated run. Pure; times in seconds of virtual time, latencies given out in milliseconds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Link:
    """round_trip_s without jitter; each message takes half of it and an exponentially distributed extra of `jitter_s`
    on average. Messages of one session arrive in order."""

    round_trip_s: float
    jitter_s: float = 0.0


class Way:
    """One direction of one session's link."""

    def __init__(self, link: Link, chance: random.Random) -> None:
        self._link, self._chance = link, chance
        self._last = 0.0

    def arrival(self, now: float) -> float:
        """When a message sent `now` is there."""
        jitter = self._chance.expovariate(1 / self._link.jitter_s) if self._link.jitter_s else 0.0
        self._last = max(self._last, now + self._link.round_trip_s / 2 + jitter)
        return self._last


@dataclass
class Meter:
    """Chunks as they reach clients. Latency counts per token: those that come together share the time since the chunk
    before. What comes first in a session (or with it) is no inter-token latency."""

    came: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    _last: dict[int, float] = field(default_factory=dict)

    def chunk(self, session: int, now: float, tokens: int) -> None:
        before = self._last.get(session)
        self._last[session] = now
        if not tokens:
            return
        self.came.append(now)
        self.gap.append(-1.0 if before is None else (now - before) / tokens)
        self.count.append(tokens)

    def latencies_ms(self, start: float, end: float) -> tuple[float, float, float]:
        """Mean, median and 99th percentile per token of what came in [start, end]; nan where nothing did."""
        came, gap, count = np.array(self.came), np.array(self.gap), np.array(self.count)
        chosen = (came >= start) & (came <= end) & (gap >= 0) if len(came) else np.zeros(0, bool)
        if not chosen.any():
            return (float("nan"),) * 3
        each = 1e3 * np.repeat(gap[chosen], count[chosen])
        p50, p99 = np.percentile(each, [50, 99])
        return float(each.mean()), float(p50), float(p99)
