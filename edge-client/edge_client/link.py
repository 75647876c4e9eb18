"""The link to a gateway: one WebSocket that comes back by itself.

`Link` dials, says Hello, and pings; after 3 s in which not one byte came in, or when the socket ends, it dials again
with growing pauses. What to resume is its listener's business: `link_up` is called when frames can be sent, `link_down`
when they cannot. Frames are wire messages with short names under permessage-deflate.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import aiohttp
import structlog

from edge_client.backoff import pause_s
from edge_client.faults import LinkDown, explained, failure_of
from edge_client.meter import FrameMeter
from paceline import wire
from paceline.errors import Overloaded, PacelineError, TooLarge, Unavailable

_log = structlog.get_logger("paceline.edge.link")
_TEXT = (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY)
_SMOOTHING = 0.2


@dataclass(frozen=True)
class LinkOptions:
    """connect_s: for one dial, Hello included; silent_s: without a byte from the gateway the link counts as lost;
    patience_s: dialling again ends after that (the cloud has cancelled a parked session by then)."""

    connect_s: float = 10.0
    silent_s: float = 3.0
    patience_s: float = 60.0
    ping_s: float = 0.5


class Listener(Protocol):
    """All are called from the event loop and must not block."""

    def link_up(self) -> None: ...

    def link_down(self, reason: str) -> None: ...

    def link_lost(self, error: PacelineError) -> None:
        """The link will not come back."""
        ...

    def frame(self, message: wire.Message, t: float, size: int) -> None:
        """A message that came in at `t` (time.monotonic()) and cost `size` bytes on the wire."""
        ...


class Link:
    """`url` is the gateway's base URL. Use as `async with link:`; entering dials once and raises what is wrong."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, key: str, listener: Listener, options: LinkOptions | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.options = options or LinkOptions()
        self.round_trip_ms: float | None = None
        self.tenant = ""
        self._http, self._key, self._listener = http, key, listener
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._up, self._down = FrameMeter(deflate=False, masked=True), FrameMeter(deflate=False, masked=False)
        self._task: asyncio.Task[None] | None = None
        self._resets = asyncio.Event()

    async def __aenter__(self) -> Link:
        self._socket = await self._dial()
        self._task = asyncio.create_task(self._run(), name="edge-link")
        return self

    async def __aexit__(self, *_: object) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    @property
    def is_up(self) -> bool:
        return self._socket is not None and not self._socket.closed

    async def send(self, message: wire.Message) -> int:
        """Bytes that the frame costs on the wire. Raises LinkDown, and TooLarge beyond a WAN frame's bound."""
        socket = self._socket
        if socket is None:
            raise LinkDown("the link to the gateway is down")
        return await self._send(socket, message)

    def reset(self) -> None:
        """Give this connection up and dial a new one."""
        self._resets.set()

    # --- dialling --------------------------------------------------------------------------------------------------

    async def _dial(self) -> aiohttp.ClientWebSocketResponse:
        with explained(self.url):
            async with asyncio.timeout(self.options.connect_s), self._connected() as socket:
                self._up = FrameMeter(deflate=bool(socket.compress), masked=True)
                self._down = FrameMeter(deflate=bool(socket.compress), masked=False)
                await self._greet(socket)
                return socket
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        # to aiohttp's heartbeat any byte is life: it pings after so long a silence, and gives up half as long later
        socket = await self._http.ws_connect(
            f"{self.url}/v1/edge",
            compress=15,
            heartbeat=self.options.silent_s * 2 / 3,
            max_msg_size=wire.MAX_WAN_BYTES,
            timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
        )
        try:
            yield socket
        except BaseException:
            await socket.close()
            raise

    async def _greet(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        await self._send(socket, wire.Hello(key=self._key, client="paceline-edge"))
        while True:
            frame = await socket.receive()
            if frame.type not in _TEXT:
                raise Unavailable(f"the gateway at {self.url} hung up during the greeting (code {socket.close_code})")
            message = self._decode(frame.data)[0]
            if isinstance(message, wire.Refused):
                raise failure_of(message)
            if isinstance(message, wire.Welcome):
                self.tenant = message.tenant
                return

    # --- life ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self._socket is not None:
                reason = await self._serve(self._socket)
                self._socket = None
                _log.info("link down", reason=reason)
                self._listener.link_down(reason)
                self._socket = await self._redial()
                self._listener.link_up()
        except PacelineError as error:
            self._listener.link_lost(error)
        except Exception as error:
            _log.exception("link failed")
            self._listener.link_lost(PacelineError(f"the link failed: {error!r}"))

    async def _redial(self) -> aiohttp.ClientWebSocketResponse:
        deadline = time.monotonic() + self.options.patience_s
        attempt = 0
        while True:
            await asyncio.sleep(pause_s(attempt, random.random()))
            attempt += 1
            try:
                return await self._dial()
            except (Unavailable, Overloaded) as error:
                _log.debug("dialling failed", attempt=attempt, error=str(error))
                if time.monotonic() >= deadline:
                    raise

    async def _serve(self, socket: aiohttp.ClientWebSocketResponse) -> str:
        """Read until the socket ends; why it did."""
        self._resets.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._ping(socket)), tasks.create_task(self._hang_up(socket))]
                reason = await self._read(socket)
                for task in beside:
                    task.cancel()
            return reason
        finally:
            await socket.close()

    async def _hang_up(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        await self._resets.wait()
        await socket.close()

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> str:
        while True:
            frame = await socket.receive()
            t = time.monotonic()
            if frame.type not in _TEXT:
                return self._why_ended(socket)
            self._take(frame.data, t)

    def _why_ended(self, socket: aiohttp.ClientWebSocketResponse) -> str:
        fault = socket.exception()
        _log.info("socket ended", code=socket.close_code, fault=repr(fault))
        if isinstance(fault, aiohttp.ServerTimeoutError):
            return f"nothing was heard for {self.options.silent_s:g} s"
        if fault is None and socket.close_code not in (None, aiohttp.WSCloseCode.ABNORMAL_CLOSURE):
            return f"the gateway hung up (code {socket.close_code})"
        return "the connection broke"

    def _take(self, data: str | bytes, t: float) -> None:
        try:
            message, size = self._decode(data)
        except wire.WireError as error:
            _log.warning("a frame that is no message of ours", error=str(error))
            return
        if isinstance(message, wire.Pong):
            self._measure(t * 1e3 - message.t_sent)
        elif not isinstance(message, wire.Ping):  # a gateway's ping shows that it lives; ours show that we do
            self._listener.frame(message, t, size)

    def _measure(self, elapsed_ms: float) -> None:
        known = self.round_trip_ms
        self.round_trip_ms = elapsed_ms if known is None else known + _SMOOTHING * (elapsed_ms - known)

    async def _ping(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Say that we live, every ping_s: the gateway takes a session for parked 2 s after our last byte."""
        with suppress(LinkDown):
            while True:
                await self._send(socket, wire.Ping(t_sent=int(time.monotonic() * 1e3)))
                await asyncio.sleep(self.options.ping_s)

    # --- frames ----------------------------------------------------------------------------------------------------

    async def _send(self, socket: aiohttp.ClientWebSocketResponse, message: wire.Message) -> int:
        data = wire.encode_wan(message)
        if len(data) > wire.MAX_WAN_BYTES:
            raise TooLarge(f"a message of {len(data)} bytes is over the bound of {wire.MAX_WAN_BYTES} for one frame")
        size = self._up.size(data)
        try:
            await socket.send_frame(data, aiohttp.WSMsgType.TEXT)
        except ConnectionError as error:
            raise LinkDown(f"the link to the gateway is down: {error}") from error
        return size

    def _decode(self, data: str | bytes) -> tuple[wire.Message, int]:
        raw = data.encode() if isinstance(data, str) else data
        return wire.decode_wan(raw, wire.Message), self._down.size(raw)
