"""The bus port: publish, subscribe, request. `bus_nats` is the real one, `bus_memory` serves one process.

Both pass one behaviour suite (tests/contract/test_bus.py). Messages are paceline.wire structs; trace context travels
in message headers and is nobody's business but telemetry's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from paceline.wire import Message


@dataclass(frozen=True)
class Received:
    """A message that came in. `respond` is None unless the sender waits for an answer."""

    subject: str
    message: Message
    headers: dict[str, str] = field(default_factory=dict)
    respond: Callable[[Message], Awaitable[None]] | None = None


Handler = Callable[[Received], Awaitable[None]]


class Subscription(Protocol):
    async def close(self) -> None: ...


class Bus(Protocol):
    """Delivery: at most once, in order per (publisher, subscription). A subscription's handler runs one message at a
    time; what takes long must be handed to a task. Bytes that do not decode, or are of a type the subject does not
    carry, never reach a handler: they are counted, logged, and answered with Refused when an answer is awaited. So is
    a handler's RequestError; any other exception of a handler is logged and answered as an internal error."""

    async def publish(self, subject: str, message: Message) -> None:
        """Raises TooLarge beyond max_payload (both numbers named), BusError when the bus is away and its bounded
        buffer is full."""
        ...

    async def request(self, subject: str, message: Message, *, timeout_s: float) -> Message:
        """The one answer. Raises NoResponders at once when nobody listens, RequestTimeout, and the RequestError that
        a Refused answer carries."""
        ...

    async def subscribe(
        self, subject: str, handler: Handler, *carries: type[Message], queue: str | None = None
    ) -> Subscription:
        """`subject` may hold NATS wildcards (* and >)."""
        ...

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Called after a lost connection is back: what was in flight may be lost."""
        ...

    @property
    def connected(self) -> bool: ...

    async def close(self) -> None:
        """Drain, bounded: handlers that run may end, nothing new is taken."""
        ...
