"""The process that `up` leaves running: it owns the children, and starts again what ends by itself."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable

import structlog

from paceline.processes import Child
from paceline.stack import LocalStack

log = structlog.get_logger("supervisor")


class Supervisor:
    """Holds a stack until SIGTERM or SIGINT."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._look = asyncio.Event()

    async def run(self, ready: Callable[[], None]) -> None:
        """Up, `ready`, tend, and down after the signal. Raises FatalError when it does not come up."""
        loop = asyncio.get_running_loop()
        holding = asyncio.create_task(self._hold(ready), name="hold")
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, holding)
        loop.add_signal_handler(signal.SIGCHLD, self._look.set)
        with contextlib.suppress(asyncio.CancelledError):
            await holding

    def _stop(self, holding: asyncio.Task[None]) -> None:
        """Once: a second signal must not cut the way down short."""
        if not holding.cancelling():
            holding.cancel()

    async def _hold(self, ready: Callable[[], None]) -> None:
        async with self._stack:
            log.info("all is ready", gateway=self._stack.gateway_url)
            ready()
            while True:
                self._look.clear()
                for child in self._stack.children.values():
                    self._tend(child)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._look.wait(), self._until_next())

    def _until_next(self) -> float | None:
        """Seconds until the next child is due; None: none is."""
        due = [child.restarts.due for child in self._stack.children.values() if child.restarts.due is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _tend(self, child: Child) -> None:
        past, now = child.restarts, time.monotonic()
        if child.running or past.gone:
            return
        if past.due is None:
            past.ended(child.end, time.time() - child.born, now)
            self._report_end(child, now)
        elif now >= past.due:
            self._start_again(child)
        else:
            return
        self._save()

    def _save(self) -> None:
        try:
            self._stack.save()
        except OSError as error:
            # A full disk must not end what runs; `status` is behind until the next write.
            log.error("the state file could not be written", error=str(error))

    def _report_end(self, child: Child, now: float) -> None:
        past = child.restarts
        if past.due is None:
            log.error(f"{child.name} {child.end}, and is given up", restarts_in_a_row=past.in_a_row)
        else:
            log.warning(f"{child.name} {child.end}; it is started again", in_s=round(past.due - now, 1))

    def _start_again(self, child: Child) -> None:
        child.restarts.started()
        try:
            child.start()
        except OSError as error:
            log.error(f"{child.name} could not be started", error=str(error))
            # No SIGCHLD will come: the next look counts this as one more end.
            self._look.set()
        else:
            log.info(f"{child.name} was started again", pid=child.pid, restarts=child.restarts.total)
