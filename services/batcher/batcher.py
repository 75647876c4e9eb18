"""The batcher: owns the sessions of its partitions, from opening to finish. What it decides is decided elsewhere; here
its parts are put together, told of each other, and given the time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import structlog

from paceline import subjects, wire
from paceline.bus import Received
from paceline.errors import BusError
from paceline.model_card import ModelCard
from paceline.price import Price
from paceline.served_card import served_card
from paceline.service import Service
from paceline.session import Commit
from paceline.trust import Trust
from services.batcher.arrivals import Arrivals
from services.batcher.commit import Committer
from services.batcher.directory import Directory
from services.batcher.dispatch import Dispatcher
from services.batcher.drafts import DraftDesk
from services.batcher.hosted import HostedDrafts
from services.batcher.landing import Landing
from services.batcher.leases import Leases
from services.batcher.live import FIRST_BACKOFF_S, Live, Table
from services.batcher.overhead import Overhead
from services.batcher.partitions import Partitions
from services.batcher.placement import Placement
from services.batcher.readiness import who_rests
from services.batcher.reception import Reception
from services.batcher.reporting import Reporting

log = structlog.get_logger("batcher")

TICK_S = 0.1
HEARTBEAT_S = 1.0
"""A live session without a verdict for this long gets an empty one: its follower knows that all is well."""
STATUS_S = 1.0
FIRST_WORD_S = 1.5
"""How long a new batcher listens for a verifier before it tells of itself: they speak once a second, and a gateway
that heard both sends sessions at once."""
STRANDED_S = 60.0
"""A session ends with an error when for so long no verifier served it or said that it loads the model."""
LOADING_S = 600.0
"""A large model takes minutes to load; a session waits for that at most so long."""
REST_S = 1.0


class Batcher:
    """One model's batcher. Implements the small protocols by which its parts report to it."""

    def __init__(self, service: Service, card: ModelCard) -> None:
        self._service = service
        self._model = service.settings.model
        self.table = Table()
        self.trust = Trust()
        self.directory = Directory(card.fingerprint, service.settings.fill_within_s)
        self.overhead = Overhead(service.metrics)
        self.landing = Landing(self, service.metrics, self.overhead, time.monotonic)
        self.dispatcher = Dispatcher(service, self.table, self.directory, self.landing)
        self.placement = Placement(service, self.table, self.directory)
        self.committer = Committer(service.sessions, service.bus, self._model, self)
        self.hosted = HostedDrafts(service, self.table, self.directory)
        self.reporting = Reporting(service.instance, self._model, service.metrics, self, time.time)
        self.arrivals = Arrivals(service, self, card)
        self.reception = Reception(service, self, card)
        self.drafts = DraftDesk(self, service.metrics)
        self.partitions = Partitions(service, self, self.reception.on_message, self.drafts.on_draft)
        self.leases = Leases(
            service.leases,
            model=self._model,
            owner=service.instance,
            ttl_s=service.settings.lease_ttl_s,
            gained=self.partitions.gained,
            lost=self.partitions.lost,
            surplus=self.partitions.surplus,
        )
        self._announcing = False
        self._serves = asyncio.Event()

    def _go(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        self._service.spawn(coroutine, name)

    # --- life ---

    async def start(self) -> None:
        bus, model, instance = self._service.bus, self._model, self._service.instance
        bus.on_reconnect(self._bus_back)
        for subject, handler in (
            (subjects.VERIFIER_STATUS, self._on_verifier),
            (subjects.POLICY, self._on_policy),
            (subjects.DRAFTER_STATUS, self._on_drafter),
        ):
            await bus.subscribe(subject.at(model=model), handler, *subject.carries)
        placements = subjects.PLACEMENTS
        await bus.subscribe(placements.at(batcher=instance), self._on_placement_query, *placements.carries)
        try:
            await bus.publish(subjects.STATUS_WANTED.at(model=model), wire.StatusWanted())
        except BusError as error:
            log.info("verifiers are heard within a second", error=str(error))
        for name, run in (
            ("commits", self.committer.run),
            ("placements", self.placement.run),
            ("leases", self.leases.run),
            ("ticks", self._ticks),
            ("status", self._report),
        ):
            self._go(run(), name)

    async def stop(self) -> None:
        """Hand every partition over: steps under way are committed, nothing new begins."""
        await self.partitions.stop()

    def _bus_back(self) -> None:
        """What was under way may be lost, ours and everybody's: dispatch again, and let followers see their gaps."""
        self.dispatcher.bus_back()
        self._go(self._announce(list(self.table)), "announce")

    # --- what comes in besides sessions and drafts ---

    async def _on_verifier(self, received: Received) -> None:
        assert isinstance(received.message, wire.VerifierStatus)
        status, now = received.message, time.monotonic()
        served = self.directory.serves(status.verifier, now)
        if self.directory.hear(status, now):
            self.dispatcher.restarted(status.verifier)
        if self.directory.serves(status.verifier, now):
            self._serves.set()
        if served != self.directory.serves(status.verifier, now):
            self.placement.settle(now)
            self.dispatcher.kick()

    async def _on_drafter(self, received: Received) -> None:
        assert isinstance(received.message, wire.DrafterStatus)
        self.directory.hear_drafter(received.message, time.monotonic())

    async def _on_policy(self, received: Received) -> None:
        assert isinstance(received.message, wire.PolicyDecision)
        self.directory.obey(received.message)

    async def _on_placement_query(self, received: Received) -> None:
        assert isinstance(received.message, wire.PlacementQuery)
        sessions = tuple(live.id for live in self.table.on(received.message.verifier) if live.session.finish is None)
        if received.respond is not None:
            await received.respond(wire.PlacementList(batcher=self._service.instance, sessions=sessions))

    # --- what time brings ---

    async def _ticks(self) -> None:
        while True:
            self.tick(time.monotonic())
            await asyncio.sleep(TICK_S)

    def tick(self, now: float) -> None:
        self.placement.settle(now)
        for live in self.table:
            if live.session.finish is None:
                self._look(live, now)
        self.hosted.tick(now)
        self.dispatcher.tick(now)
        silent = [live for live in self.table if not live.session.parked and now - live.last_verdict >= HEARTBEAT_S]
        if silent and not self._announcing:
            self._go(self._announce(silent), "heartbeat")

    def _look(self, live: Live, now: float) -> None:
        state = live.presence.state(now)
        if state == "expired":
            self.cancel(live)
        elif (state == "parked") != live.session.parked:
            live.session.parked = state == "parked"
            live.patience.pause()
        if live.stranded_since is not None and live.session.finish is None and self._service.bus.connected:
            stranded_s = now - live.stranded_since
            hopeless_s = now - max(live.stranded_since, self.directory.coming)
            if hopeless_s > STRANDED_S or stranded_s > LOADING_S:
                self.commit(live, live.session.fail(_no_verifier(stranded_s)), None)

    async def _announce(self, lives: list[Live]) -> None:
        self._announcing = True
        try:
            for live in lives:
                await self.committer.announce(live)
        finally:
            self._announcing = False

    async def _report(self) -> None:
        if not self.directory.serving(time.monotonic()):
            await self.next_verifier(FIRST_WORD_S)
        while True:
            status = self.reporting.status(self.table)
            with contextlib.suppress(BusError):  # the next one comes in a second
                await self._service.bus.publish(subjects.BATCHER_STATUS.at(model=self._model), status)
            await asyncio.sleep(STATUS_S)

    # --- sessions: the protocols of its parts ---

    def enter(self, live: Live) -> None:
        """A session begins, or goes on, here."""
        now = time.monotonic()
        self.table.add(live)
        self.placement.place(live, now)
        self.hosted.look(live, now)
        self.dispatcher.kick()

    def present(self, live: Live) -> None:
        """Its client is there: it may run."""
        live.session.parked = False
        live.patience.pause()
        self.dispatcher.kick()

    def kick(self) -> None:
        self.dispatcher.kick()

    def cancel(self, live: Live) -> None:
        if live.session.finish is None:
            under_way, live.ticket = live.ticket is not None, None
            self.commit(live, live.session.cancel(), None, under_way=under_way)

    def commit(self, live: Live, commit: Commit, timing: wire.Timing | None, *, under_way: bool = False) -> None:
        """`under_way`: a step of the session still runs at the verifier, which lets its KV go when that is over."""
        now = time.monotonic()
        live.committed_now(commit, timing)
        live.assist.pace.committed(len(commit.tokens), now)
        self.committer.put(live)
        self.hosted.committed(live, now)
        if commit.finish is not None:
            self.hosted.stop(live)
            if not under_way and live.verifier is not None:
                self.release(live, live.verifier)

    def reading(self, live: Live) -> None:
        self._go(self.committer.announce(live), "reading")

    def release(self, live: Live, verifier: str) -> None:
        self.placement.release(live, verifier)

    def make_room(self, live: Live) -> None:
        """The one that has waited longest is next: another one on its verifier lets its cells go and rests."""
        others = [other for other in self.table.on(live.verifier or "") if other is not live]
        resting = who_rests(live, others)
        if resting is None:
            return
        now = time.monotonic()
        resting.running_since, resting.not_before = None, now + REST_S
        live.not_before = now + FIRST_BACKOFF_S
        self.release(resting, live.verifier or "")

    def doubt(self, live: Live) -> None:
        self.leases.hurry()

    def confirmed(self, live: Live) -> None:
        """The store has more of it, so it may have become runnable."""
        self.dispatcher.kick()

    def finished(self, live: Live, last: wire.Verdict) -> None:
        self.reporting.finished(last.finish)
        self.reception.remember(last)
        self._forget(live)

    def overtaken(self, live: Live) -> None:
        live.leaving, live.ticket = True, None
        self.committer.drop(live)
        self._forget(live)
        self.leases.hurry()

    def rewritten(self, live: Live) -> None:
        live.ticket = None
        self.dispatcher.kick()

    def _forget(self, live: Live) -> None:
        if self.table.get(live.id) is live:
            self.reporting.ended(live)
            self.table.remove(live)

    async def next_verifier(self, limit_s: float) -> None:
        self._serves.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._serves.wait()

    # --- facts for the status ---

    @property
    def window_cap(self) -> int | None:
        return self.directory.window_cap

    def price(self, live: Live) -> Price | None:
        return self.dispatcher.price(live.verifier)

    @property
    def partition_count(self) -> int:
        return len(self.leases.held)

    def load(self) -> dict[str, int]:
        return self.table.load()

    def waiting(self) -> int:
        return self.dispatcher.waiting.take()

    def overhead_ms_p50(self) -> float:
        return self.overhead.p50_ms()


@asynccontextmanager
async def body(service: Service) -> AsyncIterator[None]:
    batcher = Batcher(service, await asyncio.to_thread(served_card, service.settings))
    await batcher.start()
    try:
        yield
    finally:
        await batcher.stop()


def _no_verifier(stranded_s: float) -> wire.Failure:
    message = f"no verifier was ready for {stranded_s:.0f} s"
    return wire.Failure(status=503, code="verifier_unavailable", message=message)
