"""A draft engine that counts and times what it does, and remembers what is wrong with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline import telemetry
from paceline.engine import DraftEngine, Guess, Rule, WrappedDraft
from paceline.errors import EngineError, NoRoom

_SMOOTHING = 0.1


class MeteredDraft(WrappedDraft):
    """`trouble`: what the last call said if it failed, else nothing. No room for one session is no trouble. `drafted`:
    guesses so far, those of branches with them. `draft_ms`: one more token of one path while nobody else is served,
    smoothed; 0 before the first."""

    def __init__(
        self, engine: DraftEngine, metrics: telemetry.Metrics, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(engine)
        self._metrics = metrics
        self._clock = clock
        self._running = 0
        self._calls = 0
        self._lengths: dict[str, int] = {}
        """Length of each session's main path at its last guess."""
        self.drafted = 0
        self.draft_ms = 0.0
        self.trouble = ""

    async def guesses(self, session: str, paths: Sequence[Sequence[int]], rule: Rule) -> list[Guess | None]:
        started, alone = self._clock(), self._running == 0
        self._running += 1
        self._calls += 1
        call = self._calls
        try:
            guesses = await self._engine.guesses(session, paths, rule)
        except NoRoom:
            self._metrics.add(telemetry.DRAFTER_FAILURES, reason="no_room")
            raise
        except EngineError as error:
            self.trouble = str(error)
            self._metrics.add(telemetry.DRAFTER_FAILURES, reason="engine")
            raise
        finally:
            self._running -= 1
        took = self._clock() - started
        self.trouble = ""
        count = sum(guess is not None for guess in guesses)
        self.drafted += count
        for _ in range(count):
            self._metrics.observe(telemetry.DRAFT_SECONDS, took / count)
        steady = self._lengths.get(session) == len(paths[0]) - 1
        if steady and alone and call == self._calls and len(paths) == 1:
            self._learn(1000 * took)
        self._lengths[session] = len(paths[0])
        return guesses

    def release(self, session: str) -> None:
        self._lengths.pop(session, None)
        super().release(session)

    def _learn(self, ms: float) -> None:
        self.draft_ms += (_SMOOTHING if self.draft_ms else 1.0) * (ms - self.draft_ms)
