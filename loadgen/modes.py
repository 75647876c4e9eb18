"""The ways of decoding that a report compares: one code path, different speculation settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.wire import Speculation

SYNC_BLOCKS = (4, 6, 9)
"""Block lengths that `compare` tries for the synchronous baseline; the best one of each cell is reported."""


@dataclass(frozen=True)
class Mode:
    """`alone`: the draft model by itself, without a cloud; for information, its text is another one. `drafts`: the edge
    drafts. `g`: the block length of a baseline that has one."""

    name: str
    speculation: Speculation
    alone: bool = False
    drafts: bool = True
    g: int | None = None


def _bare(**fields: Any) -> Speculation:
    """Without what the cloud adds by itself, and without alternatives unless `fields` say so."""
    off: dict[str, Any] = {"fill": False, "alternatives": False, "lookup": False, "assist": False}
    return Speculation(**{**off, **fields})


CLOUD = Mode("cloud", Speculation(enabled=False), drafts=False)
DEEP = Mode("deep", _bare())
DEEP_ALT = Mode("deep_alt", _bare(alternatives=True))
PACELINE = Mode("paceline", Speculation())
EDGE = Mode("edge", Speculation(enabled=False), alone=True)


def sync(block: int) -> Mode:
    """Draft `block` tokens, send them, wait for the verdict: what the literature calls distributed speculation."""
    return Mode("sync", _bare(max_draft=block, depth=1), g=block)


def colocated(block: int) -> Mode:
    """The hosted drafter drafts `block` tokens beside the verifier, then they are verified; nothing from the edge."""
    return Mode("colocated", _bare(max_draft=block, depth=1, hosted=True), drafts=False, g=block)
