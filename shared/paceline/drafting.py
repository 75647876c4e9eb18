"""Drives one session with a draft engine: verdicts in, draft blocks out. The edge client and the drafter run it.

What is drafted and sent is decided by `draft_state` and what it uses; here are the tasks around it. Drafting goes on
while a block is on its way; it waits only where another token would not be worth its time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import structlog

from paceline.calibration import Calibrated
from paceline.draft_plan import Reason
from paceline.draft_state import DraftPass, DraftState
from paceline.draft_tree import Node
from paceline.engine import DraftEngine, Rule
from paceline.errors import EngineError, TransientError
from paceline.pass_costs import PassCosts
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
    """drafted: tokens guessed; sent: put on the wire, runner-ups that were continued included; accepted: by the target;
    forgotten: void after a verdict; branched and branches: of drafted and sent, beside the main chain; taken: branches
    that the target took. Times are moving averages, None before the first measurement; draft_ms is one token without
    catching up, pass_ms by number of paths. waits: why the main chain is not extended (draft_plan.Reason), reach: the
    chance that its next token is verified; acceptance: of drafted positions, smoothed; price: as the batcher told it.
    """

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
    branched: int = 0
    branches: int = 0
    taken: int = 0
    passes: int = 0
    fill_ms: float | None = None
    pass_ms: dict[int, float] = field(default_factory=dict)
    waits: Reason = "drafting"
    reach: float = 1.0
    price: float = 0.0
    acceptance: float = 0.0


class DraftLoop:
    """One session. `run` drafts until the session's finish; beyond the draft model's context it goes on without drafts.

    `send` may raise TransientError or ConnectionError: the block counts as lost and is sent again when the batcher
    misses it. `repair(position)` returns the committed tokens from `position` on, where verdicts can be lost on the way
    here (the bus); without it `on_verdict` tells its caller, who resumes. `connection` also orders the incarnations.
    `calibration`, `costs`: what is known of the draft model beside the target, and of the time it takes; they learn on.
    None: nothing.
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
        calibration: Calibrated | None = None,
        costs: PassCosts | None = None,
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
            calibration=calibration,
            costs=costs,
        )
        self._engine, self._session, self._rule = engine, session, rule
        self._send, self._on_draft, self._repair, self._clock = send, on_draft, repair, clock
        self._drafter = asyncio.Event()
        self._sender = asyncio.Event()
        self._ended = asyncio.Event()
        self._keep = False
        self._engine_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._told: Reason = "drafting"

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
            forgotten=self.state.tree.forgotten,
            blocks=counts.blocks,
            resends=counts.resends,
            incarnations=counts.incarnations,
            engine_failures=self._engine_failures,
            window=pace.window,
            draft_ms=_ms(pace.draft_s),
            round_trip_ms=_ms(pace.round_trip_s),
            step_ms=_ms(pace.step_s),
            branched=counts.branched,
            branches=counts.branches,
            taken=self.state.tree.taken,
            passes=counts.passes,
            fill_ms=_ms(pace.fill_s),
            pass_ms={rows: 1000 * seconds for rows, seconds in pace.costs.measured.items()},
            waits=self.state.reason,
            reach=self.state.reach,
            price=pace.price,
            acceptance=self.state.calibration.mean,
        )

    def on_verdict(self, verdict: Verdict) -> bool:
        """False: tokens before this verdict are missing; without `repair` the caller has to resume the session."""
        generation = self.state.tree.generation
        complete = self.state.on_verdict(verdict, self._clock())
        self._changed(generation)
        return complete

    def on_reconnected(self, connection: int, position: int) -> None:
        self.state.on_reconnected(connection, position, self._clock())
        self._changed(self.state.tree.generation)

    def stop(self, *, keep: bool = False) -> None:
        """Draft no more; `run` returns. keep: leave the session's KV to the loop that goes on with it."""
        self.state.ended, self._keep = True, keep
        self._changed(self.state.tree.generation)

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
        if self._on_draft is not None and generation != self.state.tree.generation:
            self._on_draft(DraftEvent("forgotten", len(self.state.committed)))
            self._show(self.state.tree.ahead())

    async def _draft(self) -> None:
        while not self.state.ended:
            self._drafter.clear()
            if self.state.behind and self._repair is not None:
                await self._fill_gap(self._repair)
            elif (drafted := self.state.next_pass(self._clock(), self._engine.max_paths)) is not None:
                await self._draft_pass(drafted)
            else:
                self._note()
                await self._drafter.wait()
        self._ended.set()

    async def _draft_pass(self, drafted: DraftPass) -> None:
        started = self._clock()
        try:
            guesses = await self._engine.guesses(self._session, drafted.paths, self._rule)
        except EngineError as error:
            self._engine_failures += 1
            log.warning("draft engine failed", session=self._session, error=str(error), pause_s=self._pause_s)
            await self._pause()
            return
        now = self._clock()
        self._pause_s = FIRST_PAUSE_S
        self._show(self.state.take_pass(drafted, guesses, now - started, now))
        self._note()
        self._sender.set()
        await asyncio.sleep(0)  # an engine that answers at once must not keep verdicts and blocks waiting

    def _show(self, nodes: Sequence[Node]) -> None:
        if self._on_draft is not None:
            for node in nodes:
                self._on_draft(DraftEvent("drafted", node.position, node.token, node.confidence))

    def _note(self) -> None:
        """Of the window control: what it saw and decided, where the decision changed."""
        state, pace = self.state, self.state.pace
        if state.reason == self._told:
            return
        self._told = state.reason
        log.debug(
            "drafting" if state.reason == "drafting" else "drafting waits",
            session=self._session,
            reason=state.reason,
            ahead=len(state.tree.ahead()),
            nodes=state.tree.size,
            window=pace.window,
            reach=round(state.reach, 3),
            lead=None if (lead := pace.lead(self._clock())) is None else round(lead, 1),
            price=pace.price,
            acceptance=round(state.calibration.mean, 3),
            draft_ms=_ms(pace.draft_s),
            fill_ms=_ms(pace.fill_s),
            round_trip_ms=_ms(pace.round_trip_s),
            step_ms=_ms(pace.step_s),
        )

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
        generation = self.state.tree.generation
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
