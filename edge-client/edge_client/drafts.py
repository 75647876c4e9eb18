"""The draft model of this device: found, checked against the target's vocabulary, loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from paceline import models
from paceline.engine import DraftEngine
from paceline.errors import ModelError
from paceline.model_card import ModelCard, check_vocabularies
from paceline.settings import Settings

MOST_CELLS = 8192
"""KV of one draft model at most, in tokens; sessions beyond that go on without drafts from here."""


class NoDraftModel(ModelError):
    """Nothing here can draft for that target; the cloud answers all the same."""


class Stage(Protocol):
    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        """What is being done now, and how far that is."""
        ...


async def load_draft(card: ModelCard, settings: Settings, stage: Stage) -> DraftEngine:
    """For the target that `card` describes. Raises NoDraftModel: the draft model was not pulled (says how to), or its
    vocabulary differs in content (names the first differing id). Drafting happens in a thread of the engine's own."""
    if card.simulated:
        return _simulated(card, settings)
    try:
        pulled = await asyncio.to_thread(_fitting, card, settings)
        return await _llama(pulled.draft, card, settings, stage)
    except ModelError as error:
        raise NoDraftModel(str(error)) from error


def _fitting(card: ModelCard, settings: Settings) -> models.PulledPair:
    pulled = models.find(card.model, settings.models_dir, extra=settings.catalog_file)
    own = ModelCard.load(pulled.draft_card)
    if own.fingerprint != card.fingerprint:
        check_vocabularies(card, own)
    return pulled


async def _llama(path: Path, card: ModelCard, settings: Settings, stage: Stage) -> DraftEngine:
    from paceline.engine_llama import LlamaDraft

    loop, what = asyncio.get_running_loop(), f"loading the draft model {path.parent.name}/{path.name}"

    def progress(fraction: float) -> None:
        loop.call_soon_threadsafe(stage, what, round(100 * fraction), 100)

    stage(what)
    return await LlamaDraft.load(
        path,
        context=card.context,
        cells=min(card.context, MOST_CELLS),
        threads=settings.draft_threads,
        progress=progress,
        share_prefixes=True,
    )


def _simulated(card: ModelCard, settings: Settings) -> DraftEngine:
    from paceline.engine_simulated import SimulatedDraft, Simulation

    return SimulatedDraft.of(Simulation.load(settings.simulated_file), context=card.context)
