"""What the verifier relies on in vLLM: these tests notice when an upgrade moves it."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import Kit, assert_failed, assert_same, feed, generate, one, plain, rule_for
from vllm_kit import core_of, model, vllm_kit

from paceline.coupling import choose
from paceline.engine import Decided, Fed, Rule, TargetItem
from paceline.engine_ports import BatchedTarget
from paceline.errors import FatalError, ModelError
from paceline.wire import Sampling
from services.verifier import vllm_core
from services.verifier.coupling_torch import Ask, Chosen
from services.verifier.engine_vllm import LEAST_CONTEXT, VllmTarget

STORY = "Once upon a time, in a small village by the sea, there lived a fisherman who had never caught a fish. "
NAMES = ["Paris", "Rome", "Oslo", "Bern"]


@pytest.fixture
async def kit() -> AsyncIterator[Kit]:
    kit = await vllm_kit()
    yield kit
    await kit.close()


@dataclass
class Passes:
    """The rows of each forward pass, by session; requests are known by the order in which they were opened."""

    rows: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, target: BatchedTarget, patch: pytest.MonkeyPatch) -> Passes:
        passes = cls()
        runner = core_of(target).engine.model_executor.driver_worker.worker.model_runner
        real = runner._model_forward

        def forward(*args: Any, **options: Any) -> Any:
            count = runner.input_batch.num_reqs
            passes.rows.append(np.diff(runner.query_start_loc.np[: count + 1]).tolist())
            return real(*args, **options)

        patch.setattr(runner, "_model_forward", forward)
        return passes


def tokens_of(outcomes: Sequence[object]) -> list[int]:
    assert all(isinstance(outcome, Decided) for outcome in outcomes), outcomes
    return [outcome.token for outcome in outcomes if isinstance(outcome, Decided)]


async def test_blocks_of_many_sessions_are_one_pass(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    target = await kit.target()
    prompts = [kit.encode(f"{name} is the capital of") for name in NAMES]
    texts = [await plain(target, f"alone{i}", p, rule_for(p), 9) for i, p in enumerate(prompts)]
    for i, prompt in enumerate(prompts):
        await feed(target, f"s{i}", prompt, tenant=f"t{i}")
    passes = Passes.of(target, monkeypatch)
    items = [
        TargetItem(f"s{i}", f"t{i}", len(p), draft=tuple(text.tokens[:8]), rule=rule_for(p))
        for i, (p, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    outcomes = await target.step(items)
    assert passes.rows == [[9, 9, 9, 9]]
    for outcome, text in zip(outcomes, texts, strict=True):
        assert isinstance(outcome, Decided)
        assert outcome.accepted == 8 or text.margins[outcome.accepted] < 0.15


async def test_a_session_without_work_is_neither_run_nor_dropped(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    target = await kit.target()
    prompt = kit.encode(STORY)
    rule = rule_for(prompt)
    expected = await plain(target, "expected", prompt, rule, 12, tenant="other")
    idle = await plain(target, "idle", prompt, rule, 6)
    other = kit.encode("An entirely different beginning")
    passes = Passes.of(target, monkeypatch)
    await plain(target, "busy", other, rule_for(other), 8)
    assert passes.rows == [[len(other)], *[[1]] * 8]
    del passes.rows[:]
    committed = [*prompt, *idle.tokens]
    found = idle
    for _ in range(6):
        outcome = await one(target, TargetItem("idle", "t", len(committed), rule=rule))
        committed += tokens_of([outcome])
        found.tokens += tokens_of([outcome])
    assert passes.rows == [[1]] * 6
    assert_same(kit, found, expected)
    scheduler = core_of(target).scheduler
    assert scheduler.get_request_counts() == (0, 0)
    assert not scheduler.has_requests()


async def test_an_engine_without_work_makes_no_pass(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    target = await kit.target()
    prompt = kit.encode(STORY)
    await feed(target, "a", prompt)
    passes = Passes.of(target, monkeypatch)
    await asyncio.sleep(0.2)
    assert await one(target, TargetItem("a", "t", len(prompt), 0, tuple(prompt))) == Fed("a", len(prompt))
    assert passes.rows == []


async def test_a_prompt_goes_in_by_chunks_beside_the_others(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    target = await kit.target()
    prompt, late = kit.encode(STORY), kit.encode(STORY * 2)[:40]
    rule = rule_for(prompt)
    expected = await plain(target, "expected", prompt, rule, 5, tenant="x")
    other = await plain(target, "other", late, rule_for(late), 4, tenant="x")
    await feed(target, "a", prompt)
    committed = list(prompt)
    passes = Passes.of(target, monkeypatch)
    for start in range(0, 40, 10):
        item = TargetItem("a", "t", len(committed), rule=rule)
        decided, fed = await target.step([item, TargetItem("late", "u", 40, start, tuple(late[start : start + 10]))])
        assert fed == Fed("late", start + 10)
        committed += tokens_of([decided])
    assert [sorted(rows) for rows in passes.rows] == [[1, 10]] * 4
    assert committed[len(prompt) :] == expected.tokens[:4]
    assert_same(kit, await plain(target, "late", late, rule_for(late), 4, tenant="u"), other)


async def test_after_a_rejection_only_what_is_new_is_fed(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    target = await kit.target()
    prompt = kit.encode(STORY)
    rule = rule_for(prompt)
    expected = await plain(target, "expected", prompt, rule, 24, tenant="other")
    await feed(target, "a", prompt)
    passes = Passes.of(target, monkeypatch)

    def chains(committed: list[int]) -> list[int]:
        start = len(committed) - len(prompt)
        draft = list(expected.tokens[start : start + 6])
        return [*draft[:2], *(token + 1 for token in draft[2:])]

    found = await generate(target, "b", prompt, rule, 24, chains, tenant="b")
    assert_same(kit, found, expected)
    assert passes.rows[0] == [len(prompt)]
    assert all(rows[0] <= 7 for rows in passes.rows[1:])
    assert found.steps <= 24 // 3 + 1


@pytest.mark.parametrize("length", [8, 31, 32, 33, 64, 70])
async def test_any_rewind_gives_the_same_text(kit: Kit, length: int) -> None:
    """To before, onto and behind the borders of KV blocks; the blocks before stay those of another session."""
    target = await kit.target()
    prompt = kit.encode(STORY * 4)[:80]
    branch = [*prompt[:length], *kit.encode(" and then, suddenly, an entirely different thing happened to")]
    rule = rule_for(branch)
    expected = await plain(target, "expected", branch, rule, 6, tenant="other")
    kept = await plain(target, "kept", prompt, rule_for(prompt), 6)
    await feed(target, "a", prompt)
    await feed(target, "a", branch)
    assert_same(kit, await plain(target, "a", branch, rule, 6), expected)
    again = await plain(target, "kept", prompt, rule_for(prompt), 6)
    assert again.tokens == kept.tokens
    target.trim("a", length)
    assert_same(kit, await plain(target, "a", prompt, rule_for(prompt), 6), kept)


async def test_blocks_are_given_back(kit: Kit) -> None:
    target = await kit.target(cells=256, max_sessions=4)
    target.engine.ledgers.grace_s = 0
    pool = core_of(target).scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    prompt = kit.encode(STORY * 4)[:70]
    for i in range(12):
        await plain(target, f"s{i}", [*prompt[i:]], rule_for(prompt), 10, tenant=f"t{i % 3}")
    for i in range(12):
        target.release(f"s{i}")
        target.trim(f"s{i}", 0)
    await feed(target, "last", [5])
    assert pool.get_num_free_blocks() >= free - 1


async def test_prefixes_of_another_tenant_are_not_found(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    target = await kit.target()
    prompt = kit.encode(STORY * 4)[:70]
    await feed(target, "a", prompt, tenant="red")
    passes = Passes.of(target, monkeypatch)
    await feed(target, "b", prompt, tenant="blue")
    await feed(target, "c", [*prompt, 5], tenant="red")
    assert passes.rows == [[70], [71 - 64]]


async def test_the_choice_is_the_rule_on_vllms_own_logits(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    target = await kit.target()
    prompt = kit.encode(STORY)
    seen: list[tuple[np.ndarray, Sequence[Ask]]] = []
    real = vllm_core.choose_rows

    def choose_rows(logits: torch.Tensor, asks: Sequence[Ask]) -> list[Chosen]:
        seen.append((logits.numpy().copy(), asks))
        return real(logits, asks)

    monkeypatch.setattr(vllm_core, "choose_rows", choose_rows)
    kinds = [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9, "top_k": 40}, {"repetition_penalty": 1.3}]
    rules = [
        Rule(Sampling(**{"temperature": 0.0, **kind}), seed=5 + i, prompt_length=len(prompt))
        for i, kind in enumerate(kinds)
    ]
    draft = tuple(kit.encode(" He had a boat"))
    items = [TargetItem(f"s{i}", "t", len(prompt), 0, tuple(prompt), draft, rule) for i, rule in enumerate(rules)]
    outcomes = await target.step(items)
    ((logits, asks),) = seen
    row = 0
    found = {}
    for ask in asks:
        path = [*prompt, *draft]
        accepted = 0
        while True:
            choice = choose(logits[row + accepted], ask.rule, path[: len(prompt) + accepted])
            if accepted == len(draft) or choice.token != draft[accepted]:
                break
            accepted += 1
        found[ask.rule.seed] = (accepted, choice.token)
        row += ask.rows
    assert [(o.accepted, o.token) for o in outcomes if isinstance(o, Decided)] == [
        found[5 + i] for i in range(len(rules))
    ]


async def test_choices_are_samples_of_the_filtered_distribution(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token after one prompt, for many seeds, against its probability: Pearson's test at 5 sigma."""
    target = await kit.target()
    prompt = tuple(kit.encode("Once upon a time, there was a"))
    sampling = Sampling(temperature=0.9, top_k=8)
    for i in range(16):
        await feed(target, f"s{i}", prompt)
    logits: list[np.ndarray] = []
    real = vllm_core.choose_rows
    monkeypatch.setattr(
        vllm_core, "choose_rows", lambda values, asks: logits.append(values[0].numpy().copy()) or real(values, asks)
    )
    counts: Counter[int] = Counter()
    for turn in range(50):
        items = [
            TargetItem(f"s{i}", "t", len(prompt), rule=Rule(sampling, 1000 * turn + i, len(prompt))) for i in range(16)
        ]
        counts.update(tokens_of(await target.step(items)))
    best = np.argsort(-logits[0])[:8]
    weights = np.exp((logits[0][best] - logits[0][best[0]]).astype(np.float64) / 0.9)
    expected = 800 * weights / weights.sum()
    assert set(counts) <= set(best.tolist())
    excess = sum((counts[int(t)] - e) ** 2 / e for t, e in zip(best, expected, strict=True))
    assert excess < 7 + 5 * math.sqrt(2 * 7)


async def test_sleep_and_wake(kit: Kit) -> None:
    """On a CPU vLLM keeps the weights where they are; what it forgets and what is checked is the same."""
    target = await kit.target()
    assert isinstance(target, VllmTarget)
    prompt = kit.encode(STORY)
    rule = rule_for(prompt)
    expected = await plain(target, "expected", prompt, rule, 8, tenant="other")
    found = await plain(target, "a", prompt, rule, 4)
    await target.sleep()
    await target.wake()
    committed = [*prompt, *found.tokens]
    assert_failed(await one(target, TargetItem("a", "t", len(committed), rule=rule)), "need_history")
    await feed(target, "a", committed)
    for _ in range(4):
        found.tokens += tokens_of([await one(target, TargetItem("a", "t", len(committed), rule=rule))])
        committed.append(found.tokens[-1])
    assert_same(kit, found, expected)
    model = core_of(target).engine.model_executor.driver_worker.worker.model_runner.model
    await target.sleep()
    with torch.no_grad():
        next(model.parameters()).mul_(-1)
    with pytest.raises(FatalError, match="another model"):
        await target.wake()


async def test_blocks_that_run_out_are_taken_from_who_is_idle(kit: Kit) -> None:
    """Rejected drafts leave blocks with a session that its ledger does not count."""
    target = await kit.target(cells=256, max_sessions=8)
    prompts = [kit.encode(f"{i} {STORY}")[:25] for i in range(8)]
    wrong = tuple([7] * 60)
    for turn in range(3):
        for i, prompt in enumerate(prompts):
            rule = rule_for(prompt)
            item = TargetItem(f"s{i}", f"t{i}", len(prompt), 0, tuple(prompt), wrong[: 20 + 20 * turn], rule)
            assert isinstance(await one(target, item), Decided)


async def test_a_block_that_others_may_find_is_never_changed(kit: Kit) -> None:
    """Its last token is another one than when it was hashed."""
    target = await kit.target()
    prompt = kit.encode(STORY * 2)[:32]
    longer = [*prompt, *kit.encode(" and so")]
    rule = rule_for(longer)
    expected = await plain(target, "expected", longer, rule, 6, tenant="other")
    await feed(target, "a", prompt)
    other = (prompt[-1] + 1,)
    assert await one(target, TargetItem("a", "t", 32, 31, other)) == Fed("a", 32)
    assert_same(kit, await plain(target, "b", longer, rule, 6), expected)


async def test_a_chain_that_is_too_long_is_refused_and_the_others_are_served(kit: Kit) -> None:
    target = await kit.target()
    prompt = kit.encode(STORY)
    await feed(target, "a", prompt)
    await feed(target, "b", prompt)
    item = TargetItem("a", "t", len(prompt), draft=(7,) * 64, rule=rule_for(prompt))
    long, fits = await target.step([replace(item, session="b", draft=(7,) * 65), item])
    assert_failed(long, "step_failed")
    assert isinstance(fits, Decided)


async def test_kv_that_vllm_gave_up_is_asked_for_and_not_fed_at_once(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would wait for it as long as a whole context takes."""
    target = await kit.target()
    prompt = kit.encode(STORY)
    rule = rule_for(prompt)
    for session in ("a", "b"):
        await feed(target, session, prompt)
    with monkeypatch.context() as patch:
        kit.faults.failing_pass(patch, target, 3)
        assert_failed(await one(target, TargetItem("a", "t", len(prompt), draft=(3,), rule=rule)), "step_failed")
    passes = Passes.of(target, monkeypatch)
    assert_failed(await one(target, TargetItem("b", "t", len(prompt), rule=rule)), "need_history")
    assert passes.rows == []


async def test_a_device_that_fails_every_step_is_dead(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    target = await kit.target()
    prompt = kit.encode(STORY)
    await feed(target, "a", prompt)

    def execute_model(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(core_of(target).engine.model_executor, "execute_model", execute_model)
    with pytest.raises(FatalError, match="illegal memory access"):
        await one(target, TargetItem("a", "t", len(prompt), rule=rule_for(prompt)))
    with pytest.raises(FatalError, match="illegal memory access"):
        target.status()


@pytest.mark.parametrize(
    ("fault", "named"),
    [(TimeoutError("RPC call to execute_model"), "does not answer"), (RuntimeError("rank 0 is ill"), "rank 0 is ill")],
)
async def test_a_worker_that_does_not_answer_is_asked_nothing_more(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, fault: Exception, named: str
) -> None:
    """As where one of several devices fails, and another one waits for it for ever."""
    target = await kit.target()
    prompt = kit.encode(STORY)
    await feed(target, "a", prompt)
    asked: list[str] = []

    def step() -> Any:
        asked.append("step")
        raise fault

    def silent(method: Any, timeout: float | None = None, **_: Any) -> Any:
        asked.append(str(method))
        assert timeout is not None, "it would wait for ever"
        raise TimeoutError(f"RPC call to {method}")

    monkeypatch.setattr(core_of(target).engine, "step", step)
    monkeypatch.setattr(core_of(target).engine, "collective_rpc", silent)
    for _ in range(2):
        with pytest.raises(FatalError, match=named):
            await one(target, TargetItem("a", "t", len(prompt), rule=rule_for(prompt)))
    assert asked == (["step"] if isinstance(fault, TimeoutError) else ["step", "forget_step"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_paralel_size": 2}, "tensor_paralel_size"),
        ({"scheduler_cls": "x", "max_num_seqs": 3}, "max_num_seqs, scheduler_cls"),
        ({"max_num_batched_tokens": 64, "max_model_len": 64}, "max_num_batched_tokens is 64"),
        ({"dtype": "float17"}, "float17"),
        ({"tokenizer": "/elsewhere"}, "tokenizer"),
        ({"block_size": "abc"}, "block_size is 'abc'"),
        ({"block_size": None}, "block_size is None"),
        ({"block_size": 0}, "block_size is 0"),
    ],
)
async def test_options_that_cannot_be_are_named(options: dict[str, Any], named: str) -> None:
    folder, _ = await asyncio.to_thread(model)
    with pytest.raises(ModelError, match=named):
        await VllmTarget.load(folder, context=512, cells=1024, max_sessions=4, options=options)


async def test_secrets_among_the_options_stay_out_of_errors() -> None:
    folder, _ = await asyncio.to_thread(model)
    options = {"hf_token": "hf_mine", "dtype": "float17", "long_prefill_token_threshold": 77}
    with pytest.raises(ModelError, match="float17") as caught:
        await VllmTarget.load(folder, context=512, max_sessions=4, options=options)
    assert "hf_mine" not in str(caught.value)
    assert "'long_prefill_token_threshold': 77" in str(caught.value)


async def test_without_room_for_one_session_the_option_is_named() -> None:
    folder, _ = await asyncio.to_thread(model)
    with pytest.raises(ModelError, match=r"kv_cache_memory_bytes.: 1000"):
        await VllmTarget.load(folder, context=512, max_sessions=4, options={"kv_cache_memory_bytes": 1000})


async def test_the_shortest_context() -> None:
    folder, _ = await asyncio.to_thread(model)
    with pytest.raises(ModelError, match=f"{LEAST_CONTEXT - 1} tokens at most"):
        await VllmTarget.load(folder, context=LEAST_CONTEXT - 1)
    target = await VllmTarget.load(folder, context=LEAST_CONTEXT, max_sessions=2)
    assert target.status().context == LEAST_CONTEXT
    await target.sleep()
    await target.wake()
    await target.close()


async def test_an_option_for_a_shorter_context_is_what_sessions_are_told() -> None:
    folder, _ = await asyncio.to_thread(model)
    target = await VllmTarget.load(folder, context=2048, cells=1024, max_sessions=4, options={"max_model_len": 256})
    assert target.status().context == 256
    await target.close()
