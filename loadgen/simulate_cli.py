"""The command `simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadgen import options, report, simulate, simulate_plots, simulate_tables


def simulate_fleet(
    json: Annotated[Path, typer.Option(help="Write the report here.")],
    out: Annotated[Path | None, typer.Option(help="Write a page and plots into this folder.")] = None,
    quick: Annotated[bool, typer.Option(help="A few small cells: seconds instead of minutes.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
) -> None:
    """Many sessions on large accelerators, in virtual time: plain, co-located, synchronous and Paceline. No stack, no
    models, nothing measured: step times are rooflines, agreement is from recorded traces."""
    options.writable(json, "--json")
    if out is not None:
        options.plottable(out)
    console = Console()
    work = simulate.SMALL if quick else simulate.WHOLE
    result = simulate.run(work, workers, lambda line: console.print(line, highlight=False))
    report.write(result, json)
    console.print(f"report: {json}")
    if out is not None:
        page = out / "simulate.md"
        page.write_text(simulate_tables.page(result), encoding="utf-8")
        for file in (page, *simulate_plots.write(result, out)):
            console.print(f"written: {file}")
