"""Runs a long command with one line of live progress; its full output goes to a log. Standard library only."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

TAIL_LINES = 40
QUIET_S = 10
"""Where the output is no terminal, a line is printed this often at most."""


def run(title: str, command: list[str], *, log: Path, step: re.Pattern[str]) -> None:
    """Run to the end or exit with the log's tail. `step` finds the progress in a line: (done, total) or (words,)."""
    started = time.monotonic()
    line = Line(title)
    piped = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with log.open("w") as full, piped as process:
        for text in process.stdout or ():
            full.write(text)
            if found := step.match(text):
                line.show(" of ".join(found.groups()))
    if process.returncode:
        line.end("failed")
        sys.exit("".join(log.read_text().splitlines(keepends=True)[-TAIL_LINES:]) + f"\nfull log: {log}")
    line.end(f"done in {time.monotonic() - started:.0f} s")


class Line:
    """One line that is rewritten on a terminal, and now and then printed elsewhere."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._live = sys.stderr.isatty()
        self._printed = time.monotonic()
        self._write("..." if not self._live else "")

    def show(self, state: str) -> None:
        if self._live:
            self._write(state)
        elif time.monotonic() - self._printed > QUIET_S:
            self._printed = time.monotonic()
            self._write(state)

    def end(self, state: str) -> None:
        self._write(state)
        if self._live:
            print(file=sys.stderr)

    def _write(self, state: str) -> None:
        text = f"{self.title}: {state}" if state else self.title
        if self._live:
            sys.stderr.write(f"\r\033[K{text[:110]}")
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()
