"""The transcript: exactly once and in order, whatever verdicts come, and only text that may be shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.transcript import Missing, Taken, Transcript
from paceline.engine_simulated import toy_card
from paceline.errors import Conflict
from paceline.tokenizer import Tokenizer
from paceline.wire import Verdict, prefix_hash

CARD = toy_card()
TOKENIZER = Tokenizer(CARD)
PROMPT = tuple(b"ask")


def transcript(stops: tuple[str, ...] = ()) -> Transcript:
    return Transcript(PROMPT, TOKENIZER, CARD.end_ids, stops)


def verdict(completion: bytes, start: int, stop: int, *, finish: bool = False, epoch: int = 1) -> Verdict:
    tokens = tuple(completion[start:stop])
    ended = "stop" if finish and stop >= len(completion) else None
    kinds = "f" * len(tokens)
    return Verdict(session="s", epoch=epoch, at=len(PROMPT) + start, tokens=tokens, kinds=kinds, finish=ended)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40), st.lists(st.tuples(st.integers(0, 160), st.integers(0, 9)), max_size=60))
def test_any_verdicts_in_any_order_give_the_text_once(text: str, slices: list[tuple[int, int]]) -> None:
    completion = text.encode()
    own, shown = transcript(), ""
    for start, length in slices:
        taken = own.take(verdict(completion, min(start, len(completion)), start + length))
        if isinstance(taken, Missing):
            assert taken.position == own.position
            continue
        shown += taken.text if taken else ""
        assert completion.startswith(bytes(own.completion))
        shown.encode()  # whole characters only
        assert text.startswith(shown)
    last = own.take(verdict(completion, len(own.completion), len(completion), finish=True))
    assert isinstance(last, Taken)
    assert shown + last.text == text
    assert bytes(own.completion) == completion
    assert own.prefix_hash() == prefix_hash([*PROMPT, *completion])


def test_old_epochs_and_everything_after_the_finish_count_for_nothing() -> None:
    own = transcript()
    own.take(verdict(b"abc", 0, 1, epoch=3))
    assert own.take(verdict(b"aXX", 1, 2, epoch=2)) is None
    assert own.take(verdict(b"abc", 1, 3, epoch=3, finish=True)) is not None
    assert own.take(verdict(b"abcd", 3, 4, epoch=4)) is None
    assert bytes(own.completion) == b"abc"


def test_an_overlap_is_cut_and_kinds_and_logprobs_with_it() -> None:
    own = transcript()
    own.take(verdict(b"abcd", 0, 2))
    overlapping = Verdict(session="s", epoch=1, at=len(PROMPT), tokens=tuple(b"abcd"), kinds="feec")
    taken = own.take(overlapping)
    assert isinstance(taken, Taken)
    assert (taken.at, bytes(taken.tokens), taken.kinds, taken.text) == (len(PROMPT) + 2, b"cd", "ec", "cd")


@pytest.mark.parametrize(
    "other",
    [
        Verdict(session="s", epoch=2, at=len(PROMPT), tokens=tuple(b"aX"), kinds="ff"),
        Verdict(session="s", epoch=2, at=len(PROMPT) + 1, finish="stop"),
    ],
    ids=["other tokens", "a finish before what was shown"],
)
def test_a_contradiction_is_refused(other: Verdict) -> None:
    own = transcript()
    own.take(verdict(b"abc", 0, 3))
    with pytest.raises(Conflict) as caught:
        own.take(other)
    assert caught.value.code == "history_lost"


def test_end_tokens_have_no_text() -> None:
    own = transcript()
    tokens = (*b"done", CARD.end_ids[0])
    taken = own.take(Verdict(session="s", epoch=1, at=len(PROMPT), tokens=tokens, kinds="eeeeb", finish="stop"))
    assert isinstance(taken, Taken)
    assert (taken.text, taken.tokens) == ("done", tokens)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_a_stop_string_never_shows_however_it_is_cut(lengths: list[int]) -> None:
    completion, stop = b"Hi\nUsual\nUser: no", "\nUser:"
    own, shown, at = transcript((stop,)), "", 0
    for length in lengths:
        taken = own.take(verdict(completion, at, at + length))
        shown += taken.text if isinstance(taken, Taken) else ""
        at = len(own.completion)
    last = own.take(verdict(completion, at, len(completion), finish=True))
    assert isinstance(last, Taken)
    assert shown + last.text == "Hi\nUsual"
