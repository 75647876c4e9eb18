"""How long a session with nothing held waits for a draft before it gets a plain step. Pure.

**Starved**: the target's history is complete, nothing is held. Whatever else says that it should wait, after 3 round
trips + 150 ms it runs, so that no lost block stops a stream. The round trip is what the batcher can see of it: from the
session running dry to its next block, smoothed, with a quick rise and a slow fall.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_ROUND_TRIP_S = 0.1
LONGEST_ROUND_TRIP_S = 2.0
GRACE_S = 0.15
HOSTED_WAIT_S = 0.2
"""A hosted drafter sits next to us: what it does not bring in this time is not waited for."""


@dataclass(slots=True)
class Patience:
    round_trip_s: float = FIRST_ROUND_TRIP_S
    starved_since: float | None = None
    """Reset by every decided step."""
    dry_since: float | None = None
    """Reset by blocks only, so that plain steps in between do not shorten the estimate."""

    def starve(self, now: float) -> None:
        if self.starved_since is None:
            self.starved_since = now
        if self.dry_since is None:
            self.dry_since = now

    def block_came(self, now: float) -> None:
        if self.dry_since is not None:
            sample = min(now - self.dry_since, LONGEST_ROUND_TRIP_S)
            smooth = 0.9 * self.round_trip_s + 0.1 * sample
            self.round_trip_s = max(sample, smooth)
        self.dry_since = self.starved_since = None

    def late_block_came(self, now: float) -> None:
        """Plain steps were ahead of it, so no draft of it is held: the wait was too short for this round trip."""
        if self.dry_since is not None:
            self.round_trip_s = max(self.round_trip_s, min(now - self.dry_since, LONGEST_ROUND_TRIP_S))
        self.dry_since = None

    def stepped(self) -> None:
        self.starved_since = None

    def pause(self) -> None:
        """Nobody is there who could send a block: the wait begins anew."""
        self.starved_since = self.dry_since = None

    def starved_for(self, now: float) -> float:
        return 0.0 if self.starved_since is None else now - self.starved_since

    def exhausted(self, now: float, *, hosted: bool) -> bool:
        if self.starved_since is None:
            return False
        return now >= self.starved_since + self._wait_s(hosted)

    def ends_at(self, *, hosted: bool) -> float | None:
        """None while nothing is waited for."""
        return None if self.starved_since is None else self.starved_since + self._wait_s(hosted)

    def _wait_s(self, hosted: bool) -> float:
        wait = 3 * self.round_trip_s + GRACE_S
        return min(wait, HOSTED_WAIT_S) if hosted else wait
