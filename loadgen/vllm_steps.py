"""The command `vllm`: step times of the target on vLLM, beside vLLM alone.

vLLM has an environment of its own, so `services.verifier.vllm_measure` runs there, and this makes the report of it.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from loadgen import options, report
from loadgen.rig import VLLM_PYTHON
from paceline.errors import PacelineError, SettingsError
from paceline.settings import Settings, child_environment

MEASURE = "services.verifier.vllm_measure"
COLUMNS = (
    ("ses-\nsions", "sessions", "{:d}"),
    ("con-\ntext", "context", "{:d}"),
    ("tempe-\nrature", "temperature", "{:g}"),
    ("draft", "draft", "{:d}"),
    ("step\nms", "ms", "{:.1f}"),
    ("over\nplain", "over_plain", "{:.2f}"),
    ("of it\nport", "port_ms", "{:.1f}"),
    ("of it\nchoice", "choice_ms", "{:.1f}"),
    ("vLLM\nalone", "vllm_ms", "{:.1f}"),
    ("plain\nover it", "over_vllm", "{:.2f}"),
)
"""Heading, key of a row, format."""


def vllm_steps(  # noqa: PLR0917 (each is an option)
    json_file: Annotated[Path, typer.Option("--json", help="Write the report here.")],
    pair: Annotated[str, typer.Option(help="Whose target.")] = "smollm2",
    sessions: Annotated[str, typer.Option(help="In one step, separated by commas.")] = "1,4",
    contexts: Annotated[str, typer.Option(help="Tokens of each prompt, separated by commas.")] = "200",
    temperature: Annotated[str, typer.Option(help="Separated by commas.")] = "0,0.8",
    rounds: Annotated[int, typer.Option(min=1, help="Of each case; the engines take turns.")] = 3,
) -> None:
    """Step times of the target on vLLM beside vLLM alone: plain steps, drafts of 1 to 16 tokens, what the port adds.

    Needs the environment of `make setup-vllm`.
    """
    options.writable(json_file, "--json")
    if not VLLM_PYTHON.exists():
        raise SettingsError(f"there is no {VLLM_PYTHON}: run `make setup-vllm`")
    started = time.time()
    numbers = {
        "--sessions": options.counts(sessions, "--sessions", 1, 64),
        "--contexts": options.counts(contexts, "--contexts", 16, 1 << 16),
        "--temperatures": options.temperatures(temperature),
        "--rounds": (rounds,),
    }
    result = measured(Settings.load(model=pair), numbers)
    report.write({**report.header(started), "simulated": False, "pair": pair, **result}, json_file)
    console = Console()
    console.print(table(result["rows"]))
    console.print(f"report: {json_file}")


def measured(settings: Settings, numbers: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What the measuring process says. Raises PacelineError with the end of its errors."""
    words = [word for name, values in numbers.items() for word in (name, *(f"{value:g}" for value in values))]
    environment = child_environment(settings.environment(), OMP_NUM_THREADS=str(settings.threads))
    done = subprocess.run(
        [str(VLLM_PYTHON), "-m", MEASURE, *words], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise PacelineError(f"measuring failed with {done.returncode}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading, _, _ in COLUMNS:
        made.add_column(heading, justify="right")
    for row in rows:
        made.add_row(*(form.format(row[key]) for _, key, form in COLUMNS))
    return made
