"""A target in trouble, by the contract of paceline.engine: failed passes, cancellation, closing; and its status."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from engine_kit import STORY, Kit, assert_failed, assert_same, feed, llama_kit, one, only_decided, plain, rule_for

from paceline.engine import Decided, Fed, TargetItem
from paceline.errors import EngineError


class TestFaults:
    async def test_a_failed_pass_fails_the_guilty_session_only(self, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
        target = await kit.target()
        prompt = kit.encode(STORY)
        rule = rule_for(prompt)
        expected = await plain(target, "plain", prompt, rule, 6)
        await feed(target, "good", prompt)
        await feed(target, "bad", prompt)
        poison = 3
        good = TargetItem("good", "t", len(prompt), draft=tuple(expected.tokens[:3]), rule=rule)
        with monkeypatch.context() as patch:
            kit.faults.failing_pass(patch, target, poison)
            fine, failed = await target.step([good, replace(good, session="bad", draft=(poison,))])
        assert_failed(failed, "step_failed")
        assert target.held("bad") == ()
        assert isinstance(fine, Decided)
        assert fine.accepted == 3 or expected.margins[fine.accepted] < 0.15
        assert_same(kit, await plain(target, "bad", prompt, rule, 6), expected)

    async def test_a_fault_of_the_engine_itself_costs_replays_only(
        self, kit: Kit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = await kit.target()
        prompt = kit.encode(STORY)
        rule = rule_for(prompt)
        expected = await plain(target, "a", prompt, rule, 6)
        item = TargetItem("a", "t", len(prompt), rule=rule)
        with monkeypatch.context() as patch:
            kit.faults.broken(patch, target)
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                await target.step([item])
        assert_failed(await one(target, item), "need_history")
        assert target.status().cells_used == 0
        assert_same(kit, await plain(target, "a", prompt, rule, 6), expected)

    async def test_a_cancelled_step_leaves_the_engine_well(self, kit: Kit) -> None:
        target = await kit.target()
        prompt = kit.encode(STORY)
        rule = rule_for(prompt)
        expected = await plain(target, "plain", prompt, rule, 6)
        task = asyncio.create_task(target.step([TargetItem("a", "t", len(prompt), 0, tuple(prompt), rule=rule)]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_same(kit, await plain(target, "a", prompt, rule, 6), expected)

    async def test_trim_and_release_during_a_step_take_effect_after_it(self, kit: Kit) -> None:
        target = await kit.target()
        prompt = kit.encode(STORY)
        task = asyncio.create_task(target.step([TargetItem("a", "t", len(prompt), 0, tuple(prompt))]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        target.trim("a", 4)
        assert await task == [Fed("a", len(prompt))]
        assert target.held("a") == tuple(prompt[:4])

    async def test_steps_asked_for_at_once_run_in_order(self, kit: Kit) -> None:
        target = await kit.target()
        prompt = tuple(kit.encode(STORY))
        rule = rule_for(prompt)
        items = [TargetItem(f"s{i}", "t", len(prompt), 0, prompt, rule=rule) for i in range(3)]
        outcomes = await asyncio.gather(*(target.step([item]) for item in items))
        assert len({outcome.token for (outcome,) in map(only_decided, outcomes)}) == 1

    async def test_closing_ends_the_running_step_and_refuses_the_others(self, kit: Kit) -> None:
        target = await kit.target()
        running, waiting = (
            asyncio.create_task(target.step([TargetItem(session, "t", 1, 0, (5,))])) for session in "ab"
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await target.close()
        await target.close()
        assert await running == [Fed("a", 1)]
        with pytest.raises(EngineError):
            await waiting
        with pytest.raises(EngineError):
            await target.step([TargetItem("a", "t", 1, 0, (5,))])

    async def test_status(self, kit: Kit) -> None:
        target = await kit.target(cells=512)
        await plain(target, "a", [5, 6, 7], rule_for([5, 6, 7]), 3)
        status = target.status()
        assert status.simulated is kit.exact
        assert (status.cells_total, status.cells_used, status.sessions) == (512, 5, 1)
        assert status.step_ms[1] > 0


@pytest.mark.models
async def test_a_step_of_llama_does_not_hold_the_event_loop() -> None:
    kit = await llama_kit()
    target = await kit.target()
    tokens = tuple(kit.encode(STORY * 20)[:400])
    task = asyncio.create_task(target.step([TargetItem("a", "t", len(tokens), 0, tokens)]))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 20
    await kit.close()
