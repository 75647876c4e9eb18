"""What was sent and is repeated as it was."""

from __future__ import annotations

from paceline.draft_log import MOST_NODES, DraftLog
from paceline.wire import Chain


def chain(first: int, length: int, *, after: int | None = None, position: int = 10) -> Chain:
    tokens = tuple(range(100 + first, 100 + first + length))
    at = position if after is None else None
    return Chain(first=first, position=position, tokens=tokens, conf=bytes(length), after=after, at=at)


def test_what_follows_one_another_is_one_chain_again():
    log = DraftLog()
    log.add([chain(1, 4), chain(5, 2, after=4, position=14), chain(7, 3, after=2, position=12)])
    whole, branch = log.since(0, longest=64) or []
    assert (whole.first, whole.at, len(whole.tokens), len(whole.conf)) == (1, 10, 6, 6)
    assert (branch.first, branch.after) == (7, 2)
    assert [len(part.tokens) for part in log.since(0, longest=5) or []] == [4, 2, 3]


def test_a_part_that_was_seen_is_left_out():
    log = DraftLog()
    log.add([chain(1, 4), chain(5, 3, after=2, position=12)])
    first, second = log.since(2, longest=64) or []
    assert (first.first, first.after, first.position, first.tokens) == (3, 2, 12, (103, 104))
    assert (second.first, second.after) == (5, 2)
    (rest,) = log.since(6, longest=64) or []
    assert (rest.first, rest.after, rest.position, rest.tokens) == (7, 6, 14, (107,))


def test_what_was_confirmed_is_not_kept():
    log = DraftLog()
    log.add([chain(1, 4), chain(5, 3, after=4)])
    log.confirm(4)
    assert log.since(3, longest=64) is None
    assert [part.first for part in log.since(4, longest=64) or []] == [5]
    assert log.since(7, longest=64) is None


def test_it_is_full_beyond_its_bound():
    log = DraftLog()
    for number in range(MOST_NODES // 64):
        log.add([chain(64 * number + 1, 64)])
    assert not log.full
    log.add([chain(MOST_NODES + 1, 1)])
    assert log.full
    log.confirm(64)
    assert not log.full
