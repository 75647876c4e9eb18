"""Which hosted sessions are over although nobody told this drafter.

The bus delivers at most once, and a stop may come before the drafter listens for it (the opening waited in a queue).
The store knows: a session that it does not name as unfinished is over, for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping

import structlog

from paceline.errors import StoreError
from paceline.store import SessionStore
from paceline.subjects import partition_of
from services.drafter.hosted import HostedSession

log = structlog.get_logger("drafter")

LOOK_S = 0.5
"""A session is looked up at its opening, and whenever it has been silent this long."""
IDLE_S = 60.0
"""A session whose verdicts stopped coming is given up, over or not: its batcher asks again."""


class Lookout:
    """Stops those of `sessions` that are over. One question to the store for all of a partition."""

    def __init__(self, store: SessionStore, model: str, sessions: Mapping[str, HostedSession]) -> None:
        self._store, self._model, self._sessions = store, model, sessions
        self._opened = asyncio.Event()

    def opened(self) -> None:
        """There is a new session: look at once."""
        self._opened.set()

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._opened.wait()
            self._opened.clear()
            try:
                await self.look()
            except StoreError as error:
                log.debug("sessions not looked up", error=str(error))

    async def look(self) -> None:
        """Raises StoreError; those that were not looked up are due the next time."""
        now = time.monotonic()
        due: dict[int, list[HostedSession]] = {}
        for session in self._sessions.values():
            if now - session.heard_at >= IDLE_S:
                log.info("no verdicts, given up", session=session.id, after_s=IDLE_S)
                session.stop()
            elif session.known_live_at is None or now - max(session.heard_at, session.known_live_at) >= LOOK_S:
                due.setdefault(partition_of(session.id), []).append(session)
        for partition, group in due.items():
            await self._look_up(partition, group)

    async def _look_up(self, partition: int, group: list[HostedSession]) -> None:
        live = set(await self._store.live(self._model, partition))
        now = time.monotonic()
        for session in group:
            session.known_live_at = now
            if session.id not in live:
                log.debug("over without a word", session=session.id)
                session.stop()
