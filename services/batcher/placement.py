"""Where each session's KV is: choose a verifier, move when it is away, tell the old one, write it down."""

from __future__ import annotations

import asyncio

import structlog

from paceline import subjects
from paceline.errors import BusError, Conflict, NotFound, StaleEpoch, StoreError
from paceline.service import Service
from paceline.wire import VerifierRelease
from services.batcher.directory import Directory
from services.batcher.live import Live, Table

log = structlog.get_logger("batcher")

RETRY_S = 0.5


class Placement:
    def __init__(self, service: Service, table: Table, directory: Directory) -> None:
        self._service = service
        self._table = table
        self._directory = directory
        self._unwritten: dict[str, Live] = {}
        self._wake = asyncio.Event()

    def settle(self, now: float) -> None:
        """Place who has no verifier that serves."""
        for live in self._table:
            self.place(live, now)

    def place(self, live: Live, now: float) -> None:
        """Leave the session where it is if it is served there; else find another verifier, if there is one."""
        if live.session.finish is not None:
            return
        if live.verifier is not None and self._directory.serves(live.verifier, now):
            live.stranded_since = None
            return
        target = self._directory.choose(self._table.load(), now)
        if target is None:
            live.stranded_since = live.stranded_since if live.stranded_since is not None else now
            return
        live.stranded_since = None
        self.move(live, target, fed=0)

    def move(self, live: Live, verifier: str, fed: int) -> None:
        """From the next step on. `fed`: tokens that the verifier is said to hold; it says so if it does not. While a
        step is under way at the old verifier, its KV is let go when that is over."""
        old = live.verifier
        if old is not None and old != verifier:
            log.info("session moves", session=live.id, leaving=old, target=verifier, fed=fed)
            if live.ticket is None:
                self.release(live, old)
        self._table.assign(live, verifier)
        live.fed = min(fed, live.session.tip)
        self._unwritten[live.id] = live
        self._wake.set()

    def release(self, live: Live, verifier: str) -> None:
        """The verifier may drop the session's KV."""
        message = VerifierRelease(session=live.id, epoch=live.session.epoch)
        self._service.spawn(self._publish(subjects.RELEASE.at(verifier=verifier), message), "release")

    async def _publish(self, subject: str, message: VerifierRelease) -> None:
        """Lost, it only costs cells until the session's turn of eviction comes."""
        try:
            await self._service.bus.publish(subject, message)
        except BusError as error:
            log.debug("release not published", subject=subject, error=str(error))

    async def run(self) -> None:
        """Write placements down: who takes the session over finds its KV there."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._unwritten:
                session, live = next(iter(self._unwritten.items()))
                if await self._written(live):
                    self._unwritten.pop(session, None)
                else:
                    await asyncio.sleep(RETRY_S)

    async def _written(self, live: Live) -> bool:
        if live.verifier is None or live.session.finish is not None:
            return True
        try:
            await self._service.sessions.place(live.id, live.session.epoch, live.verifier)
        except StoreError:
            return False
        except (StaleEpoch, NotFound, Conflict) as error:
            log.debug("placement not written", session=live.id, error=str(error))
        return True
