"""What one session's drafts are worth and when the next ones come, as learned from its past. Pure; seconds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.fill_rule import Arrivals, worth_of_filling, worth_of_joining
from paceline.lookup import Lookup
from paceline.session import OWN_SOURCE, Plan, Session
from paceline.step_curve import StepTimes
from paceline.trie import Node
from paceline.trust import SessionTrust

LOOKUP_TOKENS = 4096
"""Of a longer history only this much is looked through."""
SOON_S = 0.005
"""A block that is late by now is looked for again after this time."""

Proposal = tuple[tuple[int, ...], tuple[float, ...]]
"""Tokens, and for each what the trust in look-ups is asked with."""


class Forecast:
    """`main`: the source whose blocks the session waits for."""

    def __init__(self, trust: SessionTrust, main: str) -> None:
        self.trust = trust
        self.arrivals = Arrivals()
        self._main = main
        self._lookup: Lookup | None = None
        self._indexed = 0

    def chance(self, node: Node) -> float:
        """P(the node fits | its parent fits): of its sources the one that knows best is believed."""
        return max(self.trust.probability(source, stated) for source, stated in node.claims)

    def block_came(self, source: str, attached: int, now: float) -> None:
        if source == self._main:
            self.arrivals.on_block(now, attached)

    def decided(self, plan: Plan, accepted: int, refuted: Collection[str], now: float) -> None:
        """The target's answer to a plan: every node whose parent fitted was decided. refuted: see Commit."""
        for index, claims in enumerate(plan.claims[: accepted + 1]):
            for source, stated in claims:
                self.trust.learn(source, stated, index < accepted)
        self.arrivals.on_tip(now, rejected=self._main in refuted)

    def worth(self, now: float, times: StepTimes | None, context: int, price: float) -> tuple[float, float]:
        """Tokens that a step without drafts is worth at this moment, 0 to 1; and when to ask again, as long as that is
        nothing. price: of a verifier token."""
        wait_s = self.arrivals.next_in(now)
        worth = worth_of_filling(
            wait_s=wait_s,
            nodes=self.arrivals.nodes,
            acceptance=self.trust.acceptance(self._main),
            times=times,
            context=context,
            price=price,
        )
        return worth, now + max(wait_s or 0.0, SOON_S)

    def joining(self, price: float) -> float:
        """The same in a step that goes on anyway."""
        return worth_of_joining(acceptance=self.trust.acceptance(self._main), price=price)

    def proposal(self, session: Session, limit: int) -> Proposal:
        """What the session's own text suggests, at most `limit` tokens."""
        if self._lookup is None or self._indexed > session.tip:
            self._indexed = max(0, session.tip - LOOKUP_TOKENS)
            self._lookup = Lookup()
        self._lookup.append(session.committed[self._indexed :])
        self._indexed = session.tip
        tokens, match = self._lookup.propose(limit)
        return tuple(tokens), tuple(float(match + index) for index in range(len(tokens)))

    def chances(self, proposal: Proposal) -> tuple[float, ...]:
        return tuple(self.trust.probability(OWN_SOURCE, evidence) for evidence in proposal[1])

    def forget_text(self) -> None:
        """The committed tokens are not what was thought."""
        self._lookup = None

    def probes(self, chain: Sequence[Node], now: float) -> bool:
        """Is one node of a chain that no step takes to be verified all the same?"""
        return bool(chain) and self.trust.probe(chain[0].source, now)
