"""What gateways say of sessions: open, resume, close, somebody is there; and the migrator: move."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import structlog

from paceline import telemetry, wire
from paceline.bus import Received
from paceline.bus_delivery import refusal
from paceline.errors import (
    BusError,
    Conflict,
    NotFound,
    Overloaded,
    RequestError,
    StaleEpoch,
    StoreError,
    Unavailable,
)
from paceline.model_card import ModelCard
from paceline.service import Service
from paceline.store import SessionRecord
from paceline.subjects import partition_of
from services.batcher.arrivals import Arrivals
from services.batcher.commit import Committer
from services.batcher.directory import Directory
from services.batcher.leases import Leases
from services.batcher.live import Live, Table
from services.batcher.opening import (
    HISTORY_LOST,
    Limits,
    admit,
    agrees,
    answer_to,
    check_owner,
    last_words,
    new_record,
)
from services.batcher.placement import Placement

log = structlog.get_logger("batcher")

MAX_SESSIONS = 1024
MAX_BUSY = 256
"""Requests that wait for the store at one time."""
REMEMBERED = 1024
LOOK_AGAIN_S = 1.0
"""A session that we do not know is looked for in the store at most this often."""
VERIFIER_WAIT_S = 2.0
"""A verifier that was heard of lately may be held up, or this process was. Within the gateway's own patience."""

Work = Callable[[], Awaitable[wire.Message | None]]


class House(Protocol):
    """What the reception needs of the batcher."""

    table: Table
    directory: Directory
    leases: Leases
    committer: Committer
    placement: Placement
    arrivals: Arrivals

    def present(self, live: Live) -> None:
        """Its client is there: it may run."""

    def cancel(self, live: Live) -> None: ...

    def kick(self) -> None: ...

    async def next_verifier(self, limit_s: float) -> None:
        """Until a serving verifier tells of itself, for `limit_s` seconds at most."""


class Reception:
    def __init__(self, service: Service, house: House, card: ModelCard) -> None:
        self._service = service
        self._house = house
        self._card = card
        self._busy = 0
        self._opening: set[str] = set()
        self._closed_early: set[str] = set()
        self._last: OrderedDict[str, wire.Verdict] = OrderedDict()
        self._looked: OrderedDict[str, float] = OrderedDict()

    async def on_message(self, received: Received) -> None:
        """What may need the store is handed to a task; presence is noted here and now."""
        message = received.message
        if isinstance(message, wire.Presence):
            self._presence(message)
        elif isinstance(message, wire.SessionOpen):
            self._task(received, partial(self._open, message, received.headers))
        elif isinstance(message, wire.SessionResume):
            self._task(received, partial(self._resume, message))
        elif isinstance(message, wire.SessionClose):
            self._task(received, partial(self._close, message))
        elif isinstance(message, wire.SessionMove):
            self._task(received, partial(self._move, message))

    def _task(self, received: Received, work: Work) -> None:
        if self._busy >= MAX_BUSY:
            raise Overloaded(f"this batcher has {MAX_BUSY} requests waiting for the store, its bound")
        self._busy += 1
        self._service.spawn(self._answer(received, work), f"answer {received.subject}")

    async def _answer(self, received: Received, work: Work) -> None:
        """No answer (None) where another batcher is the owner: it gives the answer."""
        answer: wire.Message | None
        try:
            answer = await work()
        except RequestError as error:
            answer = refusal(error)
        except StoreError:
            answer = refusal(Unavailable("the state store is away", code="store_unavailable"))
        except StaleEpoch:
            self._house.leases.hurry()
            answer = None
        finally:
            self._busy -= 1
        if answer is not None and received.respond is not None:
            try:
                await received.respond(answer)
            except BusError as error:
                log.debug("answer not sent", subject=received.subject, error=str(error))

    def remember(self, last: wire.Verdict) -> None:
        """A session's last verdict, for those who ask again because they missed it."""
        _put(self._last, last.session, last)

    # --- opening ---

    async def _open(self, opened: wire.SessionOpen, headers: dict[str, str]) -> wire.Message | None:
        house, partition = self._house, partition_of(opened.session)
        if not await house.leases.confirmed(partition):
            return None
        known = house.table.get(opened.session)
        if known is not None and (known.tenant, known.session.record.opened.tokens) == (opened.tenant, opened.tokens):
            return answer_to(known.session.record, known.session.connection, known.durable)
        if len(house.table) + len(self._opening) >= MAX_SESSIONS:
            raise Overloaded(f"this batcher holds {MAX_SESSIONS} sessions, its bound", code="too_many_sessions")
        self._opening.add(opened.session)
        try:
            admitted, max_tokens = admit(opened, await self._limits())
            return await self._create(admitted, max_tokens, partition, headers)
        finally:
            self._opening.discard(opened.session)
            self._closed_early.discard(opened.session)

    async def _limits(self) -> Limits:
        """What a session may have here. Raises Unavailable when no verifier serves, nor does one come back within
        VERIFIER_WAIT_S."""
        directory = self._house.directory
        if directory.room(now := time.monotonic()) is None and directory.expects(now):
            await self._house.next_verifier(VERIFIER_WAIT_S)
        room = directory.room(time.monotonic())
        if room is None:
            raise Unavailable(f"no verifier is ready for the model {self._card.model!r}", code="verifier_unavailable")
        card = self._card
        return Limits(card.model, card.fingerprint, card.vocabulary, min(card.context, room), card.end_ids)

    async def _create(
        self, opened: wire.SessionOpen, max_tokens: int, partition: int, headers: dict[str, str]
    ) -> wire.Message | None:
        """Stored first: from then on whoever owns the partition goes on with it."""
        epoch = self._house.leases.epoch(partition)
        if epoch is None:
            return None
        record = new_record(opened, max_tokens, epoch, secret=secrets.token_hex(16), now=time.time())
        with telemetry.tracer.start_as_current_span(telemetry.SPAN_OPEN) as span:
            span.set_attribute(telemetry.ATTR_SESSION, record.session)
            await self._service.sessions.create(record)
        self._service.metrics.add(telemetry.PROMPT_TOKENS, record.prompt_length)
        live = self._house.arrivals.begin(record, partition, headers, present=True)
        if live is not None and record.session in self._closed_early:
            self._house.cancel(live)
        return answer_to(record, record.connection, record.tip)

    # --- resuming ---

    async def _resume(self, message: wire.SessionResume) -> wire.Message | None:
        house = self._house
        if not await house.leases.confirmed(partition_of(message.session)):
            return None
        found = await house.arrivals.find(message.session)
        if found is None:
            raise NotFound(f"no session {message.session}", code="session_not_found")
        record = found if isinstance(found, SessionRecord) else found.session.record
        check_owner(message, record.tenant, record.secret)
        tokens = found.tokens if isinstance(found, SessionRecord) else found.session.committed
        if not agrees(tokens, message):  # the fault of one client's copy: who holds the right one may still come
            raise Conflict(HISTORY_LOST.message, code=HISTORY_LOST.code)
        connection = await self._service.sessions.next_connection(message.session)
        if isinstance(found, Live):
            return await self._bind(found, connection)
        await house.committer.publish(last_words(found))
        return answer_to(record, connection, found.tip)

    async def _bind(self, live: Live, connection: int) -> wire.Message:
        """The highest connection wins, also when two resumes overtake each other."""
        live.session.connection = max(connection, live.session.connection)
        live.presence.bind(connection, time.monotonic())
        live.shown_cap = None
        self._house.present(live)
        await self._house.committer.announce(live)
        return answer_to(live.session.record, connection, live.durable)

    # --- closing, presence, moves ---

    async def _close(self, message: wire.SessionClose) -> wire.Message | None:
        house = self._house
        if not await house.leases.confirmed(partition_of(message.session)):
            return None
        live = house.table.get(message.session)
        if live is None and message.session in self._opening:
            self._closed_early.add(message.session)
        elif live is None and message.session in self._last:
            await house.committer.publish(self._last[message.session])
        else:
            found = live or await house.arrivals.find(message.session)
            if isinstance(found, SessionRecord):
                await house.committer.publish(last_words(found))
            elif found is not None and 0 < message.connection < found.session.connection:
                await self._supersede(found)
            elif found is not None:
                house.cancel(found)
        return wire.Ack()

    def _presence(self, message: wire.Presence) -> None:
        live = self._house.table.get(message.session)
        if live is not None:
            self._hear(live, message)
        elif message.session not in self._last and message.session not in self._opening:
            now = time.monotonic()
            if now - self._looked.get(message.session, -LOOK_AGAIN_S) >= LOOK_AGAIN_S and self._busy < MAX_BUSY:
                _put(self._looked, message.session, now)
                self._busy += 1
                self._service.spawn(self._look_for(message), f"look for {message.session}")

    async def _supersede(self, live: Live) -> None:
        """An older connection spoke: the verdict that told of the newer one did not reach its gateway."""
        live.told_connection = 0
        await self._house.committer.announce(live)

    def _hear(self, live: Live, message: wire.Presence) -> None:
        if message.connection < live.session.connection:
            self._service.spawn(self._supersede(live), f"supersede {live.id}")
            return
        now = time.monotonic()
        if live.presence.hear(message.connection, message.t_sent, now=now, unix_now=time.time()):
            live.session.connection = max(message.connection, live.session.connection)
            if live.session.parked:
                self._house.present(live)

    async def _look_for(self, message: wire.Presence) -> None:
        """Somebody waits for a session that we do not know: it was opened, or recovered, elsewhere."""
        try:
            if not self._house.leases.owns(partition_of(message.session)):
                return
            found = await self._house.arrivals.find(message.session)
            if isinstance(found, SessionRecord):
                await self._house.committer.publish(last_words(found))
            elif found is not None:
                self._hear(found, message)
        except (StoreError, StaleEpoch) as error:
            log.debug("session not found yet", session=message.session, error=str(error))
        finally:
            self._busy -= 1

    async def _move(self, message: wire.SessionMove) -> wire.Message | None:
        house = self._house
        if not await house.leases.confirmed(partition_of(message.session)):
            return None
        live = await house.arrivals.find(message.session)
        if not isinstance(live, Live) or live.session.finish is not None:
            raise NotFound(f"no running session {message.session}", code="session_not_found")
        if not house.directory.takes(message.verifier, time.monotonic()):
            raise Unavailable(f"verifier {message.verifier} takes no sessions now", code="verifier_unavailable")
        house.placement.move(live, message.verifier, fed=message.warmed)
        house.kick()
        return wire.Ack()


def _put(table: OrderedDict[str, Any], key: str, value: object) -> None:
    """Bounded: the oldest goes."""
    table[key] = value
    table.move_to_end(key)
    while len(table) > REMEMBERED:
        table.popitem(last=False)
