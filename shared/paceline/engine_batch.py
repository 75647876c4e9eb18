"""What the engines share: jobs of many sessions in, one step over all, ledgers kept.

The event loop plans a step (ledgers, room), a runner carries it out (a worker thread, or simulated time), and the event
loop settles the ledgers. Steps never overlap. What is asked for while a step runs takes effect after it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from paceline.engine import EngineStatus, Failed, Fed, TargetItem
from paceline.errors import EngineError, NoRoom
from paceline.forward_pass import Decide, Feed, Kept, Model, Result
from paceline.kv_ledger import Known, Ledger, Ledgers, MemoryOp

T = TypeVar("T")

_SMOOTHING = 0.2


Forward = Callable[[Sequence[MemoryOp], Sequence[Feed]], list[Result]]
"""One step of a batch over a model's memory (paceline.forward_pass)."""


class Runner(Protocol):
    """Carries out the work of a step that feeds `tokens` rows, and closes."""

    async def run(self, work: Callable[[], T], tokens: int) -> T: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """One session's share of a step: KV for `path` and `draft`, then `decide`, if any, on the logits of the positions
    after path, path + draft[:1], ... path + draft. branch_of: this is a branch of that session (see Ledgers).
    asked: see Feed; known: see Ledgers.claim."""

    session: str
    tenant: str
    path: Sequence[int]
    draft: Sequence[int] = ()
    decide: Decide | None = None
    prompt_length: int = 0
    branch_of: str = ""
    asked: TargetItem | None = None
    known: Known | None = None


@dataclass(frozen=True)
class _Plan:
    """A job that has its cells: `ledger` is to be fed from `start` on. whole: its path and draft."""

    job: Job
    ledger: Ledger
    start: int
    whole: Sequence[int]

    def feed(self) -> Feed:
        job = self.job
        return Feed(
            self.ledger.sequence, self.whole, self.start, len(job.path), job.decide, job.prompt_length, job.tenant,
            job.asked,
        )  # fmt: skip

    @property
    def rows(self) -> int:
        return len(self.whole) - self.start


@dataclass
class _Request:
    jobs: list[Job]
    future: asyncio.Future[list[object]]


@dataclass
class BatchEngine:
    """A queue of steps over one model, which `forward` carries out. merge: waiting requests may share a step (their
    sessions differ)."""

    name: str
    memory: Model
    forward: Forward
    ledgers: Ledgers
    runner: Runner
    context: int
    simulated: bool = False
    merge: bool = False
    clock: Callable[[], float] = time.monotonic
    step_ms: dict[int, float] = field(default_factory=dict)
    _waiting: list[_Request] = field(default_factory=list)
    _deferred: list[Callable[[], None]] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None
    _stepping: bool = False
    _closed: bool = False

    async def submit(self, jobs: Sequence[Job]) -> list[object]:
        """Outcomes in the order of the jobs: what decide gave, Fed, or Failed. Raises EngineError once closed."""
        if self._closed:
            raise EngineError("the engine is closed")
        request = _Request(list(jobs), asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(), name=f"{self.name} steps")
        return await request.future

    def trim(self, session: str, length: int) -> None:
        self.between_steps(partial(self.ledgers.trim, session, length))

    def release(self, session: str) -> None:
        self.between_steps(partial(self.ledgers.release, session))

    def status(self) -> EngineStatus:
        return EngineStatus(
            engine=self.name,
            simulated=self.simulated,
            context=self.context,
            cells_total=self.ledgers.total,
            cells_used=self.ledgers.used,
            sessions=self.ledgers.live,
            step_ms=dict(self.step_ms),
        )

    async def close(self) -> None:
        """Waits for the running step; requests that wait fail with EngineError. May be called twice."""
        if self._closed:
            return
        self._closed = True
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            if not request.future.done():
                request.future.set_exception(EngineError("the engine was closed"))
        if self._task is not None:
            await asyncio.wait([self._task])
        await self.runner.run(self.memory.close, 0)
        await self.runner.close()

    def between_steps(self, action: Callable[[], None]) -> None:
        """Now, or after the step under way."""
        if self._stepping:
            self._deferred.append(action)
        else:
            action()

    async def _work(self) -> None:
        """Steps until nothing waits. A task of its own, so that a caller's cancellation never cuts a step in half."""
        while requests := self._taken():
            jobs = [job for request in requests for job in request.jobs]
            try:
                outcomes = await self._step(jobs)
            except Exception as error:  # memory and ledgers may disagree now: every session comes back by replay
                self.ledgers.reset()
                for request in requests:
                    if not request.future.done():
                        request.future.set_exception(EngineError(f"the step failed: {error!r}"))
                continue
            for request in requests:
                mine, outcomes = outcomes[: len(request.jobs)], outcomes[len(request.jobs) :]
                if not request.future.done():
                    request.future.set_result(mine)

    def _taken(self) -> list[_Request]:
        """The next request, or with `merge` all whose sessions differ; callers that went away are left out."""
        self._waiting = [request for request in self._waiting if not request.future.done()]
        if not self.merge:
            taken, self._waiting = self._waiting[:1], self._waiting[1:]
            return taken
        sessions: set[str] = set()
        merged: list[_Request] = []
        for request in self._waiting:
            names = {job.session for job in request.jobs}
            if not names & sessions:
                sessions |= names
                merged.append(request)
        self._waiting = [request for request in self._waiting if request not in merged]
        return merged

    async def _step(self, jobs: list[Job]) -> list[object]:
        self._stepping = True
        try:
            outcomes, plans = self._plan(jobs)
            failed = await self._carry_out(plans, outcomes)
            for index in failed:  # one by one, to find out whose fault it was
                again = self._claim(jobs[index], ())
                alone = {index: again} if isinstance(again, _Plan) else {}
                outcomes[index] = again
                for bad in await self._carry_out(alone, outcomes):
                    self.ledgers.evict(jobs[bad].session)
            return outcomes
        finally:
            self._stepping = False
            deferred, self._deferred = self._deferred, []
            for action in deferred:
                action()

    def _plan(self, jobs: Sequence[Job]) -> tuple[list[object], dict[int, _Plan]]:
        """Outcomes that are known already (no room), and the plans of the others by the index of their job. Branches
        get what room the others leave."""
        outcomes: list[object] = [None] * len(jobs)
        plans: dict[int, _Plan] = {}
        pinned: set[str] = set()
        for index in sorted(range(len(jobs)), key=lambda index: jobs[index].branch_of != ""):
            claimed = outcomes[index] = self._claim(jobs[index], pinned)
            if isinstance(claimed, _Plan):
                plans[index] = claimed
                pinned.add(jobs[index].session)
        return outcomes, plans

    def _claim(self, job: Job, pinned: Collection[str]) -> _Plan | Failed:
        if job.session in pinned:
            return Failed(job.session, "step_failed", "a session can be in a step only once")
        keep = len(job.path) - (0 if job.decide is None else 1)
        whole = [*job.path, *job.draft]
        try:
            ledger, start = self.ledgers.claim(
                job.session, job.tenant, whole, keep=keep, pinned=pinned, now=self.clock(), branch_of=job.branch_of,
                known=job.known,
            )  # fmt: skip
        except NoRoom as error:
            return Failed(job.session, "no_room", str(error))
        return _Plan(job, ledger, start, whole)

    async def _carry_out(self, plans: dict[int, _Plan], outcomes: list[object]) -> list[int]:
        """Runs the plans and writes their outcomes; the jobs of a pass that failed are undone and returned."""
        if not plans:
            return []
        feeds = [plan.feed() for plan in plans.values()]
        tokens = sum(plan.rows for plan in plans.values())
        started = time.perf_counter()
        results = await self.runner.run(partial(self.forward, self.ledgers.take_ops(), feeds), tokens)
        self._learn(tokens, (time.perf_counter() - started) * 1000)
        failed = []
        for (index, plan), result in zip(plans.items(), results, strict=True):
            if isinstance(result, EngineError):
                self.ledgers.undo(plan.ledger, plan.start)
                code = "no_room" if isinstance(result, NoRoom) else "step_failed"
                outcomes[index] = Failed(plan.job.session, code, str(result))
                failed.append(index)
            else:
                outcomes[index] = self._settled(plan, result)
        return failed

    def _settled(self, plan: _Plan, kept: Kept | None) -> object:
        job = plan.job
        if kept is None:
            self.ledgers.settle(plan.ledger, list(job.path), len(job.path))
            return Fed(job.session, len(job.path))
        known = [*job.path, *job.draft[: kept.accepted]]
        self.ledgers.settle(plan.ledger, known if kept.token is None else [*known, kept.token], len(known))
        if isinstance(kept.outcome, EngineError):
            return Failed(job.session, "step_failed", str(kept.outcome))
        return kept.outcome

    def _learn(self, tokens: int, ms: float) -> None:
        """By exact number of tokens while small; in steps of 32 beyond 64, which bounds the table."""
        if tokens:
            key = tokens if tokens <= 64 else -(-tokens // 32) * 32
            known = self.step_ms.get(key, ms)
            self.step_ms[key] = known + _SMOOTHING * (ms - known)
