"""What paceline.theory expects of a cell, from quantities measured in it: to stand beside what was measured. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadgen.jobs import Run
from loadgen.pace import interpolated
from paceline import theory
from paceline.wire import VerifierStatus

Runs = Mapping[str, Sequence[Run]]


@dataclass(frozen=True)
class Measured:
    """hop_ms: from a block's arrival in the cloud to the start of the step that verifies it, where the verifier is
    idle; as much lies between two steps of a session that is alone. draft_ms, server_draft_ms: one drafted token at the
    edge, and of the hosted drafter. sync_block, colocated_block: block lengths of these modes."""

    rtt_ms: float
    hop_ms: float = 0.0
    draft_ms: float | None = None
    server_draft_ms: float | None = None
    sync_block: int | None = None
    colocated_block: int | None = None


def acceptance(runs: Sequence[Run]) -> float | None:
    """The theory's `a`: accepted / (accepted + first mismatches). None where nothing was verified."""
    accepted = sum(sum(run.counters.accepted.values()) for run in runs)
    rejected = sum(run.counters.rejected for run in runs)
    return accepted / (accepted + rejected) if accepted + rejected else None


def step_at(step_ms: Mapping[int, float], tokens: float) -> float | None:
    """The verifier's step curve (milliseconds by tokens fed): linear between its points, its last slope beyond."""
    return interpolated(step_ms, tokens) if step_ms else None


def step_curve(status: VerifierStatus, context: float) -> dict[int, float]:
    """The learned curve at that many tokens of KV; before one was learned, the smoothed times by exact size."""
    if status.curve is None:
        return dict(status.step_ms)
    curve = status.curve
    return {n: ms + curve.context_ms * context for n, ms in zip(curve.tokens, curve.ms, strict=True)}


def predicted(modes: Runs, measured: Measured) -> dict[str, float]:
    """Milliseconds per token by mode; a mode whose inputs were not measured is left out. A mode's step time is the mean
    of its own steps, so that of several sessions it holds the rows of all that were in it."""
    found: dict[str, float] = {}
    if (t_1 := _turn_ms(modes.get("cloud", ()), measured)) is not None:
        found["cloud"] = t_1
    if (colocated := _colocated(modes, measured)) is not None:
        found["colocated"] = colocated
    a = acceptance([*modes.get("sync", ()), *modes.get("deep", ())])
    if a is not None and measured.draft_ms is not None:
        found |= _distributed(modes, measured, a, measured.draft_ms)
    best = min(found.get("deep_alt", math.inf), found.get("deep", math.inf))
    if best < math.inf and t_1 is not None:
        found["paceline"] = theory.filled(best, t_1, found.get("colocated", math.inf))
    return found


def step_ms(runs: Sequence[Run]) -> float | None:
    """Mean time of a verify step of these runs, those that read a prompt left out."""
    steps = sum(run.counters.timed_steps for run in runs)
    return sum(run.counters.step_ms for run in runs) / steps if steps else None


def _turn_ms(runs: Sequence[Run], measured: Measured) -> float | None:
    """A verify step and the way to it."""
    return None if (t_v := step_ms(runs)) is None else t_v + measured.hop_ms


def _colocated(modes: Runs, measured: Measured) -> float | None:
    """Drafter and verifier share a core, so all sessions draft, then all are verified."""
    runs = modes.get("colocated", ())
    a, t_v, g, t_s = acceptance(runs), _turn_ms(runs, measured), measured.colocated_block, measured.server_draft_ms
    if a is None or t_v is None or g is None or t_s is None:
        return None
    return theory.colocated(a, g, t_s, t_v)


def _distributed(modes: Runs, measured: Measured, a: float, t_d: float) -> dict[str, float]:
    found, away = dict[str, float](), measured.rtt_ms
    t_v = {name: _turn_ms(modes.get(name, ()), measured) for name in ("sync", "deep", "deep_alt")}
    if measured.sync_block is not None and t_v["sync"] is not None:
        found["sync"] = theory.synchronous(a, measured.sync_block, t_d, away, t_v["sync"])
    if t_v["deep"] is not None:
        found["deep"] = theory.deep(a, t_d, away, t_v["deep"])
    if t_v["deep_alt"] is not None:  # hit x E(branch) is what was measured; E(0) is 1
        held = held_beyond(modes["deep_alt"], away + t_d)
        found["deep_alt"] = theory.deep_with_alternatives(a, t_d, away, t_v["deep_alt"], hit=held, branch=0)
    return found


def held_beyond(runs: Sequence[Run], window_ms: float) -> float:
    """Tokens that alternatives bring after a mismatch, on average: those committed within `window_ms` of it, sooner
    than anything drafted after the verdict can be there. 0 without a mismatch."""
    mismatches = tokens = 0
    for run in runs:
        at, closes = 0, -math.inf
        for came, count in run.chunks:
            kinds, at = run.kinds[at : at + count], at + count
            if came <= closes:
                tokens += count
            elif "c" in kinds:
                mismatches += 1
                closes = came + window_ms
    return tokens / mismatches if mismatches else 0.0
