"""The sessions that this gateway reads, and what it says to their batchers for their clients.

Presence is soft state: for every client that was heard lately it is said every PRESENCE_S, and at once when another
batcher takes a session over, which begins with it parked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from paceline import subjects, telemetry
from paceline.bus import Subscription
from paceline.errors import BusError
from paceline.service import Service
from paceline.wire import Message, Presence, SessionClose, SessionOpened
from services.gateway.follower import Follower

log = structlog.get_logger(__name__)

PRESENCE_S = 0.5


@dataclass
class Live:
    """One session and its reader. `present` says whether its client was heard lately."""

    session: str
    follower: Follower
    subscription: Subscription
    present: Callable[[], bool]
    opened: SessionOpened | None = None
    over: bool = False
    closing: bool = False

    @property
    def connection(self) -> int:
        return 0 if self.opened is None else self.opened.connection


class Speaker:
    """Holds every session by (id, connection) and speaks for its client."""

    def __init__(self, service: Service, model: str) -> None:
        self._service = service
        self._model = model
        self._live: dict[tuple[str, int], Live] = {}

    def __len__(self) -> int:
        return len(self._live)

    def subject(self, session: str) -> str:
        return subjects.SESSION.at(model=self._model, partition=subjects.partition_of(session))

    def add(self, live: Live) -> None:
        self._live[(live.session, live.connection)] = live
        self._count()
        self.announce(live.session)

    def remove(self, live: Live) -> None:
        self._live.pop((live.session, live.connection), None)
        self._count()

    def announce(self, session: str) -> None:
        """Presence of `session`, now."""
        for live in [live for live in self._live.values() if live.session == session]:
            self._service.spawn(self._speak_for(live), f"presence {session}")

    async def run(self) -> None:
        while True:
            for live in list(self._live.values()):
                await self._speak_for(live)
            await asyncio.sleep(PRESENCE_S)

    async def close(self, live: Live) -> None:
        """One SessionClose."""
        await self._publish(live.session, SessionClose(session=live.session, connection=live.connection))

    async def _speak_for(self, live: Live) -> None:
        if live.closing or not live.present():
            return
        now = time.time()
        await self._publish(live.session, Presence(session=live.session, connection=live.connection, t_sent=now))

    async def _publish(self, session: str, message: Message) -> None:
        """What is said again anyway: a bus that is away loses it."""
        try:
            await self._service.bus.publish(self.subject(session), message)
        except BusError as error:
            log.debug("not sent", session=session, kind=type(message).__name__, error=str(error))

    def _count(self) -> None:
        self._service.metrics.set(telemetry.SESSIONS, len(self._live), state="live")
