"""What the line adds: from a draft block's arrival at the gateway to the start of the step that verifies it."""

from __future__ import annotations

from collections import deque
from statistics import median

from paceline import telemetry
from paceline.telemetry import Metrics
from services.batcher.live import Echo

SAMPLES = 256


class Overhead:
    """Only blocks that found their verifier idle count: the rest waited for somebody else's step."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._samples: deque[float] = deque(maxlen=SAMPLES)

    def note(self, echo: Echo | None, started_unix: float) -> None:
        if echo is None or not echo.idle_since_unix or not started_unix:
            return
        seconds = max(0.0, started_unix - echo.idle_since_unix)
        self._samples.append(seconds * 1000)
        self._metrics.observe(telemetry.OVERHEAD_SECONDS, seconds)

    def p50_ms(self) -> float:
        return round(median(self._samples), 3) if self._samples else 0.0
