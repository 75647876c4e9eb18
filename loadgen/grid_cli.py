"""The command line of `python -m loadgen grid`: which cells, onto which file, shown how."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import structs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from loadgen import grid_plan, options, report
from loadgen.grid import CellMeter, Tick
from loadgen.grid_file import GridFile
from loadgen.grid_markdown import markdown
from loadgen.grid_plan import ALL_MODES, GridPlan, Place, Terms
from loadgen.pace import Pace
from loadgen.prompts import BUILT_IN, EVERYDAY, PromptSet, prompt_set
from loadgen.replay_check import check_replay, pace_of, verdict
from loadgen.rig import Rig, rig
from paceline.errors import FatalError

TERMS = Terms()
SetName = Annotated[
    str,
    typer.Option(
        "--prompt-set",
        metavar=f"{'|'.join(BUILT_IN)}|FILE",
        help="The prompts to take the first of; FILE: a UTF-8 text file, prompts separated by blank lines.",
    ),
]


def grid(  # noqa: PLR0917 (each is an option)
    json: Annotated[Path, typer.Option(help="The report; its runs and drafts go beside it.")],
    pair: Annotated[list[str] | None, typer.Option(help="Model pairs; repeat it or separate by commas.")] = None,
    rtt_ms: Annotated[str, typer.Option(help="Round trips in milliseconds.")] = "0,20,60,100,200,300",
    sessions: Annotated[str, typer.Option(help="Sessions at once.")] = "1,4,16",
    temperature: Annotated[str, typer.Option(help="Temperatures.")] = "0,0.8",
    prompts: Annotated[
        int | None,
        typer.Option(min=1, help="At least; one for each session.", show_default=f"{TERMS.prompts}, or all if fewer"),
    ] = None,
    prompts_of: SetName = EVERYDAY.name,
    tokens: Annotated[int, typer.Option(min=4, help="Length of every answer.")] = TERMS.tokens,
    repeats: Annotated[int, typer.Option(min=1)] = TERMS.repeats,
    modes: Annotated[str, typer.Option(help="Modes to measure.")] = ",".join(ALL_MODES),
    draft_ms: Annotated[float, typer.Option(min=0, help="Pace of replayed drafts; 0: as measured here.")] = 0.0,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the cells that the file has.")] = False,
    again: Annotated[bool, typer.Option("--again", help="With --resume: measure these cells anew.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Three cells, 2 prompts x 32 tokens, one repeat.")] = False,
    check: Annotated[
        bool, typer.Option("--check-replay", help="Only prove that replayed drafts are live ones.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write Markdown, plots and the JSON into this folder.")] = None,
) -> None:
    """All modes and baselines over round trips, sessions and temperatures; slow, and goes on where it stopped."""
    pairs = options.pairs(",".join(pair or ["smollm2"]))
    chosen = prompt_set(prompts_of)
    count = chosen.count(prompts, TERMS.prompts)
    terms = Terms(count, chosen.name, tokens, repeats, modes=_modes(modes), draft_ms=draft_ms or None)
    if quick:
        short = grid_plan.QUICK
        few = chosen.count(None, short.prompts)
        terms = structs.replace(terms, prompts=few, tokens=short.tokens, repeats=short.repeats)
        plan = grid_plan.quick(pairs, terms)
    else:
        crowds = options.counts(sessions, "--sessions", 1, options.MOST_SESSIONS)
        plan = grid_plan.full(pairs, options.rtts_ms(rtt_ms), crowds, options.temperatures(temperature), terms)
    file = GridFile.open(json, terms, resume=resume)
    options.writable(json, "--json")
    if out is not None:
        options.plottable(out)
    made = GridRun(file, Console(), chosen)
    raise typer.Exit(asyncio.run(made.run(plan, again=again, only_check=check, out=out)))


class GridRun:
    """Fills a GridFile with the cells of a plan. `prompts`: the set that the file's terms name."""

    def __init__(self, file: GridFile, console: Console, prompts: PromptSet = EVERYDAY) -> None:
        self._file, self._console, self._prompts = file, console, prompts
        self._failed: list[str] = []

    async def run(self, plan: GridPlan, *, again: bool, only_check: bool, out: Path | None) -> int:
        """The exit code: 1 when a cell failed, or texts differ by more than near ties."""
        there = set() if again else self._file.places
        pending = [] if only_check else [place for place in plan.places if place not in there]
        if kept := len(plan.places) - len(pending):
            self._console.print(f"{kept} of {len(plan.places)} cells are there or not asked for")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task("", total=plan.ticks(pending))
            tick = functools.partial(progress.update, task, advance=1)
            for pair in plan.pairs:
                mine = [place for place in pending if place.pair == pair]
                await self._pair(pair, mine, lambda what: tick(description=what), only_check=only_check)
        self._file.write()
        self._end(out)
        return 0 if not self._failed and report.only_near_ties(self._file.report()) else 1

    async def _pair(self, pair: str, places: list[Place], tick: Tick, *, only_check: bool) -> None:
        """Every cell is tried once; after one that failed the others go on, on a new stack."""
        while places or only_check:
            left = len(places)
            try:
                async with rig(pair, self._say) as standing:
                    await standing.edge.recall(self._file.drafts(pair).resolve())
                    pace = await self._pace(standing, only_check or any(place.sessions > 1 for place in places))
                    meter = CellMeter(standing, self._file.terms, pace, tick, self._prompts)
                    while places:
                        await self._cell(meter, places.pop(0))
                return
            except FatalError as error:
                self._console.print(f"[red]{error}[/red]")
                if len(places) == left:
                    self._failed += [str(place) for place in places] or [f"{pair}, replay"]
                    return

    async def _pace(self, standing: Rig, needed: bool) -> Pace | None:
        """Of replayed drafts: found once for a pair, together with the proof of the replay."""
        if not needed:
            return None
        known = pace_of(self._file.replay_checks, standing.pair)
        if known is None:
            check = await check_replay(standing, self._file.terms, prompts=self._prompts)
            self._file.checked(check)
            self._console.print(verdict(check), highlight=False)
            known = pace_of([check], standing.pair)
            assert known is not None
        stated = self._file.terms.draft_ms
        return known if stated is None else known.scaled(stated)

    async def _cell(self, meter: CellMeter, place: Place) -> None:
        """A cell that fails is left out, and told; the stack that it failed on is given up."""
        try:
            cell = await meter.measure(place)
            made = self._file.add(cell, await meter.divergences(cell))
        except FatalError:
            self._failed.append(str(place))
            self._console.print(f"[red]{place}: failed[/red]", highlight=False)
            raise
        self._console.print(line(place, made), highlight=False)

    def _end(self, out: Path | None) -> None:
        whole = self._file.report()
        if self._failed:
            self._console.print(f"[red]not measured: {'; '.join(self._failed)}[/red]")
        self._console.print(report.verdict(whole, [name for name in self._file.terms.modes if name != "edge"]))
        self._console.print(f"report: {self._file.file}")
        if out is not None and whole["cells"]:
            write_out(whole, out, self._file.file.stem)
            self._console.print(f"tables and plots: {out}")

    def _say(self, text: str) -> None:
        self._console.print(f"[dim]{text}[/dim]")


def line(place: Place, cell: dict[str, Any]) -> str:
    """A finished cell in one line: measured, and what was expected, milliseconds a token."""
    parts = []
    for name, mode in cell["modes"].items():
        expected = cell["predicted"].get(name)
        block = f" g {mode['g']}" if "g" in mode else ""
        misses = f" {mode['replay_misses']:.1%} not recorded" if mode.get("replay_misses", 0) > 0.01 else ""
        parts.append(f"{name}{block} {mode['itl_ms_mean']:.1f}" + (f" ({expected:.1f})" if expected else "") + misses)
    ratios = cell["ratios"]
    best = f"; {ratios['itl']:.2f} of {ratios['best_baseline']}" if "itl" in ratios else ""
    crowd = f", {ratios['tokens_per_s']:.2f} of its throughput" if best and place.sessions > 1 else ""
    return f"{place}: {', '.join(parts)}{best}{crowd}"


def write_out(whole: dict[str, Any], folder: Path, stem: str) -> None:
    """STEM.md with its pictures, and STEM.json."""
    from loadgen.grid_plots import plots

    shown = plots(whole, folder, stem)
    (folder / f"{stem}.md").write_text(markdown(whole, shown))
    report.write(whole, folder / f"{stem}.json")


def _modes(text: str) -> tuple[str, ...]:
    asked = options.words(text, "--modes")
    if unknown := [name for name in asked if name not in ALL_MODES]:
        message = f"no such mode: {', '.join(unknown)}; there are {', '.join(ALL_MODES)}"
        raise typer.BadParameter(message, param_hint="--modes")
    return tuple(name for name in ALL_MODES if name in asked)
