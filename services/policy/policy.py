"""The slow loop: watch verifiers, batchers and drafters, decide once a second, publish. Never in the request path."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog
from msgspec.structs import replace

from paceline import subjects, wire
from paceline.bus import Received
from paceline.service import Service
from services.policy.rules import STATUS_TTL_S, Rules

log = structlog.get_logger("policy")

PERIOD_S = 1.0
FORGET_S = 60.0
"""A process that was silent this long is no longer listed."""

Status = TypeVar("Status", wire.VerifierStatus, wire.BatcherStatus, wire.DrafterStatus)


class Policy:
    """Keeps the last status of every process of one model."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.rules = Rules(service.settings.model)
        self.verifiers: dict[str, wire.VerifierStatus] = {}
        self.batchers: dict[str, wire.BatcherStatus] = {}
        self.drafters: dict[str, wire.DrafterStatus] = {}

    async def subscribe(self) -> None:
        bus, model = self._service.bus, self._service.settings.model
        for subject in (subjects.VERIFIER_STATUS, subjects.BATCHER_STATUS, subjects.DRAFTER_STATUS):
            await bus.subscribe(subject.at(model=model), self._on_status, *subject.carries)
        system = subjects.SYSTEM
        await bus.subscribe(system.at(), self._on_query, *system.carries, queue=system.queue)

    async def run(self) -> None:
        while True:
            await self.tick(time.time())
            await asyncio.sleep(PERIOD_S)

    async def tick(self, now: float) -> wire.PolicyDecision:
        """One look and one decision, published even when unchanged: a batcher that just started needs it."""
        self._forget(now)
        before = self.rules.version
        decision = self.rules.decide(self.verifiers.values(), self.batchers.values(), now)
        if decision.version != before:
            log.info("decision", version=decision.version, fill=decision.fill, window_cap=decision.window_cap,
                     admit=decision.admit, reasons=decision.reasons)  # fmt: skip
        await self._service.bus.publish(subjects.POLICY.at(model=decision.model), decision)
        return decision

    def _forget(self, now: float) -> None:
        for table in (self.verifiers, self.batchers, self.drafters):
            for name in [name for name, status in table.items() if now - status.t_sent > FORGET_S]:
                del table[name]

    async def _on_status(self, received: Received) -> None:
        message = received.message
        if isinstance(message, wire.VerifierStatus):
            self.verifiers[message.verifier] = message
        elif isinstance(message, wire.BatcherStatus):
            self.batchers[message.batcher] = message
        elif isinstance(message, wire.DrafterStatus):
            self.drafters[message.drafter] = message

    async def _on_query(self, received: Received) -> None:
        if received.respond is not None:
            await received.respond(self.report(time.time()))

    def report(self, now: float) -> wire.SystemReport:
        """With `silent_s` set where the last status is too old for the rules: that process may be dead."""
        return wire.SystemReport(
            verifiers=tuple(_dated(status, now) for status in self.verifiers.values()),
            batchers=tuple(_dated(status, now) for status in self.batchers.values()),
            drafters=tuple(_dated(status, now) for status in self.drafters.values()),
            decisions=(self.rules.last,) if self.rules.last else (),
        )


def _dated(status: Status, now: float) -> Status:
    age = now - status.t_sent
    return replace(status, silent_s=round(age, 1)) if age > STATUS_TTL_S else status


@asynccontextmanager
async def body(service: Service) -> AsyncIterator[None]:
    policy = Policy(service)
    await policy.subscribe()
    task = service.spawn(policy.run(), "policy-loop")
    service.set_ready("policy", True)
    try:
        yield
    finally:
        task.cancel()
