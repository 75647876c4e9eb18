"""The state machine of one session, as its batcher holds it. Pure: no clock, no I/O.

**committed** tokens c[0..n) are the prompt and all that the target decided; n is the **tip**. Committed tokens never
change. A committed token is **accepted** (a draft that fits, credited to its source), **corrected** (the target's own
token after a mismatch), **bonus** (the target's own after a whole chain was accepted) or **filled** (the token of a
step without drafts). One item is in flight at a time: `plan`, then `decide`, or `forget` when it was lost.

The rules for blocks are those of docs/protocol.md; tests/unit/test_session.py shows that any order, duplication, loss
and cutting of blocks gives the tokens of plain decoding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from paceline.ends import Ends
from paceline.errors import BadRequest
from paceline.store import SessionRecord
from paceline.trie import REMEMBERED_POSITIONS, Claim, Node, Trie, stated
from paceline.wire import (
    KIND_OF_SOURCE,
    Bounds,
    Chain,
    DraftBlock,
    Failure,
    Finish,
    LogprobEntry,
    Source,
)


@dataclass(frozen=True)
class Offer:
    """What became of a block's nodes. gap: nodes are missing before it, the source must send again from `seen` + 1;
    ignored: of an old incarnation or connection, or the session is over."""

    attached: int = 0
    history: int = 0
    duplicate: int = 0
    stale: int = 0
    overflow: int = 0
    gap: bool = False
    ignored: bool = False


@dataclass(frozen=True)
class Plan:
    """A verify step for this session: the chain `tokens` after the committed prefix of length `at`. claims: of each
    token, who drafted it and how sure of it, the source that has the credit first."""

    at: int
    tokens: tuple[int, ...]
    claims: tuple[tuple[Claim, ...], ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(claims[0][0] for claims in self.claims)


@dataclass(frozen=True)
class Commit:
    """Newly committed tokens from `at` on, one letter of wire.KINDS each, and how the session ended, if it did.
    refuted: the sources of which something else was held first; what they have on its way is stale, as a rule."""

    at: int
    tokens: tuple[int, ...] = ()
    kinds: str = ""
    finish: Finish | None = None
    error: Failure | None = None
    logprobs: tuple[LogprobEntry, ...] | None = None
    refuted: frozenset[str] = frozenset()


MOST_NAMED = 4 * REMEMBERED_POSITIONS
"""Ids of one source that name a held node or a committed one at the same time. A source that numbers every node once
stays far below; one that says the same again and again under new numbers has to wait until the tip moves on."""
OWN_SOURCE: Source = "lookup"
"""Of the drafts that no message brought: they have no ids, and nobody is told what became of them."""


class Session:
    """One session. `vocabulary` bounds token ids, `bounds` what a source may hold."""

    def __init__(self, record: SessionRecord, ends: Ends, *, vocabulary: int, bounds: Bounds | None = None) -> None:
        self.record = record
        self.vocabulary = vocabulary
        self.bounds = bounds or Bounds()
        self.committed = list(record.tokens)
        self.kinds = record.kinds
        self.epoch = record.epoch
        self.connection = record.connection
        self.counters = record.counters
        self.finish: str | None = record.finish
        self.parked = False
        self.in_flight: Plan | None = None
        self.seen: dict[Source, tuple[int, int]] = {}
        self.trie = Trie(len(self.committed))
        self._ends = ends
        self._gaps: set[Source] = set()
        self._refeed()

    @property
    def tip(self) -> int:
        return len(self.committed)

    @property
    def completion(self) -> int:
        """Completion tokens committed so far."""
        return self.tip - self.record.prompt_length

    @property
    def held(self) -> int:
        return self.trie.held

    @property
    def sent(self) -> int:
        """Held nodes that a source sent; the others are the batcher's own guesses."""
        return self.trie.held - self.trie.held_by(OWN_SOURCE)

    @property
    def room(self) -> int:
        """Longest chain that the completion has room for: its last token is always the target's own."""
        return max(0, self._ends.limit - self.completion - 1)

    # --- drafts ----------------------------------------------------------------------------------------------------

    def offer(self, block: DraftBlock) -> Offer:
        """Take in a block. Raises BadRequest, with nothing changed, for token ids out of range or positions that do not
        follow their parent."""
        if self.finish is not None or (block.source == "edge" and block.connection < self.connection):
            return Offer(ignored=True)
        known, _ = self.seen.get(block.source, (-1, 0))
        if block.incarnation < known:
            return Offer(ignored=True)
        self._validate(block)
        if block.incarnation > known:
            self.seen[block.source] = (block.incarnation, 0)
            self.trie.forget_ids(block.source)
        total = Offer()
        for chain in block.chains:
            part = self._offer_chain(block.source, chain)
            total = _sum(total, part)
            if part.gap or part.overflow:
                break
        if total.gap:
            self._gaps.add(block.source)
        self._count(block.source, total)
        return total

    def take_gaps(self) -> tuple[Source, ...]:
        """Sources that must send again, to be told once, in the next verdict."""
        gaps = tuple(sorted(self._gaps))
        self._gaps.clear()
        return gaps

    def _validate(self, block: DraftBlock) -> None:
        for chain in block.chains:
            worst = max(chain.tokens)
            if worst >= self.vocabulary:
                raise BadRequest(
                    f"draft token id {worst} is not below the vocabulary's {self.vocabulary}",
                    code="token_out_of_range",
                    param="chains",
                )
            parent = self.trie.find(block.source, chain.after) if chain.after is not None else None
            known, _ = self.seen.get(block.source, (-1, 0))
            if parent is not None and block.incarnation == known and chain.position != parent.position + 1:
                raise BadRequest(
                    f"a chain at position {chain.position} does not follow node {chain.after} at {parent.position}",
                    code="position_mismatch",
                    param="chains",
                )

    def _offer_chain(self, source: Source, chain: Chain) -> Offer:
        incarnation, seen = self.seen[source]
        last = chain.first + len(chain.tokens) - 1
        if last <= seen:
            return Offer(duplicate=len(chain.tokens))
        if chain.first > seen + 1 or (chain.at is not None and chain.at > self.tip):
            return Offer(gap=True)
        skip = seen + 1 - chain.first
        start = chain.position + skip
        after = chain.first + skip - 1 if skip else chain.after
        parent = self.trie.find(source, after) if after is not None else None
        count = len(chain.tokens) - skip
        if after is not None and parent is None:
            self.seen[source] = (incarnation, last)
            return Offer(stale=count, duplicate=skip)
        if self.trie.named_by(source) + count > MOST_NAMED:
            return Offer(overflow=count, duplicate=skip)
        part = _Arrival(self, source, first=chain.first + skip, position=start)
        confidences = [byte / 255 for byte in chain.conf] or [0.5] * len(chain.tokens)
        offer = part.take(parent, chain.tokens[skip:], confidences[skip:])
        self.seen[source] = (incarnation, last - offer.overflow)
        return replace(offer, duplicate=offer.duplicate + skip)

    def _count(self, source: Source, offer: Offer) -> None:
        new = offer.attached + offer.history + offer.stale
        self.counters = msgspec.structs.replace(
            self.counters,
            drafted=_added(self.counters.drafted, {source: new}),
            duplicate=self.counters.duplicate + offer.duplicate,
            stale=self.counters.stale + offer.stale,
            overflow=self.counters.overflow + offer.overflow,
        )

    # --- verify steps ----------------------------------------------------------------------------------------------

    def chain(self, limit: int, chance: Callable[[Node], float] = stated) -> list[Node]:
        """The best held chain of at most `limit` nodes, clipped to what the completion may still take and behind an
        end token. chance: see Trie.best_chain."""
        chain = self.trie.best_chain(max(0, min(limit, self.room)), chance)
        for index, node in enumerate(chain):
            if node.token in self._ends.end_ids:
                return chain[: index + 1]
        return chain

    def guess(self, tokens: Sequence[int], evidence: Sequence[float]) -> list[Node]:
        """Hold a chain of the batcher's own under the tip, and give its nodes."""
        parent, chain, drafted = self.trie.root, [], 0
        for token, sure in zip(tokens[: self.room], evidence, strict=False):
            parent, new = self.trie.attach(parent, OWN_SOURCE, None, token, sure)
            chain.append(parent)
            drafted += new
            if token in self._ends.end_ids:
                break
        self._count(OWN_SOURCE, Offer(attached=drafted))
        return chain

    def plan(self, limit: int, chain: Sequence[Node] | None = None) -> Plan:
        """The next step: at most `limit` nodes of `chain`, by default the best one. It is in flight until `decide` or
        `forget`."""
        nodes = (self.chain(limit) if chain is None else chain)[: max(0, limit)]
        tokens, claims = tuple(node.token for node in nodes), tuple(node.claims for node in nodes)
        self.in_flight = Plan(self.tip, tokens, claims)
        return self.in_flight

    def forget(self) -> None:
        """The step in flight was lost; its chain is still held."""
        self.in_flight = None

    def decide(
        self,
        plan: Plan,
        accepted: int,
        token: int,
        logprobs: Sequence[LogprobEntry] | None = None,
        *,
        step_ms: float | None = None,
    ) -> Commit | None:
        """The target's answer to `plan`: `accepted` of its tokens, then `token`. None when the plan is not in flight
        any more (late, or overtaken by another owner's history). step_ms: how long the step took, if it counts."""
        if plan is not self.in_flight or self.finish is not None or plan.at != self.tip:
            return None
        self.in_flight = None
        decided = (*plan.tokens[:accepted], token)
        kinds = "".join(KIND_OF_SOURCE[source] for source in plan.sources[:accepted]) + _own_kind(plan, accepted)
        kept, finish = self._cut(decided)
        commit = Commit(
            at=plan.at,
            tokens=decided[:kept],
            kinds=kinds[:kept],
            finish=finish,
            logprobs=tuple(logprobs[:kept]) if logprobs is not None else None,
        )
        self._count_step(plan, accepted, commit, step_ms)
        return replace(commit, refuted=self._commit(commit))

    def cancel(self) -> Commit:
        return self._end("cancelled", None)

    def fail(self, failure: Failure) -> Commit:
        return self._end("error", failure)

    def adopt(self, at: int, tail: Sequence[int], kinds: str, finish: str | None) -> bool:
        """The store holds `tail` from `at` on, and `finish`. True when that is not what was thought: then the store's
        history replaces ours, drafts and the step in flight are dropped."""
        ours = self.committed[at : at + len(tail)]
        if ours == list(tail) and (finish is None or finish == self.finish):
            return False
        self.committed[at:] = tail
        self.kinds = self.kinds[: max(0, at - self.record.prompt_length)] + kinds
        self.finish = finish
        self.in_flight = None
        self.trie.reset(self.tip)
        self.seen = {source: (incarnation, 0) for source, (incarnation, _) in self.seen.items()}
        self._gaps.update(self.seen)
        self._ends = self._ends.fresh()
        self._refeed()
        return True

    def _cut(self, decided: Sequence[int]) -> tuple[int, Finish | None]:
        for count, token in enumerate(decided, start=1):
            finish = self._ends.feed(token)
            if finish is not None:
                return count, finish
        return len(decided), None

    def _commit(self, commit: Commit) -> frozenset[str]:
        self.committed.extend(commit.tokens)
        self.kinds += commit.kinds
        self.finish = commit.finish
        return self.trie.advance(commit.tokens)

    def _count_step(self, plan: Plan, accepted: int, commit: Commit, step_ms: float | None) -> None:
        """`accepted` is what the target agreed with; the commit may end before."""
        counters = self.counters
        taken = {source: commit.kinds.count(letter) for source, letter in KIND_OF_SOURCE.items()}
        refused = plan.sources[accepted : accepted + commit.kinds.count("c")]
        self.counters = msgspec.structs.replace(
            counters,
            accepted=_added(counters.accepted, taken),
            verified=counters.verified + len(plan.tokens),
            verified_by=_added(counters.verified_by, Counter(plan.sources)),
            rejected=counters.rejected + len(refused),
            rejected_by=_added(counters.rejected_by, Counter(refused)),
            steps=counters.steps + 1,
            step_tokens=counters.step_tokens + 1 + len(plan.tokens),
            timed_steps=counters.timed_steps + (step_ms is not None),
            step_ms=round(counters.step_ms + (step_ms or 0.0), 3),
            filled=counters.filled + commit.kinds.count("f"),
            bonus=counters.bonus + commit.kinds.count("b"),
            corrected=counters.corrected + commit.kinds.count("c"),
        )

    def _end(self, finish: Finish, failure: Failure | None) -> Commit:
        if self.finish is None:
            self.finish = finish
            self.in_flight = None
        return Commit(at=self.tip, finish=self.finish, error=failure)  # type: ignore[arg-type]

    def _refeed(self) -> None:
        for token in self.committed[self.record.prompt_length :]:
            self._ends.feed(token)


@dataclass
class _Arrival:
    """The nodes of one chain, from `first` at `position` on, none of them seen before."""

    session: Session
    source: Source
    first: int
    position: int

    def take(self, parent: Node | None, tokens: Sequence[int], confidences: Sequence[float]) -> Offer:
        """`parent` None or committed: match against committed tokens first."""
        history = 0
        if parent is None or parent.committed:
            matched = self._match(tokens)
            if matched is None:
                return Offer(history=self._agreeing(tokens), stale=len(tokens) - self._agreeing(tokens))
            history, parent = matched, self.session.trie.root
        return replace(self._attach(parent, tokens[history:], confidences[history:], history), history=history)

    def _agreeing(self, tokens: Sequence[int]) -> int:
        known = self.session.committed[self.position : self.position + len(tokens)]
        return next((i for i, (a, b) in enumerate(zip(tokens, known, strict=False)) if a != b), len(known))

    def _match(self, tokens: Sequence[int]) -> int | None:
        """How many tokens are history already; None when one of them disagrees. Names those that agree."""
        agreeing = self._agreeing(tokens)
        for index in range(agreeing):
            self.session.trie.note_committed(self.source, self.first + index, self.position + index, tokens[index])
        known = max(0, min(len(tokens), self.session.tip - self.position))
        return agreeing if agreeing == known else None

    def _attach(self, parent: Node, tokens: Sequence[int], confidences: Sequence[float], offset: int) -> Offer:
        attached = duplicate = 0
        for index, (token, confidence) in enumerate(zip(tokens, confidences, strict=True)):
            if self.session.trie.held_by(self.source) >= self.session.bounds.held:
                return Offer(attached=attached, duplicate=duplicate, overflow=len(tokens) - index)
            parent, new = self.session.trie.attach(parent, self.source, self.first + offset + index, token, confidence)
            attached += 1
            duplicate += not new
        return Offer(attached=attached, duplicate=duplicate)


def _sum(a: Offer, b: Offer) -> Offer:
    return Offer(
        attached=a.attached + b.attached,
        history=a.history + b.history,
        duplicate=a.duplicate + b.duplicate,
        stale=a.stale + b.stale,
        overflow=a.overflow + b.overflow,
        gap=a.gap or b.gap,
    )


def _added(totals: Mapping[Source, int], more: Mapping[str, int]) -> dict[Source, int]:
    sums = {**totals}
    for source, count in more.items():
        if count:
            sums[source] = sums.get(source, 0) + count  # type: ignore[index,call-overload]
    return sums


def _own_kind(plan: Plan, accepted: int) -> str:
    if not plan.tokens:
        return "f"
    return "b" if accepted == len(plan.tokens) else "c"
