"""Measures the target on vLLM against vLLM alone: `python -m services.verifier.vllm_measure`, in vLLM's environment.

The model is that of PACELINE_MODEL. Both engines live in this process, with the same threads, and take turns; the text
that is verified is what the model says itself, so that every draft fits and all choices are made. JSON on standard
output, for `python -m loadgen vllm`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams

from paceline.engine import Decided, Rule, TargetItem
from paceline.served_card import served_card
from paceline.settings import Settings
from paceline.wire import Sampling
from services.verifier import vllm_core
from services.verifier.engine_vllm import VllmTarget
from services.verifier.engines import weights_folder
from services.verifier.vllm_work import Plan

TEXT = 40
"""Tokens after each prompt: what is decoded, and what drafts are cut from."""
DRAFTS = (0, 1, 2, 4, 8, 16)
PROMPTS_FROM = (1000, 40_000)
"""Token ids that prompts are drawn from."""


@dataclass(frozen=True)
class Case:
    sessions: int
    context: int
    temperature: float


@dataclass
class Times:
    """Milliseconds of each step. inside: of it in vLLM's worker, choices with it; choices: those alone."""

    whole: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    choices: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        port = [whole - inside for whole, inside in zip(self.whole, self.inside, strict=True)]
        return {
            "ms": statistics.median(self.whole),
            "spread": [min(self.whole), max(self.whole)],
            "port_ms": statistics.median(port),
            "choice_ms": statistics.median(self.choices),
            "steps": len(self.whole),
        }


class Clocks:
    """Adds up the time spent in some calls."""

    def __init__(self, target: VllmTarget) -> None:
        self.inside = self.choices = 0.0
        executor = target.core.engine.model_executor
        for owner, name, clock in (
            (executor, "execute_model", "inside"),
            (executor, "sample_tokens", "inside"),
            (vllm_core, "choose_rows", "choices"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), clock))

    def _timed(self, call: Callable[..., Any], clock: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                setattr(self, clock, getattr(self, clock) + 1000 * (time.perf_counter() - started))

        return timed

    @contextmanager
    def step(self, times: Times) -> Iterator[None]:
        self.inside = self.choices = 0.0
        started = time.perf_counter()
        yield
        times.whole.append(1000 * (time.perf_counter() - started))
        times.inside.append(self.inside)
        times.choices.append(self.choices)


def prompts_of(case: Case) -> list[tuple[int, ...]]:
    drawn = random.Random(case.context)
    return [tuple(drawn.randrange(*PROMPTS_FROM) for _ in range(case.context)) for _ in range(case.sessions)]


# --- vLLM alone ---


class Stock:
    """vLLM with the same arguments and none of our classes, decoding."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(plan.threads)
        self.llm = LLM(**vllm_core.plain_arguments(plan))
        self.named = 0

    def steps(self, case: Case) -> list[float]:
        """Milliseconds of each step in which all sessions decode."""
        engine = self.llm.llm_engine
        sampling = SamplingParams(
            temperature=case.temperature, max_tokens=TEXT, ignore_eos=True, detokenize=False, seed=1
        )
        for prompt in prompts_of(case):
            self.named += 1
            engine.add_request(str(self.named), {"prompt_token_ids": list(prompt)}, sampling)
        times = []
        while engine.has_unfinished_requests():
            started = time.perf_counter()
            engine.step()
            times.append(1000 * (time.perf_counter() - started))
        return times[len(times) - TEXT + 2 : -1]  # the first ones read prompts, the last one may be of few

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


# --- the target engine ---


class Ours:
    def __init__(self, target: VllmTarget) -> None:
        self.target, self.clocks, self.opened = target, Clocks(target), 0
        self.texts: dict[Case, list[tuple[int, ...]]] = {}

    async def steps(self, case: Case, draft: int, times: Times) -> None:
        """Along TEXT tokens of each session, `draft` of them offered with each step."""
        prompts, texts = prompts_of(case), self.texts.get(case)
        names = [f"{self.opened}-{i}" for i in range(case.sessions)]
        self.opened += 1
        rules = [Rule(Sampling(temperature=case.temperature), 17 + i, case.context) for i in range(case.sessions)]
        for name, prompt in zip(names, prompts, strict=True):
            await self.target.step([TargetItem(name, "t", case.context, 0, prompt)])
        told: list[list[int]] = [[] for _ in names]
        while len(told[0]) + draft + 1 <= TEXT:
            done = len(told[0])
            items = [
                TargetItem(
                    name, "t", case.context + done, draft=texts[i][done : done + draft] if texts else (), rule=rules[i]
                )
                for i, name in enumerate(names)
            ]
            with self.clocks.step(times):
                outcomes = await self.target.step(items)
            for i, outcome in enumerate(outcomes):
                assert isinstance(outcome, Decided), outcome
                told[i] += [*items[i].draft[: outcome.accepted], outcome.token]
            if len({len(text) for text in told}) > 1:  # a near tie in another batch shape
                break
        for name in names:
            self.target.release(name)
        if texts is None:
            self.texts[case] = [tuple(text) for text in told]


async def measure(plan: Plan, cases: Sequence[Case], rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    say("loading the model twice")
    stock = Stock(plan)
    target = await VllmTarget.load(
        plan.model, context=plan.context, cells=plan.cells, threads=plan.threads, max_sessions=plan.sessions,
        options=plan.options,
    )  # fmt: skip
    ours, rows = Ours(target), []
    for case in cases:
        say(f"{case.sessions} sessions, context {case.context}, temperature {case.temperature:g}")
        alone: list[float] = []
        stock.steps(case)  # its prompts, and ours, are known from here on
        await ours.steps(case, 0, Times())
        times = {draft: Times() for draft in DRAFTS}
        for _ in range(rounds):
            alone += stock.steps(case)
            for draft in DRAFTS:
                await ours.steps(case, draft, times[draft])
        plain, alone_ms = statistics.median(times[0].whole), statistics.median(alone)
        for draft in DRAFTS:
            figures = times[draft].figures()
            compared = {"over_plain": figures["ms"] / plain, "vllm_ms": alone_ms, "over_vllm": plain / alone_ms}
            rows.append({**asdict(case), "draft": draft, **figures, **compared})
    stock.close()
    await target.close()
    return {"rows": rows, "vllm": vllm.__version__, "torch": torch.__version__, "threads": plan.threads}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.verifier.vllm_measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--contexts", type=int, nargs="+", default=[200])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    given = parser.parse_args()
    settings = Settings.load(engine="vllm")
    most = max(given.sessions)
    longest = max(given.contexts) + TEXT + max(DRAFTS)
    model = asyncio.run(weights_folder(settings, served_card(settings)))
    plan = Plan(model, longest, 4 * most * longest, 4 * most, settings.threads, options=settings.vllm_options)
    cases = [
        Case(sessions, context, temperature)
        for context in given.contexts
        for sessions in given.sessions
        for temperature in given.temperatures
    ]
    result = asyncio.run(measure(plan, cases, given.rounds, _say))
    sys.stdout.write(f"\n{json.dumps(result)}\n")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
