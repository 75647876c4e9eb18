"""The store on Redis 7 or Valkey. The only importer of redis.

Every operation is one Lua script (paceline.store_scripts) that may be repeated, so a broken connection is retried once
at once; then, or after OPERATION_S, it is a StoreError. The pool is bounded and waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import structlog
from redis import asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from paceline import keys
from paceline import store_scripts as scripts
from paceline.errors import Conflict, NotFound, StaleEpoch, StoreError
from paceline.store import Append, Appended, Rejected, SessionRecord
from paceline.store_record import appended, encoded, pack, record_of, static_of
from paceline.subjects import partition_of, token
from paceline.telemetry import STORE_ERRORS, STORE_SECONDS, Metrics

log = structlog.get_logger(__name__)
T = TypeVar("T")

OPERATION_S = 0.9
CONNECT_S = 0.5
CONNECTIONS = 32
_SESSION_KEYS = (keys.SESSION, keys.TOKENS, keys.KINDS, keys.LOGPROBS, keys.CONNECTION, keys.PLACEMENT)


class _Script:
    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


_CREATE = _Script(scripts.CREATE)
_APPEND = _Script(scripts.APPEND)
_LOAD = _Script(scripts.LOAD)
_CONNECTION = _Script(scripts.CONNECTION)
_PLACE = _Script(scripts.PLACE)
_ACQUIRE = _Script(scripts.ACQUIRE)
_RELEASE = _Script(scripts.RELEASE)
_HEARTBEAT = _Script(scripts.HEARTBEAT)

_Call = tuple[_Script, Sequence[str], Sequence[Any]]


class RedisStore:
    """SessionStore and LeaseStore. Make one with `connect`."""

    def __init__(self, client: redis.Redis, metrics: Metrics | None) -> None:
        self._redis = client
        self._metrics = metrics

    @classmethod
    async def connect(cls, url: str, metrics: Metrics | None = None) -> RedisStore:
        """Raises StoreError when the server does not answer."""
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=CONNECT_S,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=OPERATION_S,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 1),
            decode_responses=False,
        )
        store = cls(redis.Redis(connection_pool=pool), metrics)
        try:
            await store.ping()
        except StoreError:
            await store.close()
            raise
        return store

    async def ping(self) -> None:
        async def call() -> None:
            await self._redis.ping()

        await self._guarded("ping", call)

    async def close(self) -> None:
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()

    # --- sessions ---

    async def create(self, record: SessionRecord) -> None:
        names = [
            *(key.at(session=record.session) for key in _SESSION_KEYS[:3]),
            keys.CONNECTION.at(session=record.session),
        ]
        arguments = [
            record.session, record.secret, encoded(static_of(record)), record.epoch, record.prompt_length,
            encoded(record.counters), pack(record.tokens), record.kinds, record.connection, keys.LIVE_TTL_S,
        ]  # fmt: skip
        live = _live_key(record.opened.model, record.session)
        if await self._one("create", _CREATE, [*names, live], arguments) == b"other":
            raise Conflict(f"session {record.session} exists already")

    async def load(self, session: str) -> SessionRecord | None:
        return record_of(session, await self._one("load", _LOAD, _names(session), [""]))

    async def append(self, appends: Sequence[Append]) -> list[Appended | Rejected]:
        if not appends:
            return []
        return [appended(answer) for answer in await self._many("append", [_append_call(item) for item in appends])]

    async def adopt(self, session: str, epoch: int) -> SessionRecord | None:
        return record_of(session, await self._one("adopt", _LOAD, _names(session), [epoch]))

    async def next_connection(self, session: str) -> int:
        names = [keys.SESSION.at(session=session), keys.CONNECTION.at(session=session)]
        number = int(await self._one("connection", _CONNECTION, names, []))
        if number == 0:
            raise NotFound(f"no session {session}")
        return number

    async def place(self, session: str, epoch: int, verifier: str) -> None:
        names = [keys.SESSION.at(session=session), keys.PLACEMENT.at(session=session)]
        status, stored = await self._one("place", _PLACE, names, [epoch, verifier])
        if status == b"missing":
            raise NotFound(f"no session {session}")
        if status == b"stale_epoch":
            raise StaleEpoch(f"session {session} is at epoch {int(stored)}, above {epoch}")

    async def live(self, model: str, partition: int) -> list[str]:
        name = keys.LIVE.at(model=token(model), partition=partition)
        found, known = await self._guarded("live", lambda: self._known_members(name))
        gone = [session for session in found if session not in known]
        if gone:  # its record expired, or was lost with the store's last second
            await self._guarded("live", lambda: self._remove(name, gone))
        return sorted(known)

    # --- leases ---

    async def acquire(self, model: str, partitions: Sequence[int], owner: str, ttl_s: float) -> dict[int, int]:
        if not partitions:
            return {}
        names = [
            key.at(model=token(model), partition=partition)
            for partition in partitions
            for key in (keys.LEASE, keys.OWNER)
        ]
        epochs = await self._one("lease", _ACQUIRE, names, [owner, int(ttl_s * 1000)])
        return {partition: int(epoch) for partition, epoch in zip(partitions, epochs, strict=True) if epoch}

    async def release(self, model: str, partitions: Sequence[int], owner: str) -> None:
        if partitions:
            names = [keys.LEASE.at(model=token(model), partition=partition) for partition in partitions]
            await self._one("lease", _RELEASE, names, [owner])

    async def heartbeat(self, model: str, owner: str, ttl_s: float) -> int:
        name = keys.BATCHERS.at(model=token(model))
        return int(await self._one("heartbeat", _HEARTBEAT, [name], [owner, int(ttl_s * 1000)]))

    async def draining(self, model: str) -> set[str]:
        return set(await self._guarded("draining", lambda: self._members(keys.DRAINING.at(model=token(model)))))

    async def set_draining(self, model: str, verifier: str, on: bool) -> None:
        name = keys.DRAINING.at(model=token(model))

        async def call() -> None:
            await _awaited(self._redis.sadd(name, verifier) if on else self._redis.srem(name, verifier))

        await self._guarded("draining", call)

    # --- calls ---

    async def _members(self, name: str) -> list[str]:
        return sorted(member.decode() for member in await _awaited(self._redis.smembers(name)))

    async def _known_members(self, name: str) -> tuple[list[str], set[str]]:
        """Members of a live set, and those whose record exists."""
        found = await self._members(name)
        async with self._redis.pipeline(transaction=False) as pipe:
            for session in found:
                pipe.exists(keys.SESSION.at(session=session))
            exist = await pipe.execute()
        return found, {session for session, there in zip(found, exist, strict=True) if there}

    async def _remove(self, name: str, members: list[str]) -> None:
        await _awaited(self._redis.srem(name, *members))

    async def _one(self, operation: str, script: _Script, names: Sequence[str], arguments: Sequence[Any]) -> Any:
        return (await self._many(operation, [(script, names, arguments)]))[0]

    async def _many(self, operation: str, calls: Sequence[_Call]) -> list[Any]:
        """The answers of the scripts, sent in one pipeline. Raises the first error among them."""
        answers = await self._guarded(operation, lambda: self._pipeline(calls)) if calls else []
        for answer in answers:
            if isinstance(answer, Exception):
                self._failed(operation, answer)
                raise StoreError(f"{operation}: {answer}") from answer
        return answers

    async def _pipeline(self, calls: Sequence[_Call]) -> list[Any]:
        answers = await self._sent(calls)
        if any(isinstance(answer, NoScriptError) for answer in answers):  # a new server, or one that was restarted
            for script in {call[0] for call in calls}:
                await self._redis.script_load(script.text)
            answers = await self._sent(calls)
        return answers

    async def _sent(self, calls: Sequence[_Call]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for script, names, arguments in calls:
                pipe.evalsha(script.sha, len(names), *names, *arguments)
            return await pipe.execute(raise_on_error=False)

    async def _guarded(self, operation: str, call: Callable[[], Awaitable[T]]) -> T:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(OPERATION_S):
                result = await call()
        except (RedisError, OSError, TimeoutError) as error:
            self._failed(operation, error)
            raise StoreError(f"{operation}: {error or 'no answer in time'}") from error
        if self._metrics is not None:
            self._metrics.observe(STORE_SECONDS, time.perf_counter() - started, operation=operation)
        return result

    def _failed(self, operation: str, error: Exception) -> None:
        log.debug("store operation failed", operation=operation, error=repr(error))
        if self._metrics is not None:
            self._metrics.add(STORE_ERRORS)


async def _awaited(value: Awaitable[Any] | Any) -> Any:
    """redis-py types its commands as awaitable or not; ours always are."""
    return await value


def _names(session: str) -> list[str]:
    return [key.at(session=session) for key in _SESSION_KEYS]


def _live_key(model: str, session: str) -> str:
    return keys.LIVE.at(model=token(model), partition=partition_of(session))


def _append_call(item: Append) -> _Call:
    arguments = [
        item.session, item.epoch, item.at, pack(item.tokens), item.kinds, encoded(item.counters), item.finish or "",
        keys.LIVE_TTL_S, keys.FINISHED_TTL_S, *(encoded(entry) for entry in item.logprobs or ()),
    ]  # fmt: skip
    return _APPEND, [*_names(item.session), _live_key(item.model, item.session)], arguments
