"""The engines that the settings of a service ask for, loaded."""

from __future__ import annotations

import time
from pathlib import Path

import structlog

from paceline.engine import DraftEngine, TargetEngine
from paceline.errors import SettingsError
from paceline.model_card import ModelCard
from paceline.settings import Settings

log = structlog.get_logger(__name__)

TARGET_CONTEXTS = 4
"""KV cells of a target by default: this many sessions of full length."""
DRAFT_CONTEXTS = 2
"""KV cells of a hosted draft by default. A session that finds none goes on without drafts, so memory comes first."""
PROGRESS_S = 2.0


async def load_target(settings: Settings, card: ModelCard) -> TargetEngine:
    """Seconds to minutes for a real model. Raises ModelError and SettingsError."""
    context = longest_session(settings, card)
    cells = settings.cells or TARGET_CONTEXTS * context
    if settings.engine == "simulated":
        from paceline.engine_simulated import SimulatedTarget, Simulation

        simulation = Simulation.load(settings.simulated_file)
        return SimulatedTarget.of(simulation, context=context, cells=cells, max_sessions=settings.max_sessions)
    from paceline.engine_llama import LlamaTarget
    from paceline.models import find

    path = find(settings.model, settings.models_dir, extra=settings.catalog_file).target
    return await LlamaTarget.load(
        path,
        context=context,
        cells=cells,
        threads=settings.threads,
        max_sessions=settings.max_sessions,
        progress=LoadProgress(path),
    )


async def load_draft(settings: Settings, card: ModelCard) -> DraftEngine:
    """For the target that `card` describes. Raises ModelError and SettingsError."""
    context = longest_session(settings, card)
    cells = settings.draft_cells or DRAFT_CONTEXTS * context
    if settings.engine == "simulated":
        from paceline.engine_simulated import SimulatedDraft, Simulation

        simulation = Simulation.load(settings.simulated_file)
        return SimulatedDraft.of(
            simulation,
            context=context,
            cells=cells,
            max_sessions=settings.max_sessions,
            chunk=settings.chunk_tokens,
        )
    from paceline.engine_llama import LlamaDraft
    from paceline.models import find

    path = find(settings.model, settings.models_dir, extra=settings.catalog_file).draft
    return await LlamaDraft.load(
        path,
        context=context,
        cells=cells,
        threads=settings.threads,
        max_sessions=settings.max_sessions,
        chunk=settings.chunk_tokens,
        progress=LoadProgress(path),
    )


def longest_session(settings: Settings, card: ModelCard) -> int:
    """Longest session in tokens. Raises SettingsError where the engine cannot serve the model."""
    if card.simulated != (settings.engine == "simulated"):
        raise SettingsError(
            f"PACELINE_ENGINE={settings.engine} cannot serve PACELINE_MODEL={settings.model}, which is "
            f"{'a simulated' if card.simulated else 'a real'} one"
        )
    return min(settings.context_tokens or card.context, card.context)


class LoadProgress:
    """Logs the load of a large file every few seconds. Called in the engine's thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = time.monotonic() + PROGRESS_S

    def __call__(self, fraction: float) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_S
            log.info("loading model", file=f"{self._path.parent.name}/{self._path.name}", percent=round(100 * fraction))
