"""How long a verify step takes, learned from the steps themselves. Pure; times in milliseconds.

The time is modelled as f(tokens) + c * context: f is linear between fixed knots, c >= 0. It need not be convex: a
compute-bound processor has a jump from one token to two, a GPU is flat up to its roofline and rises in tiles. Each
segment between two knots keeps the normal equations of its own samples and forgets by its own count, so that the time
of a size that is rarely used is not forgotten while others are. Weighted least squares on relative errors, with a weak
prior that neighbouring segments have the same slope, give the knots; isotonic regression makes them never fall.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.wire import StepTable

Floats = NDArray[np.float64]

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, *(1 << power for power in range(9, 18)))
"""Sizes of a step, in tokens, that are told apart; a larger step is not learned from."""
KEEP = 1.0 - 1.0 / 64
"""Share of what a segment knows that stays with each further sample of its own."""
KEEP_DRIFTING = 0.9
"""The same while most samples lie on one side of the estimate: the machine has become another."""
DRIFT = 0.6
"""Of the smoothed absolute residual; the smoothed residual of steady samples stays below a third of it."""
KEEP_IDLE = 1.0 - 1.0 / 32768
"""The same with each sample of another segment: a machine may have become faster where nobody looks."""
SMOOTHNESS = 0.05
"""Weight of the prior, in samples: a change of slope that shifts a knot by its whole time costs as much."""
CONTEXT_UNIT = 1024.0
"""KV tokens; the context's coefficient is of the order of a step per some thousand tokens."""
CONTEXT_PRIOR = 16.0
"""Weight of the prior that context costs nothing, in samples at one unit of context: short sessions tell little of it,
and what they do not tell must not be taken from the time of the tokens."""
FEW = 8.0
"""Samples below which a segment believes the faster ones: a hiccup only ever makes a step slower."""
CLIP = 3.0
"""A residual counts at most as this many smoothed absolute residuals."""
LEAST_SPREAD = 0.03
FIRST_SPREAD = 0.15
SPREAD_RATE = 0.05
FAINT = 1e-6
"""Samples below which a segment knows nothing."""
STALE = 16
"""Samples after which the estimate that residuals are taken from is made anew."""
MOST_KEPT = 1e100
"""Of a number in a kept segment: sums of real samples stay far below, and what is far above overflows."""
MOST_SAMPLES = 1 << 53
"""Steps that a kept curve may say it was learned from: what the status of a verifier can tell."""


@dataclass(frozen=True)
class StepTimes:
    """`ms` of a step that feeds `tokens` (same length, at least one, strictly growing; `ms` never falls) without
    context; `context_ms` more for each KV token of its sessions. samples: steps that it was learned from.

    ValueError: not such a table."""

    tokens: tuple[int, ...]
    ms: tuple[float, ...]
    context_ms: float = 0.0
    samples: int = 0

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.ms):
            raise ValueError(f"step times of {len(self.tokens)} sizes and {len(self.ms)} times")
        if self.tokens[0] < 0 or any(b <= a for a, b in zip(self.tokens, self.tokens[1:], strict=False)):
            raise ValueError("the sizes of step times do not grow")
        if not all(math.isfinite(ms) and ms > 0 for ms in self.ms) or any(
            b < a for a, b in zip(self.ms, self.ms[1:], strict=False)
        ):
            raise ValueError("step times fall, or are no times")
        if not (math.isfinite(self.context_ms) and self.context_ms >= 0):
            raise ValueError(f"{self.context_ms} ms a token of context")

    def at(self, tokens: float, context: float = 0.0) -> float:
        """Milliseconds of a step: linear between the knots; beyond the last one with the last segment's slope (a single
        knot: flat); before the first one as at the first."""
        base = self.context_ms * context
        if tokens <= self.tokens[0] or len(self.tokens) == 1:
            return base + self.ms[0]
        right = min(bisect_right(self.tokens, tokens), len(self.tokens) - 1)
        left = right - 1
        slope = (self.ms[right] - self.ms[left]) / (self.tokens[right] - self.tokens[left])
        return base + self.ms[left] + slope * (tokens - self.tokens[left])

    def over(self, tokens: Floats, context: Floats | float = 0.0) -> Floats:
        """`at` for many sizes at once."""
        base = self.context_ms * np.asarray(context, dtype=np.float64)
        inside: Floats = base + np.interp(tokens, self.tokens, self.ms)
        if len(self.tokens) > 1:
            slope = (self.ms[-1] - self.ms[-2]) / (self.tokens[-1] - self.tokens[-2])
            inside += slope * np.maximum(0.0, tokens - self.tokens[-1])
        return inside

    @classmethod
    def of(cls, table: StepTable | None) -> StepTimes | None:
        """None where there is no table, or what it says makes no sense."""
        if table is None:
            return None
        try:
            return cls(tuple(table.tokens), tuple(table.ms), table.context_ms, table.samples)
        except ValueError:
            return None

    def table(self) -> StepTable:
        return StepTable(tokens=self.tokens, ms=self.ms, context_ms=self.context_ms, samples=self.samples)


class _Segment:
    """Weighted normal equations of the samples between two knots: of the left hat, the right hat and the context.
    `count`: their number, `seen`: that of the curve's last sample that its forgetting takes into account."""

    __slots__ = ("count", "moments", "right", "seen", "squares")

    def __init__(self) -> None:
        self.count = 0.0
        self.squares = [0.0] * 6
        """left², left * right, right², left * context, right * context, context²"""
        self.right = [0.0] * 3
        """left * ms, right * ms, context * ms"""
        self.moments = [0.0, 0.0]
        """Sum of the weights, and of weight * ms."""
        self.seen = 0

    def fade(self, keep: float) -> None:
        self.count *= keep
        self.squares = [keep * value for value in self.squares]
        self.right = [keep * value for value in self.right]
        self.moments = [keep * value for value in self.moments]

    def add(self, left: float, right: float, context: float, ms: float, weight: float) -> None:
        s, r, m = self.squares, self.right, self.moments
        s[0] += weight * left * left
        s[1] += weight * left * right
        s[2] += weight * right * right
        s[3] += weight * left * context
        s[4] += weight * right * context
        s[5] += weight * context * context
        r[0] += weight * left * ms
        r[1] += weight * right * ms
        r[2] += weight * context * ms
        m[0] += weight
        m[1] += weight * ms
        self.count += 1.0

    def numbers(self) -> list[float]:
        return [self.count, *self.squares, *self.right, *self.moments]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> _Segment:
        segment = cls()
        segment.count, segment.squares = numbers[0], list(numbers[1:7])
        segment.right, segment.moments = list(numbers[7:10]), list(numbers[10:12])
        return segment


class StepCurve:
    """Online estimate of the step time. A sample costs some ten microseconds, an estimate some hundred."""

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}
        self._samples = 0
        self._spread = FIRST_SPREAD
        self._drift = 0.0
        """Smoothed residual, relative as the spread is."""
        self._times: StepTimes | None = None
        self._estimated = 0
        """Number of the sample that `_times` was made after."""

    def learn(self, tokens: int, context: int, ms: float) -> None:
        """One step fed `tokens` rows for sessions that hold `context` KV tokens together, and took `ms`. Sizes beyond
        the knots, and what is no time, are not learned from."""
        if not (1 <= tokens <= KNOTS[-1] and context >= 0 and math.isfinite(ms) and ms > 0):
            return
        index = max(0, bisect_right(KNOTS, tokens) - 1)
        share = 0.0 if index + 1 == len(KNOTS) else (tokens - KNOTS[index]) / (KNOTS[index + 1] - KNOTS[index])
        segment = self._segments.get(index, _Segment())
        taken, expected = self._plausible(segment, tokens, context, ms)
        keep = KEEP_DRIFTING if abs(self._drift) > DRIFT * self._spread else KEEP
        segment.fade(keep * KEEP_IDLE ** max(0, self._samples - segment.seen))
        self._samples += 1
        segment.seen = self._samples
        self._segments[index] = segment
        segment.add(1.0 - share, share, context / CONTEXT_UNIT, taken, 1.0 / (expected * expected))

    def times(self) -> StepTimes | None:
        """The estimate; None before the first sample. Kept until there are new samples."""
        if self._samples != self._estimated:
            self._times = self._estimate()
            self._estimated = self._samples
        return self._times

    def dump(self) -> dict[str, object]:
        """What was learned, as JSON values."""
        for segment in self._segments.values():
            self._catch_up(segment)
        return {
            "version": 1,
            "samples": self._samples,
            "spread": self._spread,
            "segments": {str(KNOTS[index]): segment.numbers() for index, segment in self._segments.items()},
        }

    @classmethod
    def load(cls, kept: object) -> StepCurve:
        """From `dump`; a fresh curve where `kept` is anything else."""
        curve = cls()
        try:
            curve._restore(kept)
            curve.times()
        except (TypeError, KeyError, ValueError, AttributeError, ArithmeticError, np.linalg.LinAlgError):
            return cls()
        return curve

    def _restore(self, kept: object) -> None:
        if not isinstance(kept, dict) or kept["version"] != 1:
            raise ValueError("not a step curve")
        self._samples = int(kept["samples"])
        self._spread = float(kept["spread"])
        if not 0 <= self._samples <= MOST_SAMPLES or not LEAST_SPREAD <= self._spread <= 1e3:
            raise ValueError("not a step curve")
        for knot, values in kept["segments"].items():
            numbers = [float(value) for value in values]
            if len(numbers) != 12 or not all(0 <= value <= MOST_KEPT for value in numbers):
                raise ValueError("not a segment of a step curve")
            segment = _Segment.of(numbers)
            if segment.count > FAINT and min(segment.moments) <= 0.0:
                raise ValueError("a segment that has samples, and no weight or no time of them")
            segment.seen = self._samples
            self._segments[KNOTS.index(int(knot))] = segment

    def _plausible(self, segment: _Segment, tokens: int, context: int, ms: float) -> tuple[float, float]:
        """(the time to learn, the time that was expected): an outlier counts as far as the usual spread goes, so a
        lasting change is followed within some twenty samples and a single one is not."""
        if self._samples - self._estimated > min(STALE, self._samples // 8):
            self.times()
        if self._times is None or segment.count == 0.0:
            return ms, ms
        expected = self._times.at(tokens, context)
        residual = ms / expected - 1.0
        if segment.count < FEW:
            if residual < -self._spread:
                segment.fade(0.25)
            return min(ms, 1.5 * expected), expected
        most = CLIP * self._spread
        residual = min(most, max(-most, residual))
        self._drift += SPREAD_RATE * (residual - self._drift)
        self._spread = max(LEAST_SPREAD, self._spread + SPREAD_RATE * (abs(residual) - self._spread))
        return expected * (1.0 + max(-0.9, residual)), expected

    def _catch_up(self, segment: _Segment) -> None:
        segment.fade(KEEP_IDLE ** max(0, self._samples - segment.seen))
        segment.seen = self._samples

    def _estimate(self) -> StepTimes | None:
        for segment in self._segments.values():
            self._catch_up(segment)
        self._segments = {index: segment for index, segment in sorted(self._segments.items()) if segment.count > FAINT}
        if not self._segments:
            return None
        last = max(index + (segment.squares[2] > 0) for index, segment in self._segments.items())
        normal, right = self._equations(last + 1)
        _smooth(normal, self._typical(last + 1))
        normal[-1, -1] += CONTEXT_PRIOR / float(self._typical(1)[0]) ** 2
        solution = np.linalg.solve(normal, right)
        context = float(solution[-1])
        if context < 0.0:
            context = 0.0
            solution[:-1] = np.linalg.solve(normal[:-1, :-1], right[:-1])
        weights = np.diag(normal)[:-1]
        least = 1e-3 * float(self._typical(1)[0])
        ms = isotonic(np.maximum(solution[:-1], least), weights)
        return StepTimes(KNOTS[: last + 1], tuple(float(value) for value in ms), context / CONTEXT_UNIT, self._samples)

    def _equations(self, knots: int) -> tuple[Floats, Floats]:
        """The sum of all segments' normal equations; the last row is the context's."""
        normal, right = np.zeros((knots + 1, knots + 1)), np.zeros(knots + 1)
        for index, segment in self._segments.items():
            ll, lr, rr, lc, rc, cc = segment.squares
            rows = [index, min(index + 1, knots - 1), knots]
            np.add.at(normal, np.ix_(rows, rows), np.array([[ll, lr, lc], [lr, rr, rc], [lc, rc, cc]]))
            np.add.at(right, rows, segment.right)
        return normal, right

    def _typical(self, knots: int) -> Floats:
        """About how long a step of each knot's size takes, for the prior's scale."""
        known = [(index, s.moments[1] / s.moments[0]) for index, s in self._segments.items()]
        places, values = zip(*known, strict=True)
        typical: Floats = np.interp(np.arange(knots), places, values)
        return typical


def _smooth(normal: Floats, typical: Floats) -> None:
    """Add the prior: second differences over the sizes are small beside `typical` times. Two knots, or a single one
    that no sample touches, get a faint pull to their neighbour instead, so that there always is a solution."""
    knots = len(typical)
    sizes = np.array(KNOTS[:knots], dtype=np.float64)
    for first in range(knots - 2):
        before, after = sizes[first + 1] - sizes[first], sizes[first + 2] - sizes[first + 1]
        bend = np.array([after / (before + after), -1.0, before / (before + after)]) / typical[first + 1]
        normal[first : first + 3, first : first + 3] += SMOOTHNESS * np.outer(bend, bend)
    for first in range(knots - 1):
        step = np.array([-1.0, 1.0]) / typical[first + 1]
        normal[first : first + 2, first : first + 2] += 1e-6 * np.outer(step, step)


def isotonic(values: Floats, weights: Floats) -> Floats:
    """The never falling sequence nearest to `values` in weighted least squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, mass, size = value, max(weight, 1e-12), 1
        while pools and pools[-1][0] > mean:
            before, more, length = pools.pop()
            mean = (mean * mass + before * more) / (mass + more)
            mass, size = mass + more, size + length
        pools.append((mean, mass, size))
    return np.repeat([mean for mean, _, _ in pools], [size for _, _, size in pools])
