"""The hosted drafter: drafts for sessions whose client has no draft model. One source among others.

Many sessions share one draft engine. Trouble here costs a session its drafts and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import structlog

from paceline import subjects, telemetry
from paceline.bus import Received, Subscription
from paceline.calibration import Calibration
from paceline.calibration_file import CalibrationFile, calibration_path
from paceline.engine_loading import load_draft
from paceline.errors import BusError, NotFound, Overloaded, Unavailable
from paceline.model_card import ModelCard
from paceline.served_card import served_card
from paceline.service import Service
from paceline.wire import Ack, DrafterStatus, HostedOpen
from services.drafter.hosted import HostedSession
from services.drafter.lookout import Lookout
from services.drafter.metered import MeteredDraft
from services.drafter.warm_up import warm_up

log = structlog.get_logger("drafter")

STATUS_S = 1.0


class Drafter:
    """`engine` is None while the model loads. calibration: of the draft model, kept in a file; None: one that begins
    anew."""

    def __init__(self, service: Service, card: ModelCard, kept: CalibrationFile | None = None) -> None:
        self._service = service
        self._card = card
        self._kept = kept
        self._calibration = Calibration() if kept is None else kept.calibration
        self._engine: MeteredDraft | None = None
        self._sessions: dict[str, HostedSession] = {}
        self._lookout = Lookout(service.sessions, card.model, self._sessions)
        self._subscription: Subscription | None = None

    async def start(self, engine: MeteredDraft) -> None:
        """The model is loaded: take sessions."""
        self._engine = engine
        self._service.spawn(self._lookout.run(), "hosted sessions that are over")
        subject = subjects.HOSTED_OPEN
        self._subscription = await self._service.bus.subscribe(
            subject.at(model=self._card.model), self._on_open, *subject.carries, queue=subject.queue
        )

    async def stop(self) -> None:
        """The batchers find another drafter, or go on without."""
        if self._subscription is not None:
            await self._subscription.close()
        for session in self._sessions.values():
            session.stop()
        if self._kept is not None:
            self._kept.close()

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def limit(self) -> int:
        """Sessions at most."""
        wanted = self._service.settings.max_sessions
        return wanted if self._engine is None else min(wanted, self._engine.max_sessions)

    async def _on_open(self, received: Received) -> None:
        request = received.message
        assert isinstance(request, HostedOpen)
        await self._open(request)
        if received.respond is not None:
            await received.respond(Ack())

    async def _open(self, request: HostedOpen) -> None:
        if self._engine is None:
            raise Unavailable(f"drafter {self._service.instance} is loading its model")
        if request.model != self._card.model:
            raise NotFound(f"drafter {self._service.instance} has {self._card.model}, not {request.model}")
        before = self._sessions.get(request.session)
        if before is None and len(self._sessions) >= self.limit:
            raise Overloaded(f"drafter {self._service.instance} has {len(self._sessions)} sessions, its limit")
        calibration = self._calibration.for_session()
        session = HostedSession(self._service, self._engine, request, self._card.context, calibration)
        try:
            await session.listen()
        except BusError as error:
            raise Unavailable(f"drafter {self._service.instance} cannot listen: {error}") from error
        if before is not None:
            before.stop(keep=True)  # asked again: the batcher is another one, or heard nothing of the first
        self._sessions[request.session] = session
        self._lookout.opened()
        self._service.spawn(self._run(request.session, session), f"hosted {request.session}")

    async def _run(self, name: str, session: HostedSession) -> None:
        try:
            await session.run()
        finally:
            if self._sessions.get(name) is session:
                del self._sessions[name]

    async def report(self) -> None:
        """The status, once a second."""
        while True:
            self._service.metrics.set(telemetry.SESSIONS, self.sessions, state="live")
            try:
                await self._service.bus.publish(subjects.DRAFTER_STATUS.at(model=self._card.model), self.status())
            except BusError as error:
                log.debug("status not sent", error=str(error))
            if self._kept is not None:
                self._kept.save()
            await asyncio.sleep(STATUS_S)

    def status(self) -> DrafterStatus:
        engine = self._engine
        state: Literal["loading", "ready", "failed"] = "loading"
        if engine is not None:
            state = "failed" if engine.trouble else "ready"
        return DrafterStatus(
            drafter=self._service.instance,
            model=self._card.model,
            engine=self._service.settings.engine,
            simulated=self._card.simulated,
            sessions=self.sessions,
            drafted=engine.drafted if engine else 0,
            state=state,
            draft_ms=round(engine.draft_ms, 3) if engine else 0.0,
            t_sent=time.time(),
            detail=engine.trouble if engine else "the model is loading",
        )


def _calibration(service: Service, card: ModelCard) -> CalibrationFile:
    return CalibrationFile(calibration_path(card.fingerprint, f"{service.settings.model}-hosted"))


@asynccontextmanager
async def body(service: Service) -> AsyncIterator[None]:
    """Raises ModelError (the process is finished) when there is no model to draft with."""
    service.set_ready("engine", False, "the model is loading")
    card = served_card(service.settings)
    drafter = Drafter(service, card, None if card.simulated else await asyncio.to_thread(_calibration, service, card))
    service.spawn(drafter.report(), "drafter status")
    engine = MeteredDraft(await load_draft(service.settings, card), service.metrics)
    try:
        await warm_up(engine, card.vocabulary)
        await drafter.start(engine)
        service.set_ready("engine", True)
        try:
            yield
        finally:
            await drafter.stop()
    finally:
        await engine.close()
