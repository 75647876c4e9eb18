"""A grid's report as pictures. Needs matplotlib (the extra `bench`), which is imported here alone, and no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.grid_markdown import Cell, against_cloud, groups, modes_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = {
    "cloud": ("#7f7f7f", "s"), "colocated": ("#9467bd", "D"), "sync": ("#d62728", "v"), "deep": ("#ff7f0e", "^"),
    "deep_alt": ("#2ca02c", "P"), "edge": ("#bcbd22", "x"), "paceline": ("#1f77b4", "o"),
}  # fmt: skip
"""Colour and marker of each mode."""


def plots(report: Mapping[str, Any], folder: Path, stem: str) -> dict[str, list[str]]:
    """Writes PNG files named after `stem` into `folder`; their names by the group that they show."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[str]] = {}
    for title, cells in groups(report["cells"]):
        if len(cells) < 2:
            continue
        first = cells[0]
        name = f"{stem}-{first['pair']}-{first['sessions']}x-t{first['temperature']:g}.png"
        _save(_group(title, cells), folder / name)
        found[title] = [name]
    return found


def _group(title: str, cells: Sequence[Cell]) -> Figure:
    """Latency, speed-up over the synchronous mode, and latency over cloud-only's (break-even at 1)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.4), layout="constrained")
    simulated = ", simulated" if any(cell["simulated"] for cell in cells) else ""
    figure.suptitle(title + simulated)
    latency, speed_up, even = figure.subplots(1, 3)
    modes = modes_in(cells)
    for name in modes:
        _line(latency, cells, name, _itl, band=True)
        if name not in {"sync", "edge"}:
            _line(speed_up, cells, name, _speed_up)
        if name not in {"cloud", "edge"}:
            _line(even, cells, name, against_cloud)
    _labels(latency, "ms a token", None)
    _labels(speed_up, "speed-up over sync", 1.0)
    _labels(even, "latency / cloud-only (break-even: 1)", 1.0)
    return figure


def _line(axes: Axes, cells: Sequence[Cell], name: str, value: Any, *, band: bool = False) -> None:
    points = [(cell["rtt_ms"], y) for cell in cells if (y := value(cell, name)) is not None]
    if not points:
        return
    colour, marker = STYLES[name]
    axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=name)
    if band:
        spreads = [(cell["rtt_ms"], *cell["modes"][name]["spread"]) for cell in cells if name in cell["modes"]]
        places, low, high = zip(*spreads, strict=True)
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)


def _itl(cell: Cell, name: str) -> float | None:
    return float(cell["modes"][name]["itl_ms_mean"]) if name in cell["modes"] else None


def _speed_up(cell: Cell, name: str) -> float | None:
    found: float | None = cell["ratios"].get("speed_up_over_sync", {}).get(name)
    return found


def _labels(axes: Axes, y: str, level: float | None) -> None:
    axes.set_xlabel("round trip, ms")
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if level is not None:
        axes.axhline(level, color="black", linewidth=0.8, linestyle=":")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _save(figure: Figure, file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    figure.savefig(file, dpi=110)
