"""`python -m loadgen compare | grid | simulate | demo | relay`."""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from loadgen import options, report
from loadgen.compare import Comparison, Plan
from loadgen.demo import demo as run_demo
from loadgen.grid_cli import SetName, grid
from loadgen.modes import SYNC_BLOCKS
from loadgen.prompts import EVERYDAY, prompt_set
from loadgen.relay import Link, Relay
from loadgen.rig import rig
from loadgen.simulate_cli import simulate_fleet
from loadgen.vllm_steps import vllm_steps
from paceline.errors import PacelineError
from paceline.wire import MAX_CHAIN_NODES

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Workloads, WAN emulation, baselines and reports.",
)
app.command()(grid)
app.command("simulate")(simulate_fleet)
app.command("vllm")(vllm_steps)
COMPARED = 8
"""Prompts, where no number is asked for."""
Pair = Annotated[str, typer.Option(help="Model pair of the catalog.")]
Engine = Annotated[str, typer.Option(help="Of the target: llama, or vllm in the environment of `make setup-vllm`.")]


@app.command()
def compare(  # noqa: PLR0917 (each is an option)
    pair: Pair = "smollm2",
    rtt_ms: Annotated[str, typer.Option(help="Round trips in milliseconds, separated by commas.")] = "0,60,100",
    temperature: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0",
    prompts: Annotated[int | None, typer.Option(min=1, show_default=f"{COMPARED}, or all if fewer")] = None,
    prompts_of: SetName = EVERYDAY.name,
    tokens: Annotated[int, typer.Option(min=2, help="Length of every answer.")] = 96,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    blocks: Annotated[str, typer.Option(help="Block lengths tried for sync.")] = ",".join(map(str, SYNC_BLOCKS)),
    json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
) -> None:
    """Cloud-only, synchronous, deep and Paceline on one stack of its own, interleaved in one run."""
    lengths = options.counts(blocks, "--blocks", 1, MAX_CHAIN_NODES)
    rtts, hot = options.rtts_ms(rtt_ms), options.temperatures(temperature)
    chosen = prompt_set(prompts_of)
    texts = chosen.texts[: chosen.count(prompts, COMPARED)]
    plan = Plan(rtts, hot, texts, tokens, repeats, blocks=lengths, prompt_set=chosen.name)
    if json is not None:
        options.writable(json, "--json")
    raise typer.Exit(asyncio.run(_compare(pair, plan, json)))


async def _compare(pair: str, plan: Plan, file: Path | None) -> int:
    """The exit code: 1 when texts differ by more than near ties."""
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    async with rig(pair, lambda text: console.print(f"[dim]{text}[/dim]")) as standing:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=plan.runs)
            tick = functools.partial(progress.update, task, advance=1)
            result = await Comparison(standing, plan, lambda what: tick(description=what)).report()
    for cell in result["cells"]:
        console.print(report.table(cell))
    console.print(report.verdict(result, [mode.name for mode in plan.modes(plan.blocks[0]) if not mode.alone]))
    if file is not None:
        report.write(result, file)
        console.print(f"report: {file}")
    return 0 if report.only_near_ties(result) else 1


@app.command()
def demo(pair: Pair = "smollm2", prompts_of: SetName = EVERYDAY.name, engine: Engine = "llama") -> None:
    """The whole line on this machine over a 60 ms link: an answer, then a table."""
    raise typer.Exit(asyncio.run(run_demo(pair, Console(), prompt_set(prompts_of), engine)))


@app.command()
def relay(  # noqa: PLR0917 (each is an option)
    to: Annotated[str, typer.Option(help="HOST:PORT to connect on to.")],
    listen: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 0,
    rtt_ms: Annotated[float, typer.Option(min=0)] = 0.0,
    jitter_ms: Annotated[float, typer.Option(min=0, help="Added to each chunk, up to this much.")] = 0.0,
    rate_kbit: Annotated[float, typer.Option(min=0, help="0: unlimited.")] = 0.0,
    stall_every_s: Annotated[float, typer.Option(min=0, help="Mean time between stalls; 0: none.")] = 0.0,
    stall_ms: Annotated[float, typer.Option(min=0)] = 0.0,
    cut_every_s: Annotated[float, typer.Option(min=0, help="Mean life of a connection; 0: for ever.")] = 0.0,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """A TCP relay that behaves like a wide-area link."""
    host, _, port = to.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise typer.BadParameter(f"`{to}` is not HOST:PORT", param_hint="--to")
    link = Link(rtt_ms / 2, jitter_ms, rate_kbit, stall_every_s, stall_ms, cut_every_s)
    asyncio.run(_relay(Relay(host, int(port), link, seed), listen))


async def _relay(made: Relay, listen: int) -> None:
    await made.start(port=listen)
    print(f"127.0.0.1:{made.port} -> {made.target_host}:{made.target_port}, {made.link}", flush=True)
    await asyncio.Event().wait()


def _terminated(*_: object) -> None:
    """Interrupts are ignored in what a script's shell starts in the background."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def main() -> None:
    """SIGTERM ends a command as an interrupt does (with 130): what it started ends, and its temporary folders go."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        app()
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
