"""The ways of decoding that a report compares: one code path, different speculation settings."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.wire import Speculation

SYNC_BLOCKS = (4, 6, 9)
"""Block lengths tried for the synchronous baseline; the best one of each cell is reported."""


@dataclass(frozen=True)
class Mode:
    """`alone`: the draft model by itself, without a cloud; for information, its text is another one."""

    name: str
    speculation: Speculation
    alone: bool = False


CLOUD = Mode("cloud", Speculation(enabled=False))
DEEP = Mode("deep", Speculation(fill=False))
PACELINE = Mode("paceline", Speculation())
EDGE = Mode("edge", Speculation(enabled=False), alone=True)


def sync(block: int) -> Mode:
    """Draft `block` tokens, send them, wait for the verdict: what the literature calls distributed speculation."""
    return Mode("sync", Speculation(max_draft=block, depth=1, fill=False))
