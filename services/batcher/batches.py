"""Between sessions and verify messages: what goes into a batch, and how much of an answer can be believed. Pure."""

from __future__ import annotations

from paceline.batch_choice import Share
from paceline.wire import History, VerifyItem, VerifyOutcome, prefix_hash
from services.batcher.live import Live, Ticket


def ticket_of(live: Live, share: Share, now: float) -> Ticket:
    """Take a seat: the plan is in flight from here on. Drafts that the step has no use for get one node in, now and
    then, for what that teaches."""
    plan = None
    if share.decides:
        draft = share.draft or int(live.forecast.probes(live.seat.chain, now))
        tokens, evidence = live.seat.proposal
        chain = live.seat.chain or live.session.guess(tokens[:draft], evidence)
        plan = live.session.plan(draft, chain)
    assert live.verifier is not None, "only placed sessions are candidates"
    ticket = Ticket(live, live.verifier, plan, share.history, live.echo)
    live.ticket, live.echo = ticket, None
    return ticket


def item_of(ticket: Ticket) -> VerifyItem:
    """A decision at the tip, with what is missing of the history before it; or a chunk of history alone, whose `at` is
    its end and whose hash is that of what comes before it."""
    live, plan = ticket.live, ticket.plan
    session, record = live.session, live.session.record
    start = live.fed
    at = session.tip if plan is not None else start + ticket.history
    logprobs = record.opened.logprobs
    return VerifyItem(
        session=live.id,
        tenant=live.tenant,
        epoch=session.epoch,
        at=at,
        prompt_length=record.prompt_length,
        prefix_hash=live.prefix.hex() if plan is not None else prefix_hash(session.committed[:start]),
        seed=record.seed,
        sampling=record.opened.sampling,
        choice=record.opened.choice,
        history=History(start=start, tokens=tuple(session.committed[start:at])) if ticket.history else None,
        tokens=plan.tokens if plan is not None else (),
        want="none" if plan is None else "choice" if logprobs is None else "logprobs",
        logprobs=logprobs or 0,
    )


def decision_fits(ticket: Ticket, outcome: VerifyOutcome) -> bool:
    """Is this an answer to what was asked?"""
    plan = ticket.plan
    if plan is None or outcome.token is None or outcome.accepted > len(plan.tokens):
        return False
    if ticket.live.session.record.opened.logprobs is None:
        return True
    return outcome.logprobs is not None and len(outcome.logprobs) == outcome.accepted + 1
