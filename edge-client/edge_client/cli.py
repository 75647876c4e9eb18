"""The command line `paceline`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import aiohttp
import typer
from pydantic import SecretStr
from rich.table import Table

from edge_client import system_view
from edge_client.api import GatewayApi
from edge_client.figures import counted
from edge_client.running import Options, Screen, chat, key_of, read_prompt, run_once
from paceline import models, wire
from paceline.errors import ModelError
from paceline.settings import Settings

app = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Talk to a large model in the cloud, with a small one here that drafts for it.",
)
models_app = typer.Typer(no_args_is_help=True, help="Model pairs on this machine.")
app.add_typer(models_app, name="models")

T = TypeVar("T")
Gateway = Annotated[
    str | None, typer.Option("--gateway", metavar="URL", help="Gateway to use (or PACELINE_GATEWAY_URL).")
]
Key = Annotated[str | None, typer.Option("--key", metavar="KEY", help="API key (better: PACELINE_API_KEY).")]
Model = Annotated[str | None, typer.Option("--model", "-m", metavar="PAIR", help="Model pair (or PACELINE_MODEL).")]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", "-n", metavar="N", min=1, help="Longest answer in tokens.")
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", metavar="X", min=0, max=10, help="0: the likeliest token.")
]
TopK = Annotated[int, typer.Option(metavar="N", min=0, help="Sample from the k likeliest tokens; 0: all.")]
TopP = Annotated[
    float, typer.Option(metavar="X", min=1e-6, max=1, help="Sample from the likeliest of this total probability.")
]
MinP = Annotated[
    float, typer.Option(metavar="X", min=0, max=1, help="Leave out tokens below this share of the likeliest's.")
]
Repetition = Annotated[
    float, typer.Option(metavar="X", min=0.01, max=10, help="Penalty on tokens seen before; 1: none.")
]
Presence = Annotated[float, typer.Option(metavar="X", min=-2, max=2, help="Penalty on tokens of the answer so far.")]
Frequency = Annotated[float, typer.Option(metavar="X", min=-2, max=2, help="The same, for each time they came.")]
Seed = Annotated[int | None, typer.Option(metavar="N", min=0, help="Same seed, same answer.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before this text; may be repeated.")
]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="Instructions that come before the conversation.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object with text, usage and figures, for scripts.")]
Report = Annotated[bool, typer.Option("--json", help="The gateway's report as one JSON object, for scripts.")]
ShowDrafts = Annotated[bool, typer.Option("--show-drafts", help="Colour tokens by how they came about.")]
ShowStats = Annotated[bool, typer.Option("--stats", help="Figures after the answer.")]
Drafting = Annotated[bool, typer.Option("--speculation/--no-speculation", help="Off: the cloud decodes by itself.")]
Hosted = Annotated[bool, typer.Option("--hosted", help="Let the cloud draft too; needs no model here.")]
MaxDraft = Annotated[
    int, typer.Option("--max-draft", metavar="N", min=1, max=wire.MAX_CHAIN_NODES, help="Longest draft block.")
]
Threads = Annotated[int | None, typer.Option("--draft-threads", metavar="N", min=1, help="Threads of the draft model.")]
Depth = Annotated[int, typer.Option("--depth", min=0, hidden=True)]
Fill = Annotated[bool, typer.Option("--fill/--no-fill", hidden=True)]


@app.command()
def run(  # noqa: PLR0917 (each is an option)
    prompt: Annotated[str | None, typer.Argument(help="The question; `-` or nothing reads stdin.")] = None,
    gateway: Gateway = None,
    key: Key = None,
    model: Model = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Repetition = 1.0,
    presence_penalty: Presence = 0.0,
    frequency_penalty: Frequency = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    system: System = None,
    as_json: Json = False,
    show_drafts: ShowDrafts = False,
    stats: ShowStats = False,
    speculation: Drafting = True,
    hosted: Hosted = False,
    max_draft: MaxDraft = 8,
    depth: Depth = 0,
    fill: Fill = True,
    draft_threads: Threads = None,
) -> None:
    """Answer one prompt."""
    options = Options(
        sampling=wire.Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        ),
        speculation=wire.Speculation(
            enabled=speculation, max_draft=max_draft, depth=depth, fill=fill, hosted=hosted
        ),
        max_tokens=max_tokens, seed=seed, stop=tuple(stop or ()), system=system, json=as_json,
        show_drafts=show_drafts, stats=stats,
    )  # fmt: skip
    text = read_prompt(prompt)
    if not text.strip():
        raise typer.BadParameter("the prompt is empty", param_hint="PROMPT")
    settings = _settings(gateway, key, model, draft_threads)
    raise typer.Exit(asyncio.run(run_once(settings, options, text, Screen())))


@app.command("chat")
def chat_command(  # noqa: PLR0917 (each is an option)
    gateway: Gateway = None,
    key: Key = None,
    model: Model = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    system: System = None,
    show_drafts: ShowDrafts = False,
    stats: ShowStats = False,
    speculation: Drafting = True,
    hosted: Hosted = False,
    draft_threads: Threads = None,
) -> None:
    """Have a conversation."""
    options = Options(
        sampling=wire.Sampling(temperature=temperature, top_p=top_p, min_p=min_p),
        speculation=wire.Speculation(enabled=speculation, hosted=hosted),
        max_tokens=max_tokens, seed=seed, system=system, show_drafts=show_drafts, stats=stats,
    )  # fmt: skip
    settings = _settings(gateway, key, model, draft_threads)
    raise typer.Exit(asyncio.run(chat(settings, options, Screen())))


@app.command()
def status(gateway: Gateway = None, key: Key = None, as_json: Report = False) -> None:
    """Who runs, who sits where, what the policy decided and why."""
    report = _asked(_settings(gateway, key), lambda api: api.system())
    if as_json:
        _print_json(report)
    else:
        Screen().out.print(system_view.system(report))


@app.command()
def drain(  # noqa: PLR0917 (each is an option)
    verifier: Annotated[str, typer.Argument(help="Name of a verifier, as `paceline status` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take sessions again; wakes it.")] = False,
    sleep: Annotated[bool, typer.Option("--sleep", help="Then let it give its GPU's memory up (vLLM).")] = False,
    gateway: Gateway = None,
    key: Key = None,
    as_json: Report = False,
) -> None:
    """Move sessions off a verifier; their streams go on.

    There must be another verifier. Needs an admin key.
    """
    screen = Screen()
    with screen.err.status(f"draining {verifier}" if not undo else f"giving {verifier} back"):
        report = _asked(_settings(gateway, key), lambda api: api.drain(verifier, undo=undo, sleep=sleep))
    if as_json:
        _print_json(report)
    elif undo:
        screen.out.print(f"{report.verifier} takes sessions again")
    else:
        moved = counted(report.moved, "session")
        asleep = ", and it sleeps" if report.asleep else ""
        text = f"moved {moved} off {report.verifier} in {report.seconds:.1f} s{asleep}"
        screen.out.print(text, markup=False, soft_wrap=True)
        if report.remaining:
            screen.err.print(f"still there: {counted(report.remaining, 'session')}", style="red")
            raise typer.Exit(1)


@models_app.command("list")
def models_list() -> None:
    """Pairs of the catalog, and which of them are on this machine."""
    settings = Settings.load()
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("pair", "context", "licence", "here", "made of"):
        table.add_column(column, overflow="fold")
    for pair in models.catalog(settings.catalog_file).values():
        table.add_row(pair.name, str(pair.context), pair.licence, _here(pair, settings), _made_of(pair))
    Screen().out.print(table)


@models_app.command("pull")
def models_pull(name: Annotated[str | None, typer.Argument(help="Pair; default: PACELINE_MODEL.")] = None) -> None:
    """Fetch a pair, quantise what is needed, check it. What is there already is kept."""
    settings, screen = Settings.load(), Screen()
    pair = name or settings.model
    with screen.err.status(f"pulling {pair}"):
        pulled = models.pull(pair, settings.models_dir, _stages(screen), extra=settings.catalog_file)
    screen.out.print(f"{pair} is in {pulled.folder}", markup=False, soft_wrap=True)


@models_app.command("verify")
def models_verify(name: Annotated[str | None, typer.Argument(help="Pair; default: PACELINE_MODEL.")] = None) -> None:
    """Read every byte of a pulled pair, and compare."""
    settings, screen = Settings.load(), Screen()
    pair = name or settings.model
    with screen.err.status(f"verifying {pair}"):
        models.verify(pair, settings.models_dir, _stages(screen), extra=settings.catalog_file)
    screen.out.print(f"{pair} is whole")


def _settings(gateway: str | None, key: str | None, model: str | None = None, threads: int | None = None) -> Settings:
    """The environment, the command line winning over it."""
    given: dict[str, Any] = {"gateway_url": gateway, "model": model, "draft_threads": threads}
    if key is not None:
        given["api_key"] = SecretStr(key)
    settings = Settings.load(**{name: value for name, value in given.items() if value is not None})
    if not re.match(r"https?://", settings.gateway_url):
        raise typer.BadParameter(f"`{settings.gateway_url}` is no http:// or https:// URL", param_hint="--gateway")
    return settings


def _asked(settings: Settings, question: Callable[[GatewayApi], Awaitable[T]]) -> T:
    async def ask() -> T:
        async with aiohttp.ClientSession() as http:
            return await question(GatewayApi(http, settings.gateway_url, key_of(settings)))

    return asyncio.run(ask())


def _print_json(message: wire.Message) -> None:
    typer.echo(wire.encode(message).decode())


def _stages(screen: Screen) -> Callable[[str], None]:
    """Each step as a line that stays. Both models of a pair may begin with the same one: it is told once."""
    told: set[str] = set()

    def show(line: str) -> None:
        if line not in told:
            told.add(line)
            screen.err.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)

    return show


def _made_of(pair: models.Pair) -> str:
    if pair.target is None or pair.draft is None:
        return "nothing: no model is run"
    formats = f"target {pair.target.quantize or 'as it is'}, draft {pair.draft.quantize or 'as it is'}"
    origins = dict.fromkeys(_origin(source.source) for source in (pair.target, pair.draft))
    return f"{formats}; {', '.join(origins)}"


def _origin(source: str) -> str:
    """The package, or the whole file or hub address."""
    return source.partition("/")[0] if source.startswith("package:") else source


def _here(pair: models.Pair, settings: Settings) -> str:
    if pair.simulated:
        return "simulated"
    try:
        models.find(pair.name, settings.models_dir, extra=settings.catalog_file)
    except ModelError:
        return "no"
    return "yes"
