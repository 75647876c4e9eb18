"""Server-sent events: each written chunk is one whole event of valid UTF-8, and silence is filled with comments."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

SEND_S = 30.0
"""A client that takes nothing for this long is gone."""
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies that collect a response before passing it on
}
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class ClientGone(ConnectionError):
    """The client left or takes nothing any more."""


class EventStream:
    """Headers go out on entering; after keepalive_s without a byte a comment does."""

    def __init__(self, request: web.Request, keepalive_s: float) -> None:
        self._request = request
        self._keepalive_s = keepalive_s
        self._written = time.monotonic()
        self._beat: asyncio.Task[None] | None = None
        self.response = web.StreamResponse(headers=HEADERS)

    async def __aenter__(self) -> Self:
        await self.response.prepare(self._request)
        self._beat = asyncio.create_task(self._keep_alive(), name="keep-alive")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)

    async def send(self, event: dict[str, Any]) -> None:
        """Raises ClientGone."""
        await self._write(b"data: " + orjson.dumps(event) + b"\n\n")

    async def done(self) -> None:
        await self._write(DONE)

    async def _write(self, data: bytes) -> None:
        self._written = time.monotonic()
        try:
            async with asyncio.timeout(SEND_S):
                await self.response.write(data)
        except (ConnectionError, TimeoutError) as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone(f"the client takes nothing: {error}") from error

    async def _keep_alive(self) -> None:
        with contextlib.suppress(ClientGone):  # the handler learns of it by its own write, or by being cancelled
            while True:
                quiet = time.monotonic() - self._written
                if quiet >= self._keepalive_s:
                    await self._write(COMMENT)
                else:
                    await asyncio.sleep(self._keepalive_s - quiet)
