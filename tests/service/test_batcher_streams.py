"""The text is that of plain decoding, whoever drafts and however."""

from __future__ import annotations

import asyncio

import pytest
from batcher_kit import DEEP, PLAIN, Drafter, stack

from paceline.wire import Speculation


async def test_a_plain_stream() -> None:
    async with stack() as made:
        client = await made.client(speculation=PLAIN).open()
        assert await client.done() == client.expected()
        assert client.finish == "length"
        assert set(client.kinds) == {"f"}
        assert client.last is not None
        assert client.last.counters is not None
        assert client.last.counters.filled == 40


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "speculation", [Speculation(), DEEP, Speculation(depth=1, fill=False)], ids=["fill", "deep", "sync"]
)
@pytest.mark.parametrize("wrong", [0, 1, 3, 5], ids=["echo", "anti", "third", "fifth"])
async def test_drafts_change_nothing(temperature: float, speculation: Speculation, wrong: int) -> None:
    async with stack() as made:
        client = await made.client(speculation=speculation, temperature=temperature, max_tokens=24).open()
        Drafter(client, wrong=lambda index: bool(wrong) and index % wrong == 0).start()
        assert await client.done() == client.expected()
        assert client.repairs == 0


async def test_accepted_drafts_save_steps() -> None:
    async with stack() as made:
        client = await made.client(speculation=DEEP, max_tokens=40).open()
        Drafter(client, block=8, window=32).start()
        await client.done()
        assert client.last is not None
        counters = client.last.counters
        assert counters is not None
        assert counters.accepted["edge"] + counters.bonus + counters.filled == 40
        assert counters.steps <= 20


async def test_many_sessions_of_two_tenants_at_once() -> None:
    async with stack() as made:
        clients = [
            await made.client(prompt=tuple(f"number {n} says".encode()), tenant="TEN-AB"[: 5 + n % 2], seed=n).open()
            for n in range(8)
        ]
        for number, client in enumerate(clients):
            if number % 2:
                client.speculation = Speculation()
                Drafter(client).start()
        texts = await asyncio.gather(*(client.done() for client in clients))
        assert texts == [client.expected() for client in clients]


async def test_a_long_prompt_goes_in_by_chunks_and_delays_nobody() -> None:
    async with stack(chunk_tokens=64, engine={"step_ms": 1.0}) as made:
        short = await made.client(max_tokens=60).open()
        long = await made.client(prompt=tuple(b"0123456789" * 60), max_tokens=8).open()
        await long.grown(1)
        assert len(short.tokens) > 5, "the short one went on beside the chunks"
        assert await long.done() == long.expected()
        assert await short.done() == short.expected()


async def test_ends_are_cut_before_they_are_shown() -> None:
    """A stop string and max_tokens in one accepted block: what comes first in token order counts, the stop on a tie."""
    async with stack() as made:
        text = bytes(made.client().expected(12))
        stop = text[2:5].decode()
        client = await made.client(speculation=DEEP, stop=(stop,), max_tokens=8).open()
        Drafter(client, block=8, window=16).start()
        assert bytes(await client.done()) == text[:5]
        assert client.finish == "stop"
        late = await made.client(speculation=DEEP, stop=(text[5:8].decode(),), max_tokens=7).open()
        Drafter(late, block=8, window=16).start()
        assert len(await late.done()) == 7
        assert late.finish == "length"


async def test_logprobs_come_with_every_token() -> None:
    async with stack() as made:
        client = await made.client(speculation=DEEP, logprobs=2, max_tokens=10).open()
        Drafter(client).start()
        await client.done()
        entries = [entry for verdict in client.verdicts for entry in verdict.logprobs or ()]
        assert len(entries) == 10
        record = await made.store.load(client.session)
        assert record is not None
        assert list(record.logprobs) == entries
