"""The edge library against a scripted gateway: exactly once and in order, whatever happens to the link."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

import pytest
from aiohttp import web
from edge_kit import CARD, END, KEY, ScriptedDraft, ScriptedGateway, ids, refused, scripted_gateway

from edge_client.client import EdgeClient, LinkOptions
from edge_client.events import Committed, Cut, Drafted, Event, Finished, Opened, Reading, Resumed
from edge_client.request import Request
from edge_client.session import EdgeSession
from loadgen.relay import Link as LinkShape
from loadgen.relay import Relay
from paceline import wire
from paceline.errors import BadRequest, Unauthorized, Unavailable

TEXT = "Fair winds, and a following sea. "
FAST = LinkOptions(connect_s=2, silent_s=0.6, patience_s=5, ping_s=0.1)
ASK = Request(tokens=ids("Say something."))


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as running:
        yield running


@pytest.fixture
async def client(gateway: ScriptedGateway) -> AsyncIterator[EdgeClient]:
    async with EdgeClient.connect(gateway.url, KEY, card=CARD, options=FAST) as connected:
        yield connected


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Committed))


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Committed) for token in event.tokens]


async def following(session: EdgeSession) -> list[Event]:
    async with asyncio.timeout(15):
        return [event async for event in session]


async def until(session: EdgeSession, condition: Callable[[Event], bool]) -> list[Event]:
    """Events up to the first one that fits."""
    seen = []
    async with asyncio.timeout(15):
        async for event in session:
            seen.append(event)
            if condition(event):
                return seen
    raise AssertionError(f"the session ended without it: {seen}")


async def test_streams_text_in_order_and_ends(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        for letter in TEXT:
            await told.commit(ids(letter))
        await told.commit((END,), finish="stop")
        events = await following(session)
    assert isinstance(events[0], Opened)
    assert text_of(events) == TEXT
    assert tokens_of(events) == [*ids(TEXT), END]
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.finish, last.stats.completion_tokens, last.stats.counters.steps) == ("stop", len(TEXT) + 1, 34)
    times = [event.t for event in events]
    assert times == sorted(times)


async def test_a_burst_of_verdicts_is_taken_at_once(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        for letter in TEXT * 20:
            await told.commit(ids(letter), kinds="e")
        await told.commit((), finish="length")
        events = await following(session)
    assert text_of(events) == TEXT * 20
    assert events[-1].stats.kinds == {"e": 20 * len(TEXT)}  # type: ignore[union-attr]


async def test_two_sessions_share_a_link(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as one, client.session(ASK) as two:
        first, second = await gateway.session(0), await gateway.session(1)
        await second.commit(ids("two"), finish="stop")
        await first.commit(ids("one"), finish="stop")
        texts = sorted([text_of(await following(one)), text_of(await following(two))])
    assert texts == ["one", "two"]
    assert gateway.connects == 1


async def test_stop_strings_over_chunk_borders_never_show(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(replace(ASK, stop=("\nUser:",))) as session:
        told = await gateway.session()
        for chunk in ("Hi\nUs", "ual\n", "User", ":"):
            await told.commit(ids(chunk))
        await told.commit((), finish="stop")
        events = await following(session)
    shown = [event.text for event in events if isinstance(event, Committed)]
    assert shown[0] == "Hi"
    assert "".join(shown) == "Hi\nUsual"


async def test_a_held_back_tail_is_shown_at_the_end(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(replace(ASK, stop=("\nUser:",))) as session:
        told = await gateway.session()
        await told.commit(ids("Hi\nUs"))
        await told.commit((), finish="length")
        assert text_of(await following(session)) == "Hi\nUs"


async def test_characters_over_chunk_borders_stay_whole(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        for byte in "déjà ⚓".encode():
            await told.commit((byte,))
        await told.commit((), finish="stop")
        events = await following(session)
    assert text_of(events) == "déjà ⚓"


# --- cuts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1, 7])
async def test_resumes_after_a_cut_without_gap_or_double(
    gateway: ScriptedGateway, client: EdgeClient, lost: int
) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        await told.commit(ids(TEXT[:10]))
        before = await until(session, lambda event: isinstance(event, Committed))
        await told.commit(ids(TEXT[10 : 10 + lost]), hear=False)
        told.cut()
        await told.until(lambda: told.resumes != [] and told.socket is not None)
        await told.commit(ids(TEXT[10 + lost :]), finish="stop")
        events = before + await following(session)
    assert tokens_of(events) == list(ids(TEXT))
    assert told.resumes == [len(ASK.tokens) + 10]
    kinds = [type(event) for event in events]
    assert kinds.index(Cut) < kinds.index(Resumed)
    assert events[-1].stats.cuts == 1  # type: ignore[union-attr]


async def test_two_cuts_in_a_row_keep_the_position(gateway: ScriptedGateway, client: EdgeClient) -> None:
    """The second cut comes before anything new did, once before and once after the resume was answered."""
    cuts = 0

    def cut_again(resume: wire.SessionResume, socket: web.WebSocketResponse) -> bool:
        nonlocal cuts
        cuts += 1
        if cuts == 1:
            gateway.cut()
        return cuts == 1

    gateway.on_resume = cut_again
    async with client.session(ASK) as session:
        told = await gateway.session()
        await told.commit(ids(TEXT[:12]))
        before = await until(session, lambda event: isinstance(event, Committed))
        told.cut()
        await told.until(lambda: len(told.resumes) == 2 and told.socket is not None)
        told.cut()
        await told.commit(ids(TEXT[12:]), finish="stop", hear=False)
        events = before + await following(session)
    assert tokens_of(events) == list(ids(TEXT))
    assert set(told.resumes) == {len(ASK.tokens) + 12}


async def test_a_cut_while_opening_opens_again(gateway: ScriptedGateway, client: EdgeClient) -> None:
    opens = 0

    def cut_first(opened: wire.SessionOpen, socket: web.WebSocketResponse) -> bool:
        nonlocal opens
        opens += 1
        if opens == 1:
            gateway.cut()
        return opens == 1

    gateway.on_open = cut_first
    async with client.session(ASK) as session:
        told = await gateway.session()
        await told.commit(ids("hello"), finish="stop")
        events = await following(session)
    assert (opens, text_of(events)) == (2, "hello")


async def test_a_finish_while_the_link_was_down_is_fetched(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        told.cut()
        await told.commit(ids(TEXT), finish="stop", hear=False)
        events = await following(session)
    assert text_of(events) == TEXT


async def test_a_dead_link_without_a_word_is_noticed(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        gateway.awake.clear()
        started = time.monotonic()
        await until(session, lambda event: isinstance(event, Cut))
        assert 0.3 < time.monotonic() - started < 2 * FAST.silent_s + 0.5
        await told.commit(ids("back"), finish="stop", hear=False)
        gateway.awake.set()
        assert text_of(await following(session)) == "back"


async def test_pings_alone_keep_a_quiet_link_up(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        await asyncio.sleep(3 * FAST.silent_s)  # nothing but pings and pongs: it is the silence that is tested
        await told.commit(ids("x"), finish="stop")
        await following(session)
    assert gateway.connects == 1
    assert client.round_trip_ms is not None


async def test_a_slow_upload_is_not_taken_for_a_dead_link(gateway: ScriptedGateway) -> None:
    """A prompt that takes three times the silence limit to send, while the gateway's pings keep coming."""
    gateway.ping_s = 0.1
    prompt = tuple(random.Random(1).choices(range(256), k=60_000))
    relay = await Relay("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]), LinkShape(rate_kbit=400)).start()
    url = f"http://127.0.0.1:{relay.port}"
    async with (
        EdgeClient.connect(url, KEY, card=CARD, options=FAST) as client,
        client.session(Request(tokens=prompt)) as session,
    ):
        started = time.monotonic()
        told = await gateway.session()
        assert time.monotonic() - started > 2 * FAST.silent_s
        await told.commit(ids("read"), finish="stop")
        assert text_of(await following(session)) == "read"
    await relay.close()
    assert gateway.connects == 1


async def test_a_lost_verdict_is_fetched_over_the_same_link(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        await told.commit(ids("one "))
        await told.commit(ids("two "), hear=False)
        await told.commit(ids("three"))
        await told.until(lambda: told.resumes == [len(ASK.tokens) + 4])
        await told.commit((), finish="stop")
        events = await following(session)
    assert text_of(events) == "one two three"
    assert gateway.connects == 1


async def test_verdicts_of_an_old_epoch_count_for_nothing(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        told.epoch = 5
        await told.commit(ids("new "))
        at = len(told.tokens)
        await told.send(wire.Verdict(session=told.id, epoch=4, at=at, tokens=ids("old"), kinds="fff"))
        await told.commit(ids("owner"), finish="stop")
        assert text_of(await following(session)) == "new owner"


async def test_a_contradiction_is_an_error_and_never_shown(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        await told.commit(ids("true"))
        other = wire.Verdict(session=told.id, epoch=1, at=len(ASK.tokens), tokens=ids("fal"), kinds="fff")
        await told.send(other)
        events = await following(session)
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.error is not None
    assert last.error.code == "history_lost"
    assert text_of(events) == "true"


async def test_a_refused_resume_ends_the_session(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        await told.commit(ids("gone"))
        await until(session, lambda event: isinstance(event, Committed))
        told.secret = "another"
        told.cut()
        last = (await following(session))[-1]
    assert isinstance(last, Finished)
    assert last.error is not None
    assert last.error.code == "history_lost"


async def test_a_session_that_somebody_else_resumed_is_taken_back_once(
    gateway: ScriptedGateway, client: EdgeClient
) -> None:
    """Once it may have been a late resume of our own; two devices must not take it from each other for ever."""
    async with client.session(ASK) as session:
        told = await gateway.session()
        superseded = refused(409, "superseded", "another connection resumed this session", told.id)
        await told.commit(ids("mine"))
        await until(session, lambda event: isinstance(event, Committed))
        await told.send(superseded)
        await told.until(lambda: len(told.resumes) == 1)
        await told.commit(ids(" again"))
        await until(session, lambda event: isinstance(event, Committed))
        await told.send(superseded)
        last = (await following(session))[-1]
    assert isinstance(last, Finished)
    assert last.error is not None
    assert last.error.code == "superseded"
    assert len(told.resumes) == 1


async def test_a_cloud_that_cannot_resume_yet_is_asked_again(gateway: ScriptedGateway, client: EdgeClient) -> None:
    def not_yet(resume: wire.SessionResume, socket: web.WebSocketResponse) -> bool:
        told = gateway.sessions[resume.session]
        if len(told.resumes) > 2:
            return False
        answer = refused(503, "batcher_unavailable", "no batcher is running", told.id)
        asyncio.get_running_loop().create_task(socket.send_bytes(wire.encode_wan(answer)))
        return True

    gateway.on_resume = not_yet
    async with client.session(ASK) as session:
        told = await gateway.session()
        told.cut()
        await told.until(lambda: len(told.resumes) == 3 and told.socket is not None)
        await told.commit(ids("back"), finish="stop")
        assert text_of(await following(session)) == "back"


async def test_a_gateway_that_stays_away_ends_the_session(gateway: ScriptedGateway) -> None:
    options = replace(FAST, patience_s=0.5)
    async with (
        EdgeClient.connect(gateway.url, KEY, card=CARD, options=options) as client,
        client.session(ASK) as session,
    ):
        told = await gateway.session()
        gateway.deaf = True
        told.cut()
        last = (await following(session))[-1]
    assert isinstance(last, Finished)
    assert last.error is not None
    assert last.error.status == 503


async def test_a_key_revoked_meanwhile_ends_the_session(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        gateway.refusal = refused(401, "invalid_api_key", "the API key is not known here")
        told.cut()
        last = (await following(session))[-1]
    assert isinstance(last, Finished)
    assert last.error is not None
    assert last.error.status == 401


# --- ends -----------------------------------------------------------------------------------------------------------


async def test_cancel_ends_the_session_in_the_cloud(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        await told.commit(ids("some"))
        await until(session, lambda event: isinstance(event, Committed))
        session.cancel()
        last = (await following(session))[-1]
    assert isinstance(last, Finished)
    assert (last.finish, last.confirmed, told.closes) == ("cancelled", True, 1)


async def test_cancel_is_repeated_until_it_is_heard(gateway: ScriptedGateway, client: EdgeClient) -> None:
    gateway.answer_close = False
    async with client.session(ASK) as session:
        told = await gateway.session()
        await until(session, lambda event: isinstance(event, Opened))
        session.cancel()
        await told.until(lambda: told.closes == 2)
        gateway.answer_close = True
        last = (await following(session))[-1]
    assert isinstance(last, Finished)
    assert last.confirmed


async def test_cancel_of_a_cut_session_reaches_the_cloud(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        await until(session, lambda event: isinstance(event, Opened))
        told.cut()
        session.cancel()
        last = (await following(session))[-1]
    assert isinstance(last, Finished)
    assert (last.finish, last.confirmed, told.closes) == ("cancelled", True, 1)


async def test_cancel_without_a_gateway_does_not_wait_long(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        await until(session, lambda event: isinstance(event, Opened))
        gateway.deaf = True
        told.cut()
        await until(session, lambda event: isinstance(event, Cut))
        started = time.monotonic()
        session.cancel()
        last = (await following(session))[-1]
    assert isinstance(last, Finished)
    assert (last.finish, last.confirmed) == ("cancelled", False)
    assert time.monotonic() - started < 3


async def test_cancel_while_opening_closes_what_is_opened_then(gateway: ScriptedGateway, client: EdgeClient) -> None:
    held: list[wire.SessionOpen] = []
    gateway.on_open = lambda opened, _: not held and not held.append(opened)  # type: ignore[func-returns-value]
    async with client.session(ASK) as session:
        while not held:
            await asyncio.sleep(0.01)
        session.cancel()
        gateway.on_open = lambda *_: False
        socket = gateway.sockets[0][0]
        await gateway._open(socket, held[0])
        last = (await following(session))[-1]
    assert isinstance(last, Finished)
    assert (last.finish, (await gateway.session()).closes) == ("cancelled", 1)


async def test_leaving_early_cancels(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with aclosing(client.generate(ASK)) as events:
        async for _ in events:
            break
    assert (await gateway.session()).closes == 1


async def test_an_error_from_the_cloud_is_named(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        told.error = wire.Failure(status=500, code="step_failed", message="the verifier failed twice")
        await told.commit((), finish="error")
        last = (await following(session))[-1]
    assert isinstance(last, Finished)
    assert last.error == told.error


async def test_a_refused_opening_is_named(gateway: ScriptedGateway, client: EdgeClient) -> None:
    answer = refused(400, "context_length_exceeded", "9000 tokens, the context holds 2048")

    def refuse(opened: wire.SessionOpen, socket: web.WebSocketResponse) -> bool:
        asyncio.get_running_loop().create_task(socket.send_bytes(wire.encode_wan(answer)))
        return True

    gateway.on_open = refuse
    async with client.session(ASK) as session:
        last = (await following(session))[-1]
    assert isinstance(last, Finished)
    assert last.error == answer.error


async def test_an_empty_prompt_is_refused_here(client: EdgeClient) -> None:
    with pytest.raises(BadRequest, match="empty"):
        client.session(Request(tokens=()))


async def test_a_wrong_key_and_a_gateway_that_is_away_are_told_apart(gateway: ScriptedGateway) -> None:
    with pytest.raises(Unauthorized):
        async with EdgeClient.connect(gateway.url, "sk-wrong", card=CARD, options=FAST):
            pass
    with pytest.raises(Unavailable, match="no gateway answers"):
        async with EdgeClient.connect("http://127.0.0.1:9", KEY, card=CARD, options=FAST):
            pass


async def test_no_tasks_are_left_behind(gateway: ScriptedGateway) -> None:
    before = asyncio.all_tasks()
    async with EdgeClient.connect(gateway.url, KEY, card=CARD, engine=ScriptedDraft(ids(TEXT)), options=FAST) as client:
        for number in range(5):
            async with client.session(ASK) as session:
                told = await gateway.session(number)
                await told.until(lambda told=told: bool(told.blocks))  # type: ignore[misc]
                if number % 2:
                    told.cut()
                session.cancel()
                await following(session)
    gateway.cut()
    await asyncio.sleep(0.05)
    assert {task for task in asyncio.all_tasks() - before if "edge" in task.get_name()} == set()


# --- drafts ---------------------------------------------------------------------------------------------------------


async def test_drafts_go_up_and_their_credit_comes_back(gateway: ScriptedGateway) -> None:
    engine = ScriptedDraft(ids(TEXT))
    async with (
        EdgeClient.connect(gateway.url, KEY, card=CARD, engine=engine, options=FAST) as client,
        client.session(ASK, drafts=True) as session,
    ):
        told = await gateway.session()
        await told.until(lambda: sum(len(c.tokens) for b in told.blocks for c in b.chains) >= 8)
        await told.commit(ids(TEXT), kinds="e" * len(TEXT), finish="stop")
        events = await following(session)
    drafted = [event.draft for event in events if isinstance(event, Drafted) and event.draft.kind == "drafted"]
    assert bytes(draft.token for draft in drafted[:8]) == TEXT[:8].encode()
    stats = events[-1].stats  # type: ignore[union-attr]
    assert stats.nodes_up >= 8
    assert 0 < stats.bytes_up_per_drafted_token < 40
    prompt, own = engine.released
    assert own == told.id
    assert engine.asked[prompt] == [tuple(ASK.tokens)], "the prompt was read before there was a session"


async def test_drafts_after_a_cut_are_a_new_incarnation(gateway: ScriptedGateway) -> None:
    engine = ScriptedDraft(ids(TEXT * 4))
    async with (
        EdgeClient.connect(gateway.url, KEY, card=CARD, engine=engine, options=FAST) as client,
        client.session(ASK) as session,
    ):
        told = await gateway.session()
        await told.until(lambda: bool(told.blocks))
        first = told.blocks[-1].incarnation
        told.cut()
        await told.until(lambda: told.blocks[-1].incarnation > first)
        assert told.blocks[-1].incarnation >> 16 == told.connection
        await told.commit(ids(TEXT), finish="stop")
        assert text_of(await following(session)) == TEXT


async def test_a_broken_draft_engine_does_not_stop_the_text(gateway: ScriptedGateway) -> None:
    engine = ScriptedDraft(ids(TEXT))
    engine.broken = True
    async with (
        EdgeClient.connect(gateway.url, KEY, card=CARD, engine=engine, options=FAST) as client,
        client.session(ASK) as session,
    ):
        told = await gateway.session()
        await told.commit(ids(TEXT), finish="stop")
        assert text_of(await following(session)) == TEXT


async def test_without_a_draft_engine_speculation_is_off(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        assert not told.opened.speculation.enabled
        assert told.opened.sampling.end_ids == CARD.end_ids
        await told.commit((), finish="stop")
        await following(session)


async def test_prompt_progress_is_passed_on(gateway: ScriptedGateway, client: EdgeClient) -> None:
    async with client.session(ASK) as session:
        told = await gateway.session()
        await told.send(told.verdict(len(told.tokens), fed=5))
        await told.commit((), finish="stop")
        events = await following(session)
    assert [(event.fed, event.total) for event in events if isinstance(event, Reading)] == [(5, len(ASK.tokens))]
