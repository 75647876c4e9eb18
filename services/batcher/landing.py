"""What a verifier's answer does to the sessions of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from paceline import telemetry
from paceline.errors import RequestError
from paceline.session import Commit, Plan
from paceline.telemetry import Metrics
from paceline.wire import Failure, Timing, VerifyOutcome, VerifyResult
from services.batcher import batches
from services.batcher.live import Live, Ticket
from services.batcher.overhead import Overhead

log = structlog.get_logger("batcher")

MAX_STRIKES = 60
"""Failures in a row, with growing pauses, until a session is given up: about a minute without a single step."""
TURN_S = 2.0
"""How long a session without room waits until another one has to rest."""
MAX_ROOM_WAIT_S = 300.0
LOSSES_TO_GO_ALONE = 2
MAX_LOSSES = 6
NOT_NOW = (429, 503)
KINDS = {"c": "corrected", "b": "bonus", "f": "filled"}


class Outlet(Protocol):
    """Where decisions go."""

    def commit(self, live: Live, commit: Commit, timing: Timing | None) -> None: ...

    def reading(self, live: Live) -> None:
        """A chunk of its prompt went in."""

    def release(self, live: Live, verifier: str) -> None:
        """Tell the verifier that the session's KV may go."""

    def make_room(self, live: Live) -> None:
        """The session has waited long for KV cells: let another one rest."""

    def doubt(self, live: Live) -> None:
        """A verifier knows of a higher epoch: are we still the owner?"""


class Landing:
    """`take` is called once for each answered batch; a ticket that its session does not hold any more is void."""

    def __init__(self, outlet: Outlet, metrics: Metrics, overhead: Overhead, clock: Callable[[], float]) -> None:
        self._outlet = outlet
        self._metrics = metrics
        self._overhead = overhead
        self._clock = clock

    def take(self, tickets: Sequence[Ticket], result: VerifyResult, now: float) -> None:
        outcomes = {outcome.session: outcome for outcome in result.items}
        for ticket in tickets:
            live = ticket.live
            if live.ticket is ticket:
                live.ticket = None
                self._one(ticket, outcomes.get(live.id), result, now)
            self._retire(ticket)

    def _retire(self, ticket: Ticket) -> None:
        """The session ended, or moved, while the step was under way: its KV may go now that the step is over."""
        live = ticket.live
        if not live.leaving and (live.session.finish is not None or live.verifier != ticket.verifier):
            self._outlet.release(live, ticket.verifier)

    def lost(self, tickets: Sequence[Ticket], *, went_down: bool) -> None:
        """No answer came, or none that counts. `went_down`: with its verifier, and perhaps for the guilt of one item;
        a session that this happens to again and again goes alone, and then fails, so that it takes nobody with it."""
        for ticket in tickets:
            live = ticket.live
            if live.ticket is ticket:
                live.give_up_ticket()
                live.losses += went_down
                live.alone = live.alone or live.losses >= LOSSES_TO_GO_ALONE
                if live.losses >= MAX_LOSSES:
                    self._fail(live, Failure(status=503, code="verifier_lost", message="no verifier survives its step"))
            self._retire(ticket)

    def refused(self, tickets: Sequence[Ticket], error: RequestError) -> None:
        """The batch was refused as a whole: the verifier does not serve just now, or an item is bad. Then each goes
        alone, and the one that is refused alone fails."""
        failure = Failure(status=error.status, code=error.code, message=error.message)
        for ticket in tickets:
            live = ticket.live
            if live.ticket is not ticket:
                continue
            live.give_up_ticket()
            if error.status in NOT_NOW:
                self._pause(live, failure)
            elif len(tickets) > 1:
                live.alone = True
            else:
                self._trouble(live, failure)

    def _one(self, ticket: Ticket, outcome: VerifyOutcome | None, result: VerifyResult, now: float) -> None:
        live = ticket.live
        if outcome is not None and outcome.error is None and outcome.need_from is None:
            if ticket.plan is None and outcome.fed is not None:
                self._fed(ticket, outcome.fed)
                return
            if ticket.plan is not None and batches.decision_fits(ticket, outcome):
                self._decided(ticket, ticket.plan, outcome, result, now)
                return
        live.session.forget()
        if outcome is None:
            self._trouble(live, Failure(status=500, code="no_outcome", message="the verifier left the session out"))
        elif outcome.error is not None:
            self._failed(live, outcome.error)
        elif outcome.need_from is not None:
            self._history_wanted(ticket, outcome.need_from)
        else:
            self._trouble(live, Failure(status=500, code="malformed_outcome", message="the answer does not fit"))

    def _fed(self, ticket: Ticket, length: int) -> None:
        live = ticket.live
        if length > live.fed:
            live.succeeded(self._clock())
        _believe(ticket, length)
        if live.session.completion == 0:
            self._outlet.reading(live)

    def _decided(self, ticket: Ticket, plan: Plan, outcome: VerifyOutcome, result: VerifyResult, now: float) -> None:
        live = ticket.live
        assert outcome.token is not None
        step_ms = None if ticket.history else result.step_ms
        commit = live.session.decide(plan, outcome.accepted, outcome.token, outcome.logprobs, step_ms=step_ms)
        if commit is None:
            return
        _believe(ticket, plan.at + outcome.accepted + 1)
        live.alone = live.replayed = False
        live.succeeded(self._clock())
        live.forecast.decided(plan, outcome.accepted, commit.refuted, now)
        self._count(plan, commit)
        self._overhead.note(ticket.echo, result.t_started)
        self._outlet.commit(live, commit, _timing(ticket, result, now))

    def _count(self, plan: Plan, commit: Commit) -> None:
        metrics = self._metrics
        for source in set(plan.sources):
            metrics.add(telemetry.VERIFIED_TOKENS, plan.sources.count(source), source=source)
        for source, letter in (("edge", "e"), ("hosted", "h"), ("lookup", "l")):
            if accepted := commit.kinds.count(letter):
                metrics.add(telemetry.ACCEPTED_TOKENS, accepted, source=source)
                metrics.add(telemetry.COMMITTED_TOKENS, accepted, kind="accepted")
        taken = sum(commit.kinds.count(letter) for letter in "ehl")
        for place in range(1, len(plan.tokens) + 1):
            metrics.add(telemetry.VERIFIED_PLACES, place=str(place))
            if place <= taken:
                metrics.add(telemetry.ACCEPTED_PLACES, place=str(place))
        for letter, kind in KINDS.items():
            if number := commit.kinds.count(letter):
                metrics.add(telemetry.COMMITTED_TOKENS, number, kind=kind)
        if "c" in commit.kinds:
            metrics.add(telemetry.REJECTED_TOKENS, commit.kinds.count("c"))

    def _history_wanted(self, ticket: Ticket, length: int) -> None:
        """KV was evicted or does not agree. Once is the way of the world; again and again without a step is trouble."""
        live = ticket.live
        _believe(ticket, length)
        live.strikes += 1
        if live.strikes > 2:
            live.back_off(self._clock())
        if live.strikes > MAX_STRIKES:
            self._fail(live, Failure(status=503, code="no_progress", message="the verifier cannot hold the session"))

    def _failed(self, live: Live, error: Failure) -> None:
        if error.code == "no_room":
            self._no_room(live, error)
        elif error.code == "stale_epoch":
            self._outlet.doubt(live)
            self._pause(live, error)
        else:
            self._trouble(live, error)

    def _no_room(self, live: Live, error: Failure) -> None:
        """Wait; sessions that have room finish, or take turns. One that could never fit was refused at the door."""
        now = self._clock()
        live.back_off(now)
        if live.room_wanted_since is None:
            live.room_wanted_since = now
        elif now - live.room_wanted_since > MAX_ROOM_WAIT_S:
            self._fail(live, error)
        elif now - live.room_wanted_since > TURN_S:
            self._outlet.make_room(live)

    def _pause(self, live: Live, error: Failure) -> None:
        live.strikes += 1
        live.back_off(self._clock())
        if live.strikes > MAX_STRIKES:
            self._fail(live, error)

    def _trouble(self, live: Live, error: Failure) -> None:
        """A step failed for this session: one clean replay from the first token, then it ends."""
        if live.replayed:
            self._fail(live, error)
            return
        log.warning("step failed, replayed once", session=live.id, code=error.code, error=error.message)
        if live.verifier is not None:
            self._outlet.release(live, live.verifier)
        live.replayed, live.fed = True, 0
        live.back_off(self._clock())

    def _fail(self, live: Live, error: Failure) -> None:
        log.error("session failed", session=live.id, code=error.code, error=error.message)
        if live.session.finish is None:
            self._outlet.commit(live, live.session.fail(error), None)


def _believe(ticket: Ticket, fed: int) -> None:
    """What the verifier holds now; of no interest when the session moved on meanwhile."""
    live = ticket.live
    if live.verifier == ticket.verifier:
        live.fed = min(fed, live.session.tip)


def _timing(ticket: Ticket, result: VerifyResult, now: float) -> Timing | None:
    """wait_ms is all that passed here but the step itself, so that the source is left with the link's share."""
    if ticket.echo is None or not ticket.echo.t_sent:
        return None
    passed_ms = (now - ticket.echo.arrived) * 1000
    wait_ms = round(max(0.0, passed_ms - result.step_ms), 3)
    return Timing(t_sent=ticket.echo.t_sent, wait_ms=wait_ms, step_ms=round(result.step_ms, 3))
