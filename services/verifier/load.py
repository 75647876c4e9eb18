"""How busy the verifier is, and whether its step still moves. Pure, times in seconds."""

from __future__ import annotations


class Load:
    """started and ended enclose each step; `share` is asked about once a second."""

    def __init__(self, now: float) -> None:
        self.steps = 0
        self.step_tokens = 0
        self._since = now
        self._spent = 0.0
        self._running: float | None = None

    def started(self, now: float) -> None:
        self._running = now

    def ended(self, tokens: int, now: float) -> None:
        if self._running is not None:
            self._spent += now - max(self._running, self._since)
        self._running = None
        self.steps += 1
        self.step_tokens += tokens

    def running_for(self, now: float) -> float:
        """Seconds that the step of this moment has taken; 0 when there is none."""
        return 0.0 if self._running is None else now - self._running

    def share(self, now: float) -> float:
        """Part of the time since the last call that went into steps, 0 to 1."""
        spent = self._spent + (0.0 if self._running is None else now - max(self._running, self._since))
        elapsed = now - self._since
        self._since, self._spent = now, 0.0
        return min(1.0, spent / elapsed) if elapsed > 0 else 0.0
