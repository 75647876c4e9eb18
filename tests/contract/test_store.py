"""One behaviour suite for both stores: memory, and a real Valkey server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from paceline import wire
from paceline.errors import Conflict, NotFound, StaleEpoch
from paceline.store import Append, Appended, LeaseStore, Rejected, SessionRecord, SessionStore
from paceline.store_memory import MemoryStore
from paceline.store_redis import RedisStore
from paceline.subjects import partition_of

PROMPT = (5, 6, 70_000)
MODEL = "org/a-model.v1"


class Store(SessionStore, LeaseStore):
    """Both ports in one object, as both implementations are."""


_number = 0


def new_id(prefix: str = "s") -> str:
    global _number
    _number += 1
    return f"{prefix}{_number}-{random.randrange(1 << 32):08x}"


@pytest_asyncio.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, redis_server: str) -> AsyncIterator[Store]:
    made = MemoryStore() if request.param == "memory" else await RedisStore.connect(redis_server)
    yield made  # type: ignore[misc]
    await made.close()


def record(session: str, **changes: object) -> SessionRecord:
    sampling = wire.Sampling(temperature=0.8, logit_bias={7: -100.0})
    opened = wire.SessionOpen(
        model=MODEL, fingerprint="f", tokens=PROMPT, sampling=sampling, stop=("\nUser:",), session=session
    )
    plain = SessionRecord(
        session=session, tenant="ten-a", opened=opened, secret="0f" * 16, seed=(1 << 63) - 1, prompt_length=len(PROMPT),
        max_tokens=100, epoch=1_790_000_000_000_001, tokens=PROMPT, created=1.5,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


EPOCH = record("x").epoch


def append(
    session: str, at: int, *tokens: int, epoch: int = EPOCH, finish: str | None = None, steps: int = 1
) -> Append:
    counters = wire.Counters(steps=steps, accepted={"edge": steps})
    return Append(session, MODEL, epoch, at, tokens, "f" * len(tokens), counters, finish=finish)


async def one(store: Store, item: Append) -> Appended | Rejected:
    (answer,) = await store.append([item])
    return answer


async def created(store: Store, **changes: object) -> str:
    session = new_id()
    await store.create(record(session, **changes))
    return session


async def test_a_record_comes_back_as_it_was_created(store: Store) -> None:
    session = await created(store, connection=3, counters=wire.Counters(drafted={"hosted": 2}))
    assert await store.load(session) == record(session, connection=3, counters=wire.Counters(drafted={"hosted": 2}))
    assert await store.load("nobody") is None


async def test_creating_twice_is_harmless_and_never_overwrites(store: Store) -> None:
    session = await created(store)
    await one(store, append(session, 3, 9))
    await store.create(record(session))
    assert (await loaded(store, session)).tokens == (*PROMPT, 9)
    with pytest.raises(Conflict):
        await store.create(record(session, secret="ff" * 16))


async def loaded(store: Store, session: str) -> SessionRecord:
    found = await store.load(session)
    assert found is not None
    return found


async def test_appends_extend_the_record(store: Store) -> None:
    session = await created(store)
    entries = (wire.LogprobEntry(logprob=-0.5, top=((9, -0.5), (8, -9999.0))),)
    first = replace(append(session, 3, 9), kinds="e", logprobs=entries)
    assert await store.append([first, append(session, 4, 10, 11, steps=2)]) == [
        Appended((9,), "e", None),
        Appended((10, 11), "ff", None),
    ]
    found = await loaded(store, session)
    assert (found.tokens, found.kinds, found.tip) == ((*PROMPT, 9, 10, 11), "eff", 6)
    assert found.logprobs == entries
    assert found.counters == wire.Counters(steps=2, accepted={"edge": 2})


async def test_a_retry_changes_nothing_and_answers_the_same(store: Store) -> None:
    session = await created(store)
    item = append(session, 3, 9, 10)
    assert await one(store, item) == await one(store, item) == Appended((9, 10), "ff", None)
    assert (await loaded(store, session)).tokens == (*PROMPT, 9, 10)


async def test_who_is_behind_gets_the_stored_tail(store: Store) -> None:
    session = await created(store)
    await store.append([append(session, 3, 9), append(session, 4, 10)])
    assert await one(store, append(session, 3, 77)) == Appended((9, 10), "ff", None)
    assert await one(store, append(session, 4, 77, finish="stop")) == Appended((10,), "f", None)
    assert (await loaded(store, session)).finish is None


async def test_an_append_beyond_the_tip_is_a_gap(store: Store) -> None:
    session = await created(store)
    assert await one(store, append(session, 4, 9)) == Rejected("gap", 3, EPOCH)
    assert await one(store, append("nobody", 4, 9)) == Rejected("missing")
    assert (await loaded(store, session)).tokens == PROMPT


async def test_an_old_epoch_never_writes(store: Store) -> None:
    session = await created(store)
    await one(store, append(session, 3, 9, epoch=EPOCH + 1))
    stale = Rejected("stale_epoch", 4, EPOCH + 1)
    assert await store.append([append(session, at, 8) for at in (3, 4, 5)]) == [stale] * 3
    assert (await loaded(store, session)).tokens == (*PROMPT, 9)
    assert (await loaded(store, session)).epoch == EPOCH + 1


async def test_a_finish_ends_the_session_once_and_for_all(store: Store) -> None:
    session = await created(store)
    assert await one(store, append(session, 3, 9, 2, finish="stop")) == Appended((9, 2), "ff", "stop")
    for late in (
        append(session, 3, 9, 2, finish="stop"),
        append(session, 3, 1, finish="cancelled", epoch=EPOCH + 5),
        append(session, 3, 1, epoch=EPOCH - 5),
    ):
        assert await one(store, late) == Appended((9, 2), "ff", "stop")
    assert await one(store, append(session, 5, 1, finish="error")) == Appended((), "", "stop")
    assert await one(store, append(session, 1, 1)) == Appended((*PROMPT[1:], 9, 2), "ff", "stop")
    found = await loaded(store, session)
    assert (found.finish, found.tokens, found.epoch) == ("stop", (*PROMPT, 9, 2), EPOCH)


async def test_a_finish_without_tokens(store: Store) -> None:
    session = await created(store)
    assert await one(store, append(session, 3, finish="cancelled")) == Appended((), "", "cancelled")
    assert (await loaded(store, session)).finish == "cancelled"


async def test_adopting_raises_the_epoch(store: Store) -> None:
    session = await created(store)
    await one(store, append(session, 3, 9))
    taken = await store.adopt(session, EPOCH + 10)
    assert taken is not None
    assert (taken.epoch, taken.tokens, taken.kinds) == (EPOCH + 10, (*PROMPT, 9), "f")
    assert await store.adopt(session, EPOCH + 10) == taken
    with pytest.raises(StaleEpoch):
        await store.adopt(session, EPOCH + 9)
    assert await store.adopt("nobody", EPOCH) is None
    assert await one(store, append(session, 4, 10)) == Rejected("stale_epoch", 4, EPOCH + 10)


async def test_connection_numbers_grow(store: Store) -> None:
    session = await created(store, connection=1)
    assert [await store.next_connection(session) for _ in range(3)] == [2, 3, 4]
    assert (await loaded(store, session)).connection == 4
    with pytest.raises(NotFound):
        await store.next_connection("nobody")


async def test_placement_is_fenced(store: Store) -> None:
    session = await created(store)
    await store.place(session, EPOCH, "verifier-0")
    await store.place(session, EPOCH + 0, "verifier-1")
    assert (await loaded(store, session)).verifier == "verifier-1"
    await store.adopt(session, EPOCH + 1)
    with pytest.raises(StaleEpoch):
        await store.place(session, EPOCH, "verifier-2")
    assert (await loaded(store, session)).verifier == "verifier-1"
    with pytest.raises(NotFound):
        await store.place("nobody", EPOCH, "verifier-2")


async def test_live_sessions_by_partition(store: Store) -> None:
    sessions = [await created(store) for _ in range(20)]
    await one(store, append(sessions[0], 3, 2, finish="stop"))
    for partition in {partition_of(session) for session in sessions}:
        expected = {session for session in sessions[1:] if partition_of(session) == partition}
        found = set(await store.live(MODEL, partition))
        assert expected <= found
        assert sessions[0] not in found
    assert await store.live("another model", 0) == []


async def test_of_two_racing_writers_one_wins_and_both_agree(store: Store) -> None:
    session = await created(store)
    answers = await asyncio.gather(*(one(store, append(session, 3, token, token + 1)) for token in range(100, 140, 2)))
    assert len(set(answers)) == 1
    assert isinstance(answers[0], Appended)
    assert (await loaded(store, session)).tokens == PROMPT + answers[0].tail


async def test_leases_exclude_and_come_back(store: Store) -> None:
    model = new_id("model")
    first = await store.acquire(model, range(4), "a", 30)
    assert set(first) == set(range(4))
    assert await store.acquire(model, range(4), "b", 30) == {}
    assert await store.acquire(model, range(4), "a", 30) == first
    await store.release(model, [0, 1], "b")
    assert await store.acquire(model, [0], "b", 30) == {}
    await store.release(model, [0, 1], "a")
    taken = await store.acquire(model, range(4), "b", 30)
    assert set(taken) == {0, 1}
    assert all(taken[partition] > first[partition] for partition in taken)
    assert set(await store.acquire(model, range(4), "a", 30)) == {2, 3}
    assert await store.acquire(model, [], "a", 30) == {}


async def test_a_lease_runs_out(store: Store) -> None:
    model = new_id("model")
    first = await store.acquire(model, [1, 2], "a", 0.05)
    await asyncio.sleep(0.1)
    assert await store.acquire(model, [1], "a", 30) == {1: first[1]}, "nobody took it: the epoch is kept"
    second = await store.acquire(model, [1, 2], "b", 30)
    assert set(second) == {2}
    assert second[2] > first[2]
    await store.release(model, [2], "b")
    third = await store.acquire(model, [2], "a", 30)
    assert third[2] > second[2]


async def test_heartbeats_count_the_living(store: Store) -> None:
    model = new_id("model")
    assert await store.heartbeat(model, "a", 30) == 1
    assert await store.heartbeat(model, "b", 0.05) == 2
    assert await store.heartbeat(model, "b", 0.05) == 2
    await asyncio.sleep(0.1)
    assert await store.heartbeat(model, "a", 30) == 1


async def test_draining_verifiers(store: Store) -> None:
    model = new_id("model")
    assert await store.draining(model) == set()
    await store.set_draining(model, "verifier-0", True)
    await store.set_draining(model, "verifier-1", True)
    await store.set_draining(model, "verifier-0", False)
    assert await store.draining(model) == {"verifier-1"}


@pytest.mark.parametrize("seed", range(6))
async def test_both_stores_answer_alike(redis_server: str, seed: int) -> None:
    """400 random operations on three sessions, the same on both: every answer and every record is equal."""
    real, fake, rng = await RedisStore.connect(redis_server), MemoryStore(), random.Random(seed)
    sessions = [new_id("r") for _ in range(3)]
    for session in sessions[:2]:
        await real.create(record(session))
        await fake.create(record(session))
    for _ in range(400):
        session, epoch = rng.choice(sessions), EPOCH + rng.randrange(3)
        known = await fake.load(session)
        at = max(0, (known.tip if known else 3) + rng.choice([0, 0, 0, 0, 1, -1, -3]))
        tokens = [rng.randrange(1 << 24) for _ in range(rng.randrange(4))]
        finish = "stop" if rng.random() < 0.01 else None
        entries = tuple(wire.LogprobEntry(logprob=-float(item)) for item in tokens) if rng.random() < 0.5 else None
        item = replace(append(session, at, *tokens, epoch=epoch, finish=finish), logprobs=entries)
        assert await real.append([item]) == await fake.append([item])
        if rng.random() < 0.1:
            assert await answer_of(real, session, epoch) == await answer_of(fake, session, epoch)
        if rng.random() < 0.1:
            assert await real.load(session) == await fake.load(session)
    await real.close()


async def answer_of(store: RedisStore | MemoryStore, session: str, epoch: int) -> object:
    try:
        await store.place(session, epoch, f"v{epoch % 7}")
        return await store.adopt(session, epoch), await store.next_connection(session)
    except (StaleEpoch, NotFound) as error:
        return type(error)
