"""Prefill in a draft engine: by chunks, one session's at a time, given up with its caller, and room by the settings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from engine_kit import rule_for

from paceline.engine import Guess
from paceline.engine_loading import load_draft
from paceline.engine_ports import BatchedDraft
from paceline.engine_simulated import SimulatedDraft, Timing, toy_card
from paceline.errors import NoRoom
from paceline.forward_pass import Row
from paceline.settings import Settings

CHUNK = 16
RULE = rule_for([1])


def passes_of(draft: BatchedDraft) -> list[int]:
    """Will hold the rows of each pass."""
    sizes: list[int] = []
    decode = draft.engine.memory.decode

    def counted(rows: Sequence[Row]) -> None:
        sizes.append(len(rows))
        decode(rows)

    draft.engine.memory.decode = counted  # type: ignore[method-assign]
    return sizes


def path_of(length: int, first: int = 1) -> list[int]:
    return [first, *(97 + i % 20 for i in range(length - 1))]


async def until_fed(draft: BatchedDraft, session: str) -> None:
    async with asyncio.timeout(2):
        while not draft.engine.ledgers.held(session):
            await asyncio.sleep(0.001)


async def test_a_cancelled_guess_stops_at_the_next_chunk_and_leaves_no_kv() -> None:
    draft = SimulatedDraft(timing=Timing(base_ms=20), chunk=CHUNK)
    sizes = passes_of(draft)
    task = asyncio.create_task(draft.guess("a", path_of(40 * CHUNK), RULE))
    await until_fed(draft, "a")
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    draft.release("a")
    await draft.guess("b", path_of(3), RULE)
    assert sum(sizes) <= 2 * CHUNK + 3
    assert draft.engine.ledgers.held("a") == ()
    assert draft.status().cells_used == 3
    await draft.close()


async def test_one_prefill_at_a_time_rides_with_the_short_guesses_of_others() -> None:
    draft = SimulatedDraft(chunk=CHUNK)
    sizes = passes_of(draft)
    long = [draft.guess(f"long{i}", path_of(5 * CHUNK + 3, i), RULE) for i in range(4)]
    short = [draft.guess(f"short{i}", path_of(4, i), RULE) for i in range(3)]
    guesses = await asyncio.gather(*long, *short)
    assert all(isinstance(guess, Guess) for guess in guesses)
    assert sum(sizes) == 4 * (5 * CHUNK + 3) + 3 * 4
    assert max(sizes) <= CHUNK + 4 * 3 + 3 * 4
    await draft.close()


async def test_a_session_that_loses_its_kv_during_its_prefill_is_told_and_holds_up_nobody() -> None:
    draft = SimulatedDraft(timing=Timing(base_ms=5), chunk=CHUNK)
    sizes = passes_of(draft)
    task = asyncio.create_task(draft.guess("a", path_of(40 * CHUNK), RULE))
    while len(draft.engine.ledgers.held("a")) < 4 * CHUNK:
        await asyncio.sleep(0.001)
    draft.release("a")
    with pytest.raises(NoRoom, match="went to others"):
        await task
    assert max(sizes) == CHUNK
    await draft.close()


async def test_a_hosted_draft_has_the_room_and_the_chunks_of_its_settings() -> None:
    values = {"engine": "simulated", "model": "toy", "context_tokens": 100, "chunk_tokens": 20}
    draft = await load_draft(Settings.of(**values, max_sessions=3), toy_card())
    assert isinstance(draft, BatchedDraft)
    assert draft.max_sessions == 3
    assert draft.status().cells_total == 200
    sizes = passes_of(draft)
    await draft.guess("a", path_of(90), RULE)
    assert sizes == [20, 20, 20, 20, 10]
    await draft.close()
    larger = await load_draft(Settings.of(**values, draft_cells=320), toy_card())
    assert isinstance(larger, BatchedDraft)
    assert larger.status().cells_total == 320
    await larger.close()
