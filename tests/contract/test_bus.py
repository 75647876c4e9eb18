"""One behaviour suite for both buses: memory, and a real NATS server. Outages are in test_bus_outages.py."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from opentelemetry import context as otel_context
from opentelemetry import trace

from paceline import bus_delivery, wire
from paceline.bus import Bus, Received
from paceline.bus_memory import MemoryBus
from paceline.bus_nats import NatsBus
from paceline.errors import BadRequest, NoResponders, Overloaded, RequestError, RequestTimeout, TooLarge
from paceline.subjects import DRAFT, HOSTED_OPEN, PROBE, VERDICT
from paceline.telemetry import BUS_DROPPED, BUS_REFUSED, Metrics

PENDING = 200
Connect = Callable[[], Awaitable[Bus]]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest_asyncio.fixture(params=["memory", "nats"])
async def connect(request: pytest.FixtureRequest, nats_server: str, metrics: Metrics) -> AsyncIterator[Connect]:
    """Makes clients of one bus, each holding PENDING messages a subscription; closed at the end."""
    made: list[Bus] = []
    if request.param == "memory":
        made.append(MemoryBus(metrics=metrics, pending=PENDING))

        async def make() -> Bus:
            return made[0]
    else:

        async def make() -> Bus:
            made.append(await NatsBus.connect(nats_server, "test", metrics, pending=PENDING))
            return made[-1]

    yield make
    for bus in made:
        await bus.close()


class Collector:
    """A handler that keeps what came, and waits for a number of messages."""

    def __init__(self) -> None:
        self.got: list[Received] = []
        self._changed = asyncio.Event()

    async def __call__(self, received: Received) -> None:
        self.got.append(received)
        self._changed.set()

    async def wait(self, count: int, timeout_s: float = 5.0) -> list[Received]:
        async with asyncio.timeout(timeout_s):
            while len(self.got) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.got


def verdict(at: int, session: str = "s") -> wire.Verdict:
    return wire.Verdict(session=session, epoch=1, at=at, tokens=(at,), kinds="f")


async def acknowledge(received: Received) -> None:
    assert received.respond is not None
    await received.respond(wire.Ack())


async def test_messages_reach_the_listeners_of_their_subject_in_order(connect: Connect) -> None:
    sender, receiver = await connect(), await connect()
    one, every, other = Collector(), Collector(), Collector()
    await receiver.subscribe(VERDICT.at(session="a"), one, wire.Verdict)
    await receiver.subscribe("verdict.*", every, wire.Verdict)
    await receiver.subscribe(VERDICT.at(session="b"), other, wire.Verdict)
    for at in range(100):
        await sender.publish(VERDICT.at(session="a"), verdict(at, "a"))
    assert [item.message for item in await one.wait(100)] == [verdict(at, "a") for at in range(100)]
    assert len(await every.wait(100)) == 100
    assert every.got[0].subject == "verdict.a"
    assert not other.got
    assert all(item.respond is None for item in one.got)


async def test_a_queue_group_shares_and_plain_listeners_all_get_it(connect: Connect) -> None:
    sender, receiver = await connect(), await connect()
    members, plain = [Collector(), Collector()], Collector()
    for member in members:
        await receiver.subscribe("verdict.q", member, wire.Verdict, queue="group")
    await receiver.subscribe("verdict.q", plain, wire.Verdict)
    for at in range(60):
        await sender.publish("verdict.q", verdict(at))
    await plain.wait(60)
    async with asyncio.timeout(5):
        while sum(len(member.got) for member in members) < 60:
            await asyncio.sleep(0.01)
    assert all(member.got for member in members)
    assert sorted(item.message.at for member in members for item in member.got) == list(range(60))  # type: ignore[attr-defined]


async def test_request_and_answer(connect: Connect) -> None:
    asking, answering = await connect(), await connect()
    await answering.subscribe(PROBE.at(verifier="v"), acknowledge, wire.Probe)
    answers = await asyncio.gather(*(asking.request("probe.v", wire.Probe(), timeout_s=2) for _ in range(50)))
    assert answers == [wire.Ack()] * 50


async def test_nobody_listening_is_told_at_once(connect: Connect) -> None:
    bus = await connect()
    started = time.monotonic()
    with pytest.raises(NoResponders, match=r"probe\.nobody"):
        await bus.request("probe.nobody", wire.Probe(), timeout_s=5)
    assert time.monotonic() - started < 1


async def test_no_answer_in_time(connect: Connect) -> None:
    bus = await connect()
    await bus.subscribe("probe.silent", Collector(), wire.Probe)
    with pytest.raises(RequestTimeout, match=r"probe.silent within 0.2 s"):
        await bus.request("probe.silent", wire.Probe(), timeout_s=0.2)


@pytest.mark.parametrize(
    "raised",
    [BadRequest("temperature must be at least 0", param="temperature"), Overloaded("parallel limit", retry_after_s=7)],
)
async def test_a_request_error_of_the_handler_comes_back_as_itself(connect: Connect, raised: RequestError) -> None:
    async def refuse(_received: Received) -> None:
        raise raised

    asking, answering = await connect(), await connect()
    await answering.subscribe("probe.refuses", refuse, wire.Probe)
    with pytest.raises(type(raised)) as caught:
        await asking.request("probe.refuses", wire.Probe(), timeout_s=2)
    assert (caught.value.status, caught.value.code, caught.value.message, caught.value.param) == (
        raised.status, raised.code, raised.message, raised.param,
    )  # fmt: skip
    assert getattr(caught.value, "retry_after_s", None) == getattr(raised, "retry_after_s", None)


async def test_a_failing_handler_is_answered_and_goes_on(connect: Connect, metrics: Metrics) -> None:
    calls = 0

    async def sometimes(received: Received) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        await acknowledge(received)

    bus = await connect()
    await bus.subscribe("probe.bug", sometimes, wire.Probe)
    with pytest.raises(RequestError, match="ZeroDivisionError") as caught:
        await bus.request("probe.bug", wire.Probe(), timeout_s=2)
    assert caught.value.status == 500
    assert await bus.request("probe.bug", wire.Probe(), timeout_s=2) == wire.Ack()
    assert metrics.value(BUS_REFUSED, reason="handler_failed") == 1


async def test_a_type_that_the_subject_does_not_carry_never_reaches_the_handler(
    connect: Connect, metrics: Metrics
) -> None:
    bus, got = await connect(), Collector()
    await bus.subscribe("probe.strict", got, *PROBE.carries)
    with pytest.raises(BadRequest, match="expected probe") as caught:
        await bus.request("probe.strict", verdict(1), timeout_s=2)
    assert caught.value.code == "malformed_message"
    await bus.publish("probe.strict", verdict(1))
    await bus.publish("probe.strict", wire.Probe())
    assert [item.message for item in await got.wait(1)] == [wire.Probe()]
    assert metrics.value(BUS_REFUSED, reason="malformed") == 2


async def test_a_message_over_the_limit_is_refused_with_both_numbers(connect: Connect) -> None:
    bus, got = await connect(), Collector()
    await bus.subscribe("hosted.open.m", got, *HOSTED_OPEN.carries)

    def prompt(count: int) -> wire.HostedOpen:
        tokens = tuple([100_000] * count)
        sampling = wire.Sampling()
        return wire.HostedOpen(session="s", model="m", epoch=1, tokens=tokens, sampling=sampling, seed=1,
                               prompt_length=count, partition=0)  # fmt: skip

    await bus.publish("hosted.open.m", prompt(140_000))
    assert len((await got.wait(1))[0].message.tokens) == 140_000  # type: ignore[attr-defined]
    for count in (160_000, 3_000_000):
        started = time.monotonic()
        with pytest.raises(TooLarge, match=rf"{count * 7 // 1000}\d+ bytes is over the bus's limit of \d+ bytes"):
            await bus.request("hosted.open.m", prompt(count), timeout_s=20)
        assert time.monotonic() - started < 1
    assert bus.connected


async def test_an_answer_over_the_limit_is_refused_too(connect: Connect) -> None:
    async def huge(received: Received) -> None:
        assert received.respond is not None
        await received.respond(wire.Verdict(session="s", epoch=1, at=0, tokens=tuple([100_000] * 160_000)))

    bus = await connect()
    await bus.subscribe("probe.huge", huge, wire.Probe)
    with pytest.raises(TooLarge):
        await bus.request("probe.huge", wire.Probe(), timeout_s=2)


async def test_a_handler_runs_one_message_at_a_time(connect: Connect) -> None:
    inside, most, done = 0, 0, asyncio.Event()

    async def careful(received: Received) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.002)
        inside -= 1
        if received.message == verdict(19):
            done.set()

    bus = await connect()
    await bus.subscribe("verdict.x", careful, wire.Verdict)
    for at in range(20):
        await bus.publish("verdict.x", verdict(at))
    await asyncio.wait_for(done.wait(), 5)
    assert most == 1


async def test_closing_finishes_what_was_taken(connect: Connect) -> None:
    finished: list[int] = []
    first = asyncio.Event()

    async def work(received: Received) -> None:
        first.set()
        await asyncio.sleep(0.03)
        finished.append(received.message.at)  # type: ignore[attr-defined]

    sender, receiver = await connect(), await connect()
    subscription = await receiver.subscribe("verdict.w", work, wire.Verdict)
    for at in range(7):
        await sender.publish("verdict.w", verdict(at))
    last = Collector()
    await receiver.subscribe("verdict.fence", last, wire.Verdict)
    await sender.publish("verdict.fence", verdict(0))
    await last.wait(1)
    await first.wait()
    await subscription.close()
    assert finished == list(range(7))
    await sender.publish("verdict.w", verdict(8))
    with pytest.raises(NoResponders):
        await sender.request("verdict.w", verdict(9), timeout_s=1)
    assert len(finished) == 7


async def test_a_handler_may_close_its_own_subscription(connect: Connect) -> None:
    bus, closed = await connect(), asyncio.Event()

    async def once(_received: Received) -> None:
        await subscription.close()
        closed.set()

    subscription = await bus.subscribe("probe.once", once, wire.Probe)
    await bus.publish("probe.once", wire.Probe())
    await asyncio.wait_for(closed.wait(), 2)
    with pytest.raises(NoResponders):
        await bus.request("probe.once", wire.Probe(), timeout_s=1)


async def test_closing_gives_up_on_a_handler_that_never_ends(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_delivery, "CLOSE_S", 0.2)
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def stuck(_received: Received) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    bus = await connect()
    await bus.subscribe("probe.stuck", stuck, wire.Probe)
    await bus.publish("probe.stuck", wire.Probe())
    await started.wait()
    await asyncio.wait_for(bus.close(), 2)
    assert cancelled.is_set()


async def test_a_slow_listener_loses_counted_messages_and_slows_nobody(connect: Connect, metrics: Metrics) -> None:
    sender, receiver = await connect(), await connect()
    go, slow, quick = asyncio.Event(), Collector(), Collector()

    async def waits(received: Received) -> None:
        await go.wait()
        await slow(received)

    await receiver.subscribe("verdict.s", waits, wire.Verdict)
    await receiver.subscribe("verdict.s", quick, wire.Verdict)
    for at in range(2000):
        await sender.publish("verdict.s", verdict(at))
        if at % 50 == 49:
            await quick.wait(at + 1)
    dropped = metrics.value(BUS_DROPPED, reason="slow_consumer")
    assert 0 < dropped < 2000
    go.set()
    got = await slow.wait(2000 - int(dropped))
    positions = [item.message.at for item in got]  # type: ignore[attr-defined]
    assert positions == sorted(set(positions))
    assert PENDING <= len(positions) <= PENDING + 1


async def test_cancelled_requests_leave_nothing_behind(connect: Connect) -> None:
    pause = random.Random(7)

    async def late(received: Received) -> None:
        await asyncio.sleep(pause.random() * 0.001)
        await acknowledge(received)

    asking, answering = await connect(), await connect()
    await answering.subscribe("probe.late", late, wire.Probe)
    await asking.request("probe.late", wire.Probe(), timeout_s=2)
    before = len(asyncio.all_tasks())
    for _ in range(10):
        calls = [asyncio.create_task(asking.request("probe.late", wire.Probe(), timeout_s=5)) for _ in range(100)]
        for call in pause.sample(calls, 90):
            await asyncio.sleep(0)
            call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(result == wire.Ack() or isinstance(result, asyncio.CancelledError) for result in results)
    assert len(asyncio.all_tasks()) == before
    if isinstance(asking, NatsBus):
        assert not asking._requests
        assert not asking._client._resp_map
    assert await asking.request("probe.late", wire.Probe(), timeout_s=5) == wire.Ack()


async def test_trace_context_travels_with_every_message(connect: Connect) -> None:
    span = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    sender, receiver = await connect(), await connect()
    got, inside = Collector(), []

    async def handler(received: Received) -> None:
        inside.append(trace.get_current_span().get_span_context().trace_id)
        await got(received)

    await receiver.subscribe(DRAFT.at(model="m", partition=3), handler, wire.Verdict)
    token = otel_context.attach(trace.set_span_in_context(trace.NonRecordingSpan(span), otel_context.Context()))
    try:
        await sender.publish("draft.m.3", verdict(1))
    finally:
        otel_context.detach(token)
    await sender.publish("draft.m.3", verdict(2))
    traced, plain = await got.wait(2)
    assert traced.headers["traceparent"].split("-")[1] == f"{0xABC:032x}"
    assert plain.headers == {}
    assert inside == [0xABC, 0]
