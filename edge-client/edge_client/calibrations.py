"""How well this device's draft models agree with their targets, learned from every session and kept on the device; and
what their passes cost here, learned anew by each process.

One of each per pair of models and process, however many links and sessions use it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from paceline.calibration import Calibration
from paceline.calibration_file import CalibrationFile, calibration_path
from paceline.model_card import ModelCard
from paceline.pass_costs import PassCosts


class PairCalibration:
    """Of the draft model for the target that `card` describes. That of a simulated pair is not kept."""

    def __init__(self, card: ModelCard) -> None:
        self._file = None if card.simulated else _file(calibration_path(card.fingerprint, card.model))
        self.learned = Calibration() if self._file is None else self._file.calibration
        self.costs = PassCosts() if self._file is None else _costs(card.fingerprint, card.model)

    def save(self, *, at_once: bool = False) -> None:
        """At most every half minute unless `at_once`; trouble is logged only."""
        if self._file is not None:
            self._file.save(force=at_once)


@cache
def _costs(fingerprint: str, model: str) -> PassCosts:
    return PassCosts()


@cache
def _file(path: Path) -> CalibrationFile:
    return CalibrationFile(path)
