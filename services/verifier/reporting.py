"""What the verifier tells of itself: its status on the bus once a second and on a change, readiness, and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Literal

import structlog

from paceline import subjects, telemetry
from paceline.engine import EngineStatus
from paceline.errors import BusError, FatalError
from paceline.model_card import ModelCard
from paceline.service import Service
from paceline.wire import StepTable, VerifierStatus
from services.verifier.load import Load

log = structlog.get_logger("verifier")

State = Literal["loading", "ready", "draining", "sleeping", "stopped", "failed"]
STATUS_S = 1.0
STUCK_S = 10.0
STUCK_STEPS = 5
"""A step that takes longer than both, seconds and slow steps, makes the process fail, until it ends: whoever has work
here takes it elsewhere."""


class Reporter:
    """`engine` gives the engine's status, None while the model loads; `waiting` the batches that wait; `curve` what is
    known of step times."""

    def __init__(self, service: Service, card: ModelCard) -> None:
        self._service = service
        self._card = card
        self._changed = asyncio.Event()
        self.state: State = "loading"
        self._detail = ""
        self._slowest_s = 0.0
        self.load = Load(time.monotonic())
        self.engine: Callable[[], EngineStatus] | None = None
        self.waiting: Callable[[], int] = lambda: 0
        self.curve: Callable[[], StepTable | None] = lambda: None

    def loading(self, step: str) -> None:
        """What the load is at, for the next status. May be called in another thread."""
        log.info("loading model", step=step)
        self._detail = step

    def enter(self, state: State, detail: str = "") -> None:
        """A new state, told at once."""
        log.info("state", state=state, **({"detail": detail} if detail else {}))
        self.state, self._detail = state, detail
        self._watch()
        self._changed.set()

    def tell(self) -> None:
        """The status, at once."""
        self._changed.set()

    async def run(self) -> None:
        while True:
            self._changed.clear()
            self._watch()
            try:
                await self.publish()
            except FatalError as error:
                await self.fail(error)
                raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_S):  # wait_for may swallow a cancellation on Python 3.11
                    await self._changed.wait()

    async def fail(self, error: FatalError) -> None:
        """The engine is dead, and with it this process in a moment: whoever waits for it need not wait any longer."""
        self.engine = None
        self.enter("failed", str(error))
        await self.publish()

    async def publish(self) -> None:
        try:
            await self._service.bus.publish(subjects.VERIFIER_STATUS.at(model=self._card.model), self.status())
        except BusError as error:
            log.debug("status not sent", error=str(error))

    def step_done(self, items: int, tokens: int, seconds: float) -> None:
        metrics = self._service.metrics
        metrics.add(telemetry.VERIFY_STEPS)
        metrics.observe(telemetry.STEP_ITEMS, items)
        metrics.observe(telemetry.STEP_TOKENS, tokens)
        metrics.observe(telemetry.STEP_SECONDS, seconds)

    def _watch(self) -> None:
        stuck = self._stuck()
        if self.state == "loading":
            self._service.set_ready("engine", False, "the model is loading")
        elif self.state in ("sleeping", "failed"):
            self._service.set_ready("engine", False, self._detail or "it sleeps")
        else:
            self._service.set_ready("engine", not stuck, stuck)

    def _stuck(self) -> str:
        running_s = self.load.running_for(time.monotonic())
        if running_s < max(STUCK_S, STUCK_STEPS * self._slowest_s):
            return ""
        return f"a step has been running for {running_s:.0f} s"

    def status(self) -> VerifierStatus:
        loading = EngineStatus(
            engine=self._service.settings.engine, simulated=self._card.simulated, context=self._card.context,
            cells_total=0, cells_used=0, sessions=0,
        )  # fmt: skip
        engine = self.engine() if self.engine is not None else loading
        self._measure(engine)
        self._slowest_s = max(engine.step_ms.values(), default=0.0) / 1000
        stuck = self._stuck()
        return VerifierStatus(
            verifier=self._service.instance,
            model=self._card.model,
            fingerprint=self._card.fingerprint,
            engine=engine.engine,
            simulated=engine.simulated,
            state="failed" if stuck else self.state,
            context=engine.context,
            cells_total=engine.cells_total,
            cells_used=engine.cells_used,
            sessions=engine.sessions,
            busy=round(self.load.share(time.monotonic()), 3),
            queue=self.waiting(),
            steps=self.load.steps,
            step_tokens=self.load.step_tokens,
            curve=self.curve(),
            step_ms={tokens: round(ms, 3) for tokens, ms in engine.step_ms.items()},
            can_sleep=engine.can_sleep,
            detail=self._detail or stuck,
            t_sent=time.time(),
        )

    def _measure(self, engine: EngineStatus) -> None:
        metrics = self._service.metrics
        metrics.set(telemetry.KV_CELLS, engine.cells_total, state="total")
        metrics.set(telemetry.KV_CELLS, engine.cells_used, state="used")
        metrics.set(telemetry.SESSIONS, engine.sessions, state="live")
