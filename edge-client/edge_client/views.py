"""What a person, a pipe or a script sees of one session.

Answers go to stdout, everything about them to stderr, so that `paceline run ... > file` holds the text alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import orjson
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from edge_client.events import Committed, Cut, Event, Finished, Opened, Reading, Resumed
from edge_client.figures import figures, stats_json
from edge_client.stats import Stats
from edge_client.wrapping import WordWrap


class View(Protocol):
    def stage(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Before the first token: what is being done now."""
        ...

    def on(self, event: Event) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None:
        """Put the terminal back in order; may be called twice."""
        ...


class _Share(BarColumn):
    """A bar where it is known how much there is to do, else nothing."""

    def render(self, task: Task) -> Any:
        return super().render(task) if task.total else Text()


class _Count(MofNCompleteColumn):
    def render(self, task: Task) -> Text:
        return super().render(task) if task.total else Text()


class Stages:
    """The line that moves until the first token is there: what is being done, how far, for how long. On a terminal
    only."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), _Share(bar_width=24), _Count(), TimeElapsedColumn(),
            console=console, transient=True,
        )  # fmt: skip
        self._task: TaskID | None = None

    def show(self, what: str, done: int = 0, total: int | None = None) -> None:
        if not self._progress.console.is_terminal:
            return
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(what, total=total or 0, completed=done)
        else:  # rich takes a total of None for "as before"
            self._progress.update(self._task, description=what, total=total or 0, completed=done)

    def stop(self) -> None:
        if self._task is not None:
            self._task = None
            self._progress.stop()
            for task in list(self._progress.task_ids):
                self._progress.remove_task(task)


class PlainView:
    """Text as it is decided: wrapped on a terminal, to the byte elsewhere."""

    def __init__(self, out: Console, err: Console, *, stats: bool = False) -> None:
        self._out, self._err, self._stats = out, err, stats
        self._stages = Stages(err)
        self._wrap = WordWrap() if out.is_terminal and not out.is_dumb_terminal else None
        self._mid_line = False

    def stage(self, what: str, done: int = 0, total: int | None = None) -> None:
        self._stages.show(what, done, total)

    def note(self, text: str) -> None:
        if self._out.is_terminal:  # elsewhere the answer must hold nothing of ours
            self._break_line()
        self._err.print(text, style="yellow", highlight=False, markup=False)

    def on(self, event: Event) -> None:
        show_progress(self._stages, event)
        if isinstance(event, Committed) and event.text:
            self._stages.stop()
            self._write(event.text)
        elif isinstance(event, Cut):
            self.note(f"[link lost: {event.reason}; reconnecting]")
            self._stages.show("reconnecting")
        elif isinstance(event, Resumed):
            self._stages.stop()
            self.note(f"[back; going on at token {event.position}]")
        elif isinstance(event, Finished):
            self._finished(event)

    def close(self) -> None:
        self._stages.stop()
        self._break_line()

    def _write(self, text: str) -> None:
        self._out.file.write(text if self._wrap is None else self._wrap.feed(text, self._out.width))
        self._out.file.flush()
        self._mid_line = not text.endswith("\n") if self._wrap is None else self._wrap.column > 0

    def _break_line(self) -> None:
        if self._mid_line:
            self._write("\n")

    def _finished(self, event: Finished) -> None:
        self.close()
        show_end(self._err, event)
        if self._stats and (event.error is None or event.stats.completion_tokens):
            self._err.print(figures(event.stats))


class JsonView:
    """One JSON object on stdout when the session has ended."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._kinds: list[str] = []
        self._opened: Opened | None = None

    def stage(self, what: str, done: int = 0, total: int | None = None) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...

    def on(self, event: Event) -> None:
        if isinstance(event, Opened):
            self._opened = event
        elif isinstance(event, Committed):
            self._text.append(event.text)
            self._tokens += event.tokens
            self._kinds.append(event.kinds)
        elif isinstance(event, Finished):
            self._print(event)

    def _print(self, event: Finished) -> None:
        session = None if self._opened is None else self._opened.session
        seed = None if self._opened is None else self._opened.seed
        answer: dict[str, Any] = {
            "text": "".join(self._text),
            "finish_reason": event.finish,
            "session": session,
            "seed": seed,
            "tokens": self._tokens,
            "kinds": "".join(self._kinds),
            "usage": usage_json(event.stats),
            "stats": stats_json(event.stats),
        }
        if event.error is not None:
            answer["error"] = {"code": event.error.code, "message": event.error.message, "status": event.error.status}
        self._out.file.write(orjson.dumps(answer).decode() + "\n")
        self._out.file.flush()


def usage_json(stats: Stats) -> dict[str, Any]:
    """As the gateway reports usage to plain clients."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        "speculation": {
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "by_source": stats.by_source,
            "verifier_steps": stats.counters.steps,
        },
    }


def show_progress(stages: Stages, event: Event) -> None:
    if isinstance(event, Opened):
        stages.show(f"the cloud reads {event.prompt_length} prompt tokens")
    elif isinstance(event, Reading):
        stages.show("the cloud reads the prompt", event.fed, event.total)


def show_end(err: Console, event: Finished) -> None:
    """Why it ended, where that is not what everybody expects."""
    if event.finish == "cancelled":
        where = (
            "ended in the cloud too" if event.confirmed else "the cloud could not be told; it ends by itself in 60 s"
        )
        err.print(f"[cancelled; {where}]", style="yellow", highlight=False, markup=False)
    elif event.finish == "length":
        tokens = event.stats.completion_tokens
        err.print(f"[stopped at the limit of {tokens} tokens]", style="dim", highlight=False, markup=False)
