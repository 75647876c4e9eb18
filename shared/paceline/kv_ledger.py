"""Who holds which KV cell: ledgers, room, eviction, prefix reuse. Pure: it decides and lists what memory has to do.

A *ledger* is one session's known token ids, KV for the first `len(cells)` of them, and its sequence number in the
engine's memory. Cells are counted by reference, because sequences of one tenant may share those of a common prefix.
A *branch* is a further ledger of a session, for another path of it: it shares whatever it can with the session's other
ledgers, and goes before anything that a session cannot do without.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.errors import NoRoom

MIN_SHARED = 16
"""A shorter common prefix of two sessions is fed again rather than shared."""
RETAINED = 2048
"""Cells that released sessions may keep by default, the latest one left out."""


class Known(NamedTuple):
    """The first `length` tokens of a path are a copy of those of `source`, a ledger's list."""

    source: Sequence[int]
    length: int


class Remove(NamedTuple):
    """Memory forgets `sequence` from position `start` on."""

    sequence: int
    start: int


class Share(NamedTuple):
    """Memory lets `target` share the cells of `source` at positions [start, end)."""

    source: int
    target: int
    start: int
    end: int


MemoryOp = Remove | Share


@dataclass
class Ledger:
    """tokens: ids as far as known; cells: one for each position that has KV or is about to get it (never more than
    tokens); fed: positions whose KV is in memory for certain; branch_of: the session that this is a branch of."""

    session: str
    tenant: str
    sequence: int
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    fed: int = 0
    used_at: float = 0.0
    released: bool = False
    branch_of: str = ""

    @property
    def family(self) -> str:
        """The session that this ledger belongs to, as its main one or as a branch."""
        return self.branch_of or self.session


class Ledgers:
    """All ledgers of one engine. cells, sequences: what memory has. grace_s: a live session that was stepped within
    this time is not evicted for another one, so that sessions do not throw each other out in turns. retained: cells
    that released sessions may keep; the one released last may keep up to a quarter of all, so that a long
    conversation finds its beginning. Attention passes over all cells that hold anything: on one core, SmolLM2's step
    takes 12 % longer with 5,000 cells retained."""

    def __init__(self, cells: int, sequences: int, grace_s: float = 1.0, retained: int | None = None) -> None:
        self.total = cells
        self.sequences = sequences
        self.grace_s = grace_s
        self._retained = min(cells // 4, RETAINED) if retained is None else retained
        self._last = cells // 4 if retained is None else retained
        self._ledgers: dict[str, Ledger] = {}
        self._references = [0] * cells
        self._free = list(range(cells - 1, -1, -1))
        self._spare = list(range(sequences - 1, -1, -1))
        self._ops: list[MemoryOp] = []

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    @property
    def live(self) -> int:
        """Sessions that are not released."""
        return sum(not (ledger.released or ledger.branch_of) for ledger in self._ledgers.values())

    @property
    def spare(self) -> int:
        """Sequences that nobody has."""
        return len(self._spare)

    def get(self, session: str) -> Ledger | None:
        return self._ledgers.get(session)

    def held(self, session: str) -> tuple[int, ...]:
        return tuple(self.tokens(session))

    def tokens(self, session: str) -> Sequence[int]:
        """What `held` copies, to be read before anything else happens to the ledger."""
        ledger = self._ledgers.get(session)
        return ledger.tokens if ledger else ()

    def take_ops(self) -> list[MemoryOp]:
        """What memory has to do before the next pass, in order; each is handed out once."""
        ops, self._ops = self._ops, []
        return ops

    def trim(self, session: str, length: int) -> None:
        ledger = self._ledgers.get(session)
        if ledger:
            del ledger.tokens[length:]
            self._cut(ledger, length)

    def release(self, session: str) -> None:
        """Kept for its prefix, within bounds, and the first to be evicted; its branches are gone at once."""
        for branch in [one.session for one in self._ledgers.values() if one.branch_of == session]:
            self.evict(branch)
        ledger = self._ledgers.get(session)
        if ledger:
            ledger.released = True
        idle = sorted((ledger for ledger in self._ledgers.values() if ledger.released), key=lambda one: -one.used_at)
        kept = 0
        for ledger in idle:
            if kept + len(ledger.cells) > (self._retained if kept else self._last):
                self.evict(ledger.session)
            else:
                kept += len(ledger.cells)

    def claim(
        self,
        session: str,
        tenant: str,
        path: Sequence[int],
        *,
        keep: int,
        pinned: Collection[str],
        now: float,
        branch_of: str = "",
        known: Known | None = None,
    ) -> tuple[Ledger, int]:
        """Cells for all of `path`. Returns the session's ledger, which now is `path`, and the position from which on
        it has to be fed: at most `keep`. branch_of: `session` names a branch of this session, of the same tenant.
        known: what of `path` was copied from where.

        Raises NoRoom; the session then holds what it held, at most `keep` of it with KV. `pinned` sessions are never
        evicted, and none that lives is for a branch.
        """
        if len(path) > self.total:
            raise NoRoom(f"{len(path)} tokens can never fit into {self.total} KV cells")
        new = session not in self._ledgers
        ledger = self._opened(session, tenant, pinned, now, branch_of)
        self._cut(ledger, min(_agreement(ledger.tokens, path, known), keep))
        self._share(ledger, path, keep)
        start = len(ledger.cells)
        if not self._make_room(len(path) - start, {session, *pinned}, now, branch_of):
            if new:
                self.evict(session)
            raise NoRoom(f"{len(path) - start} KV cells are needed, {len(self._free)} are free")
        ledger.cells += [self._taken() for _ in range(len(path) - start)]
        ledger.tokens, ledger.used_at, ledger.released = list(path), now, False
        return ledger, start

    def _taken(self) -> int:
        cell = self._free.pop()
        self._references[cell] = 1
        return cell

    def settle(self, ledger: Ledger, tokens: list[int], kv: int) -> None:
        """After a pass: the ids that stand, and how many of them keep their KV."""
        ledger.tokens = tokens
        self._cut(ledger, kv)
        ledger.fed = kv

    def undo(self, ledger: Ledger, start: int) -> None:
        """A pass failed after feeding an unknown part of what lies beyond `start`: memory forgets it all."""
        del ledger.tokens[start:]
        self._cut(ledger, start, always=True)

    def evict(self, session: str) -> None:
        ledger = self._ledgers.pop(session, None)
        if ledger:
            self._cut(ledger, 0, always=True)
            self._spare.append(ledger.sequence)

    def lose(self, sequences: Collection[int]) -> None:
        """Memory has lost what was in these: their sessions are forgotten."""
        for ledger in [ledger for ledger in self._ledgers.values() if ledger.sequence in sequences]:
            self.evict(ledger.session)

    def reset(self) -> None:
        """Forget every session, and whatever else memory may hold."""
        for session in list(self._ledgers):
            self.evict(session)
        self._ops = [Remove(sequence, 0) for sequence in range(self.sequences)]

    def _opened(self, session: str, tenant: str, pinned: Collection[str], now: float, branch_of: str) -> Ledger:
        ledger = self._ledgers.get(session)
        if ledger and ledger.tenant == tenant and ledger.branch_of == branch_of:
            return ledger
        if ledger:
            self.evict(session)
        while not self._spare:
            self.evict(self._victim(pinned, now, f"all {len(self._ledgers)} sequences are taken", branch_of))
        ledger = Ledger(session, tenant, self._spare.pop(), used_at=now, branch_of=branch_of)
        self._ledgers[session] = ledger
        return ledger

    def _make_room(self, need: int, pinned: Collection[str], now: float, branch_of: str) -> bool:
        while len(self._free) < need:
            try:
                self.evict(self._victim(pinned, now, "", branch_of))
            except NoRoom:
                return False
        return True

    def _victim(self, pinned: Collection[str], now: float, why: str, branch_of: str) -> str:
        """Least recently used: released ledgers first, then branches, then live ones that have been idle for the
        grace time. For a branch: a released ledger or an idle branch."""

        def goes(ledger: Ledger) -> bool:
            branch, idle = ledger.branch_of != "", now - ledger.used_at >= self.grace_s
            return ledger.released or (branch and idle if branch_of else branch or idle)

        found = [ledger for ledger in self._ledgers.values() if ledger.session not in pinned and goes(ledger)]
        if not found:
            raise NoRoom(why)
        return min(found, key=lambda ledger: (not ledger.released, not ledger.branch_of, ledger.used_at)).session

    def _share(self, ledger: Ledger, path: Sequence[int], keep: int) -> None:
        """Take over the cells of the longest prefix that another ledger of the tenant holds."""
        start, end, donor = len(ledger.cells), len(ledger.cells), None
        if keep <= end:
            return
        for other in self._ledgers.values():
            least = max(end, start + (0 if other.family == ledger.family else MIN_SHARED - 1))
            if other is not ledger and other.tenant == ledger.tenant and min(other.fed, keep) > least:
                length = min(common_prefix(other.tokens, path), other.fed, keep)
                if length > least:
                    end, donor = length, other
        if donor is None:
            return
        for cell in donor.cells[start:end]:
            self._references[cell] += 1
            ledger.cells.append(cell)
        ledger.tokens = list(path[:end])
        ledger.fed = end
        self._ops.append(Share(donor.sequence, ledger.sequence, start, end))

    def _cut(self, ledger: Ledger, length: int, *, always: bool = False) -> None:
        dropped = ledger.cells[length:]
        del ledger.cells[length:]
        ledger.fed = min(ledger.fed, length)
        for cell in dropped:
            self._references[cell] -= 1
            if self._references[cell] == 0:
                self._free.append(cell)
        if dropped or always:
            self._ops.append(Remove(ledger.sequence, length))


def _agreement(tokens: list[int], path: Sequence[int], known: Known | None) -> int:
    """Length of the common prefix. Tokens that were copied need not be compared: a ledger's list is cut, or replaced by
    another list, but never changed otherwise."""
    if known is None or known.source is not tokens:
        return common_prefix(tokens, path)
    start = min(known.length, len(tokens), len(path))
    return start + common_prefix(tokens[start:], path[start:])


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix, by halving: slices compare in C."""
    low, high = 0, min(len(a), len(b))
    if list(a[:high]) == list(b[:high]):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            high = middle
    return low
