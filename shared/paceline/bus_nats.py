"""The bus on NATS. The only importer of nats-py.

What the library leaves to us, each found by trying it on a real server:

- Requests that are in flight when the connection breaks wait for their timeout. Here they fail at once.
- A protocol error from the server closes the client for good. Here it is replaced, with its subscriptions.
- `flush` sends its PING ahead of what waits to be sent, so a PONG does not prove that a SUB has arrived; and a `flush`
  that is cancelled or times out leaves a dead future whose PONG then ends the read loop. `drain` builds on it. Here a
  round trip is a message to ourselves, behind everything sent before it.
- A frozen server is noticed after four minutes, a first connection never gives up. Here both are bounded.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from paceline import wire
from paceline.bus import Handler, Subscription
from paceline.bus_delivery import PENDING_MESSAGES, Inbox, Packet, Respond, answered, fitting, nobody
from paceline.errors import BusError, RequestTimeout
from paceline.telemetry import BUS_DROPPED, BUS_RECONNECTS, Metrics, outgoing_headers

log = structlog.get_logger(__name__)

CONNECT_S = 3.0
RECONNECT_PAUSE_S = 0.5
PING_S = 2
PINGS_UNANSWERED = 2
OFFLINE_BYTES = 2 << 20
"""Publishes kept while the connection is away; beyond that BusError."""
FLUSH_S = 2.0
CLOSE_S = 2.0
HEADER_BYTES = 512
"""Room for headers and their framing, which the server counts as payload."""
LOG_EVERY_S = 10.0


@dataclass(eq=False)
class _Subscriber:
    bus: NatsBus
    subject: str
    queue: str
    inbox: Inbox
    remote: NatsSubscription | None = None

    async def start(self, client: Client) -> None:
        self.remote = await client.subscribe(self.subject, queue=self.queue, cb=self._incoming)

    async def close(self) -> None:
        await self.bus.forget(self)
        await self.inbox.close()

    async def _incoming(self, message: Msg) -> None:
        respond = self.bus.responder(message.reply) if message.reply else None
        self.inbox.offer(Packet(message.subject, message.data, dict(message.headers or {}), respond))


class NatsBus:
    """See paceline.bus.Bus. Make one with `connect`."""

    def __init__(self, url: str, name: str, metrics: Metrics | None, pending: int) -> None:
        self._url = url
        self._name = name
        self._metrics = metrics
        self._pending = pending
        self._client = Client()
        self._subscribers: list[_Subscriber] = []
        self._callbacks: list[Callable[[], None]] = []
        self._requests: set[asyncio.Task[Msg]] = set()
        self._echo_subject = f"echo.{secrets.token_hex(8)}"
        self._echoes: dict[bytes, asyncio.Future[None]] = {}
        self._echo_number = count()
        self._lost = 0
        self._closing = False
        self._replacing: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._logged = -LOG_EVERY_S

    @classmethod
    async def connect(
        cls, url: str, name: str, metrics: Metrics | None = None, *, pending: int = PENDING_MESSAGES
    ) -> NatsBus:
        """Raises BusError when no server answers within CONNECT_S. `pending`: messages held per subscription."""
        bus = cls(url, name, metrics, pending)
        bus._client = await bus._new_client()
        bus._up.set()
        return bus

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def max_payload(self) -> int:
        """Bytes of one message at most, as the server told us, less room for headers."""
        return self._client.max_payload - HEADER_BYTES

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    async def publish(self, subject: str, message: wire.Message) -> None:
        await self._send(subject, fitting(message, self.max_payload), outgoing_headers())

    async def request(self, subject: str, message: wire.Message, *, timeout_s: float) -> wire.Message:
        data, deadline = fitting(message, self.max_payload), time.monotonic() + timeout_s
        await self._wait_connected(timeout_s)
        left = max(0.001, deadline - time.monotonic())
        call = self._client.request(subject, data, timeout=left, headers=outgoing_headers() or None)
        try:
            reply = await self._unless_lost(asyncio.create_task(call, name=f"request {subject}"))
        except nats.errors.NoRespondersError:
            raise nobody(subject) from None
        except nats.errors.TimeoutError:
            raise RequestTimeout(f"no answer on {subject} within {timeout_s:g} s") from None
        except nats.errors.Error as error:
            raise BusError(f"request on {subject}: {error}") from error
        return answered(wire.decode(reply.data))

    async def subscribe(
        self, subject: str, handler: Handler, *carries: type[wire.Message], queue: str | None = None
    ) -> Subscription:
        inbox = Inbox(subject, handler, carries, metrics=self._metrics, limit=self._pending)
        subscriber = _Subscriber(self, subject, queue or "", inbox)
        self._subscribers.append(subscriber)
        try:
            await subscriber.start(self._client)
            await self._round_trip()
        except nats.errors.Error as error:
            await subscriber.close()
            raise BusError(f"subscribing to {subject}: {error}") from error
        except (BusError, asyncio.CancelledError):
            await subscriber.close()
            raise
        return subscriber

    async def close(self) -> None:
        """Unsubscribe, let handlers finish (bounded), then let go of the connection."""
        self._closing = True
        if self._replacing is not None:
            self._replacing.cancel()
        await asyncio.gather(*(subscriber.close() for subscriber in list(self._subscribers)))
        try:
            await self._round_trip()
            async with asyncio.timeout(CLOSE_S):
                await self._client.close()
        except (BusError, TimeoutError, nats.errors.Error) as error:
            log.warning("bus not closed cleanly", reason=repr(error))

    def responder(self, reply: str) -> Respond:
        async def respond(answer: wire.Message) -> None:
            await self._send(reply, fitting(answer, self.max_payload), outgoing_headers())

        return respond

    async def forget(self, subscriber: _Subscriber) -> None:
        """Take nothing more for `subscriber`."""
        if subscriber not in self._subscribers:
            return
        self._subscribers.remove(subscriber)
        if subscriber.remote is None or self._client.is_closed:
            return
        try:
            await subscriber.remote.unsubscribe()
            await self._round_trip()
        except (BusError, nats.errors.Error) as error:  # the connection broke meanwhile, and the subscription with it
            log.debug("not unsubscribed", subject=subscriber.subject, reason=repr(error))

    # --- sending ---

    async def _send(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        if self._client.is_connected and self._client.pending_data_size > OFFLINE_BYTES:
            raise BusError(f"the bus takes nothing now, {OFFLINE_BYTES} bytes wait for it already")
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        try:
            await self._client.publish(subject, data, headers=headers or None)
        except nats.errors.OutboundBufferLimitError as error:
            raise BusError(f"the bus is away and {OFFLINE_BYTES} bytes wait for it already") from error
        except nats.errors.Error as error:
            raise BusError(f"publishing on {subject}: {error}") from error
        if task and task.cancelling() > cancels:  # nats-py swallows a cancellation while it waits to send
            raise asyncio.CancelledError

    async def _wait_connected(self, timeout_s: float) -> None:
        if self._client.is_connected:
            return
        self._up.clear()  # the loss may be known here before the client's callback has run
        try:
            async with asyncio.timeout(timeout_s):  # wait_for may swallow a cancellation on Python 3.11
                await self._up.wait()
        except TimeoutError:
            raise BusError(f"the bus has been away for {timeout_s:g} s") from None

    async def _unless_lost(self, task: asyncio.Task[Msg]) -> Msg:
        """The reply, or BusError as soon as the connection that carried the request breaks."""
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        lost = self._lost
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._lost == lost or (current is not None and current.cancelling()):
                raise
            raise BusError("the bus was lost while the request was in flight") from None

    async def _round_trip(self) -> None:
        """Returns when the server has seen all that we sent before. While the connection is away: at once, because the
        client sends subscriptions after the reconnection ahead of everything that was published meanwhile."""
        if not self._client.is_connected:
            return
        token = str(next(self._echo_number)).encode()
        echo: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._echoes[token] = echo
        try:
            await self._send(self._echo_subject, token, {})
            async with asyncio.timeout(FLUSH_S):
                await echo
        except TimeoutError:
            raise BusError(f"the bus has not answered within {FLUSH_S:g} s") from None
        finally:
            del self._echoes[token]

    async def _echo(self, message: Msg) -> None:
        echo = self._echoes.get(message.data)
        if echo is not None and not echo.done():
            echo.set_result(None)

    # --- the connection's life ---

    async def _new_client(self) -> Client:
        client = Client()
        options: dict[str, Any] = {
            "name": self._name,
            "connect_timeout": 2,
            "reconnect_time_wait": RECONNECT_PAUSE_S,
            "max_reconnect_attempts": -1,
            "ping_interval": PING_S,
            "max_outstanding_pings": PINGS_UNANSWERED,
            "pending_size": OFFLINE_BYTES,
            "flush_timeout": FLUSH_S,
            "error_cb": self._on_error,
            "disconnected_cb": self._on_lost,
            "reconnected_cb": self._on_back,
            "closed_cb": self._on_closed,
        }
        try:
            async with asyncio.timeout(CONNECT_S):
                await client.connect(self._url, **options)
                await client.subscribe(self._echo_subject, cb=self._echo)
        except (TimeoutError, OSError, nats.errors.Error) as error:
            raise BusError(f"no NATS server answers at {self._url}: {error or type(error).__name__}") from error
        return client

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError) and self._metrics is not None:
            self._metrics.add(BUS_DROPPED, reason="slow_consumer")
        if time.monotonic() - self._logged >= LOG_EVERY_S:
            self._logged = time.monotonic()
            log.warning("bus trouble", error=repr(error), connected=self._client.is_connected)

    async def _on_lost(self) -> None:
        self._up.clear()
        self._lost += 1
        for request in list(self._requests):
            request.cancel()
        for echo in self._echoes.values():
            if not echo.done():
                echo.set_result(None)  # the subscriptions come back with the connection
        if not self._closing:
            log.warning("bus lost", requests_in_flight=len(self._requests))

    async def _on_back(self) -> None:
        self._up.set()
        log.info("bus is back")
        if self._metrics is not None:
            self._metrics.add(BUS_RECONNECTS)
        for callback in self._callbacks:
            try:
                callback()
            except Exception:  # an exception here would end nats-py's reconnection for good
                log.exception("reconnect callback failed")

    async def _on_closed(self) -> None:
        """The client gave up for good (a protocol error): unless we asked for that, replace it."""
        if not self._closing:
            self._replacing = asyncio.create_task(self._replace(), name="bus replacing its client")

    async def _replace(self) -> None:
        log.warning("bus client closed by the server", error=repr(self._client.last_error))
        while not self._closing:
            try:
                self._client = await self._new_client()
                for subscriber in list(self._subscribers):
                    await subscriber.start(self._client)
                await self._round_trip()
            except (BusError, nats.errors.Error) as error:
                await self._on_error(error)
                await asyncio.sleep(RECONNECT_PAUSE_S)
            else:
                await self._on_back()
                return
