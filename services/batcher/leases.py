"""Which partitions this batcher owns: acquire, renew, a fair share among the live batchers, lose.

The lease's fencing number is the epoch of every session in the partition; safety comes from that number alone. The
clock here only keeps two batchers from answering one request.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from itertools import islice

import structlog

from paceline.errors import StoreError, Unavailable
from paceline.store import LeaseStore
from paceline.subjects import PARTITIONS

log = structlog.get_logger("batcher")

RETRY_S = 0.2
CONFIRM_S = 1.0


def share_of(batchers: int) -> int:
    """Partitions that each of so many batchers may hold."""
    return math.ceil(PARTITIONS / max(1, batchers))


class Leases:
    """`gained(partition, epoch)` and `lost(partition)` are called as things change; `surplus(partition)` asks to hand
    one over, which ends with `give`."""

    def __init__(
        self,
        store: LeaseStore,
        *,
        model: str,
        owner: str,
        ttl_s: float,
        gained: Callable[[int, int], None],
        lost: Callable[[int], None],
        surplus: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._model = model
        self._owner = owner
        self._ttl_s = ttl_s
        self._gained, self._lost, self._surplus = gained, lost, surplus
        self._clock = clock
        self._held: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._until = 0.0
        self._hurried = asyncio.Event()
        self._rounds = asyncio.Condition()
        self._stopped = False
        self.away = False
        """The last round failed: the store is away."""

    @property
    def held(self) -> dict[int, int]:
        """Partition to epoch, as of the last round that succeeded."""
        return dict(self._held)

    def epoch(self, partition: int) -> int | None:
        return self._held.get(partition)

    def owns(self, partition: int) -> bool:
        """Ours for certain: no other batcher can have got it before our lease ran out."""
        return partition in self._held and self._clock() < self._until

    async def confirmed(self, partition: int) -> bool:
        """`owns`, after one more round where our lease ran out (we were frozen, or the store was away). Raises
        Unavailable when the store does not answer."""
        if self.owns(partition):
            return True
        self.hurry()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM_S), self._rounds:
                await self._rounds.wait()
        if self.owns(partition):
            return True
        if self.away:
            raise Unavailable("the state store is away")
        return False

    def hurry(self) -> None:
        """Renew now: something says that we may not be the owner any more."""
        self._hurried.set()

    async def run(self) -> None:
        while True:
            fine = await self.round()
            async with self._rounds:
                self._rounds.notify_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ttl_s / 3 if fine else RETRY_S):  # wait_for may swallow a cancellation
                    await self._hurried.wait()
            self._hurried.clear()

    async def round(self) -> bool:
        """Renew, and take or hand over what the fair share asks for. False when the store is away."""
        started = self._clock()
        try:
            batchers = await self._store.heartbeat(self._model, self._owner, 0.0 if self._stopped else self._ttl_s)
            granted = await self._store.acquire(self._model, sorted(self._held), self._owner, self._ttl_s)
            granted |= await self._more(share_of(batchers) - len(granted))
        except StoreError as error:
            if not self.away:
                log.warning("leases are not renewed", error=str(error))
            self.away = True
            return False
        self.away = False
        self._until = started + self._ttl_s
        self._apply(granted)
        if not self._stopped:
            self._hand_over(len(self._held) - len(self._leaving) - share_of(batchers))
        return True

    async def _more(self, wanted: int) -> dict[int, int]:
        """Free partitions, at most `wanted`. Each batcher begins elsewhere, so that two do not race for the same."""
        if self._stopped or self._leaving:
            return {}
        begin = sum(self._owner.encode()) % PARTITIONS
        others = (partition for n in range(PARTITIONS) if (partition := (begin + n) % PARTITIONS) not in self._held)
        got: dict[int, int] = {}
        while len(got) < wanted and (some := list(islice(others, wanted - len(got)))):
            got |= await self._store.acquire(self._model, some, self._owner, self._ttl_s)
        return got

    def _apply(self, granted: dict[int, int]) -> None:
        """A partition whose epoch grew was somebody else's meanwhile: lost, and gained anew."""
        for partition, epoch in list(self._held.items()):
            if granted.get(partition) != epoch:
                del self._held[partition]
                self._leaving.discard(partition)
                self._lost(partition)
        for partition, epoch in granted.items():
            if partition not in self._held:
                self._held[partition] = epoch
                self._gained(partition, epoch)

    def _hand_over(self, count: int) -> None:
        for partition in sorted(set(self._held) - self._leaving, reverse=True)[: max(0, count)]:
            self._leaving.add(partition)
            self._surplus(partition)

    async def give(self, partitions: list[int]) -> None:
        """Release leases whose sessions are all stored and dropped. Without the store they run out by themselves."""
        try:
            await self._store.release(self._model, partitions, self._owner)
        except StoreError as error:
            log.warning("leases not released", partitions=len(partitions), error=str(error))
        for partition in partitions:
            self._held.pop(partition, None)
            self._leaving.discard(partition)

    async def leave(self) -> None:
        """No more partitions for this batcher; the others need not count it any more."""
        self._stopped = True
        with contextlib.suppress(StoreError):
            await self._store.heartbeat(self._model, self._owner, 0.0)
