"""How likely a draft fits, learned while it runs: from the draft's own numbers to the target's acceptance. Pure.

A draft model's probability says how sure it is, not how often the target agrees. What does is the *gap*, the noisy
score of the choice minus that of the best runner-up (paceline.coupling), together with that probability; how they
translate differs by pair of models and by text. So every decided draft is learned from, one Calibration per pair of
models on a device (kept by paceline.calibration_file), and a SessionCalibration on top of it that follows one text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, Self

import msgspec
import numpy as np

LOWEST, HIGHEST = 0.005, 0.995
"""Bounds of an acceptance: nothing is certain, and a product of many stays above zero."""
RANKS = 4
"""Runner-ups whose chances are told apart; later ones have none."""

PRIOR_WEIGHTS = (-0.154, 0.952, 0.326)
"""Of 1, the gap (at most GAP_CAP) and the log-odds of the draft's probability. A prior only: the logistic regression
over 1,024 tokens of one pair (SmolLM2 135M, F16 target and Q4_0 draft, half of them at temperature 0, half at 0.8),
which leaves 0.44 nats a token; temperature by temperature (0.232, 0.537, 0.675) and (-0.040, 0.991, 0.336)."""
PRIOR_STRENGTH = 8.0
"""Weight of the prior, in curvature: about as much as 50 tokens of middling certainty."""
PRIOR_MEAN = 0.71
"""Acceptance in the same records, at either temperature."""
PRIOR_HITS = (0.50, 0.19, 0.10, 0.05)
"""P(the target's choice is runner-up 1, 2, 3, 4 | the draft was wrong), in the same records; by temperature
(.56, .12, .11, .05) and (.44, .26, .09, .06). A prior from a 135M pair."""
PRIOR_MISSES = 30.0
"""Wrong drafts that PRIOR_HITS count as."""

GAP_CAP = 6.0
ODDS_CAP = 6.0

_KEEP = 0.998
"""Share of what is known that stays with each new sample: the last 500 count."""
_SESSION_KEEP = 0.98
_SESSION_STRENGTH = 4.0
_SESSION_MISSES = 12.0
_MEAN_RATE = 0.01
_SESSION_MEAN_RATE = 0.05
_MOST_WEIGHT = 25.0
_MOST_STEP = 1.0
_MOST_FEATURE = 1e3
_LEAST_CURVATURE = 1e-3


class OnlineLogistic:
    """Logistic regression that learns one sample at a time and forgets old ones, starting at `prior` weights.

    Each sample is one Newton step on the logistic loss, of which the past is kept as a quadratic around the weights
    (its curvature fades by `keep` a sample) and the prior as another one of curvature `strength`, to which weights
    return where samples stop saying otherwise. Inputs x are as long as `prior`; a constant 1 in x is the caller's.
    Inputs that are no finite numbers count as 0.
    """

    def __init__(self, prior: Sequence[float], strength: float, *, keep: float = _KEEP) -> None:
        self._prior = np.array([_finite(value) for value in prior], dtype=np.float64)
        self._strength = max(1e-3, _finite(strength))
        self._keep = keep
        self.reset()

    def reset(self) -> None:
        """Back to the prior."""
        self.weights = [float(value) for value in self._prior]
        self._curvature = self._strength * np.eye(len(self.weights))

    def probability(self, x: Sequence[float], offset: float = 0.0) -> float:
        """P(hit | x), strictly between 0 and 1. offset: added to the log-odds."""
        return _sigmoid(self.score(x) + offset)

    def score(self, x: Sequence[float]) -> float:
        """The log-odds."""
        return sum(weight * _finite(value) for weight, value in zip(self.weights, x, strict=True))

    def learn(self, x: Sequence[float], hit: bool, offset: float = 0.0) -> None:
        inputs = np.array([_finite(value) for value in x], dtype=np.float64)
        weights = np.array(self.weights)
        expected = _sigmoid(float(weights @ inputs) + offset)
        spread = max(expected * (1.0 - expected), _LEAST_CURVATURE)
        pull = (1.0 - self._keep) * self._strength
        self._curvature *= self._keep
        self._curvature += pull * np.eye(len(weights)) + spread * np.outer(inputs, inputs)
        slope = pull * (weights - self._prior) + (expected - float(hit)) * inputs
        step = np.linalg.solve(self._curvature, slope)
        step *= min(1.0, _MOST_STEP / max(float(np.abs(step).max()), 1e-12))
        self.weights = [float(value) for value in np.clip(weights - step, -_MOST_WEIGHT, _MOST_WEIGHT)]

    def dump(self) -> dict[str, object]:
        """For JSON."""
        return {"weights": list(self.weights), "curvature": self._curvature.tolist()}

    def restore(self, data: object) -> bool:
        """What `dump` gave. Anything else changes nothing and gives False."""
        size = len(self._prior)
        try:
            weights = np.array(data["weights"], dtype=np.float64)  # type: ignore[index]
            curvature = np.array(data["curvature"], dtype=np.float64)  # type: ignore[index]
        except (TypeError, KeyError, ValueError, OverflowError):
            return False
        if weights.shape != (size,) or curvature.shape != (size, size):
            return False
        if not (np.isfinite(weights).all() and np.isfinite(curvature).all() and np.abs(weights).max() <= _MOST_WEIGHT):
            return False
        if not np.allclose(curvature, curvature.T) or np.linalg.eigvalsh(curvature)[0] < self._strength / 100:
            return False
        self.weights, self._curvature = [float(value) for value in weights], curvature
        return True


class Calibrated(Protocol):
    """What Calibration and SessionCalibration have in common."""

    @property
    def mean(self) -> float:
        """Smoothed acceptance of drafted positions, in [0, 1], for planning."""
        ...

    def acceptance(self, confidence: float, gap: float) -> float:
        """P(the draft fits | what is before it fits), in [LOWEST, HIGHEST]. confidence: the draft's own probability of
        its choice; gap: of noisy score to the best runner-up (inf where there is none)."""
        ...

    def hit(self, rank: int) -> float:
        """P(the target's choice is runner-up `rank` (1: the best) | the draft was wrong); 0 beyond RANKS."""
        ...

    def learn(self, confidence: float, gap: float, rank: int) -> None:
        """A decided position: rank 0, the draft was right; k, runner-up k was right; -1, none that was named."""
        ...


_Count = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]


class _Kept(msgspec.Struct, frozen=True):
    """The shape of a dump."""

    version: Literal[1]
    fits: dict[str, Any]
    hits: tuple[_Count, _Count, _Count, _Count]
    misses: _Count
    mean: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    learned: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Calibration:
    """Of one pair of models."""

    def __init__(self) -> None:
        self._fits = OnlineLogistic(PRIOR_WEIGHTS, PRIOR_STRENGTH)
        self._ranks = _Ranks(PRIOR_MISSES)
        self.mean = PRIOR_MEAN
        self.learned = 0
        """Samples since the beginning, over all processes that kept it."""

    def acceptance(self, confidence: float, gap: float) -> float:
        return self.shifted(confidence, gap, 0.0)

    def shifted(self, confidence: float, gap: float, offset: float) -> float:
        """`acceptance` with `offset` added to its log-odds."""
        return _bounded(self._fits.probability(_features(confidence, gap), offset))

    def score(self, confidence: float, gap: float) -> float:
        """Log-odds of `acceptance`."""
        return self._fits.score(_features(confidence, gap))

    def hit(self, rank: int) -> float:
        return self._ranks.share(rank, PRIOR_HITS)

    def learn(self, confidence: float, gap: float, rank: int) -> None:
        self._fits.learn(_features(confidence, gap), rank == 0)
        self.mean += _MEAN_RATE * (float(rank == 0) - self.mean)
        self.learned += 1
        if rank != 0:
            self._ranks.learn(rank, _KEEP)

    def for_session(self) -> SessionCalibration:
        return SessionCalibration(self)

    def dump(self) -> dict[str, object]:
        """For JSON; `load` takes it back."""
        return {
            "version": 1,
            "fits": self._fits.dump(),
            "hits": list(self._ranks.counts),
            "misses": self._ranks.misses,
            "mean": self.mean,
            "learned": self.learned,
        }

    @classmethod
    def load(cls, data: object) -> Self:
        """From what `dump` gave; from anything else, one that has learned nothing."""
        fresh = cls()
        try:
            kept = msgspec.convert(data, _Kept)
        except msgspec.ValidationError:
            return fresh
        if sum(kept.hits) <= kept.misses + 1e-6 and fresh._fits.restore(kept.fits):
            fresh._ranks.counts, fresh._ranks.misses = list(kept.hits), kept.misses
            fresh.mean, fresh.learned = kept.mean, kept.learned
        return fresh


class SessionCalibration:
    """Of one text: the shared calibration and a quick correction of its own, which fades when it is not needed.

    What it learns, both learn."""

    def __init__(self, shared: Calibration) -> None:
        self.shared = shared
        self._bias = OnlineLogistic((0.0,), _SESSION_STRENGTH, keep=_SESSION_KEEP)
        self._ranks = _Ranks(_SESSION_MISSES)
        self.mean = shared.mean

    def acceptance(self, confidence: float, gap: float) -> float:
        return self.shared.shifted(confidence, gap, self._bias.weights[0])

    def hit(self, rank: int) -> float:
        return self._ranks.share(rank, [self.shared.hit(k) for k in range(1, RANKS + 1)])

    def learn(self, confidence: float, gap: float, rank: int) -> None:
        self._bias.learn((1.0,), rank == 0, self.shared.score(confidence, gap))
        if rank != 0:
            self._ranks.learn(rank, _SESSION_KEEP)
        self.mean += _SESSION_MEAN_RATE * (float(rank == 0) - self.mean)
        self.shared.learn(confidence, gap, rank)


class _Ranks:
    """Which runner-up was right, by forgetful counts beside a prior that counts as `weight` misses."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self.counts = [0.0] * RANKS
        self.misses = 0.0

    def share(self, rank: int, prior: Sequence[float]) -> float:
        if not 1 <= rank <= RANKS:
            return 0.0
        return (self.counts[rank - 1] + self._weight * prior[rank - 1]) / (self.misses + self._weight)

    def learn(self, rank: int, keep: float) -> None:
        self.counts = [keep * count for count in self.counts]
        self.misses = keep * self.misses + 1.0
        if 1 <= rank <= RANKS:
            self.counts[rank - 1] += 1.0


def _features(confidence: float, gap: float) -> tuple[float, float, float]:
    sure = min(1.0 - 1e-9, max(1e-9, confidence)) if not math.isnan(confidence) else 0.5
    odds = math.log(sure / (1.0 - sure))
    lead = min(GAP_CAP, max(0.0, gap)) if not math.isnan(gap) else 0.0
    return 1.0, lead, min(ODDS_CAP, max(-ODDS_CAP, odds))


def _sigmoid(score: float) -> float:
    return 1.0 / (1.0 + math.exp(-min(30.0, max(-30.0, score))))


def _bounded(probability: float) -> float:
    return min(HIGHEST, max(LOWEST, probability))


def _finite(value: float) -> float:
    return min(_MOST_FEATURE, max(-_MOST_FEATURE, value)) if math.isfinite(value) else 0.0
