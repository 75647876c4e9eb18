"""How a session's record lies in Redis: a hash with static JSON, a string of token ids, a string of kinds, a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline import wire
from paceline.errors import StaleEpoch
from paceline.store import Appended, Rejected, SessionRecord


class Static(msgspec.Struct, frozen=True):
    """What never changes in a session's record, as JSON in the hash."""

    tenant: str
    opened: wire.SessionOpen
    secret: str
    seed: int
    prompt_length: int
    max_tokens: int
    created: float


def static_of(record: SessionRecord) -> Static:
    return Static(
        tenant=record.tenant,
        opened=record.opened,
        secret=record.secret,
        seed=record.seed,
        prompt_length=record.prompt_length,
        max_tokens=record.max_tokens,
        created=record.created,
    )


def pack(tokens: Sequence[int]) -> bytes:
    """uint32, little-endian."""
    return b"".join(item.to_bytes(4, "little") for item in tokens)


def unpack(data: bytes) -> tuple[int, ...]:
    return tuple(int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4))


def encoded(value: Any) -> bytes:
    return msgspec.json.encode(value)


def appended(answer: list[Any]) -> Appended | Rejected:
    if answer[0] == b"ok":
        return Appended(unpack(answer[1]), answer[2].decode(), answer[3].decode() or None)
    return Rejected(answer[0].decode(), int(answer[1]), int(answer[2]))


def record_of(session: str, answer: list[Any]) -> SessionRecord | None:
    if not answer:
        return None
    if answer[0] == b"stale_epoch":
        raise StaleEpoch(f"session {session} is at epoch {int(answer[1])}")
    _, static, epoch, counters, finish, tokens, kinds, logprobs, connection, verifier = answer
    fixed = msgspec.json.decode(static, type=Static)
    return SessionRecord(
        session=session,
        tenant=fixed.tenant,
        opened=fixed.opened,
        secret=fixed.secret,
        seed=fixed.seed,
        prompt_length=fixed.prompt_length,
        max_tokens=fixed.max_tokens,
        epoch=int(epoch),
        tokens=unpack(tokens or b""),
        kinds=(kinds or b"").decode(),
        logprobs=tuple(msgspec.json.decode(entry, type=wire.LogprobEntry) for entry in logprobs),
        counters=msgspec.json.decode(counters, type=wire.Counters),
        finish=finish.decode() or None,
        connection=int(connection),
        verifier=verifier.decode() or None,
        created=fixed.created,
    )
