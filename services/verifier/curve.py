"""The step curve of this verifier: learned from every step, kept in a file from one run to the next.

Trouble with the file costs the memory of it and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import structlog

from paceline.engine import EngineStatus, TargetEngine, TargetItem
from paceline.model_card import write_whole
from paceline.settings import Settings, cache_dir
from paceline.step_curve import StepCurve
from paceline.wire import StepTable
from services.verifier.ladder import climb

log = structlog.get_logger("verifier")

SAVE_S = 30.0
MOST_BYTES = 1 << 20
"""Of the file: a curve takes some kilobytes."""


class LearnedCurve:
    """path: where it is kept; None: nowhere."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.curve = StepCurve()
        self._unsaved = False

    @property
    def known(self) -> bool:
        return self.curve.times() is not None

    def table(self) -> StepTable | None:
        times = self.curve.times()
        return None if times is None else times.table()

    def step_done(self, items: Sequence[TargetItem], tokens: int | None, ms: float) -> None:
        """`tokens`: as `fed_tokens` told before the step."""
        if tokens:
            self.curve.learn(tokens, sum(item.at for item in items), ms)
            self._unsaved = True

    async def prepare(self, engine: TargetEngine, vocabulary: int) -> None:
        """Load the file; without one, measure."""
        await asyncio.to_thread(self._load)
        if self.known:
            return
        await climb(engine, vocabulary, self.curve.learn)
        self._unsaved = True
        times = self.curve.times()
        log.info("step times measured", ms={} if times is None else dict(zip(times.tokens, times.ms, strict=True)))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            await self.save()

    async def save(self) -> None:
        if self._path is None or not self._unsaved:
            return
        self._unsaved = False
        try:
            await asyncio.to_thread(_write, self._path, json.dumps(self.curve.dump()).encode())
        except OSError as error:
            self._unsaved = True
            log.warning("step curve not saved", file=str(self._path), error=str(error))

    def _load(self) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("rb") as file:
                kept = json.loads(file.read(MOST_BYTES))
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            log.warning("step curve not read", file=str(self._path), error=str(error))
            return
        self.curve = StepCurve.load(kept)
        if not self.known:
            log.warning("what was kept is no step curve, it is measured anew", file=str(self._path))


def fed_tokens(items: Sequence[TargetItem]) -> int | None:
    """Tokens that a step over `items` is going to feed. None where it reads history: that takes less a token than to
    decide, and the engine may find some of it in the KV that it keeps."""
    if any(item.history for item in items):
        return None
    return sum(len(item.draft) + (item.rule is not None) for item in items)


def curve_file(settings: Settings, status: EngineStatus) -> Path:
    """One for each model, engine, number of threads and machine; of vLLM, for each set of its options."""
    name = re.sub(r"[^A-Za-z0-9_.\-]", "-", settings.model)
    options = json.dumps(settings.vllm_options, sort_keys=True) if status.engine == "vllm" else ""
    machine = _machine(status.device + options)
    return cache_dir() / "curves" / f"{name}-{status.engine}-{settings.threads}-{machine}.json"


def _machine(more: str) -> str:
    """A digest of what the processor calls itself, and of `more`."""
    text = f"{platform.machine()} {platform.processor()} {os.cpu_count()}{more}"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        text += next((line for line in lines if line.startswith("model name")), "")
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
