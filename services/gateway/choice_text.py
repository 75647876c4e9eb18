"""One choice's tokens as what a client may see of them: text in whole characters, without end tokens and stop strings,
and a log-probability for every counted token. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.tokenizer import Detokenizer, StopFilter, Tokenizer
from paceline.wire import Counters, LogprobEntry, Verdict

FLOOR = -9999.0
"""What stands for a log-probability of minus infinity, which JSON cannot say."""


@dataclass(frozen=True)
class Scored:
    """A token's spelling, its bytes and log-probability, and the most likely tokens in its place. `offset` is where
    its text begins in the choice's text, in characters."""

    token: str
    raw: bytes
    logprob: float
    top: tuple[Scored, ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class Delta:
    """What one verdict adds to a choice. finish is set once, by the last one."""

    text: str = ""
    scores: tuple[Scored, ...] = ()
    tokens: int = 0
    finish: str | None = None


@dataclass
class ChoiceText:
    """Feed it the verdicts of one session in order, each once."""

    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    tokens: int = 0
    """Counted completion tokens so far."""
    counters: Counters = field(default_factory=Counters)
    finish: str | None = None
    text_length: int = 0
    """Characters given out so far."""

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer)
        self._filter = StopFilter(self.stops)
        self._ends = frozenset(self.tokenizer.card.end_ids)
        self._characters = 0
        self._scores: list[Scored] = []

    def feed(self, verdict: Verdict) -> Delta:
        """Scores wait until there is text to go with them, or the end."""
        self.tokens += len(verdict.tokens)
        self.counters = verdict.counters or self.counters
        self.finish = verdict.finish
        self._score(verdict)
        shown = [token for token in verdict.tokens if token not in self._ends]
        text = self._filter.feed(self._detokenizer.feed(shown))
        if self.finish is not None:
            text += self._filter.feed(self._detokenizer.flush()) + self._filter.flush()
        self.text_length += len(text)
        return Delta(text, self._take_scores(text), len(verdict.tokens), self.finish)

    def _take_scores(self, text: str) -> tuple[Scored, ...]:
        if not text and self.finish is None:
            return ()
        scores, self._scores = tuple(self._scores), []
        return scores

    def _score(self, verdict: Verdict) -> None:
        for token, entry in zip(verdict.tokens, verdict.logprobs or (), strict=False):
            self._scores.append(self._scored(token, entry))
            self._characters += _characters(self.tokenizer.token_bytes(token))

    def _scored(self, token: int, entry: LogprobEntry) -> Scored:
        top = tuple(self._alone(other, logprob) for other, logprob in entry.top)
        own = self._alone(token, entry.logprob)
        return Scored(own.token, own.raw, own.logprob, top, self._characters)

    def _alone(self, token: int, logprob: float) -> Scored:
        raw = self.tokenizer.spelled(token)
        return Scored(spelling(raw), raw, finite(logprob))


def spelling(raw: bytes) -> str:
    """Text where the bytes are text; else `bytes:\\xNN…`, which keeps different tokens different."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    return max(FLOOR, logprob) if math.isfinite(logprob) else FLOOR


def _characters(raw: bytes) -> int:
    """Characters that begin in these bytes: all UTF-8 bytes but the continuing ones."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)
