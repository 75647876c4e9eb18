"""How much the confidence that a source states is worth, learned from what the target decided. Pure.

The verifier's time is spent by stated confidences, so they have to be true: each source's statement goes through an
online logistic regression on its log-odds, which begins as the identity. A source that overstates is marked down to
what it earns, a modest one up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.calibration import OnlineLogistic

LOWEST, HIGHEST = 0.005, 0.995
"""Bounds of a probability: nothing is certain, and a product of many stays above zero."""
ODDS_CAP = 4.5
IDENTITY = (0.0, 1.0)
"""Weights of 1 and the stated log-odds."""
LOOKUP = "lookup"
LOOKUP_PRIOR = (-1.86, 1.24)
"""Weights of 1 and log2 of the match: .35 for two tokens, .53 for three, .65 for four, .86 for eight."""
LONGEST_MATCH = 16
STRENGTH = 20.0
"""Weight of the shared prior, in curvature: about as much as 80 tokens of middling certainty."""
SESSION_STRENGTH = 2.0
SESSION_KEEP = 0.98
"""A session's own correction rests on its last 50 decided nodes or so."""
TAUGHT_FULLY = 64
"""Nodes of one session that the shared estimate learns from; of later ones it learns from one in TAUGHT_PART, so that
one long session, or a liar, does not speak for all."""
TAUGHT_PART = 8
MEAN_RATE = 0.02
SESSION_MEAN_RATE = 0.05
MEAN = 0.7
"""Acceptance of a source before anything is known; of look-ups LOOKUP_MEAN."""
LOOKUP_MEAN = 0.4
FIRST_PROBE_S = 2.0
LONGEST_PROBE_S = 30.0


class Trust:
    """Shared by all sessions of a model. Sources: "edge", "hosted", "lookup".

    `stated` is the source's own confidence, 0..1 (the wire's byte / 255); for "lookup" it is the number of tokens
    that match: `match_length + k` for node k = 0, 1, ... of a proposal, since the match has grown if the nodes before
    fit. What is no number counts as 0."""

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}

    def probability(self, source: str, stated: float) -> float:
        """P(the node fits | its parent fits), in [LOWEST, HIGHEST]."""
        return self.shifted(source, stated, 0.0)

    def shifted(self, source: str, stated: float, offset: float) -> float:
        """`probability` with `offset` added to its log-odds."""
        return _bounded(self._of(source).fits.probability(_features(source, stated), offset))

    def score(self, source: str, stated: float) -> float:
        """Log-odds of `probability`."""
        return self._of(source).fits.score(_features(source, stated))

    def learn(self, source: str, stated: float, fits: bool) -> None:
        """A node whose parent fitted was decided."""
        kept = self._of(source)
        kept.fits.learn(_features(source, stated), fits)
        kept.tally.note(fits, MEAN_RATE)

    def counts(self, source: str) -> tuple[int, int]:
        """(nodes decided, of these that fitted), as far as they were learned from."""
        return self._of(source).tally.counts

    def acceptance(self, source: str) -> float:
        """Smoothed share of decided nodes that fitted."""
        return self._of(source).tally.mean

    def probe(self, source: str, now: float) -> bool:
        """Asked for a source with held nodes that no step takes, since they look worthless: True now and then (after 2
        s, growing to 30 s until a node of it fits), and then one node of it is to be verified. now: s, monotonic."""
        return self._of(source).tally.probe(now)

    def for_session(self) -> SessionTrust:
        """A child that answers for one session and teaches this one."""
        return SessionTrust(self)

    def _of(self, source: str) -> _Source:
        kept = self._sources.get(source)
        if kept is None:
            kept = self._sources[source] = _Source(source)
        return kept


class SessionTrust:
    """As `Trust`, for one session: learns fast how its sources differ from the model's average."""

    def __init__(self, shared: Trust) -> None:
        self.shared = shared
        self._bias: dict[str, OnlineLogistic] = {}
        self._tallies: dict[str, _Tally] = {}

    def probability(self, source: str, stated: float) -> float:
        """P(the node fits | its parent fits), in [LOWEST, HIGHEST]."""
        bias = self._bias.get(source)
        return self.shared.shifted(source, stated, 0.0 if bias is None else bias.weights[0])

    def learn(self, source: str, stated: float, fits: bool) -> None:
        """A node whose parent fitted was decided."""
        tally = self._tally(source)
        if source not in self._bias:
            self._bias[source] = OnlineLogistic((0.0,), SESSION_STRENGTH, keep=SESSION_KEEP)
        self._bias[source].learn((1.0,), fits, self.shared.score(source, stated))
        tally.note(fits, SESSION_MEAN_RATE)
        if tally.decided <= TAUGHT_FULLY or tally.decided % TAUGHT_PART == 0:
            self.shared.learn(source, stated, fits)

    def counts(self, source: str) -> tuple[int, int]:
        """(nodes decided, of these that fitted)"""
        return self._tally(source).counts

    def acceptance(self, source: str) -> float:
        """Smoothed share of decided nodes that fitted."""
        return self._tally(source).mean

    def probe(self, source: str, now: float) -> bool:
        """As `Trust.probe`, of this session."""
        return self._tally(source).probe(now)

    def _tally(self, source: str) -> _Tally:
        tally = self._tallies.get(source)
        if tally is None:
            tally = self._tallies[source] = _Tally(self.shared.acceptance(source))
        return tally


class _Tally:
    """What became of one source's nodes, and when it is tried again."""

    def __init__(self, mean: float) -> None:
        self.mean = mean
        self.decided = self.fitted = 0
        self._interval = FIRST_PROBE_S
        self._due: float | None = None

    @property
    def counts(self) -> tuple[int, int]:
        return self.decided, self.fitted

    def note(self, fits: bool, rate: float) -> None:
        self.decided += 1
        self.fitted += fits
        self.mean += rate * (float(fits) - self.mean)
        if fits:
            self._interval, self._due = FIRST_PROBE_S, None

    def probe(self, now: float) -> bool:
        if self._due is None:
            self._due = now + self._interval
        if now < self._due:
            return False
        self._interval = min(LONGEST_PROBE_S, 2.0 * self._interval)
        self._due = now + self._interval
        return True


class _Source:
    def __init__(self, source: str) -> None:
        self.fits = OnlineLogistic(LOOKUP_PRIOR if source == LOOKUP else IDENTITY, STRENGTH)
        self.tally = _Tally(LOOKUP_MEAN if source == LOOKUP else MEAN)


def _features(source: str, stated: float) -> Sequence[float]:
    stated = stated if math.isfinite(stated) else 0.0
    if source == LOOKUP:
        return 1.0, math.log2(min(LONGEST_MATCH, max(1.0, stated)))
    sure = min(1.0 - 1e-6, max(1e-6, stated))
    return 1.0, min(ODDS_CAP, max(-ODDS_CAP, math.log(sure / (1.0 - sure))))


def _bounded(probability: float) -> float:
    return min(HIGHEST, max(LOWEST, probability))
