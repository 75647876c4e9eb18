"""Verify steps: what the batcher asks of a verifier, and what comes back. Belongs to paceline.wire."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from paceline.wire_parts import (
    MAX_CHAIN_NODES,
    Count,
    Failure,
    LogprobEntry,
    Message,
    Part,
    Position,
    Sampling,
    Seed,
    SessionId,
    TokenId,
)


class History(Part, frozen=True, kw_only=True):
    """Committed tokens c[start..start+len)."""

    start: Position
    tokens: tuple[TokenId, ...]


class VerifyItem(Part, frozen=True, kw_only=True):
    """See paceline.engine.TargetItem. want: none (a prefill chunk), choice, or logprobs (`logprobs` is the top N).

    prefix_hash is over c[0..at) for an item that wants a choice, and over c[0..history.start) for a prefill chunk.
    """

    session: SessionId
    tenant: str
    epoch: Count
    at: Position
    prompt_length: Count
    prefix_hash: str
    seed: Seed
    sampling: Sampling = Sampling()
    choice: Count = 0
    history: History | None = None
    tokens: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_CHAIN_NODES)] = ()
    want: Literal["none", "choice", "logprobs"] = "choice"
    logprobs: Count = 0


class VerifyBatch(Message, frozen=True, kw_only=True, tag="verify"):
    batch: str
    items: tuple[VerifyItem, ...]


class VerifyOutcome(Part, frozen=True, kw_only=True):
    """Exactly one of: a decision (token and margins), need_from, fed, error."""

    session: SessionId
    accepted: Count = 0
    token: TokenId | None = None
    margins: tuple[float, ...] = ()
    """Best minus second-best score per decided position; 1e9 stands for a sole survivor."""
    logprobs: tuple[LogprobEntry, ...] | None = None
    need_from: Position | None = None
    fed: Position | None = None
    """Ledger length after a prefill chunk."""
    error: Failure | None = None


class VerifyResult(Message, frozen=True, kw_only=True, tag="verified"):
    batch: str
    verifier: str
    step_ms: float
    items: tuple[VerifyOutcome, ...]
    t_started: float = 0.0
    """Unix seconds at which the step began."""


class VerifierRelease(Message, frozen=True, kw_only=True, tag="release"):
    """The session ended or moved away; KV may go. A release below the ledger's epoch is ignored."""

    session: SessionId
    epoch: Count = 0


class Probe(Message, frozen=True, kw_only=True, tag="probe"):
    """Are you alive? Answered with Ack at once."""
