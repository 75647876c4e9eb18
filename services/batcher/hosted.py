"""Drafts from the hosted drafter: for sessions whose client has no draft model, and for those whose bubbles it may fill
(see `assist`). Its trouble never stalls a session."""

from __future__ import annotations

import structlog
from msgspec.structs import replace

from paceline import subjects, telemetry
from paceline.bus import Bus
from paceline.errors import BusError, NoResponders, RequestError, RequestTimeout
from paceline.service import Service
from paceline.wire import HostedOpen, HostedStop, Verdict
from services.batcher.assist import Rest, predicted_s
from services.batcher.directory import Directory
from services.batcher.live import Live, Table

log = structlog.get_logger("batcher")

OPEN_TIMEOUT_S = 0.2
RETRY_S = 2.0
LONGEST_RETRY_S = 30.0
SILENT_S = 2.0
"""Tokens are committed and no block comes for this long: the drafter has lost the session."""


class HostedDrafts:
    """`tick` asks for drafts where there are none. Until a drafter said yes, and after it fell silent, the session is
    filled by plain steps."""

    def __init__(self, service: Service, table: Table, directory: Directory) -> None:
        self._service = service
        self._directory = directory
        self._bus: Bus = service.bus
        self._table = table
        self._asking: set[str] = set()
        self._rests: dict[str, Rest] = {}

    def tick(self, now: float) -> None:
        draft_s = self._directory.draft_s(now) if self._directory.fill else None
        for live in self._table:
            if live.may_be_assisted and live.session.finish is None:
                self._consider(live, now, draft_s)
            self.look(live, now)

    def _consider(self, live: Live, now: float, draft_s: float | None) -> None:
        """Is the drafter to help a session that has an edge, or to stop that?"""
        assist, verifier = live.assist, live.verifier or ""
        assist.rest = self._rests.setdefault(verifier, Rest())
        beside = [other for other in self._table.on(verifier) if other is not live and not other.session.parked]
        promised_s, times = None, self._directory.terms(verifier).times
        if draft_s is not None and times is not None and assist.may_start(now, len(beside)):
            longest = live.session.record.opened.speculation.max_draft
            acceptance = live.forecast.trust.acceptance("hosted")
            promised_s = predicted_s(acceptance, draft_s, times, longest, live.session.tip)
        change = assist.decide(now, promised_s=promised_s, others=len(beside))
        if change == "start":
            log.debug("hosted drafts begin to help", session=live.id, promised_ms=round(1000 * (promised_s or 0.0), 1))
            live.hosted_retry_at = now
        elif change == "stop":
            self._dismiss(live)

    def _dismiss(self, live: Live) -> None:
        log.debug("hosted drafts help no more", session=live.id)
        live.hosted_open, live.hosted_unanswered = False, None
        self._service.spawn(self._stop(live.id), "hosted stop")

    def look(self, live: Live, now: float) -> None:
        if not live.wants_hosted or live.session.parked or live.leaving:
            return
        if live.hosted_open and live.hosted_unanswered is not None and now - live.hosted_unanswered > SILENT_S:
            self._silent(live, now)
        if not live.hosted_open and now >= live.hosted_retry_at and live.id not in self._asking:
            self._asking.add(live.id)
            self._service.spawn(self._open(live, now), f"hosted {live.id}")

    def _silent(self, live: Live, now: float) -> None:
        if live.assist.on:  # it may well see that it cannot get ahead of the edge
            live.assist.failed(now)
            self._dismiss(live)
            return
        log.info("hosted drafter is silent", session=live.id)
        self._failed(live, now, "timeout")
        live.hosted_retry_at = now

    def block_came(self, live: Live) -> None:
        if live.may_be_assisted and not live.assist.on:
            return  # on its way when it was stopped
        live.assist.block_came()
        live.hosted_open, live.hosted_unanswered, live.hosted_pause_s = True, None, 0.0

    def committed(self, live: Live, now: float) -> None:
        if live.wants_hosted and live.hosted_unanswered is None:
            live.hosted_unanswered = now

    def stop(self, live: Live) -> None:
        speculation = live.session.record.opened.speculation
        if speculation.enabled and (speculation.hosted or live.assist.on):
            self._service.spawn(self._stop(live.id), "hosted stop")

    async def _stop(self, session: str) -> None:
        """Lost, the drafter ends by itself: it sees the finish, or looks into the store."""
        try:
            await self._bus.publish(subjects.HOSTED_STOP.at(session=session), HostedStop(session=session))
        except BusError as error:
            log.debug("hosted stop not published", session=session, error=str(error))

    async def _open(self, live: Live, now: float) -> None:
        try:
            await self._ask(live, now)
        finally:
            self._asking.discard(live.id)
        if not live.wants_hosted:
            await self._stop(live.id)  # the first may have come before the drafter listened

    async def _ask(self, live: Live, now: float) -> None:
        known = live.durable
        subject = subjects.HOSTED_OPEN.at(model=live.session.record.opened.model)
        try:
            await self._bus.request(subject, _request(live, known), timeout_s=OPEN_TIMEOUT_S)
        except NoResponders:
            self._failed(live, now, "no_responders")
        except RequestTimeout:
            self._failed(live, now, "timeout")
        except BusError:
            self._failed(live, now, "bus")
        except RequestError as error:
            log.info("hosted drafter refused", session=live.id, code=error.code, error=str(error))
            self._failed(live, now, "refused")
        else:
            live.hosted_open, live.hosted_unanswered = True, None
            await self._catch_up(live, known)

    def _failed(self, live: Live, now: float, reason: str) -> None:
        live.hosted_open, live.hosted_unanswered = False, None
        live.hosted_pause_s = min(max(RETRY_S, 2 * live.hosted_pause_s), LONGEST_RETRY_S)
        live.hosted_retry_at = now + live.hosted_pause_s
        self._service.metrics.add(telemetry.DRAFTER_FAILURES, reason=reason)

    async def _catch_up(self, live: Live, known: int) -> None:
        """The drafter listens from now on: tell it again what it may have missed since the request was written."""
        session = live.session
        if live.durable <= known or session.finish is not None:
            return
        part = slice(known - session.record.prompt_length, live.durable - session.record.prompt_length)
        verdict = Verdict(
            session=live.id,
            epoch=session.epoch,
            at=known,
            tokens=tuple(session.committed[known : live.durable]),
            kinds=session.kinds[part],
            seen=dict(session.seen),
        )
        try:
            await self._bus.publish(subjects.VERDICT.at(session=live.id), verdict)
        except BusError as error:
            log.debug("verdict not published", session=live.id, error=str(error))


def _request(live: Live, known: int) -> HostedOpen:
    """The drafter tells by `speculation.hosted` whether it is the session's only source. Where it only helps, it runs
    beside a verifier that is busy, and drafts one chain."""
    session, record = live.session, live.session.record
    speculation = record.opened.speculation
    if not speculation.hosted:
        speculation = replace(speculation, alternatives=False)
    return HostedOpen(
        session=live.id,
        model=record.opened.model,
        epoch=session.epoch,
        tokens=tuple(session.committed[:known]),
        sampling=record.opened.sampling,
        seed=record.seed,
        prompt_length=record.prompt_length,
        partition=live.partition,
        choice=record.opened.choice,
        speculation=speculation,
    )
