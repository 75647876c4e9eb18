"""Runs for the tests of reports, and a rig that answers at once."""

from __future__ import annotations

from pathlib import Path

from loadgen.jobs import Drafting, Job, Run, Wave, Waved
from paceline.wire import BatcherStatus, Counters, SystemReport, VerifierStatus

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


def paced(ms: float, count: int = 8, **values: object) -> Run:
    return run((50.0, 1), *((50.0 + ms * (i + 1), 1) for i in range(count - 1)), **values)


class FakeEdge:
    """Answers at once: `itl(job)` milliseconds a token; `misses`: shares to report for replayed waves, in turn."""

    def __init__(self, misses: list[float] | None = None) -> None:
        self.waves: list[Wave] = []
        self._misses = misses or []

    async def wave(self, wave: Wave) -> Waved:
        self.waves.append(wave)
        share = self._misses.pop(0) if self._misses and wave.drafts == "replay" else 0.0
        drafting = Drafting(guesses=1000, misses=int(share * 1000)) if wave.drafts == "replay" else Drafting()
        return Waved(tuple([await self.run(job) for job in wave.jobs]), drafting)

    async def recall(self, file: Path) -> int:
        return 0

    async def run(self, job: Job) -> Run:
        return paced(self._itl(job), job.max_tokens)

    @staticmethod
    def _itl(job: Job) -> float:
        """Blocks of 3 are best for sync, of 2 for colocated."""
        speculation = job.speculation
        if speculation.depth != 1:
            return 30.0
        return 50.0 + abs(speculation.max_draft - (2 if speculation.hosted else 3))


class FakeRig:
    def __init__(self, edge: FakeEdge) -> None:
        self.edge, self.pair, self.simulated, self.rtts = edge, "toy", True, list[float]()

    async def at_distance(self, rtt_ms: float) -> None:
        self.rtts.append(rtt_ms)

    async def system(self) -> SystemReport:
        verifier = VerifierStatus(
            verifier="v", model="toy", fingerprint="", engine="simulated", simulated=True, state="ready", context=99,
            cells_total=9, cells_used=0, sessions=0, busy=0, queue=0, steps=1, step_tokens=1, step_ms={1: 10.0},
        )  # fmt: skip
        batcher = BatcherStatus(
            batcher="b", model="toy", sessions=0, parked=0, waiting=0, partitions=1, committed=0, drafted=0, accepted=0,
            filled=0, stale=0, overhead_ms_p50=1.5,
        )  # fmt: skip
        return SystemReport(verifiers=(verifier,), batchers=(batcher,), drafters=(), decisions=())
