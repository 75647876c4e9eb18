"""The path of one drafting source: committed tokens, then one chain of drafted nodes. Pure.

`root` is the batcher's tip as far as it is known; the nodes start there. It lies below our own committed length only
where the batcher's store lost a tail: those tokens then stand before the drafts, to be verified again. Nodes [0, sent)
have been sent and have consecutive ids; a node has none before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine import Guess


@dataclass(slots=True)
class Node:
    """A drafted token; `block` counts the blocks of a source and is 0 before the node is sent."""

    token: int
    confidence: float
    drafted_at: float
    sent_at: float = 0.0
    block: int = 0


class DraftPath:
    """A verdict that runs along the path leaves the drafts standing; any other **re-roots**: what was drafted beyond
    the new tip is forgotten, and `generation` grows (a guess for an older one is void)."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.committed = list(tokens)
        self.root = len(self.committed)
        self.nodes: list[Node] = []
        self.sent = 0
        self.urgent = 0
        """Nodes [sent, urgent) were sent once and go out again without waiting for more."""
        self.generation = 0
        self.forgotten = 0

    @property
    def ahead(self) -> int:
        """Drafted nodes beyond the committed tokens."""
        return len(self.nodes) - (len(self.committed) - self.root)

    @property
    def unsent(self) -> list[Node]:
        return self.nodes[self.sent :]

    def tokens(self) -> list[int]:
        return self.committed + [node.token for node in self.nodes[len(self.committed) - self.root :]]

    def blocks_in_flight(self) -> int:
        return len({node.block for node in self.nodes[: self.sent]})

    def extend(self, guess: Guess, now: float) -> None:
        self.nodes.append(Node(guess.token, min(1.0, max(0.0, guess.confidence)), now))

    def commit(self, at: int, tokens: tuple[int, ...], *, follow: bool) -> bool:
        """Tokens decided from `at` on, at <= len(committed). follow: the tip they end at counts even where it is below
        the one known. False, and nothing changed: they differ from what was committed before."""
        known = tuple(self.committed[at : at + len(tokens)])
        if known != tokens[: len(known)]:
            return False
        for token in tokens[len(known) :]:
            self._append(token)
        end = at + len(tokens)
        self.rebase(end if follow else max(end, self.root))
        return True

    def _append(self, token: int) -> None:
        index = len(self.committed) - self.root
        if index >= len(self.nodes) or self.nodes[index].token != token:
            self.forgotten += max(0, len(self.nodes) - index)
            del self.nodes[index:]
            self.generation += 1
        self.committed.append(token)

    def rebase(self, root: int) -> None:
        """Move the known tip: forward drops nodes that are history, back puts our own tail before the drafts (and
        everything has to be sent again)."""
        if root < self.root:
            tail = self.committed[root : self.root]
            self.nodes[:0] = [Node(token, 1.0, 0.0) for token in tail]
            self.sent = self.urgent = 0
        else:
            moved = root - self.root
            del self.nodes[:moved]
            self.sent = min(max(0, self.sent - moved), len(self.nodes))
            self.urgent = min(max(0, self.urgent - moved), len(self.nodes))
        self.root = root

    def mark_sent(self, count: int, block: int, now: float) -> None:
        for node in self.nodes[self.sent : self.sent + count]:
            node.sent_at, node.block = now, block
        self.sent += count

    def send_again(self) -> None:
        self.sent, self.urgent = 0, len(self.nodes)


def survival(nodes: Sequence[Node]) -> float:
    """The chance that all of them are accepted, by the draft model's own (uncalibrated) confidence."""
    product = 1.0
    for node in nodes:
        product *= node.confidence
    return product
