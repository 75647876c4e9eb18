"""One WebSocket of one edge device, carrying any number of its sessions: frames in, frames out.

Frames are wire messages with short names, text, deflated. What is wrong with a frame is answered with Refused and ends
nothing. A session belongs to the connection that opened or resumed it; when that is lost the session is let go, the
batcher parks it, and the edge may resume it over a new one. An edge whose session was resumed elsewhere is told
`superseded`, and hears no more of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from aiohttp import WSMessage, WSMsgType, web
from msgspec.structs import replace

from paceline import subjects, telemetry
from paceline.bus_delivery import refusal
from paceline.errors import BadRequest, BusError, Conflict, NotFound, Overloaded, RequestError
from paceline.service import Service
from paceline.wire import (
    DraftBlock,
    Failure,
    Message,
    Ping,
    Pong,
    SessionClose,
    SessionOpen,
    SessionResume,
    Verdict,
    Welcome,
    decode_wan,
    encode_wan,
)
from services.gateway.edge_frames import EdgeView
from services.gateway.live import Live
from services.gateway.sessions import Sessions
from services.gateway.tenants import Tenant

log = structlog.get_logger(__name__)

SILENT_S = 10.0
"""An edge that sends nothing for this long (it pings every half second) is gone."""
HEARD_S = 1.0
"""Bytes within this time make the edge present."""
PING_S = 0.5
SEND_S = 10.0
"""A socket that takes nothing for this long is cut."""
FRAMES = 64
"""Frames that wait for the socket; beyond that the sessions' readers wait, and what they miss comes from the store."""
OPENINGS = 16
SESSIONS = 64
_SUPERSEDED = Conflict("another connection resumed this session", code="superseded")


@dataclass(eq=False)
class Bound:
    """A session of this connection and the task that passes its verdicts on."""

    live: Live
    task: asyncio.Task[None] | None = None


@dataclass(eq=False)
class EdgeConnection:
    """One WebSocket. `run` returns when it is over."""

    service: Service
    sessions: Sessions
    socket: web.WebSocketResponse
    tenant: Tenant
    abort: Callable[[], None]
    bound: dict[str, Bound] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._heard = time.monotonic()
        self._frames: asyncio.Queue[Message] = asyncio.Queue(FRAMES)
        self._openings: asyncio.Queue[SessionOpen | SessionResume] = asyncio.Queue(OPENINGS)
        self._past: deque[str] = deque(maxlen=SESSIONS)
        self._resuming: str | None = None

    @property
    def present(self) -> bool:
        return time.monotonic() - self._heard < HEARD_S

    @property
    def silent(self) -> bool:
        return time.monotonic() - self._heard > SILENT_S

    async def run(self) -> None:
        await self._frames.put(Welcome(tenant=self.tenant.name))
        helpers = [
            asyncio.create_task(self._write(), name="edge writer"),
            asyncio.create_task(self._open_in_turn(), name="edge openings"),
        ]
        try:
            await self._read()
        finally:
            helpers += [bound.task for bound in self.bound.values() if bound.task is not None]
            for bound in self.bound.values():
                self.sessions.leave(bound.live)
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    # --- frames in -------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        async for frame in self.socket:
            self._heard = time.monotonic()
            if frame.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                return
            await self._take(frame)

    async def _take(self, frame: WSMessage) -> None:
        """One frame; what is wrong with it is told, and is the end of nothing."""
        session = None
        try:
            message = self._decoded(frame)
            session = getattr(message, "session", None)
            await self._dispatch(message)
        except RequestError as error:
            self._refuse(error, session)
        except BusError as error:  # drafts and closings are sent again by the edge
            log.debug("frame not passed on", error=str(error))

    def _decoded(self, frame: WSMessage) -> Message:
        data = frame.data.encode() if isinstance(frame.data, str) else frame.data
        self.service.metrics.add(telemetry.WAN_BYTES, len(data), direction="up")
        return decode_wan(data, DraftBlock, SessionOpen, SessionResume, SessionClose, Ping)

    async def _dispatch(self, message: Message) -> None:
        if isinstance(message, Ping):
            await self._frames.put(Pong(t_sent=message.t_sent))
        elif isinstance(message, SessionOpen | SessionResume):
            self._enqueue(message)
        elif isinstance(message, DraftBlock | SessionClose) and message.session not in self._past:
            bound = self._own(message.session)
            if isinstance(message, DraftBlock):
                await self._draft(bound, message)
            else:
                await self.sessions.ask_to_close(bound.live)

    async def _draft(self, bound: Bound, block: DraftBlock) -> None:
        if block.source != "edge":
            raise BadRequest(f"an edge's drafts have the source `edge`, not `{block.source}`", param="source")
        sent = replace(block, connection=bound.live.connection, t_received=time.time())
        partition = subjects.partition_of(block.session)
        await self.service.bus.publish(subjects.DRAFT.at(model=self.sessions.model, partition=partition), sent)

    def _own(self, session: str) -> Bound:
        bound = self.bound.get(session)
        if bound is None:
            self.service.metrics.add(telemetry.DROPPED_TOKENS, reason="refused")
            raise NotFound("no live session of this connection has that id", code="unknown_session", param="session")
        return bound

    def _enqueue(self, message: SessionOpen | SessionResume) -> None:
        """Openings are answered in the order in which they came."""
        if len(self.bound) + self._openings.qsize() >= SESSIONS:
            raise Overloaded(f"a connection carries at most {SESSIONS} sessions", code="connection_sessions")
        try:
            self._openings.put_nowait(message)
        except asyncio.QueueFull:
            raise Overloaded(f"at most {OPENINGS} openings may wait", code="connection_openings") from None

    # --- sessions --------------------------------------------------------------------------------------------------

    async def _open_in_turn(self) -> None:
        while True:
            message = await self._openings.get()
            try:
                with telemetry.tracer.start_as_current_span(telemetry.SPAN_EDGE_SESSION):
                    self._follow(await self._opened(message))
            except RequestError as error:
                self._refuse(error, message.session if isinstance(message, SessionResume) else None)
            except Exception:
                log.exception("opening failed")
                self._refuse(RequestError("internal error; the gateway's log has the details"), None)
            finally:
                self._resuming = None

    async def _opened(self, message: SessionOpen | SessionResume) -> Live:
        await self.sessions.require_components()
        if isinstance(message, SessionResume):
            self._resuming = message.session
            resume = replace(message, tenant=self.tenant.name)
            return await self.sessions.resume(resume, lambda: self.present)
        if message.model != self.sessions.model:
            raise NotFound(f"the model {message.model!r} is not served here", code="model_not_found", param="model")
        return await self.sessions.open(replace(message, tenant=self.tenant.name), lambda: self.present)

    def _follow(self, live: Live) -> None:
        """A session that is resumed over the connection that has it is followed anew."""
        with contextlib.suppress(ValueError):
            self._past.remove(live.session)
        before = self.bound.pop(live.session, None)
        if before is not None and before.task is not None:
            before.task.cancel()
            self.sessions.leave(before.live)
        bound = self.bound[live.session] = Bound(live)
        bound.task = asyncio.create_task(self._pass_on(bound), name=f"edge {live.session}")

    async def _pass_on(self, bound: Bound) -> None:
        live, view = bound.live, EdgeView()
        if live.opened is not None:
            await self._frames.put(live.opened)
        try:
            while live.follower.order.finish is None:
                verdict = await live.follower.next()
                if self._superseded(live, verdict):
                    await self._frames.put(replace(refusal(_SUPERSEDED), session=live.session))
                    break
                shown = view.see(verdict)
                if shown is not None:
                    await self._frames.put(shown)
        except RequestError as error:
            await self._frames.put(_ended(live, error))
        except Exception as error:
            log.exception("following failed", session=live.session)
            await self._frames.put(_ended(live, RequestError(f"internal error: {type(error).__name__}")))
        if self.bound.get(live.session) is bound:
            del self.bound[live.session]
            self._past.append(live.session)  # what was on its way when the session ended is no fault
        self.sessions.leave(live)

    def _superseded(self, live: Live, verdict: Verdict) -> bool:
        """Not by a resume over this connection: that one takes the reader's place."""
        return verdict.connection > live.connection and live.session != self._resuming

    # --- frames out ------------------------------------------------------------------------------------------------

    def _refuse(self, error: RequestError, session: str | None) -> None:
        """Refusals are not worth waiting for: an edge that floods and does not read misses some."""
        with contextlib.suppress(asyncio.QueueFull):
            self._frames.put_nowait(replace(refusal(error), session=session))

    async def _next_frame(self) -> Message:
        """A ping where there is nothing to send: an edge whose upload is slow hears that the link lives."""
        try:
            async with asyncio.timeout(PING_S):
                return await self._frames.get()
        except TimeoutError:
            return Ping(t_sent=int(time.monotonic() * 1000))

    async def _write(self) -> None:
        """The one writer. A socket that takes nothing for SEND_S is cut."""
        try:
            while True:
                data = encode_wan(await self._next_frame())
                self.service.metrics.add(telemetry.WAN_BYTES, len(data), direction="down")
                async with asyncio.timeout(SEND_S):
                    await self.socket.send_frame(data, WSMsgType.TEXT)
        except TimeoutError:
            log.info("edge reads too slowly", tenant=self.tenant.name, seconds=SEND_S)
            self.abort()
        except ConnectionError:
            self.abort()


def _ended(live: Live, error: RequestError) -> Verdict:
    failure = Failure(status=error.status, code=error.code, message=error.message, param=error.param)
    order = live.follower.order
    return Verdict(session=live.session, epoch=order.epoch, at=order.position, finish="error", error=failure)
