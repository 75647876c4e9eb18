"""The target engine on vLLM. What a session holds, who makes room for whom, and what a failure leaves is decided by
what all engines share (paceline.engine_batch, paceline.kv_ledger); the model, the paged KV under it and the choices are
vLLM's, through services.verifier.vllm_core.

Ledgers count tokens; vLLM has KV in blocks, one or two more for each session than its tokens fill. So room never runs
out there first, and a session's last, partly filled block is its own: where prefixes are shared, the tokens that end in
such a block are fed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from paceline.coupling import Choice
from paceline.engine import EngineStatus, Failed, Outcome, Rule, TargetItem, TokenLogprob
from paceline.engine_batch import BatchEngine
from paceline.engine_ports import BatchedTarget, accept
from paceline.errors import EngineError, FatalError, ModelError, NoRoom
from paceline.forward_pass import Feed, Kept, Result, Segment, passes
from paceline.kv_ledger import Ledgers, MemoryOp, Share
from paceline.thread_runner import ThreadRunner
from paceline.wire import Sampling
from services.verifier.coupling_torch import Ask, Chosen
from services.verifier.vllm_work import LONGEST_DRAFT, Plan, Work, accepted

if TYPE_CHECKING:
    from services.verifier.vllm_core import Core

_PROBE = (1, 2, 3, 5, 8, 13, 21, 34)
_PROBE_TOKENS = 8
LEAST_CONTEXT = len(_PROBE) + _PROBE_TOKENS
NEAR_TIE = 0.15
"""Margin below which another batch shape may change a choice."""
_OUTPUTS = 512
"""Rows of one step that may want logits: a gigabyte at a vocabulary of 128,000 while they become float64."""


class VllmTarget(BatchedTarget):
    """The large model."""

    @classmethod
    async def load(
        cls,
        model: Path,
        *,
        context: int,
        cells: int | None = None,
        threads: int = 1,
        max_sessions: int = 32,
        vocabulary: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Self:
        """model: a folder with config.json and safetensors. context: longest session in tokens. cells: tokens of KV
        that all sessions share; None: what vLLM finds room for. vocabulary: ids that may be chosen; None: all that
        the model has. options: vLLM's engine arguments, by name. Raises ModelError."""
        context = min(context, cells or context)
        if context < LEAST_CONTEXT:
            raise ModelError(f"sessions of {context} tokens at most: the vllm engine takes {LEAST_CONTEXT} or more")
        plan = Plan(model, context, cells, max_sessions, threads, vocabulary=vocabulary, options=options or {})
        runner = ThreadRunner("vllm")
        try:
            loaded = await runner.run(partial(_load, plan), 0)
        except BaseException:
            await runner.close()
            raise
        ledgers = Ledgers(loaded.core.cells, max_sessions)
        longest = min(context, loaded.core.context, ledgers.total)
        engine = BatchEngine("vllm", loaded, loaded.forward, ledgers, runner, longest)
        return cls(engine, loaded)

    def __init__(self, engine: BatchEngine, model: VllmModel) -> None:
        super().__init__(engine)
        self._model = model

    @property
    def core(self) -> Core:
        """vLLM itself, for measurements and tests."""
        return self._model.core

    async def step(self, items: Sequence[TargetItem]) -> list[Outcome]:
        """Raises FatalError once the engine is dead. A chain is LONGEST_DRAFT tokens long at most."""
        fits = [item for item in items if len(item.draft) <= LONGEST_DRAFT]
        try:
            stepped = iter(await super().step(fits))
        finally:
            self._check_alive()
            self._forget_lost()
        return [next(stepped) if len(item.draft) <= LONGEST_DRAFT else _too_long(item) for item in items]

    def _forget_lost(self) -> None:
        """Whose KV had to go comes back by replay, chunk by chunk, and not in one step that all others wait for."""
        self.engine.between_steps(self._lose)

    def _lose(self) -> None:
        ledgers = self.engine.ledgers
        ledgers.lose(self.core.take_lost(range(ledgers.sequences)))

    def status(self) -> EngineStatus:
        """Raises FatalError once the engine is dead: who asks every second notices, work or not."""
        self._check_alive()
        return replace(super().status(), can_sleep=self.core.can_sleep, device=self.core.device)

    def _check_alive(self) -> None:
        if self.core.dead:
            raise FatalError(self.core.dead)

    async def sleep(self) -> None:
        try:
            await self.engine.runner.run(self.core.sleep, 0)
        except EngineError:
            raise
        except Exception as error:
            raise FatalError(f"vLLM was lost as it went to sleep: {error!r}") from error
        self._forget_lost()

    async def wake(self) -> None:
        try:
            await self.engine.runner.run(self._model.wake, 0)
        except FatalError:
            raise
        except Exception as error:
            raise FatalError(f"vLLM did not wake up: {error!r}") from error


def _load(plan: Plan) -> VllmModel:
    try:
        from services.verifier.vllm_core import Core
    except ImportError as error:
        raise ModelError(f"vLLM cannot be imported: {error}") from error
    try:
        return VllmModel(Core(plan))
    except ModelError:
        raise
    except Exception as error:  # of a library of many parts, of many kinds
        given = f" with the options {_shown(plan.options)}" if plan.options else ""
        raise ModelError(f"vLLM cannot serve {plan.model}{given}: {error!r}") from error


def _shown(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without what must not be in a log."""
    secret = ("token", "key", "password", "secret")
    return {name: "***" if name.endswith(secret) else value for name, value in options.items()}


class VllmModel:
    """A Model (paceline.forward_pass) that chooses by itself."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.vocabulary = core.vocabulary
        self._said: tuple[int, ...] = ()  # the first steps take longer, too, and no session should wait for them
        for _ in range(_PROBE_TOKENS):
            self._said = (*self._said, self._probe(self._said).tokens[-1])

    def _probe(self, draft: tuple[int, ...]) -> Chosen:
        """The choices along `draft` after a prompt of no meaning."""
        work = Work(-1, "probe", list(_PROBE), 0, Ask(Rule(Sampling(temperature=0), 0, len(_PROBE)), _PROBE, draft))
        self.core.run([work])
        self.core.forget(-1)
        assert work.chosen is not None
        return work.chosen

    def wake(self) -> None:
        self.core.wake()
        chosen = self._probe(self._said)
        taken = accepted(chosen.tokens, self._said)
        if taken < len(self._said) and not chosen.margins[taken] < NEAR_TIE:
            said = f"{taken} of {len(self._said)} tokens are what they were"
            raise FatalError(f"vLLM woke up with another model than it went to sleep with: {said}")

    def forward(self, ops: Sequence[MemoryOp], feeds: Sequence[Feed]) -> list[Result]:
        for op in ops:
            self._apply(op)
        results: list[Result] = [None] * len(feeds)
        for segments in passes(feeds, self.core.batch, _OUTPUTS):
            parts = _parts(feeds, [one for one in segments if not isinstance(results[one.feed], EngineError)])
            if parts:
                self._run(feeds, parts, results)
        return results

    def _apply(self, op: MemoryOp) -> None:
        if isinstance(op, Share):
            self.core.forget(op.target)  # it finds the blocks by their hash when it is fed
        else:
            self.core.cut(op.sequence, op.start)

    def _run(self, feeds: Sequence[Feed], parts: dict[int, Work], results: list[Result]) -> None:
        try:
            self.core.run(list(parts.values()))
        except EngineError as error:
            results[:] = [error if index in parts else result for index, result in enumerate(results)]
            self._check(error)
            return
        for index, work in parts.items():
            if not work.done:
                results[index] = NoRoom(f"vLLM had no KV block for {len(work.path)} tokens")
            elif work.chosen is not None:
                results[index] = _decided(_asked(feeds[index]), work.chosen)

    def _check(self, error: EngineError) -> None:
        """After a step that failed: may be the fault of what it held, or the device will never work again."""
        if self.core.dead:
            return
        try:
            self._probe(())
        except Exception:
            self.core.die(f"vLLM does not work any more: {error}")

    def close(self) -> None:
        self.core.close()


def _too_long(item: TargetItem) -> Failed:
    message = f"{len(item.draft)} drafted tokens are over the {LONGEST_DRAFT} of a step"
    return Failed(item.session, "step_failed", message)


def _parts(feeds: Sequence[Feed], segments: Sequence[Segment]) -> dict[int, Work]:
    """The work of a pass by feed: a feed's segments in it follow each other."""
    parts: dict[int, Work] = {}
    for segment in segments:
        feed = feeds[segment.feed]
        end = feed.at if segment.decides else segment.end
        known = parts.get(segment.feed)
        valid = known.valid if known else segment.start
        ask = _ask(feed) if segment.decides else None
        parts[segment.feed] = Work(feed.sequence, f"tenant {feed.tenant}", list(feed.path[:end]), valid, ask)
    return parts


def _ask(feed: Feed) -> Ask:
    item = _asked(feed)
    assert item.rule is not None
    return Ask(item.rule, feed.path[: feed.at], item.draft, item.logprobs)


def _asked(feed: Feed) -> TargetItem:
    assert feed.asked is not None
    return feed.asked


def _decided(item: TargetItem, chosen: Chosen) -> Kept:
    """A decision that cannot be made is the session's fault, not the pass's: its outcome is the error."""
    try:
        return accept(item, _choices(chosen))
    except EngineError as error:
        return Kept(error, 0, None)


def _choices(chosen: Chosen) -> Iterator[tuple[Choice, TokenLogprob | None]]:
    for j, (token, margin) in enumerate(zip(chosen.tokens, chosen.margins, strict=True)):
        if math.isnan(margin):
            raise EngineError("no score is finite: nothing can be chosen")
        yield Choice(token, margin), chosen.logprobs[j] if chosen.logprobs else None
