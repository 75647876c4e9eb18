"""What the edge holds of one session: committed tokens exactly once and in order, and the text to show. Pure.

Verdicts may come late, twice, overlapping after a resume, or with one missing before them; a verdict below the highest
known epoch counts for nothing. Text never holds half a character or the beginning of a stop string, and leaves out end
tokens and stop strings, as the gateway does for plain clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import Conflict
from paceline.tokenizer import Detokenizer, StopFilter, Tokenizer
from paceline.wire import LogprobEntry, Verdict, prefix_hash


@dataclass(frozen=True, slots=True)
class Taken:
    """What a verdict added: `tokens` at `at`, one letter of wire.KINDS each, and the text that may be shown now."""

    at: int
    tokens: tuple[int, ...]
    kinds: str
    text: str
    logprobs: tuple[LogprobEntry, ...] | None = None
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """Verdicts were lost before this one: the client must resume from `position`."""

    position: int


class Transcript:
    """`prompt` and `stops` are those of the opening; `end_ids` end tokens, which have no text."""

    def __init__(
        self, prompt: Sequence[int], tokenizer: Tokenizer, end_ids: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self.tokens = list(prompt)
        self.kinds = ""
        self.epoch = 0
        self.finish: str | None = None
        self._prompt_length = len(self.tokens)
        self._ends = frozenset(end_ids)
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopFilter(list(stops))

    @property
    def position(self) -> int:
        """Length of prompt and completion: the next token's position, and where a resume begins."""
        return len(self.tokens)

    @property
    def completion(self) -> tuple[int, ...]:
        return tuple(self.tokens[self._prompt_length :])

    def prefix_hash(self) -> str:
        return prefix_hash(self.tokens)

    def take(self, verdict: Verdict) -> Taken | Missing | None:
        """None: it told nothing new. Raises Conflict (`history_lost`) when it contradicts what was shown already."""
        if self.finish is not None or verdict.epoch < self.epoch:
            return None
        self.epoch = verdict.epoch
        known = self.position - verdict.at
        if known < 0:
            return Missing(self.position)
        self._agree(verdict, known)
        fresh = verdict.tokens[known:]
        if not fresh and verdict.finish is None:
            return None
        return self._add(verdict, fresh, known)

    def _agree(self, verdict: Verdict, known: int) -> None:
        overlap = verdict.tokens[:known]
        end = verdict.at + len(verdict.tokens)
        if overlap != tuple(self.tokens[verdict.at : verdict.at + len(overlap)]):
            raise Conflict(f"the cloud's tokens from {verdict.at} on differ from those shown", code="history_lost")
        if verdict.finish is not None and end < self.position:
            message = f"the cloud ended the session at {end}, but {self.position} tokens were shown"
            raise Conflict(message, code="history_lost")

    def _add(self, verdict: Verdict, fresh: tuple[int, ...], known: int) -> Taken:
        at, kinds = self.position, verdict.kinds[known:]
        self.tokens.extend(fresh)
        self.kinds += kinds
        self.finish = verdict.finish
        logprobs = None if verdict.logprobs is None else verdict.logprobs[known:]
        return Taken(at, fresh, kinds, self._text(fresh), logprobs, verdict.finish)

    def _text(self, fresh: tuple[int, ...]) -> str:
        text = self._stops.feed(self._detokenizer.feed([token for token in fresh if token not in self._ends]))
        if self.finish is not None:
            text += self._stops.feed(self._detokenizer.flush()) + self._stops.flush()
        return text
