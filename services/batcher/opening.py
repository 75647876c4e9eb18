"""Openings and resumes: what is admitted, what is stored, what is answered. No I/O."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from secrets import randbits

import msgspec

from paceline.errors import BadRequest, Conflict, ContextLengthExceeded, NotFound
from paceline.store import SessionRecord
from paceline.wire import Failure, Sampling, SessionOpen, SessionOpened, SessionResume, Verdict, prefix_hash

MAX_STOP_BYTES = 1024

HISTORY_LOST = Failure(
    status=409, code="history_lost", message="the stored history does not agree with what the client holds"
)


@dataclass(frozen=True)
class Limits:
    """Of the model that this batcher serves. `context`: positions of one session, prompt and completion together."""

    model: str
    fingerprint: str
    vocabulary: int
    context: int
    end_ids: tuple[int, ...]


def admit(opened: SessionOpen, limits: Limits) -> tuple[SessionOpen, int]:
    """The opening as it will be stored, and its completion limit: max_tokens clipped to the context (such a session
    ends with `length`). Raises the RequestError that refuses it."""
    if opened.session == "-":
        raise BadRequest("a session needs an id", param="session")
    if opened.model != limits.model:
        raise NotFound(f"this batcher serves {limits.model}, not {opened.model}", code="model_not_found", param="model")
    if opened.fingerprint != limits.fingerprint:
        raise Conflict(
            f"vocabulary fingerprint {opened.fingerprint[:16]} differs from the target's {limits.fingerprint[:16]}",
            code="fingerprint_mismatch",
            param="fingerprint",
        )
    _check_tokens(opened, limits)
    _check_options(opened, limits.vocabulary)
    sampling = msgspec.structs.replace(opened.sampling, end_ids=limits.end_ids)
    room = limits.context - len(opened.tokens)
    max_tokens = room if opened.max_tokens is None else min(room, opened.max_tokens)
    return msgspec.structs.replace(opened, sampling=sampling), max_tokens


def _check_tokens(opened: SessionOpen, limits: Limits) -> None:
    if not opened.tokens:
        raise BadRequest("the prompt is empty", code="empty_prompt", param="tokens")
    worst = max(opened.tokens)
    if worst >= limits.vocabulary:
        raise BadRequest(
            f"prompt token id {worst} is not below the vocabulary's {limits.vocabulary}",
            code="token_out_of_range",
            param="tokens",
        )
    if len(opened.tokens) >= limits.context:
        raise ContextLengthExceeded(
            f"the prompt has {len(opened.tokens)} tokens; the context of {limits.context} tokens must hold it and at "
            "least one more",
            param="tokens",
        )


def _check_options(opened: SessionOpen, vocabulary: int) -> None:
    if opened.max_tokens == 0:
        raise BadRequest("max_tokens must be at least 1", param="max_tokens")
    if any(not 1 <= len(stop.encode()) <= MAX_STOP_BYTES for stop in opened.stop):
        raise BadRequest(f"a stop string has 1 to {MAX_STOP_BYTES} bytes", param="stop")
    _check_bias(opened.sampling, vocabulary)


def _check_bias(sampling: Sampling, vocabulary: int) -> None:
    wrong = [token for token in sampling.logit_bias if not 0 <= token < vocabulary]
    if wrong:
        raise BadRequest(
            f"logit_bias names token {wrong[0]}, outside the vocabulary of {vocabulary}", param="logit_bias"
        )


def check_owner(resume: SessionResume, tenant: str, secret: str) -> None:
    """Only who opened the session may resume it; anybody else does not even learn that it exists."""
    known = hmac.compare_digest(resume.secret.encode(), secret.encode())
    if resume.tenant != tenant or not known:
        raise NotFound(f"no session {resume.session}", code="session_not_found")


def agrees(tokens: Sequence[int], resume: SessionResume) -> bool:
    """Do we hold what the client holds?"""
    return resume.position <= len(tokens) and prefix_hash(tokens[: resume.position]) == resume.prefix_hash


def new_record(opened: SessionOpen, max_tokens: int, epoch: int, *, secret: str, now: float) -> SessionRecord:
    """Of an admitted opening; a seed that the client did not name is drawn here."""
    return SessionRecord(
        session=opened.session,
        tenant=opened.tenant,
        opened=opened,
        secret=secret,
        seed=randbits(63) if opened.seed is None else opened.seed,
        prompt_length=len(opened.tokens),
        max_tokens=max_tokens,
        epoch=epoch,
        tokens=opened.tokens,
        connection=1,
        created=now,
    )


def answer_to(record: SessionRecord, connection: int, position: int) -> SessionOpened:
    return SessionOpened(
        session=record.session,
        secret=record.secret,
        connection=connection,
        epoch=record.epoch,
        seed=record.seed,
        prompt_length=record.prompt_length,
        max_tokens=record.max_tokens,
        position=position,
        speculation=record.opened.speculation,
    )


def last_words(record: SessionRecord) -> Verdict:
    """What there is left to say of a finished session."""
    return Verdict(
        session=record.session,
        epoch=record.epoch,
        at=record.tip,
        counters=record.counters,
        finish=record.finish,  # type: ignore[arg-type]
    )
