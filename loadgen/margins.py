"""By how little the target chose where two runs part: asked of the target itself."""

from __future__ import annotations

from typing import Protocol

from msgspec import structs

from loadgen.divergence import TOP, Split, margin
from loadgen.jobs import Job, Run

BARRED = -100.0


class Runs(Protocol):
    """An edge process, say."""

    async def run(self, job: Job) -> Run: ...


async def margin_at(edge: Runs, job: Job, split: Split) -> float | None:
    """Of the two tokens at the split of `job`, a cloud-only one. None: one of them is neither what the target chooses
    there, nor what it chooses next, nor among the most likely ones."""
    job = structs.replace(job, max_tokens=split.position + 1, logprobs=TOP)
    first = await edge.run(job)
    known = _logprobs(first, split)
    if {split.one, split.other} - known.keys() and len(first.tokens) > split.position:
        chosen = first.tokens[split.position]  # without it the other one has to win; if it tied, it does
        second = await edge.run(structs.replace(job, logit_bias={chosen: BARRED}))
        if second.tokens[: split.position] == first.tokens[: split.position]:
            known |= _logprobs(second, split)
    return margin(split, known, job.temperature, job.seed)


def _logprobs(run: Run, split: Split) -> dict[int, float]:
    """Of the most likely tokens and the chosen one; the raw logits', so a bias is not in them."""
    if len(run.logprobs) <= split.position:
        return {}
    entry = run.logprobs[split.position]
    return {**dict(entry.top), run.tokens[split.position]: entry.logprob}
