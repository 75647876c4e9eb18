"""Tokens into what a client sees: text, log-probabilities, usage; for any cutting into verdicts."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine_simulated import toy_card
from paceline.tokenizer import Tokenizer
from paceline.wire import Counters, Failure, LogprobEntry, Verdict
from services.gateway.answers import Answer, ChatShape, CompletionShape, error_body, failure_error, usage
from services.gateway.choice_text import FLOOR, ChoiceText, Delta, finite, spelling

TOKENIZER = Tokenizer(toy_card())
END = 256


def fed(cuts: list[bytes], *, end: bool = False, finish: str = "length", stops: tuple[str, ...] = ()) -> list[Delta]:
    choice = ChoiceText(TOKENIZER, stops)
    parts: list[list[int]] = [list(cut) for cut in cuts]
    if end:
        parts.append([END])
    deltas, at = [], 0
    for index, tokens in enumerate(parts):
        last = finish if index == len(parts) - 1 else None
        logprobs = tuple(LogprobEntry(logprob=-1.0) for _ in tokens)
        deltas.append(
            choice.feed(Verdict(session="s", epoch=1, at=at, tokens=tuple(tokens), finish=last, logprobs=logprobs))  # type: ignore[arg-type]
        )
        at += len(tokens)
    return deltas


def pieces(data: bytes, cuts: set[int]) -> list[bytes]:
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < len(data)), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


@given(text=st.text(min_size=1, max_size=40), cuts=st.sets(st.integers(1, 120)))
def test_any_cutting_gives_the_same_text_in_whole_characters(text: str, cuts: set[int]) -> None:
    deltas = fed(pieces(text.encode(), cuts))
    assert "".join(delta.text for delta in deltas) == text
    assert all("\ufffd" not in delta.text for delta in deltas if "\ufffd" not in text)


@given(text=st.text(alphabet="ab\n:Ué", min_size=1, max_size=30), cuts=st.sets(st.integers(1, 60)))
def test_every_counted_token_has_one_score_wherever_the_cuts_are(text: str, cuts: set[int]) -> None:
    deltas = fed(pieces(text.encode(), cuts), end=True, finish="stop")
    scores = [score for delta in deltas for score in delta.scores]
    assert len(scores) == sum(delta.tokens for delta in deltas) == len(text.encode()) + 1
    assert b"".join(score.raw for score in scores[:-1]) == text.encode()
    assert scores[-1].token == "<|end|>"
    starts = [score for score in scores[:-1] if score.raw[0] & 0xC0 != 0x80]
    assert [score.offset for score in starts] == list(range(len(text)))


@pytest.mark.parametrize(
    ("cuts", "shown"),
    [
        ([b"Hi\nUs", b"er: no"], ["Hi", ""]),
        ([b"Hi\nUs", b"ual"], ["Hi", "\nUsual"]),
        ([b"Hi\n", b"User", b":"], ["Hi", "", ""]),
        ([b"Hi\nUser:"], ["Hi"]),
        ([b"Hi", b"\nUs"], ["Hi", "\nUs"]),
    ],
)
def test_only_what_may_become_a_stop_is_held_back(cuts: list[bytes], shown: list[str]) -> None:
    assert [delta.text for delta in fed(cuts, stops=("\nUser:",))] == shown


def test_an_unfinished_character_at_the_end_is_one_replacement() -> None:
    assert "".join(delta.text for delta in fed([b"ab\xf0\x9f"])) == "ab\ufffd"


def test_scores_wait_for_the_text_that_they_belong_to() -> None:
    first, second = fed([b"\xc3", b"\xa9"])
    assert (first.text, first.scores) == ("", ())
    assert (second.text, len(second.scores)) == ("é", 2)


def test_spellings_stay_different_and_finite() -> None:
    assert (spelling(b"a"), spelling("é".encode()), spelling(b"\xe2\x98")) == ("a", "é", "bytes:\\xe2\\x98")
    assert [finite(x) for x in (-math.inf, math.nan, math.inf, -1e300, -0.5)] == [FLOOR, FLOOR, FLOOR, FLOOR, -0.5]


# --- answers -------------------------------------------------------------------------------------------------------


def answer(shape: Any, **options: Any) -> Answer:
    return Answer(shape=shape, model="toy", fingerprint="f" * 64, created=1, **options)


def choice(tokens: int, **counters: Any) -> ChoiceText:
    return ChoiceText(TOKENIZER, tokens=tokens, counters=Counters(**counters))


def test_the_first_chunk_has_the_role_and_the_last_the_reason() -> None:
    made = answer(ChatShape())
    first = made.chunks(1, Delta("a", tokens=1))
    last = made.chunks(1, Delta("b", tokens=1, finish="stop"))
    choices = [chunk["choices"][0] for chunk in [*first, *last]]
    assert [c["delta"].get("role") for c in choices] == ["assistant", None, None, None]
    assert [c["finish_reason"] for c in choices] == [None, None, None, "stop"]
    assert {c["index"] for c in choices} == {1}
    assert all("usage" not in chunk for chunk in [*first, *last])


def test_an_answer_without_text_still_has_role_and_reason() -> None:
    chunks = answer(ChatShape()).chunks(0, Delta(finish="stop", tokens=1))
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "stop"]


def test_a_delta_that_shows_nothing_makes_no_chunk() -> None:
    assert answer(ChatShape()).chunks(0, Delta(tokens=2)) == []
    assert answer(CompletionShape()).chunks(0, Delta(tokens=2)) == []


def test_usage_counts_the_prompt_once_and_every_choice() -> None:
    counted = usage(
        [choice(5, drafted={"hosted": 8}, accepted={"hosted": 3}, steps=2), choice(4, drafted={"edge": 1}, steps=3)], 7
    )
    assert (counted["prompt_tokens"], counted["completion_tokens"], counted["total_tokens"]) == (7, 9, 16)
    assert counted["speculation"] == {
        "drafted": 9, "accepted": 3, "verifier_steps": 5,
        "by_source": {"edge": {"drafted": 1, "accepted": 0}, "hosted": {"drafted": 8, "accepted": 3}},
    }  # fmt: skip


def test_with_usage_wanted_every_other_chunk_says_that_it_is_none() -> None:
    made = answer(ChatShape(), include_usage=True)
    assert all(chunk["usage"] is None for chunk in made.chunks(0, Delta("a", finish="stop", tokens=1)))
    last = made.usage_chunk([choice(3)], 2)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 5)


def test_log_probabilities_of_minus_infinity_are_plain_json() -> None:
    entry = LogprobEntry(logprob=-math.inf, top=((97, -0.1), (98, -math.inf), (99, math.nan)))
    for shape in (ChatShape(), CompletionShape()):
        text = ChoiceText(TOKENIZER)
        delta = text.feed(Verdict(session="s", epoch=1, at=0, tokens=(98,), logprobs=(entry,), finish="length"))
        made = answer(shape, scored=True)
        for value in (made.whole([text], [[delta]], 1), *made.chunks(0, delta)):
            written = json.dumps(value, allow_nan=False)
            assert "Infinity" not in written
        assert FLOOR in _numbers(made.whole([text], [[delta]], 1))


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [n for item in value.values() for n in _numbers(item)]
    if isinstance(value, list):
        return [n for item in value for n in _numbers(item)]
    return [value] if isinstance(value, float) else []


def test_errors_have_the_shape_of_openai() -> None:
    failure = Failure(status=400, code="context_length_exceeded", message="64 and 100", param="messages")
    error = failure_error("error", failure)
    assert error.status == 400
    assert error_body(error) == {
        "error": {"message": "64 and 100", "type": "invalid_request_error", "param": "messages",
                  "code": "context_length_exceeded"}
    }  # fmt: skip
    assert failure_error("cancelled", None).code == "cancelled"
    assert failure_error("error", None).status == 500
