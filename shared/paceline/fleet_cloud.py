"""The simulated cloud side: one verifier, the product's own sessions, and its rules for who goes into a step. Pure.

What services/batcher does with messages, leases and a store is left out; what decides about speed is the product's:
sessions and tries, the choice of the batch, the fill rule, the trust in sources, the price, the learned step curve.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from paceline.batch_choice import Chosen, Share, Want, choose
from paceline.fleet_clock import Alarm, Clock
from paceline.fleet_traces import Course
from paceline.forecast import SOON_S, Forecast
from paceline.going_rate import GoingRate
from paceline.price import Price
from paceline.session import Plan, Session
from paceline.step_curve import StepCurve, StepTimes
from paceline.trie import Node
from paceline.trust import Trust
from paceline.wire import DraftBlock, Speculation, Timing, Verdict

TELL_EVERY_S = 1.0
"""A session hears the price at least this often."""
PATIENCE_S = 0.15
"""Without filling: 3 round trips and this long a starved session waits for a block."""

LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows of the steps that a verifier measures before it serves, of one session without context."""
MOMENT_S = 1e-4


@dataclass(eq=False)
class Live:
    """A session at the batcher. context: KV tokens of its prompt; `to_client` takes verdicts at the moment they leave.
    round_trip_s: what the batcher knows of the link."""

    name: str
    tenant: str
    session: Session
    course: Course
    speculation: Speculation
    context: int
    kv_tokens: int
    round_trip_s: float
    to_client: Callable[[Verdict], None]
    forecast: Forecast
    served: int = 0
    echo: tuple[int, float] | None = None
    starved: float = 0.0
    told: float | None = None
    told_at: float = 0.0
    in_step: bool = False
    chain: tuple[list[Node], tuple[float, ...]] | None = None
    """The best held chain and its chances; None: not looked for since something changed."""


Planned = tuple[Live, Plan, tuple[int, float] | None]
"""What goes into a step for a session, and the echo that its verdict will carry: (t_sent, moment it came)."""


@dataclass
class StepFigures:
    """Sums over steps since they were begun."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    decided: int = 0
    drafts: int = 0
    filled: int = 0


class Cloud:
    """step_s(tokens, context, tokens per session): duration of a step in seconds, times what `draw` gives. kv_tokens:
    KV that fits; sessions beyond it wait for their admission in order. step_tokens, patience_s: see fleet.Scenario."""

    def __init__(
        self,
        clock: Clock,
        step_s: Callable[[float, float, float], float],
        *,
        kv_tokens: int | None,
        step_tokens: int,
        patience_s: float | None = None,
        draw: Callable[[], float] = lambda: 1.0,
        on_step: Callable[[float, Chosen], None] | None = None,
    ) -> None:
        self.trust, self.price, self.rate, self.curve = Trust(), Price(), GoingRate(), StepCurve()
        self.lives: list[Live] = []
        self.queue: deque[Live] = deque()
        self.figures = StepFigures()
        self._clock, self._step_s, self._draw, self._on_step = clock, step_s, draw, on_step
        self._kv_free = kv_tokens
        self._step_tokens, self._patience_s = step_tokens, patience_s
        self._busy = False
        self._number = 0
        self._alarm = Alarm(clock, self.run)
        for rows in (*LADDER, *LADDER):
            self.curve.learn(rows, rows, 1000 * step_s(rows, rows, rows))

    # --- who is there ----------------------------------------------------------------------------------------------

    def open(self, live: Live) -> None:
        self.queue.append(live)
        self._admit()

    def close(self, live: Live) -> None:
        """The client has gone."""
        commit = live.session.cancel()
        if live in self.queue:
            self.queue.remove(live)
        elif not live.in_step:
            self._leave(live)
        live.to_client(Verdict(session=live.name, epoch=1, at=commit.at, finish=commit.finish))

    def _admit(self) -> None:
        while self.queue and (self._kv_free is None or self.queue[0].kv_tokens <= self._kv_free):
            live = self.queue.popleft()
            if self._kv_free is not None:
                self._kv_free -= live.kv_tokens
            live.starved = self._clock.now
            self.lives.append(live)
        self.run()

    def _leave(self, live: Live) -> None:
        if live in self.lives:
            self.lives.remove(live)
            if self._kv_free is not None:
                self._kv_free += live.kv_tokens
            self._admit()

    def on_block(self, live: Live, block: DraftBlock) -> None:
        offer = live.session.offer(block)
        live.forecast.block_came(block.source, offer.attached - offer.duplicate, self._clock.now)
        live.echo = (block.t_sent, self._clock.now)
        live.chain = None
        self.run()

    # --- steps -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Begin a step if the verifier is free and somebody wants one."""
        if self._busy:
            return
        times = self.curve.times()
        wants, by_name = [], {}
        for live in self.lives:
            want = self._want(live, times)
            if want is not None:
                wants.append(want)
                by_name[live.name] = live
        if not any(want.begins for want in wants):
            self._wait()
            return
        going = self.rate.value(self._clock.now)
        chosen = choose(wants, times=times, step_tokens=self._step_tokens, chunk_tokens=1, going_rate=going)
        self._begin(chosen, [(by_name[share.session], share) for share in chosen.shares])

    def _want(self, live: Live, times: StepTimes | None) -> Want | None:
        session, context = live.session, live.context + live.session.tip
        if session.finish is not None or live.in_step:
            return None
        if session.held:
            _, chances = self._chain(live)
            return Want(live.name, live.tenant, live.served, chain=chances, context=context)
        if not live.speculation.enabled or not session.room:
            return Want(live.name, live.tenant, live.served, context=context, must=True)
        if not live.speculation.fill:
            patient = self._clock.now < live.starved + 3 * live.round_trip_s + PATIENCE_S
            return None if patient else Want(live.name, live.tenant, live.served, context=context, must=True)
        if self._patience_s is not None and self._clock.now >= live.starved + self._patience_s:
            return Want(live.name, live.tenant, live.served, context=context, must=True)
        price = self.price.value or 0.0
        worth, _ = live.forecast.worth(self._clock.now, times, context, price)
        joining = live.forecast.joining(price)
        return Want(live.name, live.tenant, live.served, context=context, worth=worth, joining=joining)

    def _chain(self, live: Live) -> tuple[list[Node], tuple[float, ...]]:
        if live.chain is None:
            chance = cache(live.forecast.chance)
            nodes = live.session.chain(live.speculation.max_draft, chance)
            live.chain = nodes, tuple(chance(node) for node in nodes)
        return live.chain

    def _begin(self, chosen: Chosen, shares: list[tuple[Live, Share]]) -> None:
        now, self._busy, self._number = self._clock.now, True, self._number + 1
        self.price.note(now, chosen.price)
        plans: list[Planned] = []
        tokens = context = 0
        for live, share in shares:
            nodes = live.chain[0] if live.chain is not None else []
            plan = live.session.plan(share.draft, nodes[: share.draft])
            live.in_step, live.served = True, self._number
            plans.append((live, plan, live.echo))
            live.echo = None
            tokens += 1 + len(plan.tokens)
            context += live.context + live.session.tip
        seconds = self._step_s(tokens, context, tokens / len(plans)) * self._draw()
        if self._on_step is not None:
            self._on_step(now, chosen)
        self._clock.after(seconds, lambda: self._end(plans, tokens, context, now, seconds))

    def _end(
        self,
        plans: list[Planned],
        tokens: int,
        context: int,
        began: float,
        seconds: float,
    ) -> None:
        self._busy = False
        self.curve.learn(tokens, context, 1000 * seconds)
        figures, decided = self.figures, self.figures.decided
        figures.steps += 1
        figures.seconds += seconds
        figures.tokens += tokens
        for live, plan, echo in plans:
            live.in_step = False
            timing = None
            if echo is not None:
                timing = Timing(t_sent=echo[0], wait_ms=1000 * (began - echo[1]), step_ms=1000 * seconds)
            self._decide(live, plan, timing)
        self.rate.note(self._clock.now, figures.decided - decided)
        for live, *_ in plans:
            if live.session.finish is not None:
                self._leave(live)
        self.run()

    def _decide(self, live: Live, plan: Plan, timing: Timing | None) -> None:
        accepted = live.course.accepted(plan.at, plan.tokens)
        token = live.course.truth(plan.at + accepted + 1)[-1]
        commit = live.session.decide(plan, accepted, token)
        live.chain = None
        if commit is None:
            return
        now = self._clock.now
        live.forecast.decided(plan, accepted, commit.refuted, now)
        live.starved = now
        self.figures.decided += len(commit.tokens)
        self.figures.drafts += len(plan.tokens)
        self.figures.filled += commit.kinds.count("f")
        live.to_client(
            Verdict(
                session=live.name,
                epoch=1,
                at=commit.at,
                tokens=commit.tokens,
                kinds=commit.kinds,
                seen=dict(live.session.seen),
                gap=live.session.take_gaps(),
                finish=commit.finish,
                timing=timing,
                price=self._price_for(live, now),
            )
        )

    def _price_for(self, live: Live, now: float) -> float | None:
        if not self.price.changed(live.told) and now < live.told_at + TELL_EVERY_S:
            return None
        live.told, live.told_at = self.price.value, now
        return live.told

    # --- waiting ---------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Nobody wants a step: come back when the first expected block is overdue or a patience ends."""
        now = self._clock.now
        pauses = [self._pause(live, now) for live in self.lives if live.session.finish is None]
        if pauses:
            self._alarm.set(now + max(MOMENT_S, min(pauses)))

    def _pause(self, live: Live, now: float) -> float:
        if live.speculation.fill:
            until = max(SOON_S, live.forecast.arrivals.next_in(now) or 0.0)
            return until if self._patience_s is None else min(until, live.starved + self._patience_s - now)
        return live.starved + 3 * live.round_trip_s + PATIENCE_S - now
