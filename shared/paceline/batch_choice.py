"""Which sessions go into the next verify step, and with how many tokens each. Pure.

Fair order: every tenant's first session comes before any tenant's second; within a tenant the one that was served
longest ago is first. Two budgets: `step_tokens` for decode rows (one token each, and drafts beyond that), and
`chunk_tokens` of history for the whole step, so that a long prompt never delays others by more than one chunk.

Rows beyond the deciding ones have to earn their time. A held draft earns its survival, the product of P(fits) along its
chain; a plain step for a session that could also wait earns what it is worth. Sorted by that, the first n of them join
for which the expected committed tokens per millisecond of the step are highest. All n are tried, since step times are
not convex: where the next row is dear the one after it may be cheap.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.step_curve import StepTimes

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Want:
    """A session that may run. `served`: number of the step that it was in last. `missing`: history tokens that the
    verifier lacks. `decides`: a choice is wanted, not only the history fed. `chain`: P(node fits | its parent fits)
    along the best held chain. `context`: KV tokens of the session. `worth`: tokens that deciding at once is worth (see
    `paceline.fill_rule`), and each token of a chain beside it in proportion; 1 for sessions with held drafts, 0: no
    step is begun for this. `joining`: the same in a step that goes on anyway, where that is more. `must`: in, however
    little that earns."""

    session: str
    tenant: str
    served: int = 0
    missing: int = 0
    decides: bool = True
    chain: tuple[float, ...] = ()
    context: int = 0
    worth: float = 1.0
    joining: float = 0.0
    must: bool = False

    @property
    def firm(self) -> bool:
        """There is a step for this, whoever else is in it."""
        return bool(self.missing) or self.must or self.worth >= 1.0

    @property
    def begins(self) -> bool:
        """A step is begun for this where there is nobody else; the others only join one."""
        return self.firm or self.worth > 0.0


@dataclass(frozen=True, slots=True)
class Share:
    """What a session gets in the step: `history` tokens are fed; then, if it `decides`, the first `draft` nodes of its
    chain."""

    session: str
    history: int
    draft: int
    decides: bool


@dataclass(frozen=True, slots=True)
class Chosen:
    """The step. `left_out`: wants that are not in it, though they may not want one of their own. `price`: expected
    committed tokens that the time of one more verifier token would earn elsewhere, 0..1; it says nothing of a step
    in which nobody decides. `rate`: expected committed tokens per ms, the time for feeding history not counted:
    that has to be spent in any case. `predicted_ms`: of the whole step. Without learned times price and rate are 0
    and `predicted_ms` is None."""

    shares: tuple[Share, ...]
    left_out: int = 0
    price: float = 0.0
    rate: float = 0.0
    predicted_ms: float | None = None


def fair_order(wants: Sequence[Want]) -> list[Want]:
    """Round-robin over tenants, least recently served first."""
    if len(wants) < 2:
        return list(wants)
    by_tenant: dict[str, list[Want]] = defaultdict(list)
    for want in sorted(wants, key=lambda item: (item.served, item.session)):
        by_tenant[want.tenant].append(want)
    recent = {tenant: max(item.served for item in items) for tenant, items in by_tenant.items()}
    ranked = [
        (rank, recent[tenant], tenant, item) for tenant, items in by_tenant.items() for rank, item in enumerate(items)
    ]
    ranked.sort(key=lambda entry: entry[:3])
    return [item for *_, item in ranked]


def choose(
    wants: Sequence[Want],
    *,
    times: StepTimes | None,
    step_tokens: int,
    chunk_tokens: int,
    going_rate: float | None = None,
) -> Chosen:
    """The next step for one verifier. At least one want gets in, unless all of them are worth nothing by themselves.

    going_rate: tokens per ms that the verifier's time earns as a whole (going_rate.GoingRate). Where that is less than
    what the best step earns, there are bubbles that nothing fills, and a row may take time that is worth no more. While
    history is left to be fed there are none: time spent on drafts keeps those who wait for it from decoding, so it is
    worth at least what plain decoding of all would earn.

    Deciding rows come first, one each, in fair order. A want that is worth less than 1 and is no `must` joins if its
    worth is at least what its time would earn for the others; where no other is in, the one that is worth most is."""
    ordered = fair_order(_as_things_are(wants))
    base = _Base(ordered, max(1, step_tokens), max(1, chunk_tokens))
    extra = _Extra(ordered, base)
    earned = _Earnings(base, extra, times)
    most = min(base.room, len(extra.values))
    if times is None:
        wanted = len(extra.values)
        best = min(wanted, most)
    else:
        gains = earned.gains(going_rate)
        wanted = int(np.argmax(gains))
        best = int(np.argmax(gains[: most + 1]))
    if not best and not base.shares and most:
        best = wanted = 1
    binding = wanted > most and best == most
    taken = _share_out(ordered, extra, wanted, most) if binding else np.arange(best)
    shares = base.with_extra(extra, taken)
    refused = 1.0 if base.crowded else _best_beside(extra, taken) if binding else 0.0
    return Chosen(
        shares,
        left_out=len(wants) - len(shares),
        price=earned.price(best, refused),
        rate=earned.rate(best),
        predicted_ms=earned.predicted_ms(best),
    )


def _as_things_are(wants: Sequence[Want]) -> list[Want]:
    """Where somebody begins a step joining it counts for the others; where nobody does, none is left. A step that goes
    on for no one firmly is that of whom it is worth most to."""
    begun = [want for want in wants if want.begins]
    if not begun:
        return []
    first = None if any(want.firm for want in begun) else max(begun, key=lambda want: want.worth)
    return [replace(want, must=True) if want is first else _joining(want) for want in wants]


def _joining(want: Want) -> Want:
    return replace(want, worth=want.joining) if want.joining > want.worth else want


class _Base:
    """What is in the step before anything has to earn its place. Wants are named by their place in the fair order."""

    def __init__(self, ordered: Sequence[Want], steps: int, chunk: int) -> None:
        self.shares: dict[int, tuple[int, bool]] = {}
        """history, decides"""
        self.ready: list[int] = []
        """Would decide if that earns enough; their history is complete, or fed in this step."""
        self.crowded = False
        """Somebody who would decide has no row."""
        self.behind = False
        """Somebody's history is not complete after this step."""
        self.history = self.rows = self.context = 0
        for place, want in enumerate(ordered):
            history = min(want.missing, chunk)
            self.behind |= history < want.missing
            able = want.decides and history == want.missing
            optional = able and want.worth < 1.0 and not want.must
            decides = able and not optional and self.rows < steps
            self.crowded |= able and not optional and not decides
            if optional:
                self.ready.append(place)
            if not decides and not history:
                continue
            chunk -= history
            self.rows += decides
            self.history += history
            self.context += want.context
            self.shares[place] = (history, decides)
        self.room = steps - self.rows

    def with_extra(self, extra: _Extra, taken: Integers) -> tuple[Share, ...]:
        """The shares in fair order, with those of the extra rows that were `taken`."""
        counts = np.bincount(extra.owners[taken], minlength=len(extra.names)).tolist()
        late = {place for place in self.ready if counts[place]}
        shares = []
        for place in sorted(late | self.shares.keys()):
            history, decides = self.shares.get(place, (0, False))
            draft = counts[place] - (place in late)
            shares.append(Share(extra.names[place], history, draft, decides or place in late))
        return tuple(shares)


class _Extra:
    """The rows that have to earn their place, best first; of equal ones those nearer to their tip first, then in fair
    order. A row never comes before one that it builds on. `values`: what they earn; `tokens`: expected committed
    tokens, 1 of a plain step; `owners`: places in the fair order; `context`: KV tokens brought into the step."""

    def __init__(self, ordered: Sequence[Want], base: _Base) -> None:
        self.names = [want.session for want in ordered]
        optional = set(base.ready)
        able = [place for place in range(len(ordered)) if place in optional or base.shares.get(place, (0, False))[1]]
        chains = [ordered[place].chain for place in able]
        late = np.array([place in optional for place in able], dtype=np.bool_)
        lengths = np.array([len(chain) for chain in chains], dtype=np.int64)
        levels = np.arange(1 + max(map(len, chains), default=0))
        there = levels <= lengths[:, None]
        value: Floats = np.ones(there.shape)
        value[late, 0] = [ordered[place].worth for place in base.ready]
        there[:, 0] = False
        value[there] = np.fromiter(itertools.chain.from_iterable(chains), dtype=np.float64, count=int(lengths.sum()))
        there[:, 0] = late
        value = np.cumprod(np.clip(np.nan_to_num(value), 0.0, 1.0), axis=1, dtype=np.float64)
        brought = [0 if place in base.shares else ordered[place].context for place in able]

        values = value[there]
        depths = np.broadcast_to(levels, there.shape)[there]
        order = np.lexsort((depths, -values))
        places = np.broadcast_to(np.array(able, dtype=np.int64)[:, None], there.shape)[there]
        context = np.broadcast_to(np.array(brought, dtype=np.float64)[:, None], there.shape)[there]
        plain = depths[order] == 0
        self.values: Floats = values[order]
        self.tokens: Floats = np.where(plain, 1.0, self.values)
        self.owners: Integers = places[order]
        self.context: Floats = np.where(plain, context[order], 0.0)


class _Earnings:
    """What the step earns with the first n extra rows, for every n. `rates`: by their values, per ms."""

    def __init__(self, base: _Base, extra: _Extra, times: StepTimes | None) -> None:
        self.rates: Floats = np.zeros(1)
        self._base, self._times = base, times
        self._least = 0.0
        self._context = base.context + _sums(extra.context)
        if times is None:
            return
        if base.behind:
            wants = len(extra.names)
            self._least = wants / times.at(wants, base.context)
        n = np.arange(len(extra.values) + 1)
        sunk = times.at(base.rows + base.history) - times.at(base.rows) if base.history else 0.0
        spent = times.over((base.rows + base.history + n).astype(np.float64), self._context) - sunk
        self._spent, self._values = spent, base.rows + _sums(extra.values)
        self.rates = self._values / spent
        self._tokens: Floats = (base.rows + _sums(extra.tokens)) / spent

    def gains(self, going_rate: float | None) -> Floats:
        """Tokens by values beyond what the time would earn at the going rate, or at that of the best step."""
        best = float(self.rates.max())
        rate = best if going_rate is None else min(best, going_rate)
        return self._values - max(rate, self._least) * self._spent

    def rate(self, n: int) -> float:
        return float(self._tokens[n]) if self._times else 0.0

    def predicted_ms(self, n: int) -> float | None:
        return self._times.at(self._rows(n), float(self._context[n])) if self._times else None

    def price(self, n: int, refused: float) -> float:
        """refused: what the best row would have earned that there was no room for."""
        if self._times is None:
            return 0.0
        marginal = self._times.at(self._rows(n) + 1) - self._times.at(self._rows(n))
        return min(1.0, max(self.rate(n) * marginal, self._least * marginal, refused))

    def _rows(self, n: int) -> int:
        return self._base.rows + self._base.history + n


def _sums(values: Floats) -> Floats:
    """Of the first n, for n = 0, 1, ..."""
    return np.concatenate(([0.0], np.cumsum(values)))


def _share_out(ordered: Sequence[Want], extra: _Extra, wanted: int, budget: int) -> Integers:
    """Which of the first `wanted` extra rows get the `budget`: max-min fair over tenants, each tenant's best first."""
    tenants = {name: number for number, name in enumerate(dict.fromkeys(want.tenant for want in ordered))}
    of_want = np.array([tenants[want.tenant] for want in ordered], dtype=np.int64)
    of_row = of_want[extra.owners[:wanted]]
    given = spread(np.bincount(of_row, minlength=len(tenants)).tolist(), budget)
    picked = [np.flatnonzero(of_row == tenant)[:share] for tenant, share in enumerate(given) if share]
    return np.sort(np.concatenate(picked)) if picked else np.arange(0)


def _best_beside(extra: _Extra, taken: Integers) -> float:
    """The best value among the rows that were not taken; `taken` grows."""
    gaps = np.flatnonzero(taken != np.arange(len(taken)))
    return float(extra.values[gaps[0] if len(gaps) else len(taken)])


def spread(wanted: Sequence[int], budget: int) -> list[int]:
    """Give each what it wants, level by level, until the budget is spent; who comes first gets the odd ones."""
    if sum(wanted) <= budget:
        return list(wanted)
    given = [0] * len(wanted)
    while budget > 0:
        hungry = [index for index, want in enumerate(wanted) if given[index] < want]
        if not hungry:
            break
        level = max(1, budget // len(hungry))
        for index in hungry[:budget]:
            part = min(level, wanted[index] - given[index], budget)
            given[index] += part
            budget -= part
    return given
