"""Runs for the tests of reports."""

from __future__ import annotations

from loadgen.jobs import Run
from paceline.wire import Counters

TIMED = Counters(steps=2, timed_steps=1, step_ms=20.0)
"""Of a run whose verify steps took 20 ms."""


def run(*chunks: tuple[float, int], **values: object) -> Run:
    """A completion whose chunks (milliseconds, tokens) came like that."""
    tokens = tuple(range(sum(count for _, count in chunks)))
    settled = {
        "tokens": tokens,
        "text": "",
        "kinds": "",
        "finish": "length",
        "prompt_tokens": 5,
        "counters": TIMED,
        **values,
    }
    return Run(chunks=chunks, **settled)  # type: ignore[arg-type]
