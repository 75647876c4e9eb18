"""Fixtures with the real NATS and Valkey servers, on free ports, waited for. A missing program fails the run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from paceline.processes import Child, free_ports, nats_command, nats_ready, redis_command, redis_ready
from paceline.settings import child_environment

READY_S = 20.0


class Server:
    """A server that tests may stop, kill, freeze and start again: same port, same data."""

    def __init__(self, child: Child, url: str) -> None:
        self.child = child
        self.url = url

    async def start(self) -> None:
        self.child.start()
        await self.child.wait_ready(READY_S)

    async def stop(self) -> None:
        await self.child.stop()

    async def kill(self) -> None:
        await self.child.kill()

    def signal(self, number: int) -> None:
        self.child.signal(number)


def nats(folder: Path) -> Server:
    port = free_ports(1)[0]
    command = nats_command(port, folder / "nats")
    child = Child("nats", command, child_environment({}), folder / "nats.log", nats_ready(port), {"nats": port})
    return Server(child, f"nats://127.0.0.1:{port}")


def redis(folder: Path) -> Server:
    port = free_ports(1)[0]
    command = redis_command(port, folder / "redis")
    child = Child("redis", command, child_environment({}), folder / "redis.log", redis_ready(port), {"redis": port})
    return Server(child, f"redis://127.0.0.1:{port}/0")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _nats(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    server = nats(tmp_path_factory.mktemp("nats"))
    await server.start()
    yield server
    await server.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _redis(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    server = redis(tmp_path_factory.mktemp("redis"))
    await server.start()
    yield server
    await server.stop()


@pytest.fixture(scope="session")
def nats_server(_nats: Server) -> str:
    """URL of a NATS server that all tests share; never stopped by a test."""
    return _nats.url


@pytest.fixture(scope="session")
def redis_server(_redis: Server) -> str:
    """URL of a Valkey server that all tests share (append-only, every write synced); never stopped by a test."""
    return _redis.url


@pytest_asyncio.fixture
async def own_nats(tmp_path: Path) -> AsyncIterator[Server]:
    """A NATS server of this test alone."""
    server = nats(tmp_path)
    await server.start()
    yield server
    await server.stop()


@pytest_asyncio.fixture
async def own_redis(tmp_path: Path) -> AsyncIterator[Server]:
    """A Valkey server of this test alone."""
    server = redis(tmp_path)
    await server.start()
    yield server
    await server.stop()
