"""The frame of a process, run as a real process: signals, exit codes, readiness, a bounded way down."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from paceline.bus_memory import MemoryBus
from paceline.processes import Child, free_ports, http_ready
from paceline.service import Service
from paceline.settings import Settings, child_environment
from paceline.store_memory import MemoryStore
from paceline.telemetry import READY

PROGRAM = """
import asyncio
from contextlib import asynccontextmanager
from paceline.service import Service, main

@asynccontextmanager
async def body(service: Service):
    service.set_ready("engine", True)
{inside}

main("test", body)
"""
PLAIN = "    yield\n    print('left in order', flush=True)"
SLOW_EXIT = "    yield\n    await asyncio.sleep(60)"
SLOW_ENTRY = "    print('entering', flush=True)\n    await asyncio.sleep(60)\n    yield"
BROKEN_TASK = """
    async def work():
        await asyncio.sleep(0.2)
        raise ZeroDivisionError("in a task")
    service.spawn(work(), "work")
    yield"""
BROKEN_ENTRY = "    raise ZeroDivisionError('on entry')\n    yield"


class Running:
    def __init__(self, child: Child, port: int) -> None:
        self.child = child
        self.url = f"http://127.0.0.1:{port}"

    async def code(self, timeout_s: float = 20.0) -> int:
        assert self.child.process is not None
        return await asyncio.to_thread(self.child.process.wait, timeout_s)


@pytest_asyncio.fixture
async def launch(tmp_path: Path, nats_server: str, redis_server: str) -> AsyncIterator[object]:
    children: list[Child] = []

    def start(inside: str, **changes: object) -> Running:
        program, port = tmp_path / "program.py", free_ports(1)[0]
        program.write_text(PROGRAM.format(inside=inside))
        values = {"nats_url": nats_server, "redis_url": redis_server, "health_port": port, "drain_s": 1.0, **changes}
        environment = child_environment({f"PACELINE_{name.upper()}": str(value) for name, value in values.items()})
        ready = http_ready(f"http://127.0.0.1:{port}/readyz")
        child = Child("test", [sys.executable, str(program)], environment, tmp_path / "log", ready)
        children.append(child)
        child.start()
        return Running(child, port)

    yield start
    for child in children:
        await child.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_in_order(launch: object, number: int) -> None:
    running = launch(PLAIN)  # type: ignore[operator]
    await running.child.wait_ready(20)
    async with aiohttp.ClientSession() as client:
        for path in ("/healthz", "/readyz", "/metrics"):
            async with client.get(running.url + path) as answer:
                assert answer.status == 200
                text = await answer.text()
    assert "paceline_ready 1.0" in text
    running.child.signal(number)
    assert await running.code() == 0
    assert "left in order" in running.child.tail()


async def test_leaving_is_bounded(launch: object) -> None:
    running = launch(SLOW_EXIT)  # type: ignore[operator]
    await running.child.wait_ready(20)
    started = time.monotonic()
    running.child.signal(signal.SIGTERM)
    assert await running.code() == 0
    assert time.monotonic() - started < 6
    assert "not drained in time" in running.child.tail()


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again() -> None:
    service = Service("test", Settings.of(), MemoryBus(), MemoryStore(), MemoryStore())
    swallowed = asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            swallowed.set()
        await asyncio.sleep(60)

    task = service.spawn(stubborn(), "stubborn")
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await service.stop()
    assert swallowed.is_set()
    assert task.cancelled()


async def test_a_signal_while_starting_is_obeyed(launch: object) -> None:
    running = launch(SLOW_ENTRY)  # type: ignore[operator]
    async with asyncio.timeout(20):
        while "entering" not in running.child.tail():
            await asyncio.sleep(0.05)
    running.child.signal(signal.SIGTERM)
    assert await running.code(5) == 0


@pytest.mark.parametrize("inside", [BROKEN_TASK, BROKEN_ENTRY])
async def test_an_unexpected_exception_ends_the_process_and_is_logged(launch: object, inside: str) -> None:
    running = launch(inside)  # type: ignore[operator]
    assert await running.code() == 1
    assert "ZeroDivisionError" in running.child.tail(200)


async def test_servers_that_never_answer(launch: object) -> None:
    running = launch(PLAIN, nats_url="nats://127.0.0.1:9", connect_s=1)  # type: ignore[operator]
    assert await running.code() == 1
    assert "nats did not answer for 1 s" in running.child.tail()


async def test_a_bad_setting_is_one_clear_line(launch: object) -> None:
    running = launch(PLAIN, http_port="many")  # type: ignore[operator]
    assert await running.code() == 1
    assert running.child.tail().startswith("paceline test: PACELINE_HTTP_PORT='many'")


async def test_a_misspelt_setting_is_warned_about(launch: object) -> None:
    running = launch(PLAIN, modle="toy")  # type: ignore[operator]
    await running.child.wait_ready(20)
    assert "PACELINE_MODLE" in running.child.tail()


async def test_a_taken_health_port_is_named(launch: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        running = launch(PLAIN, health_port=port)  # type: ignore[operator]
        assert await running.code() == 1
        assert f"port {port} on 127.0.0.1 is in use; set PACELINE_HEALTH_PORT" in running.child.tail()


def service() -> Service:
    store = MemoryStore()
    return Service("test", Settings.of(), MemoryBus(), store, store)


async def test_readiness_names_what_is_missing() -> None:
    made = service()
    made.set_ready("engine", False, "loading 40 %")
    made.set_ready("nats", True)
    assert made.not_ready() == {"engine": "loading 40 %"}
    assert made.metrics.value(READY) == 0
    made.set_ready("engine", True)
    assert made.not_ready() == {}
    assert made.metrics.value(READY) == 1
    made.stopping.set()
    assert "process" in made.not_ready()


async def test_stopping_cancels_the_tasks() -> None:
    made, cancelled = service(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    task = made.spawn(work(), "work")
    await asyncio.sleep(0)
    await made.stop()
    assert cancelled.is_set()
    assert task.cancelled()
    assert made.failure is None
