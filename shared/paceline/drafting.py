"""Drives one session with a draft engine: verdicts in, draft blocks out. The edge client and the drafter run it.

What is drafted and sent is decided by `draft_state` and `control`; here are the tasks around them. Drafting goes on
while a block is on its way; it waits only for a full window, and for nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog

from paceline.draft_state import DraftState
from paceline.engine import DraftEngine, Rule
from paceline.errors import EngineError, TransientError
from paceline.wire import Bounds, DraftBlock, Failure, Source, Speculation, Verdict

log = structlog.get_logger(__name__)

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 4.0


@dataclass(frozen=True)
class DraftEvent:
    """For displays. drafted: `token` is the guess for `position`; forgotten: the drafts from `position` on are void."""

    kind: Literal["drafted", "forgotten"]
    position: int
    token: int = -1
    confidence: float = 0.0


@dataclass(frozen=True)
class DraftStats:
    """drafted: tokens guessed; sent: of them put on the wire; accepted: by the target; forgotten: re-rooted away.
    Times are moving averages, None before the first measurement; draft_ms is one token without catching up."""

    drafted: int
    sent: int
    accepted: int
    forgotten: int
    blocks: int
    resends: int
    incarnations: int
    engine_failures: int
    window: int
    draft_ms: float | None
    round_trip_ms: float | None
    step_ms: float | None


class DraftLoop:
    """One session. `run` drafts until the session's finish; beyond the draft model's context it goes on without drafts.

    `send` may raise TransientError or ConnectionError: the block counts as lost and is sent again when the batcher
    misses it. `repair(position)` returns the committed tokens from `position` on, where verdicts can be lost on the way
    here (the bus); without it `on_verdict` tells its caller, who resumes. `connection` also orders the incarnations.
    """

    def __init__(
        self,
        *,
        engine: DraftEngine,
        source: Source,
        session: str,
        connection: int,
        tokens: Sequence[int],
        rule: Rule,
        speculation: Speculation,
        bounds: Bounds,
        limit: int,
        send: Callable[[DraftBlock], Awaitable[None]],
        on_draft: Callable[[DraftEvent], None] | None = None,
        repair: Callable[[int], Awaitable[Sequence[int]]] | None = None,
        epoch: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = DraftState(
            source=source,
            session=session,
            connection=connection,
            tokens=tokens,
            speculation=speculation,
            bounds=bounds,
            limit=limit,
            longest_path=engine.context,
            end_ids=rule.sampling.end_ids,
            epoch=epoch,
        )
        self._engine, self._session, self._rule = engine, session, rule
        self._send, self._on_draft, self._repair, self._clock = send, on_draft, repair, clock
        self._drafter = asyncio.Event()
        self._sender = asyncio.Event()
        self._ended = asyncio.Event()
        self._keep = False
        self._engine_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._next_length = -1
        """Length of the path that the engine extends without catching up."""

    @property
    def committed(self) -> list[int]:
        return self.state.committed

    @property
    def finish(self) -> str | None:
        """How the session ended, once every token before the end is here."""
        return self.state.finish

    @property
    def failure(self) -> Failure | None:
        return self.state.failure

    @property
    def stats(self) -> DraftStats:
        counts, pace = self.state.counts, self.state.pace
        return DraftStats(
            drafted=counts.drafted,
            sent=counts.sent,
            accepted=counts.accepted,
            forgotten=self.state.path.forgotten,
            blocks=counts.blocks,
            resends=counts.resends,
            incarnations=counts.incarnations,
            engine_failures=self._engine_failures,
            window=pace.window,
            draft_ms=_ms(pace.draft_s),
            round_trip_ms=_ms(pace.round_trip_s),
            step_ms=_ms(pace.step_s),
        )

    def on_verdict(self, verdict: Verdict) -> bool:
        """False: tokens before this verdict are missing; without `repair` the caller has to resume the session."""
        generation = self.state.path.generation
        complete = self.state.on_verdict(verdict, self._clock())
        self._changed(generation)
        return complete

    def on_reconnected(self, connection: int, position: int) -> None:
        self.state.on_reconnected(connection, position, self._clock())
        self._changed(self.state.path.generation)

    def stop(self, *, keep: bool = False) -> None:
        """Draft no more; `run` returns. keep: leave the session's KV to the loop that goes on with it."""
        self.state.ended, self._keep = True, keep
        self._changed(self.state.path.generation)

    async def run(self) -> None:
        """Until the session's finish, or `stop`: a guess under way is given up then, however much of its path the
        engine still has to read. Engine errors are logged, waited out and tried again."""
        try:
            async with asyncio.TaskGroup() as group:
                sender = group.create_task(self._send_blocks(), name=f"send drafts {self._session}")
                drafter = group.create_task(self._draft(), name=f"draft {self._session}")
                await self._ended.wait()
                drafter.cancel()
                sender.cancel()
        finally:
            if not self._keep:
                self._engine.release(self._session)

    def _changed(self, generation: int) -> None:
        if self.state.ended:
            self._ended.set()
        self._drafter.set()
        self._sender.set()
        if self._on_draft is not None and generation != self.state.path.generation:
            self._on_draft(DraftEvent("forgotten", len(self.state.committed)))

    async def _draft(self) -> None:
        while not self.state.ended:
            self._drafter.clear()
            if self.state.behind and self._repair is not None:
                await self._fill_gap(self._repair)
            elif self.state.may_draft():
                await self._draft_one()
            else:
                await self._drafter.wait()
        self._ended.set()

    async def _draft_one(self) -> None:
        path, generation = self.state.path.tokens(), self.state.path.generation
        started = self._clock()
        try:
            guess = await self._engine.guess(self._session, path, self._rule)
        except EngineError as error:
            self._engine_failures += 1
            log.warning("draft engine failed", session=self._session, error=str(error), pause_s=self._pause_s)
            await self._pause()
            return
        now = self._clock()
        self._pause_s = FIRST_PAUSE_S
        if len(path) == self._next_length:
            self.state.pace.on_drafted(now - started)
        self._next_length = len(path) + 1
        if self.state.extend(guess, generation, now):
            self._sender.set()
            if self._on_draft is not None:
                self._on_draft(DraftEvent("drafted", len(path), guess.token, guess.confidence))
        else:
            self._next_length = -1
        await asyncio.sleep(0)  # an engine that answers at once must not keep verdicts and blocks waiting

    async def _send_blocks(self) -> None:
        while True:
            self._sender.clear()
            blocks = self.state.due(self._clock())
            for block in blocks:
                await self._send_block(block)
            if not blocks:
                await _wait(self._sender, self.state.next_due(self._clock()))
            self._drafter.set()

    async def _send_block(self, block: DraftBlock) -> None:
        try:
            await self._send(block)
        except (TransientError, ConnectionError) as error:
            log.info("draft block not sent", session=self._session, error=str(error))

    async def _fill_gap(self, repair: Callable[[int], Awaitable[Sequence[int]]]) -> None:
        position = len(self.state.committed)
        generation = self.state.path.generation
        try:
            self.state.adopt(position, await repair(position))
        except TransientError as error:
            log.info("missed tokens not to be had yet", session=self._session, error=str(error))
        if self.state.behind and not self.state.ended:
            await self._pause()
        else:
            self._pause_s = FIRST_PAUSE_S
            self._changed(generation)

    async def _pause(self) -> None:
        await _wait(self._ended, self._pause_s)
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    """Until the event, at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
