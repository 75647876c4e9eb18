"""Which verifiers are known, and where a session goes."""

from __future__ import annotations

from paceline.wire import DrafterStatus, PolicyDecision, StepTable, VerifierStatus
from services.batcher.directory import FRESH_S, Directory, Terms


def status(name: str, **changes: object) -> VerifierStatus:
    values: dict[str, object] = {
        "verifier": name, "model": "m", "fingerprint": "f", "engine": "simulated", "simulated": True, "state": "ready",
        "context": 100, "cells_total": 400, "cells_used": 0, "sessions": 0, "busy": 0.0, "queue": 0, "steps": 5,
        "step_tokens": 5,
    }  # fmt: skip
    return VerifierStatus(**{**values, **changes})  # type: ignore[arg-type]


def decision(*admit: str, t_sent: float = 1.0, version: int = 1) -> PolicyDecision:
    return PolicyDecision(model="m", version=version, fill=True, window_cap=8, admit=admit, t_sent=t_sent)


def test_the_policy_chooses_then_the_load() -> None:
    directory = Directory("f")
    for name in ("v1", "v2", "v3"):
        directory.hear(status(name), 0.0)
    assert directory.choose({"v1": 3, "v2": 1, "v3": 1}, 1.0) == "v2"
    directory.obey(decision("v3", "v1"))
    assert directory.choose({"v1": 3}, 1.0) == "v3"
    directory.hear(status("v3", state="draining"), 1.0)
    assert directory.choose({"v1": 3}, 1.0) == "v1"
    assert directory.serves("v3", 1.0), "a draining verifier keeps what it has"
    directory.obey(decision("v9"))
    assert directory.choose({"v1": 3}, 1.0) == "v2"


def test_who_serves() -> None:
    directory = Directory("f")
    directory.hear(status("v1"), 0.0)
    directory.hear(status("v2", state="loading"), 0.0)
    directory.hear(status("v3", fingerprint="other"), 0.0)
    assert directory.serving(1.0) == ["v1"]
    assert directory.serving(FRESH_S + 0.1) == [], "silence counts as away"
    directory.bus_back(10.0)
    assert directory.serving(10.1) == ["v1"], "nobody could be heard while the bus was away"
    assert directory.settling(12.0)
    assert not directory.settling(14.0)
    directory.lose("v1")
    assert directory.choose({}, 10.1) is None


def test_a_verifier_that_loads_our_model_is_coming() -> None:
    directory = Directory("f")
    assert directory.coming < 0
    directory.hear(status("v1", state="loading"), 5.0)
    directory.hear(status("v2", state="loading", fingerprint="other"), 6.0)
    directory.hear(status("v3"), 7.0)
    assert directory.coming == 5.0


def test_a_verifier_that_began_anew_is_noticed() -> None:
    directory = Directory("f")
    assert not directory.hear(status("v1", steps=7), 0.0)
    assert not directory.hear(status("v1", steps=9), 1.0)
    assert directory.hear(status("v1", steps=0), 2.0)
    assert directory.hear(status("v1", state="loading", steps=0), 3.0)
    assert not directory.hear(status("v1", steps=3), 4.0)
    assert directory.hear(status("v1", state="failed", steps=3), 5.0), "a step that does not end"
    assert not directory.hear(status("v1", state="failed", steps=3), 6.0)
    assert not directory.hear(status("v1", steps=4), 7.0)


def test_the_last_decision_counts_also_of_a_restarted_policy() -> None:
    directory = Directory("f")
    directory.obey(decision("v1", t_sent=5, version=9))
    directory.obey(decision("v2", t_sent=6, version=1))
    directory.obey(decision("v1", t_sent=5, version=9))
    assert directory.policy is not None
    assert directory.policy.admit == ("v2",)


def test_room_is_the_context_or_the_cells() -> None:
    directory = Directory("f")
    assert directory.room(0.0) is None
    directory.hear(status("v1", context=100, cells_total=64), 0.0)
    assert directory.room(0.0) == 64
    directory.hear(status("v2", context=100, cells_total=640), 0.0)
    assert directory.room(0.0) == 100


def test_the_terms_of_a_verifier_are_its_step_times_and_the_policy_s_word() -> None:
    directory = Directory("f")
    assert directory.terms("v1") == Terms()
    directory.hear(status("v1", curve=StepTable(tokens=(1, 4), ms=(30.0, 60.0), samples=9)), 0.0)
    directory.obey(decision("v1"))
    terms = directory.terms("v1")
    assert terms.times is not None
    assert terms.times.at(2) == 40.0
    assert (terms.fill, terms.window_cap) == (True, 8)
    directory.hear(status("v1", curve=StepTable(tokens=(4, 1), ms=(30.0, 60.0))), 1.0)
    assert directory.terms("v1").times is None, "a table that makes no sense is none"


def drafter(name: str, draft_ms: float, state: str = "ready") -> DrafterStatus:
    return DrafterStatus(
        drafter=name, model="m", engine="simulated", simulated=True, sessions=0, drafted=0, state=state,  # type: ignore[arg-type]
        draft_ms=draft_ms,
    )  # fmt: skip


def test_the_fastest_drafter_that_is_ready_counts() -> None:
    directory = Directory("f")
    assert directory.draft_s(0.0) is None
    directory.hear_drafter(drafter("d1", 20.0), 0.0)
    directory.hear_drafter(drafter("d2", 10.0), 1.0)
    directory.hear_drafter(drafter("d3", 1.0, state="loading"), 1.0)
    directory.hear_drafter(drafter("d4", 0.0), 1.0)
    assert directory.draft_s(1.0) == 0.01
    assert directory.draft_s(1.0 + FRESH_S + 0.1) is None
