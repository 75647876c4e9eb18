"""The bus within one process: same rules as NATS, messages really encoded and decoded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import structlog

from paceline import wire
from paceline.bus import Handler, Subscription
from paceline.bus_delivery import Delivery, Respond, answered, fitting, nobody
from paceline.errors import BusError, RequestTimeout
from paceline.telemetry import BUS_DROPPED, Metrics, outgoing_headers

log = structlog.get_logger(__name__)

MAX_PAYLOAD = 1 << 20
PENDING_MESSAGES = 65_536
CLOSE_S = 5.0


def matches(pattern: str, subject: str) -> bool:
    """NATS wildcards: `*` is one token, a final `>` one or more."""
    want, have = pattern.split("."), subject.split(".")
    for index, word in enumerate(want):
        if word == ">":
            return len(have) > index
        if index >= len(have) or word not in ("*", have[index]):
            return False
    return len(want) == len(have)


@dataclass
class _Packet:
    subject: str
    data: bytes
    headers: dict[str, str]
    respond: Respond | None


@dataclass(eq=False)
class _Subscriber:
    bus: MemoryBus
    pattern: str
    group: str | None
    delivery: Delivery
    packets: asyncio.Queue[_Packet] = field(default_factory=lambda: asyncio.Queue(PENDING_MESSAGES))
    task: asyncio.Task[None] | None = None

    def offer(self, packet: _Packet) -> None:
        try:
            self.packets.put_nowait(packet)
        except asyncio.QueueFull:
            self.bus.dropped(self.pattern)

    async def run(self) -> None:
        while True:
            packet = await self.packets.get()
            try:
                await self.delivery(packet.subject, packet.data, packet.headers, packet.respond)
            finally:
                self.packets.task_done()

    async def close(self) -> None:
        """Nothing new is taken; what was taken is finished, within CLOSE_S."""
        self.bus.forget(self)
        if self.task is None:
            return
        if self.task is not asyncio.current_task():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.packets.join(), CLOSE_S)
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


class MemoryBus:
    """One object is the server and every client. `lose()` and `restore()` play an outage: what is sent meanwhile is
    lost, requests fail."""

    def __init__(self, *, max_payload: int = MAX_PAYLOAD, metrics: Metrics | None = None) -> None:
        self.max_payload = max_payload
        self._metrics = metrics
        self._subscribers: list[_Subscriber] = []
        self._turn = count()
        self._callbacks: list[Callable[[], None]] = []
        self._up = True
        self._closed = False

    async def publish(self, subject: str, message: wire.Message) -> None:
        self._send(subject, message, None)

    async def request(self, subject: str, message: wire.Message, *, timeout_s: float) -> wire.Message:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def respond(answer: wire.Message) -> None:
            data = fitting(subject, answer, self.max_payload)
            if not future.done() and self._up:
                future.set_result(data)

        if not self._send(subject, message, respond):
            raise nobody(subject)
        try:
            data = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise RequestTimeout(f"no answer on {subject} within {timeout_s:g} s") from None
        return answered(wire.decode(data))

    async def subscribe(
        self, subject: str, handler: Handler, *carries: type[wire.Message], queue: str | None = None
    ) -> Subscription:
        self._check_open()
        subscriber = _Subscriber(self, subject, queue, Delivery(handler, carries, self._metrics))
        subscriber.task = asyncio.create_task(subscriber.run(), name=f"bus {subject}")
        self._subscribers.append(subscriber)
        return subscriber

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    @property
    def connected(self) -> bool:
        return self._up and not self._closed

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(subscriber.close() for subscriber in list(self._subscribers)))

    def lose(self) -> None:
        """The connection breaks."""
        self._up = False

    def restore(self) -> None:
        """The connection is back."""
        self._up = True
        for callback in self._callbacks:
            callback()

    def forget(self, subscriber: _Subscriber) -> None:
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)

    def dropped(self, pattern: str) -> None:
        log.warning("slow consumer", subject=pattern)
        if self._metrics is not None:
            self._metrics.add(BUS_DROPPED, reason="slow_consumer")

    def _check_open(self) -> None:
        if self._closed:
            raise BusError("the bus is closed")

    def _send(self, subject: str, message: wire.Message, respond: Respond | None) -> int:
        """Count of subscribers that got it."""
        self._check_open()
        packet = _Packet(subject, fitting(subject, message, self.max_payload), outgoing_headers(), respond)
        if not self._up:
            if respond is not None:
                raise BusError("the bus is away")
            return 0
        chosen = self._chosen(subject)
        for subscriber in chosen:
            subscriber.offer(packet)
        return len(chosen)

    def _chosen(self, subject: str) -> list[_Subscriber]:
        """Every plain subscriber, and one of each queue group in turn."""
        found = [subscriber for subscriber in self._subscribers if matches(subscriber.pattern, subject)]
        groups: dict[str, list[_Subscriber]] = {}
        for subscriber in found:
            if subscriber.group is not None:
                groups.setdefault(subscriber.group, []).append(subscriber)
        turn = next(self._turn)
        plain = [subscriber for subscriber in found if subscriber.group is None]
        return plain + [members[turn % len(members)] for members in groups.values()]
