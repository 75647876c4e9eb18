"""How long to wait before the next attempt. Pure."""

from __future__ import annotations

FIRST_S, LONGEST_S = 0.1, 2.0


def pause_s(attempt: int, luck: float) -> float:
    """Before attempt 0 almost nothing, then doubling from 0.1 s to at most 2 s. `luck` in [0, 1) spreads it over
    half to all of that, so that edges cut together do not come back together."""
    longest = FIRST_S / 2 if attempt == 0 else min(LONGEST_S, FIRST_S * 2.0 ** min(attempt, 10))
    return longest * (0.5 + luck / 2)
