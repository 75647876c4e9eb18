"""Word wrap on a terminal: no word is split that fits a line, and the cuts of the stream do not matter."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from edge_client.wrapping import WordWrap

PIECES = re.compile(r"\x1b\[(\d+)D\x1b\[K|(.)", re.DOTALL)
TEXT = st.text(st.sampled_from("abcxyz.,é世界  \n\t"), max_size=120)


def screen(written: str) -> list[str]:
    """Lines on a terminal that knows line ends, steps to the left and erasing."""
    lines = [""]
    for steps, char in PIECES.findall(written):
        if steps:
            lines[-1] = lines[-1][: -int(steps)]  # erased words hold narrow characters only
        elif char == "\n":
            lines.append("")
        else:
            lines[-1] += char
    return lines


def wrapped(pieces: list[str], width: int) -> list[str]:
    wrap = WordWrap()
    return screen("".join(wrap.feed(piece, width) for piece in pieces))


def test_a_word_that_does_not_fit_moves_whole() -> None:
    assert wrapped(["the sea is wi", "de and sal", "ty"], 12) == ["the sea is ", "wide and ", "salty"]
    assert wrapped(list("the sea is wide"), 12) == ["the sea is ", "wide"]


def test_what_fits_exactly_stays_and_the_blank_after_it_ends_the_line() -> None:
    assert wrapped(["the sea one is"], 12) == ["the sea one", "is"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("abcdefghijklmno", ["abcdefghi", "jklmno"]),
        ("ab abcdefghijkl", ["ab ", "abcdefghi", "jkl"]),
        ("世界世界世界", ["世界世界", "世界"]),
        ("if x:\n    return", ["if x:", "    return"]),
        ("a\tb", ["a   b"]),
        ("a\x1b[2Jb\r", ["a[2Jb"]),
    ],
    ids=["longer than a line", "longer than a line after a word", "wide", "indentation", "tab", "control characters"],
)
def test_special_text(text: str, lines: list[str]) -> None:
    assert wrapped([text], 10 if "return" not in text else 20) == lines


@settings(max_examples=300, deadline=None)
@given(TEXT, st.lists(st.integers(1, 9), max_size=60), st.integers(8, 30))
def test_lines_fit_and_hold_the_text_however_it_is_cut(text: str, lengths: list[int], width: int) -> None:
    pieces, rest = [], text
    for length in lengths:
        pieces.append(rest[:length])
        rest = rest[length:]
    lines = wrapped([*pieces, rest], width)
    assert lines == wrapped([text], width)
    assert all(cell_len(line) < width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())
    words = {word for line in lines for word in line.split()}
    assert {word for word in text.split() if word.isascii() and len(word) < width} <= words
