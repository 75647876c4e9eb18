"""The WebSocket of edge devices: greeting, sessions, drafts, presence, resuming, bad frames, slow readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from gateway_kit import Bench, ScriptedBatcher, bench, ids, soon

from paceline.engine_simulated import toy_card
from paceline.wire import (
    MAX_WAN_BYTES,
    Chain,
    DraftBlock,
    Hello,
    LogprobEntry,
    Message,
    Ping,
    Pong,
    Refused,
    SessionClose,
    SessionOpen,
    SessionOpened,
    SessionResume,
    Verdict,
    Welcome,
    decode_wan,
    encode_wan,
    prefix_hash,
)
from services.gateway import edge_connection, edge_socket
from services.gateway.keys import revoke

PROMPT = ids("prompt")


class Edge:
    """A bare edge device: frames in and out."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def send(self, message: Message) -> None:
        await self.socket.send_bytes(encode_wan(message))

    async def receive(self, *kinds: type[Message]) -> Any:
        async with asyncio.timeout(5):
            while True:
                frame = await self.socket.receive()
                assert frame.type is aiohttp.WSMsgType.TEXT, (frame, self.socket.close_code)
                message = decode_wan(frame.data.encode(), Message)
                if not kinds or isinstance(message, kinds):
                    return message

    async def open(self, **fields: Any) -> SessionOpened:
        await self.send(SessionOpen(model="toy", fingerprint=toy_card().fingerprint, tokens=PROMPT, **fields))
        opened: SessionOpened = await self.receive(SessionOpened)
        return opened

    async def answer(self, session: str) -> list[Verdict]:
        found: list[Verdict] = []
        while not found or found[-1].finish is None:
            verdict = await self.receive(Verdict)
            if verdict.session == session:
                found.append(verdict)
        return found

    async def close_code(self) -> int | None:
        async with asyncio.timeout(5):
            while (await self.socket.receive()).type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                pass
        return self.socket.close_code


@asynccontextmanager
async def edge(desk: Bench, key: str | None = None, **options: Any) -> AsyncIterator[Edge]:
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(desk.url + "/v1/edge", **{"compress": 15, **options}) as socket,
    ):
        made = Edge(socket)
        await made.send(Hello(key=key or desk.key))
        yield made


@pytest_asyncio.fixture
async def desk(tmp_path: Path) -> AsyncIterator[tuple[Bench, ScriptedBatcher]]:
    async with bench(tmp_path) as made:
        batcher = ScriptedBatcher(made.bus, made.store)
        await batcher.start()
        yield made, batcher


def text(verdicts: list[Verdict]) -> bytes:
    return bytes(token for verdict in verdicts for token in verdict.tokens if token < 256)


def block(session: str, **fields: Any) -> DraftBlock:
    chain = Chain(first=1, position=len(PROMPT), tokens=(72,), at=len(PROMPT))
    values: dict[str, Any] = {"source": "edge", "incarnation": 65536, "chains": (chain,), **fields}
    return DraftBlock(session=session, **values)


async def test_an_answer_comes_in_frames_that_hold_only_the_edges_share(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk
    async with edge(made) as device:
        welcome = await device.receive()
        assert welcome == Welcome(tenant="TEN-A")
        opened = await device.open(tenant="somebody-else", session="mine")
        assert opened.session != "mine"
        verdicts = await device.answer(opened.session)
    assert text(verdicts) == b"Hello, world"
    assert all(verdict.counters is None and verdict.seen == {} for verdict in verdicts[:-1])
    assert verdicts[-1].counters is not None
    assert "".join(verdict.kinds for verdict in verdicts) == "h" * 13
    assert batcher.sessions[opened.session].opening.tenant == "TEN-A"
    await soon(lambda: made.gateway.sessions.count == 0)


async def test_drafts_carry_the_connection_and_the_time_of_arrival(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk
    batcher.gate = lambda played: asyncio.sleep(0.05)
    async with edge(made) as device:
        opened = await device.open()
        await device.send(block(opened.session, connection=99, t_received=1.0))
        await batcher.until(lambda: bool(batcher.drafts))
        await device.answer(opened.session)
    assert batcher.drafts[0].connection == opened.connection
    assert abs(batcher.drafts[0].t_received - time.time()) < 5


async def test_several_sessions_share_a_connection(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk
    batcher.script = lambda opening: ids("abc" * (opening.choice + 1))
    all_open = asyncio.Event()

    async def gate(_: Any) -> None:
        await all_open.wait()

    batcher.gate = gate
    async with edge(made) as device:
        opened = [await device.open(choice=choice) for choice in range(3)]
        all_open.set()
        shown: dict[str, bytes] = {}
        ended = 0
        while ended < 3:
            verdict = await device.receive(Verdict)
            shown[verdict.session] = shown.get(verdict.session, b"") + text([verdict])
            ended += verdict.finish is not None
    assert [shown[each.session] for each in opened] == [b"abc", b"abcabc", b"abcabcabc"]


async def test_a_wrong_key_is_told_and_closed(desk: tuple[Bench, ScriptedBatcher]) -> None:
    async with edge(desk[0], key="wrong") as device:
        refused = await device.receive(Refused)
        assert (refused.error.status, refused.error.code) == (401, "invalid_api_key")
        assert await device.close_code() == edge_socket.BAD_KEY


async def test_the_first_frame_must_be_a_hello(desk: tuple[Bench, ScriptedBatcher]) -> None:
    url = desk[0].url + "/v1/edge"
    async with aiohttp.ClientSession() as http, http.ws_connect(url) as socket:
        device = Edge(socket)
        await device.send(Ping(t_sent=1))
        assert (await device.receive(Refused)).error.code == "malformed_message"
        assert await device.close_code() == aiohttp.WSCloseCode.POLICY_VIOLATION


async def test_a_page_of_another_site_is_turned_away(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, _ = desk
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await http.ws_connect(made.url + "/v1/edge", origin="https://evil.example")
        assert caught.value.status == 403
    async with edge(made, origin=made.url) as device:
        await device.receive(Welcome)


@pytest.mark.parametrize(
    "frame",
    [b"", b"{", b"[]", b"null", b'{"y":"nothing"}', b'{"y":"draft"}', b'{"y":"verdict","s":"x","e":1,"@":1}',
     b'{"y":"ping"}', b"\xff\xfe", encode_wan(Hello(key="again"))],
)  # fmt: skip
async def test_a_bad_frame_is_refused_and_ends_nothing(desk: tuple[Bench, ScriptedBatcher], frame: bytes) -> None:
    async with edge(desk[0]) as device:
        await device.socket.send_bytes(frame)
        refused = await device.receive(Refused)
        assert refused.error.status == 400
        opened = await device.open()
        assert text(await device.answer(opened.session)) == b"Hello, world"


@pytest.mark.parametrize(
    ("chains", "why"),
    [
        (({"first": 1, "position": 6, "tokens": [], "at": 6},), "length"),
        (({"first": 1, "position": 6, "tokens": [1] * 65, "at": 6},), "length"),
        (({"first": 1, "position": 6, "tokens": [-1], "at": 6},), ">="),
        (({"first": 1, "position": 6, "tokens": [1]},), "exactly one"),
        (({"first": 1, "position": 6, "tokens": [1], "at": 5},), "differs"),
        (tuple({"first": n, "position": 6, "tokens": [1], "at": 6} for n in range(1, 18)), "length"),
    ],
)
async def test_blocks_out_of_bounds_are_refused(desk: tuple[Bench, ScriptedBatcher], chains: Any, why: str) -> None:
    made, batcher = desk
    async with edge(made) as device:
        opened = await device.open()
        await device.socket.send_json(
            {"type": "draft", "session": opened.session, "source": "edge", "incarnation": 1, "chains": chains}
        )
        refused = await device.receive(Refused)
        assert refused.error.code == "malformed_message"
        assert why in refused.error.message
    assert batcher.drafts == []


async def test_foreign_sessions_and_sources_are_refused(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk
    held = asyncio.Event()

    async def gate(_: Any) -> None:
        await held.wait()

    batcher.gate = gate
    async with edge(made) as owner, edge(made, key=made.admin) as thief:
        opened = await owner.open()
        for message in (block(opened.session), SessionClose(session=opened.session)):
            await thief.send(message)
            refused = await thief.receive(Refused)
            assert (refused.error.code, refused.session) == ("unknown_session", opened.session)
        await owner.send(block(opened.session, source="hosted"))
        assert (await owner.receive(Refused)).error.param == "source"
        held.set()
        await owner.answer(opened.session)
    assert (batcher.drafts, batcher.closed) == ([], [])


async def test_a_draft_that_is_late_for_its_session_is_no_fault(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, _ = desk
    async with edge(made) as device:
        opened = await device.open()
        await device.answer(opened.session)
        await device.send(block(opened.session))
        await device.send(Ping(t_sent=5))
        assert isinstance(await device.receive(Refused, Pong), Pong)


async def test_a_frame_over_the_bound_ends_that_connection_only(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk
    batcher.gate = lambda played: asyncio.sleep(0.05)
    async with edge(made) as good, edge(made) as bad:
        opened = await good.open()
        await bad.receive(Welcome)
        await bad.socket.send_bytes(b"x" * (MAX_WAN_BYTES + 1))
        assert await bad.close_code() == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
        assert text(await good.answer(opened.session)) == b"Hello, world"


async def test_pings_are_answered_and_make_the_edge_present(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk
    held = asyncio.Event()

    async def gate(_: Any) -> None:
        await held.wait()

    batcher.gate = gate
    async with edge(made) as device:
        opened = await device.open()
        for t_sent in range(4):
            await device.send(Ping(t_sent=t_sent))
            assert (await device.receive(Pong)).t_sent == t_sent
            await asyncio.sleep(0.3)
        spoken = len(batcher.presences)
        assert spoken >= 2
        assert {presence.connection for presence in batcher.presences} == {opened.connection}
        await asyncio.sleep(1.2)
        silent = len(batcher.presences)
        await asyncio.sleep(0.8)
        assert len(batcher.presences) == silent  # nothing was heard for over a second
        held.set()
        await device.answer(opened.session)


async def test_closing_cancels_and_the_finish_is_seen(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk
    held = asyncio.Event()

    async def gate(played: Any) -> None:
        if played.steps == 2:
            await held.wait()

    batcher.gate = gate
    async with edge(made) as device:
        opened = await device.open()
        await device.send(SessionClose(session=opened.session))
        verdicts = await device.answer(opened.session)
    held.set()
    assert verdicts[-1].finish == "cancelled"
    assert batcher.closed == [opened.session]


async def test_a_lost_link_parks_and_a_resume_gives_the_rest_exactly_once(
    desk: tuple[Bench, ScriptedBatcher],
) -> None:
    made, batcher = desk
    batcher.script, batcher.block = lambda opening: ids("abcdefghijklmnopqrstuvwxyz"), 2
    held = asyncio.Event()

    async def gate(played: Any) -> None:
        if played.steps == 8:
            await held.wait()

    batcher.gate = gate
    async with edge(made) as device:
        opened = await device.open()
        shown = text([await device.receive(Verdict), await device.receive(Verdict)])
    await soon(lambda: made.gateway.sessions.count == 0)
    assert batcher.closed == []  # let go, not cancelled
    known = PROMPT + tuple(shown)
    resume = SessionResume(
        session=opened.session, secret=opened.secret, position=len(known), prefix_hash=prefix_hash(known)
    )
    async with edge(made) as device:  # a second drop before anything new came
        await device.send(resume)
        again = await device.receive(SessionOpened)
    assert again.connection == opened.connection + 1
    async with edge(made) as device:
        await device.send(resume)
        third = await device.receive(SessionOpened)
        await device.send(block(opened.session))
        await batcher.until(lambda: bool(batcher.drafts))
        held.set()
        rest = await device.answer(opened.session)
    assert third.connection == opened.connection + 2
    assert batcher.drafts[0].connection == third.connection
    assert rest[0].at == len(known)
    assert shown + text(rest) == b"abcdefghijklmnopqrstuvwxyz"


async def test_a_resume_at_a_history_that_differs_ends_with_history_lost(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, _ = desk
    async with edge(made) as device:
        opened = await device.open()
        await device.answer(opened.session)
        wrong = SessionResume(
            session=opened.session, secret=opened.secret, position=8, prefix_hash=prefix_hash((1,) * 8)
        )
        await device.send(wrong)
        await device.receive(SessionOpened)
        verdict = await device.receive(Verdict)
    assert (verdict.finish, verdict.error.code) == ("error", "history_lost")


@pytest.mark.parametrize("same", [False, True])
async def test_an_edge_whose_session_was_resumed_elsewhere_is_told_and_hears_no_more(
    desk: tuple[Bench, ScriptedBatcher], same: bool
) -> None:
    """Over the same connection a resume takes the place of what was there, and nobody is superseded."""
    made, batcher = desk
    held = asyncio.Event()

    async def gate(played: Any) -> None:
        if played.steps == 1:
            await held.wait()

    batcher.gate = gate
    async with edge(made) as old, edge(made) as other:
        new = old if same else other
        opened = await old.open()
        shown = text([await old.receive(Verdict)])
        known = PROMPT + tuple(shown)
        await new.send(
            SessionResume(session=opened.session, secret="s" * 32, position=len(known), prefix_hash=prefix_hash(known))
        )
        again = await new.receive(SessionOpened)
        played = batcher.sessions[opened.session]
        verdict = Verdict(session=opened.session, epoch=7, at=played.at, connection=again.connection)
        await batcher.publish(played, verdict)
        if not same:
            refused = await old.receive(Refused, Verdict)
            assert (refused.error.status, refused.error.code) == (409, "superseded")
            assert refused.session == opened.session
            await old.send(block(opened.session))
            await old.send(SessionClose(session=opened.session))
        held.set()
        rest = await new.answer(opened.session)
        assert all(each.connection == 0 for each in rest)
        assert shown + text(rest) == b"Hello, world"
        await old.send(Ping(t_sent=3))
        frames = [await old.receive()]
        while not isinstance(frames[-1], Pong):
            frames.append(await old.receive())
        assert not [frame for frame in frames if isinstance(frame, Verdict | Refused)]
    assert batcher.closed == []
    assert batcher.drafts == []


async def test_openings_that_cannot_be_served_are_refused_in_order(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, _ = desk
    async with edge(made) as device:
        await device.send(SessionOpen(model="nope", fingerprint="f", tokens=PROMPT))
        await device.send(SessionOpen(model="toy", fingerprint="f", tokens=PROMPT))
        answers = [await device.receive(Refused, SessionOpened) for _ in range(2)]
    assert answers[0].error.code == "model_not_found"
    assert isinstance(answers[1], SessionOpened)


async def test_sessions_of_a_connection_are_bounded(
    desk: tuple[Bench, ScriptedBatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_connection, "SESSIONS", 2)
    made, batcher = desk
    batcher.gate = lambda played: asyncio.sleep(0.3)
    async with edge(made) as device:
        await device.open()
        await device.open()
        await device.send(SessionOpen(model="toy", fingerprint="f", tokens=PROMPT))
        refused = await device.receive(Refused)
    assert (refused.error.status, refused.error.code) == (429, "connection_sessions")
    assert refused.retry_after_s == 1


async def test_a_reader_that_does_not_read_is_cut_and_others_go_on(
    desk: tuple[Bench, ScriptedBatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not take stays in the store: the gateway's own memory is bounded by its queues."""
    monkeypatch.setattr(edge_connection, "SEND_S", 0.5)
    made, batcher = desk
    bulky = LogprobEntry(logprob=-0.5, top=tuple((token, -1.25) for token in range(20)))
    batcher.top = lambda token: bulky
    batcher.script = lambda opening: (97,) * (1500 if opening.choice else 100)
    batcher.block, batcher.gate = 50, lambda played: asyncio.sleep(0 if played.opening.choice else 1)
    async with edge(made) as good, edge(made, compress=0) as deaf:
        await deaf.receive(Welcome)
        connection = deaf.socket._conn
        assert connection is not None
        assert connection.transport is not None
        connection.transport.pause_reading()  # type: ignore[attr-defined]
        opened = await good.open()
        for choice in range(1, 17):
            await deaf.send(SessionOpen(model="toy", fingerprint="f", tokens=PROMPT, choice=choice, logprobs=20))
        answer = asyncio.create_task(good.answer(opened.session))
        await soon(lambda: len(made.gateway._edges._open) == 1, seconds=9)
        assert text(await answer) == b"a" * 100
        connection.transport.abort()
    assert batcher.closed == []


async def test_a_silent_edge_is_given_up(desk: tuple[Bench, ScriptedBatcher], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_connection, "SILENT_S", 0.2)
    monkeypatch.setattr(edge_socket, "REVOKED_S", 0.2)
    async with edge(desk[0]) as device:
        await device.receive(Welcome)
        frame = await asyncio.wait_for(device.socket.receive(), 3)
        assert frame.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)


async def test_a_revoked_key_ends_the_open_connection(
    desk: tuple[Bench, ScriptedBatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_socket, "REVOKED_S", 0.2)
    made, _ = desk
    async with edge(made) as device:
        await device.receive(Welcome)
        revoke(made.keys, "TEN-A")
        assert await device.close_code() == edge_socket.BAD_KEY


async def test_a_stopping_gateway_sends_its_edges_on(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, _ = desk
    async with edge(made) as device:
        await device.receive(Welcome)
        drained = asyncio.create_task(made.gateway.drain())
        assert await device.close_code() == aiohttp.WSCloseCode.GOING_AWAY
        await drained
