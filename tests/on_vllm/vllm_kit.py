"""The vLLM engine behind the face of the contract tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine_kit import Kit

from paceline.engine_ports import BatchedTarget
from paceline.model_card import ModelCard
from paceline.settings import cache_dir
from paceline.tokenizer import Tokenizer
from services.verifier import vllm_core
from services.verifier.coupling_torch import Ask, Chosen
from services.verifier.engine_vllm import VllmTarget
from services.verifier.safetensors_files import safetensors_of


@cache
def model() -> tuple[Path, Tokenizer]:
    """SmolLM2 for vLLM, and its tokenizer; `make models` has fetched the GGUF file."""
    folder = Path(os.environ.get("PACELINE_MODELS_DIR") or cache_dir() / "models") / "smollm2"
    card = ModelCard.load(folder / "card.json")
    return safetensors_of(folder / "target.gguf", card), Tokenizer(card)


def core_of(target: BatchedTarget) -> vllm_core.Core:
    assert isinstance(target, VllmTarget)
    return target.core


class VllmFaults:
    def no_choice(self, patch: pytest.MonkeyPatch, target: BatchedTarget, rows: int) -> None:
        def choose_rows(logits: Any, asks: Sequence[Ask]) -> list[Chosen]:
            spoilt = logits.clone()
            spoilt[: asks[0].rows] = float("nan")
            return real(spoilt, asks)

        real = vllm_core.choose_rows
        patch.setattr(vllm_core, "choose_rows", choose_rows)

    def failing_pass(self, patch: pytest.MonkeyPatch, target: BatchedTarget, poison: int) -> None:
        def execute_model(output: Any, **options: Any) -> Any:
            future = real(output, **options)
            if any(poison in draft for draft in output.scheduled_spec_decode_tokens.values()):
                raise RuntimeError("made to fail")
            return future

        executor = core_of(target).engine.model_executor
        real = executor.execute_model
        patch.setattr(executor, "execute_model", execute_model)

    def broken(self, patch: pytest.MonkeyPatch, target: BatchedTarget) -> None:
        patch.setattr(vllm_core, "choose_rows", lambda _logits, _asks: 1 // 0)


async def vllm_kit() -> Kit:
    folder, tokenizer = await asyncio.to_thread(model)

    async def target(**room: int) -> VllmTarget:
        return await VllmTarget.load(folder, **{"context": 2048, "cells": 2048, "max_sessions": 16, **room})

    async def draft(**_: int) -> Any:
        raise NotImplementedError("vLLM is no draft engine")

    return Kit(False, target, draft, lambda text: tokenizer.encode(text, start=False), VllmFaults())
