"""The price of verifier time as it is told to drafting sources. Pure; seconds."""

from __future__ import annotations

import math

TIME_CONSTANT_S = 0.5
"""Several round trips, so that a source that follows the price does not chase its own effect."""
CHANGE = 0.02
RELATIVE_CHANGE = 0.1


class Price:
    """What `paceline.batch_choice.Chosen.price` says step by step, smoothed over time."""

    def __init__(self) -> None:
        self.value: float | None = None
        """0..1; None before the first."""
        self._noted = 0.0

    def note(self, now: float, price: float) -> None:
        """A step in which somebody decides was chosen at `price`. now: monotonic."""
        if not math.isfinite(price):
            return
        price = min(1.0, max(0.0, price))
        if self.value is None:
            self.value = price
        else:
            self.value += -math.expm1(-max(0.0, now - self._noted) / TIME_CONSTANT_S) * (price - self.value)
        self._noted = now

    def changed(self, told: float | None) -> bool:
        """Is the price so far from what was `told` (None: nothing yet) that a message should say so? By more than a
        tenth, and more than CHANGE: nobody decides by the last percent of a low price."""
        if self.value is None:
            return False
        return told is None or abs(self.value - told) > max(CHANGE, RELATIVE_CHANGE * told)
