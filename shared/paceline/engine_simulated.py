"""Simulated engines, for tests and capacity planning: both ports over a World, in simulated step time.

They keep KV as token lists per sequence and check every position, and everything above that is the code of the real
engines, so a mistake in room, rollback or sharing shows in the text. Their status says that they are simulated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self, TypeVar

from paceline.coupling import Choice, mix
from paceline.engine import Failed, Guess, Outcome, Rule, TargetItem
from paceline.engine_batch import BatchEngine
from paceline.engine_ports import BatchedDraft, BatchedTarget
from paceline.errors import EngineError
from paceline.forward_pass import Logits, Row, forward
from paceline.kv_ledger import Ledgers
from paceline.simulated_world import Simulation, World, toy_card

__all__ = ["SimulatedDraft", "SimulatedTarget", "Simulation", "Timing", "World", "toy_card"]

T = TypeVar("T")
Mode = Literal["agree", "echo", "anti", "mix"]

_SALT = 0x5DEECE66D


@dataclass(frozen=True)
class Timing:
    """Roofline of a step: the weights are read once (memory_ms) or arithmetic takes longer, plus a fixed overhead."""

    base_ms: float = 0.0
    per_token_ms: float = 0.0
    memory_ms: float = 0.0

    def step_ms(self, tokens: int) -> float:
        return self.base_ms + max(self.memory_ms, self.per_token_ms * tokens)


class _TimedRunner:
    def __init__(self, timing: Timing) -> None:
        self._timing = timing

    async def run(self, work: Callable[[], T], tokens: int) -> T:
        result = work()
        await asyncio.sleep(self._timing.step_ms(tokens) / 1000 if tokens else 0)
        return result

    async def close(self) -> None:
        return None


class SimulatedMemory:
    """KV as token ids by sequence; logits from the World on what this KV holds."""

    batch = 1 << 20
    outputs = 1 << 20

    def __init__(self, world: World, sequences: int) -> None:
        self._world = world
        self.vocabulary = world.vocabulary
        self._kv: list[list[int]] = [[] for _ in range(sequences)]
        self._rows: list[Row] = []

    def sequence(self, number: int) -> list[int]:
        """The token ids under a sequence's KV."""
        return list(self._kv[number])

    def decode(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)
        for row in rows:
            kv = self._kv[row.sequence]
            if row.position != len(kv):
                raise EngineError(f"position {row.position} fed to a sequence of {len(kv)} tokens")
            kv.append(row.token)

    def logits(self, index: int, prompt_length: int) -> Logits:
        row = self._rows[index]
        if not row.logits:
            raise EngineError(f"row {index} was fed without wanting logits")
        return self._world.logits(self._kv[row.sequence][: row.position + 1], prompt_length)

    def remove(self, sequence: int, start: int) -> None:
        del self._kv[sequence][start:]

    def share(self, source: int, target: int, start: int, end: int) -> None:
        if len(self._kv[target]) != start or len(self._kv[source]) < end:
            raise EngineError(f"cannot share positions {start} to {end}")
        self._kv[target] += self._kv[source][start:end]

    def close(self) -> None:
        self._kv.clear()


def _engine(world: World, timing: Timing | None, ledgers: Ledgers, context: int, *, merge: bool) -> BatchEngine:
    memory = SimulatedMemory(world, ledgers.sequences)
    return BatchEngine(
        name="simulated",
        memory=memory,
        forward=partial(forward, memory),
        ledgers=ledgers,
        runner=_TimedRunner(timing or Timing()),
        context=min(context, ledgers.total),
        simulated=True,
        merge=merge,
    )


class SimulatedTarget(BatchedTarget):
    """cells, max_sessions: room, as in a real engine. grace_s: see Ledgers."""

    def __init__(
        self,
        world: World | None = None,
        timing: Timing | None = None,
        *,
        context: int = 2048,
        cells: int = 65536,
        max_sessions: int = 256,
        grace_s: float = 1.0,
    ) -> None:
        self.world = world or World()
        super().__init__(_engine(self.world, timing, Ledgers(cells, max_sessions, grace_s), context, merge=False))
        self._failures: dict[str | None, int] = {}

    @classmethod
    def of(cls, simulation: Simulation, *, context: int = 2048, cells: int = 65536, max_sessions: int = 256) -> Self:
        """The target that a settings' simulated_file describes."""
        timing = Timing(simulation.base_ms, simulation.per_token_ms, simulation.memory_ms)
        return cls(simulation.world, timing, context=context, cells=cells, max_sessions=max_sessions)

    def fail_next(self, session: str | None = None, times: int = 1) -> None:
        """For fault tests: the next `times` items of `session` (None: of anybody) fail with step_failed."""
        self._failures[session] = self._failures.get(session, 0) + times

    async def step(self, items: Sequence[TargetItem]) -> list[Outcome]:
        failed = {i: self._failure(item.session) for i, item in enumerate(items) if self._due(item.session)}
        done = iter(await super().step([item for i, item in enumerate(items) if i not in failed]))
        return [failed[i] if i in failed else next(done) for i in range(len(items))]

    def _due(self, session: str) -> bool:
        due = next((key for key in (session, None) if self._failures.get(key)), ())
        if due == ():
            return False
        self._failures[due] -= 1  # type: ignore[index]
        return True

    @staticmethod
    def _failure(session: str) -> Failed:
        return Failed(session, "step_failed", "a failure that a test asked for")


class SimulatedDraft(BatchedDraft):
    """Drafts for a World. mode: `agree` fits the target's choice with probability `acceptance`, decided by a hash of
    the path (so it is the same at every try); `echo` always fits; `anti` never does; `mix` is right, right, wrong."""

    def __init__(
        self,
        world: World | None = None,
        mode: Mode = "agree",
        acceptance: float = 0.8,
        timing: Timing | None = None,
        *,
        context: int = 2048,
        cells: int = 65536,
        max_sessions: int = 64,
        chunk: int = 256,
    ) -> None:
        self.world = world or World()
        self.mode: Mode = mode
        self.acceptance = acceptance
        ledgers = Ledgers(cells, max_sessions * self.max_paths, retained=0)
        engine = _engine(self.world, timing, ledgers, context, merge=True)
        super().__init__(engine, sessions=max_sessions, chunk=chunk)

    @classmethod
    def of(
        cls,
        simulation: Simulation,
        *,
        context: int = 2048,
        cells: int = 65536,
        max_sessions: int = 64,
        chunk: int = 256,
    ) -> Self:
        """The draft that a settings' simulated_file describes."""
        timing, room = Timing(simulation.draft_ms), {"cells": cells, "max_sessions": max_sessions, "chunk": chunk}
        return cls(simulation.world, simulation.mode, simulation.acceptance, timing, context=context, **room)

    def guessed(self, choice: Choice, logits: Logits, path: Sequence[int], rule: Rule) -> Guess:
        if self._fits(path, len(path) - rule.prompt_length):
            return Guess(choice.token, self.acceptance, choice.runners)
        wrong = choice.runners or (((choice.token + 1) % self.world.vocabulary, 0.0),)
        right = () if self.mode == "anti" else ((choice.token, 0.0),)
        return Guess(wrong[0][0], self.acceptance, right + wrong[1:])

    def _fits(self, path: Sequence[int], index: int) -> bool:
        if self.mode == "agree":
            return mix(self.world.context_seed(path) ^ _SALT) < self.acceptance * 2.0**64
        return self.mode == "echo" or (self.mode == "mix" and index % 3 != 2)
