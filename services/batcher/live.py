"""One session as its batcher runs it: the state machine, and what is known of its KV, its client and its store."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from paceline.forecast import Forecast, Proposal
from paceline.price import Price
from paceline.session import Commit, Plan, Session
from paceline.trie import Node
from paceline.trust import SessionTrust, Trust
from paceline.wire import Counters, Failure, LogprobEntry, Timing, Verdict
from services.batcher.assist import Assist
from services.batcher.patience import Patience
from services.batcher.presence import Presence

MAX_PENDING = 8
"""Commits of one session that the store has not confirmed; beyond that it waits for the store."""
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 1.0
PRICE_S = 1.0
"""A price is told again after this time, changed or not."""


class PrefixHash:
    """wire.prefix_hash of a growing sequence, without hashing it from the start for every step."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._hash = blake2b(digest_size=8)
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self._hash.update(struct.pack(f"<{len(tokens)}I", *tokens))

    def hex(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True)
class Echo:
    """The newest block of the session's main source that no step has answered: its t_sent, when it came in
    (monotonic), and the gateway's Unix time where the block found its verifier idle (else 0)."""

    t_sent: int
    arrived: float
    idle_since_unix: float = 0.0


@dataclass(frozen=True)
class Seat:
    """What a session would put into the next step: held nodes, or tokens that its own text suggests."""

    chain: list[Node] = field(default_factory=list)
    proposal: Proposal = ((), ())


@dataclass(eq=False)
class Ticket:
    """A session's seat in a batch under way. `plan` None: only history is fed."""

    live: Live
    verifier: str
    plan: Plan | None
    history: int
    echo: Echo | None = None


@dataclass(frozen=True)
class Pending:
    """A commit that the store has not confirmed, and what its verdict will say besides. Once `written_at_once` it may
    be in the store already, whole: it is repeated as it is, never merged with a later one."""

    commit: Commit
    counters: Counters
    timing: Timing | None = None
    written_at_once: bool = False


def merged(parts: Sequence[Pending]) -> Pending:
    """Consecutive commits as one."""
    last = parts[-1]
    if len(parts) == 1:
        return replace(last, written_at_once=True)
    logprobs = [part.commit.logprobs for part in parts if part.commit.logprobs is not None]
    commit = Commit(
        at=parts[0].commit.at,
        tokens=tuple(token for part in parts for token in part.commit.tokens),
        kinds="".join(part.commit.kinds for part in parts),
        finish=last.commit.finish,
        error=last.commit.error,
        logprobs=tuple(entry for entries in logprobs for entry in entries) if logprobs else None,
    )
    timing = next((part.timing for part in reversed(parts) if part.timing is not None), None)
    return Pending(commit, last.counters, timing, written_at_once=True)


@dataclass(eq=False)
class Live:
    """`durable` is the tip that the store confirmed: nothing beyond it is shown to anybody. `fed`: tokens of which the
    verifier is believed to hold the KV; when that is wrong it says so. `strikes`: failures since the last success."""

    session: Session
    partition: int
    presence: Presence
    headers: dict[str, str] = field(default_factory=dict)
    trust: SessionTrust = field(default_factory=lambda: Trust().for_session())
    patience: Patience = field(default_factory=Patience)
    pending: deque[Pending] = field(default_factory=deque)
    durable: int = 0
    verifier: str | None = None
    fed: int = 0
    served: int = 0
    ticket: Ticket | None = None
    echo: Echo | None = None
    seat: Seat = field(default_factory=Seat)
    look_again_at: float | None = None
    """When time alone may make it run."""
    not_before: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S
    strikes: int = 0
    replayed: bool = False
    alone: bool = False
    """A batch with this session was refused whole: it goes by itself, so that only the guilty one fails."""
    leaving: bool = False
    error: Failure | None = None
    last_verdict: float = 0.0
    shown_cap: int | None = None
    shown_price: float | None = None
    price_at: float = 0.0
    """When a price was told last."""
    told_connection: int = 0
    """The newest connection that a verdict told of, so that the readers of older ones end."""
    room_wanted_since: float | None = None
    """Since when the verifier has had no KV cells for it."""
    running_since: float | None = None
    """Since when it has been stepping without a rest."""
    losses: int = 0
    """Batches with this session that went down with their verifier, in a row."""
    released: bool = False
    stranded_since: float | None = None
    """Since when no verifier serves it."""
    assist: Assist = field(default_factory=Assist)
    hosted_open: bool = False
    hosted_retry_at: float = 0.0
    hosted_pause_s: float = 0.0
    hosted_unanswered: float | None = None
    """When the first token was committed after the hosted drafter's last block."""

    def __post_init__(self) -> None:
        self.durable = self.session.tip
        self.told_connection = self.session.connection
        self.prefix = PrefixHash(self.session.committed)
        self.forecast = Forecast(self.trust, self.main_source)
        self.base, self.first_tip = self.session.counters, self.session.tip
        self.logprobs: list[LogprobEntry] = list(self.session.record.logprobs)

    @property
    def id(self) -> str:
        return self.session.record.session

    @property
    def tenant(self) -> str:
        return self.session.record.tenant

    @property
    def main_source(self) -> str:
        return "hosted" if self.session.record.opened.speculation.hosted else "edge"

    @property
    def wants_hosted(self) -> bool:
        speculation = self.session.record.opened.speculation
        asked = speculation.hosted or self.assist.on
        return speculation.enabled and asked and self.session.finish is None

    @property
    def may_be_assisted(self) -> bool:
        """Its drafts come from an edge that does not mind, and bubbles are to be filled."""
        speculation = self.session.record.opened.speculation
        return speculation.enabled and speculation.assist and speculation.fill and not speculation.hosted

    def committed_now(self, commit: Commit, timing: Timing | None = None) -> None:
        """Note a commit that the session made just now."""
        self.prefix.extend(commit.tokens)
        self.logprobs.extend(commit.logprobs or ())
        self.pending.append(Pending(commit, self.session.counters, timing))
        self.patience.stepped()

    def next_to_write(self) -> Pending:
        """The head of `pending`: what was sent before as it was, else all that waits, as one."""
        if not self.pending[0].written_at_once:
            whole = merged(self.pending)
            self.pending.clear()
            self.pending.append(whole)
        return self.pending[0]

    def adopted(self) -> None:
        """The store's history replaced ours."""
        self.prefix = PrefixHash(self.session.committed)
        self.forecast.forget_text()
        self.pending.clear()
        self.ticket = None
        self.durable = self.session.tip
        self.fed = min(self.fed, self.session.tip)

    def give_up_ticket(self) -> None:
        """The step under way is lost or does not count any more."""
        self.ticket = None
        self.session.forget()

    def back_off(self, now: float) -> None:
        self.not_before = now + self.backoff_s
        self.backoff_s = min(2 * self.backoff_s, LONGEST_BACKOFF_S)

    def succeeded(self, now: float) -> None:
        self.room_wanted_since = None
        if self.running_since is None:
            self.running_since = now
        self.strikes, self.losses, self.backoff_s, self.not_before = 0, 0, FIRST_BACKOFF_S, 0.0

    def verdict(
        self, pending: Pending | None, window_cap: int | None, now: float, price: Price | None = None
    ) -> Verdict:
        """What to publish for a confirmed commit, or, without one, an empty verdict at the confirmed tip. price: of its
        verifier's time."""
        session = self.session
        cap = window_cap if window_cap != self.shown_cap else None
        connection = session.connection if session.connection != self.told_connection else 0
        self.shown_cap, self.told_connection, self.last_verdict = window_cap, session.connection, now
        over = session.finish if self.durable == session.tip and not self.pending else None
        commit = pending.commit if pending is not None else Commit(at=self.durable, finish=over, error=self.error)  # type: ignore[arg-type]
        return Verdict(
            session=self.id,
            epoch=session.epoch,
            at=commit.at,
            tokens=commit.tokens,
            kinds=commit.kinds,
            logprobs=commit.logprobs,
            counters=pending.counters if pending is not None else session.counters,
            seen=dict(session.seen),
            gap=session.take_gaps(),
            finish=commit.finish,
            error=commit.error,
            timing=pending.timing if pending is not None else None,
            window_cap=cap,
            price=self._price_to_tell(price, now),
            connection=connection,
            fed=min(self.fed, self.durable) if pending is None and session.completion == 0 else None,
        )

    def _price_to_tell(self, price: Price | None, now: float) -> float | None:
        """To those who draft, when it changed, and once a second."""
        if price is None or price.value is None or not self.session.record.opened.speculation.enabled:
            return None
        if not price.changed(self.shown_price) and now - self.price_at < PRICE_S:
            return None
        self.shown_price, self.price_at = round(price.value, 3), now
        return self.shown_price


class Table:
    """The sessions of this batcher by id, and by the verifier that they sit on. Bounded by who fills it."""

    def __init__(self) -> None:
        self._all: dict[str, Live] = {}
        self._on: dict[str, dict[str, Live]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Live]:
        return iter(list(self._all.values()))

    def get(self, session: str) -> Live | None:
        return self._all.get(session)

    def add(self, live: Live) -> None:
        self._all[live.id] = live
        if live.verifier is not None:
            self._on.setdefault(live.verifier, {})[live.id] = live

    def remove(self, live: Live) -> None:
        self._all.pop(live.id, None)
        self.assign(live, None)

    def assign(self, live: Live, verifier: str | None) -> None:
        if live.verifier is not None:
            self._on.get(live.verifier, {}).pop(live.id, None)
        live.verifier = verifier
        if verifier is not None and live.id in self._all:
            self._on.setdefault(verifier, {})[live.id] = live

    def on(self, verifier: str) -> Iterable[Live]:
        return self._on.get(verifier, {}).values()

    def load(self) -> dict[str, int]:
        """Sessions by verifier."""
        return {verifier: len(sessions) for verifier, sessions in self._on.items() if sessions}

    def of(self, partition: int) -> list[Live]:
        return [live for live in self._all.values() if live.partition == partition]
