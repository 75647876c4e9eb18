"""The verifier on the memory bus with a simulated engine: right decisions, and an answer to everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from paceline import subjects
from paceline.bus import Received
from paceline.bus_memory import MemoryBus
from paceline.coupling import choose
from paceline.engine import Rule
from paceline.engine_loading import load_target
from paceline.engine_simulated import SimulatedTarget, Timing, World
from paceline.errors import RequestError, SettingsError, Unavailable
from paceline.served_card import served_card
from paceline.service import Service
from paceline.settings import Settings
from paceline.store_memory import MemoryStore
from paceline.wire import (
    Ack,
    DrainRequest,
    History,
    Probe,
    Sampling,
    StatusWanted,
    VerifierRelease,
    VerifierStatus,
    VerifyBatch,
    VerifyItem,
    VerifyOutcome,
    VerifyResult,
    prefix_hash,
)
from services.verifier import verifier as module
from services.verifier.reporting import Reporter
from services.verifier.verifier import Verifier, body

PROMPT = tuple(b"once upon a time")
GREEDY = Sampling(temperature=0)
SEED = 7


class Rig:
    """A running verifier, asked over the bus."""

    def __init__(self, service: Service, verifier: Verifier, engine: SimulatedTarget) -> None:
        self.service, self.verifier, self.engine = service, verifier, engine
        self.bus = service.bus
        self._batches = 0

    async def ask(self, *items: VerifyItem) -> list[VerifyOutcome]:
        return list((await self.result(*items)).items)

    async def result(self, *items: VerifyItem) -> VerifyResult:
        self._batches += 1
        batch = VerifyBatch(batch=f"b{self._batches}", items=items)
        answer = await self.bus.request(subjects.VERIFY.at(verifier="v1"), batch, timeout_s=5)
        assert isinstance(answer, VerifyResult)
        assert answer.batch == batch.batch
        return answer

    async def status(self) -> VerifierStatus:
        return self.verifier._reporter.status()


@asynccontextmanager
async def running(engine: SimulatedTarget | None = None, store: MemoryStore | None = None) -> AsyncIterator[Rig]:
    bus, store = MemoryBus(), store or MemoryStore()
    settings = Settings.load(engine="simulated", model="toy", instance="v1")
    service = Service("verifier", settings, bus, store, store)
    engine = engine or SimulatedTarget(World())
    verifier = Verifier(service, engine, Reporter(service, served_card(settings)))
    await verifier.start(draining=await module._was_draining(service, served_card(settings)))
    try:
        yield Rig(service, verifier, engine)
        assert service.failure is None
    finally:
        await service.stop()
        await engine.close()
        await bus.close()


def item(tokens: Sequence[int], *, session="s", draft=(), sampling=GREEDY, start: int | None = None, **fields):
    """A decision after `tokens`; with `start` the history from there on comes along."""
    history = None if start is None else History(start=start, tokens=tuple(tokens[start:]))
    values = {"tenant": "t", "epoch": 1, "prompt_length": len(PROMPT), "seed": SEED, **fields}
    return VerifyItem(
        session=session,
        at=len(tokens),
        prefix_hash=prefix_hash(tokens),
        sampling=sampling,
        history=history,
        tokens=tuple(draft),
        **values,
    )


def plain(count: int, *, world: World | None = None, sampling: Sampling = GREEDY) -> list[int]:
    """What decoding one token after the other gives, by the rule itself."""
    tokens = list(PROMPT)
    rule = Rule(sampling, SEED, len(PROMPT))
    for _ in range(count):
        tokens.append(choose((world or World()).logits(tokens, len(PROMPT)), rule, tokens).token)
    return tokens[len(PROMPT) :]


async def test_accepts_what_the_target_would_say_and_gives_the_next_token():
    truth = plain(6)
    async with running() as rig:
        (first,) = await rig.ask(item(PROMPT, start=0, draft=truth[:3]))
        assert (first.accepted, first.token) == (3, truth[3])
        assert len(first.margins) == 4
        (second,) = await rig.ask(item([*PROMPT, *truth[:4]], draft=[truth[4], 5]))
        assert (second.accepted, second.token) == (1, truth[5])
        (third,) = await rig.ask(item([*PROMPT, *truth[:6]]))
        assert (third.accepted, third.token) == (0, plain(7)[6])


@pytest.mark.parametrize("mode", ["echo", "anti", "mix"])
@pytest.mark.parametrize("width", [0, 1, 4, 8])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, top_k=12, repetition_penalty=1.2)])
async def test_text_is_that_of_plain_decoding_whoever_drafts(mode, width, sampling):
    truth = plain(40, sampling=sampling)
    out: list[int] = []
    async with running() as rig:
        start = 0
        while len(out) < 30:
            guess = truth[len(out) : len(out) + width]
            wrong = [0] * len(guess) if mode == "anti" else [g if i % 3 != 2 else 0 for i, g in enumerate(guess)]
            draft = guess if mode == "echo" else wrong
            (answer,) = await rig.ask(item([*PROMPT, *out], start=start, draft=draft, sampling=sampling))
            out += [*draft[: answer.accepted], answer.token]
            start = None
    assert out == truth[: len(out)]


async def test_every_setting_acts_at_every_verified_position():
    banned = plain(3)[1]
    sampling = Sampling(temperature=0, logit_bias={banned: -100}, presence_penalty=1.5)
    truth = plain(8, sampling=sampling)
    async with running() as rig:
        (answer,) = await rig.ask(item(PROMPT, start=0, draft=truth[:7], sampling=sampling))
        assert (answer.accepted, answer.token) == (7, truth[7])
        (greedy,) = await rig.ask(item(PROMPT, start=0, session="x", draft=plain(7), sampling=sampling))
        assert greedy.accepted < 7


async def test_history_in_chunks_beside_a_decoding_session():
    async with running() as rig:
        (lacking,) = await rig.ask(item(PROMPT, session="new"))
        assert lacking.need_from == 0
        chunk = item(PROMPT[:10], session="new", start=0, want="none")
        fed, decided = await rig.ask(chunk, item(PROMPT, start=0))
        assert fed.fed == 10
        assert decided.token == plain(1)[0]
        (answer,) = await rig.ask(item(PROMPT, session="new", start=10))
        assert answer.token == plain(1)[0]
        assert (await rig.status()).steps == 2
        assert (await rig.status()).step_tokens == 10 + len(PROMPT) + 1 + 6 + 1


async def test_a_ledger_of_other_tokens_is_replaced_and_the_text_is_right():
    truth = plain(4)
    async with running() as rig:
        other = [*PROMPT[:8], *b"in the sea"]
        await rig.ask(item(other, start=0))
        (mismatch,) = await rig.ask(item([*PROMPT, *truth[:2]], epoch=2))
        assert mismatch.need_from == 0
        (answer,) = await rig.ask(item([*PROMPT, *truth[:2]], start=0, epoch=2))
        assert answer.token == truth[2]


async def test_old_owners_are_turned_away_and_late_or_repeated_batches_do_no_harm():
    truth = plain(4)
    async with running() as rig:
        asked = item(PROMPT, start=0, draft=truth[:2], epoch=5)
        first = await rig.ask(asked)
        assert await rig.ask(asked) == first
        (stale,) = await rig.ask(item(PROMPT, start=0, epoch=4))
        assert stale.error.code == "stale_epoch"
        await rig.ask(item([*PROMPT, *truth[:3]], epoch=5))
        assert await rig.ask(asked) == first
        (later,) = await rig.ask(item([*PROMPT, *truth[:3]], epoch=5))
        assert later.token == truth[3]


async def test_a_release_frees_kv_unless_it_is_an_old_owners():
    async with running() as rig:
        await rig.ask(item(PROMPT, start=0, epoch=5))
        for epoch, sessions in ((4, 1), (5, 0)):
            await rig.bus.publish(subjects.RELEASE.at(verifier="v1"), VerifierRelease(session="s", epoch=epoch))
            await rig.ask()
            assert (await rig.status()).sessions == sessions


async def test_bad_items_are_refused_and_the_others_served():
    async with running() as rig:
        out_of_range, twice, again, good = await rig.ask(
            item(PROMPT, start=0, session="a", draft=[300]),
            item(PROMPT, start=0, session="b"),
            item(PROMPT, start=0, session="b"),
            item(PROMPT, start=0, session="c"),
        )
        assert out_of_range.error.code == "bad_token"
        assert again.error.code == "duplicate_item"
        assert twice.token == good.token == plain(1)[0]
        (empty,) = await rig.ask(item((), session="d"))
        assert empty.error.status == 400
        (long,) = await rig.ask(item([1] * 3000, start=0, session="e"))
        assert long.error.code == "context_length_exceeded"


async def test_a_failed_step_fails_its_session_and_no_room_only_waits():
    engine = SimulatedTarget(World(), cells=40)
    engine.fail_next("a")
    async with running(engine) as rig:
        failed, good = await rig.ask(item(PROMPT, start=0, session="a"), item(PROMPT, start=0, session="b"))
        assert (failed.error.status, failed.error.code) == (500, "step_failed")
        assert good.token == plain(1)[0]
        fits, full = await rig.ask(item(PROMPT, start=0, session="b"), item([*PROMPT] * 2, start=0, session="c"))
        assert fits.token == plain(1)[0]
        assert (full.error.status, full.error.code) == (503, "no_room")


async def test_an_engine_that_is_gone_fails_items_and_not_the_process():
    async with running() as rig:
        await rig.engine.close()
        (answer,) = await rig.ask(item(PROMPT, start=0))
        assert answer.error.code == "step_failed"


async def test_log_probabilities_of_every_decided_position():
    truth = plain(4)
    async with running(SimulatedTarget(World(floor=float("-inf")))) as rig:
        (answer,) = await rig.ask(item(PROMPT, start=0, draft=truth[:2], want="logprobs", logprobs=20))
        assert len(answer.logprobs) == 3
        assert [entry.top[0][0] for entry in answer.logprobs] == truth[:3]
        (none,) = await rig.ask(item([*PROMPT, *truth[:3]]))
        assert none.logprobs is None


async def test_a_probe_is_answered_while_a_step_runs_and_batches_wait_their_turn():
    async with running(SimulatedTarget(World(), Timing(base_ms=300))) as rig:
        slow = asyncio.create_task(rig.result(item(PROMPT, start=0)))
        await asyncio.sleep(0.02)
        behind = asyncio.create_task(rig.result(item(PROMPT, start=0, session="b")))
        await asyncio.sleep(0.02)
        assert isinstance(await rig.bus.request(subjects.PROBE.at(verifier="v1"), Probe(), timeout_s=0.1), Ack)
        assert not slow.done()
        assert (await rig.status()).queue == 1
        assert (await slow).step_ms >= 300
        assert (await behind).step_ms < 400


async def test_too_many_waiting_batches_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(module, "WAITING", 2)
    async with running(SimulatedTarget(World(), Timing(base_ms=200))) as rig:
        asked = [asyncio.create_task(rig.result(item(PROMPT, start=0, session=f"s{i}"))) for i in range(5)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        refused = [result for result in results if isinstance(result, RequestError)]
        assert len(refused) == 3
        assert all(isinstance(error, Unavailable) for error in refused)


async def test_malformed_batches_are_refused_by_name():
    async with running() as rig:
        with pytest.raises(RequestError):
            await rig.bus.request(subjects.VERIFY.at(verifier="v1"), Probe(), timeout_s=1)
        assert await rig.ask(item(PROMPT, start=0))


async def test_draining_is_told_at_once_and_survives_a_restart():
    store = MemoryStore()
    async with running(store=store) as rig:
        seen: list[str] = []

        async def on_status(received: Received) -> None:
            assert isinstance(received.message, VerifierStatus)
            seen.append(received.message.state)

        rig.service.spawn(rig.verifier._reporter.run(), "status")
        await rig.bus.subscribe(subjects.VERIFIER_STATUS.at(model="toy"), on_status, VerifierStatus)
        for undo, state in ((False, "draining"), (True, "ready")):
            request = DrainRequest(verifier="v1", undo=undo)
            await rig.bus.request(subjects.DRAIN_STATE.at(verifier="v1"), request, timeout_s=1)
            async with asyncio.timeout(0.5):
                while state not in seen[-1:]:
                    await asyncio.sleep(0.005)
    await store.set_draining("toy", "v1", True)
    async with running(store=store) as rig:
        assert (await rig.status()).state == "draining"
        assert (await rig.ask(item(PROMPT, start=0)))[0].token == plain(1)[0]


async def test_a_newcomer_is_told_the_status_at_once():
    """A batcher that has just started need not refuse sessions for the second until the next status."""
    async with running() as rig:
        seen = asyncio.Event()

        async def on_status(_received: Received) -> None:
            seen.set()

        rig.service.spawn(rig.verifier._reporter.run(), "status")
        await asyncio.sleep(0.05)
        await rig.bus.subscribe(subjects.VERIFIER_STATUS.at(model="toy"), on_status, VerifierStatus)
        await rig.bus.publish(subjects.STATUS_WANTED.at(model="toy"), StatusWanted())
        await asyncio.wait_for(seen.wait(), 0.5)


async def test_the_process_says_what_it_does_from_loading_to_the_end():
    bus, store = MemoryBus(), MemoryStore()
    settings = Settings.load(engine="simulated", model="toy", instance="v1", context_tokens=128)
    service = Service("verifier", settings, bus, store, store)
    states: list[VerifierStatus] = []

    async def on_status(received: Received) -> None:
        assert isinstance(received.message, VerifierStatus)
        states.append(received.message)

    await bus.subscribe(subjects.VERIFIER_STATUS.at(model="toy"), on_status, VerifierStatus)
    async with body(service):
        assert service.not_ready() == {}
        request = VerifyBatch(batch="b", items=(item(PROMPT, start=0),))
        asked = asyncio.create_task(bus.request(subjects.VERIFY.at(verifier="v1"), request, timeout_s=5))
        await asyncio.sleep(0)
    assert isinstance(await asked, VerifyResult)
    await service.stop()
    await bus.close()
    assert states[-1].state == "stopped"
    assert states[-1].context == 128
    assert states[-1].cells_total == 512
    assert states[-1].simulated
    assert states[-1].fingerprint == served_card(settings).fingerprint
    assert states[-1].steps == 1


async def test_a_simulated_engine_comes_from_its_file(tmp_path):
    file = tmp_path / "simulated.json"
    file.write_text('{"script": {"*": "hello"}, "base_ms": 1}')
    settings = Settings.load(engine="simulated", model="toy", simulated_file=file)
    engine = await load_target(settings, served_card(settings))
    assert engine.status().simulated
    await engine.close()
    with pytest.raises(SettingsError, match="PACELINE_ENGINE=llama"):
        await load_target(settings.model_copy(update={"engine": "llama"}), served_card(settings))
