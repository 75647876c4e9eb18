"""What a target answers to an item, by the contract of paceline.engine: a decision, or why there is none."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from engine_kit import STORY, Kit, assert_failed, feed, one, only_decided, plain, rule_for

from paceline.engine import Decided, Fed, TargetItem


class TestOutcomes:
    async def test_one_margin_and_logprob_for_each_decided_position(self, kit: Kit) -> None:
        target = await kit.target()
        prompt = kit.encode(STORY)
        rule = rule_for(prompt)
        known = await plain(target, "a", prompt, rule, 4)
        await feed(target, "b", prompt)
        draft = (known.tokens[0], known.tokens[1], known.tokens[2] + 1, 5)
        (outcome,) = only_decided(
            [await one(target, TargetItem("b", "t", len(prompt), draft=draft, rule=rule, logprobs=3))]
        )
        assert (outcome.accepted, outcome.token) == (2, known.tokens[2])
        assert len(outcome.margins) == len(outcome.logprobs) == 3
        assert [entry.token for entry in outcome.logprobs] == known.tokens[:3]
        for entry in outcome.logprobs:
            assert entry.top[0] == (entry.token, entry.logprob)
            assert len(entry.top) == 3
            assert entry.logprob <= 0

    async def test_missing_history_is_asked_for(self, kit: Kit) -> None:
        target = await kit.target()
        rule = rule_for([1, 2, 3])
        assert_failed(await one(target, TargetItem("a", "t", 3, rule=rule)), "need_history")
        assert_failed(await one(target, TargetItem("a", "t", 9, 4, (1, 2))), "need_history")
        assert_failed(await one(target, TargetItem("a", "t", 0, rule=rule)), "need_history")
        assert target.held("a") == ()

    async def test_bad_ids_fail_their_item_alone(self, kit: Kit) -> None:
        target = await kit.target()
        prompt = tuple(kit.encode("Hello"))
        rule, far = rule_for(prompt), 10**6
        good = TargetItem("good", "t", len(prompt), 0, prompt, rule=rule)
        biased = replace(rule, sampling=msgspec.structs.replace(rule.sampling, logit_bias={far: 1.0}))
        *bad, well = await target.step([
            TargetItem("a", "t", 2, 0, (1, far)),
            replace(good, session="b", draft=(far,)),
            replace(good, session="c", rule=biased),
            good,
        ])  # fmt: skip
        for outcome in bad:
            assert_failed(outcome, "bad_token")
        assert isinstance(well, Decided)

    async def test_beyond_the_context_fails_the_item(self, kit: Kit) -> None:
        target = await kit.target(context=16, cells=64)
        prompt = tuple(kit.encode(STORY)[:14])
        rule = rule_for(prompt)
        item = TargetItem("a", "t", 14, 0, prompt, rule=rule)
        assert isinstance(await one(target, replace(item, draft=(1, 2))), Decided)
        assert_failed(await one(target, replace(item, draft=(1, 2, 3))), "step_failed")

    async def test_the_same_session_twice_in_a_batch(self, kit: Kit) -> None:
        target = await kit.target()
        item = TargetItem("a", "t", 2, 0, (5, 6))
        first, second = await target.step([item, item])
        assert isinstance(first, Fed)
        assert_failed(second, "step_failed")

    async def test_nothing_to_choose_fails_the_session_alone(self, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
        target = await kit.target()
        prompt = tuple(kit.encode("Hello"))
        item = TargetItem("a", "t", len(prompt), 0, prompt, rule=rule_for(prompt))
        with monkeypatch.context() as patch:
            kit.faults.no_choice(patch, target, len(prompt))
            bad, good = await target.step([item, replace(item, session="b")])
        assert_failed(bad, "step_failed")
        assert isinstance(good, Decided)
        assert isinstance(await one(target, TargetItem("a", "t", len(prompt), rule=item.rule)), Decided)
