"""The chains that a source sent in its present incarnation and that the batcher has not confirmed. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from paceline.wire import Chain

MOST_NODES = 512
"""Beyond that a new incarnation with what lives is shorter."""


class DraftLog:
    """By node id, dead nodes included: ids are consecutive for the batcher, so what it missed is repeated as it was."""

    def __init__(self) -> None:
        self._chains: deque[Chain] = deque()
        self._nodes = 0

    @property
    def full(self) -> bool:
        return self._nodes > MOST_NODES

    def clear(self) -> None:
        self._chains.clear()
        self._nodes = 0

    def add(self, chains: Iterable[Chain]) -> None:
        for chain in chains:
            self._chains.append(chain)
            self._nodes += len(chain.tokens)

    def confirm(self, seen: int) -> None:
        """The batcher has processed ids 1..seen."""
        while self._chains and _last(self._chains[0]) <= seen:
            self._nodes -= len(self._chains.popleft().tokens)

    def since(self, seen: int, longest: int) -> list[Chain] | None:
        """What was sent after node `seen`, in chains of at most `longest` nodes; None when a part is not kept."""
        rest = [_after(chain, seen) for chain in self._chains if _last(chain) > seen]
        if not rest or rest[0].first != seen + 1:
            return None
        joined = [rest[0]]
        for chain in rest[1:]:
            before = joined[-1]
            if chain.after == _last(before) and len(before.tokens) + len(chain.tokens) <= longest:
                joined[-1] = msgspec.structs.replace(
                    before, tokens=before.tokens + chain.tokens, conf=before.conf + chain.conf
                )
            else:
                joined.append(chain)
        return joined


def _last(chain: Chain) -> int:
    return chain.first + len(chain.tokens) - 1


def _after(chain: Chain, seen: int) -> Chain:
    """The part of a chain with ids above `seen`."""
    skip = seen + 1 - chain.first
    if skip <= 0:
        return chain
    position, tokens, conf = chain.position + skip, chain.tokens[skip:], chain.conf[skip:]
    return Chain(first=seen + 1, position=position, tokens=tokens, conf=conf, after=seen)
