"""The verifiers that are known, and which of them takes a session. Pure; times are local monotonic seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.step_curve import StepTimes
from paceline.wire import DrafterStatus, PolicyDecision, VerifierStatus

FRESH_S = 3.0
"""A verifier whose last status is older than this counts as away."""
EXPECTED_S = 10.0
"""A verifier that served less than this ago may be back in a moment."""
SETTLE_S = 3.0
"""After the bus came back, others may still be coming back: a verifier that does not answer is not away yet."""


@dataclass(slots=True)
class Known:
    status: VerifierStatus
    heard: float
    times: StepTimes | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for all sessions of one verifier at this moment. times: of its steps, None before it told any.
    fill_within_s: a starved session is filled after this time, whatever it costs others; None: when it earns that."""

    times: StepTimes | None = None
    fill: bool = True
    window_cap: int | None = None
    fill_within_s: float | None = None
    price: float = 0.0
    """Of a token at the verifier; 0 before there was one."""


class Directory:
    """Statuses of one model's verifiers, and the policy's word."""

    def __init__(self, fingerprint: str, fill_within_s: float | None = None) -> None:
        self._fingerprint = fingerprint
        self._fill_within_s = fill_within_s
        self._known: dict[str, Known] = {}
        self._drafters: dict[str, tuple[DrafterStatus, float]] = {}
        self._settling_until = 0.0
        self._served = -math.inf
        self.coming = -math.inf
        """When a verifier last said that it loads our model."""
        self.policy: PolicyDecision | None = None

    @property
    def fill(self) -> bool:
        return self.policy.fill if self.policy is not None else True

    @property
    def window_cap(self) -> int | None:
        return self.policy.window_cap if self.policy is not None else None

    def hear(self, status: VerifierStatus, now: float) -> bool:
        """Take in a status. True when this verifier was started anew since the last, or failed: what it held or was
        doing is lost."""
        before = self._known.get(status.verifier)
        same = before is not None and before.status.curve == status.curve
        times = before.times if before is not None and same else StepTimes.of(status.curve)
        self._known[status.verifier] = Known(status, now, times)
        if self.serves(status.verifier, now):
            self._served = now
        if status.state == "loading" and status.fingerprint == self._fingerprint:
            self.coming = now
        return before is not None and (
            status.steps < before.status.steps
            or (status.state in ("loading", "failed") and status.state != before.status.state)
        )

    def hear_drafter(self, status: DrafterStatus, now: float) -> None:
        self._drafters[status.drafter] = (status, now)
        self._drafters = {name: known for name, known in self._drafters.items() if now - known[1] <= FRESH_S}

    def draft_s(self, now: float) -> float | None:
        """Time of a hosted draft token; None where no drafter is ready that knows."""
        known = [
            status.draft_ms / 1000
            for status, heard in self._drafters.values()
            if now - heard <= FRESH_S and status.state == "ready" and status.draft_ms > 0
        ]
        return min(known, default=None)

    def obey(self, decision: PolicyDecision) -> None:
        """The last decision counts; a restarted policy counts its versions anew."""
        if self.policy is None or decision.t_sent >= self.policy.t_sent:
            self.policy = decision

    def lose(self, name: str) -> None:
        """It is away until it is heard again."""
        self._known.pop(name, None)

    def bus_back(self, now: float) -> None:
        """No status could be heard while the bus was away: nobody's silence counts."""
        self._settling_until = now + SETTLE_S
        for known in self._known.values():
            known.heard = now

    def settling(self, now: float) -> bool:
        return now < self._settling_until

    def heard(self, name: str) -> float | None:
        known = self._known.get(name)
        return known.heard if known is not None else None

    def terms(self, name: str, price: float = 0.0) -> Terms:
        known = self._known.get(name)
        times = known.times if known is not None else None
        return Terms(times, self.fill, self.window_cap, self._fill_within_s, price)

    def serves(self, name: str, now: float) -> bool:
        """May sessions that sit there go on? A draining verifier serves those until they are moved."""
        known = self._known.get(name)
        return (
            known is not None
            and now - known.heard <= FRESH_S
            and known.status.state in ("ready", "draining")
            and known.status.fingerprint == self._fingerprint
        )

    def expects(self, now: float) -> bool:
        """Is it likely that a verifier serves in a moment, where none does now?"""
        return now - self._served <= EXPECTED_S

    def serving(self, now: float) -> list[str]:
        return [name for name in self._known if self.serves(name, now)]

    def takes(self, name: str, now: float) -> bool:
        return self.serves(name, now) and self._known[name].status.state == "ready"

    def choose(self, load: Mapping[str, int], now: float) -> str | None:
        """The verifier for a session: of those that the policy admits (any ready one where none of them is), the one
        with the fewest sessions of ours. Decisions come once a second, sessions in bursts: `load` is newer."""
        ready = [name for name in self._known if self.takes(name, now)]
        admit = self.policy.admit if self.policy is not None else ()
        admitted = [name for name in admit if name in ready]
        return min(admitted or sorted(ready), key=lambda name: load.get(name, 0), default=None)

    def room(self, now: float) -> int | None:
        """Tokens that the roomiest serving verifier could hold of one session; None when nobody serves."""
        sizes = [
            min(known.status.context, known.status.cells_total or known.status.context)
            for name, known in self._known.items()
            if self.serves(name, now)
        ]
        return max(sizes, default=None)
