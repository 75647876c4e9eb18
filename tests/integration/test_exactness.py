"""One text in all modes, on the real models through the whole stack; with verifiers on vLLM where that is installed.

A first difference is allowed only at a near tie: the two tokens' scores lie within TOLERANCE at that place. Measured on
SmolLM2 F16, the batch's shape moves logits by up to 0.03 (temperature 0.8: scores by up to 0.07).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from integration_kit import answer

from edge_client.api import GatewayApi
from edge_client.client import EdgeClient, Request
from edge_client.drafts import load_draft
from loadgen.divergence import Split, first_difference, margin
from loadgen.modes import CLOUD, DEEP, PACELINE, sync
from loadgen.prompts import PROMPTS
from loadgen.rig import VLLM_PYTHON
from paceline import models
from paceline.engine import Decided, Rule, TargetItem
from paceline.engine_llama import LlamaTarget
from paceline.served_card import served_card
from paceline.settings import Settings
from paceline.stack import LocalStack, StackOptions
from paceline.wire import Sampling

TOLERANCE = 0.15
TOKENS = 20
AT_ONCE = 4
EVERY = 49_152
MODES = (sync(6), DEEP, PACELINE)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["llama", pytest.param("vllm", marks=pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="make test-vllm"))],
)
async def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EdgeClient]:
    folder: Path = tmp_path_factory.mktemp("exactness")
    settings = Settings.load()
    card = served_card(settings)
    options = StackOptions(root=folder, counts={"drafter": 0})
    async with LocalStack(options.with_vllm(VLLM_PYTHON) if request.param == "vllm" else options) as stack:
        async with aiohttp.ClientSession() as http:
            system = await GatewayApi(http, stack.gateway_url, stack.key).system()
        assert {verifier.engine for verifier in system.verifiers} == {request.param}
        engine = await load_draft(card, settings, lambda *_: None)
        try:
            async with EdgeClient.connect(stack.gateway_url, stack.key, card=card, engine=engine) as made:
                yield made
        finally:
            await engine.close()


async def margin_at(request: Request, tokens: list[int], split: Split) -> float:
    """Score difference of the two tokens at the split, by the target alone (on llama.cpp): all logits, no batch."""
    settings = Settings.load()
    target = models.find("smollm2", settings.models_dir).target
    assert target is not None
    engine = await LlamaTarget.load(target, context=1024, cells=1024, threads=1, max_sessions=2)
    try:
        prefix = (*request.tokens, *tokens[: split.position])
        rule = Rule(request.sampling, request.seed or 0, len(request.tokens))
        item = TargetItem("s", "t", at=len(prefix), history=prefix, rule=rule, logprobs=EVERY)
        (outcome,) = await engine.step([item])
        assert isinstance(outcome, Decided), outcome
        known = dict(outcome.logprobs[0].top)
        difference = margin(split, known, request.sampling.temperature, request.seed or 0)
        assert difference is not None
        return difference
    finally:
        await engine.close()


async def in_turns(count: int, jobs) -> list:
    """Results of `jobs`, `count` of them at a time: sessions share batches."""
    gate = asyncio.Semaphore(count)

    async def one(job):
        async with gate:
            return await job

    return await asyncio.gather(*(one(job) for job in jobs))


@pytest.mark.models
@pytest.mark.timeout(900)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.asyncio(loop_scope="module")
async def test_all_modes_give_one_text(client: EdgeClient, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, end_ids=client.card.end_ids)
    requests = [
        Request(
            tokens=client.chat([{"role": "user", "content": prompt}]), sampling=sampling, max_tokens=TOKENS, seed=index,
            speculation=CLOUD.speculation,
        )
        for index, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    plain = await in_turns(AT_ONCE, [answer(client, request) for request in requests])
    assert all(one.finish == "stop" or len(one.tokens) == TOKENS for one in plain)
    margins = []
    for mode in MODES:
        jobs = [answer(client, replace(request, speculation=mode.speculation)) for request in requests]
        for index, got in enumerate(await in_turns(AT_ONCE, jobs)):
            split = first_difference(plain[index].tokens, got.tokens)
            if split is not None:
                found = await margin_at(requests[index], plain[index].tokens, split)
                assert found <= TOLERANCE, (mode.name, index, split)
                margins.append((mode.name, index, split.position, found))
    logging.getLogger(__name__).info("temperature %s: near ties that flipped: %s", temperature, margins)
