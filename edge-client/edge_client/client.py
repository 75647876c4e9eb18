"""The edge library: many sessions over one link to a gateway.

    async with EdgeClient.connect(url, key, card=card, engine=engine) as client:
        async for event in client.generate(Request(tokens=client.chat([{"role": "user", "content": "Hello"}]))):
            ...

Sessions outlive the link: when it is cut, it is dialled again and each session goes on at its next token.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from edge_client.api import GatewayApi
from edge_client.calibrations import PairCalibration
from edge_client.events import Event
from edge_client.faults import LinkDown, failure_of
from edge_client.link import Link, LinkOptions
from edge_client.request import Request
from edge_client.session import EdgeSession
from paceline import wire
from paceline.engine import DraftEngine
from paceline.errors import PacelineError, Unavailable
from paceline.model_card import ModelCard
from paceline.tokenizer import Tokenizer

__all__ = ["EdgeClient", "EdgeSession", "LinkOptions", "Request"]

_log = structlog.get_logger("paceline.edge.client")
ANSWER_WITHIN_S = 30.0
MAX_EARLY = 64


@dataclass
class _Asked:
    """The one opening or resume that waits for its answer. early: verdicts that overtook it."""

    session: EdgeSession
    answer: asyncio.Future[None]
    early: deque[tuple[wire.Verdict, float, int]] = field(default_factory=lambda: deque(maxlen=MAX_EARLY))


class EdgeClient:
    """Made by `connect`. `card` is the target's; `engine` drafts for all sessions (None: no drafts from here)."""

    def __init__(self, card: ModelCard, engine: DraftEngine | None, options: LinkOptions) -> None:
        self.card = card
        self.tokenizer = Tokenizer(card)
        self.options = options
        self.calibration = PairCalibration(card)
        self._engine = engine
        self._link: Link | None = None
        self._up = asyncio.Event()
        self._lost: PacelineError | None = None
        self._sessions: dict[str, EdgeSession] = {}
        self._asked: _Asked | None = None
        self._asking = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        url: str,
        key: str,
        *,
        card: ModelCard | None = None,
        model: str = "smollm2",
        engine: DraftEngine | None = None,
        cards: Path | None = None,
        options: LinkOptions | None = None,
    ) -> AsyncIterator[EdgeClient]:
        """Without `card` it is fetched for `model`, through the cache directory `cards`. Raises Unauthorized, NotFound,
        Unavailable."""
        async with aiohttp.ClientSession() as http:
            known = card or await GatewayApi(http, url, key).card(model, cards)
            client = cls(known, engine, options or LinkOptions())
            async with Link(http, url, key, client, client.options) as link:
                client._link = link
                client._up.set()
                try:
                    yield client
                finally:
                    client.link_lost(Unavailable("the client was closed"))
                    client.calibration.save(at_once=True)

    def chat(self, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        """Token ids of a conversation in the target's template, open for the assistant's turn."""
        return tuple(self.tokenizer.chat(list(messages)))

    def session(self, request: Request, *, drafts: bool = False) -> EdgeSession:
        """`drafts`: Drafted events as well."""
        return EdgeSession(self, request, self.tokenizer, self._engine, drafts=drafts)

    async def generate(self, request: Request, *, drafts: bool = False) -> AsyncIterator[Event]:
        """Events until Finished. Close the generator (contextlib.aclosing) to cancel early."""
        async with self.session(request, drafts=drafts) as session:
            async for event in session:
                yield event

    # --- Line, for the sessions --------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        return self._lost is None and self._link is not None and self._link.is_up

    @property
    def round_trip_ms(self) -> float | None:
        return None if self._link is None else self._link.round_trip_ms

    async def send(self, message: wire.Message) -> int:
        if self._link is None:
            raise LinkDown("there is no link")
        return await self._link.send(message)

    async def ask(self, message: wire.SessionOpen | wire.SessionResume, session: EdgeSession) -> None:
        async with self._asking:  # answers to openings carry no name: one at a time
            await self._up.wait()
            if self._lost is not None:
                raise self._lost
            self._asked = asked = _Asked(session, asyncio.get_running_loop().create_future())
            try:
                await self._sent(message)
                await self._answered(asked)
            finally:
                self._asked = None

    async def _sent(self, message: wire.Message) -> None:
        try:
            await self.send(message)
        except LinkDown:
            self._up.clear()  # the reader notices a moment later; until it has dialled again nothing can be asked
            raise

    async def _answered(self, asked: _Asked) -> None:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await asked.answer
        except TimeoutError as error:
            raise Unavailable(f"the gateway gave no answer within {ANSWER_WITHIN_S:.0f} s") from error
        finally:
            if not asked.answer.done() or asked.answer.cancelled():
                self._forsake()

    def _forsake(self) -> None:
        """Nobody waits for the answer any more, yet it may come and be taken for that of the next opening: a new
        connection cannot bring it, and what the gateway opened for the old one is parked and cancelled."""
        if self._link is not None:
            self._link.reset()

    def leave(self, session: str) -> None:
        self._sessions.pop(session, None)
        self.calibration.save()

    # --- Listener, for the link --------------------------------------------------------------------------------------

    def link_up(self) -> None:
        self._up.set()

    def link_down(self, reason: str) -> None:
        self._up.clear()
        self._answer(LinkDown(reason))
        for session in list(self._sessions.values()):
            session.link_down(reason, time.monotonic())

    def link_lost(self, error: PacelineError) -> None:
        self._lost = error
        self._up.set()
        self._answer(error)
        for session in list(self._sessions.values()):
            session.link_lost(error)

    def frame(self, message: wire.Message, t: float, size: int) -> None:
        if isinstance(message, wire.Verdict):
            self._verdict(message, t, size)
        elif isinstance(message, wire.SessionOpened):
            self._opened(message, t)
        elif isinstance(message, wire.Refused):
            self._refused(message)
        else:
            _log.warning("an unexpected message", kind=type(message).__name__)

    def _verdict(self, verdict: wire.Verdict, t: float, size: int) -> None:
        session = self._sessions.get(verdict.session)
        if session is not None:
            session.verdict(verdict, t, size)
        elif self._asked is not None:
            self._asked.early.append((verdict, t, size))

    def _opened(self, opened: wire.SessionOpened, t: float) -> None:
        asked = self._asked
        if asked is None or asked.answer.done() or not asked.session.expects(opened.session):
            _log.warning("an answer that nobody waits for", session=opened.session)
            return
        self._sessions[opened.session] = asked.session
        asked.session.attached(opened, t)
        asked.answer.set_result(None)
        for verdict, came, size in asked.early:
            if verdict.session == opened.session:
                asked.session.verdict(verdict, came, size)

    def _refused(self, refused: wire.Refused) -> None:
        asked, error = self._asked, failure_of(refused)
        live = None if refused.session is None else self._sessions.get(refused.session)
        if asked is not None and (refused.session is None or asked.session is live):
            self._answer(error)
        elif live is not None:
            live.refused(error)
        else:
            _log.warning("refused", code=error.code, error=error.message)

    def _answer(self, error: PacelineError) -> None:
        if self._asked is not None and not self._asked.answer.done():
            self._asked.answer.set_exception(error)
