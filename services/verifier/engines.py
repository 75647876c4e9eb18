"""The target engine that a verifier's settings ask for."""

from __future__ import annotations

import asyncio

import structlog

from paceline.engine import TargetEngine
from paceline.engine_loading import TARGET_CONTEXTS, load_target, longest_session
from paceline.model_card import ModelCard
from paceline.settings import Settings

log = structlog.get_logger("verifier")


async def load_engine(settings: Settings, card: ModelCard) -> TargetEngine:
    """Seconds to minutes for a real model. Raises ModelError and SettingsError."""
    if settings.engine != "vllm":
        return await load_target(settings, card)
    from paceline.models import find
    from services.verifier.engine_vllm import VllmTarget
    from services.verifier.safetensors_files import safetensors_of

    context = longest_session(settings, card)
    gguf = find(settings.model, settings.models_dir, extra=settings.catalog_file).target
    folder = await asyncio.to_thread(safetensors_of, gguf, card, lambda line: log.info("loading model", step=line))
    log.info("loading model", step=f"vLLM reads {folder.parent.name}/{folder.name}")
    return await VllmTarget.load(
        folder,
        context=context,
        cells=settings.cells or TARGET_CONTEXTS * context,
        threads=settings.threads,
        max_sessions=settings.max_sessions,
        options=settings.vllm_options,
    )
