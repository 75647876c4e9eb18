"""The hosted drafter on the memory bus with simulated engines: a source like any other, whose trouble costs nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from paceline import subjects, telemetry
from paceline.bus import Received
from paceline.bus_memory import MemoryBus
from paceline.coupling import choose
from paceline.ends import Ends
from paceline.engine import DraftEngine, Guess, Rule
from paceline.engine_simulated import SimulatedDraft, World
from paceline.errors import EngineError, NoResponders, NotFound, Overloaded
from paceline.served_card import served_card
from paceline.service import Service
from paceline.session import Session
from paceline.settings import Settings
from paceline.store import SessionRecord
from paceline.store_memory import MemoryStore
from paceline.wire import (
    Ack,
    DraftBlock,
    DrafterStatus,
    HostedOpen,
    HostedStop,
    Sampling,
    SessionOpen,
    Speculation,
    Verdict,
)
from services.drafter import hosted
from services.drafter.drafter import Drafter, body
from services.drafter.metered import MeteredDraft

PROMPT = tuple(b"far away")
GREEDY = Sampling(temperature=0, end_ids=(256,))
PARTITION = 3


class Faulty:
    """A draft engine that fails while `broken`."""

    def __init__(self, engine: DraftEngine) -> None:
        self.engine, self.broken = engine, False

    @property
    def context(self) -> int:
        return self.engine.context

    async def guess(self, session: str, path: Sequence[int], rule: Rule) -> Guess:
        if self.broken:
            raise EngineError("the model is gone")
        return await self.engine.guess(session, path, rule)

    def release(self, session: str) -> None:
        self.engine.release(session)

    async def close(self) -> None:
        await self.engine.close()


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
        await self.rig.bus.subscribe(subjects.DRAFT.at(model="toy", partition=PARTITION), self.on_block, DraftBlock)
        assert isinstance(await self.rig.open(self.request()), Ack)

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
async def running(*, acceptance: float = 0.8, max_sessions: int = 8, context: int = 2048) -> AsyncIterator[Rig]:
    bus, store = MemoryBus(), MemoryStore()
    settings = Settings.load(engine="simulated", model="toy", instance="d1", max_sessions=max_sessions)
    service = Service("drafter", settings, bus, store, store)
    engine = Faulty(SimulatedDraft(World(), acceptance=acceptance, context=context))
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
        await rig.service.sessions.create(replace(peer.record, tokens=tuple(peer.session.committed)))
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
        monkeypatch.setattr(hosted, "IDLE_S", 0.15)
        second = Peer(rig, "t")
        await second.open()
        await asyncio.sleep(0.1)
        await second.tell(len(PROMPT))
        await asyncio.sleep(0.1)
        assert rig.drafter.sessions == 1
        await until(lambda: rig.drafter.sessions == 0, 1)


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
