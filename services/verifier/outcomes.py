"""What the engine decided, as it goes over the wire. Pure."""

from __future__ import annotations

import math

from paceline.engine import Decided, Failed, Fed, Outcome, TokenLogprob
from paceline.wire import LogprobEntry, VerifyItem, VerifyOutcome
from services.verifier.ledger import refusal

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""
SOLE_SURVIVOR = 1e9
"""Stands for the margin of a choice without a second one."""
STATUS = {"bad_token": 400, "no_room": 503}


def outcome_of(item: VerifyItem, outcome: Outcome, held: int) -> VerifyOutcome:
    """`held`: length of the session's ledger after the step."""
    if isinstance(outcome, Failed):
        return _failed(outcome, held)
    if isinstance(outcome, Fed):
        return VerifyOutcome(session=outcome.session, fed=outcome.length)
    return _decided(item, outcome)


def _failed(outcome: Failed, held: int) -> VerifyOutcome:
    if outcome.code == "need_history":
        return VerifyOutcome(session=outcome.session, need_from=held)
    return refusal(outcome.session, STATUS.get(outcome.code, 500), outcome.code, outcome.message)


def _decided(item: VerifyItem, outcome: Decided) -> VerifyOutcome:
    return VerifyOutcome(
        session=outcome.session,
        accepted=outcome.accepted,
        token=outcome.token,
        margins=tuple(margin if math.isfinite(margin) else SOLE_SURVIVOR for margin in outcome.margins),
        logprobs=tuple(_entry(value) for value in outcome.logprobs) if item.want == "logprobs" else None,
    )


def _entry(value: TokenLogprob) -> LogprobEntry:
    top = tuple((token, _finite(logprob)) for token, logprob in value.top)
    return LogprobEntry(logprob=_finite(value.logprob), top=top)


def _finite(logprob: float) -> float:
    return max(LOWEST_LOGPROB, logprob) if math.isfinite(logprob) else LOWEST_LOGPROB
