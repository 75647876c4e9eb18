"""The draft loop of one session and its way out: blocks go over the link while the session is bound to it.

The text never depends on drafts: whatever goes wrong here, the cloud goes on by itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine

import structlog

from edge_client.faults import LinkDown
from edge_client.stats import Tally
from paceline import wire
from paceline.calibration import Calibrated
from paceline.drafting import DraftEvent, DraftLoop, DraftStats
from paceline.engine import DraftEngine, Rule
from paceline.errors import EngineError
from paceline.pass_costs import PassCosts

_log = structlog.get_logger("paceline.edge.feed")


class DraftFeed:
    """`send` puts a message on the link and returns its size in bytes; it may raise LinkDown."""

    def __init__(
        self,
        engine: DraftEngine | None,
        tally: Tally,
        send: Callable[[wire.Message], Awaitable[int]],
        on_draft: Callable[[DraftEvent], None] | None,
        *,
        calibration: Calibrated | None = None,
        costs: PassCosts | None = None,
    ) -> None:
        self.bound = False
        """Whether the gateway takes this session's blocks now."""
        self._engine, self._tally, self._send_message, self._on_draft = engine, tally, send, on_draft
        self._calibration, self._costs = calibration, costs
        self._loop: DraftLoop | None = None

    @property
    def stats(self) -> DraftStats | None:
        return None if self._loop is None else self._loop.stats

    async def read_prompt(self, asked: wire.SessionOpen) -> None:
        """The draft model reads the prompt while the opening is on its way; the session shares what was read. What goes
        wrong here shows when the session itself drafts."""
        if self._engine is None or not asked.speculation.enabled:
            return
        key, rule = f"prompt {id(self)}", Rule(asked.sampling, asked.seed or 0, len(asked.tokens), asked.choice)
        try:
            await self._engine.guess(key, asked.tokens, rule)
        except EngineError as error:
            _log.debug("prompt not read ahead", error=str(error))
        finally:
            self._engine.release(key)

    def begin(self, asked: wire.SessionOpen, opened: wire.SessionOpened) -> Coroutine[object, object, None] | None:
        """What drafts until the session ends; None where nothing is to be drafted here."""
        if self._engine is None or not opened.speculation.enabled:
            return None
        self._loop = loop = DraftLoop(
            engine=self._engine,
            source="edge",
            session=opened.session,
            connection=opened.connection,
            tokens=asked.tokens,
            rule=Rule(asked.sampling, opened.seed, opened.prompt_length, asked.choice),
            speculation=opened.speculation,
            bounds=opened.bounds,
            limit=opened.prompt_length + opened.max_tokens,
            send=self._send,
            on_draft=self._on_draft,
            calibration=self._calibration,
            costs=self._costs,
        )
        return self._run(loop)

    def on_verdict(self, verdict: wire.Verdict) -> None:
        if self._loop is not None:
            self._loop.on_verdict(verdict)

    def on_reconnected(self, opened: wire.SessionOpened) -> None:
        if self._loop is not None:
            self._loop.on_reconnected(opened.connection, opened.position)

    async def _run(self, loop: DraftLoop) -> None:
        try:
            await loop.run()
        except Exception:
            self._tally.drafting_failed = True
            _log.exception("drafting failed; going on without drafts")

    async def _send(self, block: wire.DraftBlock) -> None:
        """Without a link a block is dropped: on the reconnection the loop sends what lives as a new incarnation."""
        if not self.bound:
            self._tally.unsent_blocks += 1
            return
        try:
            size = await self._send_message(block)
        except LinkDown:
            self._tally.unsent_blocks += 1
            return
        self._tally.block_sent(size, sum(len(chain.tokens) for chain in block.chains))
