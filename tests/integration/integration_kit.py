"""A stack of real processes on a simulated engine that is slow enough to break things under a running stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from edge_client.client import EdgeClient, Request
from edge_client.events import Committed, Finished
from paceline.engine_simulated import SimulatedDraft, toy_card
from paceline.simulated_world import Simulation
from paceline.stack import LocalStack, StackOptions
from paceline.wire import Sampling, Speculation

STEP_MS = 15
PROMPT = [{"role": "user", "content": "tell me something long"}]
Fault = Callable[[LocalStack], Awaitable[object]]


def simulation_file(folder: Path) -> Path:
    path = folder / "simulation.json"
    path.write_text(json.dumps({"acceptance": 0.8, "base_ms": STEP_MS, "per_token_ms": 0.5, "draft_ms": 3}))
    return path


def options(folder: Path, **counts: int) -> StackOptions:
    settings = {"model": "toy", "engine": "simulated", "simulated_file": str(simulation_file(folder))}
    return StackOptions(root=folder, settings=settings, counts=counts, ready_s=60)


@asynccontextmanager
async def edge(stack: LocalStack, folder: Path) -> AsyncIterator[EdgeClient]:
    engine = SimulatedDraft.of(Simulation.load(folder / "simulation.json"))
    try:
        async with EdgeClient.connect(stack.gateway_url, stack.key, card=toy_card(), engine=engine) as client:
            yield client
    finally:
        await engine.close()


class Answer:
    """What one client saw: every token with its position, and how it ended."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.kinds = ""
        self.finish = ""
        self.events: list[str] = []
        self._start: int | None = None

    def take(self, event: object) -> None:
        self.events.append(type(event).__name__)
        if isinstance(event, Committed):
            self._start = event.at if self._start is None else self._start
            assert event.at == self._start + len(self.tokens), "a gap or a double"
            self.tokens.extend(event.tokens)
            self.text += event.text
            self.kinds += event.kinds
        elif isinstance(event, Finished):
            assert event.error is None, event.error
            self.finish = event.finish


def request(
    client: EdgeClient, tokens: int, speculation: Speculation | None = None, temperature: float = 0.0
) -> Request:
    return Request(
        tokens=client.chat(PROMPT), sampling=Sampling(temperature=temperature), max_tokens=tokens, seed=7,
        speculation=speculation or Speculation(),
    )  # fmt: skip


async def answer(
    client: EdgeClient, asked: Request, *, fault: Callable[[], Awaitable[object]] | None = None, after: int = 30
) -> Answer:
    """The whole answer; `fault` starts when `after` tokens have come, and the stream is read meanwhile."""
    seen, running = Answer(), None
    async for event in client.generate(asked):
        seen.take(event)
        if fault is not None and running is None and len(seen.tokens) >= after:
            running = asyncio.ensure_future(fault())
    if running is not None:
        await running
    return seen
