"""Guesses of a draft, by the contract of paceline.engine: one path of each session."""

from __future__ import annotations

import asyncio

import pytest
from engine_kit import STORY, Kit, one, only_decided, rule_for

from paceline.engine import TargetItem
from paceline.engine_ports import BatchedTarget
from paceline.errors import EngineError, NoRoom


class TestDraft:
    async def test_guesses_by_the_same_rule_and_noise(self, kit: Kit) -> None:
        """A draft of itself as target: the target's choice at T = .8 is the draft's guess."""
        draft = await kit.draft()
        path = kit.encode(STORY)
        rule = rule_for(path, 0.8)
        guess = await draft.guess("a", path, rule)
        twin = BatchedTarget(draft.engine)
        (decided,) = only_decided([await one(twin, TargetItem("b", "b", len(path), 0, tuple(path), rule=rule))])
        assert guess.token == decided.token or guess.alternatives[0] == (decided.token, 0.0)
        assert 0 <= guess.confidence <= 1
        gaps = [gap for _, gap in guess.alternatives]
        assert gaps == sorted(gaps)
        assert len(gaps) == 4
        assert guess.token not in [token for token, _ in guess.alternatives]

    async def test_going_back_and_forth_is_the_same_as_starting_anew(self, kit: Kit) -> None:
        draft = await kit.draft()
        path, other = kit.encode(STORY), kit.encode("An entirely different beginning")
        rule = rule_for(path)
        fresh = await draft.guess("fresh", path, rule)
        for before in (path[:9], other, path[:12] + other, path):
            await draft.guess("a", before, rule)
        assert (await draft.guess("a", path, rule)).token == fresh.token

    async def test_many_sessions_at_once(self, kit: Kit) -> None:
        draft = await kit.draft()
        paths = [kit.encode(f"{name} is the capital of") for name in ("Paris", "Rome", "Oslo", "Bern")]
        alone = [await draft.guess(f"alone{i}", path, rule_for(path)) for i, path in enumerate(paths)]
        together = await asyncio.gather(*(draft.guess(f"s{i}", path, rule_for(path)) for i, path in enumerate(paths)))
        assert [guess.token for guess in together] == [guess.token for guess in alone]

    async def test_a_long_path_goes_in_by_chunks(self, kit: Kit) -> None:
        draft = await kit.draft()
        path = kit.encode(STORY * 20)[:600]
        assert (await draft.guess("a", path, rule_for(path))).token < draft.engine.memory.vocabulary
        assert draft.engine.ledgers.held("a") == tuple(path)

    async def test_bounds(self, kit: Kit) -> None:
        draft = await kit.draft(context=48, cells=64)
        assert draft.context == 48
        rule = rule_for([1])
        for path in ([], [1] * 49):
            with pytest.raises(NoRoom):
                await draft.guess("a", path, rule)
        with pytest.raises(EngineError, match="1000000"):
            await draft.guess("a", [1, 10**6], rule)
        await draft.guess("a", [1] * 48, rule)
        with pytest.raises(NoRoom):
            await draft.guess("b", [2] * 48, rule)
        draft.release("a")
        await draft.guess("b", [2] * 48, rule)
