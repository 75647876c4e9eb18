"""What a session tells its user, in order. `t`: time.monotonic() seconds, taken when the frame came off the socket."""

from __future__ import annotations

from dataclasses import dataclass

from edge_client.stats import Stats
from paceline.drafting import DraftEvent
from paceline.wire import Failure, LogprobEntry


@dataclass(frozen=True, slots=True)
class Opened:
    """The cloud took the session. max_tokens: completion tokens at most, context included."""

    session: str
    prompt_length: int
    max_tokens: int
    seed: int
    t: float


@dataclass(frozen=True, slots=True)
class Reading:
    """The cloud holds `fed` of the prompt's `total` tokens."""

    fed: int
    total: int
    t: float


@dataclass(frozen=True, slots=True)
class Drafted:
    """The draft model here guessed. Dropped, not queued, when nobody reads: it is for display only."""

    draft: DraftEvent
    t: float


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens that the target decided: `tokens` at position `at`, one letter of wire.KINDS each, exactly once and in
    order. `text` is what may be shown now: it lags behind the tokens by at most a character or a stop string's
    beginning, and is empty for end tokens."""

    at: int
    tokens: tuple[int, ...]
    kinds: str
    text: str
    t: float
    logprobs: tuple[LogprobEntry, ...] | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """The link was lost; the session is being resumed."""

    reason: str
    t: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """The cloud goes on from `position`; nothing was lost."""

    position: int
    t: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event: stop, length, cancelled, or error (then `error` says what). `confirmed` is False when the cloud
    could not be told of a cancel in time: it ends the session by itself after a minute without us."""

    finish: str
    stats: Stats
    t: float
    error: Failure | None = None
    confirmed: bool = True


Event = Opened | Reading | Drafted | Committed | Cut | Resumed | Finished
