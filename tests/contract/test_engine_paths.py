"""Guesses of a draft, by the contract of paceline.engine: several paths of one session in one pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from engine_kit import STORY, TOLERANCE, Kit, rule_for

from paceline.engine import Guess
from paceline.engine_ports import BatchedDraft
from paceline.errors import EngineError, NoRoom
from paceline.forward_pass import Row


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
