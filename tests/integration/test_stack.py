"""The local stack with all services as processes, on the simulated engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio

from paceline.errors import PortTaken
from paceline.processes import free_ports
from paceline.settings import child_environment
from paceline.stack import LocalStack, StackOptions, read_state

TOY = {"model": "toy", "engine": "simulated"}
ONLY_SERVERS = {"verifier": 0, "drafter": 0, "batcher": 0, "gateway": 0, "policy": 0, "migrator": 0}


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[LocalStack]:
    async with LocalStack(StackOptions(root=tmp_path, settings=TOY, pin={"verifier": [0]}, ready_s=60)) as made:
        yield made


async def chat(stack: LocalStack, within_s: float = 0.0) -> str:
    """The answer; a 503 is tried again for `within_s` seconds, as its Retry-After asks for."""
    headers = {"Authorization": f"Bearer {stack.key}"}
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "temperature": 0}
    url, deadline = f"{stack.gateway_url}/v1/chat/completions", time.monotonic() + within_s
    async with aiohttp.ClientSession(headers=headers) as client:
        while True:
            async with client.post(url, json=body) as answer:
                text = await answer.text()
            if answer.status == 200:
                return str(json.loads(text)["choices"][0]["message"]["content"])
            assert answer.status == 503, text
            assert time.monotonic() < deadline, text
            await asyncio.sleep(0.1)


async def test_everything_comes_up_serves_and_goes_down(stack: LocalStack) -> None:
    text = await chat(stack, within_s=10)
    assert text
    state = read_state(stack.root)
    assert state is not None
    assert set(state.processes) == {
        "nats", "redis", "policy-0", "migrator-0", "verifier-0", "drafter-0", "batcher-0", "gateway-0",
    }  # fmt: skip
    assert os.stat(stack.key_file).st_mode & 0o077 == 0
    assert os.sched_getaffinity(stack.child("verifier").pid) == {0}
    pids = [child.pid for child in stack.children.values()]
    await stack.down()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert read_state(stack.root) is None
    codes = {name: child.process.returncode for name, child in stack.children.items() if child.process}
    assert set(codes.values()) == {0}, codes


async def test_servers_and_services_can_be_killed_frozen_and_started_again(stack: LocalStack) -> None:
    text = await chat(stack, within_s=10)
    for name in ("nats", "redis", "verifier", "batcher", "gateway"):
        await stack.restart(name, kill=True)
        assert not stack.child(name).tail().startswith("Traceback")
        await stack.child("gateway").wait_ready(30)
        assert await chat(stack, within_s=10) == text
    with stack.frozen("verifier"):
        process = psutil.Process(stack.child("verifier").pid)
        async with asyncio.timeout(5):
            while process.status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
    assert await stack.stop("policy") == 0
    await stack.add("verifier")
    assert stack.child("verifier-1").running


async def test_a_taken_port_is_named_with_its_variable(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"port {port} .* PACELINE_REDIS_PORT"):
            await LocalStack(StackOptions(root=tmp_path, redis_port=port)).up()


async def test_children_die_with_their_parent(tmp_path: Path) -> None:
    program = f"""
import asyncio
from pathlib import Path
from paceline.stack import LocalStack, StackOptions
async def main():
    async with LocalStack(StackOptions(root=Path({str(tmp_path)!r}), counts={ONLY_SERVERS!r})):
        await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, env=child_environment({}))
    async with asyncio.timeout(20):
        while (state := read_state(tmp_path)) is None:
            await asyncio.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    async with asyncio.timeout(5):
        while any(psutil.pid_exists(process.pid) for process in state.processes.values()):
            await asyncio.sleep(0.05)


async def run(tmp_path: Path, *words: str) -> tuple[int, str]:
    settings = {"PACELINE_STATE_DIR": str(tmp_path), "PACELINE_MODEL": "toy", "PACELINE_ENGINE": "simulated"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline.stack", *words, env=child_environment(settings),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_the_command_line(tmp_path: Path) -> None:
    nats, redis, http = (str(port) for port in free_ports(3))
    ports = ("--nats-port", nats, "--redis-port", redis, "--http-port", http)
    assert await run(tmp_path, "status") == (1, "nothing runs\n")
    try:
        code, output = await run(tmp_path, "up", *ports, "--verifiers", "2")
        assert code == 0, output
        assert f"http://127.0.0.1:{http}" in output
        code, output = await run(tmp_path, "status")
        assert code == 0, output
        assert output.count("ready") == 7
        code, output = await run(tmp_path, "up", *ports)
        assert code == 1
        assert "runs already" in output
        code, output = await run(tmp_path, "logs", "verifier-1", "--lines", "3")
        assert code == 0
        assert all(line.startswith("verifier-1") for line in output.splitlines())
        assert (await run(tmp_path, "logs", "nope"))[0] == 1
    finally:
        assert await run(tmp_path, "down") == (0, "stopped 9 processes\n")
    assert await run(tmp_path, "down") == (0, "nothing runs\n")
