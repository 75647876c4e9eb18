"""Speed of one stream, in tokens: a chunk may hold several, so the gap between chunks is measured by its own name."""

from __future__ import annotations

from collections.abc import Callable

from paceline import telemetry


class Meter:
    """`tokens` for every chunk that goes out, `end` once."""

    def __init__(self, metrics: telemetry.Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started = clock()
        self._first: float | None = None
        self._first_count = 0
        self._last = 0.0
        self._count = 0

    def tokens(self, count: int) -> None:
        if not count:
            return
        now = self._clock()
        if self._first is None:
            self._first, self._first_count = now, count
            self._metrics.observe(telemetry.FIRST_TOKEN_SECONDS, now - self._started)
        else:
            self._metrics.observe(telemetry.CHUNK_GAP_SECONDS, now - self._last)
        self._last = now
        self._count += count

    def end(self) -> None:
        """The tokens of the first chunk came at no measured interval; the others share the time after it."""
        later = self._count - self._first_count
        if self._first is not None and later:
            self._metrics.observe(telemetry.TOKEN_SECONDS, (self._last - self._first) / later)
