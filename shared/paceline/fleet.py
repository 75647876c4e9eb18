"""Many sessions on one verifier in virtual time: what a fleet of drafting devices is worth to an accelerator. Pure.

Every session has a device, a link and a text of its own (paceline.fleet_traces); the product's own code drafts, holds,
chooses and prices (paceline.fleet_edge, paceline.fleet_cloud); a step takes what a roofline says
(paceline.fleet_hardware). Decoding only: prompts are in the KV cache when a session begins. Everything is drawn from
one seed, so a run repeats exactly. paceline.fleet_baselines has the schemes that need no network.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from paceline.batch_choice import Chosen
from paceline.calibration import Calibration
from paceline.draft_state import DraftState
from paceline.ends import Ends
from paceline.fleet_clock import Clock
from paceline.fleet_cloud import Cloud, Live
from paceline.fleet_edge import EdgeSide
from paceline.fleet_hardware import Edge
from paceline.fleet_meter import Link, Meter, Way
from paceline.fleet_traces import VOCABULARY, Course, Trace
from paceline.forecast import Forecast
from paceline.session import Session
from paceline.store import SessionRecord
from paceline.wire import Bounds, DraftBlock, Sampling, SessionOpen, Speculation, Verdict

PROMPT = 8
"""Tokens of a prompt that are really there; `Scenario.context` more are only counted."""
ENDLESS = 1 << 19
EARLIER = 500
"""Tokens that a device has drafted, with verdicts, before the run begins."""
PACELINE = Speculation()


@dataclass(frozen=True)
class Scenario:
    """step_s(tokens, context, tokens per session): seconds of a verify step, times a noise of that relative spread.
    context: KV tokens of a prompt. tokens: a completion's length; a session of an `endless` scenario goes on.
    kv_tokens: KV that fits, None: any. load: from each moment on so many sessions run; sessions join (or leave, oldest
    first) to make it so. step_tokens: most tokens of a step. patience_s: a session that held nothing for so long is
    filled, whatever else the time would earn; None: only where filling pays."""

    step_s: Callable[[float, float, float], float]
    trace: Trace
    edge: Edge
    link: Link
    load: tuple[tuple[float, int], ...] = ((0.0, 1),)
    speculation: Speculation = PACELINE
    context: int = 0
    tokens: int = 100
    endless: bool = False
    kv_tokens: int | None = None
    step_tokens: int = 4096
    patience_s: float | None = None
    noise: float = 0.02
    seed: int = 1
    tenants: int = 1


@dataclass(frozen=True)
class Figures:
    """Of the part of a run that counts. Latencies in ms, counted per token at the client. chain: drafts in a step for
    each session that it decides. waste: drafts verified in vain, for each token committed."""

    tokens_per_s: float
    itl_ms_mean: float
    itl_ms_p50: float
    itl_ms_p99: float
    step_ms: float
    batch: float
    chain: float
    acceptance: float
    waste: float
    filled: float
    busy: float
    drafted_per_token: float


@dataclass(frozen=True)
class Moment:
    """A step as it began: seconds, its price and the smoothed one that sources hear, sessions and drafts in it, and the
    sessions that run."""

    at: float
    price: float
    smoothed: float
    sessions: int
    drafts: int
    running: int


@dataclass
class _Client:
    live: Live
    edge: EdgeSide | None
    up: Way
    down: Way
    gone: bool = False
    ended: bool = False


class Fleet:
    """One run. `moments`: its steps, in order."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.clock, self.meter = Clock(), Meter()
        self.moments: list[Moment] = []
        self.clients: list[_Client] = []
        self._chance = random.Random(scenario.seed)
        self._kept = self._calibration()
        self.cloud = Cloud(
            self.clock,
            scenario.step_s,
            kv_tokens=scenario.kv_tokens,
            step_tokens=scenario.step_tokens,
            patience_s=scenario.patience_s,
            draw=self._noise,
            on_step=self._note,
        )
        for moment, sessions in scenario.load:
            self.clock.at(moment, partial(self._make_it, sessions))

    def run(self, *, until_tokens: int | None = None, until_s: float | None = None) -> None:
        """Until every session has ended, so many tokens were decided, or so many seconds have passed."""

        def done() -> bool:
            if until_s is not None and self.clock.now >= until_s:
                return True
            return until_tokens is not None and self.cloud.figures.decided >= until_tokens

        self.clock.run(done)

    def measured(self, settling: int, measuring: int) -> Figures:
        """Run: `settling` tokens a session that do not count, then `measuring` that do."""
        sessions = self.scenario.load[-1][1]
        self.run(until_tokens=settling * sessions)
        before, start, first = self._sums(), self.clock.now, len(self.moments)
        self.run(until_tokens=(settling + measuring) * sessions)
        return self._figures(before, start, first)

    def whole(self) -> Figures:
        """Run to the end; everything counts."""
        before = self._sums()
        self.run()
        return self._figures(before, 0.0, 0)

    # --- sessions --------------------------------------------------------------------------------------------------

    def _make_it(self, sessions: int) -> None:
        running = [client for client in self.clients if not client.gone and not client.ended]
        for client in running[: max(0, len(running) - sessions)]:
            client.gone = True
            self.cloud.close(client.live)
        for _ in range(sessions - len(running)):
            self._join()

    def _join(self) -> None:
        scenario, number = self.scenario, len(self.clients)
        length = ENDLESS if scenario.endless else scenario.tokens
        records = scenario.trace.draw(min(length, 4 * scenario.tokens), self._chance)
        course = Course(records, PROMPT)
        name = f"s{number}"
        opened = SessionOpen(
            model="m",
            fingerprint="f",
            tokens=tuple(course.truth(PROMPT)),
            sampling=Sampling(),
            speculation=scenario.speculation,
        )
        record = SessionRecord(
            session=name,
            tenant=f"t{number % scenario.tenants}",
            opened=opened,
            secret="",
            seed=1,
            prompt_length=PROMPT,
            max_tokens=length,
            epoch=1,
            tokens=opened.tokens,
        )
        live = Live(
            name=name,
            tenant=record.tenant,
            session=Session(record, Ends(_no_bytes, (), (), length), vocabulary=VOCABULARY),
            course=course,
            speculation=scenario.speculation,
            context=scenario.context,
            kv_tokens=scenario.context + PROMPT + scenario.tokens,
            round_trip_s=scenario.link.round_trip_s,
            to_client=partial(self._to_client, number),
            forecast=Forecast(self.cloud.trust.for_session(), "edge"),
        )
        up, down = Way(scenario.link, self._chance), Way(scenario.link, self._chance)
        edge = self._edge(live, number, length) if scenario.speculation.enabled else None
        self.clients.append(_Client(live, edge, up, down))
        self.cloud.open(live)
        if edge is not None:
            self.clock.after(scenario.link.round_trip_s / 2, edge.pump)

    def _edge(self, live: Live, number: int, length: int) -> EdgeSide:
        state = DraftState(
            source="edge",
            session=live.name,
            connection=0,
            tokens=live.session.committed,
            speculation=self.scenario.speculation,
            bounds=Bounds(),
            limit=PROMPT + length,
            longest_path=2 * ENDLESS,
            calibration=Calibration.load(self._kept).for_session(),
        )
        return EdgeSide(self.clock, state, live.course, self.scenario.edge, partial(self._to_cloud, number))

    def _calibration(self) -> dict[str, object]:
        """What a device has learned of its pair of models in earlier sessions."""
        calibration = Calibration()
        for record in self.scenario.trace.draw(EARLIER, self._chance):
            calibration.learn(record.confidence, record.gap, record.rank)
        return calibration.dump()

    # --- messages --------------------------------------------------------------------------------------------------

    def _to_cloud(self, number: int, block: DraftBlock) -> None:
        client = self.clients[number]
        self.clock.at(client.up.arrival(self.clock.now), lambda: self.cloud.on_block(client.live, block))

    def _to_client(self, number: int, verdict: Verdict) -> None:
        client = self.clients[number]

        def heard() -> None:
            if not client.gone:
                self.meter.chunk(number, self.clock.now, len(verdict.tokens))
            if verdict.finish is not None:
                client.ended = True
            if client.edge is not None:
                client.edge.on_verdict(verdict)

        self.clock.at(client.down.arrival(self.clock.now), heard)

    # --- figures ---------------------------------------------------------------------------------------------------

    def _noise(self) -> float:
        return max(0.5, self._chance.gauss(1.0, self.scenario.noise)) if self.scenario.noise else 1.0

    def _note(self, now: float, chosen: Chosen) -> None:
        drafts = sum(share.draft for share in chosen.shares)
        smoothed = self.cloud.price.value or 0.0
        self.moments.append(Moment(now, chosen.price, smoothed, len(chosen.shares), drafts, len(self.cloud.lives)))

    def _sums(self) -> dict[str, float]:
        figures, counters = self.cloud.figures, [client.live.session.counters for client in self.clients]
        return {
            "steps": figures.steps,
            "seconds": figures.seconds,
            "decided": figures.decided,
            "drafts": figures.drafts,
            "filled": figures.filled,
            "accepted": sum(sum(each.accepted.values()) for each in counters),
            "rejected": sum(each.rejected for each in counters),
            "drafted": sum(sum(each.drafted.values()) for each in counters),
        }

    def _figures(self, before: dict[str, float], start: float, first: int) -> Figures:
        after = self._sums()
        sums = {key: after[key] - before[key] for key in after}
        spent, decided = max(1e-9, self.clock.now - start), max(1.0, sums["decided"])
        mean, p50, p99 = self.meter.latencies_ms(start, self.clock.now)
        steps = max(1.0, sums["steps"])
        items = max(1, sum(moment.sessions for moment in self.moments[first:]))
        return Figures(
            tokens_per_s=sums["decided"] / spent,
            itl_ms_mean=mean,
            itl_ms_p50=p50,
            itl_ms_p99=p99,
            step_ms=1000 * sums["seconds"] / steps,
            batch=items / steps,
            chain=sums["drafts"] / items,
            acceptance=sums["accepted"] / max(1.0, sums["accepted"] + sums["rejected"]),
            waste=(sums["drafts"] - sums["accepted"]) / decided,
            filled=sums["filled"] / decided,
            busy=sums["seconds"] / spent,
            drafted_per_token=sums["drafted"] / decided,
        )


def _no_bytes(_: int) -> bytes:
    return b""
