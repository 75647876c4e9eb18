"""The held drafts of one session, as a trie under the tip. Pure.

A **draft** is a guess for one position, a node here. A **chain** is a path of nodes, each the child of the one before.
Every source feeds the same trie: equal tokens under one parent are one node, and the source that came first earns the
credit. When the tip moves the trie is re-rooted along the committed tokens; what hangs beside them is **stale** from
then on (its nodes are dead, and so is all that still refers to them).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

REMEMBERED_POSITIONS = 256
"""How far behind the tip a committed node still answers to its id; a draft that hangs under an older one is stale."""


Claim = tuple[str, float]
"""A source, and how sure it is of a node given that its parent fits: a probability, or what that source has instead."""


@dataclass(eq=False, slots=True)
class Node:
    """One draft. `position` is that of its token; `committed` nodes are history, dead ones are neither. `seconds`: the
    other sources that said the same later on."""

    token: int
    position: int
    confidence: float
    source: str
    children: dict[int, Node] = field(default_factory=dict)
    seconds: tuple[Claim, ...] = ()
    committed: bool = False
    dead: bool = False

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Of all its sources, the first one's first."""
        return ((self.source, self.confidence), *self.seconds)


def stated(node: Node) -> float:
    """The confidence that its first source stated."""
    return node.confidence


class Trie:
    """Node ids are per source; `forget_ids` starts a new numbering for one source and keeps its nodes."""

    def __init__(self, tip: int) -> None:
        self.root = Node(token=-1, position=tip - 1, confidence=1.0, source="", committed=True)
        self._ids: dict[str, dict[int, Node]] = {}
        self._history: deque[tuple[int, Node]] = deque()
        """Committed nodes that were named, by about the time of that."""
        self._held: Counter[str] = Counter()
        self._names: dict[Node, list[tuple[str, int]]] = {}

    @property
    def tip(self) -> int:
        return self.root.position + 1

    @property
    def held(self) -> int:
        """Live nodes under the tip."""
        return sum(self._held.values())

    def held_by(self, source: str) -> int:
        return self._held[source]

    def find(self, source: str, identity: int) -> Node | None:
        """The live or committed node that this source calls `identity`; None when it was pruned."""
        return self._ids.get(source, {}).get(identity)

    def named_by(self, source: str) -> int:
        """Ids of this source that still name a node, live or committed."""
        return len(self._ids.get(source, ()))

    def forget_ids(self, source: str) -> None:
        for identity, node in self._ids.pop(source, {}).items():
            names = self._names.get(node)
            if names is not None:
                names.remove((source, identity))
                if not names:
                    del self._names[node]

    def note_committed(self, source: str, identity: int, position: int, token: int) -> None:
        """A draft that arrived after its token was committed: history, but a parent of drafts to come."""
        node = Node(token=token, position=position, confidence=1.0, source=source, committed=True)
        node = self.root if position == self.root.position else node
        self._name(source, identity, node)
        self._history.append((position, node))

    def attach(
        self, parent: Node, source: str, identity: int | None, token: int, confidence: float
    ) -> tuple[Node, bool]:
        """The node for `token` under `parent` (a live node or the root), and whether it is new. identity None: its
        source will never refer to it."""
        node = parent.children.get(token)
        new = node is None
        if node is None:
            node = Node(token=token, position=parent.position + 1, confidence=confidence, source=source)
            parent.children[token] = node
            self._held[source] += 1
        elif all(source != known for known, _ in node.claims):
            node.seconds = (*node.seconds, (source, confidence))
        if identity is not None:
            self._name(source, identity, node)
        return node, new

    def advance(self, tokens: Iterable[int]) -> frozenset[str]:
        """The tip moves along `tokens`; nodes beside them die. Gives the sources that were refuted: what was held of
        them first at some position was another token."""
        refuted: set[str] = set()
        for token in tokens:
            refuted |= _refuted(self.root, token)
            follower = self.root.children.pop(token, None)
            for sibling in self.root.children.values():
                self._kill(sibling)
            self.root.children.clear()
            if follower is None:
                follower = Node(token=token, position=self.root.position + 1, confidence=1.0, source="")
            else:
                self._held[follower.source] -= 1
                if follower in self._names:
                    self._history.append((follower.position, follower))
            follower.committed = True
            self.root = follower
        self._expire()
        return frozenset(refuted)

    def reset(self, tip: int) -> None:
        """Forget every node and id; the committed tokens are not what was thought."""
        self.__init__(tip)  # type: ignore[misc]

    def best_chain(self, limit: int, chance: Callable[[Node], float] = stated) -> list[Node]:
        """The path from the tip, at most `limit` nodes, with the most expected accepted tokens.

        The value of a path is the sum over its nodes of the product of chances up to there; chance(node): that it fits
        if its parent does.
        """
        if len(self.root.children) <= 1 and (line := self._line(limit)) is not None:
            return line
        values: dict[Node, float] = {}
        order = self._below(limit)
        for node in reversed(order):
            values[node] = chance(node) * (
                1.0 + max((values.get(child, 0.0) for child in node.children.values()), default=0.0)
            )
        chain: list[Node] = []
        node = self.root
        while node.children and len(chain) < limit:
            node = max(node.children.values(), key=lambda child: (values.get(child, 0.0), -child.token))
            chain.append(node)
        return chain

    def _line(self, limit: int) -> list[Node] | None:
        """All that is held, where it is a single chain so far."""
        line: list[Node] = []
        node = self.root
        while node.children and len(line) < limit:
            if len(node.children) > 1:
                return None
            (node,) = node.children.values()
            line.append(node)
        return line

    def _below(self, depth: int) -> list[Node]:
        """Nodes at most `depth` under the tip, parents before children."""
        found: list[Node] = []
        layer: Sequence[Node] = [self.root]
        for _ in range(depth):
            layer = [child for node in layer for child in node.children.values()]
            if not layer:
                break
            found.extend(layer)
        return found

    def _name(self, source: str, identity: int, node: Node) -> None:
        self._ids.setdefault(source, {})[identity] = node
        self._names.setdefault(node, []).append((source, identity))

    def _expire(self) -> None:
        while self._history and self._history[0][0] < self.tip - REMEMBERED_POSITIONS:
            self._unname(self._history.popleft()[1])

    def _unname(self, node: Node) -> None:
        for source, identity in self._names.pop(node, ()):
            self._ids.get(source, {}).pop(identity, None)

    def _kill(self, node: Node) -> None:
        stack = [node]
        while stack:
            dying = stack.pop()
            dying.dead = True
            self._held[dying.source] -= 1
            self._unname(dying)
            stack.extend(dying.children.values())


def _refuted(parent: Node, token: int) -> set[str]:
    first: dict[str, int] = {}
    for child in parent.children.values():
        for source, _ in child.claims:
            first.setdefault(source, child.token)
    return {source for source, said in first.items() if said != token}
