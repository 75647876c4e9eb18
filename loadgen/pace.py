"""How long a draft model's pass takes, by the tokens that it feeds. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.kv_ledger import common_prefix

HELD_PATHS = 8
"""Paths of one session whose KV a device is taken to hold."""


@dataclass(frozen=True)
class Pace:
    """ms: milliseconds of a pass by tokens fed, never falling; linear between, beyond the last by its last slope."""

    ms: Mapping[int, float]

    def __call__(self, tokens: float) -> float:
        return interpolated(self.ms, tokens)

    def scaled(self, one_ms: float) -> Pace:
        """The same shape for a device that takes `one_ms` for one token."""
        factor = one_ms / self(1)
        return Pace({tokens: ms * factor for tokens, ms in self.ms.items()})

    @classmethod
    def learned(cls, passes: Iterable[tuple[int, float]]) -> Pace | None:
        """From (tokens fed, milliseconds) of real passes: the median of each size, pooled where it would fall with the
        size. None without a pass."""
        sizes: dict[int, list[float]] = defaultdict(list)
        for tokens, ms in passes:
            sizes[tokens].append(ms)
        found = {tokens: (statistics.median(sizes[tokens]), len(sizes[tokens])) for tokens in sorted(sizes)}
        return cls(_never_falling(found)) if found else None


def interpolated(values: Mapping[int, float], at: float) -> float:
    """Linear between the points; the first value below them, the last slope (never a falling one) beyond."""
    places = sorted(values)
    if at <= places[-1] or len(places) == 1:
        return float(np.interp(at, places, [values[place] for place in places]))
    before, last = places[-2:]
    slope = max(0.0, (values[last] - values[before]) / (last - before))
    return values[last] + slope * (at - last)


def _never_falling(found: Mapping[int, tuple[float, int]]) -> dict[int, float]:
    """Pool adjacent violators: the closest sequence, weighted by count, that does not fall."""
    pools: list[tuple[float, int, list[int]]] = []
    for tokens, (ms, count) in found.items():
        pool = (ms, count, [tokens])
        while pools and pools[-1][0] > pool[0]:
            value, weight, members = pools.pop()
            total = weight + pool[1]
            pool = ((value * weight + pool[0] * pool[1]) / total, total, members + pool[2])
        pools.append(pool)
    return {tokens: value for value, _, members in pools for tokens in members}


class FedTokens:
    """How many tokens each pass of one session feeds: a device feeds what no path that it holds has in common."""

    def __init__(self) -> None:
        self._held: list[Sequence[int]] = []

    def rows(self, paths: Sequence[Sequence[int]]) -> int:
        """Of a pass over `paths`, which are held afterwards."""
        return sum(self._feed(list(path)) for path in paths)

    def _feed(self, path: Sequence[int]) -> int:
        known = [common_prefix(held, path) for held in self._held]
        longest = max(known, default=0)
        stays = [held for held, length in zip(self._held, known, strict=True) if length < len(held)]
        self._held = [*stays[-HELD_PATHS + 1 :], path]
        return max(1, len(path) - longest)
