"""Virtual time: events in order of their moments, in seconds; those of one moment in the order they were asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, moment: float, event: Callable[[], None]) -> None:
        """`event` at `moment`, at once where that is past."""
        heapq.heappush(self._queue, (max(moment, self.now), next(self._order), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now + seconds, event)

    def run(self, done: Callable[[], bool]) -> None:
        """Until `done`, or nothing is left to happen."""
        while self._queue and not done():
            self.now, _, event = heapq.heappop(self._queue)
            event()


class Alarm:
    """Does something at the earliest of the moments that it was set to, once."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock, self._do = clock, ring
        self._at: float | None = None

    def set(self, moment: float) -> None:
        if self._at is None or moment < self._at:
            self._at = moment
            self._clock.at(moment, self._ring)

    def _ring(self) -> None:
        if self._at is not None and self._clock.now >= self._at:
            self._at = None
            self._do()
