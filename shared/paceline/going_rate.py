"""What a verifier's time earns, idle times counted. Pure; seconds of a monotonic clock in, tokens per millisecond out.

A chain that is verified node by node while its verifier would else be idle costs nobody anything; one that takes the
time of others costs what they would have committed. The rate that is really going tells the two apart.
"""

from __future__ import annotations

import math

TIME_CONSTANT_S = 2.0
"""Of the weight of what was committed before."""
KNOWN_AFTER_S = 0.25
PAUSE_S = 2.0
"""Without a step for so long nobody wanted one: what was measured before counts no more."""


class GoingRate:
    """`note` after every step, with the tokens that it committed over all sessions."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._noted: float | None = None

    def note(self, now: float, tokens: int, reading_s: float = 0.0) -> None:
        """reading_s: what of the time since the step before went into reading prompts; nobody could decode then."""
        if self._noted is None or now - self._noted > PAUSE_S:
            self._tokens = self._seconds = 0.0  # what this step committed belongs to a time that nobody measured
        else:
            passed = max(0.0, now - self._noted - reading_s)
            keep = math.exp(-passed / TIME_CONSTANT_S)
            self._tokens = keep * self._tokens + tokens
            self._seconds = keep * self._seconds + passed
        self._noted = now

    def value(self, now: float) -> float | None:
        """Committed tokens per millisecond; None before that is known."""
        if self._noted is None or now - self._noted > PAUSE_S or self._seconds < KNOWN_AFTER_S:
            return None
        return self._tokens / (1000 * self._seconds)
