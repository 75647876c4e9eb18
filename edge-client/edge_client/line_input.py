"""Lines typed by a person, without stopping the event loop: the link must live on between two questions."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import ModuleType

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
        self._saved: list[object] | None = None

    def __enter__(self) -> LineInput:
        if _terminal is not None and sys.stdin.isatty():
            self._saved = _terminal.tcgetattr(sys.stdin.fileno())
        return self

    def __exit__(self, *_: object) -> None:
        if _terminal is not None and self._saved is not None:
            _terminal.tcsetattr(sys.stdin.fileno(), _terminal.TCSADRAIN, self._saved)

    async def read(self, prompt: str) -> str | None:
        """One line without its end; None at the end of input. The thread that waits for it ends with the process."""
        loop = asyncio.get_running_loop()
        line: asyncio.Future[str | None] = loop.create_future()

        def deliver(value: str | None) -> None:
            if not line.done():
                line.set_result(value)

        def wait() -> None:
            try:
                value: str | None = input(prompt if sys.stdin.isatty() else "")
            except EOFError:
                value = None
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, value)

        threading.Thread(target=wait, daemon=True, name="line-input").start()
        return await line
