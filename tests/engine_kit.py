"""Engines for tests, real and simulated behind one face, and plain loops that drive them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pytest

from paceline.engine import Decided, Failed, Fed, Outcome, Rule, TargetItem
from paceline.engine_ports import BatchedDraft, BatchedTarget
from paceline.engine_simulated import SimulatedDraft, SimulatedTarget
from paceline.errors import EngineError
from paceline.forward_pass import Row
from paceline.wire import Sampling

TOLERANCE = 0.15
"""Largest margin at which a real engine may choose differently in another batch shape (raw logits, T = 0)."""

LENGTH = 24
"""Tokens of a text long enough for a few blocks."""
STORY = "Once upon a time, in a small village by the sea, there lived a fisherman who had never caught a fish. "

Wrong = Callable[[int], bool]


class Faults(Protocol):
    """Ways in which a target's model can fail, for as long as the patch lasts."""

    def no_choice(self, patch: pytest.MonkeyPatch, target: BatchedTarget, rows: int) -> None:
        """The logits of the first item of a pass, which feeds `rows` tokens, are no numbers."""
        ...

    def failing_pass(self, patch: pytest.MonkeyPatch, target: BatchedTarget, poison: int) -> None:
        """A pass that feeds the token `poison` fails when a part of it is in memory."""
        ...

    def broken(self, patch: pytest.MonkeyPatch, target: BatchedTarget) -> None:
        """The engine divides by zero where it would choose."""
        ...


class MemoryFaults:
    """Of engines over a paceline.forward_pass.Memory."""

    def no_choice(self, patch: pytest.MonkeyPatch, target: BatchedTarget, rows: int) -> None:
        memory = target.engine.memory
        real = memory.logits
        patch.setattr(memory, "logits", lambda i, n: real(i, n) * float("nan") if i < rows else real(i, n))

    def failing_pass(self, patch: pytest.MonkeyPatch, target: BatchedTarget, poison: int) -> None:
        memory = target.engine.memory
        real = memory.decode

        def decode(rows: Sequence[Row]) -> None:
            real(rows[: len(rows) // 2])  # what was in memory before the failure stays there
            if any(row.token == poison for row in rows):
                raise EngineError("made to fail")
            for row in reversed(rows[: len(rows) // 2]):
                memory.remove(row.sequence, row.position)
            real(rows)

        patch.setattr(memory, "decode", decode)

    def broken(self, patch: pytest.MonkeyPatch, target: BatchedTarget) -> None:
        patch.setattr(target.engine.memory, "logits", lambda _index, _length: 1 // 0)


@dataclass
class Kit:
    """What a contract test needs of one kind of engine. `exact`: batch shape does not touch the logits at all."""

    exact: bool
    make_target: Callable[..., Awaitable[BatchedTarget]]
    make_draft: Callable[..., Awaitable[BatchedDraft]]
    encode: Callable[[str], list[int]]
    faults: Faults = field(default_factory=MemoryFaults)
    opened: list[BatchedTarget | BatchedDraft] = field(default_factory=list)

    async def target(self, **room: int) -> BatchedTarget:
        target = await self.make_target(**room)
        self.opened.append(target)
        return target

    async def draft(self, **room: int) -> BatchedDraft:
        draft = await self.make_draft(**room)
        self.opened.append(draft)
        return draft

    async def close(self) -> None:
        for engine in self.opened:
            await engine.close()


async def simulated_kit() -> Kit:
    """Tokens are bytes."""

    async def target(**room: int) -> BatchedTarget:
        return SimulatedTarget(**room)

    async def draft(**room: int) -> SimulatedDraft:
        return SimulatedDraft(**room)

    return Kit(True, target, draft, lambda text: list(text.encode()))


async def llama_kit() -> Kit:
    """With the embedded model pair."""
    from paceline import models
    from paceline.engine_llama import LlamaDraft, LlamaTarget
    from paceline.llama_context import LlamaVocab
    from paceline.settings import cache_dir

    pulled = await asyncio.to_thread(models.pull, "smollm2", cache_dir() / "models")

    async def target(**room: int) -> LlamaTarget:
        return await LlamaTarget.load(pulled.target, **{"cells": 2048, "max_sessions": 16, **room})

    async def draft(**room: int) -> LlamaDraft:
        return await LlamaDraft.load(pulled.draft, **{"cells": 2048, **room})

    def encode(text: str) -> list[int]:
        with LlamaVocab(pulled.target) as vocabulary:
            return vocabulary.tokenize(text.encode())

    return Kit(False, target, draft, encode)


@dataclass
class Text:
    """tokens: the completion; margins: one for each; steps: verify steps that it took."""

    tokens: list[int]
    margins: list[float]
    steps: int = 0


def rule_for(prompt: Sequence[int], temperature: float = 0.0, **fields: object) -> Rule:
    return Rule(Sampling(temperature=temperature, **fields), seed=17, prompt_length=len(prompt))


async def one(target: BatchedTarget, item: TargetItem) -> Outcome:
    (outcome,) = await target.step([item])
    return outcome


async def feed(target: BatchedTarget, session: str, tokens: Sequence[int], tenant: str = "t", chunk: int = 256) -> None:
    """Prefill by chunks."""
    for start in range(0, len(tokens), chunk):
        part = tuple(tokens[start : start + chunk])
        outcome = await one(target, TargetItem(session, tenant, len(tokens), start, part))
        assert isinstance(outcome, Fed), outcome


async def plain(
    target: BatchedTarget, session: str, prompt: Sequence[int], rule: Rule, length: int, tenant: str = "t"
) -> Text:
    return await generate(target, session, prompt, rule, length, tenant=tenant)


async def generate(
    target: BatchedTarget,
    session: str,
    prompt: Sequence[int],
    rule: Rule,
    length: int,
    chains: Callable[[list[int]], Sequence[int]] = lambda _: (),
    tenant: str = "t",
) -> Text:
    """`length` tokens after the prompt; `chains` gives the draft after what is committed so far."""
    await feed(target, session, prompt, tenant)
    committed, text = list(prompt), Text([], [])
    while len(text.tokens) < length:
        draft = tuple(chains(committed))[: length - len(text.tokens) - 1]
        outcome = await one(target, TargetItem(session, tenant, len(committed), draft=draft, rule=rule))
        assert isinstance(outcome, Decided), outcome
        committed += [*draft[: outcome.accepted], outcome.token]
        text.tokens += [*draft[: outcome.accepted], outcome.token]
        text.margins += outcome.margins
        text.steps += 1
        assert target.held(session) == tuple(committed)
    return text


def drafts_of(text: Sequence[int], prompt: Sequence[int], k: int, wrong: Wrong) -> Callable[[list[int]], list[int]]:
    """Drafts of k tokens out of a known text, with another token where `wrong` says so of the output position."""

    def chains(committed: list[int]) -> list[int]:
        start = len(committed) - len(prompt)
        return [token + wrong(start + i) for i, token in enumerate(text[start : start + k])]

    return chains


def assert_same(kit: Kit, found: Text, expected: Text) -> None:
    """Equal, but for a first difference at a near tie of a real engine."""
    differs = [i for i, (a, b) in enumerate(zip(found.tokens, expected.tokens, strict=True)) if a != b]
    if differs:
        assert not kit.exact
        assert expected.margins[differs[0]] < TOLERANCE


def only_decided(outcomes: Sequence[object]) -> list[Decided]:
    """Fails where one is anything else."""
    assert all(isinstance(outcome, Decided) for outcome in outcomes), outcomes
    return [outcome for outcome in outcomes if isinstance(outcome, Decided)]


def assert_failed(outcome: Outcome, code: str) -> None:
    assert isinstance(outcome, Failed)
    assert outcome.code == code, outcome
