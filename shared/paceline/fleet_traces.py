"""Recorded agreement of a draft model with its target, and sessions drawn from it. Pure but for reading the file.

A record says how sure the draft was and whether it was right. A session's **course** is a row of records: the record at
a position tells what the draft model guesses there while its path is right. On a path that is wrong already nothing
fits, however sure the model is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import orjson

from paceline.engine import Guess

RUNNER_UPS = 4
_STRIDE, _TRUE, _BESIDE = 16, 1, 8
"""Token ids: position p has the ids from 16 p on; + 1 is the target's choice, + 2 to + 6 are wrong guesses on a right
path, + 8 to + 12 are guesses on a wrong one. No id occurs twice in a text, so there is nothing to look up."""
VOCABULARY = 1 << 24


@dataclass(frozen=True, slots=True)
class Record:
    """confidence: the draft's probability of its choice. gap: of its noisy score to the best runner-up. rank: of the
    target's choice; 0 the draft's own, k its k-th runner-up, -1 none of four."""

    confidence: float
    gap: float
    rank: int


@dataclass(frozen=True)
class Trace:
    """Records in order, by prompt. With an `acceptance` they are drawn one by one instead, right and wrong ones with
    the weights that give it; without one they are played in order from a place drawn at random."""

    name: str
    prompts: tuple[tuple[Record, ...], ...]
    acceptance: float | None = None

    @property
    def records(self) -> list[Record]:
        return [record for prompt in self.prompts for record in prompt]

    @property
    def recorded_acceptance(self) -> float:
        records = self.records
        return sum(record.rank == 0 for record in records) / len(records)

    def at(self, acceptance: float | None) -> Trace:
        """This trace with a stated acceptance in [0, 1]; None: as recorded."""
        return Trace(self.name, self.prompts, acceptance)

    def draw(self, length: int, chance: random.Random) -> list[Record]:
        records = self.records
        if self.acceptance is None:
            start = chance.randrange(len(records))
            return [records[(start + index) % len(records)] for index in range(length)]
        right = [record for record in records if record.rank == 0]
        wrong = [record for record in records if record.rank != 0]
        return [chance.choice(right if chance.random() < self.acceptance else wrong) for _ in range(length)]


@cache
def load(name: str) -> Trace:
    """A trace of the package's `traces`, by its file's name without the ending."""
    data = orjson.loads(resources.files("paceline").joinpath("traces", f"{name}.json").read_bytes())
    prompts = tuple(
        tuple(
            Record(confidence, gap, rank)
            for confidence, gap, rank in zip(prompt["confidence"], prompt["gap"], prompt["rank"], strict=True)
        )
        for prompt in data["prompts"]
    )
    return Trace(name, prompts)


class Course:
    """What the target decides in one session, and what its draft model guesses. Beyond the records they repeat."""

    def __init__(self, records: Sequence[Record], prompt_length: int) -> None:
        self._records = records
        self._prompt_length = prompt_length
        self._truth: list[int] = []

    def truth(self, length: int) -> list[int]:
        """The first `length` tokens of prompt and completion."""
        self._truth += [true_token(position) for position in range(len(self._truth), length)]
        return self._truth[:length]

    def accepted(self, at: int, tokens: Sequence[int]) -> int:
        """How many of `tokens`, a chain after the committed prefix of length `at`, are the target's choice."""
        count = 0
        while count < len(tokens) and tokens[count] == true_token(at + count):
            count += 1
        return count

    def guess(self, path: Sequence[int]) -> Guess:
        position = len(path)
        if list(path) == self.truth(position):
            return _guess(self.record(position), position)
        other = self._records[(position * 7 + path[-1]) % len(self._records)]
        base = _STRIDE * position + _BESIDE
        return Guess(base, other.confidence, _alternatives(other, [base + k + 1 for k in range(RUNNER_UPS)]))

    def record(self, position: int) -> Record:
        return self._records[(position - self._prompt_length) % len(self._records)]


def true_token(position: int) -> int:
    return _STRIDE * position + _TRUE


def _guess(record: Record, position: int) -> Guess:
    wrong = [_STRIDE * position + 2 + k for k in range(RUNNER_UPS + 1)]
    right = true_token(position)
    choice = right if record.rank == 0 else wrong.pop()
    runner_ups = wrong[:RUNNER_UPS]
    if record.rank > 0:
        runner_ups[record.rank - 1] = right
    return Guess(choice, record.confidence, _alternatives(record, runner_ups))


def _alternatives(record: Record, tokens: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Only the first gap was recorded; half a unit more for each further one stands for the others."""
    return tuple((token, record.gap + 0.5 * index) for index, token in enumerate(tokens))
