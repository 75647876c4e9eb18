"""Is a session without held drafts worth a plain step at once, or is its next block waited for? Pure.

A block that is about to come is waited for: verifying it commits more tokens in a step than a plain one. A block that
is far away is not: meanwhile plain steps go on, and the block is matched against what they decided. What lies between
has a worth between 0 and 1, which the choice of the batch (`paceline.batch_choice`) sets against what the step's time
earns for others.

A step that goes on anyway is another matter: who is not in it waits for its end, however soon the block comes, and the
time of a plain row is saved again, since the block then has one node less to be verified.
"""

from __future__ import annotations

import math

from paceline import theory
from paceline.step_curve import StepTimes

SMOOTHING = 0.2
"""Weight of a new sample in a moving average."""
LONGEST_SAMPLE = 3.0
"""A wait counts as at most this many times the average: a source that paused says nothing about its pace."""
OVERDUE = 3.0
"""After this many times the expected wait nothing is expected any more."""
MOST_NODES = 64
"""Longer blocks are worth no more."""


class Arrivals:
    """When a session's next useful block is expected from its main source. Times in seconds of one monotonic clock.

    While blocks stream in, one gap after the last one. After a rejection all that is on its way is stale: one learned
    return time, from the rejecting verdict to the first useful block. Nothing is expected before there is a sample, nor
    after a block of which nothing was live: the source is behind the tip, or off the text without knowing yet."""

    def __init__(self) -> None:
        self._nodes = _Average()
        self._gap = _Average()
        self._return = _Average()
        self._since: float | None = None
        """The last useful block, or the rejection after it, whatever came later."""
        self._rejected = False

    @property
    def nodes(self) -> float:
        """Nodes of a useful block, smoothed; 1 before the first."""
        return max(1.0, self._nodes.value or 1.0)

    def on_block(self, now: float, nodes: int) -> None:
        """A block came and `nodes` of it are live under the tip; 0: all of it is history or stale."""
        if nodes <= 0:
            if not self._rejected:
                self._since = None
            return
        self._nodes.note(float(nodes))
        if self._since is not None:
            (self._return if self._rejected else self._gap).note(max(0.0, now - self._since))
        self._since, self._rejected = now, False

    def on_tip(self, now: float, rejected: bool) -> None:
        """A verdict goes out; `rejected`: a held draft did not fit, so what is on its way is stale."""
        if rejected:
            self._since, self._rejected = now, True

    def next_in(self, now: float) -> float | None:
        """Seconds until the next useful block is expected; None: none is expected, or it is overdue. Beyond its time it
        is as far away as it is late, and never nearer than such waits usually vary."""
        usual = self._return if self._rejected else self._gap
        if self._since is None or usual.value is None:
            return None
        late = now - self._since - usual.value
        if late > (OVERDUE - 1.0) * usual.value + usual.spread:
            return None
        return max(-late, late, usual.spread)


class _Average:
    """Moving average, and moving average of the absolute deviation from it."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.spread = 0.0

    def note(self, sample: float) -> None:
        if self.value is None:
            self.value = sample
            return
        deviation = min(sample, LONGEST_SAMPLE * self.value + self.spread) - self.value
        self.value += SMOOTHING * deviation
        self.spread += SMOOTHING * (abs(deviation) - self.spread)


def worth_of_filling(
    *,
    wait_s: float | None,
    nodes: float,
    acceptance: float,
    times: StepTimes | None,
    context: int,
    price: float = 0.0,
) -> float:
    """Tokens that a plain step at once is worth, 0 (wait for the block) to 1 (nothing comes): 1 - the rate of waiting /
    the rate of filling, both in committed tokens per millisecond of this session.

    Waiting: the block comes and as much of it as pays is verified, E(m) tokens. Filling: one or more plain steps until
    the block is there, of which the tokens filled are taken off if they agree; or plain steps for ever.

    wait_s: until the block of `nodes` is expected, None: none is; acceptance: P(a draft fits), 0..1; context: KV tokens
    of the session; price: of a verifier token, so nodes that are reached less likely are not verified when they come;
    times None (nothing learned): 1."""
    if wait_s is None or times is None or not math.isfinite(wait_s):
        return 1.0
    wait = 1000.0 * max(0.0, wait_s)
    a = min(1.0, max(0.0, acceptance))
    most = min(MOST_NODES, max(1, round(nodes))) if math.isfinite(nodes) else 1
    blocks = _blocks(a, most, times, context, price)
    plain = times.at(1, context)
    held = len(blocks) - 1
    tokens, ms = blocks[held]
    if tokens <= 1.0:
        return 1.0  # nothing of the block would be verified
    waiting = tokens / (wait + ms)
    filling = 1.0 / plain
    for filled in range(1, min(held, 1 + math.ceil(wait / plain)) + 1):
        tokens, ms = blocks[held - filled]
        filling = max(filling, (filled + a**filled * tokens) / (max(wait, filled * plain) + ms))
    return min(1.0, max(0.0, 1.0 - waiting / filling))


def worth_of_joining(*, acceptance: float, price: float) -> float:
    """Tokens that a plain row is worth, 0 to 1, in a step that others need anyway; to be set against what the row and
    the session's context cost there.

    Now a plain row, and in the next step a block of m nodes with its first one decided: 1 + E(m - 1) tokens if the
    block agrees, else 2, which is E(m) + 1 - acceptance. The whole block in the next step alone: E(m). Both take m + 1
    rows. So the row is worth the tokens gained, and the `price` of the one that is saved; only the context is read once
    more."""
    return min(1.0, max(0.0, 1.0 - min(1.0, max(0.0, acceptance)) + price))


def _blocks(a: float, held: int, times: StepTimes, context: int, price: float) -> list[tuple[float, float]]:
    """For 0, 1, ... `held` nodes: (expected tokens, ms) of the step with as many of them as commit most per ms."""
    best: list[tuple[float, float]] = []
    for m in range(held + 1):
        block = (theory.expected_tokens(a, m), times.at(m + 1, context))
        pays = not best or (a**m >= price and block[0] * best[-1][1] > best[-1][0] * block[1])
        best.append(block if pays else best[-1])
    return best
