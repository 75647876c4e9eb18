"""Options of the commands, checked before anything is started or measured. What is wrong raises typer.BadParameter."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import typer

from paceline import models
from paceline.errors import ModelError
from paceline.settings import Settings

LONGEST_RTT_MS = 10_000.0
"""An edge gives up dialling after this time."""
HIGHEST_TEMPERATURE = 10.0
MOST_SESSIONS = 1024


def words(text: str, option: str) -> list[str]:
    """Each once, at least one; separated by commas."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise typer.BadParameter(f"`{text}` names nothing", param_hint=option)
    return found


def pairs(text: str) -> list[str]:
    """Model pairs of the catalog."""
    found, extra = words(text, "--pair"), Settings.load().catalog_file
    for name in found:
        try:
            models.pair_named(name, extra)
        except ModelError as error:
            raise typer.BadParameter(str(error), param_hint="--pair") from error
    return found


def numbers(text: str, option: str, least: float, most: float) -> tuple[float, ...]:
    """Each once, at least one, from `least` to `most`."""
    try:
        found = tuple(dict.fromkeys(float(word) for word in words(text, option)))
    except ValueError as error:
        message = f"`{text}` is no list of numbers, separated by commas"
        raise typer.BadParameter(message, param_hint=option) from error
    for number in found:
        if not least <= number <= most:  # what is no number is not between any two
            message = f"{number:g} is not between {least:g} and {most:g}"
            raise typer.BadParameter(message, param_hint=option)
    return found


def counts(text: str, option: str, least: int, most: int) -> tuple[int, ...]:
    """Whole numbers from `least` to `most`."""
    found = numbers(text, option, least, most)
    for number in found:
        if number != int(number):
            raise typer.BadParameter(f"{number:g} is no whole number", param_hint=option)
    return tuple(int(number) for number in found)


def rtts_ms(text: str) -> tuple[float, ...]:
    return numbers(text, "--rtt-ms", 0.0, LONGEST_RTT_MS)


def temperatures(text: str) -> tuple[float, ...]:
    return numbers(text, "--temperature", 0.0, HIGHEST_TEMPERATURE)


def writable(file: Path, option: str) -> None:
    """The folder is made where it is missing; a file that is there stays as it is."""
    if file.is_dir():
        raise typer.BadParameter(f"{file} is a folder", param_hint=option)
    _writable_folder(file.parent, option)


def plottable(out: Path) -> None:
    """A folder for pictures and tables (`--out`)."""
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("plots need matplotlib: pip install 'paceline[bench]'", param_hint="--out")
    _writable_folder(out, "--out")


def _writable_folder(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"nothing can be written into {folder}: {error.strerror}"
        raise typer.BadParameter(message, param_hint=option) from error
