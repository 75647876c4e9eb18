"""What `simulate` runs: cells of accelerator, model, context, device and link, and the best of each scheme in them.

The best is the most tokens per second whose 99th percentile of inter-token latency keeps a stated objective, over the
number of sessions and what an operator may tune: block length and kind of drafter for a server that drafts for itself,
the block length for synchronous drafting, the step's token budget and the patience with drafts for Paceline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline import fleet_baselines as baselines
from paceline import fleet_traces
from paceline.fleet import Fleet, Scenario
from paceline.fleet_hardware import (
    DRAFTERS,
    EDGES,
    GPUS,
    HEAD_ACCEPTANCE,
    LLMS,
    Llm,
    StepCost,
    drafting_head,
)
from paceline.fleet_meter import Link
from paceline.wire import Speculation

JITTER = 0.05
"""Mean extra delay of a message, as a share of the round trip."""
GENERATED = 512
"""Tokens of KV that are reserved for a completion."""
DRAFTER_OVERHEAD_S = 0.0005
OBJECTIVES_MS = (40.0, 50.0, 75.0, 100.0, 200.0)
"""Of the 99th percentile of inter-token latency."""
HEADLINE_MS = 100.0
UNLIMITED = 1 << 16
"""Tokens of a step."""
LONGEST_CHAIN = 16

Figures = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    gpu: str
    llm: str
    context: int
    edge: str
    rtt_ms: float
    trace: str = "smollm2-t0.8"
    sessions: tuple[int, ...] = ()
    """Empty: one, and a third, two thirds and all of what the KV cache holds."""

    @property
    def cost(self) -> StepCost:
        return StepCost(GPUS[self.gpu], LLMS[self.llm])

    @property
    def link(self) -> Link:
        return Link(self.rtt_ms / 1000, JITTER * self.rtt_ms / 1000)

    @property
    def label(self) -> str:
        return f"{self.gpu} {self.llm} {self.context} {self.edge} {self.rtt_ms:g} ms"

    def holds(self, drafter: Llm | None = None) -> int:
        """Sessions whose KV fits, beside a drafter of the server's."""
        return self.cost.sessions(self.context + GENERATED, drafter)

    def loads(self, most: int) -> list[int]:
        asked = self.sessions or (1, most // 3, 2 * most // 3, most)
        return sorted({count for count in asked if 1 <= count <= most})

    def fine_loads(self, most: int) -> list[int]:
        """For schemes that are quick to simulate: a dozen, so that they find their best."""
        return sorted({*self.loads(most), *(max(1, most * part // 12) for part in range(1, 13))})


@dataclass(frozen=True)
class Effort:
    """settling tokens a session; then measured ones, about `total` over all sessions within `bounds` a session."""

    settling: int = 24
    total: int = 1500
    bounds: tuple[int, int] = (16, 600)
    blocks: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    sync_blocks: tuple[int, ...] = (4, 8)

    def of(self, sessions: int) -> tuple[int, int]:
        return self.settling, max(self.bounds[0], min(self.bounds[1], self.total // sessions))


def plain(cell: Cell, effort: Effort) -> Iterator[Figures]:
    trace = fleet_traces.load(cell.trace)
    for sessions in cell.fine_loads(cell.holds()):
        batch = baselines.Batch(cell.cost.step_s, trace, cell.link, sessions, cell.context)
        yield {"sessions": sessions, **asdict(baselines.decode(batch, *effort.of(sessions)))}


def colocated(cell: Cell, effort: Effort) -> Iterator[Figures]:
    """With the family's small model at the acceptance of the device's drafter, and with a drafting head."""
    target, gpu, edge = LLMS[cell.llm], GPUS[cell.gpu], EDGES[cell.edge]
    trace = fleet_traces.load(cell.trace)
    for drafter, acceptance in ((DRAFTERS[cell.llm], edge.acceptance), (drafting_head(target), HEAD_ACCEPTANCE)):
        cost = StepCost(gpu, drafter, overhead_s=DRAFTER_OVERHEAD_S)
        for sessions in cell.fine_loads(cell.holds(drafter)):
            for block in effort.blocks:
                batch = baselines.Batch(
                    cell.cost.step_s, trace.at(acceptance), cell.link, sessions, cell.context, block, cost.step_s
                )
                figures = asdict(baselines.decode(batch, *effort.of(sessions)))
                yield {"sessions": sessions, "g": block, "drafter": drafter.name, **figures}


def scenario(
    cell: Cell, sessions: int, speculation: Speculation, step_tokens: int = UNLIMITED, patience_s: float | None = None
) -> Scenario:
    edge = EDGES[cell.edge]
    return Scenario(
        step_s=cell.cost.step_s,
        trace=fleet_traces.load(cell.trace).at(edge.acceptance),
        edge=edge,
        link=cell.link,
        load=((0.0, sessions),),
        speculation=speculation,
        context=cell.context,
        endless=True,
        step_tokens=step_tokens,
        patience_s=patience_s,
    )


def synchronous(cell: Cell, effort: Effort) -> Iterator[Figures]:
    for sessions in cell.loads(cell.holds())[::-2]:
        for block in effort.sync_blocks:
            speculation = Speculation(
                max_draft=block, depth=1, fill=False, alternatives=False, lookup=False, assist=False
            )
            figures = asdict(Fleet(scenario(cell, sessions, speculation)).measured(*effort.of(sessions)))
            yield {"sessions": sessions, "g": block, **figures}


def paceline(cell: Cell, effort: Effort) -> Iterator[Figures]:
    """As it comes, and tuned for short gaps: nobody waits for a block (patience 0), without and with a step budget of
    twice what the reading of the weights hides."""
    speculation, budget = Speculation(max_draft=LONGEST_CHAIN), 2 * int(cell.cost.saturating_tokens)
    for sessions in cell.loads(cell.holds()):
        settings: list[tuple[int, float | None]] = [(UNLIMITED, None), (UNLIMITED, 0.0)]
        if 2 * sessions <= budget <= sessions * LONGEST_CHAIN and sessions > 1:
            settings.append((budget, 0.0))
        for step_tokens, patience_s in settings:
            asked = scenario(cell, sessions, speculation, step_tokens, patience_s)
            figures = asdict(Fleet(asked).measured(*effort.of(sessions)))
            tuned = {
                "step_tokens": None if step_tokens == UNLIMITED else step_tokens,
                "patience_ms": None if patience_s is None else 1000 * patience_s,
            }
            yield {"sessions": sessions, **tuned, **figures}


MODES: dict[str, Callable[[Cell, Effort], Iterator[Figures]]] = {
    "plain": plain,
    "colocated": colocated,
    "sync": synchronous,
    "paceline": paceline,
}


def best(runs: Sequence[Figures], objective_ms: float) -> Figures | None:
    """The run with the most tokens per second that keeps the objective; None: none does."""
    kept = [run for run in runs if run["itl_ms_p99"] <= objective_ms]
    return max(kept, key=lambda run: run["tokens_per_s"], default=None)


def frontier(runs: Sequence[Figures]) -> list[Figures]:
    """The runs than which no other has both more tokens per second and a lower 99th percentile."""
    kept: list[Figures] = []
    for run in sorted(runs, key=lambda run: (run["itl_ms_p99"], -run["tokens_per_s"])):
        if not kept or run["tokens_per_s"] > kept[-1]["tokens_per_s"]:
            kept.append(run)
    return kept


def goodput(cell: Cell, modes: dict[str, list[Figures]], objective_ms: float) -> Figures:
    """The best of each mode, what it costs, and how Paceline compares."""
    found: Figures = {"p99_itl_ms": objective_ms}
    for name, runs in modes.items():
        run = best(runs, objective_ms)
        found[name] = None if run is None else {**run, "usd_per_million": usd_per_million(cell, run["tokens_per_s"])}
    ours = found.get("paceline")
    for name in modes:
        if name != "paceline" and ours and found[name]:
            found[f"over_{name}"] = ours["tokens_per_s"] / found[name]["tokens_per_s"]
    return found


def usd_per_million(cell: Cell, tokens_per_s: float) -> float:
    """The accelerator's hours alone; the devices belong to their users."""
    return 1e6 * GPUS[cell.gpu].usd_per_hour / (3600 * tokens_per_s)
