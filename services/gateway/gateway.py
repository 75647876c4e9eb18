"""The gateway: HTTP and WebSocket on one port, for the clients of one model.

It holds no generation state: whatever it knows of a session can be read again from the store, by this process or the
next one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import structlog
from aiohttp import web

from paceline import telemetry
from paceline.health import health_routes, listening
from paceline.served_card import served_card
from paceline.service import Service
from paceline.tokenizer import Tokenizer
from services.gateway.answers import ChatShape, CompletionShape
from services.gateway.completions import Completions
from services.gateway.edge_socket import EdgeSocket
from services.gateway.http import guard
from services.gateway.openai_api import parse_chat, parse_completion
from services.gateway.prompts import Prompts
from services.gateway.sessions import Sessions
from services.gateway.system import Models, System
from services.gateway.tenants import Keyring

log = structlog.get_logger(__name__)

DRAIN_SHARE, LAST_WORDS_SHARE = 0.8, 0.1
"""Of drain_s: for streams to end by themselves, and for telling those that did not."""


class Gateway:
    """All routes. `running` counts requests whose answers are under way."""

    def __init__(self, service: Service, tokenizer: Tokenizer, keyring: Keyring) -> None:
        self.service = service
        self.sessions = Sessions(service, service.settings.model)
        self.running = 0
        self.port = 0
        self._stopped = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._completions = Completions(service, self.sessions, tokenizer, Prompts(tokenizer), keyring, self._stopped)
        self._edges = EdgeSocket(service, self.sessions, keyring)
        self._models = Models(tokenizer.card, keyring)
        self._system = System(service.bus, keyring)

    def app(self) -> web.Application:
        """A handler is cancelled when its client leaves: that is how a call's sessions learn of it."""
        app = web.Application(
            middlewares=[guard(self.service.metrics)],
            client_max_size=self.service.settings.max_body_bytes,
            handler_args={"handler_cancellation": True},
        )
        app.add_routes(health_routes(self.service))
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._complete),
                web.get("/v1/models", self._models.listed),
                web.get("/v1/models/{model:.+}", self._models.one),
                web.get("/v1/edge", self._edges.serve),
                web.get("/v1/system", self._system.report),
                web.post("/v1/system/drain", self._system.drain),
            ]
        )
        return app

    async def drain(self) -> None:
        """New calls are refused already; running ones may end, edges are sent on, late ones are told."""
        drain_s = self.service.settings.drain_s
        deadline = asyncio.get_running_loop().time() + drain_s * DRAIN_SHARE
        await self._edges.close()
        if not await self._idle_by(deadline):
            log.warning("streams cut short", count=self.running)
            self._stopped.set()
            await self._idle_by(deadline + drain_s * LAST_WORDS_SHARE)

    async def _idle_by(self, deadline: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._idle.wait()
        return self._idle.is_set()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, by: int) -> None:
        self.running += by
        if self.running:
            self._idle.clear()
        else:
            self._idle.set()
        self.service.metrics.set(telemetry.CONNECTIONS, self.running, kind="http")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        with self._counted():
            return await self._completions.serve(request, parse_chat, ChatShape())

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        with self._counted():
            return await self._completions.serve(request, parse_completion, CompletionShape())


@asynccontextmanager
async def body(service: Service) -> AsyncIterator[None]:
    """Of the process (paceline.service)."""
    async with running(service):
        yield


@asynccontextmanager
async def running(service: Service) -> AsyncIterator[Gateway]:
    settings = service.settings
    keyring = Keyring(settings.keys_file)
    tokenizer = Tokenizer(await asyncio.to_thread(served_card, settings))
    made = Gateway(service, tokenizer, keyring)
    await made.sessions.start()
    async with listening(made.app(), settings.http_host, settings.http_port, "PACELINE_HTTP_PORT") as port:
        made.port = port
        log.info("listening", url=f"http://{settings.http_host}:{port}", model=settings.model)
        yield made
        await made.drain()
