"""One verifier as its batcher sees it: what is under way there, how long that takes, what its time is worth. Pure.

At most two batches are under way: the one that runs, and one that waits at the verifier for its end, so that no bus
hop lies between two steps. Times are monotonic seconds.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from paceline.going_rate import GoingRate
from paceline.price import Price
from services.batcher.live import Ticket

FIRST_TIMEOUT_S = 60.0
"""Before anything was measured: the first step of a large model on a small machine."""
SHORTEST_TIMEOUT_S = 5.0
LONGEST_TIMEOUT_S = 300.0
STEPS_TO_WAIT = 20
SMOOTHING = 0.2


@dataclass(eq=False)
class Flight:
    """A batch under way. predicted_s: what its step should take, None: nobody knows. behind: it waits at the verifier
    for the end of another one; queued: it did. From that end on `sent` is as if it had been sent to arrive then."""

    batch: str
    tickets: list[Ticket]
    sent: float
    predicted_s: float | None = None
    behind: bool = False
    queued: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def reading_share(self) -> float:
        """Of its tokens those that are only read."""
        read = sum(ticket.history for ticket in self.tickets)
        decided = sum(1 + len(ticket.plan.tokens) for ticket in self.tickets if ticket.plan is not None)
        return read / (read + decided) if read else 0.0


@dataclass(eq=False)
class Lane:
    """`alive`: when it last gave a sign of life. `hop_s`: smoothed time of one way over the bus."""

    name: str
    flights: list[Flight] = field(default_factory=list)
    pause_until: float = 0.0
    alive: float = 0.0
    probed: float = 0.0
    slowest_s: float | None = None
    hop_s: float | None = None
    patience: int = 1
    """Doubles with each timeout in a row: a step slower than expected must be able to arrive."""
    price: Price = field(default_factory=Price)
    rate: GoingRate = field(default_factory=GoingRate)

    def timeout_s(self) -> float:
        base = FIRST_TIMEOUT_S if self.slowest_s is None else max(SHORTEST_TIMEOUT_S, STEPS_TO_WAIT * self.slowest_s)
        return min(LONGEST_TIMEOUT_S, base * self.patience)

    def next_batch_at(self) -> float | None:
        """From when on another batch may be sent: at once where nothing is under way, else so that it arrives at the
        end of the running step, one hop before that; None while nobody can tell."""
        if not self.flights:
            return self.pause_until
        running = self.flights[0]
        if len(self.flights) > 1 or running.behind or running.predicted_s is None or self.hop_s is None:
            return None
        return max(self.pause_until, running.sent + running.predicted_s)

    def departed(self, flight: Flight) -> None:
        flight.behind = flight.queued = bool(self.flights)
        self.flights.append(flight)
        self.probed = flight.sent

    def landed(self, flight: Flight, step_s: float, now: float) -> None:
        """The answer to a batch came."""
        took = step_s if flight.queued else now - flight.sent
        self.alive, self.patience = now, 1
        self.slowest_s = max(took, 0.99 * (self.slowest_s or 0.0))
        if not flight.queued:
            hop = max(0.0, took - step_s) / 2
            self.hop_s = hop if self.hop_s is None else self.hop_s + SMOOTHING * (hop - self.hop_s)
        self.ended(flight, now)

    def ended(self, flight: Flight, now: float) -> None:
        """It is over, this way or that: the one behind it runs."""
        self.flights.remove(flight)
        for next_one in self.flights:
            if next_one.behind:
                next_one.behind, next_one.sent = False, now - 2 * (self.hop_s or 0.0)
