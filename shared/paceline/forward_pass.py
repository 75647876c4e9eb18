"""One step of a batch: cut it into passes that memory can take, run them, let each job decide on its logits.

Runs on the engine's worker. It knows no sessions and no room; paceline.engine_batch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.engine import TargetItem
from paceline.errors import EngineError
from paceline.kv_ledger import MemoryOp, Remove

Logits = NDArray[np.float32]
LogitsAt = Callable[[int], Logits]
"""Raw logits after the committed path and the first j draft tokens."""


class Row(NamedTuple):
    """One token of a pass: its id, position, sequence, and whether its logits are wanted."""

    token: int
    position: int
    sequence: int
    logits: bool


class Model(Protocol):
    """A loaded model. vocabulary: ids that it has logits for."""

    vocabulary: int

    def close(self) -> None: ...


class Memory(Model, Protocol):
    """A model with its KV. batch: most rows of one pass; outputs: most rows of one pass that want logits."""

    batch: int
    outputs: int

    def decode(self, rows: Sequence[Row]) -> None:
        """Raises EngineError; what of these rows stays in memory is unknown then."""
        ...

    def logits(self, index: int, prompt_length: int) -> Logits:
        """Of row `index` of the last pass; valid until the next. prompt_length is for scripted models."""
        ...

    def remove(self, sequence: int, start: int) -> None: ...

    def share(self, source: int, target: int, start: int, end: int) -> None: ...


class Kept(NamedTuple):
    """What a decision leaves: an outcome for the caller, accepted draft tokens, and the token chosen after them."""

    outcome: object
    accepted: int
    token: int | None


Decide = Callable[[LogitsAt], Kept]


@dataclass(frozen=True)
class Feed:
    """Feed path[start:] into `sequence`. With `decide`, the logits of path[at - 1:] are wanted (start < at).

    tenant: whose KV it is. asked: the item that `decide` serves, for a model that chooses by itself."""

    sequence: int
    path: Sequence[int]
    start: int
    at: int
    decide: Decide | None
    prompt_length: int = 0
    tenant: str = ""
    asked: TargetItem | None = None


Result = Kept | EngineError | None
"""Of one feed: None when it only fed, EngineError when its pass failed."""


class Segment(NamedTuple):
    """Positions [start, end) of one feed, to go into one pass; a deciding segment holds all its wanted logits."""

    feed: int
    start: int
    end: int
    decides: bool


def forward(memory: Memory, ops: Sequence[MemoryOp], feeds: Sequence[Feed]) -> list[Result]:
    """Results in the order of `feeds`."""
    for op in ops:
        apply(memory, op)
    results: list[Result] = [None] * len(feeds)
    for segments in passes(feeds, memory.batch, memory.outputs):
        alive = [segment for segment in segments if not isinstance(results[segment.feed], EngineError)]
        if alive:
            _run_pass(memory, feeds, alive, results)
    return results


def apply(memory: Memory, op: MemoryOp) -> None:
    if isinstance(op, Remove):
        memory.remove(op.sequence, op.start)
    else:
        memory.share(op.source, op.target, op.start, op.end)


def _run_pass(memory: Memory, feeds: Sequence[Feed], segments: Sequence[Segment], results: list[Result]) -> None:
    rows: list[Row] = []
    first: list[int] = []
    for segment in segments:
        first.append(len(rows))
        feed = feeds[segment.feed]
        rows += [Row(feed.path[p], p, feed.sequence, segment.decides) for p in range(segment.start, segment.end)]
    try:
        memory.decode(rows)
    except EngineError as error:
        for segment in segments:
            results[segment.feed] = error
        return
    for segment, row in zip(segments, first, strict=True):
        if segment.decides:
            results[segment.feed] = _decided(memory, feeds[segment.feed], row)


def _decided(memory: Memory, feed: Feed, row: int) -> Kept:
    """A decision that cannot be made is the session's fault, not the pass's: its outcome is the error."""
    assert feed.decide is not None
    try:
        return feed.decide(lambda j: memory.logits(row + j, feed.prompt_length))
    except EngineError as error:
        return Kept(error, 0, None)


def passes(feeds: Sequence[Feed], batch: int, outputs: int) -> Iterator[list[Segment]]:
    """Of at most `batch` rows, `outputs` of them with logits. In order and greedily; only a deciding segment is never
    split."""
    taken: list[Segment] = []
    rows = wanted = 0
    for segment in _segments(feeds, batch):
        size = segment.end - segment.start
        if rows + size > batch or (segment.decides and wanted + size > outputs):
            yield taken
            taken, rows, wanted = [], 0, 0
        taken.append(segment)
        rows += size
        wanted += size if segment.decides else 0
    if taken:
        yield taken


def _segments(feeds: Sequence[Feed], batch: int) -> Iterator[Segment]:
    for index, feed in enumerate(feeds):
        fed_end = len(feed.path) if feed.decide is None else feed.at - 1
        for start in range(feed.start, fed_end, batch):
            yield Segment(index, start, min(start + batch, fed_end), False)
        if feed.decide is not None:
            yield Segment(index, fed_end, len(feed.path), True)
