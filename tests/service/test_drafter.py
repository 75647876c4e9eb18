"""The hosted drafter on the memory bus with simulated engines: a source like any other, whose trouble costs nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from msgspec import structs

from paceline import subjects, telemetry
from paceline.bus import Received
from paceline.bus_memory import MemoryBus
from paceline.coupling import choose
from paceline.ends import Ends
from paceline.engine import DraftEngine, Guess, Rule, WrappedDraft
from paceline.engine_simulated import SimulatedDraft, Timing, World
from paceline.errors import EngineError, NoResponders, NotFound, Overloaded
from paceline.served_card import served_card
from paceline.service import Service
from paceline.session import Session
from paceline.settings import Settings
from paceline.store import Append, SessionRecord
from paceline.store_memory import MemoryStore
from paceline.wire import (
    Ack,
    Counters,
    DraftBlock,
    DrafterStatus,
    HostedOpen,
    HostedStop,
    Sampling,
    SessionOpen,
    Speculation,
    Verdict,
)
from services.drafter import lookout
from services.drafter.drafter import Drafter, body
from services.drafter.metered import MeteredDraft

PROMPT = tuple(b"far away")
GREEDY = Sampling(temperature=0, end_ids=(256,))
PARTITION = 3


class Faulty(WrappedDraft):
    """A draft engine that fails while `broken`."""

    def __init__(self, engine: DraftEngine) -> None:
        super().__init__(engine)
        self.engine, self.broken = engine, False

    async def guesses(self, session: str, paths: Sequence[Sequence[int]], rule: Rule) -> list[Guess | None]:
        if self.broken:
            raise EngineError("the model is gone")
        return await super().guesses(session, paths, rule)


class Peer:
    """The batcher's part for one session: takes drafts, commits what the target says, publishes verdicts."""

    def __init__(self, rig: Rig, session: str = "s", length: int = 60, epoch: int = 9) -> None:
        self.rig, self.id = rig, session
        self.blocks: list[DraftBlock] = []
        opened = SessionOpen(model="toy", fingerprint="f", tokens=PROMPT, sampling=GREEDY)
        self.record = SessionRecord(
            session=session,
            tenant="t",
            opened=opened,
            secret="x",
            seed=1,
            prompt_length=len(PROMPT),
            max_tokens=length,
            epoch=epoch,
            tokens=PROMPT,
        )
        self.session = Session(self.record, Ends(lambda t: b"", (256,), (), length), vocabulary=259)
        self.rule = Rule(GREEDY, 1, len(PROMPT))

    def request(self) -> HostedOpen:
        return HostedOpen(
            session=self.id,
            model="toy",
            epoch=self.record.epoch,
            tokens=tuple(self.session.committed),
            sampling=GREEDY,
            seed=1,
            prompt_length=len(PROMPT),
            partition=PARTITION,
            speculation=Speculation(hosted=True),
        )

    async def open(self) -> None:
        await self.rig.service.sessions.create(self.record)
        await self.rig.bus.subscribe(subjects.DRAFT.at(model="toy", partition=PARTITION), self.on_block, DraftBlock)
        assert isinstance(await self.rig.open(self.request()), Ack)

    async def store(self, finish: str | None = None) -> None:
        """What is committed goes to the store, and nothing on the bus says so."""
        new = tuple(self.session.committed[len(PROMPT) :])
        append = Append(self.id, "toy", 9, len(PROMPT), new, "f" * len(new), Counters(), finish=finish)
        await self.rig.service.sessions.append([append])

    async def on_block(self, received: Received) -> None:
        block = received.message
        assert isinstance(block, DraftBlock)
        if block.session == self.id:
            self.blocks.append(block)
            self.session.offer(block)

    async def step(self, *, lost: bool = False) -> None:
        plan = self.session.plan(8)
        accepted = 0
        while self._choice(plan.tokens[:accepted]) == (plan.tokens[accepted] if accepted < len(plan.tokens) else -1):
            accepted += 1
        commit = self.session.decide(plan, accepted, self._choice(plan.tokens[:accepted]))
        assert commit is not None
        if not lost:
            await self.tell(commit.at, commit.tokens, commit.kinds)

    async def tell(self, at: int, tokens: tuple[int, ...] = (), kinds: str = "") -> None:
        verdict = Verdict(
            session=self.id,
            epoch=self.record.epoch,
            at=at,
            tokens=tokens,
            kinds=kinds,
            seen=dict(self.session.seen),
            gap=self.session.take_gaps(),
            finish=self.session.finish,
        )
        await self.rig.bus.publish(subjects.VERDICT.at(session=self.id), verdict)

    def _choice(self, draft: tuple[int, ...]) -> int:
        tokens = [*self.session.committed, *draft]
        return choose(self.rig.world.logits(tokens, len(PROMPT)), self.rule, tokens).token


class Rig:
    def __init__(self, service: Service, drafter: Drafter, engine: Faulty) -> None:
        self.service, self.drafter, self.engine = service, drafter, engine
        self.bus = service.bus
        self.world = World()

    async def open(self, request: HostedOpen) -> object:
        return await self.bus.request(subjects.HOSTED_OPEN.at(model="toy"), request, timeout_s=1)


@asynccontextmanager
async def running(
    *, acceptance: float = 0.8, max_sessions: int = 8, sequences: int = 64, context: int = 2048, step_ms: float = 0
) -> AsyncIterator[Rig]:
    bus, store = MemoryBus(), MemoryStore()
    settings = Settings.load(engine="simulated", model="toy", instance="d1", max_sessions=max_sessions)
    service = Service("drafter", settings, bus, store, store)
    room, timing = {"context": context, "max_sessions": sequences, "chunk": settings.chunk_tokens}, Timing(step_ms)
    engine = Faulty(SimulatedDraft(World(), acceptance=acceptance, timing=timing, **room))
    drafter = Drafter(service, served_card(settings))
    await drafter.start(MeteredDraft(engine, service.metrics))
    try:
        yield Rig(service, drafter, engine)
        assert service.failure is None
    finally:
        await drafter.stop()
        await service.stop()
        await engine.close()
        await bus.close()


async def until(condition: Callable[[], bool], seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_session_is_drafted_for_until_its_finish():
    async with running() as rig:
        peer = Peer(rig)
        await peer.open()
        while peer.session.finish is None:
            await until(lambda: peer.session.held > 0 or peer.session.completion >= 58)
            await peer.step()
        await until(lambda: rig.drafter.sessions == 0)
        counters = peer.session.counters
        assert counters.accepted["hosted"] > 30
        assert counters.duplicate == 0
        assert {block.source for block in peer.blocks} == {"hosted"}
        assert len({block.incarnation for block in peer.blocks}) == 1
        assert rig.service.metrics.value(telemetry.DRAFT_SECONDS) == rig.drafter.status().drafted > 0


async def test_lost_verdicts_are_repaired_from_the_store():
    async with running() as rig:
        peer = Peer(rig)
        await peer.open()
        await until(lambda: peer.session.held > 0)
        await peer.step(lost=True)
        await peer.store()
        before = len(peer.blocks)
        await peer.tell(peer.session.tip)
        await until(lambda: len(peer.blocks) > before)
        await until(lambda: peer.session.held > 0)
        await peer.step()
        assert peer.session.counters.accepted.get("hosted", 0) > 0


async def test_stop_and_silence_end_a_session(monkeypatch):
    async with running() as rig:
        first = Peer(rig)
        await first.open()
        await rig.bus.publish(subjects.HOSTED_STOP.at(session="s"), HostedStop(session="s"))
        await until(lambda: rig.drafter.sessions == 0)
        monkeypatch.setattr(lookout, "IDLE_S", 0.15)
        second = Peer(rig, "t")
        await second.open()
        await asyncio.sleep(0.1)
        await second.tell(len(PROMPT))
        await asyncio.sleep(0.1)
        assert rig.drafter.sessions == 1
        await until(lambda: rig.drafter.sessions == 0, 1)


async def test_a_stop_that_got_lost_or_came_before_the_opening_costs_no_more_than_two_seconds():
    async with running() as rig:
        lost, early = Peer(rig, "lost"), Peer(rig, "early")
        await lost.open()
        await until(lambda: lost.session.held > 0)
        await lost.store(finish="cancelled")
        await rig.service.sessions.create(early.record)
        await early.store(finish="length")
        await rig.bus.publish(subjects.HOSTED_STOP.at(session="early"), HostedStop(session="early"))
        assert isinstance(await rig.open(early.request()), Ack)
        await until(lambda: rig.drafter.sessions == 0, 2)


async def test_a_silent_session_stays_while_it_is_not_over_also_without_a_store(monkeypatch):
    monkeypatch.setattr(lookout, "LOOK_S", 0.02)
    async with running() as rig:
        store = rig.service.sessions
        assert isinstance(store, MemoryStore)
        await Peer(rig).open()
        await asyncio.sleep(0.1)
        store.away = True
        await asyncio.sleep(0.1)
        assert rig.drafter.sessions == 1
        store.away = False
        await asyncio.sleep(0.1)
        assert rig.drafter.sessions == 1


async def test_a_session_that_ends_in_its_prefill_gives_the_engine_back_at_once():
    async with running(step_ms=20) as rig:
        long, short = Peer(rig, "long"), Peer(rig, "short")
        await long.open()
        await rig.open(structs.replace(long.request(), tokens=PROMPT + tuple(b"a" * 1900)))
        await until(lambda: rig.engine.engine.status().cells_used > 64)
        await rig.bus.publish(subjects.HOSTED_STOP.at(session="long"), HostedStop(session="long"))
        await until(lambda: rig.drafter.sessions == 0, 0.2)
        await short.open()
        await until(lambda: bool(short.blocks), 0.4)
        assert rig.engine.engine.status().cells_used < 64


async def test_a_verdict_after_the_end_is_no_trouble():
    async with running() as rig:
        peer = Peer(rig)
        await peer.open()
        session = rig.drafter._sessions["s"]
        session.stop()
        await until(lambda: rig.drafter.sessions == 0)
        blocks = list(peer.blocks)
        verdict = Verdict(session="s", epoch=9, at=len(PROMPT))
        await session._on_verdict(Received(subjects.VERDICT.at(session="s"), verdict))
        await asyncio.sleep(0.05)
        assert (rig.drafter.sessions, peer.blocks) == (0, blocks)


async def test_asked_again_it_starts_over_with_a_higher_incarnation():
    async with running() as rig:
        peer = Peer(rig)
        await peer.open()
        await until(lambda: len(peer.blocks) > 0)
        before = peer.blocks[-1].incarnation
        await asyncio.sleep(0.11)
        assert isinstance(await rig.open(peer.request()), Ack)
        await until(lambda: peer.blocks[-1].incarnation > before)
        await asyncio.sleep(0.05)
        assert rig.drafter.sessions == 1
        await peer.step()
        assert peer.session.counters.duplicate > 0 or peer.session.counters.accepted


async def test_refusals_name_what_is_wrong():
    async with running(max_sessions=1) as rig:
        first, second = Peer(rig), Peer(rig, "t")
        await first.open()
        with pytest.raises(Overloaded, match="1 sessions"):
            await second.open()
        wrong = HostedOpen(
            session="u", model="other", epoch=1, tokens=PROMPT, sampling=GREEDY, seed=1, prompt_length=8, partition=1
        )
        with pytest.raises(NotFound, match="toy"):
            await rig.open(wrong)
    async with running(sequences=2) as rig:
        for name in ("a", "b"):
            await Peer(rig, name).open()
        with pytest.raises(Overloaded, match="2 sessions"):
            await Peer(rig, "c").open()


async def test_engine_trouble_shows_and_drafts_come_back(monkeypatch):
    monkeypatch.setattr("paceline.drafting.FIRST_PAUSE_S", 0.01)
    async with running() as rig:
        rig.engine.broken = True
        peer = Peer(rig)
        await peer.open()
        await until(lambda: rig.drafter.status().state == "failed")
        assert rig.drafter.status().detail == "the model is gone"
        assert rig.service.metrics.value(telemetry.DRAFTER_FAILURES, reason="engine") >= 1
        await peer.step()
        rig.engine.broken = False
        await until(lambda: peer.session.held > 0)
        assert rig.drafter.status().state == "ready"


async def test_beyond_its_context_it_goes_on_without_drafts():
    async with running(acceptance=1.0, context=24) as rig:
        peer = Peer(rig, length=40)
        await peer.open()
        while peer.session.finish is None:
            if peer.session.tip < 20:
                await until(lambda: peer.session.held > 0)
            await peer.step()
            await asyncio.sleep(0.002)
        await until(lambda: rig.drafter.sessions == 0)
        assert peer.session.finish == "length"
        assert peer.session.completion == 40
        assert max(c.position + len(c.tokens) for block in peer.blocks for c in block.chains) == 25


async def test_many_sessions_share_the_engine_and_long_ones_keep_their_acceptance():
    async with running(acceptance=0.9) as rig:
        peers = [Peer(rig, f"s{i}", length=40) for i in range(6)]

        async def drive(peer: Peer) -> None:
            await peer.open()
            while peer.session.finish is None:
                await until(lambda: peer.session.held > 0 or peer.session.completion >= 38)
                await peer.step()

        await asyncio.gather(*(drive(peer) for peer in peers))
        rates = [p.session.counters.accepted["hosted"] / p.session.counters.verified for p in peers]
        assert min(rates) > 0.5
        await until(lambda: rig.drafter.sessions == 0)


async def test_the_process_tells_its_state_and_leaves_the_queue_group_at_the_end():
    bus, store = MemoryBus(), MemoryStore()
    settings = Settings.load(engine="simulated", model="toy", instance="d1")
    service = Service("drafter", settings, bus, store, store)
    seen: list[DrafterStatus] = []

    async def on_status(received: Received) -> None:
        assert isinstance(received.message, DrafterStatus)
        seen.append(received.message)

    await bus.subscribe(subjects.DRAFTER_STATUS.at(model="toy"), on_status, DrafterStatus)
    async with body(service):
        assert service.not_ready() == {}
        await until(lambda: bool(seen))
    request = HostedOpen(
        session="u", model="toy", epoch=1, tokens=PROMPT, sampling=GREEDY, seed=1, prompt_length=8, partition=1
    )
    with pytest.raises(NoResponders):
        await bus.request(subjects.HOSTED_OPEN.at(model="toy"), request, timeout_s=1)
    await service.stop()
    await bus.close()
    assert seen[0].simulated
    assert seen[0].drafter == "d1"
