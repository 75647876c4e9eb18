"""Node numbers of one drafting source: incarnations, ids given out, ids the batcher has seen, and when to send again.
Pure, times in seconds.

An **incarnation** is one run of node ids 1, 2, ...; it is never reused, and a higher one makes the batcher forget what
it saw of the lower ones. Connection number << 16 plus a count; a source told of a higher one takes that + 1.
"""

from __future__ import annotations

from paceline.control import Pace

INCARNATION_BITS = 16
Seen = tuple[int, int]
"""[incarnation, highest contiguous node id processed], as in Verdict.seen."""


class Numbers:
    """`given`: ids 1..given were sent in this incarnation. `acked`: ids 1..acked were processed."""

    def __init__(self, connection: int, pace: Pace) -> None:
        self._pace = pace
        self.incarnation = connection << INCARNATION_BITS
        self.given = 0
        self.acked = 0
        self.accepted_once = False
        """The batcher has processed something of an incarnation of ours."""
        self._gap = False
        self._resends = 0
        self._last_resend: float | None = None
        self._waiting_since = 0.0

    def give(self, count: int, live: int, now: float) -> int:
        """The first of `count` new ids, which go out now beside `live` sent nodes that still matter."""
        if not live or self.acked == self.given:
            self._waiting_since = now
        first = self.given + 1
        self.given += count
        return first

    def restart(self, now: float, above: int = 0) -> None:
        """A new incarnation, higher than the present one and than `above`; nothing is given out or seen in it."""
        self.incarnation = max(self.incarnation, above) + 1
        self._clear(now)

    def reconnect(self, connection: int, now: float) -> None:
        self.incarnation = max(connection << INCARNATION_BITS, self.incarnation + 1)
        self._clear(now)

    def _clear(self, now: float) -> None:
        self.given = self.acked = 0
        self._gap = False
        self._last_resend = self._waiting_since = now

    def hear(self, seen: Seen | None, gap: bool, now: float) -> bool:
        """What a verdict says of this source. True: another incarnation overtook this one, restart above it."""
        if seen is None and not gap:
            return False
        incarnation, node = seen or (self.incarnation, self.acked)
        if incarnation > self.incarnation or (incarnation == self.incarnation and node > self.given):
            return True
        if incarnation == self.incarnation:
            self._move(node, gap, now)
            self._gap = self._gap or (gap and self._may_resend(now))
        return False

    def _move(self, node: int, gap: bool, now: float) -> None:
        """`seen` only grows, but that a batcher which had to take over the store's history forgets, and names a gap."""
        self.accepted_once = True
        if gap and node < self.acked:
            self.acked = node
        elif node > self.acked:
            self.acked = node
            self._resends = 0
            self._waiting_since = now

    def _may_resend(self, now: float) -> bool:
        """Within a round trip of a resend, gaps are still about what was sent before it."""
        return self._last_resend is None or now - self._last_resend >= self._pace.round_trip

    def resend_due(self, live: int, now: float) -> bool:
        """`live`: sent nodes that still matter. A gap was named, or what is unanswered was waited for long enough."""
        if self._gap:
            return True
        return bool(live) and self.acked < self.given and now >= self.patience_ends

    @property
    def patience_ends(self) -> float:
        return self._waiting_since + self._pace.patience_s(self._resends)

    def resent(self, now: float) -> None:
        self._gap = False
        self._resends += 1
        self._last_resend = self._waiting_since = now
