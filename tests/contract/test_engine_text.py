"""What a target decides, by the contract of paceline.engine: the text does not depend on drafts, batches or chunks."""

from __future__ import annotations

import pytest
from engine_kit import (
    LENGTH,
    STORY,
    Kit,
    Text,
    assert_same,
    drafts_of,
    feed,
    generate,
    llama_kit,
    one,
    only_decided,
    plain,
    rule_for,
)

from paceline.coupling import logprobs
from paceline.engine import Fed, TargetItem


class TestText:
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    async def test_drafts_never_change_it(self, kit: Kit, temperature: float) -> None:
        target = await kit.target()
        prompt = kit.encode(STORY)
        rule = rule_for(prompt, temperature)
        expected = await plain(target, "plain", prompt, rule, LENGTH)
        assert expected.steps == LENGTH
        for name, k, wrong in [
            ("right", 8, lambda i: False),
            ("wrong", 4, lambda i: True),
            ("mixed", 5, lambda i: i % 3 == 2),
            ("one", 1, lambda i: i % 2 == 0),
        ]:
            found = await generate(target, name, prompt, rule, LENGTH, drafts_of(expected.tokens, prompt, k, wrong))
            assert_same(kit, found, expected)
        right = await generate(
            target, "again", prompt, rule, LENGTH, drafts_of(expected.tokens, prompt, 8, lambda i: False)
        )
        assert right.steps <= LENGTH // 8 + 3

    async def test_settings_act_at_every_verified_position(self, kit: Kit) -> None:
        """Penalties see the accepted part of a block; a bias bars a token in the middle of one."""
        target = await kit.target()
        prompt = kit.encode(STORY)
        free = await plain(target, "free", prompt, rule_for(prompt), LENGTH)
        fields = {
            "logit_bias": {free.tokens[2]: -100.0, free.tokens[5]: -100.0},
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.5,
            "min_tokens": 6,
            "end_ids": (free.tokens[3],),
        }
        rule = rule_for(prompt, **fields)
        expected = await plain(target, "plain", prompt, rule, LENGTH)
        barred = {free.tokens[2], free.tokens[5]}
        assert not barred & set(expected.tokens)
        assert free.tokens[3] not in expected.tokens[:6]
        for name, known in [("echo", expected), ("stale", free)]:
            chains = drafts_of(known.tokens, prompt, 6, lambda i: False)
            assert_same(kit, await generate(target, name, prompt, rule, LENGTH, chains), expected)

    async def test_batches_of_many_sessions_do_not_mix(self, kit: Kit) -> None:
        target = await kit.target()
        prompts = {f"s{i}": kit.encode(f"{name} is the capital of") for i, name in enumerate(["Paris", "Rome", "Oslo"])}
        alone = {s: await plain(target, f"{s}-alone", p, rule_for(p), 12) for s, p in prompts.items()}
        found = {s: Text([], []) for s in prompts}
        for session, prompt in prompts.items():
            await feed(target, session, prompt)
        late = kit.encode(STORY)
        for turn in range(12):
            items = []
            for session, prompt in prompts.items():
                tokens = found[session].tokens
                draft = tuple(alone[session].tokens[len(tokens) : len(tokens) + 3]) if turn % 2 else ()
                items.append(TargetItem(session, "t", len(prompt) + len(tokens), draft=draft, rule=rule_for(prompt)))
            history = tuple(late[turn * 2 : turn * 2 + 2])
            items.append(TargetItem("late", "u", len(late), turn * 2, history))
            *outcomes, fed = await target.step(items)
            assert isinstance(fed, Fed)
            for item, outcome in zip(items, only_decided(outcomes), strict=False):
                found[item.session].tokens += [*item.draft[: outcome.accepted], outcome.token]
        for session, text in found.items():
            cut = Text(text.tokens[:12], [])
            assert_same(kit, cut, alone[session])

    async def test_history_in_chunks_or_with_the_decision_is_the_same(self, kit: Kit) -> None:
        target = await kit.target()
        prompt = kit.encode(STORY)
        rule = rule_for(prompt)
        whole = await one(target, TargetItem("a", "a", len(prompt), 0, tuple(prompt), rule=rule))
        await feed(target, "b", prompt, tenant="b", chunk=5)
        chunks = await one(target, TargetItem("b", "b", len(prompt), rule=rule))
        first, second = only_decided([whole, chunks])
        assert first.token == second.token or first.margins[0] < 0.15

    async def test_a_pass_too_large_for_the_engine_is_cut(self, kit: Kit) -> None:
        """More rows than one pass of llama.cpp takes, from many sessions with long chains."""
        target = await kit.target(cells=4096)
        prompt = kit.encode(STORY * 3)
        rule = rule_for(prompt)
        known = await plain(target, "plain", prompt, rule, 20)
        names = [f"s{i}" for i in range(9)]
        items = [TargetItem(n, n, len(prompt), 0, tuple(prompt), tuple(known.tokens[:19]), rule=rule) for n in names]
        outcomes = only_decided(await target.step(items))
        assert len(outcomes) == len(items)
        for outcome in outcomes:
            assert outcome.accepted == 19 or known.margins[outcome.accepted] < 0.15


@pytest.mark.models
async def test_log_probabilities_are_of_the_raw_logits() -> None:
    kit = await llama_kit()
    target = await kit.target()
    prompt = tuple(kit.encode(STORY))
    rule = rule_for(prompt, 0.8, top_k=3, logit_bias={5: 50.0})
    item = TargetItem("a", "t", len(prompt), 0, prompt, rule=rule, logprobs=2)
    (outcome,) = only_decided([await one(target, item)])
    raw = target.engine.memory.logits(len(prompt) - 1, 0)
    assert outcome.token == 5
    assert outcome.logprobs == (logprobs(raw, 5, 2),)
    await kit.close()
