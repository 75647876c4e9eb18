"""`python -m loadgen compare`: cloud-only, synchronous, deep and Paceline on one stack, interleaved in one run.

Every mode goes through the same services, link, prompts and seeds. Answers are held to a fixed length (end tokens are
barred until then), so that each mode does the same work. A mode's turn within a prompt rotates, so that none always
comes first and finds a colder cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loadgen import report
from loadgen.divergence import Split, first_difference
from loadgen.figures import draft_ms, figures, itl_ms
from loadgen.jobs import Job, Run
from loadgen.margins import margin_at
from loadgen.modes import CLOUD, DEEP, EDGE, PACELINE, SYNC_BLOCKS, Mode, sync
from loadgen.predict import Measured, predicted
from loadgen.prompts import EVERYDAY, PROMPTS
from loadgen.rig import Rig

PROBE_PROMPTS = 2
WARM_UP_TOKENS = 16
STEP_SIZES = (1, 4, 8)


@dataclass(frozen=True)
class Plan:
    """tokens: completion length of every run. blocks: lengths tried for the synchronous baseline. deep, edge: measure
    the deep window without filling, and the draft model alone. prompt_set: what the prompts are the first of."""

    rtts_ms: tuple[float, ...] = (0.0, 60.0, 100.0)
    temperatures: tuple[float, ...] = (0.0,)
    prompts: tuple[str, ...] = PROMPTS[:8]
    tokens: int = 96
    repeats: int = 3
    seed: int = 1
    blocks: tuple[int, ...] = SYNC_BLOCKS
    deep: bool = True
    edge: bool = True
    prompt_set: str = EVERYDAY.name

    @property
    def runs(self) -> int:
        """Completions in all, for the progress bar."""
        probes = len(self.blocks) * len(self.probe_prompts) if len(self.blocks) > 1 else 0
        a_cell = probes + len(self.modes(self.blocks[0])) * (1 + len(self.prompts) * self.repeats)
        return len(self.rtts_ms) * len(self.temperatures) * a_cell

    @property
    def probe_prompts(self) -> range:
        return range(min(PROBE_PROMPTS, len(self.prompts)))

    def modes(self, block: int) -> list[Mode]:
        """Every mode of a cell, the synchronous one with blocks of `block`."""
        return [CLOUD, sync(block), *([DEEP] if self.deep else []), PACELINE, *([EDGE] if self.edge else [])]

    def job(self, mode: Mode, prompt: int, temperature: float, *, tokens: int | None = None) -> Job:
        length = tokens or self.tokens
        return Job(
            prompt=self.prompts[prompt], max_tokens=length, min_tokens=length, temperature=temperature,
            seed=self.seed + prompt, speculation=mode.speculation, alone=mode.alone,
        )  # fmt: skip


@dataclass
class Cell:
    """Runs of one round trip and temperature: by mode, then repeat, then prompt."""

    rtt_ms: float
    temperature: float
    modes: list[Mode]
    block: int
    """Block length of the synchronous baseline."""
    probes: dict[int, float]
    """Milliseconds per token at each block length that was tried for it."""
    runs: dict[str, list[list[Run]]]


class Comparison:
    """Runs a Plan on a Rig. `tick` is called after every completion with a word about it."""

    def __init__(self, rig: Rig, plan: Plan, tick: Callable[[str], None]) -> None:
        self._rig, self._plan, self._tick = rig, plan, tick

    async def report(self) -> dict[str, Any]:
        started = time.time()
        cells, splits = list[dict[str, Any]](), list[dict[str, Any]]()
        for temperature in self._plan.temperatures:
            for rtt_ms in self._plan.rtts_ms:
                await self._rig.at_distance(rtt_ms)
                cell = await self._measure(rtt_ms, temperature)
                cells.append(await self._summary(cell))
                splits += await self._divergences(cell)
        return {
            **report.header(started), "simulated": self._rig.simulated,
            "prompts": len(self._plan.prompts), "prompt_set": self._plan.prompt_set,
            "identical_text": not splits, "divergences": splits, "cells": cells,
        }  # fmt: skip

    async def _measure(self, rtt_ms: float, temperature: float) -> Cell:
        block, probes = await self._best_block(temperature)
        modes = self._plan.modes(block)
        cell = Cell(rtt_ms, temperature, modes, block, probes, {mode.name: [] for mode in modes})
        for mode in modes:
            await self._run(mode, 0, temperature, tokens=WARM_UP_TOKENS)
        for repeat in range(self._plan.repeats):
            for name, runs in (await self._repeat(cell, repeat)).items():
                cell.runs[name].append(runs)
        return cell

    async def _repeat(self, cell: Cell, repeat: int) -> dict[str, list[Run]]:
        """Every mode on every prompt, once."""
        runs: dict[str, list[Run]] = {mode.name: [] for mode in cell.modes}
        for prompt in range(len(self._plan.prompts)):
            turn = (prompt + repeat) % len(cell.modes)
            for mode in cell.modes[turn:] + cell.modes[:turn]:
                runs[mode.name].append(await self._run(mode, prompt, cell.temperature))
        return runs

    async def _best_block(self, temperature: float) -> tuple[int, dict[int, float]]:
        """The synchronous baseline's best block length here, and what was measured for each."""
        if len(self._plan.blocks) == 1:
            return self._plan.blocks[0], {}
        probes = {
            block: itl_ms([await self._run(sync(block), prompt, temperature) for prompt in self._plan.probe_prompts])
            for block in self._plan.blocks
        }
        return min(probes, key=probes.__getitem__), probes

    async def _run(self, mode: Mode, prompt: int, temperature: float, *, tokens: int | None = None) -> Run:
        run = await self._rig.edge.run(self._plan.job(mode, prompt, temperature, tokens=tokens))
        self._tick(f"{mode.name}, prompt {prompt + 1}")
        return run

    async def _summary(self, cell: Cell) -> dict[str, Any]:
        system = await self._rig.system()
        steps = system.verifiers[0].step_ms if system.verifiers else {}
        modes = {mode.name: figures(cell.runs[mode.name]) for mode in cell.modes}
        modes["sync"]["g"] = cell.block
        hop_ms = system.batchers[0].overhead_ms_p50 if system.batchers else None
        return {
            "pair": self._rig.pair, "rtt_ms": cell.rtt_ms, "sessions": 1, "temperature": cell.temperature,
            "simulated": self._rig.simulated, "modes": modes, "predicted": self._predicted(cell, hop_ms),
            "sync_probes_ms": {str(block): value for block, value in cell.probes.items()},
            "draft_ms_per_token": draft_ms(run for repeat in cell.runs["paceline"] for run in repeat),
            "overhead_ms_p50": hop_ms,
            "step_ms": {str(size): steps.get(size) for size in STEP_SIZES},
        }  # fmt: skip

    def _predicted(self, cell: Cell, hop_ms: float | None) -> dict[str, float]:
        runs = {name: [run for repeat in repeats for run in repeat] for name, repeats in cell.runs.items()}
        return predicted(runs, Measured(cell.rtt_ms, hop_ms or 0.0, sync_block=cell.block))

    async def _divergences(self, cell: Cell) -> list[dict[str, Any]]:
        """Each run whose tokens differ from those of the cloud-only mode's first repeat."""
        found = []
        for mode in cell.modes:
            for repeat, runs in enumerate([] if mode.alone else cell.runs[mode.name]):
                for prompt, run in enumerate(runs):
                    split = first_difference(cell.runs["cloud"][0][prompt].tokens, run.tokens)
                    if split is not None:
                        place = {"pair": self._rig.pair, "rtt_ms": cell.rtt_ms, "temperature": cell.temperature}
                        where = {"mode": mode.name, "repeat": repeat, "prompt": prompt, "position": split.position}
                        near = await self._margin(split, prompt, cell.temperature)
                        found.append({**place, **where, "margin": near})
        return found

    async def _margin(self, split: Split, prompt: int, temperature: float) -> float | None:
        job = self._plan.job(CLOUD, prompt, temperature, tokens=split.position + 1)
        return await margin_at(self._rig.edge, job, split)
