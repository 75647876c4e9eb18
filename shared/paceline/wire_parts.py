"""What messages are made of: bounds, checked scalars, base structs, shared parts. Belongs to paceline.wire."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from paceline.errors import BadRequest

MAX_CHAIN_NODES = 64
MAX_CHAINS = 16
MAX_HELD_NODES = 256
MAX_WAN_BYTES = 1 << 20
MAX_COUNT = (1 << 63) - 1
"""The largest integer in any message: JSON readers and Redis hold no more."""
MIN_REPETITION_PENALTY = 1e-6
"""A logit over it stays finite."""

TokenId = Annotated[int, Meta(ge=0, lt=1 << 24)]
Position = Annotated[int, Meta(ge=0, lt=1 << 24)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
NodeId = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_\-:/.]+$")]
SessionId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_\-]+$")]
Seed = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Source = Literal["edge", "hosted", "lookup"]
Finish = Literal["stop", "length", "cancelled", "error"]


class WireError(BadRequest):
    """Bytes that are no message of ours; the text names what was wrong."""

    code = "malformed_message"


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of all messages; the tag is the class's name."""


class Part(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the structs inside messages."""


class Sampling(Part, frozen=True, kw_only=True):
    """How the target chooses (docs/speculation.md section 1). temperature 0 is greedy, and so is one below
    coupling.MIN_TEMPERATURE; top_k 0 and top_p 1 mean off."""

    temperature: Annotated[float, Meta(ge=0, le=10)] = 1.0
    top_k: Count = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=10)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] = {}
    min_tokens: Count = 0
    end_ids: tuple[TokenId, ...] = ()
    """End tokens of the model, barred until min_tokens are out; the gateway or edge fills them in from the card."""


class Speculation(Part, frozen=True, kw_only=True):
    """What a client may ask of speculation. Modes of the same code: cloud-only is enabled=False; synchronous is
    depth=1, fill=False; deep is fill=False."""

    enabled: bool = True
    max_draft: Annotated[int, Meta(ge=1, le=MAX_CHAIN_NODES)] = 8
    """Longest chain put into one verify step, and longest draft block, in tokens."""
    depth: Count = 0
    """Draft blocks in flight at most; 0 means as many as the window needs."""
    fill: bool = True
    """Steps while no draft of the main source is held: look-up drafts, the cloud's own, or plain."""
    hosted: bool = False
    """Drafts come from the hosted drafter (clients without a draft model)."""
    alternatives: bool = True
    """Runner-ups with a short continuation beside the main chain, held where the target decides."""
    lookup: bool = True
    """The cloud may guess from repetitions in the committed tokens while nothing else is held."""
    assist: bool = True
    """The cloud's hosted drafter may fill bubbles of a session whose drafts come from the edge."""


class LogprobEntry(Part, frozen=True, kw_only=True):
    """Natural log-softmax of the raw logits; -9999.0 is the documented floor for minus infinity."""

    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


class Failure(Part, frozen=True, kw_only=True):
    """An error that ends a session or refuses a request: HTTP status, stable code, text for people."""

    status: int
    code: str
    message: str
    param: str | None = None
