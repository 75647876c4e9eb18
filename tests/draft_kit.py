"""One session in simulated time: the product's draft state, session, choice of the batch and fill rule, around a draft
model, a target and a link that are made up.

The numbers of `MACHINE` were measured with a 135M pair on one CPU core each; how sure a draft is and how often it is
right go together as they did there.
"""

from __future__ import annotations

import heapq
import math
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from paceline.batch_choice import Want, choose
from paceline.draft_plan import Reason
from paceline.draft_state import DraftPass, DraftState
from paceline.ends import Ends
from paceline.engine import Guess
from paceline.fill_rule import Arrivals, worth_of_filling
from paceline.going_rate import GoingRate
from paceline.session import Plan, Session
from paceline.step_curve import StepTimes
from paceline.store import SessionRecord
from paceline.wire import Bounds, DraftBlock, Sampling, SessionOpen, Speculation, Timing, Verdict, encode_wan

PROMPT = 10
FRAME_BYTES = 6
"""Header and mask of a WebSocket frame from a client."""
GAPS = (
    (0.12, 0.38, 0.12), (0.37, 0.48, 0.12), (0.75, 0.50, 0.17), (1.25, 0.77, 0.13), (1.75, 0.67, 0.08),
    (2.5, 0.94, 0.14), (3.5, 0.96, 0.07), (6.0, 0.99, 0.17),
)  # fmt: skip
"""Gap of the best two scores, acceptance there, share of such positions."""
CONFIDENCES = (0.22, 0.28, 0.34, 0.40, 0.47, 0.62, 0.80, 0.93)
FURTHER_GAPS = (0.7, 0.5, 0.45)
"""Means of the gap from each runner-up to the next."""
NAMED, SHARPNESS = 0.84, 1.5
"""P(one of four runner-ups is right | the draft is wrong), and how much more likely the one ahead is."""


STEP_TIMES = StepTimes((1, 2, 3, 4, 6, 8, 16), (34.0, 48.0, 56.0, 64.0, 76.0, 88.0, 158.0))


@dataclass(frozen=True)
class Machine:
    """Seconds of a draft pass with one row and of each further row, and the target's step times."""

    draft_s: float = 0.020
    row_s: float = 0.006
    times: StepTimes = STEP_TIMES
    acceptance: float | None = None
    """None: as measured, by gaps; else this for every position, with a draft that is sure."""


MACHINE = Machine()


@dataclass(frozen=True)
class Position:
    """What the draft model says after the right path. rank: 0, it is right; k, its k-th runner-up is; -1, none."""

    rank: int
    confidence: float
    gaps: tuple[float, ...]


class Text:
    """The target's tokens and the draft model's errors. What is drafted off the path is never right by intent."""

    def __init__(self, seed: int, length: int, machine: Machine) -> None:
        self._chance = random.Random(seed)
        self.tokens = [self._chance.randrange(1000, 50_000) for _ in range(length)]
        self.positions = [self._position(machine.acceptance) for _ in range(length)]
        self._off = random.Random(seed + 1)
        self._machine = machine

    def _position(self, acceptance: float | None, chance: random.Random | None = None) -> Position:
        chance = chance or self._chance
        level = chance.choices(range(len(GAPS)), [share for *_, share in GAPS])[0]
        gap, right, _ = GAPS[level]
        confidence = CONFIDENCES[level]
        if acceptance is not None:
            right, gap, confidence = acceptance, 6.0 * chance.uniform(0.7, 1.0), chance.uniform(0.9, 1.0)
        gaps = [gap]
        for mean in FURTHER_GAPS:
            gaps.append(gaps[-1] + chance.expovariate(1 / mean))
        if chance.random() < right:
            return Position(0, confidence, tuple(gaps))
        rank = chance.choices([1, 2, 3, 4], [math.exp(-SHARPNESS * other) for other in gaps])[0]
        return Position(rank if chance.random() < NAMED else -1, confidence, tuple(gaps))

    def guess(self, path: Sequence[int]) -> Guess:
        at = len(path)
        on_path = path == self.tokens[:at]
        position = self.positions[at] if on_path else self._position(self._machine.acceptance, self._off)
        names = self._off.sample(range(50_000, 60_000), 5)
        if on_path and position.rank >= 0:
            names[position.rank] = self.tokens[at]
        return Guess(names[0], position.confidence, tuple(zip(names[1:], position.gaps, strict=True)))


@dataclass
class Outcome:
    """ms: per committed token; steps, bytes up: per committed and per sent token."""

    ms: float
    steps: float
    bytes_up: float
    reasons: dict[Reason, int] = field(default_factory=dict)


class Simulation:
    """`run` goes on to the end. loss, reorder: chances of a message in either direction."""

    def __init__(
        self,
        speculation: Speculation,
        round_trip_s: float,
        *,
        seed: int = 0,
        length: int = 300,
        machine: Machine = MACHINE,
        price: float | None = None,
        loss: float = 0.0,
        paths: int = 4,
    ) -> None:
        self.machine, self.length, self.price = machine, length, price
        self.text = Text(seed, PROMPT + length + 150, machine)
        self.speculation, self.link_s = speculation, round_trip_s / 2
        opened = SessionOpen(model="m", fingerprint="f", tokens=tuple(self.text.tokens[:PROMPT]), sampling=Sampling())
        record = SessionRecord(
            session="s",
            tenant="t",
            opened=opened,
            secret="",
            seed=1,
            prompt_length=PROMPT,
            max_tokens=length,
            epoch=1,
            tokens=opened.tokens,
        )
        self.session = Session(record, Ends(lambda _: b"", (), (), length), vocabulary=100_000)
        self.state = DraftState(
            source="edge",
            session="s" * 32,
            connection=1,
            tokens=opened.tokens,
            speculation=speculation,
            bounds=Bounds(),
            limit=PROMPT + length,
            longest_path=10_000,
        )
        self.arrivals, self.rate = Arrivals(), GoingRate()
        self.now = self.starved = 0.0
        self.steps = self.bytes_up = 0
        self.reasons: dict[Reason, int] = {}
        self.ended: float | None = None
        self._paths, self._loss = paths, loss
        self._fate = random.Random(seed + 2)
        self._drafting = self._verifying = False
        self._echo: tuple[int, float] | None = None
        self._deflate = zlib.compressobj(wbits=-15)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._step_due: float | None = None

    def run(self) -> Outcome:
        self.pump()
        self.step()
        while self.ended is None:
            self.now, _, event = heapq.heappop(self._queue)
            event()
        sent = max(1, self.state.counts.sent)
        return Outcome(1000 * self.ended / self.length, self.steps / self.length, self.bytes_up / sent, self.reasons)

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), event))

    # --- the edge ---

    def pump(self) -> None:
        for block in self.state.due(self.now):
            self.bytes_up += FRAME_BYTES + len(self._packed(block))
            self.travel(partial(self.arrive, block))
        if not self._drafting and (drafted := self.state.next_pass(self.now, self._paths)) is not None:
            self._drafting = True
            seconds = self.machine.draft_s + self.machine.row_s * (len(drafted.paths) - 1)
            self.later(seconds, lambda: self.drafted(drafted, seconds))
        self.reasons[self.state.reason] = self.reasons.get(self.state.reason, 0) + 1
        pause = self.state.next_due(self.now)
        if pause is not None:
            self.later(pause + 1e-6, self.wake)

    def _packed(self, block: DraftBlock) -> bytes:
        packed = self._deflate.compress(encode_wan(block)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return packed.removesuffix(b"\x00\x00\xff\xff")

    def wake(self) -> None:
        if self.state.next_due(self.now) == 0:
            self.pump()

    def drafted(self, drafted: DraftPass, seconds: float) -> None:
        self._drafting = False
        self.state.take_pass(drafted, [self.text.guess(path) for path in drafted.paths], seconds, self.now)
        self.pump()

    def heard(self, verdict: Verdict) -> None:
        if not self.state.on_verdict(verdict, self.now):
            at = len(self.state.committed)
            self.state.adopt(at, self.session.committed[at:])
        if self.state.finish is not None:
            self.ended = self.now
        self.pump()

    # --- the link ---

    def travel(self, event: Callable[[], None]) -> None:
        if self._fate.random() < self._loss:
            return
        late = self._fate.random() * 0.05 if self._loss else 0.0
        self.later(self.link_s + late, event)
        if self._fate.random() < self._loss:
            self.later(self.link_s + 0.1, event)

    # --- the cloud ---

    def arrive(self, block: DraftBlock) -> None:
        offer = self.session.offer(block)
        self.arrivals.on_block(self.now, offer.attached)
        self._echo = self._echo or (block.t_sent, self.now)
        if offer.gap:
            self.say()
        self.step()

    def step(self) -> None:
        if self._verifying or self.session.finish is not None:
            return
        chain = self.session.chain(self.speculation.max_draft)
        if not chain and self.speculation.enabled and (wait := self._wait()) > 0:
            self.later(wait + 1e-6, self.step)
            return
        want = Want("s", "t", chain=tuple(node.confidence for node in chain))
        going = self.rate.value(self.now)
        chosen = choose([want], times=self.machine.times, step_tokens=256, chunk_tokens=256, going_rate=going)
        plan = self.session.plan(chosen.shares[0].draft)
        self._verifying, self.steps = True, self.steps + 1
        seconds = self.machine.times.at(1 + len(plan.tokens)) / 1000
        timing = None
        if self._echo is not None:
            sent, came = self._echo
            timing = Timing(t_sent=sent, wait_ms=1000 * (self.now - came), step_ms=1000 * seconds)
            self._echo = None
        self.later(seconds, lambda: self.decided(plan, timing))

    def _wait(self) -> float:
        """Until a plain step: none where a bubble is worth filling, a long one without filling."""
        if not self.speculation.fill:
            return self.starved + 6 * self.link_s + 0.15 - self.now
        expected = self.arrivals.next_in(self.now)
        worth = worth_of_filling(
            wait_s=expected, nodes=self.arrivals.nodes, acceptance=0.7, times=self.machine.times, context=0
        )
        return 0.005 if worth == 0 else 0.0

    def decided(self, plan: Plan, timing: Timing | None) -> None:
        accepted = 0
        while accepted < len(plan.tokens) and plan.tokens[accepted] == self.text.tokens[plan.at + accepted]:
            accepted += 1
        commit = self.session.decide(plan, accepted, self.text.tokens[plan.at + accepted])
        assert commit is not None
        self._verifying, self.starved = False, self.now
        self.rate.note(self.now, len(commit.tokens))
        self.arrivals.on_tip(self.now, "c" in commit.kinds)
        self.say(commit.tokens, commit.kinds, timing)
        self.step()

    def say(self, tokens: tuple[int, ...] = (), kinds: str = "", timing: Timing | None = None) -> None:
        verdict = Verdict(
            session="s",
            epoch=1,
            at=self.session.tip - len(tokens),
            tokens=tokens,
            kinds=kinds,
            seen=dict(self.session.seen),
            gap=self.session.take_gaps(),
            finish=self.session.finish,  # type: ignore[arg-type]
            timing=timing,
            price=self.price,
        )
        self.travel(lambda: self.heard(verdict))
        if self._loss and self.session.finish is not None:
            self.later(1.0, lambda: self.heard(verdict))


def measured(round_trip_s: float, *, seeds: int = 4, machine: Machine = MACHINE, **speculation: object) -> Outcome:
    """Means over a few seeds."""
    outcomes = []
    for seed in range(seeds):
        simulation = Simulation(Speculation(**speculation), round_trip_s, seed=seed, machine=machine)  # type: ignore[arg-type]
        outcomes.append(simulation.run())
        assert simulation.state.committed == simulation.text.tokens[: PROMPT + simulation.length]
    return Outcome(
        ms=sum(outcome.ms for outcome in outcomes) / seeds,
        steps=sum(outcome.steps for outcome in outcomes) / seeds,
        bytes_up=sum(outcome.bytes_up for outcome in outcomes) / seeds,
        reasons=outcomes[-1].reasons,
    )
