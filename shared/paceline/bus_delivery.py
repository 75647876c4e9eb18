"""What every bus does with the messages of one subscription: hold them, validate, hand over, answer. No client library
here: bus_nats and bus_memory both stand on it, so both keep the rules of paceline.bus.Bus.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from paceline import wire
from paceline.bus import Handler, Received
from paceline.errors import BadRequest, BusError, NoResponders, Overloaded, RequestError, TooLarge, request_error
from paceline.telemetry import BUS_DROPPED, BUS_REFUSED, Metrics, receiving

log = structlog.get_logger(__name__)

Respond = Callable[[wire.Message], Awaitable[None]]

PENDING_MESSAGES = 65_536
PENDING_BYTES = 64 << 20
CLOSE_S = 5.0
"""How long a closing subscription may take to finish what it has taken."""


@dataclass(frozen=True)
class Packet:
    """Undecoded, as it came in."""

    subject: str
    data: bytes
    headers: dict[str, str]
    respond: Respond | None = None


class Inbox:
    """The pending messages of one subscription, and the task that gives them to its handler one at a time.

    Bounded: what comes in beyond `limit` messages or PENDING_BYTES is dropped, counted and logged (once per overflow).
    """

    def __init__(
        self,
        subject: str,
        handler: Handler,
        carries: tuple[type[wire.Message], ...] = (),
        *,
        metrics: Metrics | None = None,
        limit: int = PENDING_MESSAGES,
    ) -> None:
        self.subject = subject
        self.dropped = 0
        self._delivery = Delivery(handler, carries, metrics)
        self._metrics = metrics
        self._limit = limit
        self._bytes = 0
        self._full = False
        self._closed = False
        self._packets: asyncio.Queue[Packet | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(), name=f"bus {subject}")

    def offer(self, packet: Packet) -> None:
        if self._closed:
            return
        full = self._packets.qsize() >= self._limit or self._bytes + len(packet.data) > PENDING_BYTES
        if full:
            self._drop()
        else:
            self._bytes += len(packet.data)
            self._packets.put_nowait(packet)
        self._full = full

    async def close(self) -> None:
        """Nothing new is taken; what was taken is finished within CLOSE_S, then cancelled. A handler may close its own
        subscription: then it ends after what is pending."""
        if not self._closed:
            self._closed = True
            self._packets.put_nowait(None)
        if self._task is asyncio.current_task():
            return
        _, running = await asyncio.wait({self._task}, timeout=CLOSE_S)
        if running:
            log.warning("handler cancelled", subject=self.subject, pending=self._packets.qsize())
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while (packet := await self._packets.get()) is not None:
            self._bytes -= len(packet.data)
            await self._delivery(packet)

    def _drop(self) -> None:
        self.dropped += 1
        if self._metrics is not None:
            self._metrics.add(BUS_DROPPED, reason="slow_consumer")
        if not self._full:
            log.warning("slow consumer", subject=self.subject, pending=self._packets.qsize(), pending_bytes=self._bytes)


class Delivery:
    """Runs `handler` for messages of the types in `carries` (any, if empty)."""

    def __init__(self, handler: Handler, carries: tuple[type[wire.Message], ...], metrics: Metrics | None) -> None:
        self._handler = handler
        self._carries = carries
        self._metrics = metrics

    async def __call__(self, packet: Packet) -> None:
        """Never raises, except for cancellation: one bad message must not end a subscription."""
        subject, respond = packet.subject, packet.respond
        try:
            message = wire.decode(packet.data, *self._carries)
        except BadRequest as error:
            log.warning("message refused", subject=subject, reason=error.message, bytes=len(packet.data))
            await self._refuse(respond, error, "malformed")
            return
        try:
            with receiving(subject, packet.headers):
                await self._handler(Received(subject, message, packet.headers, respond))
        except RequestError as error:
            await self._refuse(respond, error, "request_error")
        except Exception as error:
            log.exception("handler failed", subject=subject, message_type=type(message).__name__)
            failed = RequestError(f"{type(error).__name__} in the handler of {subject}")
            await self._refuse(respond, failed, "handler_failed")

    async def _refuse(self, respond: Respond | None, error: RequestError, reason: str) -> None:
        if self._metrics is not None:
            self._metrics.add(BUS_REFUSED, reason=reason)
        if respond is None:
            return
        try:
            await respond(refusal(error))
        except BusError as lost:
            log.warning("answer not sent", reason=str(lost))


def refusal(error: RequestError) -> wire.Refused:
    """The Refused that carries `error` over the bus or the WAN."""
    failure = wire.Failure(status=error.status, code=error.code, message=error.message, param=error.param)
    retry = error.retry_after_s if isinstance(error, Overloaded) else None
    return wire.Refused(error=failure, retry_after_s=retry)


def answered(answer: wire.Message) -> wire.Message:
    """The answer, unless it is a Refused: then raises what it carries."""
    if not isinstance(answer, wire.Refused):
        return answer
    failure = answer.error
    error = request_error(failure.status, failure.code, failure.message, failure.param)
    if isinstance(error, Overloaded) and answer.retry_after_s is not None:
        error.retry_after_s = answer.retry_after_s
    raise error


def fitting(message: wire.Message, limit: int) -> bytes:
    """The encoded message. Raises TooLarge, naming both numbers."""
    data = wire.encode(message)
    if len(data) > limit:
        kind = message.__struct_config__.tag
        raise TooLarge(f"a message `{kind}` of {len(data)} bytes is over the bus's limit of {limit} bytes")
    return data


def nobody(subject: str) -> NoResponders:
    return NoResponders(f"nobody listens on {subject}")
