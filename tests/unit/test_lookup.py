"""What a text says about its own continuation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.lookup import CANDIDATES, Lookup


def text(letters: str) -> list[int]:
    return [ord(letter) for letter in letters]


def proposed(letters: str, limit: int, after: str = "") -> tuple[str, int]:
    tokens, length = Lookup(text(letters)).propose(limit, text(after))
    return "".join(map(chr, tokens)), length


@pytest.mark.parametrize(
    ("letters", "after", "limit", "expected"),
    [
        ("the cat sat. the c", "", 5, ("at sa", 4)),
        ("xbcd1 ybcd2 zbc", "", 3, ("d2 ", 2)),
        ("abcdX bcdY abcd", "", 1, ("X", 4)),
        ("abcdX abcdY abcd", "", 1, ("Y", 4)),
        ("abX cbY ab", "", 1, ("X", 2)),
        ("abcabc", "", 7, ("abcabca", 3)),
        ("aaa", "", 3, ("aaa", 2)),
        ("one two. one", " t", 4, ("wo. ", 4)),
        ("abcde ", "ab", 6, ("cde ab", 2)),
        ("abcdef", "", 4, ("", 0)),
        ("ab", "", 4, ("", 0)),
        ("", "", 4, ("", 0)),
        ("", "abab", 4, ("", 0)),
        ("abcabc", "", 0, ("", 0)),
    ],
)
def test_the_longest_match_and_of_equal_ones_the_latest(
    letters: str, after: str, limit: int, expected: tuple[str, int]
) -> None:
    assert proposed(letters, limit, after) == expected


def plainly(tokens: list[int], after: list[int], limit: int) -> tuple[list[int], int]:
    """The same by searching the whole text."""
    whole = tokens + after
    for length in (4, 3, 2):
        if length > len(whole):
            continue
        for start in range(len(tokens) - 1, length - 1, -1):
            if start < len(whole) and tokens[start - length : start] == whole[-length:]:
                virtual = list(whole)
                for position in range(start, start + limit):
                    virtual.append(virtual[position])
                return virtual[len(whole) :], length
    return [], 0


@given(
    st.lists(st.integers(0, 6), max_size=CANDIDATES), st.lists(st.integers(0, 6), max_size=4), st.integers(1, 12)
)  # fmt: skip
def test_it_finds_what_a_search_finds(tokens: list[int], after: list[int], limit: int) -> None:
    assert Lookup(tokens).propose(limit, after) == plainly(tokens, after, limit)


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=6))
def test_it_does_not_matter_in_how_many_parts_the_text_came(parts: list[list[int]]) -> None:
    grown = Lookup()
    for part in parts:
        grown.append(part)
    whole = Lookup(token for part in parts for token in part)
    assert len(grown) == len(whole) == sum(map(len, parts))
    assert grown.propose(5) == whole.propose(5)


def test_a_common_pair_costs_a_bounded_search() -> None:
    """A longer match further back than CANDIDATES occurrences of the pair is not found, a shorter one is."""
    lookup = Lookup([7, 8, 1, 2, 9, *([1, 2, 3] * (CANDIDATES + 1)), 7, 8, 1, 2])
    assert lookup.propose(1) == ([3], 2)
