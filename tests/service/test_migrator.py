"""What an operator who drains a verifier is told."""

from __future__ import annotations

import time

import pytest
from gateway_kit import verifier_status
from msgspec.structs import replace

from paceline import subjects
from paceline.bus_memory import MemoryBus
from paceline.errors import NotFound, RequestError, Unavailable
from paceline.service import Service
from paceline.settings import Settings
from paceline.store_memory import MemoryStore
from paceline.wire import DrainRequest
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
