"""What a verifier does when its engine dies, sleeps and wakes."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from test_verifier import PROMPT, Rig, item, plain, running

from paceline import subjects
from paceline.bus import Bus, Received
from paceline.bus_memory import MemoryBus
from paceline.engine import EngineStatus, Outcome, TargetItem
from paceline.engine_simulated import SimulatedTarget, Timing, World, toy_card
from paceline.errors import BadRequest, EngineError, FatalError, ModelError, Unavailable
from paceline.service import Service
from paceline.settings import Settings
from paceline.store_memory import MemoryStore
from paceline.wire import Ack, DrainRequest, SleepRequest, VerifierStatus
from services.verifier import engines, reporting
from services.verifier import verifier as module
from services.verifier.verifier import body


class MortalTarget(SimulatedTarget):
    """dead: why. Sleeps as an engine with weights of its own does; `spoilt`: it wakes up as another model."""

    dead = ""
    asleep = False
    spoilt = False

    def status(self) -> EngineStatus:
        if self.dead:
            raise FatalError(self.dead)
        return replace(super().status(), can_sleep=True)

    async def step(self, items: Sequence[TargetItem]) -> list[Outcome]:
        if self.asleep:
            raise EngineError("asleep")
        outcomes = await super().step(items)
        if self.dead:
            raise FatalError(self.dead)
        return outcomes

    async def sleep(self) -> None:
        self.asleep = True

    async def wake(self) -> None:
        if self.spoilt:
            raise FatalError("woke up with another model")
        self.asleep = False


async def heard(bus: Bus) -> list[VerifierStatus]:
    seen: list[VerifierStatus] = []

    async def on_status(received: Received) -> None:
        assert isinstance(received.message, VerifierStatus)
        seen.append(received.message)

    await bus.subscribe(subjects.VERIFIER_STATUS.at(model="toy"), on_status, VerifierStatus)
    return seen


async def told(rig: Rig, request: DrainRequest | SleepRequest) -> None:
    subject = subjects.SLEEP if isinstance(request, SleepRequest) else subjects.DRAIN_STATE
    assert isinstance(await rig.bus.request(subject.at(verifier="v1"), request, timeout_s=2), Ack)


async def test_a_death_without_work_is_told_within_seconds_and_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = MortalTarget(World())

    async def load_engine(*_: object) -> MortalTarget:
        return engine

    monkeypatch.setattr(module, "load_engine", load_engine)
    bus, store = MemoryBus(), MemoryStore()
    service = Service("verifier", Settings.of(engine="simulated", model="toy", instance="v1"), bus, store, store)
    seen = await heard(bus)
    async with body(service):
        assert service.not_ready() == {}
        died, engine.dead = time.monotonic(), "a worker is gone"
        await asyncio.wait_for(service.stopping.wait(), 5)
        assert time.monotonic() - died < 5
        assert "a worker is gone" in service.not_ready()["engine"]
    await service.stop()
    await bus.close()
    assert isinstance(service.failure, FatalError)
    assert (seen[-1].state, seen[-1].detail) == ("failed", "a worker is gone")


async def test_who_waits_for_a_dead_engine_is_sent_elsewhere() -> None:
    """Not failed: the batch is refused as `not now`, so that its sessions go on at another verifier."""
    async with running(MortalTarget(World())) as rig:
        seen = await heard(rig.bus)
        engine = rig.engine
        assert isinstance(engine, MortalTarget)
        engine.dead = "a worker is gone"
        with pytest.raises(Unavailable, match="a worker is gone"):
            await rig.result(item(PROMPT, start=0))
        await asyncio.wait_for(rig.service.stopping.wait(), 2)
        assert isinstance(rig.service.failure, FatalError)
        assert seen[-1].state == "failed"
        rig.service.failure = None


async def test_it_sleeps_when_drained_and_goes_on_after_it_woke() -> None:
    truth = plain(3)
    async with running(MortalTarget(World())) as rig:
        seen = await heard(rig.bus)
        await rig.ask(item(PROMPT, start=0))
        with pytest.raises(BadRequest, match="does not drain"):
            await told(rig, SleepRequest())
        await told(rig, DrainRequest(verifier="v1"))
        await told(rig, SleepRequest())
        assert (await rig.status()).state == "sleeping"
        assert rig.service.not_ready()["engine"]
        with pytest.raises(Unavailable, match="sleeps"):
            await rig.result(item([*PROMPT, truth[0]]))
        await told(rig, SleepRequest())  # again: nothing happens
        await told(rig, SleepRequest(wake=True))
        assert (await rig.status()).state == "draining"
        (answer,) = await rig.ask(item([*PROMPT, truth[0]], draft=truth[1:2]))
        assert (answer.accepted, answer.token) == (1, truth[2])
        await told(rig, DrainRequest(verifier="v1", undo=True))
        rig.service.spawn(rig.verifier._reporter.run(), "status")
        async with asyncio.timeout(2):
            while not seen or seen[-1].state != "ready":
                await asyncio.sleep(0.01)
        assert seen[-1].can_sleep
        assert rig.service.not_ready() == {}


async def test_a_drain_or_its_undoing_wakes_nobody_and_is_what_holds_after_the_sleep() -> None:
    async with running(MortalTarget(World())) as rig:
        engine = rig.engine
        assert isinstance(engine, MortalTarget)
        await told(rig, DrainRequest(verifier="v1"))
        await told(rig, SleepRequest())
        for undo in (False, True):
            await told(rig, DrainRequest(verifier="v1", undo=undo))
            assert (await rig.status()).state == "sleeping"
        waking = asyncio.Event()

        async def slow_wake() -> None:
            waking.set()
            await asyncio.sleep(0.1)
            engine.asleep = False

        engine.wake = slow_wake  # type: ignore[method-assign]
        woken = asyncio.create_task(told(rig, SleepRequest(wake=True)))
        await waking.wait()
        assert (await rig.status()).state == "loading"
        await woken
        assert (await rig.status()).state == "ready"


async def test_a_model_that_woke_up_changed_serves_nobody() -> None:
    async with running(MortalTarget(World())) as rig:
        seen = await heard(rig.bus)
        engine = rig.engine
        assert isinstance(engine, MortalTarget)
        await told(rig, DrainRequest(verifier="v1"))
        await told(rig, SleepRequest())
        engine.spoilt = True
        with pytest.raises(Unavailable, match="another model"):
            await told(rig, SleepRequest(wake=True))
        await asyncio.wait_for(rig.service.stopping.wait(), 2)
        assert seen[-1].state == "failed"
        rig.service.failure = None


async def test_a_step_that_does_not_end_makes_it_fail_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "STUCK_S", 0.2)
    monkeypatch.setattr(reporting, "STATUS_S", 0.05)
    async with running(SimulatedTarget(World(), Timing(base_ms=600))) as rig:
        seen = await heard(rig.bus)
        rig.service.spawn(rig.verifier._reporter.run(), "status")
        await asyncio.sleep(0.1)
        assert {status.state for status in seen} == {"ready"}
        (answer,) = await rig.ask(item(PROMPT, start=0))
        assert answer.token == plain(1)[0]
        stuck = [status for status in seen if status.state == "failed"]
        assert stuck
        assert all("a step has been running for" in status.detail for status in stuck)
        await asyncio.sleep(0.1)
        assert (seen[-1].state, seen[-1].detail) == ("ready", "")
        assert rig.service.not_ready() == {}


async def test_steps_that_are_slow_by_nature_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "STUCK_S", 0.01)
    async with running(SimulatedTarget(World(), Timing(base_ms=100))) as rig:
        await rig.ask(item(PROMPT, start=0))
        await rig.status()
        step = asyncio.create_task(rig.ask(item(PROMPT, start=0, session="b")))
        await asyncio.sleep(0.05)
        assert (await rig.status()).state == "ready"
        await step


async def test_an_engine_that_cannot_sleep_says_so() -> None:
    async with running() as rig:
        assert not (await rig.status()).can_sleep
        await told(rig, DrainRequest(verifier="v1"))
        with pytest.raises(BadRequest, match="the simulated engine cannot sleep"):
            await told(rig, SleepRequest())
        assert (await rig.status()).state == "draining"
        (answer,) = await rig.ask(item(PROMPT, start=0))
        assert answer.token == plain(1)[0]


async def test_an_environment_without_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=f"{re.escape(sys.executable)} has no vLLM.*verifier-vllm"):
        await engines.load_engine(Settings.of(engine="vllm"), toy_card())
