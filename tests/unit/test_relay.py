"""The relay's decisions (pure) and its own timing (over loopback)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.relay import Link, Relay, Schedule, round_trip

LATE_S = 0.050
"""How late a chunk may come out on a busy machine; the medians are held to less."""


def schedule(link: Link, seed: int = 1) -> Schedule:
    return Schedule(link, random.Random(seed))


@given(
    st.lists(st.tuples(st.floats(0, 0.1), st.integers(1, 20_000)), min_size=1, max_size=50),
    st.floats(0, 300), st.floats(0, 100), st.sampled_from([0, 100, 10_000]), st.sampled_from([0, 0.05]),
)  # fmt: skip
def test_bytes_come_out_in_order_and_never_early(
    chunks: list[tuple[float, int]], delay_ms: float, jitter_ms: float, rate_kbit: float, stall_every_s: float
) -> None:
    link = Link(delay_ms, jitter_ms, rate_kbit, stall_every_s, stall_ms=30)
    plan, now, last = schedule(link), 0.0, 0.0
    for gap, size in chunks:
        now += gap
        due = plan.due(now, size)
        assert due >= last
        assert due >= now + delay_ms / 1_000 - 1e-9
        last = due
    if rate_kbit:
        assert last >= sum(size for _, size in chunks) * 8 / (rate_kbit * 1_000) - 1e-6


@given(st.integers(0, 1 << 32))
def test_the_same_seed_gives_the_same_link(seed: int) -> None:
    link = Link(delay_ms=30, jitter_ms=20, stall_every_s=0.2, stall_ms=100)
    one, other = schedule(link, seed), schedule(link, seed)
    assert [one.due(i / 10, 100) for i in range(40)] == [other.due(i / 10, 100) for i in range(40)]


def test_jitter_without_stalls_stays_within_its_bound() -> None:
    plan = schedule(Link(delay_ms=30, jitter_ms=20))
    delays = [plan.due(float(i), 100) - i for i in range(500)]
    assert 0.030 <= min(delays) < 0.032
    assert 0.048 < max(delays) <= 0.050 + 1e-9


def test_stalls_come_at_the_rate_asked_for() -> None:
    plan = schedule(Link(stall_every_s=1.0, stall_ms=100))
    late = sum(plan.due(i / 1_000, 100) > i / 1_000 + 1e-9 for i in range(100_000))
    assert late == pytest.approx(100 * 100, rel=0.3)


def test_a_hold_delays_what_comes_in_before_its_end() -> None:
    plan = schedule(Link(delay_ms=10))
    plan.hold(1.0)
    assert plan.due(0.5, 10) == pytest.approx(1.010)
    assert plan.due(2.0, 10) == pytest.approx(2.010)


def test_a_negative_value_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="jitter_ms"):
        Link(jitter_ms=-1)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        return
    finally:
        writer.close()


@asynccontextmanager
async def link_to_echo(link: Link) -> AsyncIterator[tuple[Relay, asyncio.StreamReader, asyncio.StreamWriter]]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    relay = await Relay("127.0.0.1", server.sockets[0].getsockname()[1], link).start()
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    try:
        yield relay, reader, writer
    finally:
        writer.close()
        await relay.close()
        server.close()
        await server.wait_closed()


async def ping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    started = time.perf_counter()
    writer.write(b"ping")
    assert await reader.readexactly(4) == b"ping"
    return time.perf_counter() - started


async def ping_many(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: int) -> None:
    for _ in range(count):
        await ping(reader, writer)


@pytest.mark.parametrize("rtt_ms", [0, 20, 60, 100])
async def test_the_round_trip_is_what_was_asked_for(rtt_ms: float) -> None:
    async with link_to_echo(round_trip(rtt_ms)) as (_, reader, writer):
        first = await ping(reader, writer)
        times = sorted([await ping(reader, writer) for _ in range(9)])
    assert first >= 2 * rtt_ms / 1_000, "the handshake's round trip is charged to the first bytes"
    assert times[0] >= rtt_ms / 1_000
    assert times[0] <= rtt_ms / 1_000 + 0.005
    assert times[4] <= rtt_ms / 1_000 + 0.015


async def test_bytes_arrive_whole_and_in_order_through_jitter() -> None:
    payload = random.Random(3).randbytes(400_000)
    async with link_to_echo(Link(delay_ms=5, jitter_ms=10)) as (_, reader, writer):
        writer.write(payload)
        assert await reader.readexactly(len(payload)) == payload


async def test_the_rate_bounds_a_transfer() -> None:
    async with link_to_echo(Link(rate_kbit=4_000)) as (_, reader, writer):
        started = time.perf_counter()
        writer.write(bytes(100_000))
        await reader.readexactly(100_000)
        seconds = time.perf_counter() - started
    assert 0.200 <= seconds <= 0.200 + 16_384 * 8 / 4e6 + LATE_S, "100 kB at 4 Mbit/s, and one chunk to turn around"


async def test_a_stall_holds_the_stream_and_then_lets_go() -> None:
    async with link_to_echo(Link()) as (relay, reader, writer):
        await ping(reader, writer)
        relay.stall(0.2)
        assert 0.19 <= await ping(reader, writer) <= 0.2 + LATE_S
        assert await ping(reader, writer) <= LATE_S


async def test_a_cut_resets_both_ends_and_the_next_connection_works() -> None:
    async with link_to_echo(Link(delay_ms=10)) as (relay, reader, writer):
        await ping(reader, writer)
        assert relay.cut() == 1
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await ping(reader, writer)
        again = await asyncio.open_connection("127.0.0.1", relay.port)
        await ping(*again)
        again[1].close()


async def test_a_refusing_relay_takes_no_connection() -> None:
    async with link_to_echo(Link()) as (relay, _, _):
        relay.refusing = True
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await ping(reader, writer)
        writer.close()


async def test_connections_are_cut_at_random_when_asked() -> None:
    async with link_to_echo(Link(cut_every_s=0.01)) as (_, reader, writer):
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await ping_many(reader, writer, 10_000)


async def test_a_half_close_travels_and_the_answer_still_comes_back() -> None:
    async with link_to_echo(Link(delay_ms=10)) as (relay, reader, writer):
        writer.write(b"last words")
        writer.write_eof()
        assert await reader.read() == b"last words"
        await asyncio.sleep(0)
    assert relay.traffic.bytes_up == relay.traffic.bytes_down == len(b"last words")


async def test_a_target_that_is_away_resets_the_client() -> None:
    relay = await Relay("127.0.0.1", 1, Link()).start()
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await ping(reader, writer)
    writer.close()
    await relay.close()
