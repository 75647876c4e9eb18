"""`--show-drafts`: the answer in the colours of how each token came about, drafts ahead of it as they are made.

Finished lines scroll away for good; only the last few are kept alive and redrawn, so that an answer longer than the
screen stays readable afterwards.
"""

from __future__ import annotations

from collections import deque

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from edge_client.events import Committed, Cut, Drafted, Event, Finished, Opened, Reading, Resumed
from edge_client.figures import DRAFTED_STYLE, KIND_STYLES, figures, legend
from edge_client.views import Stages, show_end, show_progress
from paceline.tokenizer import Detokenizer, Tokenizer

LIVE_LINES = 6
REFRESH_PER_S = 20


class Colours:
    """Committed tokens and their kinds in, coloured pieces of exactly the shown text out. Pure."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._held: deque[tuple[str, str]] = deque()

    def feed(self, tokens: tuple[int, ...], kinds: str, shown: str) -> list[tuple[str, str]]:
        """(text, kind) pieces that join to `shown`, which lags behind the tokens where characters or stop strings are
        incomplete."""
        for token, kind in zip(tokens, kinds, strict=True):
            if text := self._detokenizer.feed([token]):
                self._held.append((text, kind))
        return list(self._cut(shown))

    def _cut(self, shown: str) -> list[tuple[str, str]]:
        pieces: list[tuple[str, str]] = []
        left = shown
        while left:
            text, kind = self._held.popleft() if self._held else (left, "f")
            before = pieces.pop()[0] if pieces and pieces[-1][1] == kind else ""
            pieces.append((before + left[: len(text)], kind))
            if len(text) > len(left):
                self._held.appendleft((text[len(left) :], kind))
            left = left[len(text) :]
        return pieces


class Pending:
    """The drafts beyond what is decided. Pure."""

    def __init__(self) -> None:
        self._position = 0
        self.tokens: list[int] = []

    def drafted(self, position: int, token: int) -> None:
        del self.tokens[max(0, position - self._position) :]
        if not self.tokens:
            self._position = position
        self.tokens.append(token)

    def forgotten(self, position: int) -> None:
        del self.tokens[max(0, position - self._position) :]

    def committed(self, at: int, tokens: tuple[int, ...]) -> None:
        """Drop what was decided; a draft that was not the target's choice takes those after it along."""
        ours = self.tokens[max(0, at - self._position) :]
        fits = ours[: len(tokens)] == list(tokens[: len(ours)])
        self.tokens = ours[len(tokens) :] if fits else []
        self._position = at + len(tokens)


def finished_length(text: Text, console: Console, keep: int) -> int:
    """Characters of `text`, wrapped to the console, that make up all but its last `keep` lines."""
    cut, plain = 0, text.plain
    for line in text.wrap(console, console.width)[:-keep]:
        shown = line.plain.rstrip()
        cut = plain.index(shown, cut) + len(shown)
        cut += 1 if plain[cut : cut + 1] in ("\n", " ") else 0
    return cut


class DraftView:
    """Live on a terminal; elsewhere only the colours, where the console has any."""

    def __init__(self, out: Console, err: Console, tokenizer: Tokenizer) -> None:
        self._out, self._err, self._tokenizer = out, err, tokenizer
        self._colours, self._pending = Colours(tokenizer), Pending()
        self._stages = Stages(err)
        self._text = Text()
        self._kinds: dict[str, int] = {}
        self._link = ""
        self._live: Live | None = None

    def stage(self, what: str, done: int = 0, total: int | None = None) -> None:
        self._stages.show(what, done, total)

    def note(self, text: str) -> None:
        console = self._out if self._live is not None else self._err
        console.print(text, style="yellow", highlight=False, markup=False)

    def on(self, event: Event) -> None:
        if isinstance(event, Opened | Reading) and self._live is None:
            show_progress(self._stages, event)
        elif isinstance(event, Drafted):
            self._drafted(event)
        elif isinstance(event, Committed):
            self._committed(event)
        elif isinstance(event, Cut):
            self._link = f"link lost: {event.reason}; reconnecting"
            self._redraw()
        elif isinstance(event, Resumed):
            self._link = ""
            self._redraw()
        elif isinstance(event, Finished):
            self._finished(event)

    def close(self) -> None:
        self._stages.stop()
        if self._live is not None:
            self._live.update(self._text)
            self._live.stop()
            self._live = None
        elif self._text and not self._out.is_terminal:
            self._out.print()
        self._text = Text()

    def _drafted(self, event: Drafted) -> None:
        draft = event.draft
        if draft.kind == "forgotten":
            self._pending.forgotten(draft.position)
        else:
            self._pending.drafted(draft.position, draft.token)
        self._redraw()

    def _committed(self, event: Committed) -> None:
        self._pending.committed(event.at, event.tokens)
        for kind in event.kinds:
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
        pieces = self._colours.feed(event.tokens, event.kinds, event.text)
        fresh = Text.assemble(*((text.expandtabs(4), KIND_STYLES[kind]) for text, kind in pieces))
        self._text.append_text(fresh)
        if not self._out.is_terminal:
            self._out.print(fresh, end="", soft_wrap=True)
            return
        if self._live is None and self._text:
            self._start()
        self._let_go()
        self._redraw()

    def _start(self) -> None:
        self._stages.stop()
        self._live = Live(
            console=self._out, refresh_per_second=REFRESH_PER_S, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def _let_go(self) -> None:
        """Print lines that are complete and far enough up for good."""
        cut = finished_length(self._text, self._out, LIVE_LINES)
        if cut and self._live is not None:
            head, self._text = self._text.divide([cut])
            if head.plain.endswith("\n"):
                head.right_crop(1)
            self._live.console.print(head)

    def _redraw(self) -> None:
        if self._live is not None:
            self._live.update(self._body())

    def _body(self) -> RenderableType:
        drafted = self._tokenizer.decode(self._pending.tokens)
        text = Text.assemble(self._text, (drafted, DRAFTED_STYLE))
        return Group(text, Text(), Text(self._link, "yellow") if self._link else legend(self._kinds, self._out.width))

    def _finished(self, event: Finished) -> None:
        self.close()
        show_end(self._err, event)
        if event.error is None or event.stats.completion_tokens:
            self._err.print()
            self._err.print(legend(event.stats.kinds, self._err.width), highlight=False)
            self._err.print(figures(event.stats))
