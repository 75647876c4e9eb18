"""Which of a session's ledgers serves which branch."""

from __future__ import annotations

from paceline.kv_branches import KEPT_BRANCHES, Slot, branches, held, slots
from paceline.kv_ledger import Ledgers

MAIN = list(range(30))


def room(sequences: int = 20, **paths: list[int]) -> Ledgers:
    """Session `s` with MAIN, and branches by number (b1, b2, ...), each used a second after the one before."""
    ledgers = Ledgers(cells=1000, sequences=sequences)
    own = {"s": MAIN, **{f"s\x00{key[1:]}": path for key, path in paths.items()}}
    for now, (session, path) in enumerate(own.items()):
        branch_of = "s" if session != "s" else ""
        ledger, _ = ledgers.claim(session, "t", path, keep=len(path), pinned=(), now=now, branch_of=branch_of)
        ledgers.settle(ledger, list(path), len(path))
    return ledgers


def test_a_new_branch_goes_to_an_unused_place() -> None:
    ledgers = room(b1=[*MAIN[:5], 99])
    first, second = slots(ledgers, "s", [*MAIN, 30], [[*MAIN[:7], 50], [*MAIN, 60]])
    assert first == Slot("s\x002", 7)
    assert second == Slot("s\x003", 30)


def test_a_branch_goes_where_most_of_it_is() -> None:
    short, long = [*MAIN[:5], 90], [*MAIN[:5], 90, 91, 92]
    ledgers = room(b1=short, b2=long, b3=[*MAIN[:5], 80])
    asked = [[*short, 93], [*long, 94], [*MAIN[:5], 80, 81]]
    assert slots(ledgers, "s", MAIN, asked) == [Slot("s\x001", 6), Slot("s\x002", 8), Slot("s\x003", 6)]
    assert slots(ledgers, "s", MAIN, asked[::-1]) == [Slot("s\x003", 6), Slot("s\x002", 8), Slot("s\x001", 6)]
    assert slots(ledgers, "s", MAIN, [long]) == [Slot("s\x002", 8)]


def test_without_a_free_place_or_sequence_the_branch_used_longest_ago_goes() -> None:
    full = room(**{f"b{i}": [*MAIN[:3], 100 + i] for i in range(1, KEPT_BRANCHES + 1)})
    assert slots(full, "s", MAIN, [[*MAIN[:4], 50], [*MAIN[:3], 101], [*MAIN[:6], 50]]) == [
        Slot("s\x002", 4),
        Slot("s\x001", 4),
        Slot("s\x003", 6),
    ]
    few = room(sequences=3, b4=[*MAIN[:3], 90], b2=[*MAIN[:3], 91])
    assert [slot.key for slot in slots(few, "s", MAIN, [[*MAIN[:4], 50], [*MAIN[:5], 50]])] == ["s\x004", "s\x002"]


def test_what_the_main_path_takes_over_from_a_branch_counts_as_held() -> None:
    branch = [*MAIN[:5], 90, 91, 92]
    ledgers = room(b1=branch)
    assert held(ledgers, "s", [*branch, 93]) == 8
    assert held(ledgers, "s", [*MAIN, 30]) == 30
    assert held(ledgers, "t", MAIN) == 0
    assert slots(ledgers, "s", [*branch, 93], [[*branch, 94]]) == [Slot("s\x002", 8)]
    assert [ledger.session for ledger in branches(ledgers, "s")] == ["s\x001"]
