"""What one source knows of one session, and which draft blocks follow from it. Pure: no engine, no I/O, no clock.

The rules of docs/protocol.md as a source sees them: blocks follow their predecessors by `after`, the first node after
the tip hangs under the committed prefix (`at`); what the batcher missed is sent again from seen + 1, at most once a
round trip; what cannot be sent again (forgotten nodes, a new owner, a new connection) starts a new incarnation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.control import Pace
from paceline.draft_numbers import Numbers
from paceline.draft_path import DraftPath, survival
from paceline.engine import Guess
from paceline.wire import KIND_OF_SOURCE, Bounds, Chain, DraftBlock, Failure, Source, Speculation, Verdict

DOUBTFUL = 0.5
"""A block that will be accepted as a whole less likely than this goes out without waiting for more nodes."""


@dataclass
class DraftCounts:
    """drafted: tokens guessed; sent: nodes given an id; accepted: by the target, and ours."""

    drafted: int = 0
    sent: int = 0
    blocks: int = 0
    accepted: int = 0
    resends: int = 0
    incarnations: int = 1


class DraftState:
    """`limit`: longest total length; no draft is made for its last position, which the target's own token fills.
    `longest_path`: longest path the draft model can extend. `epoch`: None until the first verdict tells it.
    """

    def __init__(
        self,
        *,
        source: Source,
        session: str,
        connection: int,
        tokens: Sequence[int],
        speculation: Speculation,
        bounds: Bounds,
        limit: int,
        longest_path: int,
        end_ids: Sequence[int] = (),
        epoch: int | None = None,
    ) -> None:
        self.source: Source = source
        self.session = session
        self.epoch = epoch
        self.failure: Failure | None = None
        self.ended = False
        """Nothing more is drafted or sent: the session finished, is lost, or another process drafts for it."""
        self.counts = DraftCounts()
        self.pace = Pace(speculation, bounds)
        self.path = DraftPath(tokens)
        self._tip_heard = len(tokens)
        self._finish_heard: str | None = None
        self._numbers = Numbers(connection, self.pace)
        self._speculation = speculation
        self._bounds = bounds
        self._longest = min(limit - 2, longest_path)
        self._end_ids = frozenset(end_ids)

    @property
    def committed(self) -> list[int]:
        return self.path.committed

    @property
    def behind(self) -> bool:
        """Tokens before the tip were missed; `adopt` or the replay of a resumption brings them."""
        return self._tip_heard > len(self.path.committed)

    @property
    def finish(self) -> str | None:
        """How the session ended, once every token before its end is here."""
        return None if self.behind else self._finish_heard

    # --- drafting ---------------------------------------------------------------------------------------------------

    def may_draft(self) -> bool:
        if self.ended or self.behind or self._at_end() or self.path.ahead >= self.pace.window:
            return False
        if not self._speculation.depth:
            return True
        whole = len(self.path.unsent) >= self._speculation.max_draft
        return not whole and self.path.blocks_in_flight() < self._speculation.depth

    def _at_end(self) -> bool:
        """No verdict on what was sent lets this path go on; only another path can."""
        if not self._speculation.enabled or len(self.path.committed) + self.path.ahead > self._longest:
            return True
        return self.path.ahead > 0 and self.path.nodes[-1].token in self._end_ids

    def extend(self, guess: Guess, generation: int, now: float) -> bool:
        """Take a guess for the end of the path of `generation`; False: the path has changed since, it is void."""
        if generation != self.path.generation or self.ended:
            return False
        self.path.extend(guess, now)
        self.counts.drafted += 1
        return True

    # --- verdicts ---------------------------------------------------------------------------------------------------

    def on_verdict(self, verdict: Verdict, now: float) -> bool:
        """False: tokens before this verdict are missing, so its own were not taken."""
        if self.epoch is not None and verdict.epoch < self.epoch:
            return True
        new_owner = self.epoch is not None and verdict.epoch > self.epoch
        self.epoch = verdict.epoch
        complete = self._take_tokens(verdict, new_owner)
        self._take_pace(verdict, now)
        if new_owner:
            self._restart(now)
        else:
            self._take_seen(verdict, now)
        self._take_finish(verdict)
        return complete

    def adopt(self, at: int, tokens: Sequence[int]) -> None:
        """Committed tokens from the store, which fill what missed verdicts left open."""
        if at <= len(self.committed) and not self.path.commit(at, tuple(tokens), follow=False):
            self._lose(at)

    def on_reconnected(self, connection: int, position: int, now: float) -> None:
        """`position`: the batcher's tip; what it has beyond ours is replayed to us, what it lacks we send."""
        self._tip_heard = position
        self.path.rebase(min(position, len(self.committed)))
        self._numbers.reconnect(connection, now)
        self._send_again()

    def _take_tokens(self, verdict: Verdict, new_owner: bool) -> bool:
        known, end = len(self.committed), verdict.at + len(verdict.tokens)
        self._tip_heard = end if new_owner else max(end, self._tip_heard)
        if verdict.at > known:
            return False
        if not self.path.commit(verdict.at, verdict.tokens, follow=new_owner):
            self._lose(verdict.at)
        else:
            self.counts.accepted += verdict.kinds[known - verdict.at :].count(KIND_OF_SOURCE[self.source])
        return True

    def _lose(self, at: int) -> None:
        self.ended, self._finish_heard = True, "error"
        message = f"the cloud's tokens from position {at} on differ from those that were delivered before"
        self.failure = Failure(status=409, code="history_lost", message=message)

    def _take_pace(self, verdict: Verdict, now: float) -> None:
        if verdict.timing is not None:
            self.pace.on_timing(verdict.timing, now)
        if verdict.window_cap is not None:
            self.pace.window_cap = verdict.window_cap

    def _take_seen(self, verdict: Verdict, now: float) -> None:
        seen = verdict.seen.get(self.source)
        if not self._numbers.hear(seen, self.source in verdict.gap, now):
            return
        if self.source == "hosted" and self._numbers.accepted_once:
            self.ended = True  # another drafter took the session over; two that outbid each other would never end
        else:
            self._restart(now, above=seen[0] if seen else 0)

    def _take_finish(self, verdict: Verdict) -> None:
        if verdict.finish is None or self.failure is not None:
            return
        self.ended = True
        self._finish_heard, self.failure = verdict.finish, verdict.error

    # --- blocks -----------------------------------------------------------------------------------------------------

    def due(self, now: float) -> list[DraftBlock]:
        """The blocks to be sent now, in this order; they count as sent from here on."""
        if self.ended:
            return []
        blocks = self._resend(now) if self._numbers.resend_due(self.path.sent, now) else []
        while self._cut_due(now):
            blocks.append(self._cut(now))
        return blocks

    def next_due(self, now: float) -> float | None:
        """Seconds until `due` may have something without a further event; None: never."""
        moments = []
        if self.path.sent and self._numbers.acked < self._numbers.given:
            moments.append(self._numbers.patience_ends)
        room = self.path.sent < self._bounds.held - 1
        if self.path.unsent and room and not self._speculation.depth and self._near_end(now):
            moments.append(self.path.unsent[0].drafted_at + self.pace.flush_s)
        return max(0.0, min(moments) - now) if moments else None

    def _cut_due(self, now: float) -> bool:
        unsent, sent = self.path.unsent, self.path.sent
        if not unsent or sent >= self._bounds.held - 1:
            return False
        if sent < self.path.urgent or len(unsent) >= self._speculation.max_draft or self._at_end():
            return True
        full = self.path.ahead >= self.pace.window
        if self._speculation.depth or not self._near_end(now):
            return full and bool(self._speculation.depth)
        return full or now >= unsent[0].drafted_at + self.pace.flush_s or survival(unsent) < DOUBTFUL

    def _near_end(self, now: float) -> bool:
        """The batcher will soon have nothing left: it holds nothing of ours, or keeps up with us."""
        return not self.path.sent or now - self.path.nodes[0].sent_at <= self.pace.decided_within_s

    def _cut(self, now: float) -> DraftBlock:
        start = self.path.sent
        most = self._bounds.chain if start < self.path.urgent else self._speculation.max_draft
        count = min(most, self._bounds.chain, self._bounds.held - 1 - start, len(self.path.unsent))
        self._numbers.give(count, start, now)
        self.counts.sent += count
        self.counts.blocks += 1
        self.path.mark_sent(count, self.counts.blocks, now)
        return self._block(start, start + count, now)

    def _resend(self, now: float) -> list[DraftBlock]:
        """From seen + 1, or, where a node between was forgotten, everything that lives in a new incarnation."""
        sent, step = self.path.sent, self._bounds.chain
        start = self._numbers.acked - (self._numbers.given - sent)
        if start < 0:
            self._restart(now)
            return []
        self._numbers.resent(now)
        self.counts.resends += 1
        return [self._block(index, min(index + step, sent), now) for index in range(start, sent, step)]

    def _restart(self, now: float, above: int = 0) -> None:
        self._numbers.restart(now, above)
        self._send_again()

    def _send_again(self) -> None:
        self.counts.incarnations += 1
        self.path.send_again()

    def _block(self, start: int, stop: int, now: float) -> DraftBlock:
        nodes = self.path.nodes[start:stop]
        first = self._numbers.given - self.path.sent + start + 1
        position = self.path.root + start
        chain = Chain(
            first=first,
            position=position,
            tokens=tuple(node.token for node in nodes),
            conf=bytes(round(255 * node.confidence) for node in nodes),
            after=first - 1 if start else None,
            at=None if start else position,
        )
        return DraftBlock(
            session=self.session,
            source=self.source,
            incarnation=self._numbers.incarnation,
            chains=(chain,),
            t_sent=int(now * 1000),
        )
