"""Should the cloud's own drafter fill the bubbles of a session whose drafts come from an edge? Pure; seconds.

It is tried where the closed form promises something, and kept where the session then gets its tokens faster than
before. What did not help is tried again later, after a pause that doubles.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from paceline.step_curve import StepTimes
from paceline.theory import colocated

PROMISES = 0.85
"""Of the time that a token takes now: what a trial must promise at least to save."""
KEEPS = 0.95
"""Of that time what a trial may take at most, to go on."""
MEASURED_TOKENS = 48
FIRST_REST_S = 10.0
LONGEST_REST_S = 300.0
OTHERS = 3
"""With more sessions than this beside it on its verifier there are no bubbles to fill."""
IDLE_S = 2.0
"""After a pause this long between two commits (a client that was away) what was measured before counts no more."""


def predicted_s(acceptance: float, draft_s: float, times: StepTimes, longest: int, context: int) -> float:
    """Time of a token when the cloud drafts for itself, with the best block of at most `longest`."""
    return min(
        colocated(acceptance, block, draft_s, times.at(block + 1, context) / 1000) for block in range(1, longest + 1)
    )


@dataclass
class Pace:
    """Time of a token over the last MEASURED_TOKENS."""

    _commits: deque[tuple[float, int]] = field(default_factory=deque)
    """When, and how many tokens there were by then."""

    def committed(self, tokens: int, now: float) -> None:
        if self._commits and now - self._commits[-1][0] > IDLE_S:
            self.restart()
        total = tokens + (self._commits[-1][1] if self._commits else 0)
        self._commits.append((now, total))
        while len(self._commits) > 1 and total - self._commits[1][1] >= MEASURED_TOKENS:
            self._commits.popleft()

    def restart(self) -> None:
        self._commits.clear()

    @property
    def token_s(self) -> float | None:
        """None before enough was measured."""
        if not self._commits:
            return None
        (since, before), (now, total) = self._commits[0], self._commits[-1]
        return (now - since) / (total - before) if total - before >= MEASURED_TOKENS else None


@dataclass
class Rest:
    """After trials that did not help: no other one on that verifier `until` then."""

    until: float = 0.0
    next_s: float = FIRST_REST_S

    def begin(self, now: float) -> None:
        self.until, self.next_s = now + self.next_s, min(2 * self.next_s, LONGEST_REST_S)


@dataclass
class Assist:
    """Of one session. `on`: the hosted drafter is wanted."""

    on: bool = False
    pace: Pace = field(default_factory=Pace)
    _helping: bool = False
    """Its drafts have come: what is measured from here on is with them."""
    _proven: bool = False
    _before_s: float = 0.0
    rest: Rest = field(default_factory=Rest)

    def block_came(self) -> None:
        if self.on and not self._helping:
            self._helping = True
            self.pace.restart()

    def may_start(self, now: float, others: int) -> bool:
        """Is the prediction asked for?"""
        return not self.on and others <= OTHERS and now >= self.rest.until and self.pace.token_s is not None

    def decide(self, now: float, *, promised_s: float | None, others: int) -> Literal["start", "stop"] | None:
        """What changes now. promised_s: `predicted_s`, where `may_start` said so; others: sessions beside it."""
        if not self.on:
            token_s = self.pace.token_s
            if promised_s is None or token_s is None or promised_s >= PROMISES * token_s:
                return None
            self.on, self._helping, self._proven, self._before_s = True, False, False, token_s
            return "start"
        if others > OTHERS:
            return self._stop()
        if self._helping and not self._proven and (token_s := self.pace.token_s) is not None:
            if token_s > KEEPS * self._before_s:
                return self.failed(now)
            self._proven, self.rest.next_s = True, FIRST_REST_S
        return None

    def failed(self, now: float) -> Literal["stop"]:
        """It did not help, or did not come."""
        self.rest.begin(now)
        return self._stop()

    def _stop(self) -> Literal["stop"]:
        self.on = False
        self.pace.restart()
        return "stop"
