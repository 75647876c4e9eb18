"""Workers of vLLM as processes of their own, as a model that is spread over several devices has them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest
from engine_kit import assert_same, drafts_of, generate, plain, rule_for
from vllm_kit import core_of, model, vllm_kit

from paceline.errors import EngineError, FatalError
from services.verifier.engine_vllm import VllmTarget

STORY = "Once upon a time, in a small village by the sea, there lived a fisherman who had never caught a fish. "


def _threads(_worker: object) -> int:
    import torch

    return int(torch.get_num_threads())


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (3, 1), (1, 2)])
async def test_the_same_text_and_a_death_is_noticed(ranks: int, stages: int) -> None:
    """The model has nine heads, three of them with KV, and thirty layers."""
    kit = await vllm_kit()
    folder, _ = await asyncio.to_thread(model)
    options = {
        "distributed_executor_backend": "mp", "tensor_parallel_size": ranks, "pipeline_parallel_size": stages,
    }  # fmt: skip
    target = await VllmTarget.load(folder, context=512, cells=1024, max_sessions=4, threads=2, options=options)
    try:
        prompt = kit.encode(STORY)
        rule = rule_for(prompt, 0.8)
        assert core_of(target).engine.collective_rpc(_threads) == [2] * (ranks * stages)
        expected = await plain(target, "plain", prompt, rule, 12)
        assert_same(kit, expected, await plain(await kit.target(), "here", prompt, rule, 12))
        chains = drafts_of(expected.tokens, prompt, 5, lambda i: i % 4 == 3)
        assert_same(kit, await generate(target, "drafts", prompt, rule, 12, chains), expected)
        os.kill(core_of(target).engine.model_executor.workers[-1].proc.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while not core_of(target).dead and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        with pytest.raises(FatalError, match="worker process"):
            target.status()
    finally:
        await target.close()


def _break_first_stage(worker: Any) -> None:
    from vllm.distributed.parallel_state import get_pp_group

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    if get_pp_group().is_first_rank:
        worker.model_runner._model_forward = broken


async def test_a_stage_that_fails_is_heard_of_though_the_last_one_waits_for_it() -> None:
    kit = await vllm_kit()
    folder, _ = await asyncio.to_thread(model)
    options = {"distributed_executor_backend": "mp", "pipeline_parallel_size": 2}
    target = await VllmTarget.load(folder, context=512, cells=1024, max_sessions=4, options=options)
    try:
        prompt = kit.encode(STORY)
        core_of(target).engine.collective_rpc(_break_first_stage)
        with pytest.raises((EngineError, FatalError), match="worker process"):
            await asyncio.wait_for(plain(target, "plain", prompt, rule_for(prompt, 0.8), 4), 20)
        with pytest.raises(FatalError, match="worker process"):
            target.status()
    finally:
        await target.close()
