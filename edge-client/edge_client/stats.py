"""Figures of one session. Pure. Latencies count tokens, not chunks.

Inter-token latency is (last token - first token) / (tokens - 1): a verdict that brings four tokens is four tokens, not
one. The gap between verdicts is a figure of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.drafting import DraftStats
from paceline.wire import Counters


@dataclass(frozen=True)
class Stats:
    """ttft_ms from the request to its first token; itl_ms per token after the first. bytes_up: draft frames after
    deflate, WebSocket framing included; bytes_down: verdict frames that commit two tokens or more, which commit
    tokens_down tokens. counters: the cloud's as last told. drafting: what the draft loop says of itself (None: nothing
    was drafted here). Figures that cannot be told are None."""

    prompt_tokens: int
    completion_tokens: int
    kinds: dict[str, int]
    counters: Counters
    ttft_ms: float | None = None
    itl_ms: float | None = None
    tokens_per_s: float | None = None
    chunk_gap_ms: float | None = None
    chunks: int = 0
    seconds: float = 0.0
    bytes_up: int = 0
    nodes_up: int = 0
    blocks_up: int = 0
    bytes_down: int = 0
    tokens_down: int = 0
    cuts: int = 0
    refused_blocks: int = 0
    unsent_blocks: int = 0
    link_round_trip_ms: float | None = None
    draft_ms: float | None = None
    window: int | None = None
    drafting_failed: bool = False
    drafting: DraftStats | None = None

    @property
    def drafted(self) -> int:
        return sum(self.counters.drafted.values())

    @property
    def accepted(self) -> int:
        return sum(self.counters.accepted.values())

    @property
    def verified(self) -> int:
        return self.counters.verified

    @property
    def by_source(self) -> dict[str, dict[str, int]]:
        """Drafted and accepted tokens of each source, in the shape of the gateway's `usage.speculation`."""
        drafted, accepted = self.counters.drafted, self.counters.accepted
        sources = sorted({*drafted, *accepted})
        return {name: {"drafted": drafted.get(name, 0), "accepted": accepted.get(name, 0)} for name in sources}

    @property
    def acceptance(self) -> float | None:
        """accepted / verified (docs/protocol.md)."""
        return self.accepted / self.counters.verified if self.counters.verified else None

    @property
    def steps_per_token(self) -> float | None:
        return self.counters.steps / self.completion_tokens if self.completion_tokens else None

    @property
    def bytes_up_per_drafted_token(self) -> float | None:
        return self.bytes_up / self.nodes_up if self.nodes_up else None

    @property
    def bytes_down_per_committed_token(self) -> float | None:
        return self.bytes_down / self.tokens_down if self.tokens_down else None


@dataclass
class Tally:
    """Counts while the session runs; `stats` gives the figures. Times are time.monotonic() seconds."""

    prompt_tokens: int
    started: float
    kinds: dict[str, int] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    chunks: int = 0
    bytes_up: int = 0
    nodes_up: int = 0
    blocks_up: int = 0
    bytes_down: int = 0
    tokens_down: int = 0
    cuts: int = 0
    refused_blocks: int = 0
    unsent_blocks: int = 0
    drafting_failed: bool = False

    def committed(self, tokens: int, kinds: str, t: float) -> None:
        if not tokens:
            return
        self.first = t if self.first is None else self.first
        self.last = t
        self.chunks += 1
        self.tokens += tokens
        for kind in kinds:
            self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def verdict_frame(self, size: int, tokens: int) -> None:
        if tokens >= 2:
            self.bytes_down += size
            self.tokens_down += tokens

    def block_sent(self, size: int, nodes: int) -> None:
        self.bytes_up += size
        self.nodes_up += nodes
        self.blocks_up += 1

    def stats(
        self, now: float, *, link_round_trip_ms: float | None = None, drafting: DraftStats | None = None
    ) -> Stats:
        spread = 0.0 if self.first is None or self.last is None else self.last - self.first
        later = self.tokens - 1
        return Stats(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.tokens,
            kinds=dict(self.kinds),
            counters=self.counters,
            ttft_ms=None if self.first is None else (self.first - self.started) * 1e3,
            itl_ms=spread * 1e3 / later if later > 0 else None,
            tokens_per_s=later / spread if later > 0 and spread > 0 else None,
            chunk_gap_ms=spread * 1e3 / (self.chunks - 1) if self.chunks > 1 else None,
            chunks=self.chunks,
            seconds=now - self.started,
            bytes_up=self.bytes_up,
            nodes_up=self.nodes_up,
            blocks_up=self.blocks_up,
            bytes_down=self.bytes_down,
            tokens_down=self.tokens_down,
            cuts=self.cuts,
            refused_blocks=self.refused_blocks,
            unsent_blocks=self.unsent_blocks,
            link_round_trip_ms=link_round_trip_ms,
            draft_ms=None if drafting is None else drafting.draft_ms,
            window=None if drafting is None else drafting.window,
            drafting_failed=self.drafting_failed,
            drafting=drafting,
        )
