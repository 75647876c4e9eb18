"""What one drafting source has drafted of one session: committed tokens, and a tree of nodes under the tip. Pure.

Each node holds what the draft model said of the position after it: its choice (`next`) and the runner-ups of that
choice. The **main chain** follows the choices from the tip on. A **fork** is a runner-up that was hung beside the
choice to be continued; when the target takes it, its chain is the main one from then on and its siblings die.

`root` is the batcher's tip as far as it is known. It lies below our own committed length only where the batcher's store
lost a tail: the tokens in between (the `trunk`) then stand before the drafts, to be verified again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.engine import Guess


@dataclass(slots=True, eq=False)
class Node:
    """One token. `confidence`: P(it fits | its parent fits). `id`: its number in this incarnation, 0 before it is sent;
    `block` counts the blocks of a source. `unread`: tokens up to this one that the draft model has not read."""

    token: int
    position: int
    parent: Node | None
    confidence: float
    log_chance: float
    """Sum of the log confidences along its path, from some node before the tip on."""
    drafted_at: float = 0.0
    unread: int = 1
    sent_at: float = 0.0
    id: int = 0
    block: int = 0
    urgent: bool = False
    """Was sent in an earlier incarnation, and goes out again without waiting for more."""
    alive: bool = True
    """The tip, or beyond it."""
    guess: Guess | None = None
    next: Node | None = None
    forks: list[Node] = field(default_factory=list)
    runners: list[tuple[int, float]] = field(default_factory=list)
    """Runner-ups that were not hung: token, and confidence as a node."""

    @property
    def children(self) -> list[Node]:
        return self.forks if self.next is None else [self.next, *self.forks]


@dataclass(frozen=True, slots=True)
class Lesson:
    """A decided position that we had drafted. rank: 0, the choice was right; k: runner-up k was; -1: neither."""

    confidence: float
    gap: float
    rank: int


class DraftTree:
    """A verdict that runs along the main chain leaves it standing; any other changes it, and `generation` grows."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.committed = list(tokens)
        self.root = len(self.committed)
        self.trunk: list[Node] = []
        self.tip = Node(tokens[-1] if tokens else -1, self.root - 1, None, 1.0, 0.0, unread=max(1, self.root))
        self.size = 0
        """Nodes beyond the tip."""
        self.generation = 0
        self.forgotten = 0
        self.taken = 0
        """Forks that the target took."""
        self.lessons: list[Lesson] = []
        """Since they were last cleared."""

    # --- reading ----------------------------------------------------------------------------------------------------

    def ahead(self) -> list[Node]:
        """The main chain beyond the tip."""
        chain, node = [], self.tip.next
        while node is not None:
            chain.append(node)
            node = node.next
        return chain

    def main(self) -> list[Node]:
        """The main chain from the batcher's tip on."""
        return self.trunk + self.ahead()

    def branches(self) -> Iterator[list[Node]]:
        """The other chains, parents before children."""
        heads = [fork for node in reversed([self.tip, *self.ahead()]) for fork in reversed(node.forks)]
        while heads:
            node: Node | None = heads.pop()
            chain = []
            while node is not None:
                chain.append(node)
                heads.extend(node.forks)
                node = node.next
            yield chain

    def live(self) -> Iterator[Node]:
        """All nodes from the batcher's tip on."""
        yield from self.trunk
        stack = [self.tip]
        while stack:
            node = stack.pop()
            if node is not self.tip:
                yield node
            if node.next is not None:
                stack.append(node.next)
            stack.extend(node.forks)

    def depth(self, node: Node) -> int:
        """Positions beyond our committed tokens; 0 for the tip."""
        return node.position - self.tip.position

    def survival(self, node: Node) -> float:
        """The chance that the target takes the path to `node`."""
        return math.exp(node.log_chance - self.tip.log_chance)

    def path(self, node: Node) -> list[int]:
        """All tokens up to `node`, a live one."""
        beyond = []
        at: Node | None = node
        while at is not None and at is not self.tip:
            beyond.append(at.token)
            at = at.parent
        return self.committed[: node.position + 1 - len(beyond)] + beyond[::-1]

    def tokens(self) -> list[int]:
        """The path of the main chain."""
        return self.committed + [node.token for node in self.ahead()]

    # --- drafting ---------------------------------------------------------------------------------------------------

    def extend(self, node: Node, guess: Guess, confidence: float, runners: Sequence[float], now: float) -> Node:
        """Hang the draft's choice under `node`. runners: confidence of each of the guess's alternatives."""
        node.guess, node.unread = guess, 0
        node.next = self._child(node, guess.token, confidence, now)
        named = {token: confidence for (token, _), confidence in zip(guess.alternatives, runners, strict=False)}
        named.pop(guess.token, None)
        node.runners = list(named.items())
        return node.next

    def hang(self, node: Node, token: int, now: float) -> Node:
        """Make the runner-up `token` of what follows `node` a fork."""
        confidence = next(confidence for runner, confidence in node.runners if runner == token)
        node.runners = [runner for runner in node.runners if runner[0] != token]
        fork = self._child(node, token, confidence, now)
        node.forks.append(fork)
        return fork

    def _child(self, parent: Node, token: int, confidence: float, now: float) -> Node:
        self.size += 1
        chance = parent.log_chance + math.log(max(confidence, 1e-9))
        return Node(token, parent.position + 1, parent, confidence, chance, now)

    # --- verdicts ---------------------------------------------------------------------------------------------------

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
        tip = self.tip
        self._learn(tip, token)
        self.committed.append(token)
        follower = next((child for child in tip.children if child.token == token), None)
        if follower is None:
            follower = Node(token, tip.position + 1, tip, 1.0, tip.log_chance, unread=tip.unread + 1)
        else:
            self.size -= 1
        if follower is not tip.next:
            self.generation += 1
            self.taken += follower in tip.forks
        for child in tip.children:
            if child is not follower:
                self._kill(child)
        tip.alive = False
        tip.next, tip.forks, tip.runners = None, [], []
        self.tip = follower
        if self.trunk:
            self.trunk.append(follower)
        elif self.root == tip.position + 1:
            self.trunk = [follower]

    def _learn(self, tip: Node, token: int) -> None:
        if tip.guess is None:
            return
        runners = [runner for runner, _ in tip.guess.alternatives]
        rank = 0 if token == tip.guess.token else runners.index(token) + 1 if token in runners else -1
        gap = tip.guess.alternatives[0][1] if runners else math.inf
        self.lessons.append(Lesson(tip.guess.confidence, gap, rank))

    def _kill(self, node: Node) -> None:
        stack = [node]
        while stack:
            dying = stack.pop()
            dying.alive = False
            self.size -= 1
            self.forgotten += 1
            stack.extend(dying.children)

    def rebase(self, root: int) -> None:
        """Move the known tip: forward drops what is history, back puts our own tail before the drafts (and everything
        has to be sent again)."""
        if root < self.root:
            first = (self.trunk or [self.tip])[0]
            parent: Node | None = None
            tail = []
            for position in range(root, first.position):
                parent = Node(self.committed[position], position, parent, 1.0, 0.0, unread=0)
                tail.append(parent)
            first.parent = parent
            self.trunk = tail + (self.trunk or [self.tip])
        else:
            self.trunk = [node for node in self.trunk if node.position >= root]
            (self.trunk or [self.tip])[0].parent = None
        self.root = root

    # --- sending ----------------------------------------------------------------------------------------------------

    def send_again(self) -> None:
        """Nothing of this counts as sent any more, and all of it is urgent."""
        for node in self.live():
            node.id, node.block, node.urgent = 0, 0, True
