"""When drafted nodes go out, and which of them make the next block. Pure, times in seconds.

A block begins with the main chain's next part; unsent parts of branches ride along, and go out by themselves only when
no main part does for a while. Bytes are per message, so a block waits a moment for more; but not while the batcher has
nothing else to verify, and not for more where what there is is doubtful.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.control import Pace
from paceline.draft_tree import DraftTree, Node
from paceline.wire import Bounds, Speculation

DOUBTFUL = 0.6
"""A main part that will be accepted as a whole less likely than this goes out without waiting for more nodes."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """What was not sent yet: the main chain's part, and those of branches, parents before children. `sent`: live nodes
    that were, the `newest` of them at that moment."""

    main: list[Node]
    branches: list[list[Node]]
    sent: int
    newest: float


def unsent(tree: DraftTree) -> Unsent:
    """The first node of a branch alone is not sent: its token is what a rejection brings anyway."""
    whole = tree.main()
    main = [node for node in whole if not node.id]
    sent, branches = [node.sent_at for node in whole if node.id], []
    for chain in tree.branches():
        rest = [node for node in chain if not node.id]
        sent += [node.sent_at for node in chain if node.id]
        if rest and len(chain) > 1:
            branches.append(rest)
    return Unsent(main, branches, len(sent), max(sent, default=-math.inf))


class Cutter:
    """`due` gives the chains of the next block, none while it is not due."""

    def __init__(self, tree: DraftTree, pace: Pace, speculation: Speculation, bounds: Bounds) -> None:
        self._tree, self._pace, self._speculation, self._bounds = tree, pace, speculation, bounds

    def due(self, *, stalled: bool, waits: bool, now: float) -> list[list[Node]]:
        """stalled: the main chain goes no further; waits: not before a verdict. What is returned must be sent."""
        what = unsent(self._tree)
        if not self._main_due(what, stalled, waits, now) and not self._branches_due(what, waits, now):
            return []
        return self._chains(what)

    def next_at(self, now: float) -> float | None:
        """When something may be due without a further event; None: never."""
        what = unsent(self._tree)
        if self._speculation.depth or what.sent >= self._bounds.held - 1:
            return None
        moments = []
        if what.main and self._late(now):
            moments.append(what.main[0].drafted_at + self._pace.round_trip)
        elif what.main and self._near_end(now):
            moments.append(self._flush_at(what, what.main[0].drafted_at))
        if what.branches and not self._late(now) and self._near_end(now):
            moments.append(self._flush_at(what, min(run[-1].drafted_at for run in what.branches)))
        return min(moments, default=None)

    def _main_due(self, what: Unsent, stalled: bool, waits: bool, now: float) -> bool:
        if not what.main or what.sent >= self._bounds.held - 1:
            return False
        first = what.main[0]
        if first.urgent:
            return True
        if self._late(now):
            return now >= first.drafted_at + self._pace.round_trip
        if len(what.main) >= self._speculation.max_draft or stalled:
            return True
        if self._speculation.depth:
            return waits
        return self._near_end(now) and (waits or now >= self._flush_at(what, first.drafted_at) or _doubtful(what.main))

    def _branches_due(self, what: Unsent, waits: bool, now: float) -> bool:
        if not what.branches or what.sent >= self._bounds.held - 1:
            return False
        if what.branches[0][0].urgent:
            return True
        if self._late(now) or not self._near_end(now):
            return False
        return waits or now >= self._flush_at(what, min(run[-1].drafted_at for run in what.branches))

    def _flush_at(self, what: Unsent, drafted_at: float) -> float:
        """When what was drafted at that moment waits no longer for more."""
        return max(drafted_at + self._pace.flush_s, what.newest + self._pace.refill_s)

    def _late(self, now: float) -> bool:
        """What there is would arrive behind the filling cloud."""
        lead = None if self._speculation.depth else self._pace.lead(now)
        return lead is not None and len(self._tree.main()) <= lead

    def _near_end(self, now: float) -> bool:
        """The batcher will soon have nothing left: it holds nothing of ours, or keeps up with us."""
        first = next(iter(self._tree.main()), None)
        return first is None or not first.id or now - first.sent_at <= self._pace.decided_within_s

    def _chains(self, what: Unsent) -> list[list[Node]]:
        room, longest = self._bounds.held - 1 - what.sent, self._bounds.chain
        chains: list[list[Node]] = []
        leaving: set[int] = set()
        if what.main:
            most = longest if what.main[0].urgent else min(longest, self._speculation.max_draft)
            chains.append(what.main[: min(most, room)])
        for run in what.branches:
            chains.append(run[:longest])
        kept: list[list[Node]] = []
        for chain in chains:
            parent = chain[0].parent if chain else None
            placed = parent is None or parent.id or id(parent) in leaving or parent.position < self._tree.root
            part = chain[:room]
            if not part or not placed or len(kept) >= self._bounds.chains:
                continue
            kept.append(part)
            room -= len(part)
            leaving.update(id(node) for node in part)
        return kept


def _doubtful(nodes: list[Node]) -> bool:
    product = 1.0
    for node in nodes:
        product *= node.confidence
    return product < DOUBTFUL
