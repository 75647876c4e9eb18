"""Ctrl-C: the first ends the session in the cloud too, the second leaves at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from edge_client.session import EdgeSession

EXIT_CODE = 130


class Interrupts:
    """Use inside the main task. While a session is watched the first signal cancels it; without one, or at the second
    signal, the main task is cancelled."""

    def __init__(self) -> None:
        self.hit = False
        self._session: EdgeSession | None = None
        self._note: Callable[[str], None] | None = None
        self._main = asyncio.current_task()

    def __enter__(self) -> Interrupts:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signal)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    @contextmanager
    def watching(self, session: EdgeSession, note: Callable[[str], None]) -> Iterator[None]:
        """`note` tells a person what happens now."""
        self.hit, self._session, self._note = False, session, note
        try:
            yield
        finally:
            self._session = self._note = None

    def _signal(self) -> None:
        first, self.hit = not self.hit, True
        if self._session is not None and self._note is not None and first:
            self._note("[ending the answer in the cloud too; Ctrl-C again leaves at once]")
            self._session.cancel()
            return
        if self._session is not None:
            self._session.abandon()
        if self._main is not None:
            self._main.cancel()
