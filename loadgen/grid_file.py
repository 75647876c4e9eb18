"""A grid's report on disk: written after every cell, and gone on with.

FILE is the report, FILE.parts/ holds the runs of each cell, FILE.drafts/ the recorded drafts of each pair.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson

from loadgen import report
from loadgen.grid_figures import CellRuns, cell_report, summary
from loadgen.grid_plan import Place, Terms
from paceline.errors import SettingsError


class _Kept(msgspec.Struct):
    """What a report must have to be gone on with."""

    terms: dict[str, Any]
    cells: list[dict[str, Any]]
    machine: dict[str, Any]
    command: list[str]
    commit: str
    started: str
    seconds: float
    divergences: list[dict[str, Any]] = []
    replay_checks: list[dict[str, Any]] = []
    earlier: list[dict[str, Any]] = []


class GridFile:
    """Use `GridFile.open`. `places` are those that are there already."""

    def __init__(self, file: Path, terms: Terms, before: dict[str, Any] | None = None) -> None:
        self.file, self.terms = file, terms
        self._started = time.time()
        self._before = before or {}
        self.cells: list[dict[str, Any]] = [self._figured(cell) for cell in self._before.get("cells", ())]
        self.divergences: list[dict[str, Any]] = list(self._before.get("divergences", ()))
        self.replay_checks: list[dict[str, Any]] = list(self._before.get("replay_checks", ()))

    @classmethod
    def open(cls, file: Path, terms: Terms, *, resume: bool) -> GridFile:
        """Raises SettingsError when the file is there and is not to be resumed, or was measured on other terms or on
        another machine."""
        if not file.exists():
            return cls(file, terms)
        if not resume:
            raise SettingsError(f"{file} exists: --resume goes on with it, another --json begins anew")
        before, earlier = _read(file)
        if differing := _differing(earlier, terms):
            raise SettingsError(f"{file} was measured with other terms: {differing}")
        machine = report.header(time.time())["machine"]
        if before["machine"] != machine:
            raise SettingsError(f"{file} was measured on another machine: {before['machine']}, this is {machine}")
        return cls(file, terms, before)

    @property
    def places(self) -> set[Place]:
        return {Place.of(cell) for cell in self.cells}

    def _figured(self, cell: dict[str, Any]) -> dict[str, Any]:
        """A cell of the report, figured anew from its runs where they are there: a later version may know more."""
        try:
            runs = msgspec.json.decode((self.parts / f"{Place.of(cell).stem}.json").read_bytes(), type=CellRuns)
        except (OSError, msgspec.DecodeError):
            return cell
        return cell_report(runs) if runs.place == Place.of(cell) else cell

    @property
    def parts(self) -> Path:
        return self.file.with_name(self.file.name + ".parts")

    def drafts(self, pair: str) -> Path:
        """The recorded drafts of a pair."""
        return self.file.with_name(self.file.name + ".drafts") / f"{pair}.drafts"

    def add(self, cell: CellRuns, divergences: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Put a cell in, in place of an earlier measurement of it, and write; its part of the report."""
        made = cell_report(cell)
        self.cells = [*_without(self.cells, cell.place), made]
        self.divergences = [*_without(self.divergences, cell.place), *divergences]
        report.keep(self.parts / f"{cell.place.stem}.json", msgspec.json.encode(cell))
        self.write()
        return made

    def checked(self, check: dict[str, Any]) -> None:
        """Put a pair's proof of its replay in, and write."""
        self.replay_checks = [*(old for old in self.replay_checks if old["pair"] != check["pair"]), check]
        self.write()

    def write(self) -> None:
        report.write(self.report(), self.file)

    def report(self) -> dict[str, Any]:
        cells = sorted(self.cells, key=_order)
        return {
            **self._header(), "simulated": any(cell["simulated"] for cell in cells),
            "identical_text": not self.divergences, "divergences": self.divergences,
            "terms": msgspec.to_builtins(self.terms), "summary": summary(cells), "cells": cells,
            "replay_checks": self.replay_checks,
        }  # fmt: skip

    def _header(self) -> dict[str, Any]:
        """Of this command; those that it went on from are in `earlier`, and their time is counted in."""
        header = report.header(self._started)
        if not self._before:
            return header
        names = ("command", "commit", "started", "seconds")
        own = {name: self._before[name] for name in names}
        earlier = [*self._before.get("earlier", ()), own]
        header["seconds"] = round(header["seconds"] + self._before["seconds"], 1)
        return {**header, "earlier": earlier}


def _read(file: Path) -> tuple[dict[str, Any], Terms]:
    """The report, and the terms that it was measured on."""
    try:
        found = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise SettingsError(f"{file} cannot be read as a report: {error}") from error
    try:
        whole = msgspec.convert(found, _Kept)
        for entry in (*whole.cells, *whole.divergences):
            Place.of(entry)
        return found, msgspec.convert(whole.terms, Terms, strict=False)
    except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"{file} is no report of a grid: {error}") from error


def _differing(one: Terms, other: Terms) -> str:
    fields = [(name, getattr(one, name), getattr(other, name)) for name in Terms.__struct_fields__]
    return ", ".join(f"{name} {old}, asked for {new}" for name, old, new in fields if old != new)


def _without(entries: Iterable[dict[str, Any]], place: Place) -> list[dict[str, Any]]:
    return [entry for entry in entries if Place.of(entry) != place]


def _order(cell: dict[str, Any]) -> tuple[Any, ...]:
    return (cell["pair"], cell["sessions"], cell["temperature"], cell["rtt_ms"])
