"""The JSON and the table of a report (its shape: docs/benchmarks.md)."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import psutil
from rich import box
from rich.table import Table

from loadgen.divergence import NEAR_TIE
from paceline.errors import PacelineError
from paceline.model_card import write_whole

Column = tuple[str, str, str]
"""Heading, key of the mode's figures, format. tokens/step is the inverse of its figure."""

BRIEF: tuple[Column, ...] = (
    ("ms/token", "itl_ms_mean", "{:.1f}"),
    ("first ms", "ttft_ms_p50", "{:.0f}"),
    ("acceptance", "acceptance", "{:.0%}"),
    ("tokens/step", "verifier_steps_per_token", "{:.2f}"),
)
FULL: tuple[Column, ...] = (
    ("ms a\ntoken", "itl_ms_mean", "{:.1f}"),
    ("theory", "predicted", "{:.1f}"),
    ("p99", "itl_ms_p99", "{:.0f}"),
    ("first\nms", "ttft_ms_p50", "{:.0f}"),
    ("accep-\ntance", "acceptance", "{:.0%}"),
    ("tokens\na step", "verifier_steps_per_token", "{:.2f}"),
    ("bytes\nup", "bytes_up_per_drafted_token", "{:.1f}"),
    ("bytes\ndown", "bytes_down_per_committed_token", "{:.1f}"),
)
"""Fits 80 columns."""


def header(started: float) -> dict[str, Any]:
    """What every report begins with. `started` is time.time()."""
    return {
        "command": ["python", "-m", "loadgen", *sys.argv[1:]],
        "commit": commit(),
        "machine": {
            "cpu": _cpu(),
            "cores": psutil.cpu_count(logical=True),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - started, 1),
    }


def write(report: Mapping[str, Any], file: Path) -> None:
    """As JSON. Raises PacelineError where that fails."""
    keep(file, orjson.dumps(_rounded(report), option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS) + b"\n")


def keep(file: Path, content: bytes) -> None:
    """Write a file whole: whatever ends this or fills the disk, what was there before is there whole. Raises
    PacelineError where it cannot be written, which no further measuring would mend."""
    target = file.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():  # a pipe, a terminal
            target.write_bytes(content)
        else:
            write_whole(target, content, mode=0o644)
    except OSError as error:
        raise PacelineError(f"{file} cannot be written: {error.strerror}") from error


def table(cell: Mapping[str, Any], columns: Sequence[Column] = FULL) -> Table:
    """One cell's modes side by side."""
    simulated = ", simulated" if cell["simulated"] else ""
    title = f"{cell['pair']}, {cell['rtt_ms']:g} ms round trip, temperature {cell['temperature']:g}{simulated}"
    grid = Table(title=title, title_justify="left")
    if columns is FULL:  # no frame: the columns take all the room of a narrow terminal
        grid.box, grid.collapse_padding, grid.pad_edge = box.SIMPLE_HEAD, True, False
    grid.add_column("mode", no_wrap=True)
    for heading, _, _ in columns:
        grid.add_column(heading, justify="right", no_wrap=True)
    for name, figures in cell["modes"].items():
        block = f", blocks of {figures['g']}" if "g" in figures else ""
        row = {**figures, "predicted": cell.get("predicted", {}).get(name)}
        grid.add_row(name + block, *(_shown(row, key, form) for _, key, form in columns))
    return grid


def only_near_ties(report: Mapping[str, Any]) -> bool:
    """Whether no text differs but by a near tie; a margin that nobody knows is none."""
    return all(split["margin"] is not None and split["margin"] <= NEAR_TIE for split in report["divergences"])


def verdict(report: Mapping[str, Any], names: Sequence[str]) -> str:
    """One line: are the texts of the modes `names` identical?"""
    modes, splits = ", ".join(names), report["divergences"]
    if not report["cells"]:
        return "[red]nothing was measured[/red]"
    if not splits:
        return f"[green]texts of {modes}: identical[/green]"
    known = [split["margin"] for split in splits if split["margin"] is not None]
    margins = ", ".join(f"{margin:.2g}" for margin in sorted(known, reverse=True)[:3])
    unknown = f", {len(splits) - len(known)} unknown" if len(known) < len(splits) else ""
    if only_near_ties(report):
        return f"[yellow]texts of {modes}: identical up to {len(splits)} near ties (margins {margins})[/yellow]"
    return f"[red]texts of {modes}: {len(splits)} differ (margins {margins}{unknown})[/red]"


def _shown(figures: Mapping[str, Any], key: str, form: str) -> str:
    value = figures.get(key)
    if value is not None and key == "verifier_steps_per_token":
        value = 1 / value if value else None
    return "-" if value is None else form.format(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def commit() -> str:
    """The commit of the working tree, marked when it is not clean; `unknown` outside of one."""
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
