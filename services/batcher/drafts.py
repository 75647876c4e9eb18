"""Draft blocks come in: the hot path. One that can be verified leads to a step in the same turn of the event loop."""

from __future__ import annotations

import time
from typing import Protocol

import msgspec
import structlog

from paceline import telemetry, wire
from paceline.bus import Received
from paceline.errors import BadRequest
from paceline.session import Offer
from paceline.telemetry import Metrics
from services.batcher.commit import Committer
from services.batcher.dispatch import Dispatcher
from services.batcher.hosted import HostedDrafts
from services.batcher.live import Echo, Live, Table

log = structlog.get_logger("batcher")


class House(Protocol):
    table: Table
    dispatcher: Dispatcher
    committer: Committer
    hosted: HostedDrafts


class DraftDesk:
    def __init__(self, house: House, metrics: Metrics) -> None:
        self._house = house
        self._metrics = metrics

    async def on_draft(self, received: Received) -> None:
        """Blocks for sessions that we do not know are dropped: their source sends again when it hears from us."""
        block = received.message
        assert isinstance(block, wire.DraftBlock)
        live = self._house.table.get(block.session)
        if live is None:
            return
        try:
            offer = live.session.offer(block)
        except BadRequest as error:
            self._refuse(live, block, error)
            return
        if offer.ignored:
            return
        self._note(live, block, offer)
        if offer.attached:
            self._house.dispatcher.kick()
        if offer.gap:
            await self._house.committer.announce(live)
        self._count(block, offer)

    def _note(self, live: Live, block: wire.DraftBlock, offer: Offer) -> None:
        now = time.monotonic()
        if block.source == live.main_source:
            idle = live.ticket is None and self._house.dispatcher.idle(live.verifier)
            live.echo = Echo(block.t_sent, now, block.t_received if idle else 0.0)
            if offer.attached or offer.history or offer.stale:
                live.forecast.block_came(block.source, offer.attached, now)
            if offer.attached:
                live.patience.block_came(now)
            elif offer.history:
                live.patience.late_block_came(now)
        if block.source == "hosted":
            self._house.hosted.block_came(live)

    def _refuse(self, live: Live, block: wire.DraftBlock, error: BadRequest) -> None:
        nodes = _nodes(block)
        log.info("draft block refused", session=live.id, source=block.source, code=error.code, error=error.message)
        self._metrics.add(telemetry.DROPPED_TOKENS, nodes, reason="refused")
        counters = live.session.counters
        live.session.counters = msgspec.structs.replace(counters, refused=counters.refused + nodes)

    def _count(self, block: wire.DraftBlock, offer: Offer) -> None:
        dropped = {"stale": offer.stale, "duplicate": offer.duplicate, "overflow": offer.overflow}
        if offer.gap:
            dropped["gap"] = _nodes(block)
        for reason, nodes in dropped.items():
            if nodes:
                self._metrics.add(telemetry.DROPPED_TOKENS, nodes, reason=reason)
        if new := offer.attached + offer.history + offer.stale:
            self._metrics.add(telemetry.DRAFTED_TOKENS, new, source=block.source)


def _nodes(block: wire.DraftBlock) -> int:
    return sum(len(chain.tokens) for chain in block.chains)
