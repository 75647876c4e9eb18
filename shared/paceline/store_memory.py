"""The store within one process: the same answers as store_redis, for tests and single-process use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.errors import Conflict, NotFound, StaleEpoch, StoreError
from paceline.store import Append, Appended, Rejected, SessionRecord
from paceline.subjects import partition_of


class MemoryStore:
    """SessionStore and LeaseStore. `away = True` plays an outage: every call raises StoreError."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.away = False
        self._clock = clock
        self._records: dict[str, SessionRecord] = {}
        self._leases: dict[tuple[str, int], tuple[str, float]] = {}
        self._owners: dict[tuple[str, int], tuple[str, int]] = {}
        self._batchers: dict[str, dict[str, float]] = {}
        self._draining: dict[str, set[str]] = {}

    # --- sessions ---

    async def create(self, record: SessionRecord) -> None:
        self._check()
        known = self._records.setdefault(record.session, record)
        if known.secret != record.secret:
            raise Conflict(f"session {record.session} exists already")

    async def load(self, session: str) -> SessionRecord | None:
        self._check()
        return self._records.get(session)

    async def append(self, appends: Sequence[Append]) -> list[Appended | Rejected]:
        self._check()
        return [self._append(item) for item in appends]

    async def adopt(self, session: str, epoch: int) -> SessionRecord | None:
        self._check()
        record = self._records.get(session)
        if record is None:
            return None
        self._fence(record, epoch)
        self._records[session] = replace(record, epoch=epoch)
        return self._records[session]

    async def next_connection(self, session: str) -> int:
        self._check()
        record = self._known(session)
        self._records[session] = replace(record, connection=record.connection + 1)
        return record.connection + 1

    async def place(self, session: str, epoch: int, verifier: str) -> None:
        self._check()
        record = self._known(session)
        self._fence(record, epoch)
        self._records[session] = replace(record, verifier=verifier)

    async def live(self, model: str, partition: int) -> list[str]:
        self._check()
        return sorted(
            record.session
            for record in self._records.values()
            if record.finish is None and record.opened.model == model and partition_of(record.session) == partition
        )

    def _append(self, item: Append) -> Appended | Rejected:
        record = self._records.get(item.session)
        if record is None:
            return Rejected("missing")
        if record.finish is not None or (item.epoch >= record.epoch and record.tip > item.at):
            kinds = record.kinds[max(0, item.at - record.prompt_length) :]
            return Appended(record.tokens[item.at :], kinds, record.finish)
        if item.epoch < record.epoch:
            return Rejected("stale_epoch", record.tip, record.epoch)
        if record.tip < item.at:
            return Rejected("gap", record.tip, record.epoch)
        self._records[item.session] = replace(
            record,
            epoch=item.epoch,
            tokens=record.tokens + item.tokens,
            kinds=record.kinds + item.kinds,
            logprobs=record.logprobs + (item.logprobs or ()),
            counters=item.counters,
            finish=item.finish,
        )
        return Appended(item.tokens, item.kinds, item.finish)

    def _known(self, session: str) -> SessionRecord:
        record = self._records.get(session)
        if record is None:
            raise NotFound(f"no session {session}")
        return record

    @staticmethod
    def _fence(record: SessionRecord, epoch: int) -> None:
        if record.epoch > epoch:
            raise StaleEpoch(f"session {record.session} is at epoch {record.epoch}, above {epoch}")

    # --- leases ---

    async def acquire(self, model: str, partitions: Sequence[int], owner: str, ttl_s: float) -> dict[int, int]:
        self._check()
        now = self._clock()
        held: dict[int, int] = {}
        for partition in partitions:
            key = (model, partition)
            holder, until = self._leases.get(key, ("", 0.0))
            if holder != owner and until > now:
                continue
            last, epoch = self._owners.get(key, ("", 0))
            if last != owner:
                epoch = max(epoch + 1, int(now * 1e6))
                self._owners[key] = (owner, epoch)
            self._leases[key] = (owner, now + ttl_s)
            held[partition] = epoch
        return held

    async def release(self, model: str, partitions: Sequence[int], owner: str) -> None:
        self._check()
        for partition in partitions:
            if self._leases.get((model, partition), ("", 0.0))[0] == owner:
                del self._leases[(model, partition)]

    async def heartbeat(self, model: str, owner: str, ttl_s: float) -> int:
        self._check()
        now = self._clock()
        batchers = self._batchers.setdefault(model, {})
        batchers[owner] = now + ttl_s
        self._batchers[model] = {name: until for name, until in batchers.items() if until > now}
        return len(self._batchers[model])

    async def draining(self, model: str) -> set[str]:
        self._check()
        return set(self._draining.get(model, ()))

    async def set_draining(self, model: str, verifier: str, on: bool) -> None:
        self._check()
        names = self._draining.setdefault(model, set())
        if on:
            names.add(verifier)
        else:
            names.discard(verifier)

    # --- the connection, as RedisStore has it ---

    async def ping(self) -> None:
        self._check()

    async def close(self) -> None:
        """Nothing to close."""

    def _check(self) -> None:
        if self.away:
            raise StoreError("the state store is away")
