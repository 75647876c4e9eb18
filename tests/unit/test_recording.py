"""Recorded drafts: what is replayed is what the model guessed, at the pace of a device; what is missing is told."""

from __future__ import annotations

import asyncio
import errno
import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadgen_kit import run

from loadgen.deepen import DEPTH, beyond, deepen
from loadgen.jobs import Drafting, Waved
from loadgen.pace import FedTokens, Pace, interpolated
from loadgen.recording import FAR, RecordedDraft, Recording, Said, gap_to, key_of
from loadgen.replay_check import outcome, pace_of, verdict
from paceline.engine import Guess, Rule
from paceline.engine_simulated import SimulatedDraft
from paceline.errors import EngineError, NoRoom
from paceline.wire import Sampling

PROMPT = tuple(b"a prompt of the toy")
AT_ONCE = Pace({1: 0.0})


def rule(temperature: float = 0.8, seed: int = 7, length: int = 40) -> Rule:
    return Rule(Sampling(temperature=temperature, min_tokens=length, end_ids=(256,)), seed, len(PROMPT))


class Refusing(SimulatedDraft):
    """A model that must not be asked."""

    async def guess(self, session: str, path: Sequence[int], rule: Rule) -> Guess:
        raise EngineError("asked for a guess")

    async def guesses(self, session: str, paths: Sequence[Sequence[int]], rule: Rule) -> list[Guess | None]:
        raise EngineError("asked for guesses")


async def wander(engine: RecordedDraft, seed: int = 3) -> list[tuple[tuple[int, ...], Guess | None]]:
    """Chains, re-roots after a rejection and branches beside the main chain, as a draft loop asks for them."""
    draw, path, asked = random.Random(seed), list(PROMPT), []
    terms = rule()
    for _ in range(12):
        chain = list(path)
        for _ in range(draw.randrange(1, 5)):
            branch = [*chain[:-1], draw.choice(range(97, 123))]
            paths = [chain, branch] if draw.random() < 0.5 else [chain]
            found = await engine.guesses("s", [tuple(one) for one in paths], terms)
            asked += [(tuple(one), guess) for one, guess in zip(paths, found, strict=True)]
            assert found[0] is not None
            chain = [*chain, found[0].token]
        path = chain[: draw.randrange(len(path), len(chain)) + 1]
        path[-1] = draw.choice(range(97, 123))
    return asked


async def test_a_replay_says_what_the_model_said_off_the_text_and_in_branches_too(tmp_path: Path) -> None:
    file = tmp_path / "new" / "toy.drafts"
    recording = Recording(file)
    live = RecordedDraft(SimulatedDraft(), recording)
    said = await wander(live)
    assert len({path for path, _ in said}) > 30
    assert live.drafting.misses == live.drafting.again - (len(said) - len({path for path, _ in said})) == 0
    recording.save()

    replay = RecordedDraft(Refusing(), Recording(file), AT_ONCE)
    assert await wander(replay) == said
    assert replay.drafting == Drafting(guesses=len(said))
    plain = SimulatedDraft()
    assert [(path, await plain.guess("p", path, rule())) for path, _ in said] == said


async def test_drafts_made_again_are_compared_with_the_recorded_ones() -> None:
    recording = Recording()
    said = await wander(RecordedDraft(SimulatedDraft(), recording))
    again = RecordedDraft(SimulatedDraft(), recording)
    assert await wander(again) == said
    assert (again.drafting.again, again.drafting.differing) == (len(said), 0)
    other = RecordedDraft(SimulatedDraft(acceptance=0.0), recording)
    first = await other.guess("s", PROMPT, rule())
    recorded = recording.find(key_of(PROMPT, rule()))
    assert recorded is not None
    assert other.drafting.differing == (first.token != recorded.token)


async def test_what_is_missing_is_made_kept_and_counted_once() -> None:
    recording = Recording()
    replay = RecordedDraft(SimulatedDraft(), recording, AT_ONCE)
    longer = (*PROMPT, 97)
    made = await replay.guesses("s", [PROMPT, longer], rule())
    assert (replay.drafting.guesses, replay.drafting.misses) == (2, 2)
    assert await RecordedDraft(Refusing(), recording, AT_ONCE).guesses("s", [PROMPT, longer], rule()) == made
    third = await replay.guesses("s", [longer, (*PROMPT, 98)], rule())
    assert third[0] == made[1]
    assert (replay.drafting.guesses, replay.drafting.misses) == (4, 3)
    assert replay.drafting.miss_share == 0.75


def test_a_guess_belongs_to_its_path_seed_and_sampling() -> None:
    keys = {
        key_of(PROMPT, rule()), key_of((*PROMPT, 1), rule()), key_of(PROMPT, rule(seed=8)),
        key_of(PROMPT, rule(temperature=0.0)), key_of(PROMPT, Rule(rule().sampling, 7, len(PROMPT) - 1)),
    }  # fmt: skip
    assert len(keys) == 5
    assert key_of(list(PROMPT), rule()) == key_of(PROMPT, rule())


def test_a_recording_comes_back_whole_and_drops_a_torn_end(tmp_path: Path) -> None:
    file = tmp_path / "drafts"
    recording = Recording(file)
    guesses = {bytes([i] * 16): Guess(i, 1 / (i + 3), ((i + 1, 0.1 * i), (5, float("inf")))) for i in range(5)}
    for key, guess in guesses.items():
        recording.keep(key, guess)
        recording.save()
    whole = file.stat().st_size
    with file.open("ab") as torn:
        torn.write(b"\x40\x00\x00\x00torn")
    again = Recording(file)
    assert {key: again.find(key) for key in guesses} == guesses
    assert len(again) == 5
    assert file.stat().st_size == whole
    again.keep(b"k" * 16, Guess(1, 0.5))
    again.save()
    assert len(Recording(file)) == 6


def recorded(file: Path, count: int = 5) -> Recording:
    recording = Recording(file)
    for i in range(count):
        recording.keep(bytes([i] * 16), Guess(i, 0.5, ((i + 1, 0.25),)))
    recording.save()
    return recording


@pytest.mark.parametrize("end", [64 * b"\0", b"\x03\0\0\0abc", b"\x01\0\0\0\x90" * 9, b"\xff" * 64])
def test_a_recording_with_a_damaged_end_is_used_up_to_there(tmp_path: Path, end: bytes) -> None:
    file = tmp_path / "drafts"
    recorded(file)
    whole = file.read_bytes()
    file.write_bytes(whole + end)
    assert len(Recording(file)) == 5
    assert file.read_bytes() == whole


@given(data=st.data())
def test_whatever_a_recording_s_file_holds_it_is_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = tmp_path_factory.mktemp("damaged") / "drafts"
    recorded(file)
    content = bytearray(file.read_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    content[start : start + 8] = data.draw(st.binary(max_size=16))
    file.write_bytes(content)
    kept = len(Recording(file))
    assert kept <= 5
    assert len(recorded(file)) == len(Recording(file)) >= 5


def test_a_full_disk_costs_no_record_that_was_there_or_is_kept_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "drafts"
    recording = recorded(file)
    whole, room = file.read_bytes(), 30
    opened = Path.open

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            nonlocal room
            if not room:
                raise OSError(errno.ENOSPC, "no space left on device")
            part = bytes(data)[:room]
            room -= len(part)
            return super().write(part)

    monkeypatch.setattr(Path, "open", lambda path, *_, **__: Full(path, "ab"))
    recording.keep(b"k" * 16, Guess(1, 0.5))
    with pytest.raises(OSError, match="no space"):
        recording.save()
    monkeypatch.setattr(Path, "open", opened)
    assert file.read_bytes() == whole
    recording.save()
    assert Recording(file).find(b"k" * 16) == Guess(1, 0.5)
    assert len(Recording(file)) == 6


async def test_no_room_for_a_path_is_no_miss_of_the_recording() -> None:
    class Full(SimulatedDraft):
        async def guess(self, session: str, path: Sequence[int], rule: Rule) -> Guess:
            raise NoRoom("full")

    recording = Recording()
    with pytest.raises(NoRoom):
        await RecordedDraft(Full(), recording).guess("s", PROMPT, rule())
    assert len(recording) == 0


# --- pace ------------------------------------------------------------------------------------------------------------


def test_a_device_feeds_what_no_path_that_it_holds_has_in_common() -> None:
    fed = FedTokens()
    assert fed.rows([(1, 2, 3, 4)]) == 4
    assert fed.rows([(1, 2, 3, 4, 5)]) == 1
    assert fed.rows([(1, 2, 3, 4, 5, 6), (1, 2, 3, 9)]) == 2
    assert fed.rows([(1, 2, 3, 9, 7), (1, 2, 3, 4, 5, 6, 8)]) == 2, "the branch became the main chain"
    assert fed.rows([(1, 2, 8)]) == 1
    assert fed.rows([(1, 2, 8)]) == 1, "asked again: the last token at least"
    assert fed.rows([(7, 7, 7)]) == 3


def test_the_pace_is_the_median_by_tokens_fed_and_never_falls() -> None:
    learned = Pace.learned([(1, 10), (1, 12), (1, 90), (2, 20), (4, 18), (60, 200)])
    assert learned is not None
    assert learned.ms == {1: 12, 2: 19, 4: 19, 60: 200}
    assert learned(1) == 12
    assert learned(32) == pytest.approx(19 + 28 / 56 * 181)
    assert learned(116) == pytest.approx(200 + 181)
    assert learned.scaled(6).ms == {1: 6, 2: 9.5, 4: 9.5, 60: 100}
    assert Pace.learned([]) is None


@given(st.dictionaries(st.integers(1, 300), st.floats(0.1, 1e3), min_size=1), st.integers(1, 400))
def test_interpolation_stays_between_its_neighbours(values: dict[int, float], at: int) -> None:
    found = interpolated(values, at)
    if at in values:
        assert found == pytest.approx(values[at])
    assert found >= min(values.values()) - 1e-9
    if at <= max(values):
        assert found <= max(values.values()) + 1e-9


async def test_a_replayed_pass_takes_the_stated_time_for_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    recording = Recording()
    await RecordedDraft(SimulatedDraft(), recording).guesses("s", [PROMPT, (*PROMPT, 97)], rule())
    replay = RecordedDraft(Refusing(), recording, Pace({1: 2e3, 2: 5e3, len(PROMPT): 60e3}))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    await replay.guess("s", PROMPT, rule())
    await replay.guess("s", (*PROMPT, 97), rule())
    assert slept == pytest.approx([60, 2], abs=1)


# --- deepening -------------------------------------------------------------------------------------------------------


async def test_chains_and_near_runner_ups_are_drafted_on_from_their_ends() -> None:
    recording, model, terms = Recording(), SimulatedDraft(), rule(length=40)
    live = RecordedDraft(model, recording)
    guess = await live.guess("s", PROMPT, terms)
    made = await deepen(model, recording, live.said, 100)
    path = [*PROMPT, guess.token]
    for _ in range(DEPTH):
        found = recording.find(key_of(path, terms))
        assert found == await SimulatedDraft().guess("p", path, terms)
        assert found is not None
        path.append(found.token)
    assert key_of(path, terms) not in recording
    near = sum(1 for _, gap in guess.alternatives[:1] if gap < 2)
    assert made == DEPTH * (1 + near)
    assert await deepen(model, recording, live.said, 100) == 0, "all of it is known"


async def test_deepening_is_bounded_and_ends_with_the_answer() -> None:
    recording, model = Recording(), SimulatedDraft()
    live = RecordedDraft(model, recording)
    await live.guess("s", PROMPT, rule(length=3))
    assert await deepen(model, recording, live.said, 1) == 1
    last = Said((*PROMPT, 97, 98), rule(length=3), Guess(99, 0.5, ((100, 0.1),)))
    assert list(beyond(last)) == []
    assert await deepen(Refusing(), recording, live.said, 50) == 0, "an engine that fails ends it"


# --- the proof of one real run ---------------------------------------------------------------------------------------


def waved(*tokens: int, **drafting: int) -> Waved:
    chunks = ((10.0, 1), (10.0 + 5 * (len(tokens) - 1), len(tokens) - 1))
    one = run(*chunks, tokens=tokens)
    return Waved((one,), Drafting(**drafting))  # type: ignore[arg-type]


def test_the_check_tells_texts_guesses_and_pace_apart() -> None:
    live, again = [waved(1, 2, 3, guesses=9)], [waved(1, 2, 3, guesses=9, again=8, differing=1, gap=0.01)]
    shown = outcome(live, again, [waved(1, 2, 3, guesses=10, misses=0)])
    assert shown["identical_text"] is True
    assert (shown["guesses_again"], shown["differing"], shown["guesses_replayed"]) == (8, 1, 10)
    assert shown["itl_ms_live"] == shown["itl_ms_replayed"] == 5
    whole = {**shown, "pair": "toy", "pace_ms": {"1": 5.0, "4": 9.0}}
    assert verdict(whole).startswith("[green]")
    assert pace_of([whole], "toy") == Pace({1: 5.0, 4: 9.0})
    assert pace_of([whole], "other") is None
    assert not outcome(live, again, [waved(1, 2, 4)])["identical_text"]
    far = outcome(live, [waved(1, 2, 3, again=8, differing=1, gap=3)], [waved(1, 2, 3)])
    assert verdict({**far, "pair": "toy"}).startswith("[yellow]")


def test_the_gap_to_another_token_is_that_of_the_runner_up() -> None:
    guess = Guess(5, 0.9, ((6, 0.25), (7, 1.0)))
    assert [gap_to(token, guess) for token in (6, 7, 8)] == [0.25, 1.0, FAR]
