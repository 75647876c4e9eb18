"""What the gateway's tests share: a gateway on a memory bus, and a batcher that plays a script.

The scripted batcher commits to the store and then publishes, cuts ends as the real one does, and can be told to lose
verdicts, to wait, or to be silent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from paceline import subjects
from paceline.bus import Received
from paceline.bus_memory import MemoryBus
from paceline.ends import Ends
from paceline.engine_simulated import toy_card
from paceline.errors import RequestError
from paceline.service import Service
from paceline.settings import Settings
from paceline.store import Append, SessionRecord
from paceline.store_memory import MemoryStore
from paceline.tokenizer import Tokenizer
from paceline.wire import (
    BatcherStatus,
    Counters,
    DraftBlock,
    LogprobEntry,
    Presence,
    SessionClose,
    SessionOpen,
    SessionOpened,
    SessionResume,
    Verdict,
    VerifierStatus,
)
from services.gateway.gateway import Gateway, running
from services.gateway.keys import add

END = 256
TOKENIZER = Tokenizer(toy_card())


def ids(text: str | bytes) -> tuple[int, ...]:
    """The toy model's tokens are bytes."""
    return tuple(text.encode() if isinstance(text, str) else text)


@dataclass
class Played:
    """One session as the scripted batcher has it."""

    opening: SessionOpen
    epoch: int
    ends: Ends
    at: int
    finish: str | None = None
    task: asyncio.Task[None] | None = None
    steps: int = 0


@dataclass
class ScriptedBatcher:
    """script: tokens of an answer by (prompt, choice), END added. block: tokens a verdict. lose: which verdicts never
    reach the bus. gate: awaited before each verdict. silent: openings are not answered."""

    bus: MemoryBus
    store: MemoryStore
    script: Callable[[SessionOpen], Sequence[int]] = lambda opening: ids("Hello, world")
    block: int = 3
    lose: Callable[[int], bool] = lambda index: False
    gate: Callable[[Played], Any] | None = None
    refuse: RequestError | None = None
    silent: bool = False
    top: Callable[[int], LogprobEntry] | None = None
    sessions: dict[str, Played] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    presences: list[Presence] = field(default_factory=list)
    drafts: list[DraftBlock] = field(default_factory=list)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, model: str = "toy") -> None:
        await self.bus.subscribe(subjects.SESSION.at(model=model, partition="*").replace("=2A", "*"), self._session)
        await self.bus.subscribe(subjects.DRAFT.at(model=model, partition="*").replace("=2A", "*"), self._draft)

    async def _draft(self, received: Received) -> None:
        assert isinstance(received.message, DraftBlock)
        self.drafts.append(received.message)
        self.heard.set()

    async def _session(self, received: Received) -> None:
        message = received.message
        if isinstance(message, SessionOpen):
            await self._open(message, received)
        elif isinstance(message, SessionResume):
            await self._resume(message, received)
        elif isinstance(message, SessionClose):
            self.closed.append(message.session)
            await self._cancel(message.session)
        elif isinstance(message, Presence):
            self.presences.append(message)
        self.heard.set()

    async def _open(self, opening: SessionOpen, received: Received) -> None:
        if self.refuse is not None:
            raise self.refuse
        if self.silent or received.respond is None:
            return
        limit = min(opening.max_tokens or 10_000, 10_000)
        ends = Ends(TOKENIZER.token_bytes, (END,), opening.stop, limit)
        played = self.sessions[opening.session] = Played(opening, 7, ends, len(opening.tokens))
        await self.store.create(_record(opening, limit))
        await received.respond(await self._opened(played))
        played.task = asyncio.create_task(self._play(played))

    async def _resume(self, resume: SessionResume, received: Received) -> None:
        played = self.sessions[resume.session]
        assert received.respond is not None
        await received.respond(await self._opened(played))
        await self.publish(played, Verdict(session=resume.session, epoch=played.epoch, at=played.at))

    async def _opened(self, played: Played) -> SessionOpened:
        session = played.opening.session
        connection = await self.store.next_connection(session)
        return SessionOpened(
            session=session, secret="s" * 32, connection=connection, epoch=played.epoch, seed=played.opening.seed or 0,
            prompt_length=len(played.opening.tokens), max_tokens=100, position=played.at,
        )  # fmt: skip

    async def _play(self, played: Played) -> None:
        tokens = [*self.script(played.opening), END]
        for start in range(0, len(tokens), self.block):
            if self.gate is not None:
                await self.gate(played)
            if played.finish is not None:
                return
            await self._commit(played, tokens[start : start + self.block])

    async def _commit(self, played: Played, tokens: Sequence[int]) -> None:
        kept: list[int] = []
        finish = None
        for token in tokens:
            kept.append(token)
            finish = played.ends.feed(token)
            if finish is not None:
                break
        await self.commit(played, tuple(kept), finish)

    async def commit(self, played: Played, tokens: tuple[int, ...], finish: str | None, **more: Any) -> None:
        opening, at = played.opening, played.at
        done = at + len(tokens) - len(opening.tokens)
        counters = Counters(drafted={"hosted": done}, accepted={"hosted": done - 1}, steps=played.steps + 1)
        kinds = "h" * len(tokens)
        logprobs = None
        if opening.logprobs is not None:
            logprobs = tuple(map(self.top or _entry, tokens))
        await self.store.append(
            [Append(opening.session, opening.model, played.epoch, at, tokens, kinds, counters, logprobs, finish)]
        )
        played.at, played.finish, played.steps = at + len(tokens), finish, played.steps + 1
        verdict = Verdict(
            session=opening.session, epoch=played.epoch, at=at, tokens=tokens, kinds=kinds, logprobs=logprobs,
            counters=counters, finish=finish, seen={"hosted": (1, done)}, **more,
        )  # fmt: skip
        if not self.lose(played.steps - 1):
            await self.publish(played, verdict)

    async def publish(self, played: Played, verdict: Verdict) -> None:
        await self.bus.publish(subjects.VERDICT.at(session=played.opening.session), verdict)

    async def _cancel(self, session: str) -> None:
        played = self.sessions.get(session)
        if played is not None and played.finish is None:
            await self.commit(played, (), "cancelled")

    async def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        """Wait for something that a message to this batcher brings about."""
        async with asyncio.timeout(seconds):
            while not condition():
                self.heard.clear()
                await self.heard.wait()


def _entry(token: int) -> LogprobEntry:
    return LogprobEntry(logprob=-0.5, top=((token, -0.5), ((token + 1) % 256, -1.5)))


def _record(opening: SessionOpen, limit: int) -> SessionRecord:
    return SessionRecord(
        session=opening.session, tenant=opening.tenant, opened=opening, secret="s" * 32, seed=opening.seed or 0,
        prompt_length=len(opening.tokens), max_tokens=limit, epoch=7, tokens=opening.tokens,
    )  # fmt: skip


def verifier_status(state: str = "ready", name: str = "v1") -> VerifierStatus:
    return VerifierStatus(
        verifier=name, model="toy", fingerprint="", engine="simulated", simulated=True, state=state, context=2048,  # type: ignore[arg-type]
        cells_total=1, cells_used=0, sessions=0, busy=0, queue=0, steps=0, step_tokens=0,
    )  # fmt: skip


def batcher_status() -> BatcherStatus:
    return BatcherStatus(
        batcher="b1", model="toy", sessions=0, parked=0, waiting=0, partitions=64, committed=0, drafted=0, accepted=0,
        filled=0, stale=0,
    )  # fmt: skip


@dataclass
class Bench:
    """A gateway under test and everything around it."""

    service: Service
    gateway: Gateway
    bus: MemoryBus
    store: MemoryStore
    key: str
    admin: str
    keys: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    def client(self, key: str | None = None, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key=key or self.key, max_retries=0, **options)

    async def components(self) -> None:
        """Let the gateway hear that a batcher and a verifier are there."""
        await self.bus.publish(subjects.VERIFIER_STATUS.at(model="toy"), verifier_status())
        await self.bus.publish(subjects.BATCHER_STATUS.at(model="toy"), batcher_status())


async def _alive(bench: Bench) -> None:
    while True:
        await bench.components()
        await asyncio.sleep(1)


@asynccontextmanager
async def bench(folder: Path, *, alive: bool = True, context: int = 2048, **settings: Any) -> AsyncIterator[Bench]:
    """A gateway on a free port with two keys; `alive` says once a second that batcher and verifier are there."""
    models = folder / "models"
    (models / "toy").mkdir(parents=True)
    toy_card(context=context).save(models / "toy" / "card.json")
    keys = folder / "keys.toml"
    key, admin = add(keys, "TEN-A", False), add(keys, "ops", True)
    values = {"model": "toy", "models_dir": models, "keys_file": keys, "http_port": 0, "drain_s": 2.0}
    made = Settings.of(**{**values, **settings})
    bus, store = MemoryBus(), MemoryStore()
    service = Service("gateway", made, bus, store, store)
    async with running(service) as gateway:
        found = Bench(service, gateway, bus, store, key, admin, keys)
        speaker = asyncio.create_task(_alive(found)) if alive else None
        try:
            yield found
        finally:
            if speaker is not None:
                speaker.cancel()
                await asyncio.gather(speaker, return_exceptions=True)
    await service.stop()
    await bus.close()
    assert service.failure is None, service.failure


def changed(batcher: ScriptedBatcher, **values: Any) -> ScriptedBatcher:
    return dataclasses.replace(batcher, **values)


async def soon(condition: Callable[[], bool], seconds: float = 3.0) -> None:
    """Wait for something that only the clock can show."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.01)
