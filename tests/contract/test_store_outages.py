"""What the store does when the server is killed, frozen, emptied or overrun: tried on a real one."""

from __future__ import annotations

import asyncio
import random
import signal
import time

import pytest
from redis.asyncio import Redis
from servers import Server
from test_store import EPOCH, MODEL, PROMPT, append, loaded, new_id, one, record

from paceline.errors import StoreError
from paceline.keys import FINISHED_TTL_S, LIVE_TTL_S
from paceline.store import Appended
from paceline.store_memory import MemoryStore
from paceline.store_redis import CONNECTIONS, RedisStore
from paceline.telemetry import STORE_ERRORS, Metrics


async def eventually(store: RedisStore, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                return await store.ping()
            except StoreError:
                await asyncio.sleep(0.05)


async def test_what_was_answered_survives_a_killed_server(own_redis: Server) -> None:
    store = await RedisStore.connect(own_redis.url)
    session = new_id()
    await store.create(record(session))
    written = 3
    for round_ in range(3):
        for _ in range(30):
            assert await one(store, append(session, written, written)) == Appended((written,), "f", None)  # type: ignore[arg-type]
            written += 1
        await own_redis.kill()
        await own_redis.start()
        found = await loaded(store, session)  # type: ignore[arg-type]
        assert found.tokens == (*PROMPT, *range(3, written)), round_
        assert found.kinds == "f" * (written - 3)
    await store.close()


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_an_outage_is_told_within_a_second_and_ends_by_itself(own_redis: Server, how: str) -> None:
    metrics = Metrics()
    store = await RedisStore.connect(own_redis.url, metrics)
    session = new_id()
    await store.create(record(session))
    if how == "killed":
        await own_redis.kill()
    else:
        own_redis.signal(signal.SIGSTOP)
    for call in (
        lambda: store.append([append(session, 3, 9)]),
        lambda: store.load(session),
        lambda: store.acquire(MODEL, range(64), "a", 3),
        store.ping,
    ):
        started = time.monotonic()
        with pytest.raises(StoreError):
            await call()  # type: ignore[operator]
        assert time.monotonic() - started < 1.2
    assert metrics.value(STORE_ERRORS) == 4
    if how == "killed":
        await own_redis.start()
    else:
        own_redis.signal(signal.SIGCONT)
    await eventually(store)
    answers = await store.append([append(session, 3, 9)])
    assert answers == [Appended((9,), "f", None)], "the retry of an append whose answer was lost"
    assert (await store.load(session)).tokens == (*PROMPT, 9)  # type: ignore[union-attr]
    await store.close()


async def test_a_server_that_forgot_the_scripts_gets_them_again(own_redis: Server) -> None:
    store, raw = await RedisStore.connect(own_redis.url), Redis.from_url(own_redis.url)
    session = new_id()
    await store.create(record(session))
    await raw.script_flush()
    assert await store.append([append(session, 3, 9), append(session, 4, 10)]) == [
        Appended((9,), "f", None),
        Appended((10,), "f", None),
    ]
    await raw.aclose()
    await store.close()


async def test_a_new_life_of_the_store_has_higher_epochs(own_redis: Server) -> None:
    store, raw = await RedisStore.connect(own_redis.url), Redis.from_url(own_redis.url)
    before = await store.acquire(MODEL, [0, 1], "a", 3)
    await raw.flushall()
    after = await store.acquire(MODEL, [0, 1], "a", 3)
    assert all(after[partition] > before[partition] for partition in before)
    await raw.aclose()
    await store.close()


async def test_every_key_of_a_session_expires(own_redis: Server) -> None:
    store, raw = await RedisStore.connect(own_redis.url), Redis.from_url(own_redis.url)
    session = new_id()
    await store.create(record(session))
    await store.place(session, EPOCH, "verifier-0")
    await store.next_connection(session)
    await one(store, append(session, 3, 9))  # type: ignore[arg-type]
    ttls = [await raw.ttl(key) for key in await raw.keys(f"pl:s:{{{session}}}:*")]
    assert len(ttls) == 5
    assert all(LIVE_TTL_S - 60 <= ttl <= LIVE_TTL_S for ttl in ttls)
    await one(store, append(session, 4, 2, finish="stop"))  # type: ignore[arg-type]
    ttls = [await raw.ttl(key) for key in await raw.keys(f"pl:s:{{{session}}}:*")]
    assert all(0 < ttl <= FINISHED_TTL_S for ttl in ttls)
    await raw.aclose()
    await store.close()


async def test_a_live_session_whose_record_is_gone_is_forgotten(own_redis: Server) -> None:
    store, raw = await RedisStore.connect(own_redis.url), Redis.from_url(own_redis.url)
    session = new_id()
    await store.create(record(session))
    await raw.delete(*await raw.keys(f"pl:s:{{{session}}}:*"))
    partitions = [await store.live(MODEL, partition) for partition in range(64)]
    assert not any(partitions)
    assert await raw.keys("pl:live:*") == []
    await raw.aclose()
    await store.close()


async def test_cancelled_calls_never_mix_up_answers(own_redis: Server) -> None:
    store, raw, rng = await RedisStore.connect(own_redis.url), Redis.from_url(own_redis.url), random.Random(3)
    sessions = [new_id() for _ in range(20)]
    for session in sessions:
        await store.create(record(session))
    before = len(asyncio.all_tasks())

    async def check(session: str) -> None:
        found = await store.load(session)
        assert found is not None
        assert found.session == found.opened.session == session

    for _ in range(10):
        calls = [asyncio.create_task(check(rng.choice(sessions))) for _ in range(100)]
        for call in rng.sample(calls, 60):
            await asyncio.sleep(0)
            call.cancel()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError)
    for session in sessions:
        await check(session)
    assert len(asyncio.all_tasks()) == before
    assert len(await raw.client_list()) <= CONNECTIONS + 1
    assert not store._redis.connection_pool._in_use_connections
    await raw.aclose()
    await store.close()


async def test_more_calls_than_connections_wait(own_redis: Server) -> None:
    store = await RedisStore.connect(own_redis.url)
    await asyncio.gather(*(store.heartbeat(MODEL, f"b{number}", 30) for number in range(300)))
    assert await store.heartbeat(MODEL, "b0", 30) == 300
    await store.close()


async def test_no_server_at_all_is_said_soon() -> None:
    started = time.monotonic()
    with pytest.raises(StoreError):
        await RedisStore.connect("redis://127.0.0.1:9/0")
    assert time.monotonic() - started < 1.5


async def test_the_memory_store_plays_an_outage() -> None:
    store = MemoryStore()
    store.away = True
    for call in (store.ping, lambda: store.load("s"), lambda: store.acquire(MODEL, [1], "a", 3)):
        with pytest.raises(StoreError):
            await call()  # type: ignore[operator]
