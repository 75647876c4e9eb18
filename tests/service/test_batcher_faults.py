"""Whatever dies, freezes or restarts: every stream goes on with the same text, nothing lost and nothing twice."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from batcher_kit import CARD, DEEP, PLAIN, Client, Drafter, Stack, soon, stack

from paceline.errors import StoreError
from paceline.store import Append, Appended, Rejected
from paceline.wire import Speculation, VerifierRelease, VerifierStatus
from services.batcher import batcher

SLOW = {"step_ms": 5.0}


async def streams(made: Stack, count: int = 3, **opening: Any) -> list[Client]:
    """Some plain, some drafted, all under way."""
    clients = []
    for number in range(count):
        speculation = (PLAIN, Speculation(), DEEP)[number % 3]
        client = await made.client(prompt=f"stream {number}".encode(), speculation=speculation, **opening).open()
        if speculation.enabled:
            Drafter(client, wrong=lambda index: index % 4 == 3).start()
        clients.append(client)
    for client in clients:
        await client.grown(4)
    return clients


async def end_well(clients: list[Client], seconds: float = 20.0) -> None:
    for client in clients:
        assert await client.done(seconds) == client.expected()
        assert client.finish == "length"


async def test_a_killed_verifier_with_a_second_one_up() -> None:
    async with stack(verifiers=1, engine=SLOW) as made:
        clients = await streams(made, max_tokens=60)
        first = made.batcher.table.get(clients[0].session)
        assert first is not None
        assert first.verifier == "v1"
        second = await made.verifier("v2", **SLOW)
        await made.ready(verifiers=2)
        await made.killable("v1").kill()
        started = time.monotonic()
        await end_well(clients)
        assert time.monotonic() - started < 5
        await soon(lambda: second.engine.status().sessions == 0)


async def test_a_frozen_verifier_is_given_up_within_five_seconds() -> None:
    async with stack(verifiers=1, engine=SLOW) as made:
        clients = await streams(made, count=2, max_tokens=60)
        await made.verifier("v2", **SLOW)
        await made.ready(verifiers=2)
        counts = [len(client.tokens) for client in clients]
        await made.killable("v1").freeze()
        await soon(lambda: all(len(c.tokens) > n + 2 for c, n in zip(clients, counts, strict=True)), seconds=5)
        await end_well(clients)


async def test_the_only_verifier_is_killed_and_another_one_comes() -> None:
    async with stack(engine=SLOW) as made:
        clients = await streams(made)
        await made.killable("v1").kill()
        await asyncio.sleep(0.5)
        await made.verifier("v2", **SLOW)
        await end_well(clients)


async def test_a_session_waits_for_a_verifier_that_loads_and_not_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher, "STRANDED_S", 0.2)
    async with stack(engine=SLOW) as made:
        (client,) = await streams(made, count=1)
        (live,) = made.batcher.table
        coming = VerifierStatus(
            verifier="v2", model="toy", fingerprint=CARD.fingerprint, engine="simulated", simulated=True,
            state="loading", context=0, cells_total=0, cells_used=0, sessions=0, busy=0.0, queue=0, steps=0,
            step_tokens=0,
        )  # fmt: skip
        await made.killable("v1").kill()
        waited = 0.0
        while waited < 0.6:
            made.batcher.directory.hear(coming, time.monotonic())
            waited = time.monotonic() - live.stranded_since if live.stranded_since is not None else 0.0
            assert client.finish is None
            await asyncio.sleep(0.05)
        await made.verifier("v2", **SLOW)
        await end_well([client])

        (client,) = await streams(made, count=1)
        await made.killable("v2").kill()
        await client.done()
        assert client.finish == "error"
        assert client.last is not None
        assert client.last.error is not None
        assert client.last.error.code == "verifier_unavailable"

        monkeypatch.setattr(batcher, "LOADING_S", 0.5)
        await made.verifier("v3", **SLOW)
        (client,) = await streams(made, count=1)
        await made.killable("v3").kill()
        async with asyncio.timeout(10):
            while client.finish is None:
                made.batcher.directory.hear(coming, time.monotonic())
                await asyncio.sleep(0.05)
        assert client.finish == "error", "not for ever"


async def test_a_verifier_that_begins_anew_under_its_old_name() -> None:
    async with stack(engine=SLOW) as made:
        clients = await streams(made)
        await made.killable("v1").kill()
        await made.verifier("v1", **SLOW)
        await end_well(clients)


async def test_the_bus_goes_away_under_running_streams() -> None:
    async with stack(engine=SLOW) as made:
        clients = await streams(made, max_tokens=50)
        made.bus.lose()
        await asyncio.sleep(0.3)
        made.bus.restore()
        await end_well(clients)


async def test_the_store_goes_away_under_running_streams() -> None:
    """Nothing is shown that is not stored, the streams wait, and go on."""
    async with stack(engine=SLOW, presence_ttl_s=5) as made:
        clients = await streams(made, max_tokens=50)
        made.store.away = True
        await asyncio.sleep(0.1)
        shown = [len(client.tokens) for client in clients]
        await asyncio.sleep(1.0)
        assert [len(client.tokens) for client in clients] == shown
        assert all(len(live.pending) <= 8 for live in made.batcher.table)
        made.store.away = False
        await end_well(clients)


async def test_lost_answers_of_the_store_change_nothing() -> None:
    async with stack() as made:
        append, calls = made.store.append, 0

        async def unlucky(appends: list[Append]) -> list[Appended | Rejected]:
            nonlocal calls
            answers, calls = await append(appends), calls + 1
            if calls % 3 == 0:
                raise StoreError("the answer was lost")
            return answers

        made.store.append = unlucky  # type: ignore[method-assign,assignment]
        clients = await streams(made, max_tokens=24)
        await end_well(clients)
        for client in clients:
            record = await made.store.load(client.session)
            assert record is not None
            assert record.tokens == client.prompt + client.expected()
            assert len(record.kinds) == 24


async def test_a_store_that_lost_its_last_second_is_written_again() -> None:
    async with stack(engine=SLOW) as made:
        client = await made.client(logprobs=1, max_tokens=40).open()
        await client.grown(10)
        record = made.store._records[client.session]
        cut = record.prompt_length + 5
        made.store._records[client.session] = replace(
            record, tokens=record.tokens[:cut], kinds=record.kinds[:5], logprobs=record.logprobs[:5]
        )
        await end_well([client])
        stored = made.store._records[client.session]
        assert stored.tokens == client.prompt + client.expected()
        assert len(stored.kinds) == len(stored.logprobs) == 40


async def test_a_store_that_lost_the_record_ends_the_session_by_name() -> None:
    async with stack(engine=SLOW) as made:
        client = await made.client().open()
        await client.grown(5)
        del made.store._records[client.session]
        await client.done()
        assert client.finish == "error"
        assert client.last is not None
        assert client.last.error is not None
        assert client.last.error.code == "history_lost"


async def test_a_killed_batcher_is_succeeded() -> None:
    async with stack(engine=SLOW) as made:
        clients = await streams(made, max_tokens=60)
        successor = await made.another("b2")
        await made.kill_batcher(made.batcher)
        await end_well(clients)
        assert all(client.repairs <= 1 for client in clients)
        assert all(client.epoch > client.opened.epoch for client in clients if client.opened)
        assert len(successor.leases.held) == 64


async def test_a_batcher_that_was_frozen_is_fenced() -> None:
    """It goes on with steps, not knowing that its partitions went to another: nothing of that is stored or shown."""
    async with stack(engine=SLOW) as made:
        client = await made.client(max_tokens=120).open()
        await client.grown(4)
        frozen = made.batcher
        frozen.leases.round = _never  # type: ignore[method-assign]
        successor = await made.another("b2")
        await soon(lambda: successor.table.get(client.session) is not None)
        await soon(lambda: frozen.table.get(client.session) is None)
        await end_well([client])
        epochs = [verdict.epoch for verdict in client.verdicts]
        assert epochs == sorted(epochs)


async def _never() -> bool:
    await asyncio.Event().wait()
    return False


async def test_a_second_batcher_takes_its_fair_share_of_running_streams() -> None:
    async with stack(engine=SLOW) as made:
        clients = await streams(made, count=6, max_tokens=80)
        second = await made.another("b2")
        await soon(lambda: len(second.leases.held) == 32)
        assert len(made.batcher.leases.held) == 32
        await end_well(clients)


async def test_a_stopping_batcher_hands_over_at_once() -> None:
    async with stack(engine=SLOW, lease_ttl_s=3.0) as made:
        clients = await streams(made, max_tokens=60)
        successor = await made.another("b2")
        started = time.monotonic()
        await made.batcher.stop()
        await soon(lambda: all(successor.table.get(c.session) is not None or c.finish for c in clients), seconds=2.5)
        assert time.monotonic() - started < 2.5, "the leases did not have to run out"
        await end_well(clients)


async def test_a_failed_step_is_replayed_once() -> None:
    async with stack(engine=SLOW) as made:
        clients = await streams(made)
        made.killable("v1").engine.fail_next(clients[1].session)
        await end_well(clients)


async def test_a_session_whose_steps_keep_failing_ends_alone() -> None:
    async with stack(engine=SLOW) as made:
        clients = await streams(made)
        made.killable("v1").engine.fail_next(clients[0].session, times=2)
        await clients[0].done()
        assert clients[0].finish == "error"
        assert clients[0].last is not None
        assert clients[0].last.error is not None
        assert clients[0].last.error.code == "step_failed"
        assert tuple(clients[0].tokens) == clients[0].expected()[: len(clients[0].tokens)]
        await end_well(clients[1:])


async def test_sessions_take_turns_where_kv_cells_are_short() -> None:
    """Room for 64 tokens: two that need 40 each, and a short one; all of them end, with their own text."""
    async with stack(engine={"step_ms": 2.0, "cells": 64}) as made:
        prompt = b"abcdefghijklmnop"
        clients = [await made.client(prompt=prompt, seed=n, max_tokens=24).open() for n in range(2)]
        clients.append(await made.client(prompt=b"short", max_tokens=4).open())
        await end_well(clients)


async def test_forced_turns() -> None:
    """A session that runs for very long does not keep others out for ever."""
    async with stack(engine={"step_ms": 8.0, "cells": 700, "grace_s": 60.0}, presence_ttl_s=5) as made:
        hog = await made.client(prompt=b"hog", max_tokens=600).open()
        await hog.grown(100)
        late = await made.client(prompt=b"x" * 590, max_tokens=5).open()
        await late.done(15)
        assert hog.finish is None, "the late one did not have to wait for the end"
        assert tuple(late.tokens) == late.expected()
        await end_well([hog])


async def test_a_refused_batch_costs_only_the_guilty() -> None:
    async with stack(engine=SLOW) as made:
        clients = await streams(made)
        verifier = made.killable("v1").verifier
        verify, guilty = verifier.verify, clients[0].session

        async def picky(batch: Any) -> Any:
            if any(item.session == guilty for item in batch.items):
                raise TypeError("cannot stand that session")
            return await verify(batch)

        verifier.verify = picky  # type: ignore[method-assign]
        with_error = clients[0]
        await asyncio.sleep(0)
        verifier._serve = _answering(verifier, picky)  # type: ignore[method-assign]
        await with_error.done()
        assert with_error.finish == "error"
        await end_well(clients[1:])


def _answering(verifier: Any, verify: Any) -> Any:
    """_serve that answers an unexpected exception as the bus does for a handler's."""
    from paceline.bus_delivery import refusal
    from paceline.errors import RequestError

    async def serve(received: Any) -> None:
        if isinstance(received.message, VerifierRelease):
            verifier._engine.release(received.message.session)
            return
        try:
            answer = await verify(received.message)
        except TypeError as error:
            answer = refusal(RequestError(str(error)))
        await received.respond(answer)

    return serve


async def test_an_item_that_kills_its_verifiers_goes_alone_and_then_fails() -> None:
    """Every verifier that gets the guilty session dies of it: it takes no more than a few with it."""
    async with stack(engine=SLOW) as made:
        clients = await streams(made, count=2, max_tokens=400)
        guilty = made.batcher.table.get(clients[0].session)
        innocent = made.batcher.table.get(clients[1].session)
        assert guilty is not None
        assert innocent is not None
        for _ in range(6):
            await soon(lambda: guilty.ticket is not None)
            ticket = guilty.ticket
            assert ticket is not None
            together = [other.ticket for other in (guilty, innocent) if other.ticket is not None]
            made.batcher.landing.lost(together, went_down=True)
            assert len(together) == 1 or guilty.losses <= 2
        assert guilty.session.finish == "error"
        await clients[0].done()
        assert clients[0].last is not None
        assert clients[0].last.error is not None
        assert clients[0].last.error.code == "verifier_lost"
        assert innocent.session.finish is None
        await clients[1].grown(len(clients[1].tokens) + 5)
        assert tuple(clients[1].tokens) == clients[1].expected()[: len(clients[1].tokens)]


async def test_a_verifier_that_refuses_for_now_is_asked_again() -> None:
    """503 is no fault of the sessions: they wait and go on."""
    async with stack(engine=SLOW) as made:
        clients = await streams(made)
        queue = made.killable("v1").verifier._queue
        put, refused = queue.put_nowait, 0

        def busy(item: Any) -> None:
            nonlocal refused
            refused += 1
            if refused < 4:
                raise asyncio.QueueFull
            put(item)

        queue.put_nowait = busy  # type: ignore[method-assign]
        await end_well(clients)
