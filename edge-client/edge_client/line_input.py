"""Lines typed by a person, without stopping the event loop: the link must live on between two questions.

What is typed while nothing is asked does not show: an answer may be streaming there. It waits for the next question.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from types import ModuleType
from typing import Any

try:
    import readline as _editing  # noqa: F401  (gives input() its line editing and history)
    import termios as _termios
except ImportError:  # not a POSIX system
    _terminal: ModuleType | None = None
else:
    _terminal = _termios


class LineInput:
    """Use as a context: leaving puts the terminal back as it was, even while a line is being typed."""

    def __init__(self) -> None:
        self._saved: list[Any] | None = None

    def __enter__(self) -> LineInput:
        if _terminal is not None and sys.stdin.isatty():
            self._saved = _terminal.tcgetattr(sys.stdin.fileno())
            self._asking(False)
        return self

    def __exit__(self, *_: object) -> None:
        if _terminal is not None and self._saved is not None:
            _terminal.tcsetattr(sys.stdin.fileno(), _terminal.TCSADRAIN, self._saved)

    def _asking(self, now: bool) -> None:
        """While nothing is asked keys neither show nor are taken as lines (Ctrl-C stays a signal). Readline shows them
        when it comes to ask; where the output is no terminal it does not, and they are thrown away."""
        if _terminal is None or self._saved is None:
            return
        descriptor, modes = sys.stdin.fileno(), list(self._saved)
        if not now:
            modes[3] &= ~(_terminal.ECHO | _terminal.ICANON)
        elif not sys.stdout.isatty():
            _terminal.tcflush(descriptor, _terminal.TCIFLUSH)
        _terminal.tcsetattr(descriptor, _terminal.TCSANOW, modes)

    async def read(self, prompt: str) -> str | None:
        """One line without its end; None at the end of input. The thread that waits for it ends with the process."""
        loop = asyncio.get_running_loop()
        line: asyncio.Future[str | None] = loop.create_future()

        def deliver(value: str | None) -> None:
            if not line.done():
                line.set_result(value)

        def wait() -> None:
            self._asking(True)
            try:
                value: str | None = input(prompt if sys.stdin.isatty() else "")
            except EOFError:
                value = None
                if sys.stdin.isatty():
                    sys.stdout.write("\n")  # Ctrl-D ends no line
            self._asking(False)
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, value)

        threading.Thread(target=wait, daemon=True, name="line-input").start()
        return await line
