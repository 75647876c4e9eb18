"""Openings, resumes, cancels, presence, blocks that do not fit, hosted drafts, moves, policy."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from batcher_kit import CARD, DEEP, PLAIN, PROMPT, Client, Drafter, Stack, send_block, soon, stack

from paceline import subjects
from paceline.bus import Received
from paceline.errors import (
    BadRequest,
    Conflict,
    ContextLengthExceeded,
    NotFound,
    Overloaded,
    RequestError,
    Unavailable,
)
from paceline.telemetry import DRAFTER_FAILURES
from paceline.wire import (
    Ack,
    BatcherStatus,
    Chain,
    DraftBlock,
    HostedOpen,
    PlacementList,
    PlacementQuery,
    PolicyDecision,
    Presence,
    Sampling,
    SessionClose,
    SessionMove,
    SessionOpened,
    Speculation,
)

SLOW = {"step_ms": 5.0}

# --- openings ---


@pytest.mark.parametrize(
    ("changes", "kind", "code", "param"),
    [
        ({"tokens": ()}, BadRequest, "empty_prompt", "tokens"),
        ({"tokens": (1, 259)}, BadRequest, "token_out_of_range", "tokens"),
        ({"tokens": (65,) * 64}, BadRequest, "context_length_exceeded", "tokens"),
        ({"tokens": (65,) * 100}, BadRequest, "context_length_exceeded", "tokens"),
        ({"model": "nope"}, NotFound, "model_not_found", "model"),
        ({"fingerprint": "f" * 64}, Conflict, "fingerprint_mismatch", "fingerprint"),
        ({"max_tokens": 0}, BadRequest, "invalid_value", "max_tokens"),
        ({"stop": ("",)}, BadRequest, "invalid_value", "stop"),
        ({"sampling": Sampling(logit_bias={900: 1.0})}, BadRequest, "invalid_value", "logit_bias"),
    ],
)
async def test_refused_openings(
    changes: dict[str, Any], kind: type[RequestError], code: str, param: str | None
) -> None:
    async with stack(engine={"context": 64}) as made:
        with pytest.raises(kind) as refused:
            await made.client().open(**changes)
        assert (refused.value.code, refused.value.param) == (code, param)
        assert len(made.batcher.table) == 0
        assert not made.store._records


async def test_a_prompt_over_the_context_names_both_numbers() -> None:
    async with stack(engine={"cells": 64}) as made:
        with pytest.raises(BadRequest, match=r"100 tokens.*64 tokens") as refused:
            await made.client(prompt=(65,) * 100).open()
        assert refused.value.code == ContextLengthExceeded.code


@pytest.mark.parametrize(("prompt", "max_tokens", "count"), [(63, None, 1), (60, 20, 4), (60, 3, 3)])
async def test_a_completion_is_clipped_to_the_context(prompt: int, max_tokens: int | None, count: int) -> None:
    async with stack(engine={"context": 64}) as made:
        client = await made.client(prompt=(65,) * prompt, max_tokens=max_tokens, speculation=DEEP).open()
        assert client.opened is not None
        assert client.opened.max_tokens == count
        Drafter(client).start()
        assert len(await client.done()) == count
        assert client.finish == "length"


async def test_no_verifier_is_a_quick_503() -> None:
    async with stack(verifiers=0) as made:
        started = time.monotonic()
        with pytest.raises(Unavailable, match="no verifier"):
            await made.client().open()
        assert time.monotonic() - started < 1


async def test_an_opening_waits_for_a_verifier_that_was_there_a_moment_ago() -> None:
    async with stack() as made:
        made.batcher.directory.lose("v1")  # until its next status, within a second
        client = await made.client().open()
        assert await client.done() == client.expected()


async def test_a_new_batcher_tells_of_itself_once_it_knows_a_verifier() -> None:
    """What a gateway takes for readiness: statuses of both."""
    async with stack(verifiers=0) as made:
        served = []

        async def told(received: Received) -> None:
            status = received.message
            assert isinstance(status, BatcherStatus)
            if status.batcher == "second":
                served.append(another.directory.serving(time.monotonic()))

        await made.bus.subscribe(subjects.BATCHER_STATUS.at(model=CARD.model), told, BatcherStatus)
        another = await made.another("second")
        await asyncio.sleep(0.2)  # nothing comes of it while nobody speaks
        assert not served
        await made.verifier()
        await soon(lambda: bool(served))
        assert served[0] == ["v1"]


async def test_no_store_is_a_503_within_a_second() -> None:
    async with stack() as made:
        made.store.away = True
        started = time.monotonic()
        with pytest.raises(Unavailable, match="store"):
            await made.client().open()
        assert time.monotonic() - started < 1.1
        made.store.away = False
        client = await made.client().open()
        assert await client.done() == client.expected()


async def test_an_opening_that_is_repeated_gets_the_same_answer() -> None:
    async with stack() as made:
        client = await made.client().open()
        first = client.opened
        again = await made.bus.request(client.subject(), client.opening(), timeout_s=1)
        assert again == first or client.tokens, "position may have moved on"
        assert isinstance(again, SessionOpened)
        assert first is not None
        assert again.secret == first.secret
        with pytest.raises(Conflict):
            await made.bus.request(client.subject(), client.opening(tokens=(1, 2)), timeout_s=1)


async def test_a_drawn_seed_is_told() -> None:
    async with stack() as made:
        client = await made.client(temperature=0.8).open(seed=None)
        assert client.opened is not None
        client.seed = client.opened.seed
        assert await client.done() == client.expected()


async def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.batcher.reception.MAX_SESSIONS", 2)
    async with stack(engine=SLOW) as made:
        clients = [await made.client(max_tokens=200).open() for _ in range(2)]
        with pytest.raises(Overloaded):
            await made.client().open()
        await clients[0].close()
        await clients[0].done()
        await soon(lambda: len(made.batcher.table) == 1)
        await made.client().open()


# --- cancels and presence ---


async def test_cancels_at_any_moment_free_everything() -> None:
    async with stack(engine={"step_ms": 3.0}) as made:
        clients = []
        for number in range(16):
            client = await made.client(prompt=f"cancel {number}".encode(), speculation=Speculation()).open()
            Drafter(client).start()
            clients.append(client)
        for number, client in enumerate(clients):
            await asyncio.sleep(0.002 * (number % 5))
            await client.close()
        started = time.monotonic()
        for client in clients:
            await client.done()
            assert tuple(client.tokens) == client.expected()[: len(client.tokens)]
        assert time.monotonic() - started < 2
        engine = made.killable("v1").engine
        await soon(lambda: engine.status().sessions == 0 and len(made.batcher.table) == 0)
        assert {client.finish for client in clients} <= {"cancelled", "length"}


async def test_a_close_that_is_repeated_is_answered_by_the_finish_again() -> None:
    async with stack() as made:
        client = await made.client().open()
        await client.done()
        await soon(lambda: made.batcher.table.get(client.session) is None)
        before = len(client.verdicts)
        await client.close()
        await client.until(lambda: len(client.verdicts) > before)
        assert client.verdicts[-1].finish == "length"


async def test_a_close_right_behind_the_opening() -> None:
    async with stack() as made:
        client = made.client(max_tokens=500)
        await client.listen()
        opening = asyncio.create_task(client.open())
        await asyncio.sleep(0)
        await client.close()
        await opening
        await client.done(3)
        assert client.finish == "cancelled"


async def test_an_absent_client_parks_the_session_and_a_long_absence_cancels_it() -> None:
    async with stack(engine=SLOW, parked_ttl_s=1.5) as made:
        client = await made.client(max_tokens=2000).open()
        await client.grown(3)
        live = made.batcher.table.get(client.session)
        assert live is not None
        client.present = False
        gone = time.monotonic()
        await soon(lambda: live.session.parked)
        assert time.monotonic() - gone < 1
        await asyncio.sleep(0.05)
        stopped_at = live.session.tip
        await asyncio.sleep(0.3)
        assert live.session.tip == stopped_at, "nothing is verified for a parked session"
        client.present = True
        await client.grown(len(client.tokens) + 5)
        client.present = False
        await client.done(5)
        assert client.finish == "cancelled"


async def test_a_recovered_session_is_parked_until_somebody_is_there() -> None:
    async with stack(engine=SLOW) as made:
        client = await made.client(max_tokens=100).open()
        await client.grown(3)
        client.present = False
        await made.kill_batcher(made.batcher)
        successor = await made.another("b2")
        await soon(lambda: successor.table.get(client.session) is not None)
        live = successor.table.get(client.session)
        assert live is not None
        await asyncio.sleep(0.3)
        assert live.session.parked
        assert live.session.tip == len(PROMPT) + len(client.tokens)
        client.present = True
        assert await client.done() == client.expected()


async def test_every_session_that_ends_leaves_no_task_behind() -> None:
    async with stack() as made:
        await (await made.client().open()).done()
        await asyncio.sleep(0.1)
        before = len(asyncio.all_tasks())
        for number in range(30):
            client = await made.client(prompt=f"leak {number}".encode(), max_tokens=50).open()
            if number % 2:
                await client.close()
            await client.done()
        # each test client keeps its own subscription's task
        await soon(lambda: len(asyncio.all_tasks()) <= before + 30)
        assert len(made.batcher.table) == 0
        assert not made.batcher.committer._waiting


# --- resuming ---


async def test_a_resume_binds_the_session_to_the_new_connection() -> None:
    async with stack(engine=SLOW, presence_ttl_s=5) as made:
        client = await made.client(speculation=DEEP, max_tokens=60).open()
        drafter = Drafter(client).start()
        await client.grown(5)
        old = client.opened
        assert old is not None
        opened = await client.resume()
        assert opened.connection == old.connection + 1
        assert opened.position >= len(PROMPT) + 5
        live = made.batcher.table.get(client.session)
        assert live is not None
        held = live.session.counters.drafted.get("edge", 0)
        node = Chain(first=1, position=live.session.tip, tokens=(65,), at=live.session.tip)
        await send_block(client, node, incarnation=(9 << 16), connection=old.connection)
        await asyncio.sleep(0.02)
        assert live.session.seen["edge"][0] != 9 << 16, "the old connection's blocks are ignored"
        assert held <= live.session.counters.drafted["edge"]
        assert await client.done() == client.expected()
        assert drafter.incarnation


@pytest.mark.parametrize(
    ("changes", "kind", "code"),
    [
        ({"secret": "0" * 32}, NotFound, "session_not_found"),
        ({"secret": "\u00e9"}, NotFound, "session_not_found"),
        ({"tenant": "TEN-B"}, NotFound, "session_not_found"),
        ({"session": "s0"}, NotFound, "session_not_found"),
    ],
)
async def test_only_the_owner_resumes(changes: dict[str, Any], kind: type[RequestError], code: str) -> None:
    async with stack(engine=SLOW) as made:
        client = await made.client().open()
        await client.grown(2)
        other = Client(made, session=changes.get("session", client.session))
        other.opened, other.tokens = client.opened, client.tokens
        with pytest.raises(kind) as refused:
            await other.resume(**changes)
        assert refused.value.code == code
        assert await client.done() == client.expected(), "the session is unharmed"


@pytest.mark.parametrize("beyond", [True, False])
async def test_a_resume_with_another_history_is_refused_and_harms_nobody(beyond: bool) -> None:
    async with stack(engine=SLOW) as made:
        client = await made.client().open()
        await client.grown(2)
        changes = {"position": 1000} if beyond else {"prefix_hash": "0" * 16}
        with pytest.raises(Conflict) as refused:
            await client.resume(**changes)
        assert refused.value.code == "history_lost"
        assert await client.done() == client.expected(), "the session is unharmed"
        assert client.finish == "length"


def told(client: Client) -> list[int]:
    return [verdict.connection for verdict in client.verdicts if verdict.connection]


async def test_a_resume_is_told_to_the_readers_of_older_connections() -> None:
    async with stack(engine=SLOW, presence_ttl_s=5) as made:
        client = await made.client(max_tokens=60).open()
        await client.grown(2)
        first = client.opened
        assert first is not None
        assert told(client) == []
        second = await client.resume()
        await client.until(lambda: bool(told(client)))
        await client.grown(10)
        assert told(client) == [second.connection], "once is enough while nobody contradicts"
        assert await client.done() == client.expected()


@pytest.mark.parametrize("kind", [Presence, SessionClose])
async def test_an_older_connection_that_speaks_is_told_again(kind: Any) -> None:
    async with stack(engine=SLOW, presence_ttl_s=5) as made:
        client = await made.client(max_tokens=60).open()
        await client.grown(2)
        first = client.opened
        assert first is not None
        second = await client.resume()
        await client.until(lambda: bool(told(client)))
        before = len(told(client))
        fields = {"t_sent": time.time()} if kind is Presence else {}
        await made.bus.publish(client.subject(), kind(session=client.session, connection=first.connection, **fields))
        await client.until(lambda: len(told(client)) > before)
        assert told(client)[-1] == second.connection
        assert await client.done() == client.expected(), "its close has no effect"


async def test_a_finished_session_can_be_resumed_for_what_was_missed() -> None:
    async with stack() as made:
        client = await made.client().open()
        await client.done()
        await soon(lambda: made.batcher.table.get(client.session) is None)
        del client.tokens[10:]
        before = len(client.verdicts)
        opened = await client.resume()
        assert opened.position == len(PROMPT) + 40
        await client.until(lambda: len(client.verdicts) > before)
        assert client.verdicts[-1].finish == "length"
        assert client.verdicts[-1].at == opened.position


# --- blocks ---


async def test_blocks_that_do_not_fit_change_nothing() -> None:
    """Ids out of range, a foreign session, an unknown parent, an old incarnation, a gap: counted, harmless."""
    async with stack(engine=SLOW) as made:
        client = await made.client(speculation=Speculation(), max_tokens=60).open()
        await client.grown(3)
        live = made.batcher.table.get(client.session)
        assert live is not None
        at = live.session.tip
        await send_block(client, Chain(first=1, position=at, tokens=(999,), at=at))
        await send_block(client, Chain(first=1, position=at, tokens=(1, 2), at=at), incarnation=5)
        await send_block(client, Chain(first=9, position=at, tokens=(1,), after=7), incarnation=5)
        await send_block(client, Chain(first=1, position=at, tokens=(1,), at=at), incarnation=4)
        await send_block(Client(made, session="nobody"), Chain(first=1, position=at, tokens=(1,), at=at))
        await client.until(lambda: any("edge" in verdict.gap for verdict in client.verdicts))
        assert live.session.counters.refused == 1
        assert live.session.seen["edge"] == (5, 2)
        assert await client.done() == client.expected()
        assert client.last is not None
        assert client.last.counters is not None
        assert client.last.counters.refused == 1


async def test_a_malformed_message_harms_nobody() -> None:
    async with stack(engine=SLOW) as made:
        client = await made.client().open()
        subject = subjects.DRAFT.at(model="toy", partition=client.partition)
        for subscriber in made.bus._chosen(subject):
            from paceline.bus_delivery import Packet

            subscriber.inbox.offer(Packet(subject, b'{"type": "draft", "chains": [', {}))
            subscriber.inbox.offer(Packet(subject, b'{"type": "draft", "session": "x"}', {}))
        assert await client.done() == client.expected()


async def test_verdicts_tell_what_was_seen_and_how_long_it_took() -> None:
    async with stack(engine=SLOW) as made:
        client = await made.client(speculation=DEEP, max_tokens=9).open()
        at = len(PROMPT)
        chain = Chain(first=1, position=at, tokens=client.expected()[:4], at=at)
        await send_block(client, chain, t_sent=1234, t_received=time.time())
        await client.grown(5)
        verdict = next(verdict for verdict in client.verdicts if verdict.tokens)
        assert verdict.seen == {"edge": (1, 4)}
        assert verdict.timing is not None
        assert verdict.timing.t_sent == 1234
        assert 4 < verdict.timing.step_ms < 50
        assert 0 <= verdict.timing.wait_ms < 100


async def test_without_fill_a_starved_session_steps_only_after_its_wait() -> None:
    async with stack() as made:
        client = await made.client(speculation=DEEP, max_tokens=3).open()
        started = time.monotonic()
        await client.grown(1)
        waited = time.monotonic() - started
        assert 0.4 < waited < 0.8, "three times the assumed round trip, and 150 ms"
        assert await client.done() == client.expected()


async def test_the_overhead_of_the_line_is_small() -> None:
    """Block received to step started, on an idle machine, within one process: the bus's share comes on top."""
    async with stack() as made:
        client = await made.client(speculation=DEEP, max_tokens=120).open()
        text = client.expected()
        for start in range(0, 100, 4):
            live = made.batcher.table.get(client.session)
            assert live is not None
            await soon(lambda: made.batcher.dispatcher.idle("v1"))
            at = len(PROMPT) + len(client.tokens)
            tokens = text[len(client.tokens) : len(client.tokens) + 3]
            chain = Chain(first=1, position=at, tokens=tokens, at=at)
            await send_block(client, chain, incarnation=start + 1, t_received=time.time())
            await client.grown(len(client.tokens) + 4)
        assert made.batcher.overhead_ms_p50() < 3
        await client.close()


# --- the hosted drafter ---


class HostedDrafter:
    """Drafts with hindsight, for every session that is opened. `silent`: says yes and sends nothing."""

    def __init__(self, made: Stack, client: Client) -> None:
        self.made, self.client = made, client
        self.opened: list[HostedOpen] = []
        self.silent = False
        self.drafter: Drafter | None = None

    async def start(self) -> Any:
        subject = subjects.HOSTED_OPEN
        return await self.made.bus.subscribe(subject.at(model="toy"), self._on_open, queue=subject.queue)

    async def _on_open(self, received: Received) -> None:
        assert isinstance(received.message, HostedOpen)
        self.opened.append(received.message)
        assert received.respond is not None
        await received.respond(Ack())
        if not self.silent:
            done = len(received.message.tokens) - received.message.prompt_length
            incarnation = len(self.opened) << 16
            self.drafter = Drafter(self.client, source="hosted", incarnation=incarnation, sent=done, tip=done).start()


HOSTED = Speculation(hosted=True)


async def test_hosted_drafts_are_used() -> None:
    async with stack(engine=SLOW) as made:
        client = made.client(speculation=HOSTED)
        drafter = HostedDrafter(made, client)
        await drafter.start()
        await client.open()
        assert await client.done() == client.expected()
        assert "h" in client.kinds
        assert drafter.opened[0].partition == client.partition


async def test_without_a_hosted_drafter_the_session_is_filled_and_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.batcher.hosted.RETRY_S", 0.2)
    async with stack(engine=SLOW) as made:
        client = await made.client(speculation=HOSTED, max_tokens=200).open()
        await client.grown(10)
        assert set(client.kinds) == {"f"}
        metrics = made.batcher._service.metrics
        assert metrics.value(DRAFTER_FAILURES, reason="no_responders") >= 1
        await HostedDrafter(made, client).start()
        await client.until(lambda: "h" in client.kinds)
        assert await client.done() == client.expected()


async def test_a_silent_hosted_drafter_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.batcher.hosted.SILENT_S", 0.2)
    async with stack(engine={"step_ms": 10.0}) as made:
        client = made.client(speculation=HOSTED, max_tokens=150)
        drafter = HostedDrafter(made, client)
        drafter.silent = True
        await drafter.start()
        await client.open()
        await soon(lambda: len(drafter.opened) >= 1)
        drafter.silent = False
        assert await client.done() == client.expected()
        assert "h" in client.kinds


async def test_a_hosted_session_is_not_stalled_by_a_policy_without_fill() -> None:
    async with stack() as made:
        made.batcher.directory.obey(
            PolicyDecision(model="toy", version=1, fill=False, window_cap=8, admit=(), t_sent=1)
        )
        client = await made.client(speculation=HOSTED, max_tokens=30).open()
        started = time.monotonic()
        assert await client.done() == client.expected()
        assert time.monotonic() - started < 2


# --- policy, moves, status ---


async def test_the_policy_is_obeyed() -> None:
    async with stack(verifiers=2, engine=SLOW) as made:
        decision = PolicyDecision(model="toy", version=1, fill=False, window_cap=2, admit=("v2",), t_sent=time.time())
        await made.bus.publish(subjects.POLICY.at(model="toy"), decision)
        await soon(lambda: made.batcher.directory.policy is not None)
        client = await made.client(speculation=Speculation(), max_tokens=30).open()
        live = made.batcher.table.get(client.session)
        assert live is not None
        assert live.verifier == "v2"
        Drafter(client).start()
        await client.done()
        assert client.verdicts[0].window_cap == 2
        counters = client.last.counters  # type: ignore[union-attr]
        assert counters is not None
        assert counters.verified <= 2 * counters.steps
        plain = await made.client(speculation=PLAIN, max_tokens=10).open()
        assert await plain.done(2) == plain.expected(), "fill off never stops a plain session"


async def test_a_session_moves_between_two_steps() -> None:
    async with stack(verifiers=2, engine=SLOW) as made:
        client = await made.client(speculation=Speculation(), max_tokens=60).open()
        Drafter(client, wrong=lambda index: index % 4 == 3).start()
        await client.grown(5)
        live = made.batcher.table.get(client.session)
        assert live is not None
        old = live.verifier
        new = "v2" if old == "v1" else "v1"
        answer = await made.bus.request(
            client.subject(), SessionMove(session=client.session, verifier=new), timeout_s=1
        )
        assert answer == Ack()
        placed = await made.bus.request(subjects.PLACEMENTS.at(batcher="b1"), PlacementQuery(verifier=new), timeout_s=1)
        assert placed == PlacementList(batcher="b1", sessions=(client.session,))
        engine = made.killable(old or "").engine
        await soon(lambda: engine.status().sessions == 0)
        await client.grown(len(client.tokens) + 3)
        assert await client.done() == client.expected()
        record = await made.store.load(client.session)
        assert record is not None
        assert record.verifier == new


async def test_moves_that_cannot_be_made_are_refused() -> None:
    async with stack(engine=SLOW) as made:
        client = await made.client().open()
        with pytest.raises(Unavailable):
            await made.bus.request(client.subject(), SessionMove(session=client.session, verifier="v9"), timeout_s=1)
        nobody = Client(made, session="nobody")
        with pytest.raises(NotFound):
            await made.bus.request(nobody.subject(), SessionMove(session="nobody", verifier="v1"), timeout_s=1)


async def test_the_status_adds_up() -> None:
    async with stack() as made:
        heard: list[BatcherStatus] = []

        async def on_status(received: Received) -> None:
            assert isinstance(received.message, BatcherStatus)
            heard.append(received.message)

        await made.bus.subscribe(subjects.BATCHER_STATUS.at(model="toy"), on_status, BatcherStatus)
        client = await made.client(speculation=DEEP, max_tokens=20).open()
        Drafter(client).start()
        await client.done()
        await soon(lambda: bool(heard) and heard[-1].committed == 20)
        status = heard[-1]
        assert status.partitions == 64
        assert 0 < status.accepted <= status.drafted
        assert CARD.model == status.model


async def test_a_full_step_leaves_some_waiting_and_says_so() -> None:
    async with stack(engine={"step_ms": 4.0}, max_step_tokens=2) as made:
        clients = [await made.client(prompt=f"w{n}".encode(), max_tokens=15).open() for n in range(6)]
        await soon(
            lambda: bool(made.batcher.dispatcher.waiting.since) and max(made.batcher.dispatcher.waiting.since) >= 3
        )
        for client in clients:
            assert await client.done() == client.expected()


def test_blocks_stay_bounded() -> None:
    with pytest.raises(ValueError, match="chain"):
        DraftBlock(session="s", source="edge", incarnation=1, chains=(Chain(first=2, position=1, tokens=(1,)),))
