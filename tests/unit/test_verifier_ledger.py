"""Which items may be decided: never one whose KV belongs to other tokens than its batcher committed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine import Decided, Failed, Fed, TargetItem, TokenLogprob
from paceline.wire import History, VerifyItem, prefix_hash
from services.verifier.ledger import SessionLedger, Turned
from services.verifier.load import Load
from services.verifier.outcomes import LOWEST_LOGPROB, SOLE_SURVIVOR, outcome_of

TRUTH = tuple(range(100, 140))


def item(at: int, *, tokens=TRUTH, start: int | None = None, chunk: int = 0, want="choice", epoch=1, draft=()):
    history = None if start is None else History(start=start, tokens=tokens[start : start + chunk])
    named = start if want == "none" and start is not None else at
    return VerifyItem(
        session="s",
        tenant="t",
        epoch=epoch,
        at=at,
        prompt_length=5,
        prefix_hash=prefix_hash(tokens[:named]),
        seed=1,
        history=history,
        tokens=draft,
        want=want,
    )


def turned(decision) -> Turned:
    assert isinstance(decision, Turned)
    return decision


def test_an_item_on_the_right_ledger_is_decided():
    admitted = SessionLedger(100).admit(item(10, draft=(1, 2)), TRUTH[:12])
    assert isinstance(admitted, TargetItem)
    assert admitted.at == 10
    assert admitted.draft == (1, 2)
    assert admitted.rule is not None
    assert admitted.rule.prompt_length == 5


def test_lacking_kv_is_asked_for_from_where_the_ledger_ends():
    ledger = SessionLedger(100)
    assert turned(ledger.admit(item(10), ())).outcome.need_from == 0
    assert turned(ledger.admit(item(10), TRUTH[:7])).outcome.need_from == 7
    assert turned(ledger.admit(item(12, start=8, chunk=4, want="none"), TRUTH[:7])).outcome.need_from == 7
    assert isinstance(ledger.admit(item(10, start=7, chunk=3), TRUTH[:7]), TargetItem)


def test_a_mismatch_offers_the_confirmed_prefix_and_then_none():
    ledger = SessionLedger(100)
    assert isinstance(ledger.admit(item(6), TRUTH[:6]), TargetItem)
    wrong = (*TRUTH[:6], 1, 2, 3, 4)
    first = turned(ledger.admit(item(10), wrong))
    assert (first.outcome.need_from, first.trim) == (6, 6)
    second = turned(ledger.admit(item(10), wrong))
    assert (second.outcome.need_from, second.trim) == (0, 0)


def test_a_chunk_on_a_wrong_ledger_is_refused_and_one_on_the_right_ledger_confirms_it():
    ledger = SessionLedger(100)
    wrong = (1, *TRUTH[1:8])
    assert turned(ledger.admit(item(12, start=8, chunk=4, want="none"), wrong)).outcome.need_from == 0
    fed = ledger.admit(item(12, start=8, chunk=4, want="none"), TRUTH[:8])
    assert isinstance(fed, TargetItem)
    assert fed.rule is None
    assert turned(ledger.admit(item(20), (*TRUTH[:8], *range(20)))).outcome.need_from == 8


def test_an_old_epoch_is_refused_and_its_release_ignored():
    ledger = SessionLedger(100)
    assert isinstance(ledger.admit(item(6, epoch=5), TRUTH), TargetItem)
    assert turned(ledger.admit(item(6, epoch=4), TRUTH)).outcome.error.code == "stale_epoch"
    assert ledger.release("s", 4) is False
    assert ledger.release("s", 5) is True
    assert ledger.release("unknown", 0) is True


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (item(38, draft=(1, 2, 3)), "context_length_exceeded"),
        (item(0), "invalid_value"),
        (item(10, start=8, chunk=4), "invalid_value"),
    ],
)
def test_an_item_that_can_never_be_served_is_refused(bad, code):
    assert turned(SessionLedger(40).admit(bad, TRUTH)).outcome.error.code == code


HELD = st.one_of(
    st.integers(0, 40).map(lambda n: TRUTH[:n]),
    st.tuples(st.integers(0, 30), st.lists(st.integers(0, 9), max_size=12)).map(lambda p: (*TRUTH[: p[0]], *p[1])),
)


@given(st.lists(st.tuples(HELD, st.integers(1, 40), st.one_of(st.none(), st.integers(0, 40)), st.booleans())))
def test_never_decides_on_tokens_that_are_not_the_truth(calls):
    ledger = SessionLedger(100)
    for held, at, from_, chunk in calls:
        start = from_ if from_ is not None and from_ < at else None
        count = 0 if start is None else at - start
        asked = item(at, start=start, chunk=count, want="none" if chunk and start is not None else "choice")
        decision = ledger.admit(asked, held)
        if isinstance(decision, Turned):
            assert decision.outcome.need_from is not None
            assert 0 <= decision.outcome.need_from <= at
        else:
            path = held if start is None else held[:start] + decision.history
            assert path[:at] == TRUTH[:at]


@given(st.lists(st.tuples(HELD, st.integers(1, 40)), min_size=1))
def test_a_batcher_that_does_what_is_asked_gets_through(calls):
    """Whatever the ledger holds: after at most three answers the item is decided."""
    ledger = SessionLedger(100)
    for held, at in calls:
        start, kept, answers = None, held, 0
        while isinstance(decision := ledger.admit(item(at, start=start, chunk=at - (start or 0)), kept), Turned):
            answers += 1
            assert answers <= 3
            start = decision.outcome.need_from
            kept = kept if decision.trim is None else kept[: decision.trim]


def test_outcomes_are_always_json():
    inf = float("inf")
    asked = item(6, want="logprobs")
    value = TokenLogprob(3, -inf, ((3, -inf), (4, float("nan")), (5, -0.5)))
    wire = outcome_of(asked, Decided("s", 0, 3, (inf,), (value,)), 7)
    assert wire.margins == (SOLE_SURVIVOR,)
    assert wire.logprobs[0].logprob == LOWEST_LOGPROB
    assert wire.logprobs[0].top == ((3, LOWEST_LOGPROB), (4, LOWEST_LOGPROB), (5, -0.5))
    assert outcome_of(asked, Fed("s", 6), 6).fed == 6
    assert outcome_of(asked, Failed("s", "need_history", ""), 4).need_from == 4
    assert outcome_of(asked, Failed("s", "no_room", "full"), 4).error.status == 503
    assert outcome_of(asked, Failed("s", "bad_token", "id"), 4).error.status == 400
    assert outcome_of(asked, Failed("s", "step_failed", "x"), 4).error.status == 500


def test_prefix_hash_is_over_little_endian_ids():
    assert prefix_hash(()) == "e4a6a0577479b2b4"
    assert prefix_hash(iter([1, 258])) == "108bc7df5e5ec767"


def test_load_counts_the_time_in_steps():
    load = Load(0.0)
    load.started(0.2)
    load.ended(9, 0.7)
    assert load.share(1.0) == pytest.approx(0.5)
    load.started(1.5)
    assert load.running_for(1.75) == pytest.approx(0.25)
    assert load.share(2.0) == pytest.approx(0.5)
    load.ended(1, 2.5)
    assert load.share(3.0) == pytest.approx(0.5)
    assert (load.steps, load.step_tokens) == (2, 10)
