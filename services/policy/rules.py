"""What the policy decides, from what it sees: pure, with hysteresis.

Two decisions: the **window cap** (most nodes a source may have in flight) and **admit** (which verifiers take new
sessions). A mark must be held for several looks in a row before a decision changes, and the mark for going back is
another one, so that no decision flaps. **fill** stays on: step by step the batchers charge a fill what it costs others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.wire import BatcherStatus, PolicyDecision, VerifierStatus

STATUS_TTL_S = 3.0
"""A status older than this counts as unknown: its verifier takes nothing new."""

WINDOW_CAPS = (64, 16, 8, 4)
"""Levels of the window cap, from no pressure to the most."""


@dataclass(frozen=True)
class Marks:
    """pressure: runnable sessions that a step had no room for, per ready verifier; cells: share of KV cells in use;
    busy: share of time spent in steps (between short steps a verifier waits for the bus). `looks` in a row (one a
    second) above the high or below the low mark change a decision."""

    pressure_high: float = 1.0
    pressure_low: float = 0.25
    busy_high: float = 0.5
    cells_high: float = 0.9
    cells_low: float = 0.75
    looks_up: int = 3
    looks_down: int = 5


@dataclass
class Switch:
    """A level from 0 to `top` that moves one step after enough looks in a row on one side."""

    top: int
    level: int = 0
    above: int = 0
    below: int = 0

    def look(self, *, high: bool, low: bool, marks: Marks) -> None:
        self.above = self.above + 1 if high else 0
        self.below = self.below + 1 if low else 0
        if self.above >= marks.looks_up and self.level < self.top:
            self.level, self.above = self.level + 1, 0
        elif self.below >= marks.looks_down and self.level > 0:
            self.level, self.below = self.level - 1, 0


@dataclass
class Rules:
    """The memory of the decisions for one model. fill: what an operator's own rules may set; the levels of `load` are
    those of the cap."""

    model: str
    marks: Marks = field(default_factory=Marks)
    fill: bool = True
    load: Switch = field(default_factory=lambda: Switch(top=len(WINDOW_CAPS) - 1))
    full: dict[str, Switch] = field(default_factory=dict)
    version: int = 0
    last: PolicyDecision | None = None

    def decide(
        self, verifiers: Iterable[VerifierStatus], batchers: Iterable[BatcherStatus], now: float
    ) -> PolicyDecision:
        """One look, once a second. The version grows when the decision differs from the last one."""
        ready = [status for status in verifiers if status.state == "ready" and now - status.t_sent <= STATUS_TTL_S]
        waiting = sum(status.waiting for status in batchers if now - status.t_sent <= STATUS_TTL_S)
        pressure = waiting / max(1, len(ready))
        busy = max((status.busy for status in ready), default=0.0)
        self.load.look(
            high=bool(ready) and pressure >= self.marks.pressure_high and busy >= self.marks.busy_high,
            low=pressure <= self.marks.pressure_low,
            marks=self.marks,
        )
        admit, admit_reason = self._admit(ready)
        cap = WINDOW_CAPS[self.load.level]
        reasons = (
            f"fill {'on' if self.fill else 'off'}, window cap {cap}: {pressure:.1f} sessions a verifier wait for a "
            f"step, verifiers are {busy:.0%} busy",
            admit_reason,
        )
        return self._versioned(self.fill, cap, admit, reasons, now)

    def _admit(self, ready: list[VerifierStatus]) -> tuple[tuple[str, ...], str]:
        """Verifiers with room, fewest sessions first; all ready ones when none has room."""
        if not ready:
            return (), "no verifier is ready"
        roomy = [status for status in ready if not self._is_full(status)]
        chosen = sorted(roomy or ready, key=lambda status: (status.sessions, status.verifier))
        held_back = sorted({status.verifier for status in ready} - {status.verifier for status in chosen})
        reason = f"new sessions go to {', '.join(status.verifier for status in chosen)}"
        if held_back:
            reason += f"; KV is nearly full on {', '.join(held_back)}"
        return tuple(status.verifier for status in chosen), reason

    def _is_full(self, status: VerifierStatus) -> bool:
        switch = self.full.setdefault(status.verifier, Switch(top=1))
        used = status.cells_used / max(1, status.cells_total)
        switch.look(high=used >= self.marks.cells_high, low=used <= self.marks.cells_low, marks=self.marks)
        return switch.level > 0

    def _versioned(
        self, fill: bool, cap: int, admit: tuple[str, ...], reasons: tuple[str, ...], now: float
    ) -> PolicyDecision:
        last = self.last
        same = last is not None and (last.fill, last.window_cap, last.admit) == (fill, cap, admit)
        self.version += not same
        self.last = PolicyDecision(
            model=self.model, version=self.version, fill=fill, window_cap=cap, admit=admit, reasons=reasons, t_sent=now
        )
        return self.last
