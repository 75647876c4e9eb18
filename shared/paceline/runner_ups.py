"""Which runner-up is the target's choice where the draft's own is not? Pure.

Both models score with the same noise, so a runner-up that is well ahead of the next one is likely the choice of both:
of the wrong drafts of one 135M pair the first runner-up was right in 17 to 32 % where the second one nearly tied with
it, and in 57 to 92 % where it led by more than 0.8.
"""

from __future__ import annotations

import math

from paceline.calibration import Calibrated
from paceline.engine import Guess

USUAL_GAPS = (0.0, 0.7, 1.25, 1.7)
"""Of runner-ups 1, 2, ... to the first one, in the noisy score: means of the same pair."""
SHARPNESS = 1.2
"""How much a gap beyond the usual one counts against a runner-up: weight exp(-SHARPNESS x gap)."""


def chances(guess: Guess, fits: float, calibration: Calibrated) -> list[float]:
    """For each of the guess's alternatives the chance that it fits if what is before it does. fits: that of the guess's
    own token. Ranks as a whole are right as often as the calibration says."""
    if not guess.alternatives:
        return []
    hits = [calibration.hit(rank) for rank in range(1, len(guess.alternatives) + 1)]
    first = guess.alternatives[0][1]
    weights = [
        hit * math.exp(-SHARPNESS * (_bounded(gap - first) - usual))
        for hit, (_, gap), usual in zip(hits, guess.alternatives, USUAL_GAPS, strict=False)
    ]
    total = sum(weights)
    if total <= 0.0:
        return [0.0] * len(weights)
    return [(1.0 - fits) * sum(hits) * weight / total for weight in weights]


def _bounded(gap: float) -> float:
    return min(20.0, max(0.0, gap)) if not math.isnan(gap) else 20.0
