"""`python -m loadgen grid`: every mode in every cell of (round trip x sessions x temperature), and its baselines.

All modes go through one stack, over one link, with the same prompts and seeds, and are interleaved within a repeat in a
rotating order. With one session the edge drafts live; with more, each session replays recorded drafts at the pace of a
device of its own (loadgen.recording), since one core could not draft for them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen import report
from loadgen.divergence import Split, first_difference
from loadgen.grid_figures import CellRuns, ModeRuns, Surroundings, probe_ms
from loadgen.grid_plan import BLOCKS, PROBE_TOKENS, WARM_UP_TOKENS, Place, Terms
from loadgen.jobs import Job, Run, Wave, Waved
from loadgen.margins import margin_at
from loadgen.modes import CLOUD, Mode, colocated, sync
from loadgen.pace import Pace
from loadgen.predict import step_curve
from loadgen.prompts import EVERYDAY, PromptSet
from loadgen.rig import Rig

MOST_MISSES = 0.01
"""Share of a replayed wave's guesses that may be missing from the recording."""
TRIES = 3
"""Of a wave with more; the last one counts, and the report tells its misses."""
STATUS_S = 1.2
"""The services tell of themselves once a second."""
FIRST_BLOCKS = {"sync": 4, "colocated": 2}
"""Until the best ones are known."""

Tick = Callable[[str], None]


@dataclass
class _Measuring:
    """One mode of a cell, while it is measured."""

    mode: Mode
    probes: dict[int, float] = field(default_factory=dict)
    repeats: list[list[Waved]] = field(default_factory=list)
    tried_again: int = 0

    def runs(self) -> ModeRuns:
        return ModeRuns(tuple(tuple(waves) for waves in self.repeats), self.mode.g, self.probes, self.tried_again)


class CellMeter:
    """Measures cells on a rig whose edge has a recording. `pace`: of replayed drafts. `tick` is called after every wave
    with a word about it. `prompts`: the set that `terms` name."""

    def __init__(self, rig: Rig, terms: Terms, pace: Pace | None, tick: Tick, prompts: PromptSet = EVERYDAY) -> None:
        self._rig, self._terms, self._pace, self._tick, self._prompts = rig, terms, pace, tick, prompts

    async def measure(self, place: Place) -> CellRuns:
        """The link is set to the cell's round trip first."""
        await self._rig.at_distance(place.rtt_ms)
        await self._warm_up(place)
        modes = await self._modes(place)
        for repeat in range(self._terms.repeats):
            await self._repeat(place, modes, repeat)
        runs = {measured.mode.name: measured.runs() for measured in modes}
        around = await self._around(place)
        return CellRuns(place.pair, place.rtt_ms, place.sessions, place.temperature, runs, around, report.commit())

    async def _warm_up(self, place: Place) -> None:
        """Not measured. Replayed modes run the whole length, so that the recording has what will be asked for."""
        for mode in self._terms.modes_at(place.sessions, FIRST_BLOCKS):
            replays = place.sessions > 1 and mode.drafts
            waves, tokens = self._terms.waves(place.sessions), self._terms.tokens
            for numbers in waves if replays else waves[:1]:
                await self._once(place, mode, numbers, tokens if replays else min(WARM_UP_TOKENS, tokens))
                self._tick(f"{mode.name}, warming up")

    async def _modes(self, place: Place) -> list[_Measuring]:
        """Every mode; the baselines that have a block length with the best one here."""
        blocks, tried = dict(FIRST_BLOCKS), dict[str, dict[int, float]]()
        for name, make in (("sync", sync), ("colocated", colocated)):
            if name in self._terms.modes:
                tried[name] = {block: await self._probe(place, make(block)) for block in BLOCKS[name]}
                blocks[name] = min(tried[name], key=tried[name].__getitem__)
        modes = self._terms.modes_at(place.sessions, blocks)
        return [_Measuring(mode, tried.get(mode.name, {})) for mode in modes]

    async def _probe(self, place: Place, mode: Mode) -> float:
        """Milliseconds per token in a short run."""
        waves = []
        for numbers in self._terms.probe_waves(place.sessions):
            tokens = min(PROBE_TOKENS, self._terms.tokens)
            waves.append((await self._wave(place, mode, numbers, tokens))[0])
            self._tick(f"{mode.name}, trying blocks of {mode.g}")
        return probe_ms(waves)

    async def _repeat(self, place: Place, modes: Sequence[_Measuring], repeat: int) -> None:
        """Every mode on every wave, once."""
        for measured in modes:
            measured.repeats.append([])
        for number, numbers in enumerate(self._terms.waves(place.sessions)):
            turn = (number + repeat) % len(modes)
            for measured in [*modes[turn:], *modes[:turn]]:
                wave, tries = await self._wave(place, measured.mode, numbers, self._terms.tokens)
                measured.repeats[-1].append(wave)
                measured.tried_again += tries - 1
                self._tick(f"{measured.mode.name}, repeat {repeat + 1}")

    async def _wave(self, place: Place, mode: Mode, numbers: range, tokens: int) -> tuple[Waved, int]:
        """A wave whose drafts were recorded as far as that can be had, and how often it was run."""
        tries = 1
        wave = await self._once(place, mode, numbers, tokens)
        while place.sessions > 1 and wave.drafting.miss_share > MOST_MISSES and tries < TRIES:
            wave = await self._once(place, mode, numbers, tokens)
            tries += 1
        return wave, tries

    async def _once(self, place: Place, mode: Mode, numbers: range, tokens: int) -> Waved:
        jobs = tuple(self._job(number, mode, place, tokens) for number in numbers)
        if not mode.drafts:
            return await self._rig.edge.wave(Wave(jobs, "none"))
        if place.sessions == 1:
            return await self._rig.edge.wave(Wave(jobs, "live"))
        assert self._pace is not None, "several sessions replay at a pace"
        return await self._rig.edge.wave(Wave(jobs, "replay", dict(self._pace.ms)))

    def _job(self, number: int, mode: Mode, place: Place, tokens: int) -> Job:
        return self._terms.job(number, mode, place.temperature, tokens, self._prompts)

    async def _around(self, place: Place) -> Surroundings:
        await asyncio.sleep(STATUS_S)
        system = await self._rig.system()
        drafters = [drafter.draft_ms for drafter in system.drafters if drafter.draft_ms > 0]
        context = place.sessions * await self._context(place)
        return Surroundings(
            simulated=self._rig.simulated,
            step_ms=step_curve(system.verifiers[0], context) if system.verifiers else {},
            server_draft_ms=drafters[0] if drafters else None,
            overhead_ms_p50=system.batchers[0].overhead_ms_p50 if system.batchers else None,
            pace_ms=dict(self._pace.ms) if self._pace is not None and place.sessions > 1 else {},
        )

    async def _context(self, place: Place) -> float:
        """Tokens of KV that a session holds, half way through its answer."""
        run = await self._rig.edge.run(self._job(0, CLOUD, place, 1))
        return run.prompt_tokens + self._terms.tokens / 2

    # --- texts -------------------------------------------------------------------------------------------------------

    async def divergences(self, cell: CellRuns) -> list[dict[str, Any]]:
        """Each run whose tokens differ from those of the first mode's first repeat: cloud's, where it is measured."""
        named = [(name, mode) for name, mode in cell.modes.items() if name != "edge"]
        if not named:
            return []
        reference = runs_of(named[0][1].repeats[0])
        found, margins = [], dict[tuple[int, Split], float | None]()
        for name, mode in named:
            for repeat, waves in enumerate(mode.repeats):
                for prompt, (one, other) in enumerate(zip(reference, runs_of(waves), strict=True)):
                    split = first_difference(one.tokens, other.tokens)
                    if split is None:
                        continue
                    if (prompt, split) not in margins:
                        margins[prompt, split] = await self._margin(cell.place, split, prompt)
                    where = {"mode": name, "repeat": repeat, "prompt": prompt, "position": split.position}
                    found.append({**cell.place.values, **where, "margin": margins[prompt, split]})
        return found

    async def _margin(self, place: Place, split: Split, prompt: int) -> float | None:
        return await margin_at(self._rig.edge, self._job(prompt, CLOUD, place, split.position + 1), split)


def runs_of(waves: Sequence[Waved]) -> list[Run]:
    return [run for wave in waves for run in wave.runs]
