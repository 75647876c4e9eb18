"""What the batcher's tests share: a batcher and verifiers on one memory bus and store, a client that reads exactly
once, drafters that know the text, and the text itself by plain decoding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from paceline import subjects
from paceline.bus import Received
from paceline.bus_memory import MemoryBus
from paceline.engine import Decided, Rule, TargetItem
from paceline.engine_simulated import SimulatedTarget, Timing, World, toy_card
from paceline.service import Service
from paceline.settings import Settings
from paceline.store_memory import MemoryStore
from paceline.subjects import partition_of
from paceline.telemetry import BUS_REFUSED, Metrics
from paceline.wire import (
    Chain,
    DraftBlock,
    Presence,
    Sampling,
    SessionClose,
    SessionOpen,
    SessionOpened,
    SessionResume,
    Speculation,
    Verdict,
    prefix_hash,
)
from services.batcher.batcher import Batcher
from services.verifier.curve import LearnedCurve
from services.verifier.reporting import Reporter
from services.verifier.verifier import Verifier

END = 256
CARD = toy_card()
PROMPT = tuple(b"Tell me a story")
PLAIN = Speculation(enabled=False)
DEEP = Speculation(fill=False)
WORLD = World()


@cache
def plain_text(
    prompt: tuple[int, ...] = PROMPT, count: int = 40, temperature: float = 0.0, seed: int = 7
) -> tuple[int, ...]:
    """`count` tokens by plain decoding, one step each."""

    async def decode() -> tuple[int, ...]:
        engine, tokens = SimulatedTarget(WORLD), list(prompt)
        rule = Rule(Sampling(temperature=temperature, end_ids=CARD.end_ids), seed, len(prompt))
        for _ in range(count):
            (outcome,) = await engine.step([TargetItem("s", "t", len(tokens), 0, tuple(tokens), rule=rule)])
            assert isinstance(outcome, Decided)
            tokens.append(outcome.token)
        return tuple(tokens[len(prompt) :])

    return asyncio.run_coroutine_threadsafe(decode(), _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """A loop of its own: the cache is filled from within tests that run in theirs."""
    import threading

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


@dataclass
class Running:
    """A verifier that can be killed, frozen, or stopped in good order."""

    service: Service
    verifier: Verifier
    engine: SimulatedTarget

    @property
    def name(self) -> str:
        return self.service.instance

    def _subscribers(self) -> list[Any]:
        return list(self.verifier._subscriptions)

    async def kill(self) -> None:
        """As by SIGKILL: it is gone from the bus, what it was doing is never answered."""
        bus = self.service.bus
        assert isinstance(bus, MemoryBus)
        for subscriber in self._subscribers():
            bus._forget(subscriber)
            subscriber.inbox._task.cancel()
        await self.service.stop()

    async def freeze(self) -> None:
        """As by SIGSTOP: still subscribed, silent in everything."""
        for subscriber in self._subscribers():
            subscriber.inbox._task.cancel()
        await self.service.stop()


@dataclass
class Stack:
    bus: MemoryBus
    store: MemoryStore
    values: dict[str, Any]
    stack: AsyncExitStack
    services: list[Service] = field(default_factory=list)
    batcher: Batcher = None  # type: ignore[assignment]
    running: dict[str, Running] = field(default_factory=dict)

    def service(self, name: str, instance: str) -> Service:
        made = Service(name, Settings.of(**self.values, instance=instance), self.bus, self.store, self.store)
        self.services.append(made)
        return made

    async def verifier(self, name: str = "v1", **engine: Any) -> Running:
        """`step_ms`, `cells` and so on: of the engine. `knows`: its steps' times are known from the first one on,
        or what is thought to be known is this part of them."""
        service = self.service("verifier", name)
        timing = Timing(engine.pop("step_ms", 0.5), engine.pop("token_ms", 0.0))
        curve = LearnedCurve()
        if part := float(engine.pop("knows", 0.0)):
            for rows in (1, 2, 4, 8, 16) * 4:
                curve.curve.learn(rows, 0, part * timing.step_ms(rows))
        target = SimulatedTarget(engine.pop("world", WORLD), timing, **engine)
        reporter = Reporter(service, CARD)
        service.spawn(reporter.run(), "verifier status")
        verifier = Verifier(service, target, reporter, curve)
        await verifier.start(draining=False)
        self.running[name] = Running(service, verifier, target)
        return self.running[name]

    def killable(self, name: str) -> Running:
        return self.running[name]

    async def another(self, name: str) -> Batcher:
        """A batcher."""
        batcher = Batcher(self.service("batcher", name), CARD)
        await batcher.start()
        return batcher

    async def kill_batcher(self, batcher: Batcher) -> None:
        """As by SIGKILL."""
        for subscriber in [one for some in batcher.partitions.listening.values() for one in some]:
            await self._vanish(subscriber)
        await batcher._service.stop()

    async def _vanish(self, subscriber: Any) -> None:
        self.bus._forget(subscriber)
        subscriber.inbox._task.cancel()

    async def ready(self, batcher: Batcher | None = None, verifiers: int = 1) -> None:
        chosen = batcher or self.batcher
        await soon(
            lambda: len(chosen.directory.serving(time.monotonic())) >= verifiers and bool(chosen.partitions.listening)
        )
        await soon(lambda: len(chosen.partitions.listening) == len(chosen.leases.held))

    def client(self, **opening: Any) -> Client:
        return Client(self, **opening)


@dataclass(eq=False)
class Client:
    """Opens one session and reads its verdicts as a gateway does: exactly once, in order, repairs from the store."""

    stack: Stack
    prompt: tuple[int, ...] = PROMPT
    max_tokens: int | None = 40
    temperature: float = 0.0
    seed: int = 7
    speculation: Speculation = PLAIN
    session: str = ""
    tenant: str = "TEN-A"
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    present: bool = True

    opened: SessionOpened | None = None
    tokens: list[int] = field(default_factory=list)
    kinds: str = ""
    verdicts: list[Verdict] = field(default_factory=list)
    finish: str | None = None
    last: Verdict | None = None
    repairs: int = 0
    epoch: int = 0
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    listeners: list[Callable[[Verdict], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = tuple(self.prompt)
        self.session = self.session or f"s{time.monotonic_ns()}"

    @property
    def partition(self) -> int:
        return partition_of(self.session)

    def subject(self) -> str:
        return subjects.SESSION.at(model="toy", partition=self.partition)

    def opening(self, **changes: Any) -> SessionOpen:
        opening = SessionOpen(
            model="toy", fingerprint=CARD.fingerprint, tokens=self.prompt, seed=self.seed,
            sampling=Sampling(temperature=self.temperature), stop=self.stop, max_tokens=self.max_tokens,
            speculation=self.speculation, session=self.session, tenant=self.tenant, logprobs=self.logprobs,
        )  # fmt: skip
        return msgspec.structs.replace(opening, **changes)

    async def open(self, **changes: Any) -> Client:
        await self.listen()
        answer = await self.stack.bus.request(self.subject(), self.opening(**changes), timeout_s=3)
        assert isinstance(answer, SessionOpened)
        self.opened, self.epoch = answer, answer.epoch
        self.stack.services[0].spawn(self._presence(), "presence")
        return self

    async def listen(self) -> None:
        await self.stack.bus.subscribe(subjects.VERDICT.at(session=self.session), self._on_verdict, Verdict)

    async def _presence(self) -> None:
        while self.finish is None:
            if self.present:
                await self.speak()
            await asyncio.sleep(0.1)

    async def resume(self, **changes: Any) -> SessionOpened:
        assert self.opened is not None
        position = len(self.prompt) + len(self.tokens)
        message = SessionResume(
            session=self.session, secret=self.opened.secret, position=position, prefix_hash=self.hash_at(position),
            tenant=self.tenant,
        )  # fmt: skip
        message = msgspec.structs.replace(message, **changes)
        answer = await self.stack.bus.request(self.subject(), message, timeout_s=3)
        assert isinstance(answer, SessionOpened)
        self.opened = answer
        return answer

    async def speak(self) -> None:
        assert self.opened is not None
        connection = self.opened.connection
        await self.stack.bus.publish(
            self.subject(), Presence(session=self.session, connection=connection, t_sent=time.time())
        )

    async def close(self) -> None:
        await self.stack.bus.publish(self.subject(), SessionClose(session=self.session))

    async def _on_verdict(self, received: Received) -> None:
        verdict = received.message
        assert isinstance(verdict, Verdict)
        if verdict.epoch < self.epoch:
            return
        self.epoch = verdict.epoch
        self.verdicts.append(verdict)
        position = len(self.prompt) + len(self.tokens)
        if verdict.at > position:
            self.repairs += 1
            record = await self.stack.store.load(self.session)
            assert record is not None
            self.tokens = list(record.tokens[len(self.prompt) :])
            self.kinds = record.kinds
            self.finish = self.finish or record.finish
        elif self.finish is None:
            skip = position - verdict.at
            self.tokens += verdict.tokens[skip:]
            self.kinds += verdict.kinds[skip:]
            self.finish = verdict.finish
        if verdict.finish is not None:
            self.last = verdict
        for listener in self.listeners:
            listener(verdict)
        self.heard.set()

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                self.heard.clear()
                await self.heard.wait()

    async def grown(self, count: int, seconds: float = 10.0) -> None:
        await self.until(lambda: len(self.tokens) >= count or self.finish is not None, seconds)

    async def done(self, seconds: float = 20.0) -> tuple[int, ...]:
        await self.until(lambda: self.finish is not None, seconds)
        return tuple(self.tokens)

    def expected(self, count: int | None = None) -> tuple[int, ...]:
        return plain_text(self.prompt, count or self.max_tokens or 40, self.temperature, self.seed)

    def hash_at(self, position: int) -> str:
        return prefix_hash((*self.prompt, *self.tokens)[:position])


@dataclass(eq=False)
class Drafter:
    """Sends the text as drafts, in blocks, `window` tokens ahead; `wrong` says at which output indexes it is wrong.

    It begins a new incarnation by `at` whenever it is told of a gap or finds the tip off its own path.
    """

    client: Client
    block: int = 4
    window: int = 12
    delay_s: float = 0.0
    wrong: Callable[[int], bool] = lambda index: False
    source: str = "edge"
    incarnation: int = 1 << 16
    next_node: int = 1
    sent: int = 0
    """Output tokens drafted so far."""
    tip: int = 0
    rerooted: bool = True

    def start(self) -> Drafter:
        self.client.listeners.append(self._on_verdict)
        self.client.stack.services[0].spawn(self._run(), "drafter")
        return self

    def _on_verdict(self, verdict: Verdict) -> None:
        start = verdict.at - len(self.client.prompt)
        tip = start + len(verdict.tokens)
        refuted = any(self.wrong(index) for index in range(start, min(tip, self.sent)))
        overtaken = tip > self.sent and verdict.kinds[-1:] in ("b", "f")
        if self.source in verdict.gap or "c" in verdict.kinds or refuted or overtaken:
            self._restart(tip)
        self.tip = max(self.tip, tip)

    def _restart(self, tip: int) -> None:
        self.incarnation += 1
        self.next_node, self.sent, self.rerooted = 1, tip, True

    async def _run(self) -> None:
        while self.client.finish is None:
            while self.sent < min(self.tip + self.window, self._text_length()):
                await self._send(self._tokens(self.sent, self.block))
            await asyncio.sleep(0.001)

    def _text_length(self) -> int:
        return (self.client.max_tokens or 40) + 8

    def _tokens(self, start: int, count: int) -> list[int]:
        text = plain_text(self.client.prompt, self._text_length() + 8, self.client.temperature, self.client.seed)
        return [
            (token + 1) % 256 if self.wrong(start + offset) else token
            for offset, token in enumerate(text[start : start + count])
        ]

    async def _send(self, tokens: Sequence[int]) -> None:
        position = len(self.client.prompt) + self.sent
        at, after = (position, None) if self.rerooted else (None, self.next_node - 1)
        chain = Chain(first=self.next_node, position=position, tokens=tuple(tokens), at=at, after=after)
        await send_block(self.client, chain, incarnation=self.incarnation, source=self.source)
        self.next_node += len(tokens)
        self.sent += len(tokens)
        self.rerooted = False
        await asyncio.sleep(self.delay_s)


async def send_block(client: Client, *chains: Chain, incarnation: int = 1, source: str = "edge", **more: Any) -> None:
    block = DraftBlock(
        session=client.session, source=source, incarnation=incarnation, chains=chains,  # type: ignore[arg-type]
        **{"connection": client.opened.connection if client.opened else 0, **more},
    )  # fmt: skip
    await client.stack.bus.publish(subjects.DRAFT.at(model="toy", partition=client.partition), block)


@asynccontextmanager
async def stack(
    *, batcher: bool = True, verifiers: int = 1, engine: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Stack]:
    """A batcher `b1` and verifiers `v1`, `v2`, ... that are ready."""
    values = {"model": "toy", "engine": "simulated", "lease_ttl_s": 0.6, "presence_ttl_s": 0.5, **settings}
    metrics = Metrics()
    async with AsyncExitStack() as exits:
        made = Stack(MemoryBus(metrics=metrics), MemoryStore(), values, exits)
        made.service("test", "test")
        try:
            for number in range(1, verifiers + 1):
                await made.verifier(f"v{number}", **dict(engine or {}))
            if batcher:
                made.batcher = await made.another("b1")
                await made.ready(verifiers=verifiers)
            yield made
        finally:
            for service in reversed(made.services):
                await service.stop()
            for subscriber in list(made.bus._subscribers):
                subscriber.inbox._task.cancel()
    assert not metrics.value(BUS_REFUSED, reason="handler_failed")
    failures = [service.failure for service in made.services if service.failure is not None]
    assert not failures, failures


async def soon(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that only the clock can show."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.005)
