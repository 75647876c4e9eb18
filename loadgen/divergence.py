"""Where two runs of one prompt differ, and by how little the target's choice was made there.

The rule (docs/protocol.md): all modes give the same text. On a real engine logits differ in the last bits with the
shape of a batch, so a choice may flip where the two best scores nearly tie; such a place is reported with its margin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.coupling import noise

NEAR_TIE = 0.15
"""Scores (in logits) that lie within this may flip with the shape of a batch (docs/benchmarks.md)."""
TOP = 20
"""Most likely tokens to ask for when a margin is to be told."""


@dataclass(frozen=True)
class Split:
    """At `position` of the completion one run has `one` and the other `other`; None: that run had ended."""

    position: int
    one: int | None
    other: int | None


def first_difference(one: Sequence[int], other: Sequence[int]) -> Split | None:
    for position in range(max(len(one), len(other))):
        pair = tuple(tokens[position] if position < len(tokens) else None for tokens in (one, other))
        if pair[0] != pair[1]:
            return Split(position, *pair)
    return None


def margin(split: Split, known: Mapping[int, float], temperature: float, seed: int) -> float | None:
    """Difference of the two tokens' scores at the split, from the log-probabilities there. None: not among `known`.

    Without filters and penalties a score is log-probability / temperature plus the token's noise, up to a constant.
    """
    if split.one not in known or split.other not in known or split.one is None or split.other is None:
        return None
    tokens = np.array([split.one, split.other], dtype=np.int64)
    scores = np.array([known[split.one], known[split.other]], dtype=np.float64)
    if temperature:
        scores = scores / temperature + noise(seed, 0, split.position, tokens)
    return float(abs(scores[0] - scores[1]))
