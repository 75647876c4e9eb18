"""The gateway's side of sessions: opening, resuming, closing.

A session lives from `open` or `resume` until it finished or was let go with `leave` (an edge's: the batcher parks it)
or `cancel` (closed, again and again until a finish is seen). Nothing here survives the process: another gateway can
resume an edge's session, and the batcher parks and then cancels what nobody is present for.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import structlog
from msgspec.structs import replace

from paceline import subjects
from paceline.bus import Received
from paceline.errors import (
    BusError,
    Conflict,
    NoResponders,
    Overloaded,
    PacelineError,
    RequestTimeout,
    Unavailable,
)
from paceline.service import Service
from paceline.wire import (
    BatcherStatus,
    SessionOpen,
    SessionOpened,
    SessionResume,
    Verdict,
    VerifierStatus,
)
from services.gateway.fleet import Fleet
from services.gateway.follower import Digest, Follower, Order
from services.gateway.live import Live, Speaker

log = structlog.get_logger(__name__)

MAX_SESSIONS = 4096
WATCH_S = 0.5
CLOSE_EVERY_S = 0.5
CLOSE_LIMIT_S = 60.0
"""After this long without presence the batcher cancels by itself."""
UNANSWERED_LIMIT_S = 5.0
OPEN_S = 5.0
OPEN_TRIES = 3
OPEN_PAUSE_S = 0.2
FIRST_STATUS_S = 1.0
"""How long a new gateway waits for the others' first word before it says that they are missing."""


class Unanswered(Unavailable):
    """A request that may have been served all the same."""


class Sessions:
    """All sessions of this gateway. `run` and `start` belong to the gateway's lifetime."""

    def __init__(self, service: Service, model: str) -> None:
        self.model = model
        self.fleet = Fleet(time.monotonic)
        self._service = service
        self._bus = service.bus
        self._speaker = Speaker(service, model)
        self._heard = asyncio.Event()

    async def start(self) -> None:
        await self._bus.subscribe(
            subjects.VERIFIER_STATUS.at(model=self.model), self._on_status, *subjects.VERIFIER_STATUS.carries
        )
        await self._bus.subscribe(
            subjects.BATCHER_STATUS.at(model=self.model), self._on_status, *subjects.BATCHER_STATUS.carries
        )
        self._service.spawn(self._speaker.run(), "presence")
        self._service.spawn(self._watch(), "components")

    @property
    def count(self) -> int:
        return len(self._speaker)

    async def require_components(self) -> None:
        """Raises Unavailable, within a second, when no answer can be made now."""
        if self._service.stopping.is_set():
            raise Unavailable("this gateway is stopping; try again", code="stopping")
        if self.fleet.missing():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_STATUS_S):
                    await self._heard.wait()
        missing = self.fleet.missing()
        if missing:
            name, detail = next(iter(missing.items()))
            raise Unavailable(f"{detail} for the model {self.model!r}", code=f"{name}_unavailable")

    # --- opening ---------------------------------------------------------------------------------------------------

    async def open(self, opening: SessionOpen, present: Callable[[], bool] = lambda: True) -> Live:
        """Raises the batcher's refusal, or Unavailable within OPEN_S. A session whose opening was not answered, or
        whose caller was cancelled meanwhile, is closed."""
        for attempt in range(OPEN_TRIES):
            try:
                return await self._open_as(secrets.token_hex(12), opening, present)
            except NoResponders as error:  # another id falls to another partition, and so perhaps to another batcher
                if attempt == OPEN_TRIES - 1:
                    message = f"no batcher serves the model {self.model!r}"
                    raise Unavailable(message, code="batcher_unavailable") from error
                await asyncio.sleep(OPEN_PAUSE_S)
        raise AssertionError("unreachable")

    async def _open_as(self, session: str, opening: SessionOpen, present: Callable[[], bool]) -> Live:
        order = Order(session, len(opening.tokens), Digest(opening.tokens))
        live = await self._follow(order, present)
        try:
            opened = await self._ask(replace(opening, session=session), session)
        except Exception as error:
            if isinstance(error, Unanswered):
                self._close_unanswered(live)
            else:  # refused, or heard by nobody
                await live.subscription.close()
            raise
        except BaseException:  # the caller was cancelled, the opening may still be served
            self._close_unanswered(live)
            raise
        order.opened(opened.epoch)
        return self._admit(live, opened)

    async def resume(self, resume: SessionResume, present: Callable[[], bool]) -> Live:
        """The reader begins at the client's position: what the store holds beyond it comes before what is new."""
        order = Order(resume.session, resume.position, Digest(None, resume.prefix_hash))
        live = await self._follow(order, present)
        try:
            opened = await self._ask(resume, resume.session)
        except NoResponders as error:
            await live.subscription.close()
            raise Unavailable(f"no batcher serves the model {self.model!r}", code="batcher_unavailable") from error
        except BaseException:
            await live.subscription.close()
            raise
        return self._admit(live, opened)

    async def _follow(self, order: Order, present: Callable[[], bool]) -> Live:
        if self.count >= MAX_SESSIONS:
            raise Overloaded(f"this gateway holds {MAX_SESSIONS} sessions, its bound", code="gateway_sessions")
        follower = Follower(
            order,
            self._service.sessions,
            self._service.metrics,
            missing=self.fleet.hopeless,
            on_epoch=lambda: self._speaker.announce(order.session),
        )
        subject = subjects.VERDICT.at(session=order.session)
        subscription = await self._bus.subscribe(subject, follower.on_verdict, Verdict)
        return Live(order.session, follower, subscription, present)

    async def _ask(self, message: SessionOpen | SessionResume, session: str) -> SessionOpened:
        subject = self._speaker.subject(session)
        try:
            answer = await self._bus.request(subject, message, timeout_s=OPEN_S)
        except RequestTimeout as error:
            raise Unanswered(f"the batcher did not answer within {OPEN_S:g} s", code="batcher_unavailable") from error
        except NoResponders:
            raise
        except BusError as error:
            raise Unavailable(f"the message bus is away: {error}", code="bus_unavailable") from error
        if not isinstance(answer, SessionOpened):
            raise Unavailable(f"the batcher answered with {type(answer).__name__}", code="batcher_unavailable")
        return answer

    def _admit(self, live: Live, opened: SessionOpened) -> Live:
        live.opened = opened
        self._speaker.add(live)
        return live

    @asynccontextmanager
    async def opened(self, openings: Sequence[SessionOpen]) -> AsyncIterator[list[Live]]:
        """All of them or none, in order; those that have not finished at the end are cancelled."""
        made: dict[int, Live] = {}

        async def one(index: int, opening: SessionOpen) -> None:
            made[index] = await self.open(opening)

        try:
            results = await asyncio.gather(*(one(*item) for item in enumerate(openings)), return_exceptions=True)
            for result in results:
                if result is not None:
                    raise result
            yield [made[index] for index in range(len(openings))]
        finally:
            for live in made.values():
                self.cancel(live)

    # --- ending ----------------------------------------------------------------------------------------------------

    def cancel(self, live: Live) -> None:
        """The client wants no more. Of a session that has finished only the reader ends."""
        if live.closing or live.over:
            return
        live.closing = True
        if live.follower.order.finish is not None:
            self.leave(live)
            return
        self._service.spawn(self._close(live, CLOSE_LIMIT_S), f"close {live.session}")

    def leave(self, live: Live) -> None:
        """Stop following; the session goes on without this client."""
        if live.over:
            return
        live.over = True
        self._speaker.remove(live)
        self._service.spawn(live.subscription.close(), f"leave {live.session}")

    def _close_unanswered(self, live: Live) -> None:
        live.closing = True
        self._service.spawn(self._close(live, UNANSWERED_LIMIT_S), f"close {live.session}")

    async def ask_to_close(self, live: Live) -> None:
        """Once; the reader sees the finish."""
        await self._speaker.close(live)

    async def _close(self, live: Live, limit_s: float) -> None:
        """SessionClose until a finish is seen. Bounded: later the batcher's own rules end the session."""
        deadline = time.monotonic() + limit_s
        try:
            while time.monotonic() < deadline:
                await self.ask_to_close(live)
                if await self._finished_soon(live):
                    return
            log.info("no finish seen", session=live.session, seconds=limit_s)
        finally:
            self.leave(live)

    async def _finished_soon(self, live: Live) -> bool:
        try:
            async with asyncio.timeout(CLOSE_EVERY_S):
                while (await live.follower.next()).finish is None:
                    pass
        except TimeoutError:
            return False
        except Conflict:  # not in the store: an opening that is still under way, or a history that is lost
            await asyncio.sleep(CLOSE_EVERY_S)
            return live.opened is not None
        except PacelineError as error:
            log.info("session given up", session=live.session, error=str(error))
            return True
        return True

    # --- the others --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Readiness: whether the components are there without which no answer can be made."""
        while True:
            missing = self.fleet.missing()
            for component in ("batcher", "verifier"):
                self._service.set_ready(component, component not in missing, missing.get(component, ""))
            await asyncio.sleep(WATCH_S)

    async def _on_status(self, received: Received) -> None:
        message = received.message
        if isinstance(message, VerifierStatus | BatcherStatus):
            self.fleet.heard(message)
        if not self.fleet.missing():
            self._heard.set()
