"""One session as the edge lives it: opened, followed, cut, resumed, cancelled, ended.

The transcript decides what is new, the draft loop what to guess; this module connects both to the link. A session is
**bound** while the gateway takes its drafts on the present link, that is from SessionOpened until the link is lost. One
task per session does what needs an answer (opening, resuming, closing); verdicts are taken straight from the reader.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Protocol

import structlog

from edge_client.backoff import pause_s
from edge_client.calibrations import PairCalibration
from edge_client.events import Committed, Cut, Drafted, Event, Finished, Opened, Reading, Resumed
from edge_client.faults import LinkDown
from edge_client.feed import DraftFeed
from edge_client.link import LinkOptions
from edge_client.request import Request, opening
from edge_client.stats import Stats, Tally
from edge_client.transcript import Missing, Taken, Transcript
from paceline import wire
from paceline.drafting import DraftEvent
from paceline.engine import DraftEngine
from paceline.errors import Conflict, NotFound, Overloaded, PacelineError, RequestError, Unavailable
from paceline.tokenizer import Tokenizer

_log = structlog.get_logger("paceline.edge.session")
MAX_QUEUED_DRAFTS = 512
MAX_BARREN_RESUMES = 5
"""Resumes for missing verdicts in a row without one new token; then the session fails rather than spin."""
MAX_SUPERSEDED = 1
"""A resume of an earlier link may overtake that of the present one, so a superseded session is resumed; another time,
somebody else has it."""
CLOSE_EVERY_S, CLOSE_WITHIN_S, CLOSE_WITHOUT_LINK_S = 0.5, 5.0, 2.0


class Line(Protocol):
    """What a session needs of the client that carries it."""

    options: LinkOptions
    calibration: PairCalibration

    @property
    def is_up(self) -> bool: ...

    @property
    def round_trip_ms(self) -> float | None: ...

    async def ask(self, message: wire.SessionOpen | wire.SessionResume, session: EdgeSession) -> None:
        """Waits for the link, sends, and returns after the answer was given to `session.attached`. Raises LinkDown when
        the link was lost meanwhile, the RequestError of a refusal, Unavailable when the link is lost for good."""
        ...

    async def send(self, message: wire.Message) -> int: ...

    def leave(self, session: str) -> None: ...


class EdgeSession:
    """Iterate it for events; `async with` it, so that leaving early cancels it in the cloud as well."""

    def __init__(
        self, line: Line, request: Request, tokenizer: Tokenizer, engine: DraftEngine | None, *, drafts: bool = False
    ) -> None:
        card = tokenizer.card
        self.request = request
        self.opening = opening(request, tokenizer.card, drafts_here=engine is not None)
        self.transcript = Transcript(request.tokens, tokenizer, card.end_ids, request.stop)
        self.tally = Tally(len(request.tokens), time.monotonic())
        self.accepted: wire.SessionOpened | None = None
        self._line = line
        pair = line.calibration
        show = self._drafted if drafts else None
        learned = pair.learned.for_session()
        self._drafts = DraftFeed(engine, self.tally, line.send, show, calibration=learned, costs=pair.costs)
        self._bound = self._closing = self._was_cut = False
        self._barren = self._superseded = 0
        self._events: deque[Event] = deque()
        self._ready, self._wake, self._over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._giving_up: asyncio.TimerHandle | None = None

    # --- for the user ----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> EdgeSession:
        self._spawn(self._live(), "edge-session")
        self._spawn(self._drafts.read_prompt(self.opening), "edge-prompt")
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            self.cancel()
            await self._over.wait()
        finally:
            await self._clean_up()

    def __aiter__(self) -> EdgeSession:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._over.is_set():
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._events.popleft()

    def cancel(self) -> None:
        """End the session here and in the cloud. `Finished` comes with the cloud's finish, or unconfirmed in 5 s."""
        if self._over.is_set() or self._closing:
            return
        self._closing = True
        if self.accepted is None and not self._line.is_up:
            self._end("cancelled")
            return
        within = CLOSE_WITHIN_S if self._line.is_up else CLOSE_WITHOUT_LINK_S
        self._giving_up = asyncio.get_running_loop().call_later(within, self.abandon)
        self._wake.set()

    def abandon(self) -> None:
        """End it here at once; the cloud ends it by itself within a minute."""
        self._end("cancelled", confirmed=False)

    def stats(self) -> Stats:
        return self.tally.stats(
            time.monotonic(), link_round_trip_ms=self._line.round_trip_ms, drafting=self._drafts.stats
        )

    # --- from the link (synchronous, in the order of the frames) -----------------------------------------------------

    def expects(self, session: str) -> bool:
        """Whether an answer for `session` may be for us."""
        return self.accepted is None or self.accepted.session == session

    def attached(self, opened: wire.SessionOpened, t: float) -> None:
        """The cloud's answer to opening or resuming."""
        first, self.accepted = self.accepted is None, opened
        self.transcript.epoch = max(self.transcript.epoch, opened.epoch)
        self._bound = self._drafts.bound = True
        if first:
            self._emit(Opened(opened.session, opened.prompt_length, opened.max_tokens, opened.seed, t))
            self._begin_drafting(opened)
            return
        self._drafts.on_reconnected(opened)
        if self._was_cut:
            self._was_cut = False
            self._emit(Resumed(self.transcript.position, t))

    def verdict(self, verdict: wire.Verdict, t: float, size: int) -> None:
        if self._over.is_set() or verdict.epoch < self.transcript.epoch:
            return
        self.tally.verdict_frame(size, len(verdict.tokens))
        try:
            taken = self.transcript.take(verdict)
        except RequestError as error:
            self._fail(error)
            return
        if isinstance(taken, Missing):
            self._resume("verdicts are missing")
            return
        self._drafts.on_verdict(verdict)
        if verdict.fed is not None:
            self._emit(Reading(verdict.fed, self.tally.prompt_tokens, t))
        if taken is not None:
            self._took(taken, verdict, t)

    def refused(self, error: RequestError) -> None:
        """A frame of this session was refused: it is bound no more, or a block broke a bound."""
        self.tally.refused_blocks += 1
        _log.info("refused", code=error.code, error=error.message)
        self._superseded += error.code == "superseded"
        if self._superseded > MAX_SUPERSEDED:
            self._fail(error)
        elif self._bound and isinstance(error, NotFound | Conflict):
            self._resume(error.message)

    def link_down(self, reason: str, t: float) -> None:
        self._unbind()
        if self.accepted is None or self._over.is_set():
            return
        self.tally.cuts += 1
        self._was_cut = True
        self._emit(Cut(reason, t))
        self._wake.set()

    def link_lost(self, error: PacelineError) -> None:
        self._fail(error)

    # --- life ------------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            await self._attach(lambda: self.opening)
            while not self._over.is_set():
                await self._step()
        except PacelineError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("session failed")
            self._fail(PacelineError(f"the session failed here: {error!r}"))

    async def _step(self) -> None:
        self._wake.clear()
        if not self._bound:
            await self._attach(self._resuming)
        elif self._closing:
            await self._say_close()
        else:
            await self._wake.wait()

    async def _attach(self, message: Callable[[], wire.SessionOpen | wire.SessionResume]) -> None:
        """Open or resume. A lost link is waited for; a cloud that cannot resume now is asked again for a while."""
        deadline = time.monotonic() + self._line.options.patience_s
        attempt = 0
        while not self._over.is_set():
            try:
                await self._line.ask(message(), self)
                return
            except LinkDown:
                continue
            except (Unavailable, Overloaded):
                if self.accepted is None or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(pause_s(attempt, random.random()))
                attempt += 1

    async def _say_close(self) -> None:
        assert self.accepted is not None
        with suppress(LinkDown):
            await self._line.send(wire.SessionClose(session=self.accepted.session))
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_EVERY_S):
                await self._over.wait()

    def _resuming(self) -> wire.SessionResume:
        assert self.accepted is not None
        return wire.SessionResume(
            session=self.accepted.session,
            secret=self.accepted.secret,
            position=self.transcript.position,
            prefix_hash=self.transcript.prefix_hash(),
        )

    def _resume(self, reason: str) -> None:
        self._barren += 1
        _log.info("resuming on the same link", reason=reason, position=self.transcript.position)
        if self._barren > MAX_BARREN_RESUMES:
            self._fail(Conflict(f"the session cannot be resumed: {reason}", code="history_lost"))
            return
        self._unbind()
        self._wake.set()

    # --- verdicts and ends -----------------------------------------------------------------------------------------

    def _took(self, taken: Taken, verdict: wire.Verdict, t: float) -> None:
        if verdict.counters is not None:
            self.tally.counters = verdict.counters
        if taken.tokens:
            self._barren = 0
            self.tally.committed(len(taken.tokens), taken.kinds, t)
        if taken.tokens or taken.text:
            self._emit(Committed(taken.at, taken.tokens, taken.kinds, taken.text, t, taken.logprobs))
        if taken.finish is not None:
            self._end(taken.finish, verdict.error)

    def _fail(self, error: PacelineError) -> None:
        status, code = (error.status, error.code) if isinstance(error, RequestError) else (500, "internal_error")
        self._end("error", wire.Failure(status=status, code=code, message=str(error)))

    def _end(self, finish: str, error: wire.Failure | None = None, *, confirmed: bool = True) -> None:
        if self._over.is_set():
            return
        self._over.set()
        self._wake.set()
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._emit(Finished(finish, self.stats(), time.monotonic(), error, confirmed))
        if self.accepted is not None:
            self._line.leave(self.accepted.session)

    async def _clean_up(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- drafts and small things --------------------------------------------------------------------------------------

    def _begin_drafting(self, opened: wire.SessionOpened) -> None:
        if run := self._drafts.begin(self.opening, opened):
            self._spawn(run, "edge-draft")

    def _drafted(self, draft: DraftEvent) -> None:
        if len(self._events) < MAX_QUEUED_DRAFTS:
            self._emit(Drafted(draft, time.monotonic()))

    def _unbind(self) -> None:
        self._bound = self._drafts.bound = False

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._ready.set()

    def _spawn(self, coroutine: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
