"""Texts from verification against vLLM's own greedy decoding, without any of our hooks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_kit import Kit, drafts_of, generate, rule_for
from vllm_kit import model, vllm_kit

LENGTH = 24
BEGINNINGS = [
    f"{start} {topic}"
    for start in ("The most important thing about", "A short story about", "def", "Question: what is known of")
    for topic in ("the sea", "a red bicycle", "prime numbers", "bread", "the year 1969", "owls")
]


@pytest.fixture(scope="module")
def texts() -> Iterator[list[list[int]]]:
    """vLLM's own, one prompt after the other."""
    from vllm import LLM, SamplingParams

    folder, tokenizer = model()
    llm = LLM(
        str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=2048,
        kv_cache_memory_bytes=1 << 28, max_num_seqs=16,
    )  # fmt: skip
    wanted = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": tokenizer.encode(text, start=False)} for text in BEGINNINGS]
    yield [list(llm.generate([prompt], wanted, use_tqdm=False)[0].outputs[0].token_ids) for prompt in prompts]
    llm.llm_engine.engine_core.shutdown()


async def test_24_texts_are_vllms_own(texts: list[list[int]]) -> None:
    """Whatever the drafts: right, damaged, or none."""
    kit: Kit = await vllm_kit()
    target = await kit.target(cells=4096)
    differing = 0
    for number, (text, expected) in enumerate(zip(BEGINNINGS, texts, strict=True)):
        prompt = kit.encode(text)
        chains = drafts_of(expected, prompt, number % 9, lambda i, n=number: i % 5 == n % 5)
        found = await generate(target, f"s{number}", prompt, rule_for(prompt), LENGTH, chains)
        first = next((i for i, (a, b) in enumerate(zip(found.tokens, expected, strict=True)) if a != b), None)
        if first is not None:
            differing += 1
            assert min(found.margins[first : first + 1], default=0.0) < 0.01
    assert differing <= 1
    await kit.close()
