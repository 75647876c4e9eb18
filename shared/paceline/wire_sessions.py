"""Opening, resuming and closing a session, an edge's connection, the hosted drafter. Belongs to paceline.wire."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from paceline.wire_parts import (
    MAX_CHAIN_NODES,
    MAX_CHAINS,
    MAX_HELD_NODES,
    MAX_WAN_BYTES,
    Count,
    Failure,
    Message,
    Name,
    Part,
    Position,
    Sampling,
    Seed,
    SessionId,
    Speculation,
    TokenId,
)

# --- opening, resuming, closing ------------------------------------------------------------------------------------


class SessionOpen(Message, frozen=True, kw_only=True, tag="open"):
    """A prompt (token ids of the target's vocabulary). The gateway sets session, tenant and connection-related fields;
    what an edge sends there is overwritten."""

    model: Name
    fingerprint: str
    tokens: tuple[TokenId, ...]
    sampling: Sampling = Sampling()
    stop: Annotated[tuple[str, ...], Meta(max_length=16)] = ()
    max_tokens: Count | None = None
    """None: up to the context."""
    seed: Seed | None = None
    choice: Count = 0
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    speculation: Speculation = Speculation()
    session: SessionId = "-"
    tenant: str = ""


class Bounds(Part, frozen=True, kw_only=True):
    """held: nodes of this source that the batcher holds at most; chain, chains: per block; bytes: a WAN frame."""

    held: int = MAX_HELD_NODES // 2
    chain: int = MAX_CHAIN_NODES
    chains: int = MAX_CHAINS
    bytes: int = MAX_WAN_BYTES


class SessionOpened(Message, frozen=True, kw_only=True, tag="opened"):
    session: SessionId
    secret: str
    """128 bits in hex; shown again to resume."""
    connection: Count
    epoch: Count
    seed: Seed
    prompt_length: Count
    max_tokens: Count
    """Completion tokens at most, context included."""
    position: Count
    """The tip at this moment; replay begins at the position that a resume named."""
    bounds: Bounds = Bounds()
    speculation: Speculation = Speculation()


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The answer to a request or frame that could not be served."""

    error: Failure
    session: SessionId | None = None
    bound: int | None = None
    retry_after_s: int | None = None


class SessionResume(Message, frozen=True, kw_only=True, tag="resume"):
    """position: tokens that the client holds (prompt included); prefix_hash over them (prefix_hash())."""

    session: SessionId
    secret: str
    position: Position
    prefix_hash: str
    tenant: str = ""


class SessionClose(Message, frozen=True, kw_only=True, tag="close"):
    """Cancel. Repeated until a finish is seen."""

    session: SessionId
    connection: Count = 0


class Presence(Message, frozen=True, kw_only=True, tag="presence"):
    """Soft state: the client of `session` was heard on `connection`; older than 2 s counts for nothing."""

    session: SessionId
    connection: Count
    t_sent: float
    """Unix time, seconds."""


class Ack(Message, frozen=True, kw_only=True, tag="ack"):
    """Done; nothing to add."""


# --- the connection of an edge ---------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First frame of an edge on the WAN."""

    key: str
    client: str = ""


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The key is good. ping_s: both sides ping at least this often; t_server: Unix seconds."""

    tenant: str
    ping_s: float = 0.5


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    t_sent: Count


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    t_sent: Count


# --- hosted drafter ------------------------------------------------------------------------------------------------


class HostedOpen(Message, frozen=True, kw_only=True, tag="hosted_open"):
    """Draft for this session: `tokens` are all committed ones; the drafter follows verdict.<session>."""

    session: SessionId
    model: Name
    epoch: Count
    tokens: tuple[TokenId, ...]
    sampling: Sampling
    seed: Seed
    prompt_length: Count
    partition: Count
    choice: Count = 0
    speculation: Speculation = Speculation()


class HostedStop(Message, frozen=True, kw_only=True, tag="hosted_stop"):
    session: SessionId
