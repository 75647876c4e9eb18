"""What the simulated engines say and draft, how long they take, and the file that describes them."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import numpy as np
import pytest
from engine_kit import assert_failed, generate, one, plain, rule_for

from paceline.engine import Decided, Rule, TargetItem
from paceline.engine_simulated import SimulatedDraft, SimulatedTarget, Simulation, Timing, World, toy_card
from paceline.errors import SettingsError
from paceline.simulated_world import END_ID, contains
from paceline.tokenizer import Tokenizer
from paceline.wire import Sampling

PROMPT = list(b"say it: ")


async def say(world: World, prompt: list[int], length: int, **fields: object) -> list[int]:
    target = SimulatedTarget(world)
    return (await plain(target, "s", prompt, rule_for(prompt, **fields), length)).tokens


class TestWorld:
    async def test_text_is_deterministic_and_depends_on_the_prompt_and_seed(self) -> None:
        first = await say(World(), PROMPT, 40)
        assert first == await say(World(), PROMPT, 40)
        assert first != await say(World(seed=1), PROMPT, 40)
        assert first != await say(World(), list(b"say xx: "), 40)
        assert bytes(first).decode().replace("\n", " ").replace(" ", "").isalpha()

    @pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
    async def test_a_script_is_spoken_at_any_temperature(self, temperature: float) -> None:
        world = World(script={"*": (1, 2, 3)})
        assert await say(world, PROMPT, 5, temperature=temperature) == [1, 2, 3, END_ID, END_ID]

    async def test_the_closest_script_is_taken(self) -> None:
        script = {tuple(PROMPT): (1,), tuple(b"it"): (2,), tuple(b"say it"): (3,), "*": (4,)}
        world = World(script=script)
        assert (await say(world, PROMPT, 1))[0] == 1
        assert (await say(world, list(b"do say it"), 1))[0] == 3
        assert (await say(world, list(b"with"), 1))[0] == 2
        assert (await say(world, list(b"none"), 1))[0] == 4
        assert (await say(World(script={(9,): (1,)}), PROMPT, 1))[0] != 1

    async def test_bias_and_barred_ends_beat_a_script(self) -> None:
        world = World(script={"*": (97, 98)})
        text = await say(world, PROMPT, 6, logit_bias={97: -100.0}, min_tokens=4, end_ids=(END_ID,))
        assert text[0] != 97
        assert text[1] == 98
        assert END_ID not in text[:4]
        assert text[4] == END_ID

    def test_a_floor_of_minus_infinity_forbids_all_other_ids(self) -> None:
        logits = World(support=(1, 2), floor=-math.inf).logits([1], 1)
        assert np.isfinite(logits).sum() == 2

    def test_contains(self) -> None:
        assert contains(b"hello", b"ell")
        assert contains(b"hello", b"")
        assert not contains(b"hello", b"helloo")


class TestDraftModes:
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    @pytest.mark.parametrize(
        ("mode", "low", "high"), [("echo", 1, 1), ("anti", 0, 0), ("mix", 0.6, 0.7), ("agree", 0.62, 0.78)]
    )
    async def test_share_of_right_guesses(self, mode: str, low: float, high: float, temperature: float) -> None:
        rule = rule_for(PROMPT, temperature)
        text = (await plain(SimulatedTarget(), "s", PROMPT, rule, 400)).tokens
        draft = SimulatedDraft(mode=mode, acceptance=0.7)  # type: ignore[arg-type]
        right = 0
        for i, token in enumerate(text):
            guess = await draft.guess("s", PROMPT + text[:i], rule)
            right += guess.token == token
            named = token in [other for other, _ in guess.alternatives]
            assert named == (guess.token != token and mode != "anti")
        assert low <= right / len(text) <= high

    async def test_the_only_survivor_can_be_missed_too(self) -> None:
        rule = Rule(Sampling(top_k=1), 1, len(PROMPT))
        guess = await SimulatedDraft(mode="anti").guess("s", PROMPT, rule)
        echo = await SimulatedDraft(mode="echo").guess("s", PROMPT, rule)
        assert guess.token != echo.token

    async def test_with_the_target(self) -> None:
        rule, draft = rule_for(PROMPT, 0.8), SimulatedDraft(acceptance=0.8)
        expected = await plain(SimulatedTarget(), "s", PROMPT, rule, 50)
        path: list[int] = []
        for _ in range(70):
            path.append((await draft.guess("s", PROMPT + path, rule)).token)
        found = await generate(
            SimulatedTarget(), "s", PROMPT, rule, 50, lambda committed: path[len(committed) - len(PROMPT) :][:4]
        )
        assert found.tokens == expected.tokens


class TestTiming:
    def test_roofline(self) -> None:
        timing = Timing(base_ms=1, per_token_ms=0.5, memory_ms=4)
        assert [timing.step_ms(n) for n in (1, 8, 20)] == [5, 5, 11]

    async def test_steps_take_their_time(self) -> None:
        target = SimulatedTarget(timing=Timing(base_ms=20))
        loop = asyncio.get_running_loop()
        started = loop.time()
        await one(target, TargetItem("a", "t", 1, 0, (1,)))
        assert loop.time() - started >= 0.019
        assert target.status().step_ms[1] >= 19


class TestFaults:
    async def test_failures_on_order(self) -> None:
        target = SimulatedTarget()
        item = TargetItem("a", "t", 1, 0, (1,), rule=rule_for([1]))
        other = TargetItem("b", "t", 1, 0, (1,), rule=rule_for([1]))
        target.fail_next("a", times=2)
        bad, good = await target.step([item, other])
        assert_failed(bad, "step_failed")
        assert isinstance(good, Decided)
        assert_failed(await one(target, item), "step_failed")
        assert isinstance(await one(target, item), Decided)
        target.fail_next()
        bad, good = await target.step([other, item])
        assert_failed(bad, "step_failed")
        assert isinstance(good, Decided)


class TestFile:
    def test_defaults_without_a_file(self) -> None:
        assert Simulation.load(None) == Simulation()

    async def test_everything_in_it_takes_effect(self, tmp_path: Path) -> None:
        path = tmp_path / "simulated.json"
        path.write_text(json.dumps({
            "script": {"*": "hello", "ids": [104, 256]}, "acceptance": 1, "mode": "mix", "base_ms": 3, "draft_ms": 2,
        }))  # fmt: skip
        simulation = Simulation.load(path)
        target, draft = SimulatedTarget.of(simulation, context=64), SimulatedDraft.of(simulation, context=32)
        assert (target.status().context, draft.context, draft.mode) == (64, 32, "mix")
        assert bytes((await plain(target, "s", PROMPT, rule_for(PROMPT), 5)).tokens) == b"hello"
        assert target.status().step_ms[1] >= 2.9

    @pytest.mark.parametrize("text", ["{", "[]", '{"nonsense": 1}', '{"script": {"*": 3}}'])
    def test_a_bad_file_is_named(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "simulated.json"
        path.write_text(text)
        with pytest.raises(SettingsError, match=r"simulated\.json"):
            Simulation.load(path)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match="nowhere"):
            Simulation.load(tmp_path / "nowhere")


class TestToyCard:
    def test_bytes_and_markers(self) -> None:
        tokenizer = Tokenizer(toy_card())
        assert tokenizer.encode("hé<|end|>") == list("hé<|end|>".encode())
        chat = [{"role": "user", "content": "hi<|end|>"}, {"role": "assistant", "content": "yo"}]
        assert tokenizer.chat(chat) == [257, *b"hi<|end|>", 256, 258, *b"yo", 256, 258]
        assert tokenizer.decode([104, 105, END_ID]) == "hi"
        assert toy_card().simulated
        assert toy_card(context=64).context == 64
