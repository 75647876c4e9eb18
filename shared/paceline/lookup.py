"""Drafts out of a session's own text: what followed when its last tokens stood there before. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

SHORTEST_MATCH = 2
LONGEST_MATCH = 4
CANDIDATES = 32
"""The latest occurrences of the last two tokens that are looked at for a longer match."""
_SHIFT = 32


class Lookup:
    """Index over the committed tokens of one session. Memory: about a hundred bytes for each distinct pair of tokens
    that follow each other, and 12 for each token."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens = array("q")
        self._latest: dict[int, int] = {}
        """Pair of tokens to the position after its latest occurrence that something follows."""
        self._before = array("i")
        """For each position: the one after the occurrence before of the pair that ends there; 0: none."""
        self.append(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Iterable[int]) -> None:
        """Committed tokens, in order; constant time each."""
        for token in tokens:
            position = len(self._tokens)
            before = 0
            if position >= SHORTEST_MATCH:
                pair = _pair(self._tokens[position - 2], self._tokens[position - 1])
                before = self._latest.get(pair, 0)
                self._latest[pair] = position
            self._before.append(before)
            self._tokens.append(token)

    def propose(self, limit: int, after: Sequence[int] = ()) -> tuple[list[int], int]:
        """What followed where the text's last tokens (`after` included, a held chain beyond the tip) stood before: at
        most `limit` tokens, and the length of the match, 2..4. The longest match counts, of equal ones the latest. A
        match that reaches the end of the text goes on into what it proposes: a period is continued. Nothing found:
        ([], 0)."""
        end = len(self._tokens) + len(after)
        if limit <= 0 or end < SHORTEST_MATCH + 1:
            return [], 0
        last = [self._at(end - 1 - back, after) for back in range(min(LONGEST_MATCH, end))]
        start, length = self._match(last)
        if not length:
            return [], 0
        proposed: list[int] = []
        for position in range(start, start + limit):
            proposed.append(self._at(position, after) if position < end else proposed[position - end])
        return proposed, length

    def _match(self, last: Sequence[int]) -> tuple[int, int]:
        """(position after the best occurrence of `last`, newest token first; the match's length)"""
        best, length = 0, 0
        position = self._latest.get(_pair(last[1], last[0]), 0)
        for _ in range(CANDIDATES):
            if not position or length == len(last):
                break
            same = SHORTEST_MATCH
            while same < min(len(last), position) and self._tokens[position - 1 - same] == last[same]:
                same += 1
            if same > length:
                best, length = position, same
            position = self._before[position]
        return best, length

    def _at(self, position: int, after: Sequence[int]) -> int:
        known = len(self._tokens)
        return self._tokens[position] if position < known else after[position - known]


def _pair(first: int, second: int) -> int:
    return first << _SHIFT | second
