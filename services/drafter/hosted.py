"""One hosted session: it follows the verdicts on the bus and sends drafts as any other source does."""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog
from msgspec.structs import replace

from paceline import subjects, telemetry
from paceline.bus import Received, Subscription
from paceline.calibration import Calibrated
from paceline.drafting import DraftLoop
from paceline.engine import DraftEngine, Rule
from paceline.errors import BusError
from paceline.service import Service
from paceline.wire import Bounds, DraftBlock, HostedOpen, Verdict

log = structlog.get_logger("drafter")

INCARNATIONS_PER_S = 10
"""A drafter that takes a session over this much later has the higher incarnation, whichever process it is."""


class HostedSession:
    """`limit`: longest total length in tokens; calibration: of the draft model. `listen`, then `run` until the end of
    the session."""

    def __init__(
        self,
        service: Service,
        engine: DraftEngine,
        request: HostedOpen,
        limit: int,
        calibration: Calibrated | None = None,
    ) -> None:
        self._service = service
        self._request = request
        self._subscriptions: list[Subscription] = []
        self.heard_at = time.monotonic()
        """When its batcher was last heard of."""
        self.known_live_at: float | None = None
        """When the store last said that it is not over."""
        self._loop = DraftLoop(
            engine=engine,
            source="hosted",
            session=request.session,
            connection=int(time.time() * INCARNATIONS_PER_S),
            tokens=request.tokens,
            rule=Rule(request.sampling, request.seed, request.prompt_length, request.choice),
            speculation=request.speculation,
            bounds=Bounds(),
            limit=limit,
            send=self._send,
            repair=self._repair,
            epoch=request.epoch,
            calibration=calibration,
        )

    @property
    def id(self) -> str:
        return self._request.session

    async def listen(self) -> None:
        """Before the batcher is told yes: no verdict from then on is missed. Raises BusError, listening to nothing."""
        bus, session = self._service.bus, self._request.session
        try:
            for subject, handler in ((subjects.VERDICT, self._on_verdict), (subjects.HOSTED_STOP, self._on_stop)):
                self._subscriptions.append(await bus.subscribe(subject.at(session=session), handler, *subject.carries))
        except BusError:
            await self._deafen()
            raise

    async def _deafen(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()
        self._subscriptions.clear()

    def stop(self, *, keep: bool = False) -> None:
        """keep: see DraftLoop.stop."""
        self._loop.stop(keep=keep)

    async def run(self) -> None:
        with telemetry.tracer.start_as_current_span(telemetry.SPAN_HOSTED) as span:
            span.set_attribute(telemetry.ATTR_SESSION, self._request.session)
            try:
                await self._loop.run()
            finally:
                span.set_attribute(telemetry.ATTR_DRAFTED, self._loop.stats.sent)
                span.set_attribute(telemetry.ATTR_ACCEPTED, self._loop.stats.accepted)
                await self._deafen()
        stats = self._loop.stats
        log.debug("session over", session=self.id, sent=stats.sent, accepted=stats.accepted)

    async def _on_verdict(self, received: Received) -> None:
        verdict = received.message
        assert isinstance(verdict, Verdict)
        self.heard_at = time.monotonic()
        if not self._request.speculation.hosted and verdict.timing is not None:
            verdict = replace(verdict, timing=None)  # the echo is for the edge that this drafter helps
        self._loop.on_verdict(verdict)

    async def _on_stop(self, received: Received) -> None:
        self._loop.stop()

    async def _send(self, block: DraftBlock) -> None:
        subject = subjects.DRAFT.at(model=self._request.model, partition=self._request.partition)
        await self._service.bus.publish(subject, block)

    async def _repair(self, position: int) -> Sequence[int]:
        """Append comes before the verdict, so what a verdict named is in the store."""
        record = await self._service.sessions.load(self._request.session)
        return record.tokens[position:] if record is not None else ()
