"""What an edge is told of a verdict: its own share of it, in as few bytes as possible. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from paceline.wire import Verdict


class EdgeView:
    """Of one session. `see` gives the frame to send, or None when nothing in the verdict is news to the edge."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._epoch = 0

    def see(self, verdict: Verdict) -> Verdict | None:
        """Counters only at the end; `seen` and `gap` of the edge's own drafts only, `seen` when it moved."""
        seen = verdict.seen.get("edge")
        gap = "edge" in verdict.gap
        moved = seen is not None and (gap or seen != self._seen)
        shown = replace(
            verdict,
            counters=verdict.counters if verdict.finish else None,
            seen={"edge": seen} if seen is not None and moved else {},
            gap=("edge",) if gap else (),
            connection=0,
        )
        news = verdict.epoch != self._epoch or moved or gap or verdict.tokens or verdict.finish
        told = (verdict.price, verdict.timing, verdict.window_cap, verdict.fed)
        if not news and all(item is None for item in told):
            return None
        self._epoch = verdict.epoch
        self._seen = seen or self._seen
        return shown
