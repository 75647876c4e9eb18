"""What one source knows of one session, what it drafts next, and which draft blocks follow. Pure: no engine, no I/O.

The rules of docs/protocol.md as a source sees them: nodes are numbered as they are sent; a chain hangs under its
parent's number (`after`), or under the committed prefix (`at`); what the batcher missed is sent again from seen + 1, at
most once a round trip; what cannot be repeated (a new owner or connection, a log too long) starts a new incarnation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.calibration import Calibrated, Calibration
from paceline.control import Pace
from paceline.draft_cut import Cutter
from paceline.draft_log import DraftLog
from paceline.draft_numbers import Numbers
from paceline.draft_plan import FLOOR, REACH_FLOOR, Candidate, Limits, Reason, branch_candidates, rows_of_pass
from paceline.draft_tree import DraftTree, Node
from paceline.engine import Guess
from paceline.pass_costs import PassCosts
from paceline.runner_ups import chances
from paceline.wire import KIND_OF_SOURCE, Bounds, Chain, DraftBlock, Failure, Source, Speculation, Verdict

PROBE_S = 2.0
"""So often a main chain that will hardly overtake the filling cloud is drafted all the same, PROBE_NODES long, and as
many paths as the engine may serve are asked for: times, acceptance and room change."""
PROBE_NODES = 4
SUPPLY = 3
"""Chains that many times as long as the price lets be verified in one step are drafted beyond what is decided before
they have their turn; most of what is longer would be void by then. In simulated time this and the rule for branches
save three fifths to four fifths of the drafts on a compute-bound verifier with 16 sessions, and cost 1 to 3 % of its
throughput; where the price is low, on a verifier that is idle or memory-bound, it does not stop drafting."""
BRANCH_SHARE = 0.25
"""Branches are drafted down to this value over the number of passes until the verdict on a node that leaves now: there
is time for so many rows only, and wide passes delay the main chain and the turn to another one. Where the verifier is
dear, few nodes are verified, and each earns little beyond its price: the value falls with the square of what is left of
1 then."""
CONFIDENCE_LEVELS = 31
"""Confidences go out in steps of 1/31: fewer different bytes deflate better."""


@dataclass
class DraftCounts:
    """drafted: tokens guessed, `branched` of them beside the main chain; sent: nodes given an id, `branches` of them
    beside the main chain; accepted: by the target, and ours."""

    drafted: int = 0
    branched: int = 0
    sent: int = 0
    branches: int = 0
    blocks: int = 0
    accepted: int = 0
    resends: int = 0
    incarnations: int = 1
    passes: int = 0


@dataclass(frozen=True)
class DraftPass:
    """One pass of the draft model: the choice after each path is wanted. steady: none has more than one token that the
    model has not read."""

    nodes: tuple[Node, ...]
    paths: tuple[list[int], ...]
    steady: bool


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
        calibration: Calibrated | None = None,
        costs: PassCosts | None = None,
    ) -> None:
        self.source: Source = source
        self.session = session
        self.epoch = epoch
        self.failure: Failure | None = None
        self.ended = False
        """Nothing more is drafted or sent: the session finished, is lost, or another process drafts for it."""
        self.counts = DraftCounts()
        self.pace = Pace(speculation, bounds, source, costs)
        self.tree = DraftTree(tokens)
        self.calibration: Calibrated = calibration or Calibration().for_session()
        self.reason: Reason = "drafting"
        self.reach = 1.0
        """The chance that the main chain's next node is verified, as it was when that was last asked."""
        self._tip_heard = len(tokens)
        self._finish_heard: str | None = None
        self._numbers = Numbers(connection, self.pace)
        self._log = DraftLog()
        self._cutter = Cutter(self.tree, self.pace, speculation, bounds)
        self._speculation = speculation
        self._bounds = bounds
        self._longest = min(limit - 2, longest_path)
        self._end_ids = frozenset(end_ids)
        self._probing = 0
        self._served, self._served_until = 1, -math.inf
        self._tried_at = -math.inf

    @property
    def committed(self) -> list[int]:
        return self.tree.committed

    @property
    def behind(self) -> bool:
        """Tokens before the tip were missed; `adopt` or the replay of a resumption brings them."""
        return self._tip_heard > len(self.tree.committed)

    @property
    def finish(self) -> str | None:
        """How the session ended, once every token before its end is here."""
        return None if self.behind else self._finish_heard

    # --- drafting ---------------------------------------------------------------------------------------------------

    def next_pass(self, now: float, most_paths: int = 1) -> DraftPass | None:
        """What to draft now, on at most `most_paths` paths, the main one first; None: nothing before a verdict."""
        if self.ended or self.behind or not self._speculation.enabled:
            return None
        most_paths = min(most_paths, self._served) if now < self._served_until else most_paths
        limits = self._limits(now, most_paths)
        chain = self.tree.ahead()
        end = chain[-1] if chain else self.tree.tip
        self.reach = self.tree.survival(end) * limits.in_time(len(chain))
        self.reason = self._reason(chain, limits)
        if self.reason == "behind" and self._probes(now):
            self.reason = "drafting"
        if self.reason in ("end", "window", "price", "block", "held"):
            return None
        alone = self._speculation.depth or not self._speculation.alternatives or most_paths <= 1
        branches = [] if alone else branch_candidates(self.tree, limits)
        rows = rows_of_pass(Candidate(self.reach, end), branches, limits, self.pace.costs.of)
        if self.reason != "drafting" and len(rows) == 1:
            return None
        self._tried_at = now
        nodes = [row.node if row.token is None else self.tree.hang(row.node, row.token, now) for row in rows]
        return DraftPass(
            nodes=tuple(nodes),
            paths=tuple(self.tree.path(node) for node in nodes),
            steady=all(node.unread <= 1 for node in nodes),
        )

    def _reason(self, chain: list[Node], limits: Limits) -> Reason:
        if self._at_end(chain):
            return "end"
        if limits.most < 1:
            return "held"
        if len(chain) >= limits.deepest:
            return "window"
        if self._speculation.depth:
            unsent = sum(not node.id for node in chain)
            in_flight = len({node.block for node in self.tree.main() if node.id})
            waits = unsent >= self._speculation.max_draft or in_flight >= self._speculation.depth
            return "block" if waits else "drafting"
        survival, in_time = self.tree.survival(chain[-1]) if chain else 1.0, limits.in_time(len(chain))
        if survival < FLOOR:
            return "floor"
        if in_time < 1.0 and survival * in_time < REACH_FLOOR:
            return "behind"
        if self._beyond_price(chain, survival, int(limits.lead or 0)):
            return "price"
        return "drafting"

    def _probes(self, now: float) -> bool:
        if now - self._tried_at >= PROBE_S:
            self._probing = PROBE_NODES
        self._probing = max(-1, self._probing - 1)
        return self._probing >= 0

    def take_pass(self, drafted: DraftPass, guesses: Sequence[Guess | None], seconds: float, now: float) -> list[Node]:
        """The guesses of a pass that took so long. Those whose path is void are dropped. The new nodes of the main
        chain are returned."""
        served = sum(guess is not None for guess in guesses)
        if drafted.steady and served:
            self.pace.on_drafted(seconds, served)
        if served < len(guesses):
            self._served, self._served_until = max(1, served), now + PROBE_S
        self.counts.passes += 1
        new = []
        for node, guess in zip(drafted.nodes, guesses, strict=True):
            if guess is None or not node.alive or node.next is not None or self.ended:
                continue
            new.append(self._extend(node, guess, now))
        ahead = {id(node) for node in self.tree.ahead()}
        main = [node for node in new if id(node) in ahead]
        self.counts.drafted += len(new)
        self.counts.branched += len(new) - len(main)
        return main

    def _extend(self, node: Node, guess: Guess, now: float) -> Node:
        confidence = min(1.0, max(0.0, guess.confidence))
        gap = guess.alternatives[0][1] if guess.alternatives else math.inf
        fits = self.calibration.acceptance(confidence, gap)
        return self.tree.extend(node, guess, fits, chances(guess, fits, self.calibration), now)

    def _limits(self, now: float, most_paths: int) -> Limits:
        return Limits(
            most=self.pace.most_held - self.tree.size - len(self.tree.trunk),
            rows=most_paths,
            deepest=self.pace.window,
            longest=self._longest,
            end_ids=self._end_ids,
            floor=max(FLOOR, BRANCH_SHARE / self.pace.passes_in_flight) / max(1e-9, 1.0 - self.pace.price) ** 2,
            lead=self.pace.lead(now),
            gain=self.pace.gain,
            mean=self.calibration.mean,
        )

    def _beyond_price(self, chain: list[Node], survival: float, lead: int) -> bool:
        decided = max(self.pace.decided_before, lead)
        if len(chain) <= decided:
            return False
        start = chain[decided - 1] if decided else self.tree.tip
        return survival / max(self.tree.survival(start), 1e-9) < self.pace.price**SUPPLY

    def _at_end(self, chain: list[Node]) -> bool:
        """No verdict on what was sent lets this chain go on; only another one can."""
        if not self._speculation.enabled or len(self.tree.committed) + len(chain) > self._longest:
            return True
        return bool(chain) and chain[-1].token in self._end_ids

    # --- verdicts ---------------------------------------------------------------------------------------------------

    def on_verdict(self, verdict: Verdict, now: float) -> bool:
        """False: tokens before this verdict are missing, so its own were not taken."""
        if self.epoch is not None and verdict.epoch < self.epoch:
            return True
        new_owner = self.epoch is not None and verdict.epoch > self.epoch
        self.epoch = verdict.epoch
        complete = self._take_tokens(verdict, new_owner)
        self.pace.on_verdict(verdict, now)
        if new_owner:
            self._restart(now)
        else:
            self._take_seen(verdict, now)
        self._take_finish(verdict)
        return complete

    def adopt(self, at: int, tokens: Sequence[int]) -> None:
        """Committed tokens from the store, which fill what missed verdicts left open."""
        if at <= len(self.committed) and not self.tree.commit(at, tuple(tokens), follow=False):
            self._lose(at)
        self._learn()

    def on_reconnected(self, connection: int, position: int, now: float) -> None:
        """`position`: the batcher's tip; what it has beyond ours is replayed to us, what it lacks we send."""
        self._tip_heard = position
        self.tree.rebase(min(position, len(self.committed)))
        self._numbers.reconnect(connection, now)
        self._send_again()

    def _take_tokens(self, verdict: Verdict, new_owner: bool) -> bool:
        known, end = len(self.committed), verdict.at + len(verdict.tokens)
        self._tip_heard = end if new_owner else max(end, self._tip_heard)
        if verdict.at > known:
            return False
        if not self.tree.commit(verdict.at, verdict.tokens, follow=new_owner):
            self._lose(verdict.at)
        else:
            self.counts.accepted += verdict.kinds[known - verdict.at :].count(KIND_OF_SOURCE[self.source])
        self._learn()
        return True

    def _learn(self) -> None:
        for lesson in self.tree.lessons:
            self.calibration.learn(lesson.confidence, lesson.gap, lesson.rank)
        self.tree.lessons.clear()

    def _lose(self, at: int) -> None:
        self.ended, self._finish_heard = True, "error"
        message = f"the cloud's tokens from position {at} on differ from those that were delivered before"
        self.failure = Failure(status=409, code="history_lost", message=message)

    def _take_seen(self, verdict: Verdict, now: float) -> None:
        seen = verdict.seen.get(self.source)
        if not self._numbers.hear(seen, self.source in verdict.gap, now):
            self._log.confirm(self._numbers.acked)
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
        blocks = self._resend(now) if self._numbers.resend_due(self._unanswered(), now) else []
        while True:
            reason = self._reason(self.tree.ahead(), self._limits(now, 1))
            waits = reason != "drafting" and self._probing <= 0
            chains = self._cutter.due(stalled=reason == "end", waits=waits, now=now)
            if not chains:
                return blocks
            blocks.append(self._cut(chains, now))

    def next_due(self, now: float) -> float | None:
        """Seconds until `due` may have something without a further event; None: never."""
        moments = []
        if self._unanswered():
            moments.append(self._numbers.patience_ends)
        if (cut := self._cutter.next_at(now)) is not None:
            moments.append(cut)
        return max(0.0, min(moments) - now) if moments else None

    def _unanswered(self) -> bool:
        """The batcher has not confirmed a node that still matters."""
        return any(node.id > self._numbers.acked for node in self.tree.live())

    def _cut(self, chains: list[list[Node]], now: float) -> DraftBlock:
        live = sum(1 for node in self.tree.live() if node.id)
        count = sum(len(chain) for chain in chains)
        first = self._numbers.give(count, live, now)
        main = {id(node) for node in self.tree.main()}
        self.counts.sent += count
        self.counts.blocks += 1
        sent = []
        for nodes in chains:
            for offset, node in enumerate(nodes):
                node.id, node.block, node.sent_at = first + offset, self.counts.blocks, now
            self.counts.branches += 0 if id(nodes[0]) in main else len(nodes)
            sent.append(self._chain(nodes))
            first += len(nodes)
        self._log.add(sent)
        return self._block(sent, now)

    def _chain(self, nodes: list[Node]) -> Chain:
        parent, position = nodes[0].parent, nodes[0].position
        after = parent.id if parent is not None and position > self.tree.root else None
        return Chain(
            first=nodes[0].id,
            position=position,
            tokens=tuple(node.token for node in nodes),
            conf=bytes(_quantised(node.confidence) for node in nodes),
            after=after or None,
            at=None if after else position,
        )

    def _resend(self, now: float) -> list[DraftBlock]:
        """From seen + 1, or, where that is not kept, everything that lives in a new incarnation."""
        chains = None if self._log.full else self._log.since(self._numbers.acked, self._bounds.chain)
        if chains is None:
            self._restart(now)
            return []
        self._numbers.resent(now)
        self.counts.resends += 1
        step = self._bounds.chains
        return [self._block(chains[i : i + step], now) for i in range(0, len(chains), step)]

    def _restart(self, now: float, above: int = 0) -> None:
        self._numbers.restart(now, above)
        self._send_again()

    def _send_again(self) -> None:
        self.counts.incarnations += 1
        self._log.clear()
        self.tree.send_again()

    def _block(self, chains: Sequence[Chain], now: float) -> DraftBlock:
        return DraftBlock(
            session=self.session,
            source=self.source,
            incarnation=self._numbers.incarnation,
            chains=tuple(chains),
            t_sent=int(now * 1000),
        )


def _quantised(confidence: float) -> int:
    """One byte: the confidence to the next of CONFIDENCE_LEVELS steps, never zero."""
    level = min(CONFIDENCE_LEVELS, max(1, round(confidence * CONFIDENCE_LEVELS)))
    return round(255 * level / CONFIDENCE_LEVELS)
