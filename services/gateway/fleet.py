"""What the gateway knows of the others: which components have been heard of lately. Pure, the clock is the caller's."""

from __future__ import annotations

from collections.abc import Callable

from paceline.wire import BatcherStatus, VerifierStatus

FRESH_S = 5.0
"""Statuses come once a second; an older one counts for nothing."""


class Fleet:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._verifiers: dict[str, tuple[float, VerifierStatus]] = {}
        self._batchers: dict[str, float] = {}

    def heard(self, status: VerifierStatus | BatcherStatus) -> None:
        if isinstance(status, VerifierStatus):
            self._verifiers[status.verifier] = (self._clock(), status)
        else:
            self._batchers[status.batcher] = self._clock()
        self._forget()

    def missing(self) -> dict[str, str]:
        """Component to what is wrong with it, for those without which no answer can be made now."""
        since = self._clock() - FRESH_S
        missing = {}
        if not any(heard >= since for heard in self._batchers.values()):
            missing["batcher"] = f"no batcher was heard of for {FRESH_S:g} s"
        states = [status.state for heard, status in self._verifiers.values() if heard >= since]
        if "ready" not in states:
            missing["verifier"] = f"no verifier is ready ({', '.join(sorted(states)) or 'none was heard of'})"
        return missing

    def hopeless(self) -> str | None:
        """A component that is away altogether; a verifier that is loading or draining is there."""
        since = self._clock() - FRESH_S
        if not any(heard >= since for heard in self._batchers.values()):
            return "batcher"
        alive = ("loading", "ready", "draining")
        return None if any(h >= since and s.state in alive for h, s in self._verifiers.values()) else "verifier"

    def _forget(self) -> None:
        """Names of processes are never used twice: old ones would pile up."""
        since = self._clock() - 10 * FRESH_S
        self._verifiers = {name: item for name, item in self._verifiers.items() if item[0] >= since}
        self._batchers = {name: heard for name, heard in self._batchers.items() if heard >= since}
