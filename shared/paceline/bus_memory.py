"""The bus within one process: same rules as NATS, messages really encoded and decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from paceline import wire
from paceline.bus import Handler, Subscription
from paceline.bus_delivery import PENDING_MESSAGES, Inbox, Packet, Respond, answered, fitting, nobody
from paceline.errors import BusError, RequestTimeout
from paceline.telemetry import Metrics, outgoing_headers

MAX_PAYLOAD = 1 << 20


def matches(pattern: str, subject: str) -> bool:
    """NATS wildcards: `*` is one token, a final `>` one or more."""
    want, have = pattern.split("."), subject.split(".")
    for index, word in enumerate(want):
        if word == ">":
            return len(have) > index
        if index >= len(have) or word not in ("*", have[index]):
            return False
    return len(want) == len(have)


@dataclass(frozen=True)
class _Subscriber:
    pattern: str
    group: str | None
    inbox: Inbox
    forget: Callable[[_Subscriber], None]

    async def close(self) -> None:
        self.forget(self)
        await self.inbox.close()


class MemoryBus:
    """One object is the server and every client. `lose()` and `restore()` play an outage: what is sent meanwhile is
    lost, requests fail."""

    def __init__(
        self, *, max_payload: int = MAX_PAYLOAD, metrics: Metrics | None = None, pending: int = PENDING_MESSAGES
    ) -> None:
        self.max_payload = max_payload
        self._metrics = metrics
        self._pending = pending
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
            data = fitting(answer, self.max_payload)
            if not future.done() and self._up:
                future.set_result(data)

        if not self._send(subject, message, respond):
            raise nobody(subject)
        try:
            async with asyncio.timeout(timeout_s):  # wait_for may swallow a cancellation on Python 3.11
                data = await future
        except TimeoutError:
            raise RequestTimeout(f"no answer on {subject} within {timeout_s:g} s") from None
        return answered(wire.decode(data))

    async def subscribe(
        self, subject: str, handler: Handler, *carries: type[wire.Message], queue: str | None = None
    ) -> Subscription:
        self._check_open()
        inbox = Inbox(subject, handler, carries, metrics=self._metrics, limit=self._pending)
        subscriber = _Subscriber(subject, queue, inbox, self._forget)
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

    def _forget(self, subscriber: _Subscriber) -> None:
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)

    def _check_open(self) -> None:
        if self._closed:
            raise BusError("the bus is closed")

    def _send(self, subject: str, message: wire.Message, respond: Respond | None) -> int:
        """Count of subscribers that got it."""
        self._check_open()
        packet = Packet(subject, fitting(message, self.max_payload), outgoing_headers(), respond)
        if not self._up:
            if respond is not None:
                raise BusError("the bus is away")
            return 0
        chosen = self._chosen(subject)
        for subscriber in chosen:
            subscriber.inbox.offer(packet)
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
