"""Which cells a grid measures, how, and in which modes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Self

from msgspec import Struct

from loadgen.jobs import Job
from loadgen.modes import CLOUD, DEEP, DEEP_ALT, EDGE, PACELINE, Mode, colocated, sync
from loadgen.prompts import EVERYDAY, PromptSet

ALL_MODES = ("cloud", "colocated", "sync", "deep", "deep_alt", "edge", "paceline")
BASELINES = ("cloud", "colocated", "sync")
"""What Paceline is held against. `deep` and `deep_alt` are parts of it; `edge` gives another text."""
SYNC_BLOCKS = (2, 3, 4, 6, 9)
COLOCATED_BLOCKS = (1, 2, 3, 4, 6)
BLOCKS = {"sync": SYNC_BLOCKS, "colocated": COLOCATED_BLOCKS}
PROBE_TOKENS = 24
PROBE_PROMPTS = 2
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Place:
    """One cell: a model pair, so many sessions at once, a temperature and a round trip."""

    pair: str
    rtt_ms: float
    sessions: int
    temperature: float

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Of a cell, or of a divergence, in a report."""
        return cls(values["pair"], float(values["rtt_ms"]), int(values["sessions"]), float(values["temperature"]))

    @property
    def values(self) -> dict[str, Any]:
        return {
            "pair": self.pair, "rtt_ms": self.rtt_ms, "sessions": self.sessions, "temperature": self.temperature,
        }  # fmt: skip

    @property
    def stem(self) -> str:
        """For a file's name."""
        return f"{self.pair}-{self.rtt_ms:g}ms-{self.sessions}x-t{self.temperature:g}"

    def __str__(self) -> str:
        crowd = "1 session" if self.sessions == 1 else f"{self.sessions} sessions"
        return f"{self.pair}, {self.rtt_ms:g} ms, {crowd}, temperature {self.temperature:g}"


class Terms(Struct, frozen=True):
    """How every cell of one report is measured: cells measured on other terms do not belong beside each other.

    prompts: of the set named prompt_set, at least, and one for each session at once. draft_ms: the pace of replayed
    drafts, one token; None: as the draft model ran here.
    """

    prompts: int = 4
    prompt_set: str = EVERYDAY.name
    tokens: int = 48
    repeats: int = 3
    seed: int = 1
    modes: tuple[str, ...] = ALL_MODES
    draft_ms: float | None = None

    def modes_at(self, sessions: int, g: Mapping[str, int]) -> list[Mode]:
        """In the order of ALL_MODES; `edge` drafts live, so with one session only. g: block lengths by mode."""
        made = {
            "cloud": CLOUD, "colocated": colocated(g["colocated"]), "sync": sync(g["sync"]), "deep": DEEP,
            "deep_alt": DEEP_ALT, "edge": EDGE, "paceline": PACELINE,
        }  # fmt: skip
        return [made[name] for name in ALL_MODES if name in self.modes and (sessions == 1 or name != "edge")]

    def waves(self, sessions: int) -> list[range]:
        """Numbers of the jobs that run at once, one wave after the other."""
        count = max(self.prompts, sessions)
        return [range(first, min(first + sessions, count)) for first in range(0, count, sessions)]

    def probe_waves(self, sessions: int) -> list[range]:
        few = max(1, min(PROBE_PROMPTS, self.prompts // 2))
        return self.waves(sessions)[: few if sessions == 1 else 1]

    def job(self, number: int, mode: Mode, temperature: float, tokens: int, prompts: PromptSet = EVERYDAY) -> Job:
        """Job `number` (prompts repeat under other seeds) with `tokens` of its answer. The end is barred for the
        whole length, whatever `tokens` is: so the choices, and recorded drafts, are the same."""
        assert prompts.name == self.prompt_set, f"the report is of {self.prompt_set}, not of {prompts.name}"
        return Job(
            prompt=prompts.text(number), max_tokens=tokens, min_tokens=self.tokens, temperature=temperature,
            seed=self.seed + number, speculation=mode.speculation, alone=mode.alone,
        )  # fmt: skip


@dataclass(frozen=True)
class GridPlan:
    """The cells of one command, in the order in which they are measured."""

    places: tuple[Place, ...]
    terms: Terms

    @property
    def pairs(self) -> list[str]:
        return list(dict.fromkeys(place.pair for place in self.places))

    def ticks(self, places: Sequence[Place]) -> int:
        """Waves to run at least, for the progress bar."""
        return sum(self._ticks(place.sessions) for place in places)

    def _ticks(self, sessions: int) -> int:
        modes = self.terms.modes_at(sessions, {"sync": 1, "colocated": 1})
        probed = sum(len(BLOCKS[mode.name]) for mode in modes if mode.name in BLOCKS)
        waves = len(self.terms.waves(sessions))
        warm_up = waves if sessions > 1 else 1
        return probed * len(self.terms.probe_waves(sessions)) + len(modes) * (warm_up + self.terms.repeats * waves)


def full(
    pairs: Sequence[str], rtts_ms: Sequence[float], sessions: Sequence[int], temperatures: Sequence[float], terms: Terms
) -> GridPlan:
    """Every combination, one pair after the other; few sessions first."""
    order = product(pairs, sessions, temperatures, rtts_ms)
    return GridPlan(tuple(Place(pair, float(r), s, float(t)) for pair, s, t, r in order), terms)


def quick(pairs: Sequence[str], terms: Terms) -> GridPlan:
    """A few cells in minutes: what changed, not what holds."""
    cells = ((20.0, 1, 0.0), (100.0, 1, 0.0), (100.0, 4, 0.8))
    return GridPlan(tuple(Place(pair, *cell) for pair in pairs for cell in cells), terms)


QUICK = Terms(prompts=2, tokens=32, repeats=1)
