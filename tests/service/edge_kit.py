"""A gateway under the test's control: it speaks the WAN protocol and commits what and when the test says."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import orjson
from aiohttp import web

from paceline import wire
from paceline.engine import Guess, Rule
from paceline.engine_simulated import toy_card
from paceline.errors import EngineError
from paceline.wire import decode_wan, encode_wan, prefix_hash

KEY = "sk-test"
CARD = toy_card()
END = CARD.end_ids[0]


def ids(text: str) -> tuple[int, ...]:
    """In the toy vocabulary bytes are ids."""
    return tuple(text.encode())


class ScriptedDraft:
    """A draft engine that says the script from the prompt on, wrong at every position in `wrong`."""

    def __init__(self, script: Sequence[int], *, wrong: Sequence[int] = (), context: int = 10_000) -> None:
        self.script, self.wrong, self._context = tuple(script), frozenset(wrong), context
        self.released: list[str] = []
        self.asked: dict[str, list[tuple[int, ...]]] = {}
        self.closed = False
        self.broken = False

    max_paths = 4

    @property
    def context(self) -> int:
        return self._context

    async def guesses(self, session: str, paths: Sequence[Sequence[int]], rule: Rule) -> list[Guess | None]:
        return [await self.guess(session, path, rule) for path in paths]

    async def guess(self, session: str, path: Sequence[int], rule: Rule) -> Guess:
        if self.broken:
            raise EngineError("told to fail")
        self.asked.setdefault(session, []).append(tuple(path))
        index = len(path) - rule.prompt_length
        token = self.script[index] if index < len(self.script) else END
        await asyncio.sleep(0.001)
        return Guess((token + 1) % 256 if index in self.wrong else token, 0.9)

    def release(self, session: str) -> None:
        self.released.append(session)

    async def close(self) -> None:
        self.closed = True


@dataclass
class Told:
    """A session as the scripted cloud has it. `tokens` are committed whether or not anybody hears of it."""

    gateway: ScriptedGateway
    id: str
    opened: wire.SessionOpen
    tokens: list[int]
    kinds: str = ""
    finish: str | None = None
    error: wire.Failure | None = None
    epoch: int = 1
    connection: int = 1
    socket: web.WebSocketResponse | None = None
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    resumes: list[int] = field(default_factory=list)
    """Positions that the edge resumed from."""
    blocks: list[wire.DraftBlock] = field(default_factory=list)
    closes: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def prompt_length(self) -> int:
        return len(self.opened.tokens)

    @property
    def max_tokens(self) -> int:
        return self.opened.max_tokens or 1000

    def verdict(self, at: int, **fields: Any) -> wire.Verdict:
        """All that is committed from `at` on."""
        skip = at - self.prompt_length
        own: dict[str, Any] = {
            "session": self.id, "epoch": self.epoch, "at": at, "tokens": tuple(self.tokens[at:]),
            "kinds": self.kinds[skip:], "finish": self.finish, "error": self.error,
            "counters": wire.Counters(steps=len(self.kinds)) if self.finish else None,
        }  # fmt: skip
        return wire.Verdict(**(own | fields))

    async def commit(
        self, tokens: Sequence[int], *, kinds: str | None = None, finish: str | None = None, hear: bool = True
    ) -> None:
        """The target decided `tokens`; `hear` False loses the verdict on the way."""
        at = len(self.tokens)
        self.tokens += tokens
        self.kinds += kinds or "f" * len(tokens)
        self.finish = finish
        if hear:
            await self.send(self.verdict(at))

    async def send(self, message: wire.Message) -> None:
        if self.socket is not None and not self.socket.closed:
            await self.socket.send_frame(encode_wan(message), aiohttp.WSMsgType.TEXT)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def cut(self) -> None:
        """The link is gone without a word."""
        self.gateway.cut()


class ScriptedGateway:
    """`on_open` and `on_resume` may answer in the place of the normal answer (return True when they did)."""

    def __init__(self) -> None:
        self.url = ""
        self.card = CARD
        self.sessions: dict[str, Told] = {}
        self.sockets: list[tuple[web.WebSocketResponse, web.Request]] = []
        self.connects = 0
        self.refusal: wire.Refused | None = None
        """The answer to every Hello, when set."""
        self.on_open: Callable[[wire.SessionOpen, web.WebSocketResponse], bool] = lambda *_: False
        self.on_resume: Callable[[wire.SessionResume, web.WebSocketResponse], bool] = lambda *_: False
        self.awake = asyncio.Event()
        """While clear, nothing is taken and nothing answered, not even a ping: a dead link, seen from the edge."""
        self.awake.set()
        self.deaf = False
        """Hangs up on every new connection."""
        self.ping_s = 0.0
        """Ping this often; 0: never."""
        self.card_requests = 0
        self.answer_close = True
        self.changed = asyncio.Event()

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/edge", self._serve)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model}", self._model)
        app.router.add_get("/v1/system", self._system)
        app.router.add_post("/v1/system/drain", self._drain)
        return app

    def cut(self) -> None:
        for _, request in self.sockets:
            if request.transport is not None:
                request.transport.abort()
        self.sockets.clear()
        for session in self.sessions.values():
            session.socket = None

    async def session(self, number: int = 0) -> Told:
        """The number-th session that was opened, waited for."""
        async with asyncio.timeout(10):
            while len(self.sessions) <= number:
                self.changed.clear()
                await self.changed.wait()
        return list(self.sessions.values())[number]

    # --- HTTP --------------------------------------------------------------------------------------------------------

    def _refused(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") == f"Bearer {KEY}":
            return None
        return _error(401, "invalid_api_key", "the API key is not known here")

    async def _model(self, request: web.Request) -> web.Response:
        if (refused := self._refused(request)) is not None:
            return refused
        if request.match_info["model"] != self.card.model:
            return _error(404, "model_not_found", "the model is not served here")
        card = msgspec.to_builtins(self.card)
        if request.query.get("card"):
            self.card_requests += 1
            return web.json_response(card)
        del card["tokenizer"], card["model"]
        return web.json_response({"id": self.card.model, "object": "model", "paceline": card})

    async def _models(self, request: web.Request) -> web.Response:
        listed = {"object": "list", "data": [{"id": self.card.model, "object": "model"}]}
        return self._refused(request) or web.json_response(listed)

    async def _system(self, request: web.Request) -> web.Response:
        refused = self._refused(request)
        return refused or _json(SYSTEM)

    async def _drain(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["verifier"] == "nobody":
            return _error(503, "unavailable", "no verifier `nobody` is known")
        return _json(wire.DrainReport(verifier=body["verifier"], moved=3, remaining=0, seconds=0.5))

    # --- WebSocket ---------------------------------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(compress=True, max_msg_size=wire.MAX_WAN_BYTES)
        await socket.prepare(request)
        self.connects += 1
        self.changed.set()
        if self.deaf:
            await socket.close()
            return socket
        self.sockets.append((socket, request))
        pinging = asyncio.create_task(self._ping(socket))
        try:
            async for frame in socket:
                await self.awake.wait()
                await self._take(socket, decode_wan(frame.data.encode()))
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)
        return socket

    async def _ping(self, socket: web.WebSocketResponse) -> None:
        while self.ping_s:
            await asyncio.sleep(self.ping_s)
            await _send(socket, wire.Ping(t_sent=0))

    async def _take(self, socket: web.WebSocketResponse, message: wire.Message) -> None:
        if isinstance(message, wire.Hello):
            await self._greet(socket, message)
        elif isinstance(message, wire.Ping):
            await _send(socket, wire.Pong(t_sent=message.t_sent))
        elif isinstance(message, wire.SessionOpen):
            await self._open(socket, message)
        elif isinstance(message, wire.SessionResume):
            await self._resume(socket, message)
        elif isinstance(message, wire.SessionClose):
            await self._close(self.sessions[message.session])
        elif isinstance(message, wire.DraftBlock):
            told = self.sessions[message.session]
            assert told.socket is socket, "a draft on a connection that the session is not bound to"
            told.blocks.append(message)
            told.changed.set()

    async def _greet(self, socket: web.WebSocketResponse, hello: wire.Hello) -> None:
        wrong = None if hello.key == KEY else _refused(401, "invalid_api_key", "the API key is not known here")
        refused = self.refusal or wrong
        await _send(socket, refused or wire.Welcome(tenant="test"))
        if refused:
            await socket.close(code=4401)

    async def _open(self, socket: web.WebSocketResponse, opened: wire.SessionOpen) -> None:
        if self.on_open(opened, socket):
            return
        told = Told(self, secrets.token_hex(8), opened, list(opened.tokens), socket=socket)
        self.sessions[told.id] = told
        await _send(socket, self._answer(told))
        self.changed.set()

    async def _resume(self, socket: web.WebSocketResponse, resume: wire.SessionResume) -> None:
        told = self.sessions[resume.session]
        told.resumes.append(resume.position)
        told.changed.set()
        if self.on_resume(resume, socket):
            return
        known = prefix_hash(told.tokens[: resume.position])
        if resume.secret != told.secret or resume.prefix_hash != known:
            await _send(socket, _refused(409, "history_lost", "the history differs", told.id))
            return
        told.connection += 1
        told.socket = socket
        await _send(socket, self._answer(told))
        await told.send(told.verdict(resume.position))

    async def _close(self, told: Told) -> None:
        told.closes += 1
        told.changed.set()
        if self.answer_close and told.finish is None:
            await told.commit((), finish="cancelled")

    def _answer(self, told: Told) -> wire.SessionOpened:
        return wire.SessionOpened(
            session=told.id, secret=told.secret, connection=told.connection, epoch=told.epoch,
            seed=told.opened.seed or 7, prompt_length=told.prompt_length, max_tokens=told.max_tokens,
            position=len(told.tokens), speculation=told.opened.speculation,
        )  # fmt: skip


async def _send(socket: web.WebSocketResponse, message: wire.Message) -> None:
    await socket.send_frame(encode_wan(message), aiohttp.WSMsgType.TEXT)


def refused(status: int, code: str, message: str, session: str | None = None) -> wire.Refused:
    return wire.Refused(error=wire.Failure(status=status, code=code, message=message), session=session)


_refused = refused


def _error(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x", "code": code, "param": None}}, status=status)


def _json(message: wire.Message) -> web.Response:
    return web.Response(body=orjson.dumps(msgspec.to_builtins(message, str_keys=True)), content_type="application/json")


SYSTEM = wire.SystemReport(
    verifiers=(
        wire.VerifierStatus(
            verifier="verifier-1", model="toy", fingerprint="f", engine="llama", simulated=False, state="ready",
            context=8192, cells_total=4096, cells_used=312, sessions=2, busy=0.42, queue=0, steps=912,
            step_tokens=3100, step_ms={1: 26.0, 8: 61.5},
        ),
    ),
    batchers=(
        wire.BatcherStatus(
            batcher="batcher-1", model="toy", sessions=2, parked=0, waiting=0, partitions=64, committed=2100,
            drafted=1500, accepted=1100, filled=300, stale=12,
        ),
    ),
    drafters=(),
    decisions=(
        wire.PolicyDecision(
            model="toy", version=3, fill=True, window_cap=64, admit=("verifier-1",), reasons=("verifiers 42 % busy",)
        ),
    ),
)  # fmt: skip


@asynccontextmanager
async def scripted_gateway() -> AsyncIterator[ScriptedGateway]:
    gateway = ScriptedGateway()
    runner = web.AppRunner(gateway.application(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = runner.addresses[0]
    gateway.url = f"http://127.0.0.1:{address[1]}"
    try:
        yield gateway
    finally:
        gateway.awake.set()
        gateway.cut()
        await runner.cleanup()
