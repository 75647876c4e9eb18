"""What the hosted drafter's engine tells of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from paceline import telemetry
from paceline.engine import Guess, Rule
from paceline.errors import EngineError, NoRoom
from paceline.wire import Sampling
from services.drafter.metered import MeteredDraft

RULE = Rule(Sampling(), 1, 1)


class Timed:
    """Answers when `gate` opens, after `takes` seconds of the clock."""

    context, max_sessions, max_paths = 100, 3, 4

    def __init__(self) -> None:
        self.now, self.takes = 0.0, 0.02
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: EngineError | None = None
        self.released: list[str] = []

    async def guess(self, session: str, path: Sequence[int], rule: Rule) -> Guess:
        raise AssertionError("not asked for")

    async def guesses(self, session: str, paths: Sequence[Sequence[int]], rule: Rule) -> list[Guess | None]:
        await self.gate.wait()
        self.now += self.takes
        if self.error:
            raise self.error
        return [Guess(7, 0.5), *[None for _ in paths[1:]]]

    def release(self, session: str) -> None:
        self.released.append(session)

    async def close(self) -> None: ...


@pytest.fixture
def engine() -> Timed:
    return Timed()


@pytest.fixture
def draft(engine: Timed) -> MeteredDraft:
    return MeteredDraft(engine, telemetry.Metrics(), clock=lambda: engine.now)


async def test_draft_ms_is_of_one_more_token_of_one_path(engine: Timed, draft: MeteredDraft) -> None:
    engine.takes = 0.9
    await draft.guess("a", [1] * 10, RULE)
    assert draft.draft_ms == 0
    engine.takes = 0.02
    await draft.guess("a", [1] * 11, RULE)
    assert draft.draft_ms == pytest.approx(20)
    engine.takes = 0.03
    await draft.guess("a", [1] * 12, RULE)
    assert draft.draft_ms == pytest.approx(21)
    engine.takes = 0.5
    await draft.guess("a", [1] * 20, RULE)
    await draft.guesses("a", [[1] * 21, [1] * 22], RULE)
    draft.release("a")
    await draft.guess("a", [1] * 22, RULE)
    assert draft.draft_ms == pytest.approx(21)
    assert draft.drafted == 6
    assert engine.released == ["a"]


async def test_draft_ms_counts_no_waiting_for_others(engine: Timed, draft: MeteredDraft) -> None:
    for session in "ab":
        await draft.guess(session, [1] * 10, RULE)
    engine.gate.clear()
    calls = [asyncio.create_task(draft.guess(session, [1] * 11, RULE)) for session in "ab"]
    await asyncio.sleep(0)
    engine.gate.set()
    await asyncio.gather(*calls)
    assert draft.draft_ms == 0
    await draft.guess("a", [1] * 12, RULE)
    assert draft.draft_ms == pytest.approx(20)


async def test_trouble_is_what_the_last_call_said(engine: Timed, draft: MeteredDraft) -> None:
    engine.error = EngineError("the model is gone")
    with pytest.raises(EngineError):
        await draft.guess("a", [1], RULE)
    assert draft.trouble == "the model is gone"
    engine.error = None
    assert await draft.guesses("a", [[1], [2]], RULE) == [Guess(7, 0.5), None]
    assert draft.trouble == ""
    engine.error = NoRoom("full")
    with pytest.raises(NoRoom):
        await draft.guess("a", [1], RULE)
    assert draft.trouble == ""
    assert (draft.max_paths, draft.max_sessions, draft.context) == (4, 3, 100)
