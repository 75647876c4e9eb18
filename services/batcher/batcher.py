"""The batcher: owns the sessions of its partitions, from opening to finish. Everything it decides is elsewhere; here
messages come in, and modules are told of each other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import structlog

from paceline import subjects, telemetry, wire
from paceline.bus import Received, Subscription
from paceline.errors import BadRequest, BusError, ModelError, StaleEpoch, StoreError
from paceline.model_card import ModelCard
from paceline.service import Service
from paceline.session import Commit
from paceline.settings import Settings
from services.batcher.arrivals import Arrivals
from services.batcher.commit import Committer
from services.batcher.directory import Directory
from services.batcher.dispatch import Dispatcher
from services.batcher.hosted import HostedDrafts
from services.batcher.landing import Landing
from services.batcher.leases import Leases
from services.batcher.live import FIRST_BACKOFF_S, Echo, Live, Table
from services.batcher.overhead import Overhead
from services.batcher.placement import Placement
from services.batcher.readiness import who_rests
from services.batcher.reception import Reception
from services.batcher.reporting import Reporting

log = structlog.get_logger("batcher")

TICK_S = 0.1
HEARTBEAT_S = 1.0
STATUS_S = 1.0
RETRY_S = 0.2
STRANDED_S = 60.0
"""A session that no verifier serves for this long ends with an error."""
REST_S = 1.0
NO_VERIFIER = wire.Failure(status=503, code="verifier_unavailable", message="no verifier was ready for a minute")


def load_card(settings: Settings) -> ModelCard:
    """Raises ModelError when the model was not pulled. The toy model needs no pulling."""
    path = settings.models_dir / settings.model / "card.json"
    if settings.model == "toy" and not path.exists():
        from paceline.engine_simulated import toy_card

        return toy_card()
    card = ModelCard.load(path)
    if card.model != settings.model:
        raise ModelError(f"{path} is the card of {card.model!r}, not of {settings.model!r}")
    return card


class Batcher:
    """One model's batcher. Implements the small protocols by which its parts report to it."""

    def __init__(self, service: Service, card: ModelCard) -> None:
        self._service = service
        self._model = service.settings.model
        self.table = Table()
        self.directory = Directory(card.fingerprint)
        self.overhead = Overhead(service.metrics)
        self.landing = Landing(self, service.metrics, self.overhead, time.monotonic)
        self.dispatcher = Dispatcher(service, self.table, self.directory, self.landing)
        self.placement = Placement(service, self.table, self.directory)
        self.committer = Committer(service.sessions, service.bus, self._model, self)
        self.hosted = HostedDrafts(service, self.table)
        self.reporting = Reporting(service.instance, self._model, service.metrics, self, time.time)
        self.leases = Leases(
            service.leases,
            model=self._model,
            owner=service.instance,
            ttl_s=service.settings.lease_ttl_s,
            gained=self._gained,
            lost=self._lost,
            surplus=lambda partition: self._go(self._hand_over([partition]), f"hand over {partition}"),
        )
        self.arrivals = Arrivals(service, self, card)
        self.reception = Reception(service, self, card)
        self._subscriptions: dict[int, list[Subscription]] = {}
        self._announcing = False
        self._stopped = False

    def _go(self, coroutine: object, name: str) -> None:
        self._service.spawn(coroutine, name)  # type: ignore[arg-type]

    # --- life ---

    async def start(self) -> None:
        bus, model = self._service.bus, self._model
        bus.on_reconnect(self._bus_back)
        verifiers, policy = subjects.VERIFIER_STATUS, subjects.POLICY
        await bus.subscribe(verifiers.at(model=model), self._on_verifier, *verifiers.carries)
        await bus.subscribe(policy.at(model=model), self._on_policy, *policy.carries)
        placements = subjects.PLACEMENTS
        await bus.subscribe(
            placements.at(batcher=self._service.instance), self._on_placement_query, *placements.carries
        )
        self._service.set_ready("partitions", False, "no partitions leased yet")
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
        self._stopped = True
        await self.leases.leave()
        await self._hand_over(list(self.leases.held))

    # --- partitions ---

    def _gained(self, partition: int, epoch: int) -> None:
        self._go(self._take(partition, epoch), f"take {partition}")

    async def _take(self, partition: int, epoch: int) -> None:
        """Listen, then go on with the sessions that are there; again and again while the partition is ours."""
        while self.leases.epoch(partition) == epoch and not self._stopped:
            try:
                if partition not in self._subscriptions:
                    await self._listen(partition, epoch)
                await self.arrivals.recover(partition, epoch)
            except (StoreError, StaleEpoch, BusError) as error:
                log.warning("partition not taken yet", partition=partition, error=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                break
        self._service.set_ready("partitions", bool(self._subscriptions), "no partitions leased")

    async def _listen(self, partition: int, epoch: int) -> None:
        bus, made = self._service.bus, []
        for kind, handler in ((subjects.SESSION, self.reception.on_message), (subjects.DRAFT, self._on_draft)):
            subject = kind.at(model=self._model, partition=partition)
            made.append(await bus.subscribe(subject, handler, *kind.carries))
        if self.leases.epoch(partition) == epoch and partition not in self._subscriptions:
            self._subscriptions[partition] = made
        else:
            await _close(made)

    def _lost(self, partition: int) -> None:
        """Somebody else has it, or nobody: its sessions are none of our business from here on, and nothing is said."""
        log.info("partition lost", partition=partition)
        for live in self.table.of(partition):
            self.overtaken(live)
        subscriptions = self._subscriptions.pop(partition, [])
        self._go(_close(subscriptions), f"close {partition}")

    async def _hand_over(self, partitions: list[int]) -> None:
        """Let steps under way end, store what they decided, then let go: the next owner starts where we stopped."""
        for partition in partitions:
            await _close(self._subscriptions.pop(partition, []))
        lives = [live for partition in partitions for live in self.table.of(partition)]
        for live in lives:
            live.leaving = True
        await self.dispatcher.settled(lives)
        await self.committer.flushed(lives)
        for live in lives:
            self.overtaken(live)
        await self.leases.give(partitions)

    # --- what comes in ---

    async def _on_verifier(self, received: Received) -> None:
        assert isinstance(received.message, wire.VerifierStatus)
        status, now = received.message, time.monotonic()
        served = self.directory.serves(status.verifier, now)
        if self.directory.hear(status, now):
            self.dispatcher.restarted(status.verifier)
        if served != self.directory.serves(status.verifier, now):
            self.placement.settle(now)
            self.dispatcher.kick()

    async def _on_policy(self, received: Received) -> None:
        assert isinstance(received.message, wire.PolicyDecision)
        self.directory.obey(received.message)

    async def _on_placement_query(self, received: Received) -> None:
        assert isinstance(received.message, wire.PlacementQuery)
        sessions = tuple(live.id for live in self.table.on(received.message.verifier) if live.session.finish is None)
        if received.respond is not None:
            await received.respond(wire.PlacementList(batcher=self._service.instance, sessions=sessions))

    async def _on_draft(self, received: Received) -> None:
        """The hot path: a block that can be verified now leads to a step in the same turn of the event loop."""
        assert isinstance(received.message, wire.DraftBlock)
        block = received.message
        live = self.table.get(block.session)
        if live is None:
            return
        try:
            offer = live.session.offer(block)
        except BadRequest as error:
            self._refuse(live, block, error)
            return
        if offer.ignored:
            return
        now = time.monotonic()
        self._count(block, offer)
        if block.source == live.main_source:
            idle = live.ticket is None and self.dispatcher.idle(live.verifier)
            live.echo = Echo(block.t_sent, now, block.t_received if idle else 0.0)
        if block.source == "hosted":
            self.hosted.block_came(live)
        if offer.attached:
            live.patience.block_came(now)
            self.dispatcher.kick()
        if offer.gap:
            await self.committer.announce(live)

    def _refuse(self, live: Live, block: wire.DraftBlock, error: BadRequest) -> None:
        nodes = sum(len(chain.tokens) for chain in block.chains)
        log.info("draft block refused", session=live.id, source=block.source, code=error.code, error=error.message)
        self._service.metrics.add(telemetry.DROPPED_TOKENS, nodes, reason="refused")
        counters = live.session.counters
        live.session.counters = msgspec.structs.replace(counters, refused=counters.refused + nodes)

    def _count(self, block: wire.DraftBlock, offer: object) -> None:
        metrics = self._service.metrics
        metrics.add(telemetry.DRAFTED_TOKENS, sum(len(chain.tokens) for chain in block.chains), source=block.source)
        for reason in ("stale", "duplicate", "overflow"):
            if dropped := getattr(offer, reason):
                metrics.add(telemetry.DROPPED_TOKENS, dropped, reason=reason)

    def _bus_back(self) -> None:
        """What was under way may be lost, ours and everybody's: dispatch again, and let followers see their gaps."""
        self.dispatcher.bus_back()
        self._go(self._announce(list(self.table)), "announce")

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
        if live.stranded_since is not None and now - live.stranded_since > STRANDED_S:
            self.commit(live, live.session.fail(NO_VERIFIER), None)

    async def _announce(self, lives: list[Live]) -> None:
        self._announcing = True
        try:
            for live in lives:
                await self.committer.announce(live)
        finally:
            self._announcing = False

    async def _report(self) -> None:
        while True:
            status = self.reporting.status(self.table)
            with contextlib.suppress(BusError):  # the next one comes in a second
                await self._service.bus.publish(subjects.BATCHER_STATUS.at(model=self._model), status)
            await asyncio.sleep(STATUS_S)

    # --- the protocols of its parts ---

    def enter(self, live: Live) -> None:
        """A session begins, or goes on, here."""
        self.table.add(live)
        self.placement.place(live, time.monotonic())
        self.dispatcher.kick()

    def present(self, live: Live) -> None:
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
        live.committed_now(commit, timing)
        self.committer.put(live)
        if live.wants_hosted:
            self.hosted.committed(live, time.monotonic())
        if commit.finish is not None:
            self.hosted.stop(live)
            if not under_way and live.verifier is not None:
                self.release(live, live.verifier)

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

    def _forget(self, live: Live) -> None:
        if self.table.get(live.id) is live:
            self.reporting.ended(live)
            self.table.remove(live)

    def rewritten(self, live: Live) -> None:
        live.ticket = None
        self.dispatcher.kick()

    @property
    def window_cap(self) -> int | None:
        return self.directory.window_cap

    @property
    def partitions(self) -> int:
        return len(self.leases.held)

    def load(self) -> dict[str, int]:
        return self.table.load()

    def waiting(self) -> int:
        return self.dispatcher.waiting.take()

    def overhead_ms_p50(self) -> float:
        return self.overhead.p50_ms()


async def _close(subscriptions: list[Subscription]) -> None:
    for subscription in subscriptions:
        with contextlib.suppress(BusError):
            await subscription.close()


@asynccontextmanager
async def body(service: Service) -> AsyncIterator[None]:
    batcher = Batcher(service, await asyncio.to_thread(load_card, service.settings))
    await batcher.start()
    try:
        yield
    finally:
        await batcher.stop()
