"""The engine ports: what a draft model and a target model must be able to do.

`engine_llama` and `engine_simulated` implement both, services/verifier/engine_vllm.py the target's; one contract suite
is for all of them (tests/contract/test_engine_*.py).

An engine keeps, for each session key, a *ledger*: the token ids that it holds KV for. A caller never manages KV: it
names the tokens it wants and the engine feeds what is missing, trims what does not agree, and evicts the least
recently used sessions when cells run out (they come back by replay, with the same text).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.wire import Sampling


@dataclass(frozen=True)
class Rule:
    """Everything but the logits that decides a choice (paceline.coupling): one per session, fixed at its opening.

    `prompt_length` is counted in target tokens; noise is keyed by position - prompt_length.
    """

    sampling: Sampling
    seed: int
    prompt_length: int
    choice: int = 0


@dataclass(frozen=True)
class TargetItem:
    """One session's share of one forward pass.

    `at` is the length of the committed prefix c[0..at). `history` are committed tokens from position `start` on
    (start + len(history) <= at) which the ledger may lack. `draft` is the chain d_1..d_m to verify after
    c[0..at). With `rule` None nothing is chosen: the pass only feeds history (a prefill chunk).
    A deciding item needs a ledger that reaches `at`, by itself or with `history`.
    """

    session: str
    tenant: str
    at: int
    start: int = 0
    history: tuple[int, ...] = ()
    draft: tuple[int, ...] = ()
    rule: Rule | None = None
    logprobs: int | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """Log-softmax of the raw logits, natural log: of the chosen token, and the `top` most likely (id, value)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Decided:
    """The target's decision: `accepted` draft tokens fit, then comes `token`.

    margins: accepted + 1 numbers, best score minus second-best at each decided position (inf if only one survives).
    logprobs: accepted + 1 entries when asked for, else empty.
    """

    session: str
    accepted: int
    token: int
    margins: tuple[float, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Fed:
    """A prefill chunk went in; the ledger now holds `length` tokens."""

    session: str
    length: int


@dataclass(frozen=True)
class Failed:
    """The item failed, the engine lives. `code`: no_room | need_history | bad_token | step_failed."""

    session: str
    code: str
    message: str


Outcome = Decided | Fed | Failed


@dataclass(frozen=True)
class EngineStatus:
    """What an engine tells of itself; `simulated` must show wherever its numbers show."""

    engine: str
    simulated: bool
    context: int
    cells_total: int
    cells_used: int
    sessions: int
    step_ms: dict[int, float] = field(default_factory=dict)
    """Smoothed milliseconds of a step by number of tokens fed."""
    can_sleep: bool = False
    device: str = ""
    """What it computes on, where that is not the processor alone."""


class TargetEngine(Protocol):
    """The large model: verifies chains of many sessions in one forward pass."""

    def held(self, session: str) -> tuple[int, ...]:
        """Token ids of the session's ledger (committed tokens as far as known; KV may lag by one)."""
        ...

    def trim(self, session: str, length: int) -> None:
        """Forget everything of the session from position `length` on. Unknown sessions are ignored."""
        ...

    async def step(self, items: Sequence[TargetItem]) -> list[Outcome]:
        """One forward pass over all items, outcomes in the order of the items; never raises for one item's fault.

        After a Decided outcome the ledger is c[0..at) + the accepted tokens + `token`.
        """
        ...

    def release(self, session: str) -> None:
        """The session ended; its KV may be kept for prefix reuse within its tenant and is the first to be evicted."""
        ...

    async def sleep(self) -> None:
        """Give the device's memory up, KV and ledgers too. Until `wake` every step fails. Raises EngineError where it
        cannot, FatalError where it is lost over it."""
        ...

    async def wake(self) -> None:
        """Take it back. Raises FatalError where that fails, or the model does not say any more what it said before."""
        ...

    def status(self) -> EngineStatus:
        """Raises FatalError once the engine is dead; so does `step`."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Guess:
    """The draft model's choice for one position.

    confidence: the draft's probability of `token` in [0, 1]. alternatives: runner-ups by noisy score, best first, as
    (token, score gap to the choice).
    """

    token: int
    confidence: float
    alternatives: tuple[tuple[int, float], ...] = ()


class DraftEngine(Protocol):
    """The small model: guesses the target's next token after a given path."""

    @property
    def context(self) -> int:
        """Longest path that can be extended, in tokens; beyond it the caller goes on without drafts."""
        ...

    @property
    def max_sessions(self) -> int:
        """Sessions that can hold KV at the same time."""
        ...

    @property
    def max_paths(self) -> int:
        """Most paths of one session in one pass."""
        ...

    async def guess(self, session: str, path: Sequence[int], rule: Rule) -> Guess:
        """The choice at position len(path), by the same rule and noise as the target's.

        The engine keeps KV per session and feeds only what differs from its last call for that session, in chunks;
        cancelled, it feeds no further chunk. Raises EngineError when this call failed (the engine lives), NoRoom when
        the path cannot fit.
        """
        ...

    async def guesses(self, session: str, paths: Sequence[Sequence[int]], rule: Rule) -> list[Guess | None]:
        """The choices after several paths of one session, in one pass: each as `guess` would give it.

        paths[0] is the main one; it is served as by `guess`, with the same errors. The others are branches: one that
        finds no room, cannot be fed or stands beyond `max_paths` is None. Paths share the KV of what they have in
        common, so that a branch that becomes the main path later is not fed again.
        """
        ...

    def release(self, session: str) -> None:
        """The session ended: its KV serves the prefixes of others, where they may share, or goes."""
        ...

    async def close(self) -> None: ...


class WrappedDraft:
    """A DraftEngine that does what `engine` does. `guess` goes through `guesses`: a subclass changes that alone."""

    def __init__(self, engine: DraftEngine) -> None:
        self._engine = engine

    @property
    def context(self) -> int:
        return self._engine.context

    @property
    def max_sessions(self) -> int:
        return self._engine.max_sessions

    @property
    def max_paths(self) -> int:
        return self._engine.max_paths

    async def guess(self, session: str, path: Sequence[int], rule: Rule) -> Guess:
        (guess,) = await self.guesses(session, (path,), rule)
        assert guess is not None, "the main path fails or is guessed"
        return guess

    async def guesses(self, session: str, paths: Sequence[Sequence[int]], rule: Rule) -> list[Guess | None]:
        return await self._engine.guesses(session, paths, rule)

    def release(self, session: str) -> None:
        self._engine.release(session)

    async def close(self) -> None:
        await self._engine.close()
