"""Commits to the store, then to the world: append first, publish the verdict after, in each session's order.

One pipeline of appends is under way at a time; what is committed meanwhile rides in the next. While the store is away
everything waits here, bounded by live.MAX_PENDING for each session, and nothing is shown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from paceline import subjects
from paceline.bus import Bus
from paceline.errors import BusError, PacelineError, StoreError
from paceline.price import Price
from paceline.session import Commit
from paceline.store import Append, Appended, Rejected, SessionStore
from paceline.wire import Verdict
from services.batcher.live import Live, Pending
from services.batcher.opening import HISTORY_LOST

log = structlog.get_logger("batcher")

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5


class Owner(Protocol):
    """Who is told what became of a session."""

    def confirmed(self, live: Live) -> None:
        """The store holds more of it; it may run again."""

    def finished(self, live: Live, last: Verdict) -> None:
        """Its finish is stored and published."""

    def overtaken(self, live: Live) -> None:
        """Somebody else owns it: drop it silently."""

    def rewritten(self, live: Live) -> None:
        """The store's history replaced ours; a step under way does not count any more."""

    @property
    def window_cap(self) -> int | None: ...

    def price(self, live: Live) -> Price | None:
        """Of the time of its verifier."""


class Committer:
    """`put` never waits; `run` is the only writer of this batcher's records."""

    def __init__(self, store: SessionStore, bus: Bus, model: str, owner: Owner) -> None:
        self._store = store
        self._bus = bus
        self._model = model
        self._owner = owner
        self._waiting: dict[str, Live] = {}
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self.clock: Callable[[], float] = time.monotonic

    def put(self, live: Live) -> None:
        """`live.pending` has something new."""
        self._waiting[live.id] = live
        self._wake.set()

    def drop(self, live: Live) -> None:
        """The session is no longer ours: nothing of it may be written."""
        live.pending.clear()
        if self._waiting.get(live.id) is live:
            del self._waiting[live.id]
        self._progress.set()

    async def flushed(self, lives: Sequence[Live]) -> None:
        """Wait until the store has everything of these sessions, or they are not ours any more."""
        while any(live.pending for live in lives):
            self._progress.clear()
            await self._progress.wait()

    async def run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._round()
                self._progress.set()
                pause = FIRST_PAUSE_S
            except StoreError as error:
                log.warning("the store is away, commits wait", sessions=len(self._waiting), error=str(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                self._wake.set()

    async def _round(self) -> None:
        """One pipeline, one append a session: two could straddle another writer's. Answers that do not fit a session
        any more (it was dropped or rewritten meanwhile) are void."""
        work = [(live, live.next_to_write()) for live in self._waiting.values() if live.pending]
        if not work:
            self._waiting = {name: live for name, live in self._waiting.items() if live.pending}
            return
        answers = await self._store.append([self._append(live, pending) for live, pending in work])
        for (live, pending), answer in zip(work, answers, strict=True):
            if self._waiting.get(live.id) is live and live.pending and live.pending[0] is pending:
                await self._answered(live, pending, answer)
        self._waiting = {name: live for name, live in self._waiting.items() if live.pending}
        if self._waiting:
            self._wake.set()

    def _append(self, live: Live, pending: Pending) -> Append:
        commit = pending.commit
        return Append(
            session=live.id,
            model=self._model,
            epoch=live.session.epoch,
            at=commit.at,
            tokens=commit.tokens,
            kinds=commit.kinds,
            counters=pending.counters,
            logprobs=commit.logprobs,
            finish=commit.finish,
        )

    async def _answered(self, live: Live, pending: Pending, answer: Appended | Rejected) -> None:
        if isinstance(answer, Rejected):
            await self._rejected(live, answer)
        elif live.session.adopt(pending.commit.at, answer.tail, answer.kinds, answer.finish):
            await self._rewritten(live, pending, answer)
        else:
            await self._confirmed(live, pending)

    async def _confirmed(self, live: Live, pending: Pending) -> None:
        """Stored: show it. Only then does `durable` move, so that no empty verdict runs ahead of this one."""
        live.pending.popleft()
        live.error = pending.commit.error or live.error
        verdict = self._verdict(live, pending)
        await self.publish(verdict)
        live.durable = pending.commit.at + len(pending.commit.tokens)
        if pending.commit.finish is not None:
            self._owner.finished(live, verdict)
        else:
            self._owner.confirmed(live)

    async def _rewritten(self, live: Live, pending: Pending, answer: Appended) -> None:
        log.warning("the store held another history", session=live.id, at=pending.commit.at, tail=len(answer.tail))
        live.adopted()
        commit = Commit(pending.commit.at, answer.tail, answer.kinds, answer.finish)  # type: ignore[arg-type]
        shown = Pending(commit, live.session.counters)
        verdict = self._verdict(live, shown)
        await self.publish(verdict)
        self._owner.rewritten(live)
        if answer.finish is not None:
            self._owner.finished(live, verdict)

    async def _rejected(self, live: Live, answer: Rejected) -> None:
        if answer.reason == "stale_epoch":
            log.info("overtaken by another owner", session=live.id, epoch=live.session.epoch, stored=answer.epoch)
            self._owner.overtaken(live)
        elif answer.reason == "gap" and answer.length >= live.session.record.prompt_length:
            log.warning("the store lost a tail, written again", session=live.id, length=answer.length)
            live.pending.appendleft(_lost_tail(live, answer.length))
        else:
            await self._lose(live, answer)

    async def _lose(self, live: Live, answer: Rejected) -> None:
        """The record is gone: the session ends here, and says so; there is nothing left to write to."""
        log.error("the store lost the record", session=live.id, reason=answer.reason)
        live.pending.clear()
        commit = replace(live.session.fail(HISTORY_LOST), at=live.durable)
        live.error = commit.error
        verdict = self._verdict(live, Pending(commit, live.session.counters))
        await self.publish(verdict)
        self._owner.finished(live, verdict)

    async def announce(self, live: Live) -> None:
        """An empty verdict at the confirmed tip: what was seen, who must send again, the finish if there is one."""
        await self.publish(self._verdict(live, None))

    def _verdict(self, live: Live, pending: Pending | None) -> Verdict:
        return live.verdict(pending, self._owner.window_cap, self.clock(), self._owner.price(live))

    async def publish(self, verdict: Verdict) -> None:
        """A verdict that the bus loses is repaired from the store by who follows the session."""
        try:
            await self._bus.publish(subjects.VERDICT.at(session=verdict.session), verdict)
        except BusError as error:
            log.debug("verdict not published", session=verdict.session, error=str(error))
        except PacelineError as error:
            log.error("verdict refused by the bus", session=verdict.session, error=str(error))


def _lost_tail(live: Live, length: int) -> Pending:
    """What the store had confirmed and then lost, as a commit from its `length` on."""
    session, first = live.session, live.pending[0].commit.at
    part = slice(length - session.record.prompt_length, first - session.record.prompt_length)
    logprobs = tuple(live.logprobs[part]) if session.record.opened.logprobs is not None else None
    commit = Commit(length, tuple(session.committed[length:first]), session.kinds[part], logprobs=logprobs)
    return Pending(commit, session.counters, written_at_once=True)
