"""Drafts on their way to the batcher, and verdicts on their way back. Belongs to paceline.wire."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from paceline.wire_parts import (
    MAX_CHAIN_NODES,
    MAX_CHAINS,
    Count,
    Failure,
    Finish,
    LogprobEntry,
    Message,
    NodeId,
    Part,
    Position,
    SessionId,
    Source,
    TokenId,
)

KINDS = {"e": "accepted from edge", "h": "accepted from hosted", "l": "accepted from lookup",
         "c": "corrected", "b": "bonus", "f": "filled"}  # fmt: skip
KIND_OF_SOURCE: dict[str, str] = {"edge": "e", "hosted": "h", "lookup": "l"}


class Chain(Part, frozen=True, kw_only=True):
    """Nodes first, first+1, ... each the child of the one before; the first hangs under node `after`, or under the
    committed prefix of length `at`. conf: one byte a token, round(255 * confidence)."""

    first: NodeId
    position: Position
    tokens: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_CHAIN_NODES)]
    conf: bytes = b""
    after: NodeId | None = None
    at: Position | None = None

    def __post_init__(self) -> None:
        if (self.after is None) == (self.at is None):
            raise ValueError("a chain has exactly one of `after` and `at`")
        if self.at is not None and self.at != self.position:
            raise ValueError(f"`at` {self.at} differs from `position` {self.position}")
        if self.after is not None and self.after >= self.first:
            raise ValueError(f"`after` {self.after} is not below `first` {self.first}")
        if self.conf and len(self.conf) != len(self.tokens):
            raise ValueError(f"`conf` has {len(self.conf)} bytes for {len(self.tokens)} tokens")


class DraftBlock(Message, frozen=True, kw_only=True, tag="draft"):
    session: SessionId
    source: Source
    incarnation: Count
    chains: Annotated[tuple[Chain, ...], Meta(min_length=1, max_length=MAX_CHAINS)]
    t_sent: Count = 0
    """Milliseconds on the source's own clock; echoed in Verdict.timing."""
    connection: Count = 0
    """Set by the gateway, never by the client: the connection that the block came over."""
    t_received: float = 0.0
    """Set by the gateway: Unix seconds at which the block came in (for overhead_ms)."""

    def __post_init__(self) -> None:
        expected = self.chains[0].first
        for chain in self.chains:
            if chain.first != expected:
                raise ValueError(f"chain starts at node {chain.first}, {expected} was next")
            expected += len(chain.tokens)


class Counters(Part, frozen=True, kw_only=True):
    """Running totals of one session. drafted: nodes received from sources; verified: nodes put into steps; accepted:
    by source; rejected: first mismatches (acceptance `a` = accepted / (accepted + rejected))."""

    drafted: dict[Source, int] = {}
    verified: int = 0
    accepted: dict[Source, int] = {}
    rejected: int = 0
    verified_by: dict[Source, int] = {}
    """`verified` by source, and below `rejected` by the source of the node that did not fit."""
    rejected_by: dict[Source, int] = {}
    duplicate: int = 0
    stale: int = 0
    overflow: int = 0
    refused: int = 0
    steps: int = 0
    """Verify steps that this session was part of, prefill chunks left out."""
    step_tokens: int = 0
    """Tokens fed in those steps."""
    timed_steps: int = 0
    """Those of them that read nothing of the prompt, and below the milliseconds that they took, others' share in."""
    step_ms: float = 0.0
    filled: int = 0
    bonus: int = 0
    corrected: int = 0


class Timing(Part, frozen=True, kw_only=True):
    """Echo for the source's round-trip estimate: the block's t_sent, ms it waited before a step, ms of that step."""

    t_sent: Count
    wait_ms: float
    step_ms: float


class Verdict(Message, frozen=True, kw_only=True, tag="verdict"):
    """Newly committed `tokens` from `at` on; kinds: one letter of KINDS each. May be empty (seen, price, finish)."""

    session: SessionId
    epoch: Count
    at: Position
    tokens: tuple[TokenId, ...] = ()
    kinds: str = ""
    logprobs: tuple[LogprobEntry, ...] | None = None
    counters: Counters | None = None
    seen: dict[Source, tuple[int, int]] = {}
    """Per source: incarnation and highest contiguous node id processed."""
    gap: tuple[Source, ...] = ()
    finish: Finish | None = None
    error: Failure | None = None
    price: float | None = None
    timing: Timing | None = None
    window_cap: int | None = None
    """Most nodes a source may hold in flight, when the policy caps it."""
    fed: Position | None = None
    """While the prompt is read: how many of its tokens the verifier holds. Absent once the first token is out."""
    connection: Count = 0
    """For gateways: the session belongs to this connection now, every lower one is superseded. 0: nothing to tell."""
