"""The log files of a stack's children, as lines for people: by time, without banners, colours and padding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_CLOCK = r"\d\d:\d\d:\d\d\.\d{1,6}"
_ISO = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?Z"
_STAMPS = (
    (re.compile(rf"({_ISO}) "), datetime.fromisoformat),
    (re.compile(rf"\[\d+\] (\d{{4}}/\d\d/\d\d {_CLOCK}) "), lambda at: datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f")),
    (re.compile(rf"\d+:\w (\d\d \w{{3}} \d{{4}} {_CLOCK}) "), lambda at: datetime.strptime(at, "%d %b %Y %H:%M:%S.%f")),
    (re.compile(r"\d+:signal-handler \((\d+)\) "), lambda at: datetime.fromtimestamp(int(at))),
    (re.compile(rf'(?=\{{.*"timestamp": ?"({_ISO})")'), datetime.fromisoformat),
)
"""How lines begin: the services' for people, NATS, Valkey, Valkey in a signal handler, the services' in JSON. What
names no time zone is local time."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PADDED = re.compile(r"\[(\w+) *\] ")
_SAID_BY_THE_NAME = re.compile(r" (?:instance|service)=\S+")
_NATS_BANNER = re.compile(r"\[INF\] (?:\W|_)*(?:JETSTREAM -+|https://docs\.nats\.io.*)?$")


@dataclass(frozen=True)
class LogLine:
    """`at`: Unix seconds; None: it goes on from the line before, or names no time."""

    at: float | None
    text: str


def read_line(raw: str) -> LogLine | None:
    """One line of any child's log, without time, colours and padding; None: a line of a banner."""
    raw = _ANSI.sub("", raw)
    for pattern, read in _STAMPS:
        if found := pattern.match(raw):
            text = raw[found.end() :]
            if _NATS_BANNER.match(text):
                return None
            if level := _PADDED.match(text):
                rest = _SAID_BY_THE_NAME.sub("", text[level.end() :])
                text = re.sub(r" {2,}", " ", f"{level[1]}: {rest}").rstrip()
            return LogLine(read(found[1]).timestamp(), text)
    return LogLine(None, raw)


class Logs:
    """The log files of a folder, read on and on. `names`: of these processes; empty: of all, new ones included."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = names
        self._places: dict[str, int] = {}
        self._times: dict[str, float] = {}
        """Of each file's last line: a line without a time belongs to the one before."""

    def names(self) -> list[str]:
        return sorted(file.stem for file in self._folder.glob("*.log"))

    def new(self) -> list[str]:
        """Lines since the last call, by time, for people; the first call has all."""
        lines = [line for name in self._names or self.names() for line in self._of(name)]
        return [
            f"{name:<11} {datetime.fromtimestamp(at):%H:%M:%S}.{int(at % 1 * 1000):03} {text}\n"
            for at, name, text in sorted(lines, key=lambda line: line[0])
        ]

    def _of(self, name: str) -> Iterable[tuple[float, str, str]]:
        file = self._folder / f"{name}.log"
        # Put aside by the next `up`, and not there again yet.
        if not file.exists():
            return
        size, place = file.stat().st_size, self._places.get(name, 0)
        with file.open("rb") as opened:
            opened.seek(place if place <= size else 0)
            data = opened.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._places[name] = opened.tell() - len(data) + len(whole)
        for raw in whole.decode(errors="replace").splitlines():
            if line := read_line(raw):
                self._times[name] = line.at or self._times.get(name, file.stat().st_mtime)
                yield self._times[name], name, line.text
