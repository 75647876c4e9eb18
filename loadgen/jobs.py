"""What a report asks of its edge process, and what comes back: JSON lines over the process's standard streams."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from paceline.wire import Counters, LogprobEntry, Speculation


class Connect(Struct, frozen=True, tag="connect"):
    """Link up with a gateway (again); the draft model is loaded at the first time. Answered with Connected."""

    url: str
    key: str
    model: str


class Connected(Struct, frozen=True, tag="connected"):
    simulated: bool


class Job(Struct, frozen=True, tag="job"):
    """One completion of `prompt` (a user's message). Answered with Run. alone: by the draft model itself. logit_bias:
    added to logits, by token id."""

    prompt: str
    max_tokens: int
    speculation: Speculation
    min_tokens: int = 0
    temperature: float = 0.0
    seed: int = 1
    alone: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] = {}


class Run(Struct, frozen=True, tag="run"):
    """One completion as the edge saw it.

    chunks: (milliseconds since the request, tokens that came then). bytes_up: draft frames for nodes_up tokens;
    bytes_down: verdict frames that committed two tokens or more, tokens_down in all. draft_ms: one drafted token.
    """

    tokens: tuple[int, ...]
    text: str
    kinds: str
    chunks: tuple[tuple[float, int], ...]
    finish: str
    prompt_tokens: int
    counters: Counters = Counters()
    bytes_up: int = 0
    nodes_up: int = 0
    bytes_down: int = 0
    tokens_down: int = 0
    draft_ms: float | None = None
    cuts: int = 0
    logprobs: tuple[LogprobEntry, ...] = ()


class Recall(Struct, frozen=True, tag="recall"):
    """Use this file of recorded drafts from here on (made when missing). Answered with Recalled."""

    file: str


class Recalled(Struct, frozen=True, tag="recalled"):
    """guesses: in the recording."""

    guesses: int


class Wave(Struct, frozen=True, tag="wave"):
    """Completions side by side, each over a link of its own. Answered with Waved.

    drafts: none come from the edge; `live` from the draft model; `replay` from the recording at `pace_ms`, the
    milliseconds of a draft model's pass by the tokens that it feeds, as if each session had a device of its own.
    """

    jobs: tuple[Job, ...]
    drafts: Literal["none", "live", "replay"] = "live"
    pace_ms: dict[int, float] = {}


class Drafting(Struct, frozen=True):
    """What a wave asked of the draft model. guesses: in all; misses: of them not in the recording when replayed; again:
    made live although the recording had them, `differing` of which named another token: the recorded one scored less
    by `gap` at most (logits; they differ in the last bits with the shape of a pass). passes: (tokens fed, milliseconds)
    of live passes that had the model to themselves."""

    guesses: int = 0
    misses: int = 0
    again: int = 0
    differing: int = 0
    gap: float = 0.0
    passes: tuple[tuple[int, float], ...] = ()

    @property
    def miss_share(self) -> float:
        return self.misses / self.guesses if self.guesses else 0.0


class Waved(Struct, frozen=True, tag="waved"):
    """runs: in the order of the jobs."""

    runs: tuple[Run, ...]
    drafting: Drafting = Drafting()

    @property
    def span_ms(self) -> float:
        """From the request to the last token of all."""
        return max(run.chunks[-1][0] for run in self.runs)


class Trouble(Struct, frozen=True, tag="trouble"):
    """The job could not be done; the process lives."""

    message: str


Command = Connect | Job | Recall | Wave
Reply = Connected | Run | Recalled | Waved | Trouble


def encode(message: Command | Reply) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode_command(line: bytes) -> Command:
    return msgspec.json.decode(line, type=Command)


def decode_reply(line: bytes) -> Reply:
    return msgspec.json.decode(line, type=Reply)
