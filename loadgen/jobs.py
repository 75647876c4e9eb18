"""What a report asks of its edge process, and what comes back: JSON lines over the process's standard streams."""

from __future__ import annotations

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
    """One completion of `prompt` (a user's message). Answered with Run. alone: by the draft model itself."""

    prompt: str
    max_tokens: int
    speculation: Speculation
    min_tokens: int = 0
    temperature: float = 0.0
    seed: int = 1
    alone: bool = False
    logprobs: int | None = None


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


class Trouble(Struct, frozen=True, tag="trouble"):
    """The job could not be done; the process lives."""

    message: str


Command = Connect | Job
Reply = Connected | Run | Trouble


def encode(message: Command | Reply) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode_command(line: bytes) -> Command:
    return msgspec.json.decode(line, type=Command)


def decode_reply(line: bytes) -> Reply:
    return msgspec.json.decode(line, type=Reply)
