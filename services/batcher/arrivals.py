"""Sessions begin here, or go on here: from a record to a live session."""

from __future__ import annotations

import time
from typing import Protocol

import structlog

from paceline.ends import Ends
from paceline.errors import StaleEpoch
from paceline.model_card import ModelCard
from paceline.service import Service
from paceline.session import Session
from paceline.store import SessionRecord
from paceline.subjects import partition_of
from paceline.tokenizer import Tokenizer
from paceline.trust import Trust
from services.batcher.commit import Committer
from services.batcher.leases import Leases
from services.batcher.live import Live, Table
from services.batcher.presence import Presence

log = structlog.get_logger("batcher")


class House(Protocol):
    """Where live sessions live."""

    table: Table
    leases: Leases
    committer: Committer
    trust: Trust

    def enter(self, live: Live) -> None: ...


class Arrivals:
    def __init__(self, service: Service, house: House, card: ModelCard) -> None:
        self._service = service
        self._house = house
        self._card = card
        self._tokenizer = Tokenizer(card)

    def begin(self, record: SessionRecord, partition: int, headers: dict[str, str], *, present: bool) -> Live | None:
        """The session lives here from now on, parked until its client is heard unless it is `present`. None when the
        partition went to another owner meanwhile: that one finds the record."""
        house, now = self._house, time.monotonic()
        if house.leases.epoch(partition) != record.epoch:
            return None
        settings = self._service.settings
        presence = Presence(settings.presence_ttl_s, settings.parked_ttl_s, since=now, connection=record.connection)
        if present:
            presence.bind(record.connection, now)
        ends = Ends(self._tokenizer.token_bytes, self._card.end_ids, record.opened.stop, record.max_tokens)
        session = Session(record, ends, vocabulary=self._card.vocabulary)
        session.parked = not present
        traced = {name: value for name, value in headers.items() if name == "traceparent"}
        live = Live(session, partition, presence, traced, house.trust.for_session())
        if record.verifier is not None:  # it may hold the KV still; if not, it says so
            live.verifier, live.fed = record.verifier, record.tip
        house.enter(live)
        return live

    async def find(self, session: str) -> Live | SessionRecord | None:
        """The session, from the store if need be; a bare record when it has finished. Raises StoreError, StaleEpoch."""
        live = self._house.table.get(session)
        if live is not None:
            return live
        partition = partition_of(session)
        epoch = self._house.leases.epoch(partition)
        if epoch is None:
            raise StaleEpoch(f"partition {partition} is not ours")
        record = await self._service.sessions.adopt(session, epoch)
        if record is None or record.finish is not None:
            return record
        live = self._house.table.get(session) or self.begin(record, partition, {}, present=False)
        if live is None:
            raise StaleEpoch(f"partition {partition} is not ours any more")
        await self._house.committer.announce(live)
        return live

    async def recover(self, partition: int, epoch: int) -> None:
        """Go on with every unfinished session of a partition that is ours now. Raises StoreError."""
        for session in await self._service.sessions.live(self._card.model, partition):
            if self._house.leases.epoch(partition) != epoch:
                return
            try:
                await self.find(session)
            except StaleEpoch as error:  # the others of the partition are not to wait for this one
                log.warning("session not taken over", session=session, error=str(error))
