"""What paceline.theory expects of a cell, from quantities measured in it: to stand beside what was measured. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loadgen.figures import draft_ms
from loadgen.jobs import Run
from loadgen.pace import interpolated
from paceline import theory
from paceline.wire import Source, VerifierStatus

Runs = Mapping[str, Sequence[Run]]


@dataclass(frozen=True)
class Measured:
    """Beside the runs. hop_ms: from a block's arrival in the cloud to the start of the step that verifies it, where the
    verifier is idle; as much lies between two steps of a session that is alone. server_draft_ms: one token of the
    hosted drafter. sync_block: block length of the synchronous mode."""

    rtt_ms: float
    hop_ms: float = 0.0
    server_draft_ms: float | None = None
    sync_block: int | None = None


class Block(NamedTuple):
    """Means over the steps of a mode with blocks of a length of its own: drafts that came for one, and drafts verified
    in it. Both are below that length, since a block may be verified in two steps, or its end not at all."""

    drafted: float
    verified: float


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
    """Milliseconds per token by mode; a mode whose inputs were not measured is left out. Acceptance, block length, and
    the times of steps and drafts are those of the mode's own runs (with alternatives: acceptance and drafts of the mode
    without): of several sessions, a step holds the rows of all that were in it."""
    found: dict[str, float] = {}
    if (t_1 := _turn_ms(modes.get("cloud", ()), measured)) is not None:
        found["cloud"] = t_1
    if (colocated := _colocated(modes, measured)) is not None:
        found["colocated"] = colocated
    if (synchronous := _synchronous(modes.get("sync", ()), measured)) is not None:
        found["sync"] = synchronous
    found |= _deep(modes, measured)
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
    a, t_v, block, t_s = acceptance(runs), _turn_ms(runs, measured), block_of(runs, "hosted"), measured.server_draft_ms
    if a is None or t_v is None or block is None or t_s is None:
        return None
    return theory.colocated(a, block.verified, t_s * block.drafted / block.verified, t_v)


def _synchronous(runs: Sequence[Run], measured: Measured) -> float | None:
    """A block costs one round trip, however many steps it takes."""
    a, t_v, block, t_d = acceptance(runs), _turn_ms(runs, measured), block_of(runs, "edge"), draft_ms(runs)
    if a is None or t_v is None or block is None or t_d is None or measured.sync_block is None:
        return None
    away = measured.rtt_ms * min(1.0, block.drafted / measured.sync_block)
    return theory.synchronous(a, block.verified, t_d * block.drafted / block.verified, away, t_v)


def block_of(runs: Sequence[Run], source: Source) -> Block | None:
    """None where nothing of the source was verified."""
    steps = sum(run.counters.steps for run in runs)
    drafted = sum(run.counters.drafted.get(source, 0) for run in runs)
    verified = sum(run.counters.verified_by.get(source, 0) for run in runs)
    return Block(drafted / steps, verified / steps) if steps and verified else None


def _deep(modes: Runs, measured: Measured) -> dict[str, float]:
    """Without and with alternatives; what these bring is counted apart from the acceptance of the chain."""
    found, away = dict[str, float](), measured.rtt_ms
    a, t_d = acceptance(modes.get("deep", ())), draft_ms(modes.get("deep", ()))
    if a is None or t_d is None:
        return found
    if (t_v := _turn_ms(modes["deep"], measured)) is not None:
        found["deep"] = theory.deep(a, t_d, away, t_v)
    if (t_v := _turn_ms(modes.get("deep_alt", ()), measured)) is not None:
        held = held_beyond(modes["deep_alt"], away + t_d)  # hit x E(branch) is what was measured; E(0) is 1
        found["deep_alt"] = theory.deep_with_alternatives(a, t_d, away, t_v, hit=held, branch=0)
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
