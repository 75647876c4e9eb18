"""`paceline run` and `paceline chat`: from the command line's words to one or many sessions."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from rich.console import Console

from edge_client.api import GatewayApi
from edge_client.client import EdgeClient
from edge_client.draft_view import DraftView
from edge_client.drafts import Stage, load_draft
from edge_client.events import Committed, Event, Finished
from edge_client.interrupts import EXIT_CODE, Interrupts
from edge_client.line_input import LineInput
from edge_client.request import Request
from edge_client.views import JsonView, PlainView, View
from paceline import wire
from paceline.engine import DraftEngine
from paceline.errors import Unauthorized
from paceline.model_card import ModelCard
from paceline.settings import Settings

Message = dict[str, Any]
COMMANDS = {
    "/clear": "begin a new conversation",
    "/help": "show this",
    "Ctrl-C": "end the answer that is being written; at the prompt, leave",
    "Ctrl-D": "leave",
}


@dataclass(frozen=True)
class Options:
    """How to answer and what to show. `sampling` and the rest as in wire."""

    sampling: wire.Sampling
    speculation: wire.Speculation
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    system: str | None = None
    json: bool = False
    show_drafts: bool = False
    stats: bool = False

    def request(self, tokens: tuple[int, ...]) -> Request:
        return Request(
            tokens=tokens,
            sampling=self.sampling,
            max_tokens=self.max_tokens,
            stop=self.stop,
            seed=self.seed,
            speculation=self.speculation,
        )

    @property
    def drafts_here(self) -> bool:
        return self.speculation.enabled and not self.speculation.hosted


@dataclass
class Screen:
    """Answers to `out`, everything else to `err`."""

    out: Console = field(default_factory=lambda: Console(highlight=False))
    err: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))


def key_of(settings: Settings) -> str:
    if settings.api_key is None or not settings.api_key.get_secret_value():
        raise Unauthorized("no API key: set PACELINE_API_KEY or give --key", code="missing_api_key")
    return settings.api_key.get_secret_value()


async def run_once(settings: Settings, options: Options, prompt: str, screen: Screen) -> int:
    """Answer one prompt; the exit code."""
    opening = _quiet_view(options, screen)
    with Interrupts() as interrupts:
        try:
            async with _client(settings, options, opening.stage) as client:
                opening.stage("opening a session")
                view = _view(options, screen, client, opening)
                finished = await _answer(client, options, _conversation(options, prompt), view, interrupts)
                return _exit_code(finished, interrupts, screen)
        except asyncio.CancelledError:
            return EXIT_CODE
        finally:
            opening.close()


async def chat(settings: Settings, options: Options, screen: Screen) -> int:
    """A conversation: Ctrl-C during an answer ends that answer, at the prompt it ends the chat, as Ctrl-D does."""
    opening = PlainView(screen.out, screen.err, stats=options.stats)
    with Interrupts() as interrupts, LineInput() as lines:
        try:
            async with _client(settings, options, opening.stage) as client:
                opening.close()
                screen.err.print(f"{client.card.model} by {settings.gateway_url}; /help tells what else", markup=False)
                await _converse(client, options, lines, interrupts, screen)
                return 0
        except asyncio.CancelledError:
            return EXIT_CODE
        finally:
            opening.close()


async def _converse(
    client: EdgeClient, options: Options, lines: LineInput, interrupts: Interrupts, screen: Screen
) -> None:
    messages = _conversation(options, None)
    while (line := await lines.read("you> ")) is not None:
        word = line.strip()
        if word == "/clear":
            messages = _conversation(options, None)
            screen.err.print("[a new conversation]", markup=False)
        elif re.fullmatch(r"/[a-z]+", word):
            _help(word, screen)
        elif word:
            asked: list[Message] = [*messages, {"role": "user", "content": line}]
            view = _view(options, screen, client, PlainView(screen.out, screen.err, stats=options.stats))
            text, finished = await _spoken(client, options, asked, view, interrupts)
            if finished.error is None:
                messages = [*asked, {"role": "assistant", "content": text}]
            else:
                _explain(finished, screen)


def _help(word: str, screen: Screen) -> None:
    if word not in COMMANDS:
        screen.err.print(f"there is no command {word}:", style="yellow", markup=False)
    for name, what in COMMANDS.items():
        screen.err.print(f"  {name:<8}{what}", markup=False)


async def _spoken(
    client: EdgeClient, options: Options, messages: Sequence[Message], view: View, interrupts: Interrupts
) -> tuple[str, Finished]:
    text: list[str] = []
    recording = _Recording(view, text)
    finished = await _answer(client, options, messages, recording, interrupts)
    return "".join(text), finished


class _Recording:
    """A view that also keeps the text, for the conversation's next turn."""

    def __init__(self, view: View, text: list[str]) -> None:
        self.stage, self.note, self.close = view.stage, view.note, view.close
        self._view, self._text = view, text

    def on(self, event: Event) -> None:
        if isinstance(event, Committed):
            self._text.append(event.text)
        self._view.on(event)


async def _answer(
    client: EdgeClient, options: Options, messages: Sequence[Message], view: View, interrupts: Interrupts
) -> Finished:
    request = options.request(client.chat(messages))
    try:
        async with client.session(request, drafts=options.show_drafts) as session:
            with interrupts.watching(session, view.note):
                async for event in session:
                    view.on(event)
                    if isinstance(event, Finished):
                        return event
        raise AssertionError("a session ends with Finished")
    finally:
        view.close()


def _exit_code(finished: Finished, interrupts: Interrupts, screen: Screen) -> int:
    _explain(finished, screen)
    if interrupts.hit:
        return EXIT_CODE
    return 0 if finished.error is None else 1


def _explain(finished: Finished, screen: Screen) -> None:
    if finished.error is not None:
        screen.err.print(f"error: {finished.error.message} ({finished.error.code})", style="red", markup=False)


def _conversation(options: Options, prompt: str | None) -> list[Message]:
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, *([] if prompt is None else [{"role": "user", "content": prompt}])]


def _quiet_view(options: Options, screen: Screen) -> View:
    return JsonView(screen.out) if options.json else PlainView(screen.out, screen.err, stats=options.stats)


def _view(options: Options, screen: Screen, client: EdgeClient, opening: View) -> View:
    if not options.show_drafts or options.json:
        return opening
    opening.close()
    return DraftView(screen.out, screen.err, client.tokenizer)


@asynccontextmanager
async def _client(settings: Settings, options: Options, stage: Stage) -> AsyncIterator[EdgeClient]:
    """Connected, with the draft model loaded where drafts are made here."""
    url, key = settings.gateway_url, key_of(settings)
    stage(f"asking {url} about {settings.model}")
    async with aiohttp.ClientSession() as http:
        card = await GatewayApi(http, url, key).card(settings.model, settings.models_dir / "cards")
    engine = await _engine(card, settings, options, stage)
    try:
        stage(f"connecting to {url}")
        async with EdgeClient.connect(url, key, card=card, engine=engine) as client:
            yield client
    finally:
        if engine is not None:
            await engine.close()


async def _engine(card: ModelCard, settings: Settings, options: Options, stage: Stage) -> DraftEngine | None:
    return await load_draft(card, settings, stage) if options.drafts_here else None


def read_prompt(words: str | None) -> str:
    """The prompt from the command line, or all of stdin for `-` or nothing. May be empty: the caller refuses that."""
    if words is not None and words != "-":
        return words
    return sys.stdin.read() if not sys.stdin.isatty() else ""
