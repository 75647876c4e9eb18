"""Which sessions go into the next verify step, and with how many tokens each. Pure.

Fair order: every tenant's first session comes before any tenant's second; within a tenant the one that was served
longest ago is first. Two budgets: `step_tokens` for decode items (one token each, and drafts beyond that), and
`chunk_tokens` of history for the whole step, so that a long prompt never delays others by more than one chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A session that may run. `missing`: history tokens that the verifier lacks. `decides`: a choice is wanted, not
    only the history fed. `draft`: nodes it could put to use. `served`: number of the step that it was in last."""

    session: str
    tenant: str
    served: int = 0
    missing: int = 0
    decides: bool = True
    draft: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """What a session gets in the step: `history` tokens are fed; then, if it `decides`, up to `draft` nodes."""

    session: str
    history: int
    draft: int
    decides: bool


@dataclass(frozen=True, slots=True)
class Chosen:
    """The step. `left_out`: candidates that it had no room for."""

    shares: tuple[Share, ...]
    left_out: int = 0


def fair_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Round-robin over tenants, least recently served first."""
    if len(candidates) < 2:
        return list(candidates)
    by_tenant: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in sorted(candidates, key=lambda item: (item.served, item.session)):
        by_tenant[candidate.tenant].append(candidate)
    recent = {tenant: max(item.served for item in items) for tenant, items in by_tenant.items()}
    ranked = [
        (rank, recent[tenant], tenant, item) for tenant, items in by_tenant.items() for rank, item in enumerate(items)
    ]
    ranked.sort(key=lambda entry: entry[:3])
    return [item for *_, item in ranked]


def choose(candidates: Sequence[Candidate], *, step_tokens: int, chunk_tokens: int) -> Chosen:
    """The next step for one verifier, in fair order. At least one candidate always gets in."""
    ordered = fair_order(candidates)
    chosen: list[tuple[Candidate, int, bool]] = []
    steps, chunk = max(1, step_tokens), max(1, chunk_tokens)
    for candidate in ordered:
        history = min(candidate.missing, chunk)
        decides = candidate.decides and history == candidate.missing and steps > 0
        if not decides and not history:
            continue
        chunk -= history
        steps -= decides
        chosen.append((candidate, history, decides))
    drafts = _spread([item.draft if decides else 0 for item, _, decides in chosen], steps)
    shares = tuple(
        Share(item.session, history, draft, decides)
        for (item, history, decides), draft in zip(chosen, drafts, strict=True)
    )
    return Chosen(shares, left_out=len(ordered) - len(shares))


def _spread(wanted: Sequence[int], budget: int) -> list[int]:
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
