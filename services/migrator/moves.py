"""What a drain does next: pure choices over statuses and ledgers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.store import SessionRecord
from paceline.wire import History, VerifierStatus, VerifyItem, prefix_hash

STATUS_TTL_S = 3.0


def choose_target(statuses: Iterable[VerifierStatus], leaving: str, needed: int, now: float) -> str | None:
    """The ready verifier with most free KV cells that can hold `needed` tokens; None when there is none."""
    fit = [
        status
        for status in statuses
        if status.verifier != leaving
        and status.state == "ready"
        and now - status.t_sent <= STATUS_TTL_S
        and status.context >= needed
    ]
    best = max(fit, key=lambda status: (status.cells_total - status.cells_used, status.verifier), default=None)
    return best.verifier if best else None


def chunk(record: SessionRecord, tokens: Sequence[int], start: int, size: int) -> VerifyItem:
    """The prefill chunk that brings a ledger of `start` tokens up to at most start + size."""
    part = tuple(tokens[start : start + size])
    return VerifyItem(
        session=record.session,
        tenant=record.tenant,
        epoch=record.epoch,
        at=start + len(part),
        prompt_length=record.prompt_length,
        prefix_hash=prefix_hash(tokens[:start]),
        seed=record.seed,
        sampling=record.opened.sampling,
        choice=record.opened.choice,
        history=History(start=start, tokens=part),
        want="none",
    )
