"""The pace of a drafting source: measured times in; window, costs, lead, flush time and patience out. Pure, seconds.

**Window**: nodes that the main chain may be ahead of the tip. While the batcher works through a window's worth of
nodes, the verdict on the first of them comes back, so the source never idles: W = ceil((R + t_v) / t_d) + margin, with
the round trip R, the verify step t_v without queueing and the draft time t_d (docs/speculation.md).

**Lead**: where the cloud fills bubbles at t_f a token, a block that is sent now arrives when the cloud is (R + tau) /
t_f tokens beyond the tip that was last heard of, tau ago. What ends before that is history on its arrival. A source
that drafts from behind gains 1 - t_d / t_f tokens on the filling cloud with each token it drafts.
"""

from __future__ import annotations

import math

from paceline.pass_costs import PassCosts, smooth
from paceline.wire import KIND_OF_SOURCE, Bounds, Source, Speculation, Timing, Verdict

DEFAULT_ROUND_TRIP_S = 0.1
SHORTEST_FLUSH_S = 0.020
SHORTEST_DRAFT_S = 1e-4
PATIENCE_S = 0.150
LONGEST_PATIENCE_S = 5.0
LOW_DRIFT = 0.02
"""How fast a lowest round trip is forgotten: share of its distance to the average, a sample."""
REFILL_STEPS = 3.0
FILLED_REFILL_STEPS = 2.0
"""Where bubbles are filled, what is missing is replaced by a step that commits less."""
LONGEST_TAU = 2.0
"""In filled steps: a cloud that was silent for longer is not filling, it waits for us or is busy."""


class Pace:
    """Moving averages of one source and what follows from them. None means: not measured yet."""

    def __init__(
        self, speculation: Speculation, bounds: Bounds, source: Source = "edge", costs: PassCosts | None = None
    ) -> None:
        self.costs = costs or PassCosts()
        self._speculation = speculation
        self._bounds = bounds
        self._letter = KIND_OF_SOURCE[source]
        self.round_trip_s: float | None = None
        self.step_s: float | None = None
        self.fill_s: float | None = None
        """A token of the cloud's own, while it fills."""
        self.token_s: float | None = None
        """A committed token, whoever drafted it."""
        self.window_cap: int | None = None
        self.price = 0.0
        self._lowest = math.inf
        self._jitter = 0.0
        self._heard_at: float | None = None

    # --- measurements -----------------------------------------------------------------------------------------------

    def on_timing(self, timing: Timing, now: float) -> None:
        """The echo of a block's `t_sent` (ms of this clock): what is left after waiting and verifying is the link's."""
        spent = now - timing.t_sent / 1000
        sample = max(0.0, spent - (timing.wait_ms + timing.step_ms) / 1000)
        before = sample if self.round_trip_s is None else self.round_trip_s
        self.round_trip_s = smooth(self.round_trip_s, sample)
        self._jitter = smooth(self._jitter, abs(sample - before))
        self._lowest = min(sample, self._lowest + LOW_DRIFT * max(0.0, before - self._lowest))
        self.step_s = smooth(self.step_s, timing.step_ms / 1000)

    def on_drafted(self, seconds: float, rows: int = 1) -> None:
        """One pass in the steady state (no catching up), which drafted a token for each of `rows` paths."""
        self.costs.learn(rows, seconds)

    @property
    def draft_s(self) -> float | None:
        """One pass with one row."""
        return self.costs.first_s

    def on_verdict(self, verdict: Verdict, now: float) -> None:
        if verdict.timing is not None:
            self.on_timing(verdict.timing, now)
        if verdict.window_cap is not None:
            self.window_cap = verdict.window_cap
        if verdict.price is not None:
            self.price = verdict.price
        if not verdict.tokens:
            return
        if self._heard_at is not None:
            sample = (now - self._heard_at) / len(verdict.tokens)
            self.token_s = smooth(self.token_s, sample)
            if self._letter not in verdict.kinds:
                self.fill_s = smooth(self.fill_s, sample)
        self._heard_at = now

    # --- what follows -----------------------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """Nodes of the main chain beyond the tip at most; the batcher's bound is never reached, the policy's cap is
        kept."""
        return max(0, min(self.most_held, self._wanted()))

    @property
    def most_held(self) -> int:
        """Nodes beyond the tip at most, those of branches included."""
        most = self._bounds.held - 1
        return most if self.window_cap is None else min(most, self.window_cap)

    def _wanted(self) -> int:
        if self._speculation.depth:
            return self._speculation.depth * self._speculation.max_draft
        if self.round_trip_s is None or self.draft_s is None:
            return 2 * self._speculation.max_draft
        return math.ceil(self.passes_in_flight) + self._speculation.max_draft

    @property
    def passes_in_flight(self) -> float:
        """Passes with one row, at least one, until the verdict on what leaves now is here: (R + t_v) / t_d."""
        away = self.round_trip + (self.step_s or 0.0)
        return max(1.0, away / max(self.draft_s or SHORTEST_FLUSH_S, SHORTEST_DRAFT_S))

    @property
    def round_trip(self) -> float:
        """The average, or more where the link jitters: what comes late must not find an idle source."""
        if self.round_trip_s is None:
            return DEFAULT_ROUND_TRIP_S
        return max(self.round_trip_s, self._lowest + 2 * self._jitter)

    def lead(self, now: float) -> float | None:
        """Tokens beyond the known tip that the filling cloud will have when a block that is sent now arrives; None
        where it does not fill, or was not seen to."""
        if not self._speculation.fill or self.fill_s is None or self.round_trip_s is None:
            return None
        fill_s = max(self.fill_s, SHORTEST_DRAFT_S)
        tau = 0.0 if self._heard_at is None else min(now - self._heard_at, LONGEST_TAU * fill_s)
        return (self.round_trip_s + tau) / fill_s

    @property
    def gain(self) -> float:
        """Tokens gained on the filling cloud with each token drafted from behind; 0 or less: it is not overtaken."""
        return 1.0 - (self.draft_s or 0.0) / max(self.fill_s or 0.0, SHORTEST_DRAFT_S) if self.fill_s else 1.0

    @property
    def decided_before(self) -> int:
        """Tokens beyond the known tip that are committed, at the present rate, when a block that is sent now has its
        turn: after a round trip, and the step that it finds under way."""
        if not self.token_s:
            return 0
        return min(self._bounds.held, int((self.round_trip + (self.step_s or 0.0)) / self.token_s))

    @property
    def flush_s(self) -> float:
        """A younger block waits for more nodes: about one more. Longer blocks save bytes and verify steps, but what
        waits here is missing there."""
        return max(SHORTEST_FLUSH_S, self.draft_s or 0.0)

    @property
    def refill_s(self) -> float:
        """So long the batcher is busy with the blocks before. In simulated time at a round trip of 100 ms such a pace
        costs 2 % of a token's time and saves 12 % of the verify steps and a fifth of the bytes."""
        return (FILLED_REFILL_STEPS if self._speculation.fill else REFILL_STEPS) * (self.step_s or 0.0)

    @property
    def decided_within_s(self) -> float:
        """A node that was sent longer ago and is still undecided shows that the batcher has work left."""
        return self.round_trip + 2 * max(self.step_s or 0.0, SHORTEST_FLUSH_S)

    def patience_s(self, resends: int) -> float:
        """How long an unanswered block is waited for: `seen` moves only with verdicts, so two steps (the one under way
        and ours) are part of it. Doubles with every resend, since a loaded verifier may be slower still."""
        first = 3 * self.round_trip + PATIENCE_S + 2 * (self.step_s or 0.0)
        return min(first * 2.0 ** min(resends, 16), max(first, LONGEST_PATIENCE_S))
