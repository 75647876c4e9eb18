"""The plots of `simulate`: PNG files. Needs the extra `bench`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgen.simulate_cells import HEADLINE_MS, frontier

NAMES = {"plain": "plain", "colocated": "co-located", "sync": "synchronous", "paceline": "Paceline"}
COLOURS = {"plain": "0.55", "colocated": "tab:orange", "sync": "tab:red", "paceline": "tab:blue"}
MOST_PANELS = 6
DARK_TEXT_ABOVE = 2.2
"""Of the break-even map: from there its colours are too light for white figures."""


def write(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """The files that were written."""
    import matplotlib as mpl

    mpl.use("Agg")
    drawn = {
        "simulate-goodput.png": _goodput(result),
        "simulate-latency.png": _latency(result),
        "simulate-break-even.png": _break_even(result),
        "simulate-price.png": _price(result),
    }
    files = []
    for name, figure in drawn.items():
        figure.savefig(folder / name, dpi=110)
        files.append(folder / name)
    return files


def _figure(*size: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(size[0], size[1]), layout="constrained")


def _goodput(result: Mapping[str, Any]) -> Any:
    from matplotlib.patches import Patch

    cells = result["cells"]
    figure = _figure(9, 1.2 + 0.55 * len(cells))
    axes = figure.subplots()
    for row, cell in enumerate(cells):
        entry = next(item for item in cell["goodput"] if item["p99_itl_ms"] == HEADLINE_MS)
        base = entry["plain"]["tokens_per_s"] if entry["plain"] else None
        for offset, mode in enumerate(NAMES):
            if base and entry[mode]:
                height = row + 0.2 * (offset - 1.5)
                axes.barh(height, entry[mode]["tokens_per_s"] / base, 0.18, color=COLOURS[mode])
    axes.set_yticks(range(len(cells)), [cell["label"] for cell in cells], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    axes.set_xlabel(f"tokens/s over plain, p99 of inter-token latency at most {HEADLINE_MS:g} ms (simulated)")
    axes.legend(handles=[Patch(color=COLOURS[mode], label=name) for mode, name in NAMES.items()], fontsize=8)
    return figure


def _latency(result: Mapping[str, Any]) -> Any:
    cells = result["cells"][:MOST_PANELS]
    columns = min(3, len(cells))
    lines = -(-len(cells) // columns)
    figure = _figure(4.2 * columns, 3.4 * lines)
    grid = figure.subplots(lines, columns, squeeze=False)
    for index, cell in enumerate(cells):
        axes = grid[index // columns][index % columns]
        for mode, name in NAMES.items():
            runs = frontier(cell["modes"][mode])
            latency, rate = [run["itl_ms_p99"] for run in runs], [run["tokens_per_s"] for run in runs]
            axes.plot(latency, rate, "o-", color=COLOURS[mode], label=name, markersize=3)
        axes.set_title(cell["label"], fontsize=8)
        axes.set_xlabel("p99 ms a token (simulated)", fontsize=8)
        axes.set_ylabel("tokens/s", fontsize=8)
    grid[0][0].legend(fontsize=7)
    return figure


def _break_even(result: Mapping[str, Any]) -> Any:
    import numpy as np

    panels = result["break_even"]
    figure = _figure(4.2 * len(panels) + 0.8, 3.6)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    image = None
    for axes, panel in zip(grid, panels, strict=True):
        points = panel["points"]
        rtts = sorted({point["rtt_ms"] for point in points})
        rates = sorted({point["acceptance"] for point in points})
        at = {(point["rtt_ms"], point["acceptance"]): point for point in points}
        speedup = np.array([[at[rtt, rate]["speedup"] for rtt in rtts] for rate in rates])
        deep = np.array([[at[rtt, rate]["theory_deep"] for rtt in rtts] for rate in rates])
        image = axes.imshow(speedup, origin="lower", aspect="auto", vmin=0.8, vmax=3.0, cmap="viridis")
        for row, rate in enumerate(rates):
            for column, rtt in enumerate(rtts):
                value = at[rtt, rate]["speedup"]
                colour = "black" if value > DARK_TEXT_ABOVE else "white"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour, zorder=3)
        if deep.min() < 1.0 < deep.max():
            axes.contour(deep, levels=[1.0], colors="w", linestyles="dashed", linewidths=1.2, alpha=0.6)
        axes.set_xticks(range(len(rtts)), [f"{rtt:g}" for rtt in rtts])
        axes.set_yticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        axes.set_title(f"t_d / t_1 = {panel['t_d_over_t_1']:g}, t_1 = {panel['t_1_ms']:.0f} ms", fontsize=9)
        axes.set_xlabel("round trip ms")
        axes.set_ylabel("acceptance")
    figure.colorbar(image, ax=list(grid), label="speed over plain (simulated)")
    return figure


def _price(result: Mapping[str, Any]) -> Any:
    steps = result["price"]["steps"]
    moments = [step["s"] for step in steps]
    figure = _figure(8, 5)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(moments, [step["price"] for step in steps], color="0.7", linewidth=0.7, label="of each step")
    upper.plot(moments, [step["smoothed"] for step in steps], color="tab:blue", label="as told")
    upper.set_ylabel("price")
    upper.legend(fontsize=8)
    lower.plot(moments, [step["chain"] for step in steps], color="tab:green", linewidth=0.8)
    lower.set_ylabel("drafts a session and step")
    lower.set_xlabel("s (simulated)")
    lower.set_ylim(top=1.15 * lower.get_ylim()[1])
    for moment, sessions in result["price"]["loads"]:
        lower.axvline(moment, color="0.6", linewidth=0.8)
        label = f"{sessions} session" + ("s" if sessions != 1 else "")
        lower.annotate(label, (moment, 1), xycoords=("data", "axes fraction"), xytext=(3, -4),
                       textcoords="offset points", va="top", fontsize=8)  # fmt: skip
    return figure
