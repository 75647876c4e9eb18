"""What a session would put into the next step: its drafts, its own text, a plain token, or nothing yet."""

from __future__ import annotations

import pytest

from paceline.batch_choice import Share, Want
from paceline.ends import Ends
from paceline.forecast import SOON_S
from paceline.session import Session
from paceline.step_curve import StepTimes
from paceline.store import SessionRecord
from paceline.trust import Trust
from paceline.wire import Chain, DraftBlock, SessionOpen, Speculation
from services.batcher.batches import item_of, ticket_of
from services.batcher.directory import Terms
from services.batcher.live import Live
from services.batcher.patience import GRACE_S
from services.batcher.presence import Presence
from services.batcher.readiness import want

PROMPT = (1, 2, 3, 4, 5)
SLOW = StepTimes((1, 2, 4, 8), (34.0, 48.0, 65.0, 85.0), samples=100)
TERMS = Terms(SLOW)


def make(speculation: Speculation | None = None, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 100) -> Live:
    opened = SessionOpen(model="m", fingerprint="f", tokens=prompt, speculation=speculation or Speculation())
    record = SessionRecord(
        session="s", tenant="t", opened=opened, secret="x", seed=0, prompt_length=len(prompt), max_tokens=max_tokens,
        epoch=1, tokens=prompt,
    )  # fmt: skip
    session = Session(record, Ends(lambda token: b"x", (9,), (), max_tokens), vocabulary=100)
    live = Live(session, 0, Presence(1, 1, since=0.0, connection=1), {}, Trust().for_session())
    live.verifier, live.fed = "v1", session.tip
    return live


def offer(live: Live, *tokens: int, conf: int = 230, source: str = "edge") -> None:
    chain = Chain(
        first=1, position=live.session.tip, at=live.session.tip, tokens=tokens, conf=bytes([conf] * len(tokens))
    )
    incarnation = live.session.seen.get(source, (0, 0))[0] + 1  # type: ignore[call-overload]
    live.session.offer(DraftBlock(session="s", source=source, incarnation=incarnation, chains=(chain,), connection=1))  # type: ignore[arg-type]


def streaming(live: Live, gap_s: float, until: float) -> None:
    """Blocks of 4 nodes have come every `gap_s`."""
    for number in range(10, -1, -1):
        live.forecast.block_came("edge", 4, until - number * gap_s)


def only_joins(found: Want | None) -> bool:
    """No step is begun for this one."""
    return found is not None and found.worth == 0.0 and not found.firm and found.joining > 0.0


def test_held_drafts_go_with_what_they_are_trusted_for() -> None:
    live = make()
    offer(live, 11, 12, 13)
    found = want(live, TERMS, 0.0)
    assert found is not None
    assert found.chain == pytest.approx((230 / 255,) * 3, abs=0.01)
    assert (found.worth, found.must, found.missing, found.context) == (1.0, False, 0, 5)


def test_a_source_that_overstates_is_believed_less_from_step_to_step() -> None:
    live = make()
    for _ in range(40):
        offer(live, 11, 12, conf=250)
        plan = live.session.plan(2)
        commit = live.session.decide(plan, 0, 50)
        assert commit is not None
        assert commit.refuted == {"edge"}
        live.forecast.decided(plan, 0, commit.refuted, 0.0)
        live.fed = live.session.tip
    offer(live, 11, 12, conf=250)
    found = want(live, TERMS, 0.0)
    assert found is not None
    assert found.chain[0] < 0.2


def test_of_two_sources_of_one_node_the_one_that_knows_best_is_believed() -> None:
    live = make()
    offer(live, 11, conf=100)
    offer(live, 11, conf=250, source="hosted")
    found = want(live, TERMS, 0.0)
    assert found is not None
    assert found.chain == pytest.approx((250 / 255,), abs=0.01)
    assert live.session.plan(1).claims == ((("edge", 100 / 255), ("hosted", 250 / 255)),)


@pytest.mark.parametrize(
    "live", [make(Speculation(enabled=False)), make(Speculation(hosted=True)), make(max_tokens=1)],
    ids=["no speculation", "no drafter", "last token"],
)  # fmt: skip
def test_who_has_nobody_to_wait_for_is_in_whatever_it_earns(live: Live) -> None:
    streaming(live, 0.001, until=1.0)
    found = want(live, TERMS, 1.0)
    assert found is not None
    assert (found.must, found.chain) == (True, ())


def test_nothing_is_expected_of_an_edge_that_was_never_heard() -> None:
    found = want(make(), TERMS, 0.0)
    assert found is not None
    assert (found.decides, found.worth, found.must) == (True, 1.0, False)


def test_a_block_that_is_about_to_come_is_waited_for_and_an_overdue_one_is_not() -> None:
    live = make()
    streaming(live, 0.02, until=10.0)
    assert only_joins(want(live, TERMS, 10.01))
    assert live.look_again_at == pytest.approx(10.02)
    assert only_joins(want(live, TERMS, 10.019))
    assert live.look_again_at == pytest.approx(10.019 + SOON_S), "not in a busy loop either"
    found = want(live, TERMS, 10.09)
    assert found is not None
    assert found.worth == 1.0
    assert live.look_again_at is None


def test_a_block_that_is_far_away_is_not_waited_for_and_what_filling_is_worth_lies_between() -> None:
    live = make()
    streaming(live, 0.15, until=10.0)
    found = want(live, TERMS, 10.01)
    assert found is not None
    assert 0.0 < found.worth < 1.0
    assert not found.must


def test_an_operator_may_bound_the_wait_whatever_it_costs_others() -> None:
    live, terms = make(), Terms(times=TERMS.times, fill_within_s=0.008)
    streaming(live, 0.02, until=10.0)
    assert only_joins(want(live, terms, 10.002))
    assert live.look_again_at == pytest.approx(10.010)
    found = want(live, terms, 10.011)
    assert found is not None
    assert (found.decides, found.must) == (True, True)
    live.fed -= 1
    assert (unfed := want(live, terms, 10.02)) is not None
    assert not unfed.must, "the wait begins when the verifier has the history"


def test_whatever_is_expected_patience_ends() -> None:
    live = make()
    live.patience.starve(9.0)
    streaming(live, 0.02, until=10.0)
    found = want(live, TERMS, 10.01)
    assert found is not None
    assert found.must


def test_without_fill_nothing_runs_before_patience_ends() -> None:
    for live, terms in ((make(Speculation(fill=False)), TERMS), (make(), Terms(SLOW, fill=False))):
        assert want(live, terms, 1.0) is None
        end = 1.0 + 3 * live.patience.round_trip_s + GRACE_S
        assert live.look_again_at == pytest.approx(end)
        assert want(live, terms, end - 0.001) is None
        found = want(live, terms, end + 1e-9)
        assert found is not None
        assert found.must


def test_while_drafts_are_waited_for_the_history_is_fed() -> None:
    live = make()
    live.fed = 2
    streaming(live, 0.02, until=10.0)
    found = want(live, TERMS, 10.01)
    assert found is not None
    assert (found.decides, found.missing, found.chain, found.worth) == (True, 3, (), 0.0)
    assert found.joining > 0.0


def test_joining_a_step_is_worth_the_more_the_dearer_a_row_is_and_the_less_drafts_fit() -> None:
    live = make()
    streaming(live, 0.02, until=10.0)
    usual = live.forecast.trust.acceptance("edge")
    for price, joining in ((0.0, 1.0 - usual), (0.3, 1.3 - usual), (0.9, 1.0)):
        found = want(live, Terms(SLOW, price=price), 10.01)
        assert found is not None
        assert found.joining == pytest.approx(joining)


def test_a_text_that_repeats_itself_is_drafted_from_itself() -> None:
    live = make(prompt=(1, 2, 3, 4, 5, 6, 1, 2, 3))
    found = want(live, TERMS, 0.0)
    assert found is not None
    assert len(found.chain) == 8
    assert found.chain[0] < found.chain[1], "what follows a fitting token is surer"
    ticket = ticket_of(live, Share("s", 0, decides=True, draft=3), 0.0)
    assert ticket.plan is not None
    assert ticket.plan.tokens == (4, 5, 6)
    assert ticket.plan.sources == ("lookup",) * 3
    assert item_of(ticket).tokens == (4, 5, 6)
    assert (live.session.held, live.session.sent) == (3, 0)


def test_a_proposal_that_no_step_takes_leaves_no_trace() -> None:
    live = make(prompt=(1, 2, 3, 4, 5, 6, 1, 2, 3))
    assert want(live, TERMS, 0.0) is not None
    ticket = ticket_of(live, Share("s", 0, decides=True, draft=0), 0.0)
    assert ticket.plan is not None
    assert ticket.plan.tokens == ()
    assert live.session.held == 0


def test_no_look_up_where_it_is_not_wanted() -> None:
    found = want(make(Speculation(lookup=False), prompt=(1, 2, 3, 4, 1, 2, 3)), TERMS, 0.0)
    assert found is not None
    assert found.chain == ()


def test_what_the_text_says_for_sure_is_not_put_off() -> None:
    live = make(prompt=(1, 2, 3, 4) * 4)
    streaming(live, 0.02, until=10.0)
    found = want(live, TERMS, 10.01)
    assert found is not None
    assert found.worth == 1.0


def test_drafts_that_look_worthless_are_probed_now_and_then() -> None:
    live = make()
    offer(live, 11, 12, conf=1)
    sizes = []
    for second in range(12):
        assert want(live, TERMS, float(second)) is not None
        ticket = ticket_of(live, Share("s", 0, decides=True, draft=0), float(second))
        assert ticket.plan is not None
        sizes.append(len(ticket.plan.tokens))
        live.give_up_ticket()
    assert set(sizes) == {0, 1}
    assert sizes[:2] == [0, 0]
    assert 1 <= sum(sizes) <= 4
