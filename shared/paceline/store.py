"""The store ports: session records with fenced append, and leases. `store_redis` is the real one, `store_memory` serves
one process and tests; both pass tests/contract/test_store.py.

The promise: what `append` answered is as durable as the server's append-only setting; an append is atomic, a retry
after a lost answer changes nothing, a finish is never overwritten, and an old epoch never writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.wire import Counters, LogprobEntry, SessionOpen


@dataclass(frozen=True)
class SessionRecord:
    """A session as stored. tokens: prompt and completion; kinds: one letter a completion token."""

    session: str
    tenant: str
    opened: SessionOpen
    secret: str
    seed: int
    prompt_length: int
    max_tokens: int
    epoch: int
    tokens: tuple[int, ...]
    kinds: str = ""
    logprobs: tuple[LogprobEntry, ...] = ()
    counters: Counters = field(default_factory=Counters)
    finish: str | None = None
    connection: int = 0
    verifier: str | None = None
    created: float = 0.0

    @property
    def tip(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Append:
    """Write `tokens` at position `at` (the stored length) under `epoch`; `finish` ends the session."""

    session: str
    model: str
    epoch: int
    at: int
    tokens: tuple[int, ...]
    kinds: str
    counters: Counters
    logprobs: tuple[LogprobEntry, ...] | None = None
    finish: str | None = None


@dataclass(frozen=True)
class Appended:
    """Written, or was already there: `tail` is what the store holds from `at` on (equal to what was sent unless another
    writer was first; the caller adopts it), with its kinds, and the record's finish."""

    tail: tuple[int, ...]
    kinds: str
    finish: str | None


@dataclass(frozen=True)
class Rejected:
    """reason: stale_epoch (somebody else owns it), gap (stored length is below `at`), missing (no such record).
    `length` and `epoch` are the store's."""

    reason: str
    length: int = 0
    epoch: int = 0


class SessionStore(Protocol):
    """All methods raise StoreError while the store is away; nothing is half done."""

    async def create(self, record: SessionRecord) -> None: ...

    async def load(self, session: str) -> SessionRecord | None: ...

    async def append(self, appends: Sequence[Append]) -> list[Appended | Rejected]:
        """Atomic each, sent in one pipeline, answers in order."""
        ...

    async def adopt(self, session: str, epoch: int) -> SessionRecord | None:
        """Raise the record's epoch to `epoch` (StaleEpoch if it is higher already) and return it."""
        ...

    async def next_connection(self, session: str) -> int: ...

    async def place(self, session: str, epoch: int, verifier: str) -> None: ...

    async def live(self, model: str, partition: int) -> list[str]:
        """Unfinished sessions of a partition."""
        ...

    async def ping(self) -> None:
        """Raises StoreError while the store is away."""
        ...


class LeaseStore(Protocol):
    async def acquire(self, model: str, partitions: Sequence[int], owner: str, ttl_s: float) -> dict[int, int]:
        """Acquire or renew what is free or ours; {partition: epoch} of all that we hold now. An owner that renews, or
        comes back before anybody else took the lease, keeps its epoch; a new owner's is higher than any before."""
        ...

    async def release(self, model: str, partitions: Sequence[int], owner: str) -> None: ...

    async def heartbeat(self, model: str, owner: str, ttl_s: float) -> int:
        """Count of live batchers of the model, this one included."""
        ...

    async def draining(self, model: str) -> set[str]: ...

    async def set_draining(self, model: str, verifier: str, on: bool) -> None: ...
