"""May a session run now, and what would it put into a step? Pure.

Without a held draft a session is filled: it gets a step of its own, with what its text suggests as drafts or with none,
where filling is on (its own wish and the policy's) and the block that is on its way is not worth the wait; else it only
joins a step that goes on anyway, and gets one when its patience ends. Sessions without speculation are always filled,
and so are those whose only source, the hosted drafter, is not there, and those whose last token is due: no draft fits
before it. While drafts are waited for, the history is fed already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
from operator import mul

from paceline.batch_choice import Want
from paceline.forecast import SOON_S
from paceline.wire import MAX_CHAIN_NODES
from services.batcher.directory import Terms
from services.batcher.live import MAX_PENDING, Live, Seat


def want(live: Live, terms: Terms, now: float) -> Want | None:
    """None while the session does not run. Then, and while it only joins, `live.look_again_at` says when time alone may
    change that, if it does.
    `live.seat` holds the drafts that the want's chain stands for."""
    live.seat, live.look_again_at = Seat(), None
    if not _may_run(live, now):
        return None
    session = live.session
    missing = max(0, session.tip - live.fed)
    limit = min(chain_limit(live, terms), session.room)
    if session.held and limit:
        live.seat = Seat(chain=session.chain(limit, live.forecast.chance))
        chain = tuple(live.forecast.chance(node) for node in live.seat.chain)
        return _want(live, missing, chain=chain)
    if _nobody_drafts(live) or not limit:
        return _want(live, missing, must=True)
    return _starved(live, terms, missing, limit, now)


def chain_limit(live: Live, terms: Terms) -> int:
    """Longest chain that may be put into one step of this session."""
    speculation = live.session.record.opened.speculation
    if not speculation.enabled:
        return 0
    limit = min(speculation.max_draft, MAX_CHAIN_NODES)
    return limit if terms.window_cap is None else min(limit, terms.window_cap)


def who_rests(waiting: Live, others: Iterable[Live]) -> Live | None:
    """KV cells are short, and `waiting` has had none for long: who gives up its own? The one that has run longest;
    where all wait (each holds a part of what the others need), the one that holds most. None while another one has
    waited longer: one at a time."""
    since = waiting.room_wanted_since or 0.0
    rivals = [other for other in others if other.session.finish is None and other.fed]
    if any(other.room_wanted_since is not None and other.room_wanted_since < since for other in rivals):
        return None
    running = [other for other in rivals if other.room_wanted_since is None and other.running_since is not None]
    if running:
        return min(running, key=lambda other: other.running_since or 0.0)
    return max(rivals, key=lambda other: other.fed, default=None)


def _may_run(live: Live, now: float) -> bool:
    session = live.session
    return (
        session.finish is None
        and not session.parked
        and live.ticket is None
        and not live.leaving
        and len(live.pending) < MAX_PENDING
        and now >= live.not_before
    )


def _nobody_drafts(live: Live) -> bool:
    speculation = live.session.record.opened.speculation
    return not speculation.enabled or (speculation.hosted and not live.hosted_open)


def _starved(live: Live, terms: Terms, missing: int, limit: int, now: float) -> Want | None:
    """Nothing is held. The wait begins once the history is with the verifier."""
    speculation = live.session.record.opened.speculation
    if not missing:
        live.patience.starve(now)
    must, fills = live.patience.exhausted(now, hosted=speculation.hosted), speculation.fill and terms.fill
    left = math.inf if terms.fill_within_s is None else terms.fill_within_s - live.patience.starved_for(now)
    must = must or (fills and not missing and left <= 0.0)
    if not must and not fills:
        live.look_again_at = live.patience.ends_at(hosted=speculation.hosted)
        return _want(live, missing, decides=False)
    chain: tuple[float, ...] = ()
    if speculation.lookup:
        live.seat = Seat(proposal=live.forecast.proposal(live.session, limit))
        chain = live.forecast.chances(live.seat.proposal)
    worth, joining = 1.0, 1.0
    if not must and sum(accumulate(chain, mul)) < 1.0:  # what is sure by itself is not put off
        worth, again = live.forecast.worth(now, terms.times, live.session.tip, terms.price)
        joining = live.forecast.joining(terms.price)
        if worth <= 0.0:
            live.look_again_at = min(again, now + max(left, SOON_S))
    return _want(live, missing, chain=chain, worth=worth, joining=joining, must=must)


def _want(
    live: Live, missing: int, *, decides: bool = True, chain: tuple[float, ...] = (), worth: float = 1.0,
    joining: float = 0.0, must: bool = False,
) -> Want | None:  # fmt: skip
    if not missing and not decides:
        return None
    return Want(
        session=live.id,
        tenant=live.tenant,
        served=live.served,
        missing=missing,
        decides=decides,
        chain=chain if decides else (),
        context=live.session.tip,
        worth=worth,
        joining=joining,
        must=must,
    )
