"""Which ledger serves which branch of a session. Pure.

A session's branches come and go and are extended by turns, so a branch is found again by what its ledger holds, not by
its place in a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.kv_ledger import Ledger, Ledgers, common_prefix

KEPT_BRANCHES = 8
"""Branches of one session that keep KV: more than go into one pass."""


class Slot(NamedTuple):
    """A branch's place: the key of its ledger, and how many tokens of its path have KV or can be shared."""

    key: str
    held: int


def branches(ledgers: Ledgers, session: str) -> Iterator[Ledger]:
    """The session's branches that hold anything."""
    return (ledger for key in _keys(session) if (ledger := ledgers.get(key)) is not None)


def held(ledgers: Ledgers, session: str, path: Sequence[int]) -> int:
    """Tokens of `path` that need no feeding, by the session's own ledger or one of its branches."""
    own = common_prefix(ledgers.held(session), path)
    if own >= len(path) - 1:
        return own
    return max([own, *(_fed(branch, path) for branch in branches(ledgers, session))])


def slots(ledgers: Ledgers, session: str, main: Sequence[int], paths: Sequence[Sequence[int]]) -> list[Slot]:
    """One for each path. `main` is the path that the session's own ledger serves in the same pass. A branch that holds
    something of a path beyond `main` serves it; the others go to an unused place, else to the least recently used."""
    forks = [common_prefix(main, path) for path in paths]
    found: dict[int, Slot] = {}
    taken: set[str] = set()
    known = list(branches(ledgers, session))
    fits = [
        (_fed(branch, path), i, branch.session)
        for branch in known
        for i, (path, fork) in enumerate(zip(paths, forks, strict=True))
        if branch.tokens[fork : fork + 1] == list(path[fork : fork + 1])
    ]
    for length, index, key in sorted(fits, key=lambda fit: -fit[0]):
        if length > forks[index] and index not in found and key not in taken:
            found[index] = Slot(key, length)
            taken.add(key)
    idle = sorted((branch for branch in known if branch.session not in taken), key=lambda branch: branch.used_at)
    used = {branch.session for branch in known}
    unused = [key for key in _keys(session) if key not in used]
    rest = iter([*unused[: ledgers.spare], *(branch.session for branch in idle), *unused[ledgers.spare :]])
    own = held(ledgers, session, main)
    return [found.get(i) or Slot(next(rest), min(fork, own)) for i, fork in enumerate(forks)]


def _keys(session: str) -> list[str]:
    return [f"{session}\x00{number}" for number in range(1, KEPT_BRANCHES + 1)]


def _fed(ledger: Ledger, path: Sequence[int]) -> int:
    return min(common_prefix(ledger.tokens, path), ledger.fed)
