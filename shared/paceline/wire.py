"""Every message on the bus and on the WAN: frozen structs, one tag each, validated on decoding.

Between services: JSON by orjson with full field names, readable with `nats sub`. On the WAN: the same messages with
the short names of SHORT_KEYS (`encode_wan`, `decode_wan`). A message that does not validate raises WireError, which
names the field. Words (draft, chain, tip, committed, ...) are defined in docs/protocol.md.

The structs are in wire_drafts, wire_sessions, wire_steps and wire_system, what they share in wire_parts; this module
knows all of them, turns them into bytes and back, and is where everybody else imports them from.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import orjson

from paceline.wire_drafts import KIND_OF_SOURCE, KINDS, Chain, Counters, DraftBlock, Timing, Verdict
from paceline.wire_parts import (
    MAX_CHAIN_NODES,
    MAX_CHAINS,
    MAX_COUNT,
    MAX_HELD_NODES,
    MAX_WAN_BYTES,
    MIN_REPETITION_PENALTY,
    Count,
    Failure,
    Finish,
    LogprobEntry,
    Message,
    Name,
    NodeId,
    Part,
    Position,
    Sampling,
    Seed,
    SessionId,
    Source,
    Speculation,
    TokenId,
    WireError,
)
from paceline.wire_sessions import (
    Ack,
    Bounds,
    Hello,
    HostedOpen,
    HostedStop,
    Ping,
    Pong,
    Presence,
    Refused,
    SessionClose,
    SessionOpen,
    SessionOpened,
    SessionResume,
    Welcome,
)
from paceline.wire_steps import History, Probe, VerifierRelease, VerifyBatch, VerifyItem, VerifyOutcome, VerifyResult
from paceline.wire_system import (
    BatcherStatus,
    DrafterStatus,
    DrainReport,
    DrainRequest,
    PlacementList,
    PlacementQuery,
    PolicyDecision,
    SessionMove,
    SleepRequest,
    StatusWanted,
    StepTable,
    SystemQuery,
    SystemReport,
    VerifierStatus,
)

__all__ = [
    "ALL_MESSAGES", "KINDS", "KIND_OF_SOURCE", "LONG_KEYS", "MAX_CHAINS", "MAX_CHAIN_NODES", "MAX_COUNT",
    "MAX_HELD_NODES", "MAX_WAN_BYTES", "MIN_REPETITION_PENALTY", "SHORT_KEYS", "Ack", "AnyMessage", "BatcherStatus",
    "Bounds", "Chain", "Count", "Counters", "DraftBlock", "DrafterStatus", "DrainReport", "DrainRequest", "Failure",
    "Finish", "Hello", "History", "HostedOpen", "HostedStop", "LogprobEntry", "Message", "Name", "NodeId", "Part",
    "Ping", "PlacementList", "PlacementQuery", "PolicyDecision", "Pong", "Position", "Presence", "Probe", "Refused",
    "Sampling", "Seed", "SessionClose", "SessionId", "SessionMove", "SessionOpen", "SessionOpened", "SessionResume",
    "SleepRequest",
    "Source", "Speculation", "StatusWanted", "StepTable", "SystemQuery", "SystemReport", "Timing", "TokenId", "Verdict",
    "VerifierRelease", "VerifierStatus", "VerifyBatch", "VerifyItem", "VerifyOutcome", "VerifyResult", "Welcome",
    "WireError", "decode", "decode_wan", "encode", "encode_wan", "prefix_hash",
]  # fmt: skip

ALL_MESSAGES: tuple[type[Message], ...] = (
    DraftBlock, Verdict, SessionOpen, SessionOpened, Refused, SessionResume, SessionClose, Presence, Ack, Hello,
    Welcome, Ping, Pong, HostedOpen, HostedStop, VerifyBatch, VerifyResult, VerifierRelease, VerifierStatus, Probe,
    BatcherStatus, DrafterStatus, PolicyDecision, DrainRequest, DrainReport, PlacementQuery, PlacementList,
    SessionMove, SleepRequest, StatusWanted, SystemQuery, SystemReport,
)  # fmt: skip
AnyMessage = (
    DraftBlock | Verdict | SessionOpen | SessionOpened | Refused | SessionResume | SessionClose | Presence | Ack
    | Hello | Welcome | Ping | Pong | HostedOpen | HostedStop | VerifyBatch | VerifyResult | VerifierRelease
    | VerifierStatus | Probe | BatcherStatus | DrafterStatus | PolicyDecision | DrainRequest | DrainReport
    | PlacementQuery | PlacementList | SessionMove | SleepRequest | StatusWanted | SystemQuery | SystemReport
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
