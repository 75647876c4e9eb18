"""Figures, bytes and pauses of the edge client."""

from __future__ import annotations

import asyncio
import io
import re

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from edge_client.backoff import LONGEST_S, pause_s
from edge_client.figures import figures, stats_json
from edge_client.meter import FrameMeter
from edge_client.stats import Tally
from edge_client.system_view import system, told
from paceline import wire
from paceline.wire import Chain, Counters, DraftBlock, encode_wan


def test_latency_counts_tokens_not_chunks() -> None:
    """First token at 0.5 s, then nine verdicts of four tokens, 0.2 s apart."""
    tally = Tally(prompt_tokens=5, started=100.0)
    tally.committed(1, "f", 100.5)
    for chunk in range(1, 10):
        tally.committed(4, "eeeb", 100.5 + 0.2 * chunk)
    stats = tally.stats(102.5)
    assert stats.completion_tokens == 37
    assert stats.ttft_ms == pytest.approx(500)
    assert stats.itl_ms == pytest.approx(50)
    assert stats.tokens_per_s == pytest.approx(20)
    assert stats.chunk_gap_ms == pytest.approx(200)
    assert stats.kinds == {"f": 1, "e": 27, "b": 9}


def test_figures_of_a_session_without_a_token_are_unknown_not_zero() -> None:
    stats = Tally(prompt_tokens=5, started=0.0).stats(1.0)
    assert (stats.itl_ms, stats.ttft_ms, stats.tokens_per_s, stats.acceptance) == (None, None, None, None)
    assert "None" not in _shown(figures(stats))
    assert stats_json(stats)["acceptance"] is None


def test_ratios() -> None:
    tally = Tally(prompt_tokens=5, started=0.0)
    tally.counters = Counters(drafted={"edge": 40}, verified=32, accepted={"edge": 24}, steps=10)
    tally.committed(20, "e" * 20, 1.0)
    tally.block_sent(64, 8)
    tally.verdict_frame(50, 4)
    tally.verdict_frame(30, 1)
    stats = tally.stats(2.0)
    assert (stats.acceptance, stats.steps_per_token) == (0.75, 0.5)
    assert (stats.bytes_up_per_drafted_token, stats.bytes_down_per_committed_token) == (8.0, 12.5)


@given(st.integers(0, 500), st.floats(0, 1, exclude_max=True))
def test_pauses_grow_to_a_bound(attempt: int, luck: float) -> None:
    assert 0 < pause_s(attempt, luck) <= LONGEST_S
    assert pause_s(attempt + 1, luck) >= pause_s(attempt, luck)


def _blocks() -> list[bytes]:
    """Frames like those of a session."""
    frames = []
    for number in range(40):
        first = 1 + 8 * number
        tokens = tuple((7919 * (first + k)) % 49152 for k in range(8))
        chain = Chain(first=first, position=20 + first, tokens=tokens, conf=b"\xf0" * 8, after=first - 1 or None,
                      at=None if first > 1 else 21)  # fmt: skip
        block = DraftBlock(session="0123456789abcdef", source="edge", incarnation=65536, chains=(chain,), t_sent=number)
        frames.append(encode_wan(block))
    return [*frames, b"x" * 200, b"", b"y" * 70_000]


@pytest.mark.parametrize("compress", [15, 0])
async def test_the_meter_counts_what_crosses_the_socket(compress: int) -> None:
    """The same frames through aiohttp and a proxy that counts bytes in both directions."""
    frames = _blocks()
    counted = {"up": 0, "down": 0}
    echoed: list[bytes] = []

    async def echo(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(compress=bool(compress))
        await socket.prepare(request)
        counted.update(up=0, down=0)
        async for frame in socket:
            await socket.send_frame(frame.data.encode(), aiohttp.WSMsgType.TEXT)
        return socket

    app = web.Application()
    app.router.add_get("/", echo)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        while data := await reader.read(65536):
            counted[way] += len(data)
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        out_reader, out_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, out_writer, "up"), copy(out_reader, writer, "down"))

    proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
    up = FrameMeter(deflate=bool(compress), masked=True)
    down = FrameMeter(deflate=bool(compress), masked=False)
    expected = [0, 0]
    async with aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}/"
        async with http.ws_connect(url, compress=compress) as socket:
            assert bool(socket.compress) == bool(compress)
            before = dict(counted)
            for frame in frames:
                await socket.send_frame(frame, aiohttp.WSMsgType.TEXT)
                echoed.append((await socket.receive_str()).encode())
                expected[0] += up.size(frame)
                expected[1] += down.size(frame)
            crossed = (counted["up"] - before["up"], counted["down"] - before["down"])
    proxy.close()
    await proxy.wait_closed()
    await runner.cleanup()
    assert echoed == frames
    assert crossed == tuple(expected)


def _shown(item: object) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(item)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_rate_stands_beside_the_numbers_it_is_made_of() -> None:
    tally = Tally(prompt_tokens=5, started=0.0)
    tally.counters = Counters(drafted={"edge": 157}, verified=29, accepted={"edge": 18}, steps=10)
    assert "157, verified 29, accepted 18 (62% of the verified)" in _shown(figures(tally.stats(1.0)))
    tally.counters = Counters(drafted={"edge": 5})
    assert re.search(r"5, verified 0, accepted 0 *$", _shown(figures(tally.stats(1.0))), re.MULTILINE)


def test_sources_have_the_shape_of_the_gateways_usage() -> None:
    tally = Tally(prompt_tokens=5, started=0.0)
    tally.counters = Counters(drafted={"edge": 9, "lookup": 2}, accepted={"edge": 4})
    expected = {"edge": {"drafted": 9, "accepted": 4}, "lookup": {"drafted": 2, "accepted": 0}}
    assert stats_json(tally.stats(1.0))["by_source"] == expected


def _report(names: tuple[str, ...]) -> wire.SystemReport:
    verifiers = tuple(
        wire.VerifierStatus(
            verifier=name, model="smollm2", fingerprint="f", engine="llama", simulated=False, state="ready", sessions=2,
            context=8192, cells_total=32768, cells_used=12312, busy=0.64, queue=0, steps=912345, step_tokens=3100,
            step_ms={1: 28.4, 2: 126.0},
        )
        for name in names
    )  # fmt: skip
    batcher = wire.BatcherStatus(
        batcher="batcher-0", model="smollm2", sessions=2, parked=0, waiting=0, partitions=64, committed=210000,
        drafted=150000, accepted=110000, filled=30000, stale=12,
    )  # fmt: skip
    return wire.SystemReport(verifiers=verifiers, batchers=(batcher,), drafters=(), decisions=())


def test_the_systems_state_fits_80_columns() -> None:
    text = _shown(system(_report(("verifier-0", "verifier-1"))))
    assert "verifier-0  smollm2  ready  2         64%   12312/32768  912345" in text
    assert "batcher-0  smollm2  2         0       0        210000     110000    30000" in text
    assert "a step by its tokens: 1: 28 ms, 2: 126 ms" in text


def test_a_decision_is_told_once() -> None:
    why = ("fill on, window cap 64: 0.0 sessions a verifier wait", "new sessions go to v-0; KV is nearly full on v-1")
    decision = wire.PolicyDecision(model="m", version=1, fill=True, window_cap=64, admit=("v-0",), reasons=why)
    assert told(decision) == list(why)
    bare = wire.PolicyDecision(model="m", version=1, fill=False, window_cap=8, admit=(), reasons=("busy",))
    assert told(bare) == ["fill off, window cap 8", "new sessions go to any ready verifier", "busy"]
