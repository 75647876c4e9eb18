"""What the bus does when the NATS server restarts, freezes, or throws the client out: tried on a real one."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from servers import Server
from structlog.testing import capture_logs

from paceline import wire
from paceline.bus import Received
from paceline.bus_memory import MemoryBus
from paceline.bus_nats import OFFLINE_BYTES, NatsBus
from paceline.errors import BusError, NoResponders
from paceline.telemetry import BUS_RECONNECTS, Metrics


async def acknowledge(received: Received) -> None:
    assert received.respond is not None
    await received.respond(wire.Ack())


async def until(condition: object, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_a_restarted_server_gets_its_subscriptions_back(own_nats: Server) -> None:
    metrics, back = Metrics(), asyncio.Event()
    bus = await NatsBus.connect(own_nats.url, "test", metrics)
    bus.on_reconnect(back.set)
    await bus.subscribe("probe.v", acknowledge, wire.Probe)
    await bus.subscribe("probe.q", acknowledge, wire.Probe, queue="group")
    with capture_logs() as logs:
        await own_nats.kill()
        await until(lambda: not bus.connected)
        await asyncio.sleep(2)
        await own_nats.start()
        await asyncio.wait_for(back.wait(), 5)
    assert await bus.request("probe.v", wire.Probe(), timeout_s=2) == wire.Ack()
    assert await bus.request("probe.q", wire.Probe(), timeout_s=2) == wire.Ack()
    assert metrics.value(BUS_RECONNECTS) == 1
    assert len(logs) < 20
    await bus.close()


async def test_a_request_in_flight_fails_as_soon_as_the_connection_breaks(own_nats: Server) -> None:
    taken = asyncio.Event()

    async def never(_received: Received) -> None:
        taken.set()

    bus = await NatsBus.connect(own_nats.url, "test")
    await bus.subscribe("probe.v", never, wire.Probe)
    call = asyncio.create_task(bus.request("probe.v", wire.Probe(), timeout_s=30))
    await taken.wait()
    started = time.monotonic()
    await own_nats.kill()
    with pytest.raises(BusError, match="in flight"):
        await call
    assert time.monotonic() - started < 2
    await bus.close()


async def test_requests_while_the_server_is_away_wait_for_it_and_no_longer_than_allowed(own_nats: Server) -> None:
    bus = await NatsBus.connect(own_nats.url, "test")
    await bus.subscribe("probe.v", acknowledge, wire.Probe)
    await own_nats.kill()
    await until(lambda: not bus.connected)
    started = time.monotonic()
    with pytest.raises(BusError, match="away"):
        await bus.request("probe.v", wire.Probe(), timeout_s=0.3)
    assert time.monotonic() - started < 1
    call = asyncio.create_task(bus.request("probe.v", wire.Probe(), timeout_s=10))
    await own_nats.start()
    assert await call == wire.Ack()
    await bus.close()


async def test_publishing_while_away_is_kept_within_a_bound(own_nats: Server) -> None:
    bus = await NatsBus.connect(own_nats.url, "test")
    got: list[int] = []

    async def keep(received: Received) -> None:
        got.append(received.message.at)  # type: ignore[attr-defined]

    await bus.subscribe("verdict.s", keep, wire.Verdict)
    await own_nats.kill()
    await until(lambda: not bus.connected)
    big = tuple([100_000] * 20_000)
    sent = 0

    async def fill() -> None:
        nonlocal sent
        for at in range(1500):
            await bus.publish("verdict.s", wire.Verdict(session="s", epoch=1, at=at, tokens=big))
            sent += 1

    with pytest.raises(BusError, match=str(OFFLINE_BYTES)):
        await fill()
    assert 1 <= sent <= OFFLINE_BYTES // 140_000 + 1
    assert bus._client.pending_data_size <= OFFLINE_BYTES + 200_000
    await own_nats.start()
    await until(lambda: len(got) == sent)
    assert got == list(range(sent))
    await bus.close()


async def test_a_subscription_made_while_away_works_afterwards(own_nats: Server) -> None:
    bus = await NatsBus.connect(own_nats.url, "test")
    await own_nats.kill()
    await until(lambda: not bus.connected)
    await bus.subscribe("probe.v", acknowledge, wire.Probe)
    await own_nats.start()
    await until(lambda: bus.connected)
    assert await bus.request("probe.v", wire.Probe(), timeout_s=5) == wire.Ack()
    await bus.close()


async def test_a_client_that_the_server_throws_out_is_replaced(own_nats: Server) -> None:
    """nats-py closes for good on a protocol error; the server sends one to a slow client, for example."""
    back = asyncio.Event()
    bus = await NatsBus.connect(own_nats.url, "test")
    bus.on_reconnect(back.set)
    await bus.subscribe("probe.v", acknowledge, wire.Probe)
    first = bus._client
    first._transport.write(b"NO SUCH COMMAND\r\n")  # type: ignore[union-attr]
    await asyncio.wait_for(back.wait(), 5)
    assert bus._client is not first
    assert await bus.request("probe.v", wire.Probe(), timeout_s=2) == wire.Ack()
    await bus.close()


async def test_raw_garbage_is_refused_and_the_subscription_lives(own_nats: Server) -> None:
    bus = await NatsBus.connect(own_nats.url, "test")
    await bus.subscribe("probe.v", acknowledge, wire.Probe)
    for data in (b"", b"{", b"[1]", b"\xff\xfe", b'{"type":"nope"}', b'{"type":"draft","session":"s"}', b"null"):
        reply = await bus._client.request("probe.v", data, timeout=2)
        assert wire.decode(reply.data, wire.Refused).error.status == 400
    assert await bus.request("probe.v", wire.Probe(), timeout_s=2) == wire.Ack()
    await bus.close()


async def test_cancelled_subscribing_does_no_harm(own_nats: Server) -> None:
    """A cancelled `flush` of nats-py ends its read loop a moment later."""
    metrics = Metrics()
    bus = await NatsBus.connect(own_nats.url, "test", metrics)
    await bus.subscribe("probe.v", acknowledge, wire.Probe)
    await bus.request("probe.v", wire.Probe(), timeout_s=2)
    before = len(asyncio.all_tasks())
    for _ in range(100):
        call = asyncio.create_task(bus.subscribe("verdict.s", acknowledge, wire.Verdict))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert await bus.request("probe.v", wire.Probe(), timeout_s=2) == wire.Ack()
    assert len(asyncio.all_tasks()) == before
    assert metrics.value(BUS_RECONNECTS) == 0
    assert len(bus._subscribers) == 1
    await bus.close()


async def test_a_subscription_counts_as_soon_as_subscribe_returns(own_nats: Server) -> None:
    listener, sender = await NatsBus.connect(own_nats.url, "one"), await NatsBus.connect(own_nats.url, "two")
    for number in range(200):
        subscription = await listener.subscribe(f"probe.v{number}", acknowledge, wire.Probe)
        assert await sender.request(f"probe.v{number}", wire.Probe(), timeout_s=2) == wire.Ack()
        await subscription.close()
        with pytest.raises(NoResponders):
            await sender.request(f"probe.v{number}", wire.Probe(), timeout_s=2)
    await listener.close()
    await sender.close()


async def test_a_frozen_server_is_noticed(own_nats: Server) -> None:
    bus = await NatsBus.connect(own_nats.url, "test")
    await bus.subscribe("probe.v", acknowledge, wire.Probe)
    own_nats.signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(BusError):
            await bus.request("probe.v", wire.Probe(), timeout_s=20)
        assert time.monotonic() - started < 10
    finally:
        own_nats.signal(signal.SIGCONT)
    assert await bus.request("probe.v", wire.Probe(), timeout_s=10) == wire.Ack()
    await bus.close()


async def test_closing_while_the_server_is_away_is_bounded(own_nats: Server) -> None:
    bus = await NatsBus.connect(own_nats.url, "test")
    await bus.subscribe("probe.v", acknowledge, wire.Probe)
    await own_nats.kill()
    await until(lambda: not bus.connected)
    started = time.monotonic()
    await bus.close()
    assert time.monotonic() - started < 3


async def test_no_server_at_all_is_said_soon() -> None:
    started = time.monotonic()
    with pytest.raises(BusError, match=r"no NATS server answers at nats://127\.0\.0\.1:9"):
        await NatsBus.connect("nats://127.0.0.1:9", "test")
    assert time.monotonic() - started < 4


async def test_the_memory_bus_plays_an_outage() -> None:
    bus, back = MemoryBus(), asyncio.Event()
    bus.on_reconnect(back.set)
    await bus.subscribe("probe.v", acknowledge, wire.Probe)
    bus.lose()
    assert not bus.connected
    with pytest.raises(BusError):
        await bus.request("probe.v", wire.Probe(), timeout_s=1)
    bus.restore()
    assert back.is_set()
    assert await bus.request("probe.v", wire.Probe(), timeout_s=1) == wire.Ack()
    await bus.close()
