"""The verifier and the drafter as processes are, with the embedded pair on the memory bus."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from paceline import subjects
from paceline.bus import Received
from paceline.bus_memory import MemoryBus
from paceline.models import pull
from paceline.served_card import served_card
from paceline.service import Service
from paceline.settings import Settings
from paceline.store import SessionRecord
from paceline.store_memory import MemoryStore
from paceline.tokenizer import Tokenizer
from paceline.wire import (
    DraftBlock,
    History,
    HostedOpen,
    Sampling,
    SessionOpen,
    VerifyBatch,
    VerifyItem,
    VerifyResult,
    prefix_hash,
)
from services.drafter.drafter import body as drafter
from services.verifier.verifier import body as verifier

pytestmark = pytest.mark.models

GREEDY = Sampling(temperature=0)
NEAR_TIE = 0.5
"""Logits of one position differ by about 0.1 with the shape of the batch."""


def service(name: str, bus: MemoryBus, **values: object) -> Service:
    store = MemoryStore()
    settings = Settings.load(model="smollm2", instance=name, context_tokens=512, **values)
    pull("smollm2", settings.models_dir)
    return Service(name, settings, bus, store, store)


async def test_plain_and_verified_decoding_agree_on_the_real_model():
    bus = MemoryBus()
    process = service("v1", bus)
    prompt = Tokenizer(served_card(process.settings)).chat([{"role": "user", "content": "Why is the sky blue?"}])

    async def ask(tokens: Sequence[int], draft: Sequence[int] = (), start: int | None = None):
        item = VerifyItem(
            session="s",
            tenant="t",
            epoch=1,
            at=len(tokens),
            prompt_length=len(prompt),
            prefix_hash=prefix_hash(tokens),
            seed=1,
            sampling=GREEDY,
            history=None if start is None else History(start=start, tokens=tuple(tokens[start:])),
            tokens=tuple(draft),
        )
        batch = VerifyBatch(batch="b", items=(item,))
        answer = await bus.request(subjects.VERIFY.at(verifier="v1"), batch, timeout_s=60)
        assert isinstance(answer, VerifyResult)
        return answer.items[0]

    async with verifier(process):
        plain, margins = [(first := await ask(prompt, start=0)).token], list(first.margins)
        while len(plain) < 10:
            answer = await ask([*prompt, *plain])
            plain.append(answer.token)
            margins += answer.margins
        checked = await ask(prompt, draft=plain[:-1])
        assert checked.accepted == len(plain) - 1 or margins[checked.accepted] < NEAR_TIE
    await process.stop()
    await bus.close()


async def test_the_real_draft_model_drafts_for_a_session():
    bus = MemoryBus()
    process = service("d1", bus, draft_cells=1024)
    prompt = Tokenizer(served_card(process.settings)).chat([{"role": "user", "content": "Name a colour."}])
    came: asyncio.Queue[DraftBlock] = asyncio.Queue()

    async def on_block(received: Received) -> None:
        assert isinstance(received.message, DraftBlock)
        came.put_nowait(received.message)

    await bus.subscribe(subjects.DRAFT.at(model="smollm2", partition=5), on_block, DraftBlock)
    request = HostedOpen(
        session="h",
        model="smollm2",
        epoch=1,
        tokens=tuple(prompt),
        sampling=GREEDY,
        seed=1,
        prompt_length=len(prompt),
        partition=5,
    )
    opened = SessionOpen(model="smollm2", fingerprint="f", tokens=tuple(prompt), sampling=GREEDY)
    await process.sessions.create(
        SessionRecord(
            session="h", tenant="t", opened=opened, secret="x", seed=1, prompt_length=len(prompt), max_tokens=64,
            epoch=1, tokens=tuple(prompt),
        )
    )  # fmt: skip
    async with drafter(process):
        await bus.request(subjects.HOSTED_OPEN.at(model="smollm2"), request, timeout_s=5)
        block = await asyncio.wait_for(came.get(), 30)
        assert block.chains[0].at == len(prompt)
        assert all(confidence > 0 for confidence in block.chains[0].conf)
    await process.stop()
    await bus.close()
