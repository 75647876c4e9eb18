"""Draft state and session in simulated time: what the window, the cutting of blocks and the flush time are worth.

An event simulation of one session: the source drafts in `DRAFT_S` a token, messages take half a round trip, a verify
step takes FIRST_S + FURTHER_S a draft token. It uses the product's own states, only engines and links are made up.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count

import pytest

from paceline.draft_state import DraftState
from paceline.ends import Ends
from paceline.engine import Guess
from paceline.session import Session
from paceline.store import SessionRecord
from paceline.wire import Bounds, DraftBlock, Sampling, SessionOpen, Speculation, Timing, Verdict

DRAFT_S, FIRST_S, FURTHER_S = 0.010, 0.026, 0.003
PROMPT, LENGTH = 10, 300
ACCEPTANCE = 0.8


class Simulation:
    """`run` gives milliseconds per token; `steps` counts verify steps."""

    def __init__(self, speculation: Speculation, round_trip_s: float, seed: int) -> None:
        chance = random.Random(seed)
        total = PROMPT + LENGTH + 50
        self.truth = [chance.randrange(1, 1000) for _ in range(total)]
        self.right = [chance.random() < ACCEPTANCE for _ in range(total)]
        self.sure = [chance.betavariate(6, 1) if right else chance.betavariate(2, 2) for right in self.right]
        self.speculation, self.link_s = speculation, round_trip_s / 2
        opened = SessionOpen(model="m", fingerprint="f", tokens=tuple(self.truth[:PROMPT]), sampling=Sampling())
        record = SessionRecord(
            session="s",
            tenant="t",
            opened=opened,
            secret="",
            seed=1,
            prompt_length=PROMPT,
            max_tokens=LENGTH,
            epoch=1,
            tokens=opened.tokens,
        )
        self.session = Session(record, Ends(lambda _: b"", (), (), LENGTH), vocabulary=2000)
        self.state = DraftState(
            source="edge",
            session="s",
            connection=0,
            tokens=opened.tokens,
            speculation=speculation,
            bounds=Bounds(),
            limit=PROMPT + LENGTH,
            longest_path=10_000,
        )
        self.now = self.starved = 0.0
        self.steps = 0
        self.drafting = self.verifying = False
        self.echo: tuple[int, float] | None = None
        self.ended: float | None = None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def run(self) -> float:
        self.pump()
        self.step()
        while self.ended is None:
            self.now, _, event = heapq.heappop(self._queue)
            event()
        return 1000 * self.ended / LENGTH

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), event))

    def pump(self) -> None:
        for block in self.state.due(self.now):
            self.later(self.link_s, lambda block=block: self.arrive(block))
        if self.state.may_draft() and not self.drafting:
            self.drafting = True
            path, generation = self.state.path.tokens(), self.state.path.generation
            self.later(DRAFT_S, lambda: self.drafted(path, generation))
        pause = self.state.next_due(self.now)
        if pause is not None:
            self.later(pause + 1e-6, self.wake)

    def wake(self) -> None:
        if self.state.next_due(self.now) == 0:
            self.pump()

    def drafted(self, path: list[int], generation: int) -> None:
        at = len(path)
        agrees = path == self.truth[:at] and self.right[at]
        self.drafting = False
        self.state.pace.on_drafted(DRAFT_S)
        self.state.extend(Guess(self.truth[at] if agrees else 1001, self.sure[at]), generation, self.now)
        self.pump()

    def arrive(self, block: DraftBlock) -> None:
        self.session.offer(block)
        self.echo = self.echo or (block.t_sent, self.now)
        self.step()

    def step(self) -> None:
        if self.verifying or self.session.finish is not None:
            return
        patience = self.starved + 6 * self.link_s + 0.15 - self.now
        if not self.session.held and not self.speculation.fill and patience > 0:
            self.later(patience + 1e-6, self.step)
            return
        plan = self.session.plan(self.speculation.max_draft)
        self.verifying, self.steps = True, self.steps + 1
        seconds = FIRST_S + FURTHER_S * len(plan.tokens)
        timing = None
        if self.echo is not None:
            sent, came = self.echo
            timing = Timing(t_sent=sent, wait_ms=1000 * (self.now - came), step_ms=1000 * seconds)
            self.echo = None
        self.later(seconds, lambda: self.decided(plan, timing))

    def decided(self, plan, timing: Timing | None) -> None:
        accepted = 0
        while accepted < len(plan.tokens) and plan.tokens[accepted] == self.truth[plan.at + accepted]:
            accepted += 1
        commit = self.session.decide(plan, accepted, self.truth[plan.at + accepted])
        assert commit is not None
        self.verifying, self.starved = False, self.now
        verdict = Verdict(
            session="s",
            epoch=1,
            at=commit.at,
            tokens=commit.tokens,
            kinds=commit.kinds,
            seen=dict(self.session.seen),
            gap=self.session.take_gaps(),
            finish=commit.finish,
            timing=timing,
        )
        self.later(self.link_s, lambda: self.heard(verdict))
        self.step()

    def heard(self, verdict: Verdict) -> None:
        self.state.on_verdict(verdict, self.now)
        if verdict.finish is not None:
            self.ended = self.now
        self.pump()


def measured(round_trip_s: float, **speculation) -> tuple[float, float, Simulation]:
    """Mean ms and verify steps per token over a few seeds, and the last simulation."""
    simulations = [Simulation(Speculation(**speculation), round_trip_s, seed) for seed in range(4)]
    ms = sum(simulation.run() for simulation in simulations) / len(simulations)
    for simulation in simulations:
        assert simulation.state.committed == simulation.truth[: PROMPT + LENGTH]
    steps = sum(simulation.steps for simulation in simulations) / len(simulations) / LENGTH
    return ms, steps, simulations[-1]


@pytest.mark.parametrize("round_trip_s", [0.06, 0.1])
def test_a_deep_window_beats_the_best_synchronous_block_with_few_steps(round_trip_s):
    best = min(measured(round_trip_s, depth=1, fill=False, max_draft=size)[0] for size in (4, 6, 9))
    deep, steps, last = measured(round_trip_s, fill=False)
    assert deep <= 0.8 * best
    assert steps <= 0.45
    assert last.session.counters.duplicate == 0
    assert (last.state.counts.resends, last.state.counts.incarnations) == (0, 1)


def test_filled_bubbles_are_no_slower_than_cloud_only():
    ms, _, _ = measured(0.1)
    assert ms <= 1.05 * 1000 * FIRST_S


def test_the_window_covers_the_round_trip():
    _, _, last = measured(0.1, fill=False)
    pace = last.state.pace
    assert pace.round_trip_s == pytest.approx(0.1, abs=0.01)
    assert 12 + 8 <= pace.window <= 16 + 8
