"""Answers in OpenAI's format: whole, in chunks, and errors. Pure: plain values that any strict JSON reader takes."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.errors import RequestError, request_error
from paceline.wire import Counters, Failure
from services.gateway.choice_text import ChoiceText, Delta, Scored

Json = dict[str, Any]


class Shape(Protocol):
    """The differences between the two endpoints."""

    prefix: str
    whole: str
    chunk: str

    def opening(self, index: int) -> list[Json]:
        """Choices to send before a choice's first text."""
        ...

    def delta(self, index: int, text: str, scores: Sequence[Scored], finish: str | None, scored: bool) -> Json: ...

    def choice(self, index: int, text: str, scores: Sequence[Scored], finish: str | None, scored: bool) -> Json: ...


class ChatShape:
    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> list[Json]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def delta(self, index: int, text: str, scores: Sequence[Scored], finish: str | None, scored: bool) -> Json:
        delta = {"content": text} if text else {}
        logprobs = _chat_logprobs(scores) if scores else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def choice(self, index: int, text: str, scores: Sequence[Scored], finish: str | None, scored: bool) -> Json:
        message: Json = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        logprobs = _chat_logprobs(scores) if scored else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}


class CompletionShape:
    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def opening(self, index: int) -> list[Json]:
        return []

    def delta(self, index: int, text: str, scores: Sequence[Scored], finish: str | None, scored: bool) -> Json:
        return self.choice(index, text, scores, finish, bool(scores))

    def choice(self, index: int, text: str, scores: Sequence[Scored], finish: str | None, scored: bool) -> Json:
        logprobs = _completion_logprobs(scores) if scored else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


@dataclass
class Answer:
    """One call's answer: the same id, time and model in each of its parts. `scored`: log-probabilities were asked
    for. `include_usage`: the stream ends with a usage chunk, and every other chunk says that it is none."""

    shape: Shape
    model: str
    fingerprint: str
    created: int
    scored: bool = False
    include_usage: bool = False
    identifier: str = field(default_factory=lambda: secrets.token_hex(12))
    _opened: set[int] = field(default_factory=set)

    def whole(self, choices: Sequence[ChoiceText], parts: Sequence[Sequence[Delta]], prompt_tokens: int) -> Json:
        made = [self._whole_choice(index, deltas) for index, deltas in enumerate(parts)]
        return {**self._head(self.shape.whole), "choices": made, "usage": usage(choices, prompt_tokens)}

    def chunks(self, index: int, delta: Delta) -> list[Json]:
        """Chunks for one choice's delta; none for one without text, scores and finish. The finish has a chunk of its
        own, the last of its choice."""
        choices = []
        if delta.text or (delta.scores and delta.finish is None):
            choices.append(self.shape.delta(index, delta.text, delta.scores, None, self.scored))
        if delta.finish is not None:
            left = () if delta.text else delta.scores
            choices.append(self.shape.delta(index, "", left, delta.finish, self.scored))
        if choices and index not in self._opened:
            self._opened.add(index)
            choices = [*self.shape.opening(index), *choices]
        return [self._chunk([choice]) for choice in choices]

    def usage_chunk(self, choices: Sequence[ChoiceText], prompt_tokens: int) -> Json:
        return {**self._chunk([]), "usage": usage(choices, prompt_tokens)}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._head(self.shape.chunk), "choices": choices}
        return {**chunk, "usage": None} if self.include_usage else chunk

    def _whole_choice(self, index: int, deltas: Sequence[Delta]) -> Json:
        text = "".join(delta.text for delta in deltas)
        scores = [score for delta in deltas for score in delta.scores]
        return self.shape.choice(index, text, scores, deltas[-1].finish, self.scored)

    def _head(self, kind: str) -> Json:
        return {
            "id": self.shape.prefix + self.identifier,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": "fp_" + self.fingerprint[:12],
        }


def usage(choices: Iterable[ChoiceText], prompt_tokens: int) -> Json:
    """Of all choices; the prompt counts once however many answers it has."""
    made = list(choices)
    completion = sum(choice.tokens for choice in made)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "speculation": speculation([choice.counters for choice in made]),
    }


def speculation(counters: Sequence[Counters]) -> Json:
    """Extension: drafted and accepted tokens, in all and by source, and the verifier's steps."""
    sources = sorted({source for each in counters for source in (*each.drafted, *each.accepted)})
    by_source = {
        source: {
            "drafted": sum(each.drafted.get(source, 0) for each in counters),
            "accepted": sum(each.accepted.get(source, 0) for each in counters),
        }
        for source in sources
    }
    return {
        "drafted": sum(part["drafted"] for part in by_source.values()),
        "accepted": sum(part["accepted"] for part in by_source.values()),
        "by_source": by_source,
        "verifier_steps": sum(each.steps for each in counters),
    }


def error_body(error: RequestError) -> Json:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def failure_error(finish: str | None, failure: Failure | None) -> RequestError:
    """Why a session ended without an answer, for its client."""
    if failure is not None:
        return request_error(failure.status, failure.code, failure.message, failure.param)
    if finish == "cancelled":
        return RequestError("the session was cancelled", code="cancelled")
    return RequestError("the session ended with an error", code="session_failed")


def _chat_logprobs(scores: Sequence[Scored]) -> Json:
    content = [{**_chat_score(score), "top_logprobs": [_chat_score(top) for top in score.top]} for score in scores]
    return {"content": content, "refusal": None}


def _chat_score(score: Scored) -> Json:
    return {"token": score.token, "logprob": score.logprob, "bytes": list(score.raw)}


def _completion_logprobs(scores: Sequence[Scored]) -> Json:
    return {
        "tokens": [score.token for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [{top.token: top.logprob for top in score.top} for score in scores],
        "text_offset": [score.offset for score in scores],
    }
