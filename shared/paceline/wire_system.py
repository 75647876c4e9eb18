"""The services about themselves: status, policy, placement, drain. Belongs to paceline.wire."""

from __future__ import annotations

from typing import Literal

from paceline.wire_parts import Count, Message, Name, Part, Position, SessionId


class StepTable(Part, frozen=True, kw_only=True):
    """Learned step time of one verifier: `ms` of a step that feeds `tokens` (same length, growing) without context, and
    `context_ms` more for each token of KV that its sessions hold. samples: steps that it was learned from."""

    tokens: tuple[int, ...]
    ms: tuple[float, ...]
    context_ms: float = 0.0
    samples: int = 0


class VerifierStatus(Message, frozen=True, kw_only=True, tag="verifier_status"):
    """1 Hz, and at once on a change of state."""

    verifier: Name
    model: Name
    fingerprint: str
    engine: str
    simulated: bool
    state: Literal["loading", "ready", "draining", "sleeping", "stopped", "failed"]
    context: int
    cells_total: int
    cells_used: int
    sessions: int
    busy: float
    """Share of the last second spent in steps, 0..1."""
    queue: int
    steps: int
    step_tokens: int
    step_ms: dict[int, float] = {}
    curve: StepTable | None = None
    """None before anything was learned."""
    can_sleep: bool = False
    """Whether it can give its device's memory up and take it back (SleepRequest)."""
    t_sent: float = 0.0
    detail: str = ""
    silent_s: float = 0.0
    """Set by the policy in a SystemReport: seconds since t_sent, when no newer status came in time; 0: it is fresh."""


class BatcherStatus(Message, frozen=True, kw_only=True, tag="batcher_status"):
    batcher: Name
    model: Name
    sessions: int
    parked: int
    waiting: int
    """Runnable sessions that were not in the last step."""
    partitions: int
    committed: int
    drafted: int
    accepted: int
    filled: int
    stale: int
    placements: dict[str, int] = {}
    """Sessions by verifier."""
    overhead_ms_p50: float = 0.0
    """Draft block received by the gateway to verify step started, when the verifier was idle."""
    t_sent: float = 0.0
    silent_s: float = 0.0
    """As in VerifierStatus."""


class DrafterStatus(Message, frozen=True, kw_only=True, tag="drafter_status"):
    drafter: Name
    model: Name
    engine: str
    simulated: bool
    sessions: int
    drafted: int
    state: Literal["loading", "ready", "failed"]
    draft_ms: float = 0.0
    """One drafted token, smoothed; 0 before the first."""
    t_sent: float = 0.0
    detail: str = ""
    silent_s: float = 0.0
    """As in VerifierStatus."""


class PolicyDecision(Message, frozen=True, kw_only=True, tag="policy"):
    """What the batchers obey until the next one; `version` grows. reasons: one line for people each."""

    model: Name
    version: Count
    fill: bool
    window_cap: int
    admit: tuple[str, ...]
    """Verifiers that take new sessions, best first; empty: any ready one."""
    reasons: tuple[str, ...] = ()
    t_sent: float = 0.0


class DrainRequest(Message, frozen=True, kw_only=True, tag="drain"):
    """Move all sessions off `verifier` (undo=False), or let it take sessions again. sleep: once it is empty, let it
    sleep; undo wakes it."""

    verifier: Name
    undo: bool = False
    sleep: bool = False


class DrainReport(Message, frozen=True, kw_only=True, tag="drained"):
    verifier: Name
    moved: int
    remaining: int
    seconds: float
    asleep: bool = False


class StatusWanted(Message, frozen=True, kw_only=True, tag="status_wanted"):
    """To all verifiers of a model: somebody is new here; tell your status now, not within the second."""


class SleepRequest(Message, frozen=True, kw_only=True, tag="sleep"):
    """To a verifier that drains: give the device's memory up, or take it back (wake) and go on draining."""

    wake: bool = False


class PlacementQuery(Message, frozen=True, kw_only=True, tag="placement_query"):
    """To every batcher of a model: which of your sessions sit on `verifier`?"""

    verifier: Name


class PlacementList(Message, frozen=True, kw_only=True, tag="placements"):
    batcher: Name
    sessions: tuple[SessionId, ...]


class SessionMove(Message, frozen=True, kw_only=True, tag="move"):
    """To the session's batcher: from the next step on use `verifier`, which was warmed up to `warmed` tokens."""

    session: SessionId
    verifier: Name
    warmed: Position = 0


class SystemQuery(Message, frozen=True, kw_only=True, tag="system_query"):
    """To the policy: what do you see?"""


class SystemReport(Message, frozen=True, kw_only=True, tag="system"):
    verifiers: tuple[VerifierStatus, ...]
    batchers: tuple[BatcherStatus, ...]
    drafters: tuple[DrafterStatus, ...]
    decisions: tuple[PolicyDecision, ...]
