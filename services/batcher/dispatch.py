"""Verify steps: one batch under way for each verifier, built when the verifier is free and somebody may run.

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
from paceline.errors import BusError, NoResponders, RequestError, RequestTimeout
from paceline.service import Service
from paceline.wire import Probe, VerifyBatch, VerifyResult
from services.batcher import batches
from services.batcher.directory import FRESH_S, Directory
from services.batcher.landing import Landing
from services.batcher.live import Live, Table, Ticket
from services.batcher.readiness import candidate
from services.batcher.schedule import Chosen, choose

log = structlog.get_logger("batcher")

FIRST_TIMEOUT_S = 60.0
"""Before anything was measured: the first step of a large model on a small machine."""
SHORTEST_TIMEOUT_S = 5.0
LONGEST_TIMEOUT_S = 300.0
STEPS_TO_WAIT = 20
PROBE_AFTER_S = 0.3
PROBE_EVERY_S = 0.5
PROBE_TIMEOUT_S = 1.0
PAUSE_S = 0.2
"""Before a verifier that lost a batch gets the next one."""
BATCH_ITEMS = 256


@dataclass(eq=False)
class Flight:
    """A batch under way. `sent` is monotonic."""

    batch: str
    tickets: list[Ticket]
    sent: float
    task: asyncio.Task[None] | None = None


@dataclass(eq=False)
class Lane:
    """One verifier as seen from here. `alive`: when it last gave a sign of life (monotonic)."""

    name: str
    flight: Flight | None = None
    pause_until: float = 0.0
    alive: float = 0.0
    probed: float = 0.0
    slowest_s: float | None = None
    patience: int = 1
    """Doubles with each timeout in a row: a step slower than expected must be able to arrive."""

    def timeout_s(self) -> float:
        base = FIRST_TIMEOUT_S if self.slowest_s is None else max(SHORTEST_TIMEOUT_S, STEPS_TO_WAIT * self.slowest_s)
        return min(LONGEST_TIMEOUT_S, base * self.patience)

    def measured(self, step_s: float) -> None:
        self.slowest_s = max(step_s, 0.99 * (self.slowest_s or 0.0))
        self.patience = 1


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
        return lane is None or lane.flight is None

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
        flights = [lane.flight for lane in self._lanes.values() if lane.flight is not None]
        tasks = [flight.task for flight in flights if flight.task and not tickets.isdisjoint(flight.tickets)]
        if tasks:
            await asyncio.wait(tasks)

    # --- sending ---

    def _look(self) -> None:
        """A fault in here would stop all work without a word: it ends the process, as a task's does."""
        self._kicked = False
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
            if lane.flight is None and now >= lane.pause_until:
                self._next(lane, now)

    def _next(self, lane: Lane, now: float) -> None:
        """Build and send the next batch of this verifier, if there is one."""
        candidates = [
            found for live in self._table.on(lane.name) if (found := candidate(live, self._directory, now)) is not None
        ]
        if not candidates:
            return
        settings = self._service.settings
        loners = [item for item in candidates if self._live(item.session).alone]
        pool = loners[:1] or candidates
        chosen = choose(pool, step_tokens=settings.max_step_tokens, chunk_tokens=settings.chunk_tokens)
        self.waiting.note(len(candidates) - min(len(chosen.shares), BATCH_ITEMS))
        self._send(lane, chosen, now)

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
            tickets.append(batches.ticket_of(live, share))
        batch = VerifyBatch(batch=f"{self._prefix}-{step}", items=tuple(batches.item_of(ticket) for ticket in tickets))
        flight = Flight(batch.batch, tickets, now)
        lane.flight, lane.probed = flight, now
        flight.task = self._service.spawn(self._fly(lane, flight, batch), f"step {batch.batch}")

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
        if lane.flight is not flight:
            return
        if not isinstance(answer, VerifyResult) or answer.batch != flight.batch:
            self._refused(lane, flight, RequestError("the verifier answered with something else"))
            return
        lane.flight = None
        now = self.clock()
        lane.alive = now
        lane.measured(now - flight.sent)
        self._landing.take(flight.tickets, answer, now)

    def _refused(self, lane: Lane, flight: Flight, error: RequestError) -> None:
        if lane.flight is not flight:
            return
        log.warning("batch refused", verifier=lane.name, items=len(flight.tickets), code=error.code, error=str(error))
        self._landing.refused(flight.tickets, error)
        self._lost_flight(lane, flight, "refused")

    def _unreachable(self, lane: Lane, flight: Flight) -> None:
        """Nobody listens. Right after the bus came back the verifier may only be a little behind us."""
        if lane.flight is flight and not self._directory.settling(self.clock()):
            self._directory.lose(lane.name)
        self._lost_flight(lane, flight, "no_responders")

    def _lost(self, lane: Lane, reason: str, *, went_down: bool = False) -> None:
        flight = lane.flight
        if flight is None:
            return
        self._lost_flight(lane, flight, reason, went_down=went_down)
        if flight.task is not None:
            flight.task.cancel()

    def _lost_flight(self, lane: Lane, flight: Flight, reason: str, *, went_down: bool = False) -> None:
        if lane.flight is not flight:
            return
        lane.flight = None
        lane.pause_until = self.clock() + (0.0 if reason == "reconnect" else PAUSE_S)
        self._service.metrics.add(telemetry.LOST_BATCHES, reason=reason)
        log.warning("batch lost", verifier=lane.name, batch=flight.batch, reason=reason, items=len(flight.tickets))
        self._landing.lost(flight.tickets, went_down=went_down)

    # --- watching ---

    def tick(self, now: float) -> None:
        """Ask the verifiers that keep us waiting whether they are alive; look for work that time made runnable."""
        for lane in self._lanes.values():
            if lane.flight is not None and now - lane.flight.sent > PROBE_AFTER_S and now - lane.probed > PROBE_EVERY_S:
                lane.probed = now
                self._service.spawn(self._probe(lane, lane.flight), f"probe {lane.name}")
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
        if lane.flight is flight:
            self._directory.lose(lane.name)
            self._lost(lane, reason, went_down=True)
            self.kick()


async def _raised(error: Exception) -> None:
    raise error
