"""The pace of a drafting source: measured times in; window, flush time and patience out. Pure, times in seconds.

**Window**: nodes that a source may be ahead of the tip. While the batcher works through a window's worth of nodes, the
verdict on the first of them comes back, so the source never idles: W = ceil((R + t_v) / t_d) + margin, with the round
trip R, the verify step t_v and the draft time t_d (docs/speculation.md, section 3).
"""

from __future__ import annotations

import math

from paceline.wire import Bounds, Speculation, Timing

SMOOTHING = 0.2
"""Weight of a new sample in a moving average."""
DEFAULT_ROUND_TRIP_S = 0.1
SHORTEST_FLUSH_S = 0.020
SHORTEST_DRAFT_S = 1e-4
PATIENCE_S = 0.150
LONGEST_PATIENCE_S = 5.0


class Pace:
    """Moving averages of one source and what follows from them. None means: not measured yet."""

    def __init__(self, speculation: Speculation, bounds: Bounds) -> None:
        self._speculation = speculation
        self._bounds = bounds
        self.round_trip_s: float | None = None
        self.step_s: float | None = None
        self.draft_s: float | None = None
        self.window_cap: int | None = None

    def on_timing(self, timing: Timing, now: float) -> None:
        """The echo of a block's `t_sent` (ms of this clock): what is left after waiting and verifying is the link's."""
        spent = now - timing.t_sent / 1000
        self.round_trip_s = _smooth(self.round_trip_s, max(0.0, spent - (timing.wait_ms + timing.step_ms) / 1000))
        self.step_s = _smooth(self.step_s, timing.step_ms / 1000)

    def on_drafted(self, seconds: float) -> None:
        """One token drafted in the steady state (no catching up)."""
        self.draft_s = _smooth(self.draft_s, seconds)

    @property
    def window(self) -> int:
        """Nodes beyond the tip at most; the batcher's bound is never reached, the policy's cap is kept."""
        most = self._bounds.held - 1
        if self.window_cap is not None:
            most = min(most, self.window_cap)
        return max(0, min(most, self._wanted()))

    def _wanted(self) -> int:
        if self._speculation.depth:
            return self._speculation.depth * self._speculation.max_draft
        if self.round_trip_s is None or self.draft_s is None:
            return 2 * self._speculation.max_draft
        in_flight = (self.round_trip_s + (self.step_s or 0.0)) / max(self.draft_s, SHORTEST_DRAFT_S)
        return math.ceil(in_flight) + self._speculation.max_draft

    @property
    def round_trip(self) -> float:
        return DEFAULT_ROUND_TRIP_S if self.round_trip_s is None else self.round_trip_s

    @property
    def flush_s(self) -> float:
        """A younger block waits for more nodes: about one more. Longer blocks save bytes, but what waits here is
        missing there: in simulated time a flush of three draft times costs deep speculation 6 % at a round trip of
        100 ms."""
        return max(SHORTEST_FLUSH_S, self.draft_s or 0.0)

    @property
    def decided_within_s(self) -> float:
        """A node that was sent longer ago and is still undecided shows that the batcher has work left."""
        return self.round_trip + 2 * max(self.step_s or 0.0, SHORTEST_FLUSH_S)

    def patience_s(self, resends: int) -> float:
        """How long an unanswered block is waited for; doubles with every resend, since `seen` moves only with verdicts
        and a loaded verifier may be slower than the link."""
        first = 3 * self.round_trip + PATIENCE_S
        return min(first * 2.0 ** min(resends, 16), max(first, LONGEST_PATIENCE_S))


def _smooth(average: float | None, sample: float) -> float:
    return sample if average is None else average + SMOOTHING * (sample - average)
