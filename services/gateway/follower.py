"""The verdicts of one session, exactly once and in order, whatever the bus loses.

`Order` decides: it trims what is known already and drops old epochs. Where tokens are missing, and on every new epoch,
the store is asked (a *repair*): it must hold the reader's position and agree with its hash there, or the session ends
with `history_lost`; as long as it holds less, nothing is shown. `Follower` is the I/O around it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Literal, cast

import structlog
from msgspec.structs import replace

from paceline import telemetry
from paceline.bus import Received
from paceline.errors import Conflict, StoreError, Unavailable
from paceline.store import SessionRecord, SessionStore
from paceline.wire import Failure, Finish, Verdict

log = structlog.get_logger(__name__)

STALL_S = 1.5
"""Silence after which tip and finish are read from the store."""
GIVE_UP_S = 60.0
"""How long a component may be missing under a silent session before its reader is told."""
PENDING_VERDICTS = 256

Why = Literal["gap", "stall", "epoch"]


class Need(Enum):
    """What `Order.take` asks for instead of a verdict to show."""

    NOTHING = "nothing"
    GAP = "gap"
    EPOCH = "epoch"


class Digest:
    """The prefix hash at the reader's position: running where the tokens are known, fixed where only it is."""

    def __init__(self, tokens: Sequence[int] | None, fixed: str = "") -> None:
        self._running = None if tokens is None else hashlib.blake2b(_packed(tokens), digest_size=8)
        self._fixed = fixed

    def add(self, tokens: Sequence[int]) -> None:
        if self._running is None:
            raise AssertionError("a digest must be known before it can grow")
        self._running.update(_packed(tokens))

    def agrees(self, tokens: Sequence[int]) -> bool:
        """Whether this is the hash of `tokens`; from then on it can grow."""
        found = hashlib.blake2b(_packed(tokens), digest_size=8)
        mine = self._fixed if self._running is None else self._running.hexdigest()
        if found.hexdigest() != mine:
            return False
        self._running = found
        return True


class Order:
    """A reader at `position` of a session, whose prefix has `digest`. Pure."""

    def __init__(self, session: str, position: int, digest: Digest) -> None:
        self.session = session
        self.position = position
        self.epoch = 0
        self.finish: str | None = None
        self._digest = digest
        self._agreed = False

    def opened(self, epoch: int) -> None:
        """The session was opened just now with the tokens that the digest knows: nothing to compare."""
        self.epoch, self._agreed = max(self.epoch, epoch), True

    def take(self, verdict: Verdict) -> Verdict | Need:
        """What is new in `verdict`, beginning at the position; or what must be repaired first."""
        if verdict.epoch < self.epoch or self.finish is not None:
            return Need.NOTHING
        if verdict.epoch > self.epoch:
            self.epoch, self._agreed = verdict.epoch, False
        ended_short = verdict.finish is not None and verdict.at + len(verdict.tokens) < self.position
        if not self._agreed or ended_short:
            return Need.EPOCH
        if verdict.at > self.position:
            return Need.GAP
        return self._advance(_trimmed(verdict, self.position))

    def adopt(self, record: SessionRecord | None) -> Verdict | None:
        """What the store holds beyond the position; None while it holds less. Raises Conflict (history_lost)."""
        if record is None:
            raise _lost(f"the store knows no session {self.session}")
        if record.tip < self.position:
            if record.finish is not None:
                raise _lost(f"the session ended at position {record.tip}, before position {self.position}")
            self._agreed = False
            return None
        if not self._digest.agrees(record.tokens[: self.position]):
            raise _lost(f"the stored history differs before position {self.position}")
        self.epoch, self._agreed = max(self.epoch, record.epoch), True
        return self._advance(_stored(record, self.position, self.epoch))

    def _advance(self, verdict: Verdict) -> Verdict:
        self._digest.add(verdict.tokens)
        self.position += len(verdict.tokens)
        self.finish = verdict.finish
        return verdict


class Follower:
    """`next` gives the verdicts of one session until one with a finish. Reads the store by itself after a gap, a new
    epoch, or STALL_S of silence. `missing` names a component without which nothing can move; `on_epoch` is called when
    another owner is heard of."""

    def __init__(
        self,
        order: Order,
        store: SessionStore,
        metrics: telemetry.Metrics,
        *,
        missing: Callable[[], str | None] = lambda: None,
        on_epoch: Callable[[], None] = lambda: None,
        stall_s: float = STALL_S,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self.order = order
        self._store = store
        self._metrics = metrics
        self._missing = missing
        self._on_epoch = on_epoch
        self._stall_s = stall_s
        self._give_up_s = give_up_s
        self._pending: asyncio.Queue[Verdict] = asyncio.Queue(PENDING_VERDICTS)
        self._missing_since: float | None = None
        self._error: Failure | None = None
        self._epoch_heard = 0

    async def on_verdict(self, received: Received) -> None:
        """The bus handler. When the reader is slow the newest verdicts are dropped: the gap is repaired later."""
        verdict = cast(Verdict, received.message)
        self._error = verdict.error or self._error
        if verdict.epoch > self._epoch_heard:
            self._epoch_heard = verdict.epoch
            self._on_epoch()
        if not self._pending.full():
            self._pending.put_nowait(verdict)

    async def next(self) -> Verdict:
        """The next verdict, its tokens beginning where the last one's ended; it may be empty of tokens.

        Raises Conflict (history_lost), or Unavailable when a component stays away. May be cancelled without loss.
        """
        while True:
            verdict = await self._heard()
            found = self.order.take(verdict) if verdict is not None else await self._repair("stall")
            if isinstance(found, Need):
                found = None if found is Need.NOTHING else await self._repair(cast(Why, found.value), verdict)
            if found is not None:
                self._missing_since = None
                return found

    async def _heard(self) -> Verdict | None:
        """None after stall_s of silence."""
        try:
            async with asyncio.timeout(self._stall_s):
                return await self._pending.get()
        except TimeoutError:
            self._check_components()
            return None

    async def _repair(self, why: Why, cause: Verdict | None = None) -> Verdict | None:
        """What the store holds beyond the position, with what else `cause` said; None if nothing is new."""
        try:
            found = self.order.adopt(await self._store.load(self.order.session))
        except StoreError as error:
            log.warning("repair put off", session=self.order.session, error=str(error))
            return None
        if found is None:
            return None
        if found.tokens or found.finish:
            self._metrics.add(telemetry.REPAIRS, reason=why)
        if cause is not None:
            found = replace(cause, **_own(found))
        elif not found.tokens and found.finish is None:
            return None
        return replace(found, error=self._error) if found.finish == "error" else found

    def _check_components(self) -> None:
        """Raises Unavailable when the same silence outlasts give_up_s of a missing component."""
        missing, now = self._missing(), time.monotonic()
        if missing is None:
            self._missing_since = None
            return
        since = self._missing_since = self._missing_since or now
        if now - since >= self._give_up_s:
            raise Unavailable(f"no {missing} for {now - since:.0f} s", code=f"{missing}_unavailable")


def _packed(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def _lost(message: str) -> Conflict:
    return Conflict(message, code="history_lost")


def _trimmed(verdict: Verdict, position: int) -> Verdict:
    """Without what is before `position`. A finish that is older than the reader ends him all the same."""
    skip = min(position - verdict.at, len(verdict.tokens))
    if position == verdict.at:
        return verdict
    logprobs = None if verdict.logprobs is None else verdict.logprobs[skip:]
    return replace(verdict, at=position, tokens=verdict.tokens[skip:], kinds=verdict.kinds[skip:], logprobs=logprobs)


def _stored(record: SessionRecord, position: int, epoch: int) -> Verdict:
    skip = max(0, position - record.prompt_length)
    return Verdict(
        session=record.session,
        epoch=epoch,
        at=position,
        tokens=record.tokens[position:],
        kinds=record.kinds[skip:],
        logprobs=record.logprobs[skip:] if record.opened.logprobs is not None else None,
        counters=record.counters,
        finish=cast(Finish | None, record.finish),
    )


def _own(found: Verdict) -> dict[str, object]:
    names = ("epoch", "at", "tokens", "kinds", "logprobs", "counters", "finish")
    return {name: getattr(found, name) for name in names}
