"""From runs to the figures of a report. Pure. Times in milliseconds, counted per token."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from loadgen.jobs import Run


def gaps_ms(run: Run) -> list[float]:
    """One gap for each token after the first. Tokens that came together share the time since the chunk before, evenly;
    those that came with the first token cost nothing. Their mean is (last - first) / (tokens - 1)."""
    gaps = [0.0] * (run.chunks[0][1] - 1) if run.chunks else []
    for (before, _), (came, count) in zip(run.chunks, run.chunks[1:], strict=False):
        gaps += [(came - before) / count] * count
    return gaps


def itl_ms(runs: Iterable[Run]) -> float:
    """Mean inter-token latency over all tokens of all runs."""
    return statistics.fmean(gap for run in runs for gap in gaps_ms(run))


def ratio(above: float, below: float) -> float | None:
    """None where there was nothing to divide by."""
    return above / below if below else None


def figures(repeats: Sequence[Sequence[Run]]) -> dict[str, object]:
    """Figures of one mode in one cell, from its repeats (each a run per prompt). itl_ms_mean is the median of the
    repeats' means, `spread` the lowest and highest of them; everything else is over all runs."""
    runs = [run for repeat in repeats for run in repeat]
    means = [itl_ms(repeat) for repeat in repeats]
    gaps = [gap for run in runs for gap in gaps_ms(run)]
    return {
        "itl_ms_mean": statistics.median(means),
        "itl_ms_p50": float(np.percentile(gaps, 50)),
        "itl_ms_p99": float(np.percentile(gaps, 99)),
        "ttft_ms_p50": statistics.median(run.chunks[0][0] for run in runs),
        "tokens_per_s": 1e3 * _tokens(runs) / sum(run.chunks[-1][0] for run in runs),
        "spread": [min(means), max(means)],
        **_speculation(runs),
    }


def _tokens(runs: Sequence[Run]) -> int:
    return sum(len(run.tokens) for run in runs)


def _speculation(runs: Sequence[Run]) -> dict[str, float | None]:
    """acceptance: accepted / verified. steps and step tokens leave prefill chunks out (docs/protocol.md)."""
    tokens = _tokens(runs)
    verified = sum(run.counters.verified for run in runs)
    return {
        "acceptance": ratio(sum(sum(run.counters.accepted.values()) for run in runs), verified),
        "verifier_steps_per_token": ratio(sum(run.counters.steps for run in runs), tokens),
        "verifier_tokens_per_token": ratio(sum(run.counters.step_tokens for run in runs), tokens),
        "bytes_up_per_drafted_token": ratio(sum(r.bytes_up for r in runs), sum(r.nodes_up for r in runs)),
        "bytes_down_per_committed_token": ratio(sum(r.bytes_down for r in runs), sum(r.tokens_down for r in runs)),
    }


def draft_ms(runs: Iterable[Run]) -> float | None:
    """Median over runs of the edge's own time per drafted token."""
    times = [run.draft_ms for run in runs if run.draft_ms is not None]
    return statistics.median(times) if times else None
