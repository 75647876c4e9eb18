"""May a session run now, and how much of a step could it use? Pure.

Without a held draft a session gets a plain step at once where filling is on (its own wish and the policy's), else when
its patience ends. Sessions without speculation are always filled, and so are those whose only source, the hosted
drafter, is not there, and those whose last token is due: no draft fits before it. While drafts are waited for, the
history is fed already.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.wire import MAX_CHAIN_NODES
from services.batcher.directory import Directory
from services.batcher.live import MAX_PENDING, Live
from services.batcher.schedule import Candidate


def candidate(live: Live, directory: Directory, now: float) -> Candidate | None:
    """None while the session may not run at all."""
    session = live.session
    if (
        session.finish is not None
        or session.parked
        or live.ticket is not None
        or live.leaving
        or len(live.pending) >= MAX_PENDING
        or now < live.not_before
    ):
        return None
    missing = max(0, session.tip - live.fed)
    held = session.held
    decides = held > 0 or _fills(live, directory) or _patience_ended(live, missing, now)
    if not missing and not decides:
        return None
    draft = min(held, chain_limit(live, directory)) if held else 0
    return Candidate(live.id, live.tenant, live.served, missing, decides, draft)


def chain_limit(live: Live, directory: Directory) -> int:
    """Longest chain that may be put into one step of this session."""
    speculation = live.session.record.opened.speculation
    if not speculation.enabled:
        return 0
    cap = directory.window_cap
    limit = min(speculation.max_draft, MAX_CHAIN_NODES)
    return limit if cap is None else min(limit, cap)


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


def _fills(live: Live, directory: Directory) -> bool:
    speculation = live.session.record.opened.speculation
    nobody_drafts = not speculation.enabled or (speculation.hosted and not live.hosted_open)
    if nobody_drafts or not live.session.room:
        return True
    return speculation.fill and directory.fill


def _patience_ended(live: Live, missing: int, now: float) -> bool:
    """The wait begins once the history is with the verifier."""
    if not missing:
        live.patience.starve(now)
    return live.patience.exhausted(now, hosted=live.session.record.opened.speculation.hosted)
