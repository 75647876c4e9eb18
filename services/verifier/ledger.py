"""Which items of a batch go into the step, and what the others are answered. Pure.

The engine's **ledger** of a session are the token ids under its KV. An item may only be decided on KV that belongs to
the very tokens its batcher committed, and the prefix hash is what makes sure of that; the epoch only saves work that
a batcher which lost the session would cause.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine import Rule, TargetItem
from paceline.wire import Failure, VerifyItem, VerifyOutcome, prefix_hash

REMEMBERED_SESSIONS = 4096
"""Sessions whose epoch is known; the least recently used ones are forgotten, which the prefix hash makes harmless."""


@dataclass
class _Known:
    """epoch: the highest that was served. confirmed: length of the prefix that a hash last agreed with."""

    epoch: int = 0
    confirmed: int = 0


@dataclass(frozen=True)
class Turned:
    """An item that is answered without a step. trim: the ledger from here on agrees with nobody."""

    outcome: VerifyOutcome
    trim: int | None = None


class SessionLedger:
    """`context`: longest path in tokens that the engine can hold for one session."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._sessions: OrderedDict[str, _Known] = OrderedDict()

    def admit(self, item: VerifyItem, held: Sequence[int]) -> TargetItem | Turned:
        """`held` is the engine's ledger of the session at this moment."""
        known = self._known(item.session)
        if item.epoch < known.epoch:
            message = f"epoch {item.epoch} is over, the session is served under {known.epoch}"
            return Turned(refusal(item.session, 409, "stale_epoch", message))
        known.epoch = item.epoch
        if unfit := self._unfit(item):
            return Turned(unfit)
        prefix = _prefix(item, tuple(held))
        if prefix is None:
            return Turned(VerifyOutcome(session=item.session, need_from=min(len(held), item.at)))
        agreed = _agreed(item, prefix)
        if agreed is None:
            return self._mismatch(item, known, len(held))
        known.confirmed = agreed
        return _target_item(item)

    def release(self, session: str, epoch: int) -> bool:
        """False: somebody of a higher epoch is served, the release is an old owner's."""
        known = self._sessions.get(session)
        if known is not None and epoch < known.epoch:
            return False
        self._sessions.pop(session, None)
        return True

    def _known(self, session: str) -> _Known:
        known = self._sessions.setdefault(session, _Known())
        self._sessions.move_to_end(session)
        if len(self._sessions) > REMEMBERED_SESSIONS:
            self._sessions.popitem(last=False)
        return known

    def _unfit(self, item: VerifyItem) -> VerifyOutcome | None:
        history = item.history
        if history is not None and history.start + len(history.tokens) > item.at:
            return refusal(item.session, 400, "invalid_value", f"history goes beyond position {item.at}")
        if item.want != "none" and item.at == 0:
            return refusal(item.session, 400, "invalid_value", "nothing can be decided after an empty prompt")
        if item.at + len(item.tokens) > self._context:
            message = f"{item.at} tokens and a draft of {len(item.tokens)} are over the context of {self._context}"
            return refusal(item.session, 400, "context_length_exceeded", message)
        return None

    @staticmethod
    def _mismatch(item: VerifyItem, known: _Known, held: int) -> Turned:
        """One hash cannot name a common prefix: offer the one that was confirmed last, then none at all."""
        checked = item.history.start if item.history and item.want == "none" else item.at
        offer = min(known.confirmed, held) if known.confirmed < checked else 0
        known.confirmed = 0
        return Turned(VerifyOutcome(session=item.session, need_from=offer), trim=offer)


def refusal(session: str, status: int, code: str, message: str) -> VerifyOutcome:
    return VerifyOutcome(session=session, error=Failure(status=status, code=code, message=message))


def _prefix(item: VerifyItem, held: tuple[int, ...]) -> tuple[int, ...] | None:
    """The tokens that the item would stand on: c[0..at), for a chunk as far as it goes; None where some are lacking."""
    history = item.history
    if history is None:
        return held[: item.at] if len(held) >= item.at else None
    end = history.start + len(history.tokens)
    if len(held) < history.start:
        return None
    whole = held if held[history.start : end] == history.tokens else held[: history.start] + history.tokens
    if item.want == "none":
        return whole[:end]
    return whole[: item.at] if len(whole) >= item.at else None


def _agreed(item: VerifyItem, prefix: tuple[int, ...]) -> int | None:
    """The length that the item's hash confirms: `at`, or the start of a prefill chunk; None if it confirms nothing."""
    lengths = [len(prefix)]
    if item.want == "none" and item.history is not None:
        lengths = [item.history.start, len(prefix)]  # a chunk that names its end confirms itself as well
    return next((length for length in lengths if prefix_hash(prefix[:length]) == item.prefix_hash), None)


def _target_item(item: VerifyItem) -> TargetItem:
    rule = Rule(item.sampling, seed=item.seed, prompt_length=item.prompt_length, choice=item.choice)
    return TargetItem(
        session=item.session,
        tenant=item.tenant,
        at=item.at,
        start=item.history.start if item.history else 0,
        history=item.history.tokens if item.history else (),
        draft=item.tokens,
        rule=None if item.want == "none" else rule,
        logprobs=item.logprobs if item.want == "logprobs" else None,
    )
