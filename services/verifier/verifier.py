"""The verifier: verify batches in, one forward pass each, decisions out. It owns the target model and its KV.

Batches are served one after the other in the order they came; releases wait in the same queue, so the ledger never
changes under a step. Whose turn it is was decided by the batcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import structlog

from paceline import subjects, telemetry
from paceline.bus import Received, Subscription
from paceline.bus_delivery import refusal as refused
from paceline.engine import Failed, Outcome, TargetEngine, TargetItem
from paceline.errors import BadRequest, BusError, EngineError, FatalError, RequestError, StoreError, Unavailable
from paceline.model_card import ModelCard
from paceline.served_card import served_card
from paceline.service import Service
from paceline.wire import (
    Ack,
    DrainRequest,
    Message,
    SleepRequest,
    VerifierRelease,
    VerifyBatch,
    VerifyItem,
    VerifyOutcome,
    VerifyResult,
)
from services.verifier.curve import LearnedCurve, curve_file, fed_tokens
from services.verifier.engines import load_engine
from services.verifier.ledger import SessionLedger, refusal
from services.verifier.outcomes import outcome_of
from services.verifier.reporting import Reporter

log = structlog.get_logger("verifier")

WAITING = 256
"""Batches and releases that wait at most."""


@dataclass(frozen=True)
class _Waiting:
    """A batch or release, and the trace context that it came in."""

    received: Received
    context: contextvars.Context


class Verifier:
    """One loaded engine on the bus."""

    def __init__(
        self, service: Service, engine: TargetEngine, reporter: Reporter, curve: LearnedCurve | None = None
    ) -> None:
        self._service = service
        self._engine = engine
        self._reporter = reporter
        self._curve = curve or LearnedCurve()
        self._ledger = SessionLedger(engine.status().context)
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(WAITING)
        self._subscriptions: list[Subscription] = []
        self._draining = False
        reporter.engine, reporter.waiting, reporter.curve = engine.status, self._queue.qsize, self._curve.table

    async def start(self, *, draining: bool) -> None:
        name, bus = self._service.instance, self._service.bus
        handlers = (
            (subjects.PROBE, self._on_probe),
            (subjects.DRAIN_STATE, self._on_drain_state),
            (subjects.RELEASE, self._on_work),
            (subjects.SLEEP, self._on_work),
            (subjects.VERIFY, self._on_work),
        )
        for subject, handler in handlers:
            self._subscriptions.append(await bus.subscribe(subject.at(verifier=name), handler, *subject.carries))
        wanted = subjects.STATUS_WANTED
        model = self._service.settings.model
        self._subscriptions.append(await bus.subscribe(wanted.at(model=model), self._on_status_wanted, *wanted.carries))
        self._service.spawn(self._work(), "verify steps")
        self._draining = draining
        self._reporter.enter(self._awake())

    async def stop(self) -> None:
        """Take nothing new, answer what was taken, say so. Its caller bounds the time."""
        for subscription in reversed(self._subscriptions):
            await subscription.close()
        if self._reporter.state == "failed" or self._service.failure is not None:
            return  # nobody works the queue off any more
        await self._queue.join()
        self._reporter.enter("stopped")
        await self._reporter.publish()

    # --- messages ---

    async def _on_probe(self, received: Received) -> None:
        await _respond(received, Ack())

    async def _on_status_wanted(self, _received: Received) -> None:
        self._reporter.tell()

    async def _on_drain_state(self, received: Received) -> None:
        assert isinstance(received.message, DrainRequest)
        self._draining = not received.message.undo
        if self._reporter.state in ("ready", "draining"):
            self._reporter.enter(self._awake())
        await _respond(received, Ack())

    def _awake(self) -> Literal["ready", "draining"]:
        return "draining" if self._draining else "ready"

    async def _on_work(self, received: Received) -> None:
        try:
            self._queue.put_nowait(_Waiting(received, contextvars.copy_context()))
        except asyncio.QueueFull:
            raise Unavailable(f"verifier {self._service.instance} has {WAITING} batches waiting") from None

    async def _work(self) -> None:
        while True:
            waiting = await self._queue.get()
            try:
                await asyncio.create_task(self._serve(waiting.received), context=waiting.context)
            finally:
                self._queue.task_done()

    async def _serve(self, received: Received) -> None:
        message = received.message
        if isinstance(message, VerifierRelease):
            if self._ledger.release(message.session, message.epoch):
                self._engine.release(message.session)
            return
        try:
            await _respond(received, await self._answer(message))
        except RequestError as error:
            await _respond(received, refused(error))
        except BusError as error:
            log.warning("answer not sent", to=type(message).__name__, error=str(error))
        except FatalError as error:
            await self._reporter.fail(error)
            with contextlib.suppress(BusError):
                await _respond(received, refused(Unavailable(str(error))))
            raise

    async def _answer(self, message: Message) -> Message:
        if isinstance(message, SleepRequest):
            await self._sleep(wake=message.wake)
            return Ack()
        assert isinstance(message, VerifyBatch)
        if self._reporter.state == "sleeping":
            raise Unavailable(f"verifier {self._service.instance} sleeps")
        return await self.verify(message)

    async def _sleep(self, *, wake: bool) -> None:
        if wake == (self._reporter.state != "sleeping"):
            return
        if wake:
            self._reporter.enter("loading")
            await self._engine.wake()
            self._reporter.enter(self._awake())
            return
        if self._reporter.state != "draining":
            raise BadRequest(f"verifier {self._service.instance} does not drain", code="not_draining")
        try:
            await self._engine.sleep()
        except EngineError as error:
            raise BadRequest(str(error), code="cannot_sleep") from error
        self._reporter.enter("sleeping")

    # --- steps ---

    async def verify(self, batch: VerifyBatch) -> VerifyResult:
        """One forward pass over all items that can go in; every item is answered."""
        answers: dict[int, VerifyOutcome] = {}
        admitted: dict[int, TargetItem] = {}
        for index, item in enumerate(batch.items):
            self._admit(index, item, answers, admitted)
        started, wall = time.monotonic(), time.time()
        outcomes = await self._step(list(admitted.values())) if admitted else []
        step_ms = 1000 * (time.monotonic() - started)
        for index, outcome in zip(admitted, outcomes, strict=True):
            answers[index] = outcome_of(batch.items[index], outcome, len(self._engine.held(outcome.session)))
        return VerifyResult(
            batch=batch.batch,
            verifier=self._service.instance,
            step_ms=round(step_ms, 3),
            items=tuple(answers[index] for index in range(len(batch.items))),
            t_started=wall,
        )

    def _admit(
        self, index: int, item: VerifyItem, answers: dict[int, VerifyOutcome], admitted: dict[int, TargetItem]
    ) -> None:
        if any(other.session == item.session for other in admitted.values()):
            message = "a session can be in a batch only once"
            answers[index] = refusal(item.session, 400, "duplicate_item", message)
            return
        decision = self._ledger.admit(item, self._engine.held(item.session))
        if isinstance(decision, TargetItem):
            admitted[index] = decision
            return
        answers[index] = decision.outcome
        log.debug("turned back", session=item.session, at=item.at, need_from=decision.outcome.need_from)
        if decision.trim is not None:
            self._engine.trim(item.session, decision.trim)

    async def _step(self, items: list[TargetItem]) -> list[Outcome]:
        tokens = sum(len(item.history) + len(item.draft) + (item.rule is not None) for item in items)
        fed = fed_tokens(items)
        started = time.monotonic()
        self._reporter.load.started(started)
        with telemetry.tracer.start_as_current_span(telemetry.SPAN_VERIFY) as span:
            span.set_attribute(telemetry.ATTR_ITEMS, len(items))
            span.set_attribute(telemetry.ATTR_VERIFIER, self._service.instance)
            try:
                outcomes = await self._engine.step(items)
            except EngineError as error:
                log.error("step failed", items=len(items), error=str(error))
                return [Failed(item.session, "step_failed", str(error)) for item in items]
            finally:
                ended = time.monotonic()
                self._reporter.load.ended(tokens, ended)
                self._reporter.step_done(len(items), tokens, ended - started)
            if not any(isinstance(outcome, Failed) for outcome in outcomes):
                self._curve.step_done(items, fed, 1000 * (ended - started))
            return outcomes


async def _respond(received: Received, answer: Message) -> None:
    if received.respond is not None:
        await received.respond(answer)


async def _was_draining(service: Service, card: ModelCard) -> bool:
    """A verifier that is started again in the middle of a drain goes on draining."""
    try:
        return service.instance in await service.leases.draining(card.model)
    except StoreError as error:
        log.warning("drain state unknown, taken as none", error=str(error))
        return False


@asynccontextmanager
async def body(service: Service) -> AsyncIterator[None]:
    """Raises ModelError (the process is finished) when there is no model to serve."""
    service.set_ready("engine", False, "the model is loading")
    card = served_card(service.settings)
    reporter = Reporter(service, card)
    service.spawn(reporter.run(), "verifier status")
    engine = await load_engine(service.settings, card, reporter.loading)
    try:
        curve = LearnedCurve(None if card.simulated else curve_file(service.settings, engine.status()))
        await curve.prepare(engine, card.vocabulary)
        service.spawn(curve.run(), "step curve")
        verifier = Verifier(service, engine, reporter, curve)
        await verifier.start(draining=await _was_draining(service, card))
        try:
            yield
        finally:
            await verifier.stop()
            await curve.save()
    finally:
        await engine.close()
