"""What the batcher makes of drafts and time: the text is that of plain decoding, and no step is spent on nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from batcher_kit import CARD, DEEP, PLAIN, WORLD, Client, Drafter, Stack, send_block, soon, stack

from paceline import subjects
from paceline.batch_choice import Want
from paceline.bus import Received
from paceline.engine_simulated import SimulatedDraft, Timing, World
from paceline.wire import Chain, HostedOpen, HostedStop, Speculation, Verdict
from services.batcher.dispatch import in_question
from services.drafter.drafter import Drafter as HostedDrafter
from services.drafter.metered import MeteredDraft
from services.drafter.warm_up import warm_up

KNOWN = {"step_ms": 4.0, "token_ms": 1.0, "knows": True}


async def test_drafters_are_told_the_price_of_verifier_time_and_nobody_else_is() -> None:
    async with stack(engine=KNOWN) as made:
        drafted = await made.client(speculation=DEEP, max_tokens=60).open()
        Drafter(drafted).start()
        plain = await made.client(speculation=PLAIN, prompt=tuple(b"somebody else")).open()
        await asyncio.gather(drafted.done(), plain.done())
        prices = [verdict.price for verdict in drafted.verdicts if verdict.price is not None]
        assert prices
        assert all(0.0 <= price <= 1.0 for price in prices)
        assert len(prices) < len(drafted.verdicts), "only when it changed"
        assert all(verdict.price is None for verdict in plain.verdicts)


async def test_a_silent_session_is_told_the_price_once_a_second() -> None:
    async with stack(engine=KNOWN, presence_ttl_s=5) as made:
        client = await made.client(speculation=DEEP, max_tokens=30).open()
        await client.grown(1)
        live = made.batcher.table.get(client.session)
        assert live is not None
        live.patience.round_trip_s = 60.0
        count = len(client.verdicts)
        await client.until(lambda: len(client.verdicts) >= count + 2)
        assert all(verdict.price is not None for verdict in client.verdicts[count:] if not verdict.tokens)


async def test_text_that_repeats_itself_is_drafted_from_itself() -> None:
    text = b"one two three four, " * 4
    world = World(script={"*": text})
    async with stack(engine={**KNOWN, "world": world}) as made:
        client = await made.client(max_tokens=len(text), speculation=Speculation()).open()
        assert bytes(await client.done()) == text
        assert client.last is not None
        counters = client.last.counters
        assert counters is not None
        assert counters.accepted["lookup"] > len(text) / 2
        assert counters.verified_by["lookup"] == counters.verified
        assert counters.steps < len(text) / 2
        without = await made.client(max_tokens=len(text), speculation=Speculation(lookup=False)).open()
        assert bytes(await without.done()) == text
        assert set(without.kinds) == {"f"}


class Liar:
    """Answers every verdict with four drafts that are wrong, and says that it is certain of them."""

    def __init__(self, client: Client) -> None:
        self._client, self._incarnation = client, 1
        client.listeners.append(self._on_verdict)

    def _on_verdict(self, verdict: Verdict) -> None:
        if verdict.finish is None:
            tip = verdict.at + len(verdict.tokens)
            self._client.stack.services[0].spawn(self.lie(tip), "lie")

    async def lie(self, tip: int) -> None:
        self._incarnation += 1
        chain = Chain(first=1, position=tip, at=tip, tokens=(0, 0, 0, 0), conf=bytes([255] * 4))
        await send_block(self._client, chain, incarnation=self._incarnation)


async def test_a_source_that_lies_is_soon_not_verified_any_more() -> None:
    async with stack(engine={"step_ms": 2.0, "token_ms": 8.0, "knows": True}) as made:
        liar = await made.client(speculation=DEEP, max_tokens=200).open()
        await Liar(liar).lie(len(liar.prompt))
        assert await liar.done() == liar.expected()
        assert liar.last is not None
        counters = liar.last.counters
        assert counters is not None
        assert counters.rejected_by == {"edge": counters.rejected}
        assert counters.verified_by["edge"] < 60, "of 200 steps, with 4 nodes each if it were believed"
        assert set(liar.kinds) == {"f", "c"}
        assert liar.kinds[100:].count("c") <= 3, "but for a probe now and then"


def _edge(client: Client) -> Drafter:
    """One block in flight, 4 ms after the verdict; a step takes 20 ms and 1 more for each token."""
    return Drafter(client, block=4, window=4, delay_s=0.004)


async def test_a_block_that_comes_in_a_moment_is_waited_for() -> None:
    slow = {"step_ms": 20.0, "token_ms": 1.0, "knows": True}
    async with stack(engine=slow) as made:
        client = await made.client(speculation=Speculation(lookup=False), max_tokens=80).open()
        _edge(client).start()
        assert await client.done() == client.expected()
        assert client.last is not None
        counters = client.last.counters
        assert counters is not None
        assert counters.accepted["edge"] > 40
        assert client.kinds[20:].count("f") <= 6, "once its pace is known"


async def test_nobody_waits_for_ever_for_a_source_that_stopped() -> None:
    slow = {"step_ms": 20.0, "token_ms": 1.0, "knows": True}
    async with stack(engine=slow) as made:
        client = await made.client(speculation=Speculation(lookup=False), max_tokens=60).open()
        drafter = _edge(client)
        drafter.start()
        await client.grown(30)
        drafter.window = -1000
        assert await client.done(10) == client.expected()
        assert client.kinds[-10:] == "f" * 10


async def test_a_batch_of_the_many_waits_at_the_verifier_for_the_end_of_the_step_of_the_few() -> None:
    async with stack(engine={"step_ms": 60.0, "token_ms": 0.01, "knows": 0.5}) as made:
        first = await made.client(max_tokens=12).open()
        await first.grown(3)
        lanes = made.batcher.dispatcher._lanes
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(lanes["v1"].flights))
                await asyncio.sleep(0.002)

        watcher = made.services[0].spawn(watch(), "watch")
        others = [await made.client(prompt=bytes([97 + n]) * 5, max_tokens=8).open() for n in range(3)]
        for client in (first, *others):
            assert await client.done() == client.expected()
        watcher.cancel()
        assert most == 2


async def test_two_batches_under_way_at_a_verifier_that_dies() -> None:
    slow = {"step_ms": 60.0, "token_ms": 0.01, "knows": 0.5}  # so the second one is sent long before the first ends
    async with stack(engine=slow) as made:
        clients = [await made.client(max_tokens=30).open()]
        await clients[0].grown(3)
        clients += [await made.client(prompt=bytes([97 + n]) * 5, max_tokens=8).open() for n in range(3)]
        lane = made.batcher.dispatcher._lanes["v1"]
        await soon(lambda: len(lane.flights) == 2)
        await made.verifier("v2", **slow)
        await made.killable("v1").kill()
        for client in clients:
            assert await client.done() == client.expected()


# --- the cloud's own drafter fills the bubbles of an edge's session ---


@asynccontextmanager
async def drafter(made: Stack, acceptance: float) -> AsyncIterator[list[str]]:
    """A hosted drafter that takes 1 ms a token; what it was asked to begin and to stop."""
    service = made.service("drafter", "d1")
    asked: list[str] = []

    async def on_open(received: Received) -> None:
        assert isinstance(received.message, HostedOpen)
        asked.append("open")
        subject = subjects.HOSTED_STOP.at(session=received.message.session)
        await made.bus.subscribe(subject, on_stop, HostedStop)

    async def on_stop(received: Received) -> None:
        asked.append("stop")

    await made.bus.subscribe(subjects.HOSTED_OPEN.at(model="toy"), on_open, HostedOpen)
    engine = MeteredDraft(SimulatedDraft(WORLD, acceptance=acceptance, timing=Timing(1.0)), service.metrics)
    await warm_up(engine, CARD.vocabulary)
    assert engine.draft_ms > 1.0
    hosted_drafter = HostedDrafter(service, CARD)
    service.spawn(hosted_drafter.report(), "drafter status")
    await hosted_drafter.start(engine)
    await soon(lambda: made.batcher.directory.draft_s(made.batcher.dispatcher.clock()) is not None)
    try:
        yield asked
    finally:
        await hosted_drafter.stop()
        await engine.close()


async def test_the_cloud_s_drafter_helps_where_it_is_faster() -> None:
    async with (
        stack(engine={"step_ms": 20.0, "token_ms": 0.2, "knows": True}) as made,
        drafter(made, acceptance=0.95) as asked,
    ):
        client = await made.client(speculation=Speculation(lookup=False), max_tokens=150).open()
        assert await client.done() == client.expected()
        assert client.last is not None
        counters = client.last.counters
        assert counters is not None
        assert counters.accepted["hosted"] > 50
        await soon(lambda: asked == ["open", "stop"])


async def test_it_stops_where_it_does_not_help() -> None:
    """Its drafts never fit: promised was more."""
    async with (
        stack(engine={"step_ms": 20.0, "token_ms": 0.2, "knows": True}) as made,
        drafter(made, acceptance=0.0) as asked,
    ):
        client = await made.client(speculation=Speculation(lookup=False), max_tokens=120).open()
        await client.until(lambda: "stop" in asked)
        assert asked == ["open", "stop"]
        assert client.finish is None
        live = made.batcher.table.get(client.session)
        assert live is not None
        assert not live.assist.on
        assert await client.done() == client.expected()
        assert asked == ["open", "stop"], "not again so soon, and there is nothing left to stop"


@pytest.mark.parametrize("speculation", [DEEP, Speculation(assist=False), PLAIN], ids=["no fill", "unwanted", "plain"])
async def test_it_helps_nobody_who_did_not_ask(speculation: Speculation) -> None:
    async with (
        stack(engine={"step_ms": 5.0, "knows": True}) as made,
        drafter(made, acceptance=0.95) as asked,
    ):
        client = await made.client(speculation=speculation, max_tokens=60).open()
        Drafter(client).start()
        await client.done()
        assert asked == []


def test_a_session_in_quarantine_has_a_step_to_itself_and_joins_nobodys() -> None:
    waits, runs = Want("waits", "t", worth=0.0, joining=1.0), Want("runs", "t")
    for quarantined, named in (
        ({"waits"}, ["runs"]), ({"runs"}, ["runs"]), ({"waits", "runs"}, ["runs"]), (set(), ["waits", "runs"]),
    ):  # fmt: skip
        found = in_question([waits, runs], quarantined.__contains__)
        assert [item.session for item in found] == named


async def test_one_in_quarantine_that_waits_for_its_block_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stack(engine={"knows": 1.0}) as made:
        quarantined = made.client(speculation=Speculation(), max_tokens=4000)
        other = made.client(prompt=tuple(b"Another one"))
        await quarantined.open()
        live = made.batcher.table.get(quarantined.session)
        assert live is not None
        live.alone = True
        monkeypatch.setattr(live.forecast.arrivals, "next_in", lambda now: 0.0)
        monkeypatch.setattr(type(live.patience), "exhausted", lambda patience, now, hosted: False)
        await other.open()
        assert await other.done() == other.expected()
        assert quarantined.finish is None
