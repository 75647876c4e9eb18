"""What an operator who drains a verifier is told."""

from __future__ import annotations

import time

import pytest
from gateway_kit import verifier_status
from msgspec.structs import replace

from paceline import subjects
from paceline.bus import Received
from paceline.bus_memory import MemoryBus
from paceline.errors import BadRequest, NotFound, RequestError, Unavailable
from paceline.service import Service
from paceline.settings import Settings
from paceline.store_memory import MemoryStore
from paceline.wire import Ack, DrainReport, DrainRequest, SleepRequest, VerifierStatus
from services.migrator.migrator import Migrator


@pytest.mark.parametrize(
    ("verifier", "undo", "kind", "code", "param"),
    [
        ("nobody", False, NotFound, "unknown_verifier", "verifier"),
        ("nobody", True, NotFound, "unknown_verifier", "verifier"),
        ("v1", False, Unavailable, "unavailable", None),
    ],
)
async def test_a_drain_that_cannot_be_is_refused(
    verifier: str, undo: bool, kind: type[RequestError], code: str, param: str | None
) -> None:
    bus, store = MemoryBus(), MemoryStore()
    service = Service("migrator", Settings.of(model="toy", engine="simulated"), bus, store, store)
    migrator = Migrator(service)
    await migrator.subscribe()
    await bus.publish(subjects.VERIFIER_STATUS.at(model="toy"), replace(verifier_status(), t_sent=time.time()))
    with pytest.raises(kind) as refused:
        await bus.request(subjects.DRAIN.at(), DrainRequest(verifier=verifier, undo=undo), timeout_s=3)
    assert (refused.value.code, refused.value.param) == (code, param)
    await service.stop()
    await bus.close()
    assert service.failure is None


async def test_a_drained_verifier_sleeps_and_is_woken_before_it_takes_sessions() -> None:
    bus, store = MemoryBus(), MemoryStore()
    service = Service("migrator", Settings.of(model="toy", engine="simulated"), bus, store, store)
    migrator = Migrator(service)
    await migrator.subscribe()
    told: list[DrainRequest | SleepRequest] = []

    async def on_request(received: Received) -> None:
        assert isinstance(received.message, DrainRequest | SleepRequest)
        told.append(received.message)
        assert received.respond is not None
        await received.respond(Ack())

    await bus.subscribe(subjects.DRAIN_STATE.at(verifier="v1"), on_request, DrainRequest)
    await bus.subscribe(subjects.SLEEP.at(verifier="v1"), on_request, SleepRequest)

    async def hear(name: str, **fields: object) -> None:
        status = replace(verifier_status(), verifier=name, t_sent=time.time(), **fields)
        assert isinstance(status, VerifierStatus)
        await bus.publish(subjects.VERIFIER_STATUS.at(model="toy"), status)

    async def ask(**fields: bool) -> DrainReport:
        answer = await bus.request(subjects.DRAIN.at(), DrainRequest(verifier="v1", **fields), timeout_s=5)
        assert isinstance(answer, DrainReport)
        return answer

    await hear("v2")
    await hear("v1")
    with pytest.raises(BadRequest, match="cannot sleep") as refused:
        await ask(sleep=True)
    assert (refused.value.code, refused.value.param) == ("cannot_sleep", "sleep")
    await hear("v1", can_sleep=True)
    with pytest.raises(BadRequest, match="not both"):
        await ask(sleep=True, undo=True)
    assert told == []
    assert (await ask(sleep=True)).asleep
    assert told == [DrainRequest(verifier="v1", sleep=True), SleepRequest()]
    await hear("v1", can_sleep=True, state="sleeping")
    assert not (await ask(undo=True)).asleep
    assert told[2:] == [SleepRequest(wake=True), DrainRequest(verifier="v1", undo=True)]
    assert await store.draining("toy") == set()
    await service.stop()
    await bus.close()
    assert service.failure is None
