"""Target and draft engines on llama.cpp: one worker thread owns the model, the event loop stays free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from paceline.engine_batch import BatchEngine
from paceline.engine_ports import BatchedDraft, BatchedTarget
from paceline.errors import ModelError
from paceline.forward_pass import Row, forward
from paceline.kv_ledger import Ledgers
from paceline.llama_context import LlamaContext, LlamaModel, most_sequences
from paceline.thread_runner import ThreadRunner

_TARGET_OUTPUTS = 128
"""Room for two chains of the longest kind in one pass; llama.cpp sets memory aside for each."""

Progress = Callable[[float], None]
"""Called in the worker thread with the loaded fraction of the model file, 0 to 1."""


class _LoadedContext(LlamaContext):
    """A context that closes its model with it."""

    def __init__(self, model: LlamaModel, *, cells: int, sequences: int, threads: int, outputs: int) -> None:
        self._model = model
        super().__init__(model, cells=cells, sequences=sequences, threads=threads, outputs=outputs)

    def close(self) -> None:
        super().close()
        self._model.close()


@dataclass(frozen=True)
class _Plan:
    """What to load, and room for how much. sequences: ledgers at a time. outputs: rows of one pass that may want
    logits. retained: see Ledgers."""

    path: Path
    context: int | None
    cells: int
    threads: int
    sequences: int
    outputs: int
    progress: Progress | None
    retained: int | None = None

    def load(self) -> tuple[_LoadedContext, int]:
        """The memory, and the context length that the model was trained for; in the worker thread."""
        model = LlamaModel(self.path, progress=self.progress)
        try:
            if not model.rewinds:
                raise ModelError(f"{self.path}: the state of this model cannot be rewound, which speculation needs")
            memory = _LoadedContext(
                model, cells=self.cells, sequences=self.sequences, threads=self.threads, outputs=self.outputs
            )
        except ModelError:
            model.close()
            raise
        memory.decode([Row(0, 0, 0, False)])  # reads the weights once, so that the first session does not wait for it
        memory.remove(0, 0)
        return memory, model.context

    async def engine(self, *, merge: bool) -> BatchEngine:
        runner = ThreadRunner(f"llama-{self.path.stem}")
        try:
            memory, trained = await runner.run(self.load, 0)
        except BaseException:
            await runner.close()
            raise
        context = min(self.context or trained, trained, self.cells)
        ledgers = Ledgers(self.cells, self.sequences, retained=self.retained)
        return BatchEngine(
            name="llama",
            memory=memory,
            forward=partial(forward, memory),
            ledgers=ledgers,
            runner=runner,
            context=context,
            merge=merge,
        )


class LlamaTarget(BatchedTarget):
    """The large model."""

    @classmethod
    async def load(
        cls,
        path: Path,
        *,
        context: int | None = None,
        cells: int = 8192,
        threads: int = 1,
        max_sessions: int = 32,
        progress: Progress | None = None,
    ) -> Self:
        """context: longest session in tokens (None, or more than the model was trained for: that). cells: KV cells
        that all sessions share. Raises ModelError."""
        plan = _Plan(path, context, cells, threads, max_sessions, _TARGET_OUTPUTS, progress)
        return cls(await plan.engine(merge=False))


class LlamaDraft(BatchedDraft):
    """The small model."""

    @classmethod
    async def load(
        cls,
        path: Path,
        *,
        context: int | None = None,
        cells: int = 4096,
        threads: int = 1,
        max_sessions: int = 8,
        progress: Progress | None = None,
        chunk: int = 256,
        share_prefixes: bool = False,
    ) -> Self:
        """As LlamaTarget.load. chunk, share_prefixes: see BatchedDraft; an edge with one user wants to share."""
        retained = None if share_prefixes else 0
        sequences = max(max_sessions, min(max_sessions * cls.max_paths, most_sequences()))
        plan = _Plan(path, context, cells, threads, sequences, sequences, progress, retained)
        engine = await plan.engine(merge=True)
        return cls(engine, sessions=max_sessions, chunk=chunk, share_prefixes=share_prefixes)
