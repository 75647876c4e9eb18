"""What needs no drafting device: plain batched decoding, and a server that drafts for itself. Pure; seconds.

Both run one batch of all sessions, step after step, with the same texts, links and step times as paceline.fleet.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from paceline.fleet import Figures
from paceline.fleet_meter import Link, Meter, Way
from paceline.fleet_traces import Trace

StepTime = Callable[[float, float, float], float]
"""step_s(tokens, context, tokens per session)."""


@dataclass(frozen=True)
class Batch:
    """sessions: in every step; context: KV tokens of each prompt. block: tokens drafted before each verify step, 0 for
    plain decoding. draft_s: seconds of one pass of the server's drafter, a token for every session, beside the step."""

    step_s: StepTime
    trace: Trace
    link: Link
    sessions: int
    context: int = 0
    block: int = 0
    draft_s: StepTime | None = None
    noise: float = 0.02
    seed: int = 1


def decode(batch: Batch, settling: int, measuring: int) -> Figures:
    """`settling` tokens a session that do not count, then `measuring` that do."""
    chance = random.Random(batch.seed)
    length = 4 * (settling + measuring)
    texts = [batch.trace.draw(length, chance) for _ in range(batch.sessions)]
    ways = [Way(batch.link, chance) for _ in range(batch.sessions)]
    done = [0] * batch.sessions
    meter, now, start, tokens = Meter(), 0.0, 0.0, 0
    steps = accepted = rejected = before = 0
    busy = 0.0
    while tokens < (settling + measuring) * batch.sessions:
        if not start and tokens >= settling * batch.sessions:
            start, before, steps, accepted, rejected, busy = now, tokens, 0, 0, 0, 0.0
        seconds = _step(batch, tokens) * max(0.5, chance.gauss(1.0, batch.noise))
        now, steps, busy = now + seconds, steps + 1, busy + seconds
        for session, text in enumerate(texts):
            fits = 0
            while fits < batch.block and text[(done[session] + fits) % length].rank == 0:
                fits += 1
            accepted, rejected = accepted + fits, rejected + (fits < batch.block)
            done[session] += fits + 1
            tokens += fits + 1
            meter.chunk(session, ways[session].arrival(now), fits + 1)
    mean, p50, p99 = meter.latencies_ms(start, now)
    decided, items = max(1, tokens - before), steps * batch.sessions
    return Figures(
        tokens_per_s=decided / (now - start),
        itl_ms_mean=mean,
        itl_ms_p50=p50,
        itl_ms_p99=p99,
        step_ms=1000 * busy / steps,
        batch=batch.sessions,
        chain=batch.block,
        acceptance=accepted / max(1, accepted + rejected),
        waste=(items * batch.block - accepted) / decided,
        filled=0.0 if batch.block else 1.0,
        busy=1.0,
        drafted_per_token=items * batch.block / decided,
    )


def _step(batch: Batch, tokens: int) -> float:
    context = batch.sessions * batch.context + tokens
    seconds = batch.step_s(batch.sessions * (batch.block + 1), context, batch.block + 1)
    if batch.block and batch.draft_s is not None:
        seconds += batch.block * batch.draft_s(batch.sessions, context, 1.0)
    return seconds
