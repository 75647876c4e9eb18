"""Partitions: fair shares, expiry, outages of the store, and the hash that grows with a session."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from paceline.errors import Unavailable
from paceline.store_memory import MemoryStore
from paceline.wire import prefix_hash
from services.batcher.leases import Leases, share_of
from services.batcher.live import PrefixHash


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Party:
    """One batcher's leases, and what it was told."""

    store: MemoryStore
    clock: Clock
    name: str
    gained: dict[int, int] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    surplus: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leases = Leases(
            self.store, model="m", owner=self.name, ttl_s=3.0, clock=self.clock,
            gained=self.gained.__setitem__, lost=self.lost.append, surplus=self.surplus.append,
        )  # fmt: skip

    async def round(self) -> bool:
        fine = await self.leases.round()
        handed, self.surplus[:] = list(self.surplus), []
        await self.leases.give(handed)
        return fine


def parties(*names: str) -> tuple[MemoryStore, Clock, list[Party]]:
    clock = Clock()
    store = MemoryStore(clock)
    return store, clock, [Party(store, clock, name) for name in names]


def test_shares() -> None:
    assert [share_of(n) for n in (0, 1, 2, 3, 64, 100)] == [64, 64, 32, 22, 1, 1]


async def test_one_takes_all_two_share_and_the_survivor_takes_all_again() -> None:
    _, clock, (one, two) = parties("one", "two")
    await one.round()
    assert len(one.leases.held) == 64
    await two.round()
    assert two.leases.held == {}
    await one.round()
    await two.round()
    assert (len(one.leases.held), len(two.leases.held)) == (32, 32)
    assert not set(one.leases.held) & set(two.leases.held)
    clock.now += 3.1
    await two.round()
    assert len(two.leases.held) == 64
    await one.round()
    assert len(one.leases.held) <= 32, "what the other got is lost"
    assert len(set(one.lost)) == 32


async def test_a_new_owners_epoch_is_higher() -> None:
    _, clock, (one, two) = parties("one", "two")
    await one.round()
    clock.now += 3.1
    await two.round()
    assert all(two.gained[partition] > one.gained[partition] for partition in range(64))


async def test_an_owner_that_comes_back_in_time_keeps_its_epochs() -> None:
    _, clock, (one,) = parties("one")
    await one.round()
    before = one.leases.held
    clock.now += 10
    assert not one.leases.owns(0), "by the clock the lease ran out"
    await one.round()
    assert one.leases.owns(0)
    assert one.leases.held == before
    assert one.lost == []


async def test_an_outage_of_the_store_keeps_everything_and_owns_nothing_for_certain() -> None:
    store, clock, (one,) = parties("one")
    await one.round()
    store.away = True
    clock.now += 4
    assert not await one.round()
    assert len(one.leases.held) == 64
    assert not one.leases.owns(5)
    runner = asyncio.create_task(one.leases.run())
    with pytest.raises(Unavailable, match="store"):
        await one.leases.confirmed(5)
    store.away = False
    assert await one.leases.confirmed(5)
    runner.cancel()
    await asyncio.gather(runner, return_exceptions=True)
    assert one.lost == []


async def test_confirmed_is_false_when_another_one_has_it() -> None:
    _, clock, (one, two) = parties("one", "two")
    await one.round()
    clock.now += 3.1
    await two.round()
    runner = asyncio.create_task(one.leases.run())
    assert not await one.leases.confirmed(7)
    runner.cancel()
    await asyncio.gather(runner, return_exceptions=True)


async def test_who_leaves_is_not_counted_any_more() -> None:
    _, _, (one, two) = parties("one", "two")
    await one.round()
    await two.round()
    await one.leases.leave()
    await one.leases.give(list(one.leases.held))
    await two.round()
    assert len(two.leases.held) == 64


def test_the_growing_hash_is_the_wires() -> None:
    growing, tokens = PrefixHash([1, 2, 3]), [1, 2, 3]
    for token in (0, 70000, 5):
        growing.extend([token])
        tokens.append(token)
        assert growing.hex() == prefix_hash(tokens)
