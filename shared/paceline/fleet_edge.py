"""One simulated device: the product's own draft state, with a made-up draft model and a made-up link. Pure."""

from __future__ import annotations

from collections.abc import Callable

from paceline.draft_state import DraftState
from paceline.fleet_clock import Alarm, Clock
from paceline.fleet_hardware import Edge
from paceline.fleet_traces import Course
from paceline.wire import DraftBlock, Verdict

_SOON_S = 1e-6
"""Past a moment at which something is due, so that rounding cannot make it come early."""


class EdgeSide:
    """`send` takes each block at the moment it leaves."""

    def __init__(
        self, clock: Clock, state: DraftState, course: Course, edge: Edge, send: Callable[[DraftBlock], None]
    ) -> None:
        self.state = state
        self.passes = 0
        self.rows = 0
        self._clock, self._course, self._edge, self._send = clock, course, edge, send
        self._drafting = False
        self._alarm = Alarm(clock, self.pump)

    def pump(self) -> None:
        """Send what is due, draft what is wanted, and come back when something may be due."""
        if self.state.ended:
            return
        now = self._clock.now
        for block in self.state.due(now):
            self._send(block)
        if not self._drafting:
            self._draft()
        pause = self.state.next_due(now)
        if pause is not None:
            self._alarm.set(now + pause + _SOON_S)

    def on_verdict(self, verdict: Verdict) -> None:
        self.state.on_verdict(verdict, self._clock.now)
        self.pump()

    def _draft(self) -> None:
        wanted = self.state.next_pass(self._clock.now, self._edge.paths)
        if wanted is None:
            return
        rows = len(wanted.paths)
        seconds = self._edge.draft_s * (1 + self._edge.row * (rows - 1))
        self._drafting = True
        self.passes += 1
        self.rows += rows

        def drafted() -> None:
            self._drafting = False
            guesses = [self._course.guess(path) for path in wanted.paths]
            self.state.take_pass(wanted, guesses, seconds, self._clock.now)
            self.pump()

        self._clock.after(seconds, drafted)
