"""A wide-area link on one machine: a TCP relay in user space with delay, jitter, a rate, stalls and cuts.

TCP over a real link delivers every byte in order, late. So nothing is lost here: what a lost segment does to a stream
is a *stall* (all bytes behind it wait), what a dead link does is a *cut* (both ends see a reset). `Schedule` decides
when bytes come out and is pure; `Relay` moves them. Everything random comes from the seed, the connection's number and
the direction, so a run can be repeated.

Timers of the event loop have a resolution of about one millisecond; lateness never accumulates, because every chunk is
due at a time of its own (tests/unit/test_relay.py measures it).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import socket
import struct
from dataclasses import dataclass, field

CHUNK_BYTES = 16_384
MAX_CHUNKS_IN_FLIGHT = 1_024
"""Beyond this the relay stops reading, and the sender feels backpressure, as on a real link."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Link:
    """What one direction of the link does to bytes. Both directions of a relay have the same link.

    delay_ms: one way. jitter_ms: added to each chunk, uniform in [0, jitter_ms], order kept. rate_kbit: kilobits a
    second, 0 is unlimited. stall_every_s: mean seconds between stalls (exponential), 0 is never; stall_ms: their
    length. cut_every_s: mean seconds that a connection lives, 0 is for ever.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    rate_kbit: float = 0.0
    stall_every_s: float = 0.0
    stall_ms: float = 0.0
    cut_every_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is negative: {getattr(self, name)}")


def round_trip(rtt_ms: float, jitter_ms: float = 0.0) -> Link:
    """A link whose two directions together take `rtt_ms`, plus up to `jitter_ms` in each."""
    return Link(delay_ms=rtt_ms / 2, jitter_ms=jitter_ms)


class Schedule:
    """When the bytes of one direction of one connection come out. Times are seconds on the caller's clock."""

    def __init__(self, link: Link, randomness: random.Random, opened: float = 0.0) -> None:
        self.link = link
        self._random = randomness
        self._sent = opened
        self._last_due = opened
        self._next_stall = opened
        self._stalled_until = opened
        self._plan_stall(opened)

    def due(self, now: float, size: int) -> float:
        """The time at which `size` bytes that came in at `now` are due; never before earlier bytes."""
        link = self.link
        self._sent = max(now, self._sent, self._stall(now))
        if link.rate_kbit:
            self._sent += size * 8 / (link.rate_kbit * 1_000)
        jitter_ms = self._random.uniform(0, link.jitter_ms) if link.jitter_ms else 0.0
        self._last_due = max(self._last_due, self._sent + (link.delay_ms + jitter_ms) / 1_000)
        return self._last_due

    def hold(self, until: float) -> None:
        """Nothing leaves the sender's side before `until` (a stall by hand, or the handshake's round trip)."""
        self._stalled_until = max(self._stalled_until, until)

    def _stall(self, now: float) -> float:
        """The end of the stall that `now` falls into, if it is later than `now`."""
        while self.link.stall_every_s and now >= self._next_stall:
            self.hold(self._next_stall + self.link.stall_ms / 1_000)
            self._plan_stall(self._next_stall)
        return self._stalled_until

    def _plan_stall(self, after: float) -> None:
        if self.link.stall_every_s:
            self._next_stall = after + self._random.expovariate(1 / self.link.stall_every_s)


@dataclass
class Traffic:
    """Payload bytes that went through, counted when they come out."""

    connections: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class _Pump:
    """One direction of one connection."""

    def __init__(self, schedule: Schedule, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.schedule = schedule
        self.bytes = 0
        self._reader, self._writer = reader, writer
        self._flying: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS_IN_FLIGHT)

    async def take(self) -> None:
        """Read until the end of the stream; the end itself (empty bytes) travels like data."""
        clock = asyncio.get_running_loop().time
        data = b"-"
        while data:
            data = await self._reader.read(CHUNK_BYTES)
            await self._flying.put((self.schedule.due(clock(), len(data)), data))

    async def give(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due, data = await self._flying.get()
            if (wait := due - clock()) > 0:
                await asyncio.sleep(wait)
            if not data:
                break
            self._writer.write(data)
            self.bytes += len(data)
            await self._writer.drain()
        if self._writer.can_write_eof():
            self._writer.write_eof()


@dataclass(eq=False)
class _Connection:
    up: _Pump
    down: _Pump
    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    task: asyncio.Task[None] | None
    """Runs this connection; cancelled by a reset."""

    async def run(self) -> None:
        """Until both directions have ended; a broken end breaks the other one."""
        try:
            async with asyncio.TaskGroup() as group:
                for pump in (self.up, self.down):
                    group.create_task(pump.take())
                    group.create_task(pump.give())
        except* OSError as broken:
            logger.debug("connection broke: %s", broken.exceptions[0])
            for writer in self.writers:
                _reset(writer)
        for writer in self.writers:
            writer.close()

    def reset(self) -> None:
        for writer in self.writers:
            _reset(writer)
        if self.task is not None:
            self.task.cancel()


@dataclass
class Relay:
    """Listens on `port`, connects on to (target_host, target_port). Made by `start`, ended by `close`."""

    target_host: str
    target_port: int
    link: Link
    seed: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    refusing: bool = False
    """While true, new connections are reset at once (the link is down)."""
    _open: set[_Connection] = field(default_factory=set, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _numbers: itertools.count[int] = field(default_factory=itertools.count, init=False)
    _server: asyncio.Server | None = field(default=None, init=False)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> Relay:
        self._server = await asyncio.start_server(self._accept, host, port)
        return self

    @property
    def port(self) -> int:
        if self._server is None:
            raise RuntimeError("the relay is not started")
        return int(self._server.sockets[0].getsockname()[1])

    def reshape(self, link: Link) -> None:
        """From now on, open connections included, bytes that come in are treated by `link`."""
        self.link = link
        for connection in self._open:
            connection.up.schedule.link = connection.down.schedule.link = link

    def stall(self, seconds: float) -> None:
        """Bytes that come in during the next `seconds` wait for their end, both ways."""
        until = asyncio.get_running_loop().time() + seconds
        for connection in self._open:
            connection.up.schedule.hold(until)
            connection.down.schedule.hold(until)

    def cut(self) -> int:
        """Reset every open connection; bytes in flight are gone. Returns how many there were."""
        connections = list(self._open)
        for connection in connections:
            connection.reset()
        return len(connections)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            _reset(writer)
            return
        task = asyncio.create_task(self._serve(reader, writer), name="relay-connection")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self.target_host, self.target_port)
        except OSError as error:
            logger.warning("cannot reach %s:%d: %s", self.target_host, self.target_port, error)
            _reset(writer)
            return
        number = next(self._numbers)
        connection = self._connect(number, (reader, writer), (far_reader, far_writer))
        self.traffic.connections += 1
        self._open.add(connection)
        cut = self._plan_cut(number, connection)
        try:
            await connection.run()
        finally:
            if cut is not None:
                cut.cancel()
            self._open.discard(connection)
            self.traffic.bytes_up += connection.up.bytes
            self.traffic.bytes_down += connection.down.bytes

    def _connect(
        self,
        number: int,
        near: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> _Connection:
        now = asyncio.get_running_loop().time()
        up = Schedule(self.link, random.Random(f"{self.seed}/{number}/up"), now)
        down = Schedule(self.link, random.Random(f"{self.seed}/{number}/down"), now)
        up.hold(now + 2 * self.link.delay_ms / 1_000)  # the handshake, which the local accept made free
        return _Connection(
            _Pump(up, near[0], far[1]), _Pump(down, far[0], near[1]), (near[1], far[1]), asyncio.current_task()
        )

    def _plan_cut(self, number: int, connection: _Connection) -> asyncio.TimerHandle | None:
        if not self.link.cut_every_s:
            return None
        life_s = random.Random(f"{self.seed}/{number}/life").expovariate(1 / self.link.cut_every_s)
        return asyncio.get_running_loop().call_later(life_s, connection.reset)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset: the peer sees an error, not an orderly end."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
