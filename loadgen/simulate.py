"""`simulate`: what drafting devices are worth to an accelerator, in virtual time. Everything here is simulated."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from loadgen import report, simulate_cells
from loadgen.simulate_cells import MODES, OBJECTIVES_MS, Cell, Effort, frontier, goodput
from loadgen.simulate_maps import Map, break_even, price_trace
from paceline.fleet_hardware import DRAFTERS, EDGES, GPUS, HEAD_ACCEPTANCE, LLMS

DESKTOP, LAPTOP, PHONE = "desktop GPU", "laptop CPU", "phone"
FULL = (
    *(Cell("A100-80", "llama-8b", context, DESKTOP, rtt) for context in (1024, 4096, 16384) for rtt in (20, 80)),
    *(Cell("A100-80", "llama-8b", 4096, edge, rtt) for edge in (LAPTOP, PHONE) for rtt in (20, 80)),
    Cell("A100-80", "llama-8b", 16384, LAPTOP, 20),
    Cell("A100-80", "qwen-32b-fp8", 4096, DESKTOP, 20),
    Cell("L40S", "llama-8b-fp8", 16384, DESKTOP, 20),
    Cell("L40S", "llama-8b", 4096, DESKTOP, 20),
    Cell("H200", "llama-8b", 16384, DESKTOP, 20),
    Cell("H200", "qwen-32b-fp8", 16384, DESKTOP, 20),
    Cell("H200", "llama-70b-fp8", 4096, DESKTOP, 20),
    Cell("H200", "llama-8b-fp8", 256, LAPTOP, 20, sessions=(1, 10, 100, 1000)),
)
QUICK = (
    Cell("A100-80", "llama-8b", 16384, DESKTOP, 20, sessions=(1, 12)),
    Cell("A100-80", "llama-8b", 16384, PHONE, 20, sessions=(12,)),
)


@dataclass(frozen=True)
class Work:
    """quick: a few small cells in seconds."""

    cells: tuple[Cell, ...]
    effort: Effort
    map: Map
    pace: tuple[float, ...]
    """t_d / t_1 of the map's panels."""
    loads: tuple[tuple[float, int], ...]
    until_s: float


WHOLE = Work(
    FULL, Effort(), Map((0, 20, 60, 100, 200), (0.5, 0.6, 0.7, 0.8, 0.9, 0.95), 300), (0.1, 0.3, 0.7),
    ((0.0, 1), (3.0, 16), (5.0, 200), (8.0, 100), (11.0, 16)), 13.0,
)  # fmt: skip
SMALL = Work(
    QUICK, Effort(settling=8, total=100, blocks=(2, 4), sync_blocks=(4,)), Map((0, 100), (0.6, 0.9), 60),
    (0.3,), ((0.0, 1), (0.5, 8)), 1.0,
)  # fmt: skip


def run(work: Work, workers: int, told: Callable[[str], None]) -> dict[str, Any]:
    """The report. told(line): a line for people as each piece is done."""
    started = time.time()
    jobs: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [("price", price_trace, (work.loads, work.until_s))]
    jobs += [(f"cell {index}", cell_report, (cell, work.effort)) for index, cell in enumerate(work.cells)]
    jobs += [(f"map {pace:g}", break_even, (work.map, pace)) for pace in work.pace]
    found: dict[str, Any] = {}
    with _pool(workers) as pool:
        futures = {pool.submit(call, *args): name for name, call, args in jobs}
        for future in as_completed(futures):
            name = futures[future]
            found[name] = future.result()
            told(f"{len(found)}/{len(jobs)} {found[name].get('label', name)}")
    return {
        **report.header(started),
        "simulated": True,
        "assumptions": assumptions(),
        "cells": [found[f"cell {index}"] for index in range(len(work.cells))],
        "break_even": [found[f"map {pace:g}"] for pace in work.pace],
        "price": found["price"],
    }


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes, which end at once with whatever ends what is inside: an interrupt, or a job that failed."""
    spawned = multiprocessing.get_context("spawn")
    quiet = (signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts all; this process tells what that means
    with ProcessPoolExecutor(workers, spawned, initializer=signal.signal, initargs=quiet) as pool:
        try:
            yield pool
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise  # the pool is broken by that: it gives up what waits, and joins them


def cell_report(cell: Cell, effort: Effort) -> dict[str, Any]:
    modes = {name: list(mode(cell, effort)) for name, mode in MODES.items()}
    modes["colocated"] = frontier(modes["colocated"])
    return {
        "label": cell.label,
        "simulated": True,
        **{key: value for key, value in asdict(cell).items() if key != "sessions"},
        "kv_sessions": cell.holds(),
        "modes": modes,
        "goodput": [goodput(cell, modes, objective) for objective in OBJECTIVES_MS],
    }


def assumptions() -> dict[str, Any]:
    """What the figures rest on, and nothing of it was measured here but the traces."""
    return {
        "gpus": {name: asdict(gpu) for name, gpu in GPUS.items()},
        "models": {name: asdict(llm) for name, llm in LLMS.items()},
        "server_drafters": {name: asdict(llm) for name, llm in DRAFTERS.items()},
        "head_acceptance": HEAD_ACCEPTANCE,
        "edges": {name: asdict(edge) for name, edge in EDGES.items()},
        "bandwidth_share": 0.8,
        "peak_share": 0.6,
        "jitter": simulate_cells.JITTER,
        "longest_chain": simulate_cells.LONGEST_CHAIN,
        "decoding_only": True,
    }
