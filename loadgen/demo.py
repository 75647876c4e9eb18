"""`python -m loadgen demo`: the whole line on one machine, streamed by the real command line, then a table."""

from __future__ import annotations

import asyncio
import sys

from rich.console import Console
from rich.markup import escape

from loadgen import report
from loadgen.compare import Comparison, Plan
from loadgen.prompts import EVERYDAY, PromptSet
from loadgen.rig import Rig, rig
from paceline.errors import FatalError
from paceline.settings import Settings, child_environment

RTT_MS = 60.0
TOKENS = 96
BLOCK = 6
TABLED = 2
"""Prompts of the table."""
ANSWER_S = 300.0
MODES = ("cloud", "sync", "deep", "paceline")
READING = "acceptance: accepted / verified drafts. tokens/step: tokens a verifier step brings."
_SMOLLM2 = (
    'This pair: the "large" model has only 135M parameters, a plain step costs about as much as a draft. Beyond a '
    "short link paceline, which fills with plain steps, is at best about as fast as cloud; sync pays every round trip; "
    "deep shows how many verifier steps drafts save."
)
_SMOLLM2_HI = (
    "This pair: nearly every draft fits, since it is the target at 5 bits, and a plain step costs about as much as a "
    "draft. deep shows what a window of fitting drafts brings; paceline fills bubbles with plain steps besides, which "
    "brings the first token early and costs some of that."
)
NOTES = {"smollm2": _SMOLLM2, "smollm2-hi": _SMOLLM2_HI}
"""How to read the table: of the pairs that are one model at two precisions, both on llama.cpp."""


async def demo(pair: str, console: Console, prompts: PromptSet = EVERYDAY, engine: str = "llama") -> int:
    """The exit code: 0 when the answer (to the first prompt) was streamed and the texts agree, or differ at near ties
    only."""
    with console.status("one moment") as status:
        async with rig(pair, lambda text: console.print(text, style="dim"), rtt_ms=RTT_MS, engine=engine) as standing:
            status.stop()
            await _stream(standing, console, prompts.text(0))
            return await _table(standing, console, prompts)


async def _stream(standing: Rig, console: Console, prompt: str) -> None:
    """Run `paceline run` as a user would, over the relay."""
    arguments = ["run", "--max-tokens", str(TOKENS), "--show-drafts", "--stats", "--", prompt]
    console.print(f"the edge client, {RTT_MS:.0f} ms of round trip away:\n", style="dim", highlight=False)
    console.print(f'[bold]$ paceline run[/bold] "{escape(brief(prompt))}" --show-drafts\n', highlight=False)
    settings = Settings.load(gateway_url=standing.far_url, api_key=standing.stack.key, model=standing.pair)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "edge_client", *arguments, env=child_environment(settings.environment(), **_terminal())
    )
    async with asyncio.timeout(ANSWER_S):
        code = await process.wait()
    if code:
        raise FatalError(f"the edge client ended with code {code}")


def brief(prompt: str) -> str:
    """Its first line, and a sign that there are more."""
    first, *more = prompt.splitlines()
    return f"{first} ..." if more else first


def _terminal() -> dict[str, str]:
    """What the child needs to know of the terminal to colour its output."""
    console = Console()
    size = {"COLUMNS": str(console.width)}
    return {**size, "TERM": "xterm-256color"} if console.is_terminal else size


async def _table(standing: Rig, console: Console, prompts: PromptSet) -> int:
    texts = prompts.texts[:TABLED]
    plan = Plan(
        rtts_ms=(RTT_MS,), prompts=texts, tokens=TOKENS, repeats=1, blocks=(BLOCK,), edge=False, prompt_set=prompts.name
    )  # fmt: skip
    console.print("\n[dim]the same prompts, decoded in four ways[/dim]")
    with console.status("") as status:
        result = await Comparison(standing, plan, status.update).report()
    for cell in result["cells"]:
        console.print(report.table(cell, report.BRIEF))
    told = {verifier.engine for verifier in (await standing.system()).verifiers} == {"llama"}
    notes = [NOTES[standing.pair]] if told and standing.pair in NOTES else []
    console.print(READING, *notes, style="dim", sep="\n", highlight=False)
    console.print(report.verdict(result, MODES))
    return 0 if report.only_near_ties(result) else 1
