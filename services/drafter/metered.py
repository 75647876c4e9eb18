"""A draft engine that counts what it does, and remembers what is wrong with it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline import telemetry
from paceline.engine import DraftEngine, Guess, Rule
from paceline.errors import EngineError, NoRoom


class MeteredDraft:
    """`trouble`: what the last call said if it failed, else nothing. No room for one session is no trouble."""

    def __init__(self, engine: DraftEngine, metrics: telemetry.Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self.drafted = 0
        self.trouble = ""

    @property
    def context(self) -> int:
        return self._engine.context

    @property
    def max_sessions(self) -> int:
        return self._engine.max_sessions

    async def guess(self, session: str, path: Sequence[int], rule: Rule) -> Guess:
        started = time.perf_counter()
        try:
            guess = await self._engine.guess(session, path, rule)
        except NoRoom:
            self._metrics.add(telemetry.DRAFTER_FAILURES, reason="no_room")
            raise
        except EngineError as error:
            self.trouble = str(error)
            self._metrics.add(telemetry.DRAFTER_FAILURES, reason="engine")
            raise
        self.trouble = ""
        self.drafted += 1
        self._metrics.observe(telemetry.DRAFT_SECONDS, time.perf_counter() - started)
        return guess

    def release(self, session: str) -> None:
        self._engine.release(session)

    async def close(self) -> None:
        await self._engine.close()
