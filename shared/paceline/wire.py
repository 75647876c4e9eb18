"""Every message on the bus and on the WAN: frozen structs, one tag each, validated on decoding.

Between services: JSON by orjson with full field names, readable with `nats sub`. On the WAN: the same messages with
the short names of SHORT_KEYS (`encode_wan`, `decode_wan`). A message that does not validate raises WireError, which
names the field. Words (draft, chain, tip, committed, ...) are defined in docs/protocol.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson
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

KINDS = {"e": "accepted from edge", "h": "accepted from hosted", "l": "accepted from lookup",
         "c": "corrected", "b": "bonus", "f": "filled"}  # fmt: skip
KIND_OF_SOURCE: dict[str, str] = {"edge": "e", "hosted": "h", "lookup": "l"}


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


# --- drafts and verdicts -------------------------------------------------------------------------------------------


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


# --- verifying -----------------------------------------------------------------------------------------------------


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


class StepTable(Part, frozen=True, kw_only=True):
    """Learned step time of one verifier: `ms` of a step that feeds `tokens` (same length, growing) without context, and
    `context_ms` more for each token of KV that its sessions hold. samples: steps that it was learned from."""

    tokens: tuple[int, ...]
    ms: tuple[float, ...]
    context_ms: float = 0.0
    samples: int = 0


class VerifierStatus(Message, frozen=True, kw_only=True, tag="verifier_status"):
    """1 Hz, and at once on a change of state."""

    verifier: Name
    model: Name
    fingerprint: str
    engine: str
    simulated: bool
    state: Literal["loading", "ready", "draining", "stopped", "failed"]
    context: int
    cells_total: int
    cells_used: int
    sessions: int
    busy: float
    """Share of the last second spent in steps, 0..1."""
    queue: int
    steps: int
    step_tokens: int
    step_ms: dict[int, float] = {}
    curve: StepTable | None = None
    """None before anything was learned."""
    t_sent: float = 0.0
    detail: str = ""
    silent_s: float = 0.0
    """Set by the policy in a SystemReport: seconds since t_sent, when no newer status came in time; 0: it is fresh."""


class Probe(Message, frozen=True, kw_only=True, tag="probe"):
    """Are you alive? Answered with Ack at once."""


# --- policy, placement, drain --------------------------------------------------------------------------------------


class BatcherStatus(Message, frozen=True, kw_only=True, tag="batcher_status"):
    batcher: Name
    model: Name
    sessions: int
    parked: int
    waiting: int
    """Runnable sessions that were not in the last step."""
    partitions: int
    committed: int
    drafted: int
    accepted: int
    filled: int
    stale: int
    placements: dict[str, int] = {}
    """Sessions by verifier."""
    overhead_ms_p50: float = 0.0
    """Draft block received by the gateway to verify step started, when the verifier was idle."""
    t_sent: float = 0.0
    silent_s: float = 0.0
    """As in VerifierStatus."""


class DrafterStatus(Message, frozen=True, kw_only=True, tag="drafter_status"):
    drafter: Name
    model: Name
    engine: str
    simulated: bool
    sessions: int
    drafted: int
    state: Literal["loading", "ready", "failed"]
    draft_ms: float = 0.0
    """One drafted token, smoothed; 0 before the first."""
    t_sent: float = 0.0
    detail: str = ""
    silent_s: float = 0.0
    """As in VerifierStatus."""


class PolicyDecision(Message, frozen=True, kw_only=True, tag="policy"):
    """What the batchers obey until the next one; `version` grows. reasons: one line for people each."""

    model: Name
    version: Count
    fill: bool
    window_cap: int
    admit: tuple[str, ...]
    """Verifiers that take new sessions, best first; empty: any ready one."""
    reasons: tuple[str, ...] = ()
    t_sent: float = 0.0


class DrainRequest(Message, frozen=True, kw_only=True, tag="drain"):
    """Move all sessions off `verifier` (undo=False), or let it take sessions again."""

    verifier: Name
    undo: bool = False


class DrainReport(Message, frozen=True, kw_only=True, tag="drained"):
    verifier: Name
    moved: int
    remaining: int
    seconds: float


class PlacementQuery(Message, frozen=True, kw_only=True, tag="placement_query"):
    """To every batcher of a model: which of your sessions sit on `verifier`?"""

    verifier: Name


class PlacementList(Message, frozen=True, kw_only=True, tag="placements"):
    batcher: Name
    sessions: tuple[SessionId, ...]


class SessionMove(Message, frozen=True, kw_only=True, tag="move"):
    """To the session's batcher: from the next step on use `verifier`, which was warmed up to `warmed` tokens."""

    session: SessionId
    verifier: Name
    warmed: Position = 0


class SystemQuery(Message, frozen=True, kw_only=True, tag="system_query"):
    """To the policy: what do you see?"""


class SystemReport(Message, frozen=True, kw_only=True, tag="system"):
    verifiers: tuple[VerifierStatus, ...]
    batchers: tuple[BatcherStatus, ...]
    drafters: tuple[DrafterStatus, ...]
    decisions: tuple[PolicyDecision, ...]


ALL_MESSAGES: tuple[type[Message], ...] = (
    DraftBlock, Verdict, SessionOpen, SessionOpened, Refused, SessionResume, SessionClose, Presence, Ack, Hello,
    Welcome, Ping, Pong, HostedOpen, HostedStop, VerifyBatch, VerifyResult, VerifierRelease, VerifierStatus, Probe,
    BatcherStatus, DrafterStatus, PolicyDecision, DrainRequest, DrainReport, PlacementQuery, PlacementList,
    SessionMove, SystemQuery, SystemReport,
)  # fmt: skip
AnyMessage = (
    DraftBlock | Verdict | SessionOpen | SessionOpened | Refused | SessionResume | SessionClose | Presence | Ack
    | Hello | Welcome | Ping | Pong | HostedOpen | HostedStop | VerifyBatch | VerifyResult | VerifierRelease
    | VerifierStatus | Probe | BatcherStatus | DrafterStatus | PolicyDecision | DrainRequest | DrainReport
    | PlacementQuery | PlacementList | SessionMove | SystemQuery | SystemReport
)  # fmt: skip

M = TypeVar("M", bound=Message)

SHORT_KEYS: dict[str, str] = {
    "type": "y", "session": "s", "source": "o", "incarnation": "i", "chains": "c", "first": "f", "position": "p",
    "tokens": "t", "conf": "k", "after": "a", "at": "@", "t_sent": "m", "epoch": "e", "kinds": "d", "seen": "n",
    "timing": "g", "wait_ms": "w", "step_ms": "v", "price": "r", "gap": "q", "finish": "z", "counters": "u",
    "logprobs": "l", "window_cap": "b",
}  # fmt: skip
LONG_KEYS = {short: long for long, short in SHORT_KEYS.items()}


def encode(message: Message) -> bytes:
    """JSON with full names, for the bus."""
    return orjson.dumps(msgspec.to_builtins(message, str_keys=True))


def decode(data: bytes, *kinds: type[M]) -> M:
    """The message in `data`; with `kinds` given, another type is a WireError too. Raises nothing else."""
    return _convert(_parse(data), kinds)


def encode_wan(message: Message) -> bytes:
    """JSON with short names, for WebSocket frames."""
    return orjson.dumps(_renamed(msgspec.to_builtins(message, str_keys=True), SHORT_KEYS))


def decode_wan(data: bytes, *kinds: type[M]) -> M:
    if len(data) > MAX_WAN_BYTES:
        raise WireError(f"a frame of {len(data)} bytes is over the bound of {MAX_WAN_BYTES}")
    try:
        value = _renamed(_parse(data), LONG_KEYS)
    except RecursionError:
        raise WireError("nested too deeply") from None
    return _convert(value, kinds)


def prefix_hash(tokens: Sequence[int] | Iterable[int]) -> str:
    """blake2b, 8 bytes, in hex, over the little-endian uint32 token ids."""
    ids = tuple(tokens)
    return hashlib.blake2b(struct.pack(f"<{len(ids)}I", *ids), digest_size=8).hexdigest()


def _parse(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise WireError(f"not JSON: {error}") from error


def _convert(value: Any, kinds: tuple[type[M], ...]) -> M:
    try:
        message: Any = msgspec.convert(value, AnyMessage, str_keys=True)
    except msgspec.ValidationError as error:
        raise WireError(str(error)) from error
    if kinds and not isinstance(message, kinds):
        wanted = ", ".join(str(kind.__struct_config__.tag) for kind in kinds)
        raise WireError(f"a message of type `{type(message).__struct_config__.tag}`, expected {wanted}")
    return message  # type: ignore[no-any-return]


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {names.get(key, key): _renamed(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(item, names) for item in value] if value and isinstance(value[0], dict) else value
    return value
