"""Closed forms: expected accepted tokens, time per token of each scheme, break-even round trip, roofline. Pure.

Symbols: `a` acceptance per token (accepted / (accepted + first mismatches)), `t_d` the edge's time per drafted token,
`t_s` a server drafter's, `R` round trip, `t_v` verify step, `t_1` plain step, `g` block length. Times in any one unit.
Sources: Leviathan et al., "Fast inference from transformers via speculative decoding", arXiv 2211.17192 (E); the rest
is derived in docs/speculation.md, section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def expected_tokens(a: float, g: float) -> float:
    """E(g): tokens that a verified block of g drafts commits, the target's own included. 0 <= a <= 1, g >= 0. With
    g the mean of blocks of several lengths it is an upper bound."""
    if not 0.0 <= a <= 1.0:
        raise ValueError(f"acceptance {a} is not between 0 and 1")
    if g < 0:
        raise ValueError(f"a block of {g} tokens")
    return float(g + 1) if a == 1.0 else (1.0 - a ** (g + 1)) / (1.0 - a)


def colocated(a: float, g: float, t_s: float, t_v: float) -> float:
    """The server drafts for itself, then verifies: nothing overlaps, nothing travels."""
    return (g * t_s + t_v) / expected_tokens(a, g)


def synchronous(a: float, g: float, t_d: float, round_trip: float, t_v: float) -> float:
    """Draft, send, wait: every block pays drafting, the round trip and the step, one after the other."""
    return (g * t_d + round_trip + t_v) / expected_tokens(a, g)


def one_ahead(a: float, g: int, t_d: float, round_trip: float, t_v: float) -> float:
    """The next block is drafted while one is away: a full hit costs the longer of the two, a miss drafts anew."""
    cost = max(g * t_d, round_trip + t_v) + (1.0 - a**g) * g * t_d
    return cost / expected_tokens(a, g)


def deep(a: float, t_d: float, round_trip: float, t_v: float) -> float:
    """Any number of blocks in flight: drafting never waits, a mismatch costs one round trip and one step."""
    return t_d + (1.0 - a) * (round_trip + t_v)


def deep_with_alternatives(a: float, t_d: float, round_trip: float, t_v: float, *, hit: float, branch: int) -> float:
    """As `deep`; after a mismatch the server holds the right alternative with probability `hit` and goes on along its
    `branch` drafted tokens. `a` < 1."""
    if a == 1.0:
        return t_d
    run = 1.0 / (1.0 - a)
    return (t_d * run + round_trip + t_v) / (run + hit * expected_tokens(a, branch))


def filled(without_fill: float, t_1: float, best_colocated: float = math.inf) -> float:
    """Bubbles filled by plain steps or a server drafter: at most the best of what each does alone."""
    return min(without_fill, t_1, best_colocated)


def break_even_round_trip(a: float, g: int, t_d: float, t_v: float, t_1: float) -> float:
    """The round trip at which synchronous speculation is as fast as plain decoding; negative: it never is."""
    return t_1 * expected_tokens(a, g) - g * t_d - t_v


@dataclass(frozen=True)
class Roofline:
    """A step takes as long as the slower of reading the weights and doing the arithmetic.

    bytes_read: weights (and KV) read once a step; flops_per_token: about twice the parameters; bandwidth in bytes and
    peak in flops per second; overhead in seconds."""

    bytes_read: float
    flops_per_token: float
    bandwidth: float
    peak: float
    overhead: float = 0.0

    def step_s(self, tokens: int) -> float:
        return max(self.bytes_read / self.bandwidth, tokens * self.flops_per_token / self.peak) + self.overhead

    def saturating_tokens(self) -> float:
        """Tokens a step up to which a further one is free."""
        return self.bytes_read / self.bandwidth * self.peak / self.flops_per_token


def best_block(a: float, t_v: list[float]) -> int:
    """The chain length m that commits most per verifier time, E(m) / t_v[m]; t_v[m] is the step with m drafts."""
    return max(range(len(t_v)), key=lambda m: expected_tokens(a, m) / t_v[m])
