"""A session's verdicts exactly once and in order: whatever is lost, doubled, late or from another owner."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bus import Received
from paceline.errors import Conflict, Unavailable
from paceline.store import SessionRecord
from paceline.store_memory import MemoryStore
from paceline.telemetry import REPAIRS, Metrics
from paceline.wire import Failure, LogprobEntry, SessionOpen, Verdict, prefix_hash
from services.gateway.follower import PENDING_VERDICTS, Digest, Follower, Need, Order

PROMPT = (1, 2, 3)
TEXT = tuple(range(100, 130))
ALL = PROMPT + TEXT
KINDS = "ehcbf" * 6


def record(tip: int = len(ALL), finish: str | None = "stop", **more: Any) -> SessionRecord:
    opened = SessionOpen(model="m", fingerprint="f", tokens=PROMPT, logprobs=0)
    made = SessionRecord(
        session="s", tenant="t", opened=opened, secret="x", seed=0, prompt_length=3, max_tokens=99, epoch=5,
        tokens=ALL[:tip], kinds=KINDS[: tip - 3], logprobs=tuple(entries(3, tip)), finish=finish,
    )  # fmt: skip
    return replace(made, **more)


def entries(start: int, end: int) -> list[LogprobEntry]:
    return [LogprobEntry(logprob=-float(position)) for position in range(start, end)]


def verdict(at: int, end: int, epoch: int = 5, **more: Any) -> Verdict:
    finish = "stop" if end == len(ALL) else None
    return Verdict(
        session="s", epoch=epoch, at=at, tokens=ALL[at:end], kinds=KINDS[at - 3 : end - 3],
        logprobs=tuple(entries(at, end)), **{"finish": finish, **more},
    )  # fmt: skip


def fresh(epoch: int = 5) -> Order:
    order = Order("s", len(PROMPT), Digest(PROMPT))
    order.opened(epoch)
    return order


def drive(order: Order, verdicts: list[Verdict], store: SessionRecord) -> list[Verdict]:
    """As the follower does, with a store that always answers; the last repair stands for the stall timer."""
    shown = []
    for each in verdicts:
        found = order.take(each)
        if found in (Need.GAP, Need.EPOCH):
            found = order.adopt(store)
        if isinstance(found, Verdict):
            shown.append(found)
    if order.finish is None and (last := order.adopt(store)) is not None:
        shown.append(last)
    return shown


@given(data=st.data())
def test_any_loss_doubling_order_and_owner_gives_each_token_once(data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(4, len(ALL) - 1), max_size=12)))
    bounds = [3, *cuts, len(ALL)]
    sent = [verdict(at, end, data.draw(st.integers(5, 7))) for at, end in itertools.pairwise(bounds)]
    heard = data.draw(st.lists(st.sampled_from(sent), max_size=40))
    shown = drive(fresh(), heard, record())
    assert tuple(token for each in shown for token in each.tokens) == TEXT
    assert "".join(each.kinds for each in shown) == KINDS[: len(TEXT)]
    assert [e.logprob for each in shown for e in each.logprobs or ()] == [-float(at) for at in range(3, len(ALL))]
    assert [each.finish for each in shown if each.finish] == ["stop"]


@given(position=st.integers(3, len(ALL)), tip=st.integers(3, len(ALL)))
def test_a_resumed_reader_gets_the_rest_from_the_store_first(position: int, tip: int) -> None:
    order = Order("s", position, Digest(None, prefix_hash(ALL[:position])))
    assert order.take(verdict(tip, tip, finish=None)) is Need.EPOCH
    found = order.adopt(record(tip, None))
    if tip < position:
        assert found is None  # nothing is shown until the store holds the client's position
        found = order.adopt(record())
    assert found is not None
    assert found.at == position
    assert found.tokens == (ALL[position:tip] if tip >= position else ALL[position:])


def test_an_overlap_is_trimmed_with_its_kinds_and_logprobs() -> None:
    order = fresh()
    assert isinstance(order.take(verdict(3, 8)), Verdict)
    found = order.take(verdict(5, 11))
    assert isinstance(found, Verdict)
    assert (found.at, found.tokens, found.kinds) == (8, ALL[8:11], KINDS[5:8])
    assert found.logprobs == tuple(entries(8, 11))


def test_a_lower_epoch_counts_for_nothing() -> None:
    order = fresh(epoch=6)
    assert order.take(verdict(3, 8, epoch=5)) is Need.NOTHING


def test_after_the_finish_nothing_comes() -> None:
    order = fresh()
    order.take(verdict(3, len(ALL)))
    assert order.take(verdict(3, len(ALL))) is Need.NOTHING


def test_a_new_owner_whose_history_differs_is_history_lost() -> None:
    order = fresh()
    order.take(verdict(3, 8))
    assert order.take(verdict(8, 9, epoch=6)) is Need.EPOCH
    with pytest.raises(Conflict) as caught:
        order.adopt(record(tokens=(*ALL[:5], 999, *ALL[6:])))
    assert caught.value.code == "history_lost"


def test_a_record_that_ended_short_of_the_reader_is_history_lost() -> None:
    order = fresh()
    order.take(verdict(3, 8))
    assert order.take(verdict(6, 6, finish="cancelled")) is Need.EPOCH
    with pytest.raises(Conflict):
        order.adopt(record(6, "cancelled"))


def test_an_unknown_session_is_history_lost() -> None:
    with pytest.raises(Conflict):
        fresh().adopt(None)


def test_a_shorter_store_shows_nothing_until_it_agrees() -> None:
    order = fresh()
    order.take(verdict(3, 8))
    order.take(verdict(6, 6, epoch=6))
    assert order.adopt(record(6, None, epoch=6)) is None
    assert order.take(verdict(6, 9, epoch=6)) is Need.EPOCH
    found = order.adopt(record(9, None, epoch=6))
    assert found is not None
    assert found.tokens == ALL[8:9]


# --- the follower --------------------------------------------------------------------------------------------------


class Store(MemoryStore):
    def __init__(self, *records: SessionRecord | None) -> None:
        super().__init__()
        self.records = list(records)

    async def load(self, session: str) -> SessionRecord | None:
        self._check()
        return self.records.pop(0) if len(self.records) > 1 else self.records[0]


def follower(store: MemoryStore, metrics: Metrics | None = None, **options: Any) -> Follower:
    return Follower(fresh(), store, metrics or Metrics(), **{"stall_s": 0.05, **options})


async def hear(reader: Follower, *verdicts: Verdict) -> None:
    for each in verdicts:
        await reader.on_verdict(Received("verdict.s", each))


async def test_a_gap_is_repaired_from_the_store_and_counted() -> None:
    metrics = Metrics()
    reader = follower(Store(record()), metrics)
    await hear(reader, verdict(3, 6), verdict(9, 12, finish=None, price=0.5))
    assert (await reader.next()).tokens == ALL[3:6]
    found = await reader.next()
    assert (found.tokens, found.finish, found.price) == (ALL[6:], "stop", 0.5)
    assert metrics.value(REPAIRS, reason="gap") == 1


async def test_silence_reads_tip_and_finish_from_the_store() -> None:
    metrics = Metrics()
    reader = follower(Store(record(3, None), record(7, None), record()), metrics)
    assert (await reader.next()).tokens == ALL[3:7]
    assert (await reader.next()).finish == "stop"
    assert metrics.value(REPAIRS, reason="stall") == 2


async def test_a_store_that_is_away_only_delays() -> None:
    store = Store(record())
    store.away = True
    reader = follower(store)
    await hear(reader, verdict(9, 12))
    waiting = asyncio.create_task(reader.next())
    await asyncio.sleep(0.12)
    assert not waiting.done()
    store.away = False
    assert (await waiting).tokens == TEXT


async def test_a_slow_reader_misses_nothing() -> None:
    reader = follower(Store(record()))
    await hear(reader, *[verdict(3, 4)] * PENDING_VERDICTS, verdict(4, 9))
    shown: list[int] = []
    while reader.order.finish is None:
        shown += (await reader.next()).tokens
    assert tuple(shown) == TEXT


async def test_the_failure_of_a_lost_verdict_is_kept() -> None:
    failure = Failure(status=500, code="engine", message="broke")
    reader = follower(Store(record(6, "error")))
    await hear(reader, verdict(6, 6, finish="error", error=failure))
    found = await reader.next()
    assert (found.finish, found.error, found.tokens) == ("error", failure, ALL[3:6])


async def test_a_component_that_stays_away_ends_the_wait() -> None:
    reader = follower(Store(record(3, None)), missing=lambda: "verifier", stall_s=0.02, give_up_s=0.1)
    with pytest.raises(Unavailable) as caught:
        await reader.next()
    assert caught.value.code == "verifier_unavailable"


async def test_a_cancelled_wait_loses_nothing() -> None:
    reader = follower(Store(record(3, None)), stall_s=5)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.next(), 0.01)
    await hear(reader, verdict(3, 6))
    assert (await reader.next()).tokens == ALL[3:6]


async def test_a_new_owner_is_announced_once() -> None:
    heard: list[int] = []
    reader = follower(Store(record()), on_epoch=lambda: heard.append(1))
    await hear(reader, verdict(3, 4), verdict(4, 5), verdict(5, 6, epoch=8))
    assert len(heard) == 2
