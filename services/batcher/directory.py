"""The verifiers that are known, and which of them takes a session. Pure; times are local monotonic seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.wire import PolicyDecision, VerifierStatus

FRESH_S = 3.0
"""A verifier whose last status is older than this counts as away."""
SETTLE_S = 3.0
"""After the bus came back, others may still be coming back: a verifier that does not answer is not away yet."""


@dataclass(slots=True)
class Known:
    status: VerifierStatus
    heard: float


class Directory:
    """Statuses of one model's verifiers, and the policy's word."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self._known: dict[str, Known] = {}
        self._settling_until = 0.0
        self.policy: PolicyDecision | None = None

    @property
    def fill(self) -> bool:
        return self.policy.fill if self.policy is not None else True

    @property
    def window_cap(self) -> int | None:
        return self.policy.window_cap if self.policy is not None else None

    def hear(self, status: VerifierStatus, now: float) -> bool:
        """Take in a status. True when this verifier was started anew since the last: what it held or was doing is
        lost."""
        before = self._known.get(status.verifier)
        self._known[status.verifier] = Known(status, now)
        return before is not None and (
            status.steps < before.status.steps or (status.state == "loading" and before.status.state != "loading")
        )

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

    def serves(self, name: str, now: float) -> bool:
        """May sessions that sit there go on? A draining verifier serves those until they are moved."""
        known = self._known.get(name)
        return (
            known is not None
            and now - known.heard <= FRESH_S
            and known.status.state in ("ready", "draining")
            and known.status.fingerprint == self._fingerprint
        )

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
