"""Moves sessions between verifiers by replaying their tokens: warm the new one up, then switch between two steps.

A drain marks the verifier so that it takes no new sessions, then moves the sessions that sit there one by one. The
session goes on at the old verifier while the new one is fed; the batcher switches at a step's border, and what was
committed meanwhile (a few tokens) rides along with the first step there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from paceline import subjects, wire
from paceline.bus import Received
from paceline.errors import BadRequest, BusError, NotFound, RequestError, TransientError, Unavailable
from paceline.service import Service
from paceline.store import SessionRecord
from services.migrator import moves

log = structlog.get_logger("migrator")

CHUNK_TIMEOUT_S = 30.0
ASK_TIMEOUT_S = 1.0
DRAIN_S = 60.0
SLEEP_TIMEOUT_S = 60.0
"""The weights of a large model cross the bus of its host."""
ROUND_PAUSE_S = 0.2
WARM_ROUNDS = 8
"""Catch-up rounds at most: each leaves as many tokens as were committed during the one before."""
NEAR = 8
"""The switch may happen when the new verifier is at most this many tokens behind."""


class Migrator:
    """Keeps the last status of every verifier and batcher of one model."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._model = service.settings.model
        self.verifiers: dict[str, wire.VerifierStatus] = {}
        self.batchers: dict[str, wire.BatcherStatus] = {}
        self._drains: dict[str, asyncio.Lock] = {}

    async def subscribe(self) -> None:
        bus = self._service.bus
        for subject in (subjects.VERIFIER_STATUS, subjects.BATCHER_STATUS):
            await bus.subscribe(subject.at(model=self._model), self._on_status, *subject.carries)
        await bus.subscribe(subjects.DRAIN.at(), self._on_drain, *subjects.DRAIN.carries, queue=subjects.DRAIN.queue)

    async def _on_status(self, received: Received) -> None:
        message = received.message
        if isinstance(message, wire.VerifierStatus):
            self.verifiers[message.verifier] = message
        elif isinstance(message, wire.BatcherStatus):
            self.batchers[message.batcher] = message

    async def _on_drain(self, received: Received) -> None:
        """Answered when the drain is over; it runs in a task so that statuses keep coming in."""
        assert isinstance(received.message, wire.DrainRequest)
        self._service.spawn(self._answer(received, received.message), f"drain {received.message.verifier}")

    async def _answer(self, received: Received, request: wire.DrainRequest) -> None:
        answer: wire.Message
        try:
            answer = await self.drain(request)
        except RequestError as error:
            failure = wire.Failure(status=error.status, code=error.code, message=error.message, param=error.param)
            answer = wire.Refused(error=failure)
        except TransientError as error:
            log.warning("drain failed", verifier=request.verifier, error=str(error))
            answer = wire.Refused(error=wire.Failure(status=503, code="unavailable", message=str(error)))
        if received.respond is not None:
            await received.respond(answer)

    async def drain(self, request: wire.DrainRequest) -> wire.DrainReport:
        """Raises NotFound when the verifier is unknown, Unavailable when nobody else could take its sessions,
        RequestError where it is to sleep and cannot."""
        async with self._drains.setdefault(request.verifier, asyncio.Lock()):
            started = time.monotonic()
            await self._mark(request)
            if request.undo:
                return wire.DrainReport(verifier=request.verifier, moved=0, remaining=0, seconds=0.0)
            moved = await self._empty(request.verifier, started + DRAIN_S)
            remaining = len(await self._sessions_on(request.verifier))
            asleep = request.sleep and remaining == 0
            if asleep:
                await self._sleep(request.verifier, wake=False)
            seconds = round(time.monotonic() - started, 3)
            log.info("drained", verifier=request.verifier, moved=moved, remaining=remaining, seconds=seconds)
            return wire.DrainReport(
                verifier=request.verifier, moved=moved, remaining=remaining, seconds=seconds, asleep=asleep
            )

    async def _sleep(self, verifier: str, *, wake: bool) -> None:
        subject = subjects.SLEEP.at(verifier=verifier)
        await self._service.bus.request(subject, wire.SleepRequest(wake=wake), timeout_s=SLEEP_TIMEOUT_S)

    async def _mark(self, request: wire.DrainRequest) -> None:
        if request.verifier not in self.verifiers:
            known = ", ".join(sorted(self.verifiers)) or "none"
            message = f"no verifier is called {request.verifier}; known: {known}"
            raise NotFound(message, code="unknown_verifier", param="verifier")
        if request.sleep and request.undo:
            raise BadRequest("a verifier is put to sleep or given back, not both", param="sleep")
        if request.sleep and not self.verifiers[request.verifier].can_sleep:
            engine = self.verifiers[request.verifier].engine
            message = f"verifier {request.verifier} cannot sleep: its engine, {engine}, was not started for it"
            raise BadRequest(message, code="cannot_sleep", param="sleep")
        now = time.time()
        if not request.undo and moves.choose_target(self.verifiers.values(), request.verifier, 1, now) is None:
            raise Unavailable(f"no other verifier is ready to take the sessions of {request.verifier}")
        if request.undo and self.verifiers[request.verifier].can_sleep:  # whatever it said last: awake, it only agrees
            await self._sleep(request.verifier, wake=True)
        await self._service.leases.set_draining(self._model, request.verifier, not request.undo)
        subject = subjects.DRAIN_STATE.at(verifier=request.verifier)
        try:
            await self._service.bus.request(subject, request, timeout_s=ASK_TIMEOUT_S)
        except BusError as error:
            log.warning("the verifier did not answer", verifier=request.verifier, error=str(error))

    async def _empty(self, verifier: str, deadline: float) -> int:
        """Move until two looks in a row find nobody; new sessions may still have been on their way at the first."""
        moved: set[str] = set()
        quiet = 0
        while quiet < 2 and time.monotonic() < deadline:
            placed = await self._sessions_on(verifier)
            quiet = 0 if placed else quiet + 1
            for session, batcher in placed.items():
                if await self._move(session, batcher, verifier):
                    moved.add(session)
            await asyncio.sleep(ROUND_PAUSE_S)
        return len(moved)

    async def _sessions_on(self, verifier: str) -> dict[str, str]:
        """Session to its batcher."""
        now = time.time()
        placed: dict[str, str] = {}
        for name, status in list(self.batchers.items()):
            if now - status.t_sent > moves.STATUS_TTL_S:
                continue
            subject = subjects.PLACEMENTS.at(batcher=name)
            try:
                answer = await self._service.bus.request(
                    subject, wire.PlacementQuery(verifier=verifier), timeout_s=ASK_TIMEOUT_S
                )
            except BusError as error:
                log.warning("a batcher did not answer", batcher=name, error=str(error))
                continue
            assert isinstance(answer, wire.PlacementList)
            placed.update(dict.fromkeys(answer.sessions, name))
        return placed

    async def _move(self, session: str, batcher: str, leaving: str) -> bool:
        record = await self._service.sessions.load(session)
        if record is None or record.finish is not None:
            return False
        target = moves.choose_target(self.verifiers.values(), leaving, record.tip, time.time())
        if target is None:
            return False
        try:
            warmed = await self._warm(record, target)
            move = wire.SessionMove(session=session, verifier=target, warmed=warmed)
            subject = subjects.SESSION.at(model=self._model, partition=subjects.partition_of(session))
            await self._service.bus.request(subject, move, timeout_s=ASK_TIMEOUT_S)
        except (BusError, RequestError) as error:
            log.warning("a move failed", session=session, target=target, error=str(error))
            return False
        log.info("moved", session=session, leaving=leaving, target=target, warmed=warmed, batcher=batcher)
        return True

    async def _warm(self, record: SessionRecord, target: str) -> int:
        """Feed the committed tokens to `target`, then what came meanwhile; the count of tokens that it holds."""
        held = 0
        for _ in range(WARM_ROUNDS):
            held = await self._feed_all(record, target, held)
            fresh = await self._service.sessions.load(record.session)
            if fresh is None or fresh.finish is not None or fresh.tip - held <= NEAR:
                break
            record = fresh
        return held

    async def _feed_all(self, record: SessionRecord, target: str, held: int) -> int:
        """Chunk by chunk; the target may start over once or twice (an eviction), not for ever."""
        chunks = 2 + record.tip // self._service.settings.chunk_tokens
        for _ in range(3 * chunks):
            if held >= record.tip:
                return held
            held = await self._feed(record, target, held)
        raise Unavailable(f"verifier {target} does not keep the KV of session {record.session}")

    async def _feed(self, record: SessionRecord, target: str, held: int) -> int:
        item = moves.chunk(record, record.tokens, held, self._service.settings.chunk_tokens)
        batch = wire.VerifyBatch(batch=f"warm-{record.session}-{held}-{time.monotonic_ns()}", items=(item,))
        subject = subjects.VERIFY.at(verifier=target)
        answer = await self._service.bus.request(subject, batch, timeout_s=CHUNK_TIMEOUT_S)
        assert isinstance(answer, wire.VerifyResult)
        outcome = answer.items[0]
        if outcome.error is not None:
            raise Unavailable(f"verifier {target}: {outcome.error.message}", code=outcome.error.code)
        if outcome.fed is not None and outcome.fed > held:
            return outcome.fed
        if outcome.need_from is not None and outcome.need_from < held:
            return outcome.need_from
        raise Unavailable(f"verifier {target} makes no progress on session {record.session} at {held} tokens")


@asynccontextmanager
async def body(service: Service) -> AsyncIterator[None]:
    migrator = Migrator(service)
    await migrator.subscribe()
    service.set_ready("migrator", True)
    yield
