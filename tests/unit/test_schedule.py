"""Who gets into a verify step, with how much; and what a session could use at all."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from paceline.wire import PolicyDecision, VerifierStatus
from services.batcher.directory import FRESH_S, Directory
from services.batcher.schedule import Candidate, Chosen, choose, fair_order

candidates = st.lists(
    st.builds(
        Candidate,
        session=st.uuids().map(str),
        tenant=st.sampled_from(["a", "b", "c"]),
        served=st.integers(0, 20),
        missing=st.integers(0, 600),
        decides=st.booleans(),
        draft=st.integers(0, 64),
    ),
    max_size=24,
    unique_by=lambda item: item.session,
)
runnable = candidates.map(lambda items: [item for item in items if item.missing or item.decides])


@given(runnable, st.integers(1, 64), st.integers(1, 256))
def test_both_budgets_are_kept(items: list[Candidate], step_tokens: int, chunk_tokens: int) -> None:
    chosen = choose(items, step_tokens=step_tokens, chunk_tokens=chunk_tokens)
    wanted = {item.session: item for item in items}
    assert sum(share.history for share in chosen.shares) <= chunk_tokens
    assert sum(share.decides + share.draft for share in chosen.shares) <= step_tokens
    assert len({share.session for share in chosen.shares}) == len(chosen.shares)
    assert chosen.left_out == len(items) - len(chosen.shares)
    for share in chosen.shares:
        item = wanted[share.session]
        assert share.history <= item.missing
        assert share.draft <= item.draft
        assert share.history or share.decides
        assert not share.decides or (item.decides and share.history == item.missing)
        assert share.decides or not share.draft


@given(runnable.filter(bool), st.integers(1, 64), st.integers(1, 256))
def test_somebody_always_runs_and_room_is_not_wasted(
    items: list[Candidate], step_tokens: int, chunk_tokens: int
) -> None:
    chosen = choose(items, step_tokens=step_tokens, chunk_tokens=chunk_tokens)
    assert chosen.shares
    spent = sum(share.decides + share.draft for share in chosen.shares)
    hungry = [
        s for s in chosen.shares if s.decides and s.draft < next(i.draft for i in items if i.session == s.session)
    ]
    assert not hungry or spent == step_tokens


def serve(chosen: Chosen, items: list[Candidate], step: int) -> list[Candidate]:
    """The candidates after a step: decode items come again, chunks get shorter."""
    shares = {share.session: share for share in chosen.shares}
    after = []
    for item in items:
        share = shares.get(item.session)
        if share is None:
            after.append(item)
        else:
            missing = item.missing - share.history
            after.append(Candidate(item.session, item.tenant, step, missing, item.decides, item.draft))
    return after


@given(st.integers(1, 8), st.integers(1, 6))
def test_a_tenant_with_many_sessions_gets_no_more_than_one_with_one(flood: int, step_tokens: int) -> None:
    """While both have somebody runnable and the steps are full, both have their turns."""
    items = [Candidate(f"a{n}", "a") for n in range(flood + step_tokens)] + [Candidate("b0", "b")]
    turns: Counter[str] = Counter()
    for step in range(1, 41):
        chosen = choose(items, step_tokens=step_tokens, chunk_tokens=1)
        turns.update(share.session[0] for share in chosen.shares)
        items = serve(chosen, items, step)
    assert turns["b"] >= 40 // 2 if step_tokens == 1 else turns["b"] == 40


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=20), st.integers(1, 4))
def test_nobody_starves(tenants: list[str], step_tokens: int) -> None:
    items = [Candidate(f"{tenant}{n}", tenant) for n, tenant in enumerate(tenants)]
    seen: set[str] = set()
    for step in range(1, 4 * len(items) + 4):
        chosen = choose(items, step_tokens=step_tokens, chunk_tokens=1)
        seen.update(share.session for share in chosen.shares)
        items = serve(chosen, items, step)
    assert seen == {item.session for item in items}


def test_least_recently_served_first_and_tenants_in_turn() -> None:
    items = [Candidate("a1", "a", served=3), Candidate("a2", "a", served=1), Candidate("b1", "b", served=9)]
    assert [item.session for item in fair_order(items)] == ["a2", "b1", "a1"]


def test_one_chunk_a_step_beside_everybody_elses_decode() -> None:
    items = [Candidate(f"d{n}", "t", served=n, draft=4) for n in range(3)]
    items += [Candidate("long", "t", missing=1000), Candidate("longer", "t", served=1, missing=2000)]
    chosen = choose(items, step_tokens=256, chunk_tokens=256)
    fed = {share.session: share.history for share in chosen.shares if share.history}
    assert fed == {"long": 256}
    assert [share.draft for share in chosen.shares if share.decides] == [4, 4, 4]


def test_a_short_history_rides_with_its_decision() -> None:
    chosen = choose([Candidate("s", "t", missing=5, draft=3)], step_tokens=8, chunk_tokens=256)
    (share,) = chosen.shares
    assert (share.history, share.draft, share.decides) == (5, 3, True)


def test_drafts_share_what_is_left_evenly() -> None:
    items = [Candidate("s1", "a", draft=8), Candidate("s2", "b", draft=8), Candidate("s3", "c", draft=1)]
    chosen = choose(items, step_tokens=10, chunk_tokens=1)
    assert sorted(share.draft for share in chosen.shares) == [1, 3, 3]


# --- where sessions go ---


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


def test_a_verifier_that_began_anew_is_noticed() -> None:
    directory = Directory("f")
    assert not directory.hear(status("v1", steps=7), 0.0)
    assert not directory.hear(status("v1", steps=9), 1.0)
    assert directory.hear(status("v1", steps=0), 2.0)
    assert directory.hear(status("v1", state="loading", steps=0), 3.0)


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
