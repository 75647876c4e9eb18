"""A pair's calibration on this device: read at the start, written now and then. Trouble with it is never fatal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from paceline.calibration import Calibration
from paceline.model_card import write_whole
from paceline.settings import cache_dir

log = structlog.get_logger(__name__)

SAVE_S = 30.0
"""Shortest time between two writes."""
_MOST_BYTES = 1 << 16


def calibration_path(fingerprint: str, draft: str) -> Path:
    """Where the calibration of a draft model for the target with this card fingerprint is kept."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in draft)[:80]
    return cache_dir() / "calibration" / f"{fingerprint[:16]}-{name}.json"


def load_calibration(path: Path) -> Calibration:
    """One that has learned nothing where there is no file, or none that can be used."""
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return Calibration()
    except (OSError, ValueError, RecursionError) as error:
        log.warning("calibration not readable, starting anew", file=str(path), error=str(error))
        return Calibration()
    calibration = Calibration.load(data)
    log.debug("calibration", file=str(path), learned=calibration.learned)
    return calibration


class CalibrationFile:
    """Blocks for the time of a small read or write: fractions of a millisecond."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.calibration = load_calibration(path)
        self._clock = clock
        self._saved_at = clock()
        self._saved = self.calibration.learned

    def save(self, *, force: bool = False) -> bool:
        """True if it wrote: when something was learned, and at most every SAVE_S seconds unless forced."""
        learned, now = self.calibration.learned, self._clock()
        if learned == self._saved or (not force and now - self._saved_at < SAVE_S):
            return False
        self._saved, self._saved_at = learned, now
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(self.calibration.dump()).encode())
        except (OSError, ValueError) as error:
            log.warning("calibration not saved", file=str(self.path), error=str(error))
            return False
        return True

    def close(self) -> None:
        self.save(force=True)
