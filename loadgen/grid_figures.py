"""From the runs of one cell of a grid to its figures, predictions and ratios. Pure. Milliseconds, counted per token."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct

from loadgen.figures import draft_ms, figures, itl_ms, ratio
from loadgen.grid_plan import BASELINES, Place
from loadgen.jobs import Drafting, Run, Waved
from loadgen.predict import Measured, predicted

STEP_SIZES = (1, 2, 4, 8, 16, 64)


class ModeRuns(Struct, frozen=True):
    """Measured waves of one mode by repeat. g: its block length, where it has one, and `probes` the milliseconds per
    token at each that was tried. tried_again: waves that were run again because too many drafts were not recorded."""

    repeats: tuple[tuple[Waved, ...], ...]
    g: int | None = None
    probes: dict[int, float] = {}
    tried_again: int = 0

    @property
    def waves(self) -> list[Waved]:
        return [wave for repeat in self.repeats for wave in repeat]

    @property
    def runs(self) -> list[Run]:
        return [run for wave in self.waves for run in wave.runs]


class Surroundings(Struct, frozen=True):
    """What the services told of themselves when the cell was done. step_ms: by tokens fed, with the KV of its sessions.
    pace_ms: of replayed drafts, by tokens fed."""

    simulated: bool = False
    step_ms: dict[int, float] = {}
    server_draft_ms: float | None = None
    overhead_ms_p50: float | None = None
    pace_ms: dict[int, float] = {}


class CellRuns(Struct, frozen=True):
    """Everything that was measured in one cell; kept beside the report."""

    pair: str
    rtt_ms: float
    sessions: int
    temperature: float
    modes: dict[str, ModeRuns]
    around: Surroundings
    commit: str = ""

    @property
    def place(self) -> Place:
        return Place(self.pair, self.rtt_ms, self.sessions, self.temperature)


def cell_report(cell: CellRuns) -> dict[str, Any]:
    """The cell in the report's shape (docs/benchmarks.md)."""
    around = cell.around
    modes = {name: mode_report(mode, replayed=bool(around.pace_ms)) for name, mode in cell.modes.items()}
    return {
        **cell.place.values, "simulated": around.simulated, "commit": cell.commit, "modes": modes,
        "predicted": predicted({name: mode.runs for name, mode in cell.modes.items()}, measured(cell)),
        "ratios": ratios(modes),
        "probes_ms": {name: mode.probes for name, mode in cell.modes.items() if mode.probes},
        "draft_ms_per_token": edge_draft_ms(cell), "server_draft_ms_per_token": around.server_draft_ms,
        "overhead_ms_p50": around.overhead_ms_p50,
        "step_ms": {str(size): around.step_ms.get(size) for size in STEP_SIZES},
        "replay": {"pace_ms": around.pace_ms, "misses": _misses(cell.modes.values())} if around.pace_ms else None,
    }  # fmt: skip


def mode_report(mode: ModeRuns, *, replayed: bool) -> dict[str, Any]:
    """figures() over all sessions, with the throughput of all of them together: tokens of a repeat over the time from
    its waves' requests to their last tokens, and while all of them decode. `spread` belongs to itl_ms_mean,
    `tokens_per_s_spread` to tokens_per_s."""
    rates = [throughput(repeat) for repeat in mode.repeats]
    full = [rate for repeat in mode.repeats if (rate := full_throughput(repeat)) is not None]
    found: dict[str, Any] = {} if mode.g is None else {"g": mode.g}
    found |= figures([[run for wave in repeat for run in wave.runs] for repeat in mode.repeats])
    found |= {"tokens_per_s": statistics.median(rates), "tokens_per_s_spread": [min(rates), max(rates)]}
    if full:
        found |= {"tokens_per_s_full": statistics.median(full), "tokens_per_s_full_spread": [min(full), max(full)]}
    drafted = drafting_of(mode.waves)
    asked = replayed and drafted.guesses
    replay = {"replay_misses": drafted.miss_share, "tried_again": mode.tried_again} if asked else {}
    return {**found, "kinds": _kinds(mode.runs), "sources": sources(mode.runs), **replay}


def throughput(waves: Sequence[Waved]) -> float:
    """Tokens per second of one repeat."""
    return 1e3 * sum(len(run.tokens) for wave in waves for run in wave.runs) / sum(wave.span_ms for wave in waves)


def full_throughput(waves: Sequence[Waved]) -> float | None:
    """Tokens per second while every session of a wave decodes: from the last one's first token to the first one's end.
    A short run has a beginning and an end in which few do. None for single sessions and where there is no such time."""
    tokens, span_ms = 0, 0.0
    for wave in waves:
        since = max(run.chunks[0][0] for run in wave.runs)
        until = min(run.chunks[-1][0] for run in wave.runs)
        if len(wave.runs) < 2 or until <= since:
            return None
        tokens += sum(count for run in wave.runs for came, count in run.chunks if since < came <= until)
        span_ms += until - since
    return 1e3 * tokens / span_ms


def sources(runs: Sequence[Run]) -> dict[str, dict[str, int]]:
    """By source: drafts received, verified and accepted, and first mismatches."""
    fields = {"drafted": "drafted", "verified": "verified_by", "accepted": "accepted", "rejected": "rejected_by"}
    found: dict[str, Counter[str]] = {}
    for run in runs:
        for name, attribute in fields.items():
            for source, count in getattr(run.counters, attribute).items():
                found.setdefault(source, Counter())[name] += count
    return {source: {name: counts[name] for name in fields} for source, counts in sorted(found.items())}


def drafting_of(waves: Iterable[Waved]) -> Drafting:
    """Guesses and misses of all of them."""
    all_of = [wave.drafting for wave in waves]
    return Drafting(sum(drafting.guesses for drafting in all_of), sum(drafting.misses for drafting in all_of))


def ratios(modes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Paceline against the best baseline of the cell, in latency (below 1: faster) and throughput (above 1: more), and
    every mode's speed-up over the synchronous one."""
    found: dict[str, Any] = {}
    baselines = {name: modes[name] for name in BASELINES if name in modes}
    if baselines and "paceline" in modes:
        fastest = min(baselines, key=lambda name: float(baselines[name]["itl_ms_mean"]))
        most = max(baselines, key=lambda name: float(baselines[name]["tokens_per_s"]))
        found["best_baseline"] = fastest
        found["itl"] = ratio(modes["paceline"]["itl_ms_mean"], baselines[fastest]["itl_ms_mean"])
        found["best_throughput_baseline"] = most
        found["tokens_per_s"] = ratio(modes["paceline"]["tokens_per_s"], baselines[most]["tokens_per_s"])
        full = [mode["tokens_per_s_full"] for mode in baselines.values() if "tokens_per_s_full" in mode]
        if full and "tokens_per_s_full" in modes["paceline"]:
            found["tokens_per_s_full"] = ratio(modes["paceline"]["tokens_per_s_full"], max(full))
    if "sync" in modes:
        slow = modes["sync"]["itl_ms_mean"]
        found["speed_up_over_sync"] = {
            name: ratio(slow, mode["itl_ms_mean"]) for name, mode in modes.items() if name not in {"sync", "edge"}
        }
    return found


def measured(cell: CellRuns) -> Measured:
    # Of several sessions, batches go out before the step under way ends: nobody waits for the way.
    hop_ms = (cell.around.overhead_ms_p50 or 0.0) if cell.sessions == 1 else 0.0
    block = cell.modes["sync"].g if "sync" in cell.modes else None
    return Measured(cell.rtt_ms, hop_ms, cell.around.server_draft_ms, block)


def edge_draft_ms(cell: CellRuns) -> float | None:
    """One token at the edge: the stated pace where drafts were replayed, else as it was in the runs."""
    if cell.around.pace_ms:
        return cell.around.pace_ms.get(1)
    return draft_ms(run for name in ("paceline", "deep_alt", "deep", "sync") if name in cell.modes
                    for run in cell.modes[name].runs)  # fmt: skip


def probe_ms(waves: Iterable[Waved]) -> float:
    return itl_ms(run for wave in waves for run in wave.runs)


def summary(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each pair, number of sessions and temperature: where Paceline stands worst against the best baseline, and
    its speed-up over the synchronous one."""
    groups: dict[tuple[str, int, float], list[Mapping[str, Any]]] = {}
    for cell in cells:
        if "itl" in cell["ratios"]:
            groups.setdefault((cell["pair"], cell["sessions"], cell["temperature"]), []).append(cell)
    return [_group(*key, group) for key, group in groups.items()]


def _group(pair: str, sessions: int, temperature: float, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    worst = max(cells, key=lambda cell: float(cell["ratios"]["itl"]))
    least = min(cells, key=lambda cell: float(cell["ratios"]["tokens_per_s"]))
    full = [cell["ratios"]["tokens_per_s_full"] for cell in cells if "tokens_per_s_full" in cell["ratios"]]
    over_sync = [cell["ratios"]["speed_up_over_sync"]["paceline"] for cell in cells if "sync" in cell["modes"]]
    return {
        "pair": pair, "sessions": sessions, "temperature": temperature, "cells": len(cells),
        "itl_ratio_worst": worst["ratios"]["itl"], "itl_ratio_worst_at_ms": worst["rtt_ms"],
        "tokens_per_s_ratio_least": least["ratios"]["tokens_per_s"],
        "tokens_per_s_ratio_least_at_ms": least["rtt_ms"],
        "tokens_per_s_full_ratio_least": min(full, default=None),
        "speed_up_over_sync": [min(over_sync), max(over_sync)] if over_sync else None,
    }  # fmt: skip


def crossing(points: Sequence[tuple[float, float]], level: float = 1.0) -> float | None:
    """Where the line through the points (x rising) first rises above `level`; None: it never does."""
    for (x, y), (next_x, next_y) in pairwise(points):
        if y <= level < next_y:
            return x + (next_x - x) * (level - y) / (next_y - y)
    return points[0][0] if points and points[0][1] > level else None


def _kinds(runs: Iterable[Run]) -> dict[str, int]:
    return dict(sorted(Counter("".join(run.kinds for run in runs)).items()))


def _misses(modes: Iterable[ModeRuns]) -> float:
    return drafting_of(wave for mode in modes for wave in mode.waves).miss_share
