"""What to draft next: which ends of the tree one pass of the draft model extends. Pure.

The **value** of a row is the chance that the target gets to the end that it extends, times the chance that what follows
still arrives in time to be verified. The first row is the main chain's; a further one joins when it earns more per
millisecond that it costs than the pass does without it. Since the rows of one pass share the reading of the weights, a
second one is cheap: so doubtful positions are drafted on along their runner-ups, and the target finds a continuation
after its correction.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.draft_tree import DraftTree, Node

FLOOR = 0.02
"""An end that the target gets to less likely than this is not extended."""
REACH_FLOOR = 0.1
"""One that overtakes the filling cloud less likely than this is not drafted from behind."""


Reason = Literal["drafting", "end", "window", "floor", "behind", "price", "block", "held"]
"""Why the main chain is extended or not. end: of the context, the completion or the text; window: full; floor:
hardly reached by the target; behind: the filling cloud is not to be overtaken; price: enough for what a dear
verifier takes; block: enough in flight for this depth; held: as many nodes as the batcher takes."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The end to be extended: `node`, or its runner-up `token` once that is hung."""

    value: float
    node: Node
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """most: nodes that may be added; rows: of a pass; deepest: nodes of a chain beyond the tip; longest: tokens of a
    path; floor: least value of a branch's row. lead: see Pace; gain: tokens gained on the filling cloud with each one
    drafted; mean: acceptance."""

    most: int
    rows: int
    deepest: int
    longest: int
    end_ids: frozenset[int]
    floor: float = FLOOR
    lead: float | None = None
    gain: float = 1.0
    mean: float = 1.0

    def in_time(self, depth: int) -> float:
        """The chance that a chain which is so deep now grows fast and right enough to overtake the filling cloud."""
        if self.lead is None or depth > self.lead:
            return 1.0
        return self.mean ** ((self.lead - depth) / self.gain) if self.gain > 0 else 0.0


def branch_candidates(tree: DraftTree, limits: Limits) -> list[Candidate]:
    """Every end but the main one that is worth a row: leaves of branches, and runner-ups that were not hung yet. Best
    first, at most limits.rows."""
    found: list[Candidate] = []
    in_time = [limits.in_time(depth) for depth in range(limits.deepest + 2)]
    stack: list[tuple[Node, bool]] = [(tree.tip, True)]
    while stack:
        node, main = stack.pop()
        survival, depth = tree.survival(node), tree.depth(node)
        if survival < FLOOR or depth > limits.deepest:
            continue
        if node.next is None:
            if not main and _extendable(tree, node, limits):
                found.append(Candidate(survival * in_time[depth], node))
            continue
        stack.append((node.next, main))
        stack.extend((fork, False) for fork in node.forks)
        if node.position + 2 > limits.longest or depth >= limits.deepest or not node.runners:
            continue
        for token, confidence in node.runners:
            if token not in limits.end_ids:
                found.append(Candidate(survival * confidence * in_time[depth + 1], node, token))
    floors = [limits.floor if factor == 1.0 else max(limits.floor, REACH_FLOOR) for factor in in_time]
    found = [one for one in found if one.value >= floors[tree.depth(one.node) + (one.token is not None)]]
    return heapq.nlargest(limits.rows, found, key=lambda candidate: candidate.value)


def _extendable(tree: DraftTree, node: Node, limits: Limits) -> bool:
    return node.position + 1 <= limits.longest and node.token not in limits.end_ids


def rows_of_pass(
    main: Candidate, branches: Sequence[Candidate], limits: Limits, cost: Callable[[int], float]
) -> list[Candidate]:
    """The ends of the next pass: the main one, whose KV stays with the engine's first path, and as many of `branches`
    (best first) as give the pass the most value for its time. cost(r): time of a pass with r rows."""
    best, rate = [main], main.value / cost(1)
    chosen, total, room = [main], main.value, limits.most - 1
    for branch in branches[: limits.rows - 1]:
        room -= 1 if branch.token is None else 2
        if room < 0:
            break
        chosen.append(branch)
        total += branch.value
        if total / cost(len(chosen)) > rate:
            best, rate = list(chosen), total / cost(len(chosen))
    return best
