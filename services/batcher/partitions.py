"""Partitions come and go with their leases: listen and take over; fall silent; hand over in good order."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

import structlog

from paceline import subjects
from paceline.bus import Handler, Subscription
from paceline.errors import BusError, StoreError
from paceline.service import Service
from services.batcher.arrivals import Arrivals
from services.batcher.commit import Committer
from services.batcher.dispatch import Dispatcher
from services.batcher.leases import Leases
from services.batcher.live import Live, Table

log = structlog.get_logger("batcher")

RETRY_S = 0.2


class House(Protocol):
    table: Table
    leases: Leases
    arrivals: Arrivals
    dispatcher: Dispatcher
    committer: Committer

    def overtaken(self, live: Live) -> None:
        """Drop the session without a word."""


class Partitions:
    """`handlers`: of session messages, and of draft blocks."""

    def __init__(self, service: Service, house: House, on_session: Handler, on_draft: Handler) -> None:
        self._service = service
        self._house = house
        self._handlers = ((subjects.SESSION, on_session), (subjects.DRAFT, on_draft))
        self._listening: dict[int, list[Subscription]] = {}
        self._stopped = False
        service.set_ready("partitions", False, "no partitions leased yet")

    @property
    def listening(self) -> dict[int, list[Subscription]]:
        """Partition to its subscriptions."""
        return self._listening

    def gained(self, partition: int, epoch: int) -> None:
        self._service.spawn(self._take(partition, epoch), f"take {partition}")

    def lost(self, partition: int) -> None:
        """Somebody else has it, or nobody: its sessions are none of our business from here on, and nothing is said."""
        log.info("partition lost", partition=partition)
        for live in self._house.table.of(partition):
            self._house.overtaken(live)
        self._service.spawn(_close(self._listening.pop(partition, [])), f"close {partition}")

    def surplus(self, partition: int) -> None:
        self._service.spawn(self.hand_over([partition]), f"hand over {partition}")

    async def stop(self) -> None:
        self._stopped = True
        await self._house.leases.leave()
        await self.hand_over(list(self._house.leases.held))

    async def hand_over(self, partitions: list[int]) -> None:
        """Let steps under way end, store what they decided, then let go: the next owner starts where we stopped."""
        house = self._house
        await asyncio.gather(*(_close(self._listening.pop(partition, [])) for partition in partitions))
        lives = [live for partition in partitions for live in house.table.of(partition)]
        for live in lives:
            live.leaving = True
        await house.dispatcher.settled(lives)
        await house.committer.flushed(lives)
        for live in lives:
            house.overtaken(live)
        await house.leases.give(partitions)

    async def _take(self, partition: int, epoch: int) -> None:
        """Listen, then go on with the sessions that are there; again and again while the partition is ours."""
        while self._house.leases.epoch(partition) == epoch and not self._stopped:
            try:
                if partition not in self._listening:
                    await self._listen(partition, epoch)
                await self._house.arrivals.recover(partition, epoch)
            except (StoreError, BusError) as error:
                log.warning("partition not taken yet", partition=partition, error=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                break
        self._service.set_ready("partitions", bool(self._listening), "no partitions leased")

    async def _listen(self, partition: int, epoch: int) -> None:
        made = []
        for kind, handler in self._handlers:
            subject = kind.at(model=self._service.settings.model, partition=partition)
            made.append(await self._service.bus.subscribe(subject, handler, *kind.carries))
        if self._house.leases.epoch(partition) == epoch and partition not in self._listening:
            self._listening[partition] = made
        else:
            await _close(made)


async def _close(subscriptions: list[Subscription]) -> None:
    for subscription in subscriptions:
        with contextlib.suppress(BusError):  # without a bus nothing comes in either
            await subscription.close()
