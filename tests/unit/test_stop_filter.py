"""Stop strings across chunk borders."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.tokenizer import StopFilter

# few letters, so that stops overlap, nest and repeat
letters = st.text("ab\n", max_size=14)
stops_of = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def run(stops: list[str], chunks: list[str]) -> tuple[list[str], str, str | None]:
    """Text after each chunk, text of the flush, the stop."""
    watch = StopFilter(stops)
    shown = [watch.feed(chunk) for chunk in chunks]
    return shown, watch.flush(), watch.stopped


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """Character by character: cut at the first stop to be complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("chunks", "shown", "rest", "stopped"),
    [
        (["Hi\nUs", "er: no"], ["Hi", ""], "", "\nUser:"),
        (["Hi\nUs", "ual"], ["Hi", "\nUsual"], "", None),
        (["Hi\nUs"], ["Hi"], "\nUs", None),
        (["Hi", "\nUser:", "more", " text"], ["Hi", "", "", ""], "", "\nUser:"),
        (["\nUs\nUser:"], ["\nUs"], "", "\nUser:"),
        ([*"x\nUser:y"], ["x", "", "", "", "", "", "", ""], "", "\nUser:"),
    ],
)
def test_a_stop_over_two_chunks(chunks: list[str], shown: list[str], rest: str, stopped: str | None) -> None:
    assert run(["\nUser:"], chunks) == (shown, rest, stopped)


def test_of_two_stops_the_first_to_be_complete_wins() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == (["a"], "", "bc")


def test_of_two_stops_that_end_together_the_longer_wins() -> None:
    assert run(["bc", "abc"], ["xabc"]) == (["x"], "", "abc")


def test_without_stops_nothing_is_held_back() -> None:
    assert run(["", ""], ["a", "", "b"]) == (["a", "", "b"], "", None)


@given(stops_of, letters, st.data())
def test_chunks_do_not_matter(stops: list[str], text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    bounds = [0, *cuts, len(text)]
    shown, rest, stopped = run(stops, [text[a:b] for a, b in itertools.pairwise(bounds)])
    assert ("".join(shown) + rest, stopped) == reference(stops, text)


@given(stops_of, st.lists(letters, max_size=5))
def test_what_is_held_back_could_become_a_stop(stops: list[str], chunks: list[str]) -> None:
    watch = StopFilter(stops)
    shown = seen = ""
    for chunk in chunks:
        shown += watch.feed(chunk)
        seen += chunk
        if watch.stopped is None:
            held = seen.removeprefix(shown)
            assert seen.startswith(shown)
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
