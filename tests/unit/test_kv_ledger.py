"""Cells, eviction and prefix sharing, against a memory that does what the ledgers tell it and checks every position."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paceline.engine_simulated import SimulatedMemory, World
from paceline.errors import NoRoom
from paceline.forward_pass import Row, apply
from paceline.kv_ledger import MIN_SHARED, Ledgers, Remove, Share, common_prefix

SESSIONS = ["a", "b", "c", "d", "e", "a1", "a2", "d1"]
TENANT = {"a": "x", "b": "x", "c": "x", "d": "y", "e": "y", "a1": "x", "a2": "x", "d1": "y"}
BRANCH_OF = {"a1": "a", "a2": "a", "d1": "d"}


class Room(RuleBasedStateMachine):
    """Sessions over prompts with common beginnings; KV in memory must always be what the ledgers say."""

    @initialize(cells=st.integers(30, 120), sequences=st.integers(2, 4), grace=st.sampled_from([0.0, 3.0]))
    def start(self, cells: int, sequences: int, grace: float) -> None:
        self.ledgers = Ledgers(cells, sequences, grace)
        self.memory = SimulatedMemory(World(), sequences)
        self.now = 0.0

    def sync(self) -> None:
        for op in self.ledgers.take_ops():
            apply(self.memory, op)

    @rule(session=st.sampled_from(SESSIONS), kind=st.integers(0, 2), length=st.integers(1, 60), keep=st.integers(0, 2),
          fails=st.booleans(), accepted=st.integers(0, 60))  # fmt: skip
    def step(self, session: str, kind: int, length: int, keep: int, fails: bool, accepted: int) -> None:
        self.now += 1
        path = [*range(20), *[100 + kind] * 60][:length]
        limit = max(0, length - keep)
        before, branch_of = self.ledgers.used, BRANCH_OF.get(session, "")
        alive = [one for one in SESSIONS if (held := self.ledgers.get(one)) and not (held.released or held.branch_of)]
        try:
            ledger, start = self.ledgers.claim(
                session, TENANT[session], path, keep=limit, pinned=(), now=self.now, branch_of=branch_of
            )
        except NoRoom:
            all_taken = self.ledgers.get(session) is None and self.ledgers.spare == 0
            assert before or length > self.ledgers.total or all_taken
            return
        finally:
            if branch_of:
                assert all(self.ledgers.get(one) for one in alive)
        assert start <= limit
        assert ledger.tokens == path
        self.sync()
        fed = path[start : start + (length - start) // 2] if fails else path[start:]
        self.memory.decode([Row(t, start + i, ledger.sequence, True) for i, t in enumerate(fed)])
        if fails:
            self.ledgers.undo(ledger, start)
        else:
            kv = min(length, max(start, accepted))
            self.ledgers.settle(ledger, [*path[:kv], 7], kv)

    @rule(session=st.sampled_from(SESSIONS), length=st.integers(0, 60))
    def trim(self, session: str, length: int) -> None:
        self.ledgers.trim(session, length)

    @rule(session=st.sampled_from(SESSIONS))
    def release(self, session: str) -> None:
        self.ledgers.release(session)
        assert not any(self.ledgers.get(one) for one, whose in BRANCH_OF.items() if whose == session)

    @rule(session=st.sampled_from(SESSIONS))
    def evict(self, session: str) -> None:
        self.ledgers.evict(session)

    @invariant()
    def memory_holds_what_ledgers_say(self) -> None:
        if not hasattr(self, "ledgers"):
            return
        self.sync()
        held = [ledger for ledger in map(self.ledgers.get, SESSIONS) if ledger]
        assert len({ledger.sequence for ledger in held}) == len(held)
        cells: set[int] = set()
        for ledger in held:
            assert len(ledger.cells) == ledger.fed <= len(ledger.tokens)
            assert self.memory.sequence(ledger.sequence) == ledger.tokens[: ledger.fed]
            assert len(set(ledger.cells)) == len(ledger.cells)
            cells |= set(ledger.cells)
        assert self.ledgers.used == len(cells)
        for one in held:
            for other in held:
                if one.tenant != other.tenant:
                    assert not set(one.cells) & set(other.cells)


Room.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRoom = Room.TestCase


def claim(
    ledgers: Ledgers, session: str, path: list[int], now: float = 0.0, tenant: str = "t", branch_of: str = ""
) -> int:
    ledger, start = ledgers.claim(session, tenant, path, keep=len(path), pinned=(), now=now, branch_of=branch_of)
    ledgers.settle(ledger, list(path), len(path))
    return start


def test_released_sessions_go_before_idle_ones_and_the_longest_unused_first() -> None:
    ledgers = Ledgers(cells=40, sequences=9, grace_s=1, retained=40)
    for now, session in enumerate("abcd"):
        claim(ledgers, session, [now * 100 + i for i in range(10)], now)
    ledgers.release("b")
    ledgers.release("d")
    for expected, session in [("b", "e"), ("d", "f"), ("a", "g"), ("c", "h")]:
        assert ledgers.held(expected)
        claim(ledgers, session, [ord(session) + i for i in range(10)], now=100)
        assert not ledgers.held(expected)
    with pytest.raises(NoRoom, match="10 KV cells are needed, 0 are free"):
        claim(ledgers, "i", list(range(50, 60)), now=100)


def test_pinned_sessions_stay() -> None:
    ledgers = Ledgers(cells=20, sequences=2, grace_s=0)
    claim(ledgers, "a", list(range(20)))
    with pytest.raises(NoRoom):
        ledgers.claim("b", "t", [9] * 20, keep=20, pinned=("a",), now=9)
    with pytest.raises(NoRoom, match="never fit into 20"):
        ledgers.claim("b", "t", [9] * 21, keep=21, pinned=(), now=9)


def test_released_sessions_keep_a_quarter_of_the_cells_the_latest_first() -> None:
    ledgers = Ledgers(cells=80, sequences=9)
    for now, session in enumerate("abc"):
        claim(ledgers, session, [now * 100 + i for i in range(10)], now)
        ledgers.release(session)
    assert [bool(ledgers.held(session)) for session in "abc"] == [False, True, True]


def test_after_a_reset_memory_is_empty_whatever_was_lost() -> None:
    ledgers = Ledgers(cells=80, sequences=2)
    claim(ledgers, "a", [1, 2])
    ledgers.evict("a")
    ledgers.take_ops()  # handed out, and never carried out
    ledgers.reset()
    assert ledgers.take_ops() == [Remove(0, 0), Remove(1, 0)]
    assert ledgers.used == ledgers.live == 0


def test_shared_cells_outlive_their_first_owner() -> None:
    ledgers = Ledgers(cells=100, sequences=4)
    prompt = list(range(MIN_SHARED + 4))
    claim(ledgers, "a", prompt)
    assert claim(ledgers, "b", [*prompt, 99]) == len(prompt)
    assert ledgers.used == len(prompt) + 1
    assert [type(op) for op in ledgers.take_ops()] == [Share]
    ledgers.evict("a")
    assert ledgers.used == len(prompt) + 1
    ledgers.evict("b")
    assert ledgers.used == 0


def test_a_short_common_prefix_is_not_shared() -> None:
    ledgers = Ledgers(cells=100, sequences=4)
    claim(ledgers, "a", list(range(MIN_SHARED - 1)))
    assert claim(ledgers, "b", list(range(MIN_SHARED - 1))) == 0


def test_branches_share_any_common_prefix_of_their_session() -> None:
    ledgers = Ledgers(cells=100, sequences=4)
    claim(ledgers, "a", [1, 2, 3])
    assert claim(ledgers, "a1", [1, 2, 9], branch_of="a") == 2
    assert claim(ledgers, "a2", [1, 2, 9, 8], branch_of="a") == 3
    assert claim(ledgers, "b", [1, 2, 9, 8, 7]) == 0
    assert ledgers.used == 5 + 5
    assert claim(ledgers, "a", [1, 2, 9, 8, 7]) == 4
    assert ledgers.live == 2
    ledgers.release("a")
    ledgers.evict("a")
    assert (ledgers.used, ledgers.spare) == (5, 3)


def test_branches_go_before_live_sessions_and_take_nothing_from_them() -> None:
    ledgers = Ledgers(cells=30, sequences=9, grace_s=1, retained=10)
    for session, start, branch_of in [("a", 0, ""), ("b", 10, ""), ("b1", 20, "b")]:
        claim(ledgers, session, [start + i for i in range(10)], branch_of=branch_of)
    with pytest.raises(NoRoom):
        claim(ledgers, "a1", [40], now=0.5, branch_of="a")
    assert claim(ledgers, "a1", [40], now=9, branch_of="a") == 0  # b1 was idle
    assert not ledgers.held("b1")
    claim(ledgers, "a", list(range(10)), now=9)
    with pytest.raises(NoRoom):  # b is idle, and lives
        claim(ledgers, "b1", list(range(50, 60)), now=9, branch_of="b")
    claim(ledgers, "c", list(range(60, 70)), now=9)  # takes a1's cell, whether that is idle or not
    assert [bool(ledgers.held(one)) for one in ("a", "a1", "b", "c")] == [True, False, True, True]
    ledgers.release("b")
    assert claim(ledgers, "c1", [80], now=9, branch_of="c") == 0
    assert not ledgers.held("b")


def test_another_tenant_with_the_same_session_name_gets_nothing() -> None:
    ledgers = Ledgers(cells=100, sequences=4)
    claim(ledgers, "a", list(range(20)), tenant="red")
    assert claim(ledgers, "a", list(range(20)), tenant="blue") == 0
    assert ledgers.used == 20


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(a, tuple(b)) == expected


def test_old_released_sessions_share_a_bound_and_the_last_one_may_be_longer() -> None:
    ledgers = Ledgers(cells=12_000, sequences=9)
    expected = {"a": "a", "b": "ab", "c": "c", "d": "c"}
    for now, (name, length) in enumerate([("a", 1000), ("b", 1000), ("c", 2500), ("d", 3001)]):
        claim(ledgers, name, [10_000 * now + i for i in range(length)], now)
        ledgers.release(name)
        assert "".join(one for one in "abcd" if ledgers.held(one)) == expected[name]
