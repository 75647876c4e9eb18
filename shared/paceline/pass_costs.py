"""What a pass of a draft model costs by its number of rows, learned from the passes themselves. Pure; seconds.

Rows of one pass share the reading of the weights, so a further one costs less than the first; how much less is up to
the device and need not be even: kernels take rows in groups, and four may cost less than three. One object serves all
sessions of an engine, so that a new session knows what the last one learned.
"""

from __future__ import annotations

SMOOTHING = 0.2
"""Weight of a new sample in a moving average."""
FURTHER_ROW = 0.25
"""Cost of a further row in first rows, before it was measured: low, so that it is tried."""
MOST_ROWS = 16
SHORTEST_S = 1e-4


class PassCosts:
    """`first_s`: a pass of one row, None before one was measured."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self._more_s: list[float | None] = [0.0] + [None] * (MOST_ROWS - 1)
        """What a pass of i + 1 rows takes beyond one of one row."""

    def learn(self, rows: int, seconds: float) -> None:
        """A steady pass (nothing was caught up on) drafted a token for each of `rows` paths."""
        if rows == 1 or self.first_s is None:
            self.first_s = smooth(self.first_s, seconds / (1.0 + FURTHER_ROW * (rows - 1)))
        if rows > 1:
            index = min(rows, MOST_ROWS) - 1
            self._more_s[index] = smooth(self._more_s[index], max(0.0, seconds - self.first_s))

    def of(self, rows: int) -> float:
        """A pass of so many rows; in units of one row before anything was measured."""
        first = max(self.first_s or 1.0, SHORTEST_S)
        index = min(rows, MOST_ROWS) - 1
        known = max(i for i in range(index + 1) if self._more_s[i] is not None)
        return first + (self._more_s[known] or 0.0) + FURTHER_ROW * first * (rows - 1 - known)

    @property
    def measured(self) -> dict[int, float]:
        """By number of rows."""
        if self.first_s is None:
            return {}
        return {i + 1: self.first_s + more for i, more in enumerate(self._more_s) if more is not None}


def smooth(average: float | None, sample: float) -> float:
    return sample if average is None else average + SMOOTHING * (sample - average)
