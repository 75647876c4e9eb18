"""The policy's hysteresis, look by look."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.wire import BatcherStatus, VerifierStatus
from services.policy.rules import WINDOW_CAPS, Rules


def verifier(name: str = "v1", *, busy: float = 1.0, used: int = 10, sessions: int = 0, at: float = 0.0,
             state: str = "ready") -> VerifierStatus:  # fmt: skip
    return VerifierStatus(
        verifier=name, model="m", fingerprint="f", engine="simulated", simulated=True, state=state, context=64,  # type: ignore[arg-type]
        cells_total=100, cells_used=used, sessions=sessions, busy=busy, queue=0, steps=0, step_tokens=0, t_sent=at,
    )  # fmt: skip


def batcher(waiting: int, at: float = 0.0) -> BatcherStatus:
    return BatcherStatus(
        batcher="b", model="m", sessions=9, parked=0, waiting=waiting, partitions=64, committed=0, drafted=0,
        accepted=0, filled=0, stale=0, t_sent=at,
    )  # fmt: skip


def looks(rules: Rules, waiting: int, count: int, start: float = 0.0, busy: float = 1.0) -> list[int]:
    return [
        rules.decide([verifier(at=start + i, busy=busy)], [batcher(waiting, at=start + i)], start + i).window_cap
        for i in range(count)
    ]


def test_the_cap_falls_after_sustained_pressure_and_rises_after_sustained_calm() -> None:
    rules = Rules("m")
    assert looks(rules, waiting=4, count=3) == [64, 64, 16]
    assert looks(rules, waiting=0, count=5, start=3) == [16] * 4 + [64]


def test_one_quiet_look_in_between_starts_the_count_again() -> None:
    rules = Rules("m")
    looks(rules, waiting=4, count=2)
    looks(rules, waiting=0, count=1, start=2)
    assert looks(rules, waiting=4, count=3, start=3) == [64, 64, 16]


def test_pressure_on_an_idle_verifier_is_no_load() -> None:
    assert looks(Rules("m"), waiting=4, count=10, busy=0.1) == [64] * 10


def test_lasting_pressure_lowers_the_window_cap_level_by_level_and_leaves_fill_on() -> None:
    rules = Rules("m")
    decisions = [rules.decide([verifier(at=i)], [batcher(9, at=i)], i) for i in range(15)]
    assert [decision.window_cap for decision in decisions][2::3] == [16, 8, 4, 4, 4]
    assert WINDOW_CAPS[-1] == 4
    assert all(decision.fill for decision in decisions)


def test_what_an_operator_set_stays() -> None:
    assert not Rules("m", fill=False).decide([verifier()], [], 0.0).fill


def test_a_status_that_is_too_old_or_draining_takes_no_new_sessions() -> None:
    now = 100.0
    statuses = [verifier("old", at=90), verifier("drains", at=now, state="draining"), verifier("good", at=now)]
    decision = Rules("m").decide(statuses, [], now)
    assert decision.admit == ("good",)
    assert Rules("m").decide(statuses[:2], [], now).reasons[1] == "no verifier is ready"


def test_new_sessions_go_to_the_emptiest_and_never_to_one_whose_kv_is_nearly_full() -> None:
    rules = Rules("m")
    for now in range(3):
        full = verifier("a", used=95, at=now)
        decision = rules.decide([full, verifier("b", sessions=5, at=now), verifier("c", sessions=2, at=now)], [], now)
    assert decision.admit == ("c", "b")
    assert "nearly full on a" in decision.reasons[1]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), max_size=60))
def test_the_version_grows_exactly_when_the_decision_changes(seen: list[tuple[int, float]]) -> None:
    rules, last = Rules("m"), None
    for now, (waiting, busy) in enumerate(seen):
        decision = rules.decide([verifier(busy=busy, at=now)], [batcher(waiting, at=now)], now)
        content = (decision.fill, decision.window_cap, decision.admit)
        assert last is None or (decision.version > last[0]) == (content != last[1])
        last = (decision.version, content)


@pytest.mark.parametrize("waiting", [0, 5])
def test_no_decision_flaps_under_a_load_that_alternates_every_second(waiting: int) -> None:
    rules = Rules("m")
    caps = {rules.decide([verifier(at=i)], [batcher(waiting if i % 2 else 0, at=i)], i).window_cap for i in range(50)}
    assert caps == {64}
