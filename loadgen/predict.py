"""What paceline.theory expects of a cell, from quantities measured in it: to stand beside what was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from loadgen.jobs import Run
from paceline import theory


def acceptance(runs: Sequence[Run]) -> float | None:
    """The theory's `a`: accepted / (accepted + first mismatches). None where nothing was verified."""
    accepted = sum(sum(run.counters.accepted.values()) for run in runs)
    rejected = sum(run.counters.rejected for run in runs)
    return accepted / (accepted + rejected) if accepted + rejected else None


def step_at(step_ms: Mapping[int, float], tokens: float) -> float | None:
    """The verifier's measured step curve (milliseconds by tokens fed), between its points linear."""
    if not step_ms:
        return None
    sizes = sorted(step_ms)
    return float(np.interp(tokens, sizes, [step_ms[size] for size in sizes]))


def predicted(
    modes: Mapping[str, Sequence[Run]], *, rtt_ms: float, block: int, draft_ms: float | None,
    step_ms: Mapping[int, float],
) -> dict[str, float]:  # fmt: skip
    """Milliseconds per token by mode; a mode whose inputs were not measured is left out."""
    t_1 = step_at(step_ms, 1)
    deep_runs = modes.get("deep", ())
    a = acceptance([*modes.get("sync", ()), *deep_runs])
    if t_1 is None:
        return {}
    found = {"cloud": t_1}
    if a is None or draft_ms is None:
        return found
    steps = sum(run.counters.steps for run in deep_runs)
    chain = sum(run.counters.step_tokens for run in deep_runs) / steps if steps else block + 1
    verify, short = step_at(step_ms, block + 1), step_at(step_ms, chain)
    assert verify is not None
    assert short is not None
    found["sync"] = theory.synchronous(a, block, draft_ms, rtt_ms, verify)
    found["deep"] = theory.deep(a, draft_ms, rtt_ms, short)
    found["paceline"] = theory.filled(found["deep"], t_1)
    return found
