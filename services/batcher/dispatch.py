"""Verify steps: a batch is built when a verifier is free and somebody may run, and a bus hop before it gets free when
those who wait are more than those whose step runs (less would split what goes into one step for good).

A batch counts as lost when nobody listens, the bus came back, the verifier was started anew, shows no sign of life
for directory.FRESH_S, or does not answer in time. Its sessions then plan again, elsewhere if the verifier is away;
an answer that comes later is for a ticket that nobody holds any more.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import structlog

from paceline import subjects, telemetry
from paceline.batch_choice import Chosen, Want, choose
from paceline.errors import BusError, NoResponders, RequestError, RequestTimeout
from paceline.price import Price
from paceline.service import Service
from paceline.wire import Probe, VerifyBatch, VerifyResult
from services.batcher import batches
from services.batcher.directory import FRESH_S, Directory
from services.batcher.landing import Landing
from services.batcher.lane import Flight, Lane
from services.batcher.live import Live, Table
from services.batcher.readiness import want

log = structlog.get_logger("batcher")

PROBE_AFTER_S = 0.3
PROBE_EVERY_S = 0.5
PROBE_TIMEOUT_S = 1.0
PAUSE_S = 0.2
"""Before a verifier that lost a batch gets the next one."""
BATCH_ITEMS = 256


@dataclass
class Waiting:
    """Sessions that steps had no room for: what the policy sees as pressure."""

    since: list[int] = field(default_factory=list)

    def note(self, left_out: int) -> None:
        self.since.append(left_out)

    def take(self) -> int:
        """The mean since the last call, rounded up."""
        mean = -(-sum(self.since) // len(self.since)) if self.since else 0
        self.since.clear()
        return mean


class Dispatcher:
    """`kick` whenever a session may have become runnable; `tick` ten times a second."""

    def __init__(self, service: Service, table: Table, directory: Directory, landing: Landing) -> None:
        self._service = service
        self._bus = service.bus
        self._table = table
        self._directory = directory
        self._landing = landing
        self._lanes: dict[str, Lane] = {}
        self._kicked = False
        self._alarm: asyncio.TimerHandle | None = None
        self._steps = count(1)
        self._prefix = f"{service.instance}-{secrets.token_hex(3)}"
        self.waiting = Waiting()
        self.clock: Callable[[], float] = time.monotonic

    def kick(self) -> None:
        """Look for work once everything that came in at the same time has been taken in."""
        if not self._kicked:
            self._kicked = True
            asyncio.get_running_loop().call_soon(self._look)

    def idle(self, verifier: str | None) -> bool:
        lane = self._lanes.get(verifier or "")
        return lane is None or not lane.flights

    def price(self, verifier: str | None) -> Price | None:
        """Of the time of a verifier; None before its first step."""
        lane = self._lanes.get(verifier or "")
        return lane.price if lane is not None else None

    def bus_back(self) -> None:
        """Everything that was under way may be lost."""
        self._directory.bus_back(self.clock())
        for lane in self._lanes.values():
            self._lost(lane, "reconnect")
        self.kick()

    def restarted(self, verifier: str) -> None:
        """Its status says that it began anew: the batch is lost, and so is all KV there."""
        for live in self._table.on(verifier):
            live.fed = 0
        lane = self._lanes.get(verifier)
        if lane is not None:
            self._lost(lane, "silent", went_down=True)
        self.kick()

    async def settled(self, lives: Sequence[Live]) -> None:
        """Wait until no step of these sessions is under way."""
        tickets = {live.ticket for live in lives if live.ticket is not None}
        flights = [flight for lane in self._lanes.values() for flight in lane.flights]
        tasks = [flight.task for flight in flights if flight.task and not tickets.isdisjoint(flight.tickets)]
        if tasks:
            await asyncio.wait(tasks)

    # --- sending ---

    def _look(self) -> None:
        """A fault in here would stop all work without a word: it ends the process, as a task's does."""
        self._kicked = False
        if self._service.stopping.is_set():
            return
        try:
            self._pump()
        except Exception as error:
            self._service.spawn(_raised(error), "look for work")

    def _pump(self) -> None:
        if not self._bus.connected:
            return
        now = self.clock()
        for name in self._directory.serving(now):
            lane = self._lanes.setdefault(name, Lane(name))
            at = lane.next_batch_at()
            if at is None or (lane.flights and not self._more_wait(lane)):
                continue
            if now >= at:
                self._next(lane, now)
            else:
                self._look_at(at)

    def _more_wait(self, lane: Lane) -> bool:
        """Are there more sessions that no step has than the running one has?"""
        waiting = sum(live.ticket is None and not live.session.parked for live in self._table.on(lane.name))
        return waiting > len(lane.flights[0].tickets)

    def _look_at(self, when: float) -> None:
        """Look for work at that time, or before."""
        delay = max(0.0, when - self.clock())
        loop = asyncio.get_running_loop()
        if self._alarm is None or self._alarm.cancelled() or loop.time() + delay < self._alarm.when():
            self._silence()
            self._alarm = loop.call_later(delay, self._ring)

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _ring(self) -> None:
        self._alarm = None
        self._look()

    def _next(self, lane: Lane, now: float) -> None:
        """Build and send the next batch of this verifier, if there is one."""
        wants = in_question(self._wants(lane, now), lambda session: self._live(session).alone)
        begun = {item.session for item in wants if item.begins}
        if not begun:
            return
        settings = self._service.settings
        chosen = choose(
            wants,
            times=self._directory.terms(lane.name).times,
            step_tokens=settings.max_step_tokens,
            chunk_tokens=settings.chunk_tokens,
            going_rate=lane.rate.value(now),
        )
        ours = sum(share.session in begun for share in chosen.shares)
        if lane.flights and ours <= len(lane.flights[0].tickets):
            return
        if any(share.decides for share in chosen.shares):
            lane.price.note(now, chosen.price)
        self._send(lane, chosen, now)
        left = {item.session for item in wants if item.must or item.worth >= 1.0}
        self.waiting.note(len(left - {share.session for share in chosen.shares[:BATCH_ITEMS]}))

    def _wants(self, lane: Lane, now: float) -> list[Want]:
        """Of all who may run there; who waits for a block is looked at again when it should have come."""
        terms = self._directory.terms(lane.name, lane.price.value or 0.0)
        wants = []
        for live in self._table.on(lane.name):
            found = want(live, terms, now)
            if found is not None:
                wants.append(found)
            if live.look_again_at is not None:
                self._look_at(live.look_again_at)
        return wants

    def _live(self, session: str) -> Live:
        live = self._table.get(session)
        assert live is not None
        return live

    def _send(self, lane: Lane, chosen: Chosen, now: float) -> None:
        step = next(self._steps)
        tickets = []
        for share in chosen.shares[:BATCH_ITEMS]:
            live = self._live(share.session)
            live.served = step
            tickets.append(batches.ticket_of(live, share, now))
        batch = VerifyBatch(batch=f"{self._prefix}-{step}", items=tuple(batches.item_of(ticket) for ticket in tickets))
        predicted_s = None if chosen.predicted_ms is None else chosen.predicted_ms / 1000
        flight = Flight(batch.batch, tickets, now, predicted_s)
        lane.departed(flight)
        flight.task = self._service.spawn(self._fly(lane, flight, batch), f"step {batch.batch}")
        if (at := lane.next_batch_at()) is not None and self._more_wait(lane):
            self._look_at(at)

    async def _fly(self, lane: Lane, flight: Flight, batch: VerifyBatch) -> None:
        subject = subjects.VERIFY.at(verifier=lane.name)
        links = telemetry.links([ticket.live.headers for ticket in flight.tickets if ticket.live.headers])
        try:
            with telemetry.tracer.start_as_current_span(telemetry.SPAN_STEP, links=links) as span:
                span.set_attribute(telemetry.ATTR_ITEMS, len(batch.items))
                answer = await self._bus.request(subject, batch, timeout_s=lane.timeout_s())
        except NoResponders:
            self._unreachable(lane, flight)
        except RequestTimeout:
            lane.patience *= 2
            self._lost_flight(lane, flight, "timeout")
        except BusError:
            self._lost_flight(lane, flight, "reconnect")
        except RequestError as error:
            self._refused(lane, flight, error)
        else:
            self._landed(lane, flight, answer)
        self.kick()

    # --- ends of a flight ---

    def _landed(self, lane: Lane, flight: Flight, answer: object) -> None:
        if flight not in lane.flights:
            return
        if not isinstance(answer, VerifyResult) or answer.batch != flight.batch:
            self._refused(lane, flight, RequestError("the verifier answered with something else"))
            return
        now = self.clock()
        lane.landed(flight, answer.step_ms / 1000, now)
        committed = sum(outcome.accepted + 1 for outcome in answer.items if outcome.token is not None)
        lane.rate.note(now, committed, flight.reading_share * answer.step_ms / 1000)
        self._landing.take(flight.tickets, answer, now)

    def _refused(self, lane: Lane, flight: Flight, error: RequestError) -> None:
        if flight not in lane.flights:
            return
        log.warning("batch refused", verifier=lane.name, items=len(flight.tickets), code=error.code, error=str(error))
        self._landing.refused(flight.tickets, error)
        self._lost_flight(lane, flight, "refused")

    def _unreachable(self, lane: Lane, flight: Flight) -> None:
        """Nobody listens. Right after the bus came back the verifier may only be a little behind us."""
        if flight in lane.flights and not self._directory.settling(self.clock()):
            self._directory.lose(lane.name)
        self._lost_flight(lane, flight, "no_responders")

    def _lost(self, lane: Lane, reason: str, *, went_down: bool = False) -> None:
        """All that is under way there. Only the batch that ran can be guilty of what happened."""
        for flight, ran in [(flight, not flight.behind) for flight in lane.flights]:
            self._lost_flight(lane, flight, reason, went_down=went_down and ran)
            if flight.task is not None:
                flight.task.cancel()

    def _lost_flight(self, lane: Lane, flight: Flight, reason: str, *, went_down: bool = False) -> None:
        if flight not in lane.flights:
            return
        now = self.clock()
        lane.ended(flight, now)
        lane.pause_until = now + (0.0 if reason == "reconnect" else PAUSE_S)
        self._service.metrics.add(telemetry.LOST_BATCHES, reason=reason)
        log.warning("batch lost", verifier=lane.name, batch=flight.batch, reason=reason, items=len(flight.tickets))
        self._landing.lost(flight.tickets, went_down=went_down)

    # --- watching ---

    def tick(self, now: float) -> None:
        """Ask the verifiers that keep us waiting whether they are alive; look for work that time made runnable."""
        for lane in self._lanes.values():
            if lane.flights and now - lane.flights[0].sent > PROBE_AFTER_S and now - lane.probed > PROBE_EVERY_S:
                lane.probed = now
                self._service.spawn(self._probe(lane, lane.flights[0]), f"probe {lane.name}")
        self.kick()

    async def _probe(self, lane: Lane, flight: Flight) -> None:
        try:
            await self._bus.request(subjects.PROBE.at(verifier=lane.name), Probe(), timeout_s=PROBE_TIMEOUT_S)
            lane.alive = self.clock()
        except NoResponders:
            if not self._directory.settling(self.clock()):
                self._gone(lane, flight, "no_responders")
        except BusError:
            signs = (lane.alive, flight.sent, self._directory.heard(lane.name) or 0.0)
            if self.clock() - max(signs) > FRESH_S:
                self._gone(lane, flight, "silent")
        except RequestError:
            lane.alive = self.clock()

    def _gone(self, lane: Lane, flight: Flight, reason: str) -> None:
        if flight in lane.flights:
            self._directory.lose(lane.name)
            self._lost(lane, reason, went_down=True)
            self.kick()


def in_question(wants: Sequence[Want], alone: Callable[[str], bool]) -> list[Want]:
    """Those that the next step is chosen from: one that goes `alone` (asked by its session), else all that do not."""
    quarantined = next((item for item in wants if item.begins and alone(item.session)), None)
    return [quarantined] if quarantined else [item for item in wants if not alone(item.session)]


async def _raised(error: Exception) -> None:
    raise error
