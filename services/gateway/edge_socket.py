"""/v1/edge: the WebSocket of edge devices. The first frame is Hello with the key; then see edge_connection.

Close codes: BAD_KEY (also of a key that is revoked later), 1008 for a greeting that is none, 1009 for a frame over the
bound, 1001 when the gateway stops. A peer that is silent or takes nothing is cut without one.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog
from aiohttp import WSCloseCode, WSMsgType, web

from paceline import telemetry
from paceline.bus_delivery import refusal
from paceline.errors import RequestError, Unauthorized
from paceline.service import Service
from paceline.wire import MAX_WAN_BYTES, Hello, WireError, decode_wan, encode_wan
from services.gateway.edge_connection import EdgeConnection
from services.gateway.sessions import Sessions
from services.gateway.tenants import REVOKED_S, Forbidden, Keyring

log = structlog.get_logger(__name__)

HELLO_S = 10.0
BAD_KEY = 4401


class EdgeSocket:
    """The route, and every open connection of this gateway."""

    def __init__(self, service: Service, sessions: Sessions, keyring: Keyring) -> None:
        self._service = service
        self._sessions = sessions
        self._keyring = keyring
        self._open: set[web.WebSocketResponse] = set()

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        _check_origin(request)
        socket = web.WebSocketResponse(compress=True, max_msg_size=MAX_WAN_BYTES, timeout=2.0)
        await socket.prepare(request)
        self._open.add(socket)
        self._service.metrics.set(telemetry.CONNECTIONS, len(self._open), kind="edge")
        try:
            await self._converse(request, socket)
        finally:
            self._open.discard(socket)
            self._service.metrics.set(telemetry.CONNECTIONS, len(self._open), kind="edge")
        return socket

    async def close(self) -> None:
        """The gateway stops: edges go on at another one, or at this one's successor."""
        going = (socket.close(code=WSCloseCode.GOING_AWAY, message=b"the gateway stops") for socket in set(self._open))
        await asyncio.gather(*going, return_exceptions=True)

    async def _converse(self, request: web.Request, socket: web.WebSocketResponse) -> None:
        try:
            hello = await _hello(socket)
            tenant = self._keyring.identify(hello.key)
        except RequestError as error:
            with contextlib.suppress(ConnectionError):
                await socket.send_frame(encode_wan(refusal(error)), WSMsgType.TEXT)
            code = BAD_KEY if isinstance(error, Unauthorized) else WSCloseCode.POLICY_VIOLATION
            await socket.close(code=code, message=error.code.encode())
            return
        transport = request.transport
        abort = transport.abort if transport is not None else lambda: None
        connection = EdgeConnection(self._service, self._sessions, socket, tenant, abort)
        watch = asyncio.create_task(self._watch(connection, hello.key), name="edge watch")
        try:
            await connection.run()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self, connection: EdgeConnection, key: str) -> None:
        """Ends a connection that fell silent, or whose key was revoked."""
        while not connection.silent:
            await asyncio.sleep(REVOKED_S / 2)
            try:
                self._keyring.identify(key)
            except Unauthorized:
                await connection.socket.close(code=BAD_KEY, message=b"invalid_api_key")
                return
        log.info("edge is silent", tenant=connection.tenant.name)
        connection.abort()


async def _hello(socket: web.WebSocketResponse) -> Hello:
    """The first frame. Raises BadRequest, Unauthorized."""
    try:
        frame = await socket.receive(timeout=HELLO_S)
    except TimeoutError:
        raise Unauthorized(f"no hello within {HELLO_S:g} s", code="missing_api_key") from None
    if frame.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
        raise WireError("the first frame must be a hello")
    return decode_wan(frame.data.encode() if isinstance(frame.data, str) else frame.data, Hello)


def _check_origin(request: web.Request) -> None:
    """A page of another site must not use a browser's way to this gateway. Programs send no Origin."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        raise Forbidden(f"the origin {origin} may not open this socket", code="origin_refused")
