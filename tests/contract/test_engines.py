"""The engine ports' contract: one suite, on the simulated engines and on llama.cpp."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from engine_kit import TOLERANCE, Kit, Text, assert_failed, assert_same, drafts_of, feed, generate, one, plain, rule_for

from paceline.coupling import logprobs
from paceline.engine import Decided, Fed, Guess, TargetItem
from paceline.engine_ports import BatchedDraft, BatchedTarget
from paceline.engine_simulated import SimulatedDraft, SimulatedTarget
from paceline.errors import EngineError, NoRoom
from paceline.forward_pass import Row

LENGTH = 24
STORY = "Once upon a time, in a small village by the sea, there lived a fisherman who had never caught a fish. "


async def _simulated_kit() -> Kit:
    async def target(**room: int) -> BatchedTarget:
        return SimulatedTarget(**room)

    async def draft(**room: int) -> SimulatedDraft:
        return SimulatedDraft(**room)

    return Kit(True, target, draft, lambda text: list(text.encode()))


async def _llama_kit() -> Kit:
    from paceline import models
    from paceline.engine_llama import LlamaDraft, LlamaTarget
    from paceline.llama_context import LlamaVocab
    from paceline.settings import cache_dir

    pulled = await asyncio.to_thread(models.pull, "smollm2", cache_dir() / "models")

    async def target(**room: int) -> LlamaTarget:
        return await LlamaTarget.load(pulled.target, **{"cells": 2048, "max_sessions": 16, **room})

    async def draft(**room: int) -> LlamaDraft:
        return await LlamaDraft.load(pulled.draft, **{"cells": 2048, **room})

    def encode(text: str) -> list[int]:
        with LlamaVocab(pulled.target) as vocabulary:
            return vocabulary.tokenize(text.encode())

    return Kit(False, target, draft, encode)


@pytest.fixture(params=["simulated", pytest.param("llama", marks=pytest.mark.models)])
async def kit(request: pytest.FixtureRequest) -> AsyncIterator[Kit]:
    kit = await (_simulated_kit() if request.param == "simulated" else _llama_kit())
    yield kit
    await kit.close()


def only_decided(outcomes: Sequence[object]) -> list[Decided]:
    assert all(isinstance(outcome, Decided) for outcome in outcomes), outcomes
    return [outcome for outcome in outcomes if isinstance(outcome, Decided)]


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
        for outcome in only_decided(await target.step(items)):
            assert outcome.accepted == 19 or known.margins[outcome.accepted] < 0.15


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
        biased = replace(rule, sampling=replace_sampling(rule, far))
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
        memory = target.engine.memory
        real = memory.logits
        with monkeypatch.context() as patch:
            patch.setattr(memory, "logits", lambda i, n: real(i, n) * float("nan") if i < len(prompt) else real(i, n))
            bad, good = await target.step([item, replace(item, session="b")])
        assert_failed(bad, "step_failed")
        assert isinstance(good, Decided)
        assert isinstance(await one(target, TargetItem("a", "t", len(prompt), rule=item.rule)), Decided)


def replace_sampling(rule: object, bad: int) -> object:
    import msgspec

    return msgspec.structs.replace(rule.sampling, logit_bias={bad: 1.0})  # type: ignore[attr-defined]


class TestLedger:
    async def test_trim_and_release(self, kit: Kit) -> None:
        target = await kit.target()
        prompt = kit.encode(STORY)
        await feed(target, "a", prompt)
        assert target.held("a") == tuple(prompt)
        target.trim("a", 7)
        assert target.held("a") == tuple(prompt[:7])
        assert target.status().cells_used == 7
        target.trim("nobody", 1)
        target.release("nobody")
        target.release("a")
        assert target.status().sessions == 0

    async def test_history_that_differs_replaces_what_was_held(self, kit: Kit) -> None:
        target = await kit.target()
        one_way, other = kit.encode("The sky is blue and"), kit.encode("The sky is dark and the")
        await feed(target, "a", one_way)
        await feed(target, "a", other)
        assert target.held("a") == tuple(other)
        found = await plain(target, "a", other, rule_for(other), 8)
        assert_same(kit, found, await plain(target, "b", other, rule_for(other), 8))

    async def test_history_that_agrees_costs_nothing(self, kit: Kit) -> None:
        target = await kit.target()
        prompt = kit.encode(STORY)
        await feed(target, "a", prompt)
        fed = await one(target, TargetItem("a", "t", len(prompt), 0, tuple(prompt[:5])))
        assert fed == Fed("a", len(prompt))

    async def test_prefixes_are_shared_within_a_tenant_only(self, kit: Kit) -> None:
        target = await kit.target()
        prompt = kit.encode(STORY)
        expected = await plain(target, "a", prompt, rule_for(prompt), 8, tenant="red")
        used = target.status().cells_used
        await feed(target, "b", prompt, tenant="red")
        assert target.status().cells_used == used
        await feed(target, "c", prompt, tenant="blue")
        assert target.status().cells_used == used + len(prompt)
        target.release("a")
        for session, tenant in [("b", "red"), ("c", "blue"), ("d", "red")]:
            found = await plain(target, session, prompt, rule_for(prompt), 8, tenant=tenant)
            assert_same(kit, found, expected)

    async def test_sessions_of_one_batch_share_only_what_is_there(self, kit: Kit) -> None:
        """Four choices of one prompt opened in one step: nobody's KV exists yet, so nobody takes it."""
        target = await kit.target()
        prompt = tuple(kit.encode(STORY))
        rule = rule_for(prompt)
        items = [TargetItem(f"n{i}", "t", len(prompt), 0, prompt, rule=rule) for i in range(4)]
        tokens = {outcome.token for outcome in only_decided(await target.step(items))}
        assert len(tokens) == 1


class TestRoom:
    async def test_a_session_waits_while_another_one_runs(self, kit: Kit) -> None:
        target = await kit.target(cells=64)
        target.engine.ledgers.grace_s = 3600
        prompt = kit.encode(STORY)[:20]
        rule = rule_for(prompt)
        expected = await plain(target, "first", prompt, rule, LENGTH, tenant="x")
        full = TargetItem("second", "y", 30, 0, tuple(prompt + prompt[:10]))
        assert_failed(await one(target, full), "no_room")
        assert target.held("first") == tuple(prompt + expected.tokens)
        small = TargetItem("small", "y", 3, 0, tuple(prompt[:3]))
        failed, fed = await target.step([full, small])
        assert_failed(failed, "no_room")
        assert isinstance(fed, Fed)
        target.release("first")
        target.release("small")
        assert_same(kit, await plain(target, "second", prompt, rule, LENGTH, tenant="y"), expected)

    async def test_idle_sessions_make_room_and_come_back(self, kit: Kit) -> None:
        target = await kit.target(cells=64)
        target.engine.ledgers.grace_s = 0
        prompt = kit.encode(STORY)[:20]
        rule = rule_for(prompt)
        expected = await plain(target, "other", prompt, rule, LENGTH, tenant="z")
        target.release("other")
        committed = {"x": list(prompt), "y": list(prompt)}
        evictions = 0
        for _ in range(LENGTH):
            for session, tokens in committed.items():
                item = TargetItem(session, session, len(tokens), rule=rule)
                outcome = await one(target, item)
                if not isinstance(outcome, Decided):
                    evictions += 1
                    assert_failed(outcome, "need_history")
                    outcome = await one(target, replace(item, history=tuple(tokens)))
                assert isinstance(outcome, Decided)
                tokens.append(outcome.token)
        assert evictions > 3
        for tokens in committed.values():
            assert_same(kit, Text(tokens[len(prompt) :], []), expected)

    async def test_what_can_never_fit_says_so(self, kit: Kit) -> None:
        target = await kit.target(cells=64)
        tokens = tuple(kit.encode(STORY * 5)[:100])
        outcome = await one(target, TargetItem("a", "t", 100, 0, tokens))
        assert_failed(outcome, "no_room")
        assert "never" in outcome.message  # type: ignore[union-attr]
        assert target.status().cells_used == 0

    async def test_sequences_run_out_like_cells(self, kit: Kit) -> None:
        target = await kit.target(max_sessions=2)
        target.engine.ledgers.grace_s = 3600
        for session in "ab":
            await feed(target, session, [5, 6], tenant=session)
        assert_failed(await one(target, TargetItem("c", "t", 1, 0, (7,))), "no_room")
        target.release("a")
        assert isinstance(await one(target, TargetItem("c", "t", 1, 0, (7,))), Fed)
        assert target.held("a") == ()


class TestFaults:
    async def test_a_failed_pass_fails_the_guilty_session_only(self, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
        target = await kit.target()
        prompt = kit.encode(STORY)
        rule = rule_for(prompt)
        expected = await plain(target, "plain", prompt, rule, 6)
        await feed(target, "good", prompt)
        await feed(target, "bad", prompt)
        memory, poison = target.engine.memory, 3
        real = memory.decode

        def decode(rows: Sequence[Row]) -> None:
            real(rows[: len(rows) // 2])  # what was in memory before the failure stays there
            if any(row.token == poison for row in rows):
                raise EngineError("made to fail")
            memory_undo(rows[: len(rows) // 2])
            real(rows)

        def memory_undo(rows: Sequence[Row]) -> None:
            for row in reversed(rows):
                memory.remove(row.sequence, row.position)

        good = TargetItem("good", "t", len(prompt), draft=tuple(expected.tokens[:3]), rule=rule)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "decode", decode)
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
            patch.setattr(target.engine.memory, "logits", lambda _index, _length: 1 // 0)
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


class TestPaths:
    """Several paths of one session in one pass."""

    async def test_guesses_equal_those_of_single_paths(self, kit: Kit) -> None:
        draft = await kit.draft()
        prompt = kit.encode(STORY)
        rule = rule_for(prompt, 0.8)
        first = await draft.guess("a", prompt, rule)
        main, *paths = branches_of(prompt, first, 3)
        found = await draft.guesses("a", [main, *paths], rule)
        for path, guess in zip([main, *paths], found, strict=True):
            alone = await draft.guess(f"alone-{path[-1]}", path, rule)
            assert guess is not None
            assert_same_guess(kit, guess, alone)

    async def test_a_pass_feeds_one_row_for_each_path_and_none_again_for_the_path_that_was_taken(
        self, kit: Kit
    ) -> None:
        draft = await kit.draft()
        prompt = kit.encode(STORY)
        rule = rule_for(prompt)
        first = await draft.guess("a", prompt, rule)
        passes = rows_of(draft)
        main, left, right = branches_of(prompt, first, 2)
        for expected in ([3], [3, 3], [3, 3, 3]):
            guesses = await draft.guesses("a", [main, left, right], rule)
            assert passes == expected
            main, left, right = (
                [*path, guess.token] for path, guess in zip((main, left, right), guesses, strict=True) if guess
            )
        taken = await draft.guess("a", left, rule)
        assert passes == [3, 3, 3, 1]
        assert_same_guess(kit, taken, await draft.guess("alone", left, rule))
        del passes[:]
        await draft.guesses("a", [[*left, taken.token], [*left, taken.alternatives[0][0]]], rule)
        assert passes == [2]

    async def test_branches_are_found_again_whatever_their_order(self, kit: Kit) -> None:
        draft = await kit.draft()
        prompt = kit.encode(STORY)
        rule = rule_for(prompt)
        first = await draft.guess("a", prompt, rule)
        main, left, right = branches_of(prompt, first, 2)
        one, two, three = await draft.guesses("a", [main, left, right], rule)
        assert one and two and three
        main, left, right = [*main, one.token], [*left, two.token], [*right, three.token]
        passes = rows_of(draft)
        assert all(await draft.guesses("a", [main, right], rule))
        assert all(await draft.guesses("a", [main, right, left], rule))
        assert passes == [2, 3]

    async def test_paths_before_anything_was_fed(self, kit: Kit) -> None:
        """The prompt goes in once, and all paths are answered."""
        draft = await kit.draft()
        prompt = kit.encode(STORY * 20)[:400]
        rule = rule_for(prompt)
        passes = rows_of(draft)
        found = await draft.guesses("a", [[*prompt, 5], [*prompt, 6], [*prompt[:-1], 7]], rule)
        assert all(found)
        assert passes == [256, 144, 3]
        short = kit.encode(STORY)[:9]
        assert all(await draft.guesses("b", [[*short, 5], [*short, 6]], rule))
        assert passes[3:] == [9, 2]

    async def test_a_branch_that_lacks_much_catches_up_by_parts(self, kit: Kit) -> None:
        draft = await kit.draft()
        prompt = kit.encode(STORY)
        rule = rule_for(prompt)
        await draft.guess("a", prompt, rule)
        other = [*prompt, *kit.encode(STORY * 2)[:35]]
        passes, main, answers = rows_of(draft), list(prompt), []
        for _ in range(3):
            main.append(5)
            _, branch = await draft.guesses("a", [main, other], rule)
            answers.append(branch)
        assert passes == [17, 17, 4]
        assert answers[:2] == [None, None]
        assert answers[2] is not None
        assert_same_guess(kit, answers[2], await draft.guess("alone", other, rule))

    async def test_no_room_drops_branches_and_never_the_main_path(self, kit: Kit) -> None:
        draft = await kit.draft(cells=64, context=64, max_sessions=1)
        prompt = kit.encode(STORY * 4)[:60]
        rule = rule_for(prompt)
        first = await draft.guess("a", prompt, rule)
        main, left, right = branches_of(prompt, first, 2)
        found = await draft.guesses("a", [main, left, right], rule)
        assert all(found)
        assert draft.status().cells_used == 63
        main, left, right = ([*path, 5] for path in (main, left, right))
        one, two, three = await draft.guesses("a", [main, left, right], rule)
        assert one is not None
        assert two is None or three is None
        for _ in range(2):
            main.append(5)
            one, two, three = await draft.guesses("a", [main, left, right], rule)
            assert one is not None
        assert len(main) == draft.context
        assert draft.engine.ledgers.held("a") == tuple(main)
        assert two is three is None
        with pytest.raises(NoRoom):
            await draft.guesses("a", [[*main, 5], left], rule)
        found = await draft.guesses("a", [main, [*main, 5], []], rule)
        assert found[0] is not None
        assert found[1:] == [None, None]

    async def test_a_session_takes_the_room_of_another_ones_branches(self, kit: Kit) -> None:
        draft = await kit.draft(cells=64, context=64, max_sessions=1)
        rule = rule_for([1])
        main = kit.encode(STORY * 2)[:20]
        await draft.guess("a", main, rule)
        assert all(await draft.guesses("a", [[*main, 5], [*main, 6], [*main, 7], [*main, 8]], rule))
        assert draft.status().cells_used == 24
        other = kit.encode("An entirely different beginning " * 20)
        await draft.guess("b", other[:43], rule)
        assert draft.engine.ledgers.held("a") == (*main, 5)
        assert draft.status().sessions == 2
        with pytest.raises(NoRoom):
            await draft.guess("b", other[:44], rule)

    async def test_more_paths_than_fit_into_a_pass(self, kit: Kit) -> None:
        draft = await kit.draft()
        prompt = kit.encode(STORY)
        paths = [[*prompt, 5 + i] for i in range(draft.max_paths + 2)]
        found = await draft.guesses("a", paths, rule_for(prompt))
        assert all(found[: draft.max_paths])
        assert found[draft.max_paths :] == [None, None]

    async def test_bad_ids(self, kit: Kit) -> None:
        draft = await kit.draft()
        prompt = kit.encode(STORY)
        good, bad = await draft.guesses("a", [prompt, [*prompt, 10**6]], rule_for(prompt))
        assert good is not None
        assert bad is None
        with pytest.raises(EngineError, match="1000000"):
            await draft.guesses("a", [[*prompt, 10**6], prompt], rule_for(prompt))

    async def test_release_frees_all_of_a_session_and_nothing_of_others(self, kit: Kit) -> None:
        draft = await kit.draft()
        prompt, other = kit.encode(STORY), kit.encode("An entirely different beginning")
        rule = rule_for(prompt)
        for session, path in (("a", prompt), ("b", other)):
            assert all(await draft.guesses(session, [[*path, 5], [*path, 6], [*path, 7]], rule))
        draft.release("a")
        assert draft.status().cells_used == len(other) + 3
        assert draft.status().sessions == 1
        passes = rows_of(draft)
        assert all(await draft.guesses("b", [[*other, 5, 8], [*other, 7, 9]], rule))
        assert passes == [2]
        draft.release("b")
        assert (draft.status().cells_used, draft.engine.ledgers.spare) == (0, draft.engine.ledgers.sequences)

    async def test_several_sessions_share_a_pass(self, kit: Kit) -> None:
        draft = await kit.draft()
        prompts = [kit.encode(f"{name} is the capital of") for name in ("Paris", "Rome", "Oslo")]
        rules = [rule_for(prompt) for prompt in prompts]
        heads = [await draft.guess(f"s{i}", p, r) for i, (p, r) in enumerate(zip(prompts, rules, strict=True))]
        paths = [branches_of(prompt, head, 1) for prompt, head in zip(prompts, heads, strict=True)]
        passes = rows_of(draft)
        found = await asyncio.gather(*(draft.guesses(f"s{i}", p, rules[i]) for i, p in enumerate(paths)))
        assert passes == [6]
        for i, guesses in enumerate(found):
            for path, guess in zip(paths[i], guesses, strict=True):
                assert guess is not None
                assert_same_guess(kit, guess, await draft.guess("alone", path, rules[i]))

    async def test_a_branch_that_fails_costs_its_own_guess_only(
        self, kit: Kit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        draft = await kit.draft()
        prompt = kit.encode(STORY)
        rule = rule_for(prompt)
        first = await draft.guess("a", prompt, rule)
        main, left, right = branches_of(prompt, first, 2)
        memory = draft.engine.memory
        real = memory.decode

        def decode(rows: Sequence[Row]) -> None:
            if any(row.token == left[-1] for row in rows):
                raise EngineError("made to fail")
            real(rows)

        with monkeypatch.context() as patch:
            patch.setattr(memory, "decode", decode)
            one, two, three = await draft.guesses("a", [main, left, right], rule)
        assert one is not None
        assert two is None
        assert three is not None
        assert all(await draft.guesses("a", [main, left, right], rule))


def branches_of(path: Sequence[int], guess: Guess, count: int) -> list[list[int]]:
    """The path with the guess after it, and with each of its first runner-ups instead."""
    return [[*path, token] for token in (guess.token, *(token for token, _ in guess.alternatives[:count]))]


def rows_of(draft: BatchedDraft) -> list[int]:
    """The rows of each pass from here on."""
    passes: list[int] = []
    memory = draft.engine.memory
    decode = memory.decode

    def counted(rows: Sequence[Row]) -> None:
        passes.append(len(rows))
        decode(rows)

    memory.decode = counted  # type: ignore[method-assign]
    return passes


def assert_same_guess(kit: Kit, found: Guess, expected: Guess) -> None:
    """Equal; of a real engine, but for the last bits that the shape of a batch changes."""
    if found.token != expected.token:
        assert not kit.exact
        assert min(found.alternatives[0][1], expected.alternatives[0][1]) < TOLERANCE
        return
    assert found.confidence == pytest.approx(expected.confidence, abs=0 if kit.exact else 0.05)
    gaps = ([gap for _, gap in guess.alternatives] for guess in (found, expected))
    assert list(next(gaps)) == pytest.approx(list(next(gaps)), abs=0 if kit.exact else 2 * TOLERANCE)


@pytest.mark.models
async def test_a_step_of_llama_does_not_hold_the_event_loop() -> None:
    kit = await _llama_kit()
    target = await kit.target()
    tokens = tuple(kit.encode(STORY * 20)[:400])
    task = asyncio.create_task(target.step([TargetItem("a", "t", len(tokens), 0, tokens)]))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 20
    await kit.close()


@pytest.mark.models
async def test_log_probabilities_are_of_the_raw_logits() -> None:
    kit = await _llama_kit()
    target = await kit.target()
    prompt = tuple(kit.encode(STORY))
    rule = rule_for(prompt, 0.8, top_k=3, logit_bias={5: 50.0})
    item = TargetItem("a", "t", len(prompt), 0, prompt, rule=rule, logprobs=2)
    (outcome,) = only_decided([await one(target, item)])
    raw = target.engine.memory.logits(len(prompt) - 1, 0)
    assert outcome.token == 5
    assert outcome.logprobs == (logprobs(raw, 5, 2),)
    await kit.close()
