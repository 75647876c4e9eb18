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
import msgspec
import psutil
import pytest
import pytest_asyncio

from paceline.errors import PortTaken
from paceline.processes import Restarts, alive, free_ports
from paceline.settings import child_environment
from paceline.stack import LocalStack, ProcessState, StackOptions, StackState, read_state
from paceline.stack_logs import read_line

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


async def silent_batchers(stack: LocalStack) -> dict[str, float]:
    """Batcher to its `silent_s` in /v1/system."""
    headers = {"Authorization": f"Bearer {stack.key}"}
    async with aiohttp.ClientSession(headers=headers) as client, client.get(f"{stack.gateway_url}/v1/system") as answer:
        report = await answer.json()
    return {item["batcher"]: item.get("silent_s", 0.0) for item in report["batchers"]}


async def test_the_system_report_tells_that_a_process_is_silent_and_that_it_speaks_again(stack: LocalStack) -> None:
    async with asyncio.timeout(10):
        while await silent_batchers(stack) != {"batcher-0": 0.0}:
            await asyncio.sleep(0.1)
    await stack.kill("batcher")
    async with asyncio.timeout(10):
        while not (await silent_batchers(stack))["batcher-0"] > 3:
            await asyncio.sleep(0.2)
    await stack.start("batcher")
    async with asyncio.timeout(10):
        while (await silent_batchers(stack))["batcher-0"]:
            await asyncio.sleep(0.1)


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


async def run(tmp_path: Path, *words: str, **more: str) -> tuple[int, str]:
    settings = {"PACELINE_STATE_DIR": str(tmp_path), "PACELINE_MODEL": "toy", "PACELINE_ENGINE": "simulated", **more}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline.stack", *words, env=child_environment(settings),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


def state_of(root: Path) -> StackState:
    state = read_state(root)
    assert state is not None
    return state


def lives(process: ProcessState | None) -> bool:
    return process is not None and alive(process.pid, process.started) is not None


async def up_with_servers_and(tmp_path: Path, *words: str) -> StackState:
    """As `make up`, on free ports."""
    code, output = await run(tmp_path, "up", "--nats-port", "0", "--redis-port", "0", "--http-port", "0", *words)
    assert code == 0, output
    return state_of(tmp_path)


async def test_the_command_line(tmp_path: Path) -> None:
    nats, redis, http = (str(port) for port in free_ports(3))
    ports = ("--nats-port", nats, "--redis-port", redis, "--http-port", http)
    assert await run(tmp_path, "status") == (3, "nothing runs; `make up` starts the stack\n")
    assert await run(tmp_path, "logs") == (0, "no logs yet; `make up` starts the stack\n")
    try:
        code, output = await run(tmp_path, "up", *ports, "--verifiers", "2")
        assert code == 0, output
        assert output.startswith("starting ")
        assert f"export PACELINE_GATEWAY_URL=http://127.0.0.1:{http}" in output
        code, output = await run(tmp_path, "status")
        assert code == 0, output
        assert output.count("ready") == 7
        code, output = await run(tmp_path, "up", *ports)
        assert code == 1
        assert "runs already" in output
        assert "`make down`" in output
        code, output = await run(tmp_path, "logs", "verifier-1", "--lines", "3")
        assert code == 0
        assert all(line.startswith("verifier-1") for line in output.splitlines())
        assert (await run(tmp_path, "logs", "nope"))[0] == 1
    finally:
        supervisor = state_of(tmp_path).supervisor
        assert await run(tmp_path, "down") == (0, "stopped 9 processes\n")
    assert not lives(supervisor)
    assert await run(tmp_path, "down") == (0, "nothing runs\n")


async def test_what_is_killed_under_up_comes_back_and_the_status_counts_it(tmp_path: Path) -> None:
    before = await up_with_servers_and(tmp_path)
    try:
        for name in ("batcher-0", "redis"):
            os.kill(before.processes[name].pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while (answer := await run(tmp_path, "status"))[0] != 0:
                assert answer[0] == 3
                await asyncio.sleep(0.1)
        assert answer[1].count("started again 1 time (killed by SIGKILL)") == 2
        after = state_of(tmp_path)
        changed = {name for name, item in after.processes.items() if item.pid != before.processes[name].pid}
        assert changed == {"batcher-0", "redis"}
        assert "batcher-0 killed by SIGKILL; it is started again" in (await run(tmp_path, "logs", "supervisor"))[1]
    finally:
        assert (await run(tmp_path, "down"))[0] == 0
    assert not any(lives(item) for item in [*after.processes.values(), after.supervisor])


async def test_status_and_down_work_when_the_supervisor_was_killed(tmp_path: Path) -> None:
    state = await up_with_servers_and(tmp_path)
    try:
        assert state.supervisor is not None
        os.kill(state.supervisor.pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            while lives(state.supervisor):
                await asyncio.sleep(0.01)
        os.kill(state.processes["migrator-0"].pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            while lives(state.processes["migrator-0"]):
                await asyncio.sleep(0.01)
        code, output = await run(tmp_path, "status")
        assert code == 3
        assert output.count("ready") == 5
        assert output.count("gone for good") == 1
        assert "the supervisor is gone" in output
        assert "make down" in output
        code, output = await run(tmp_path, "up")
        assert code == 1
        assert "without its supervisor" in output
    finally:
        assert await run(tmp_path, "down") == (0, "stopped 7 processes\n")
    assert not any(lives(item) for item in state.processes.values())


async def test_the_status_says_what_to_do_about_a_process_that_was_given_up(tmp_path: Path) -> None:
    dead = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await dead.wait()
    gone = ProcessState(dead.pid, 1.0, "", {"http": 1}, restarts=6, last_end="ended with code 1", gone=True)
    this = ProcessState(os.getpid(), psutil.Process().create_time(), "", {})
    state = StackState("http://127.0.0.1:1", "", "", "key", {"batcher-0": gone}, this)
    (tmp_path / "stack.json").write_bytes(msgspec.json.encode(state))
    code, output = await run(tmp_path, "status")
    assert code == 3
    assert "gone for good, started again 6 times (ended with code 1)" in output
    assert "make logs PROCESS=batcher-0" in output
    code, output = await run(tmp_path, "up")
    assert code == 1
    assert "runs, but for batcher-0" in output


async def test_an_interrupted_up_leaves_nothing(tmp_path: Path) -> None:
    settings = {
        "PACELINE_STATE_DIR": str(tmp_path), "PACELINE_MODEL": "toy", "PACELINE_ENGINE": "simulated",
        "PACELINE_VERIFIERS": "6",  # so that it is not up before it is interrupted
    }  # fmt: skip
    ports = [word for name in ("nats", "redis", "http") for word in (f"--{name}-port", "0")]
    starting = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline.stack", "up", *ports, env=child_environment(settings)
    )
    async with asyncio.timeout(20):
        while (state := read_state(tmp_path)) is None:
            await asyncio.sleep(0.01)
        starting.send_signal(signal.SIGINT)
        assert await starting.wait() == 130
    assert not any(lives(item) for item in [*state.processes.values(), state.supervisor])
    assert read_state(tmp_path) is None


async def test_a_start_that_fails_shows_this_run_alone_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "nats.log").write_text("of an earlier run\n")
    any_port = ("--redis-port", "0", "--http-port", "0")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, output = await run(tmp_path, "up", *any_port, "--nats-port", str(port))
    assert code == 1
    assert f"port {port}" in output
    assert "PACELINE_NATS_PORT" in output
    assert " NATS_PORT=" in output
    assert "starting" not in output
    (tmp_path / "nats-data").write_text("no folder, so NATS cannot start")
    code, output = await run(tmp_path, "up", *any_port, "--nats-port", "0")
    assert code == 1
    assert "nats ended with code 1" in output
    assert "earlier run" not in output + (await run(tmp_path, "logs"))[1]
    assert read_state(tmp_path) is None


def test_a_child_is_started_again_with_growing_pauses_and_given_up_after_too_many_in_a_row() -> None:
    past, now, pauses = Restarts(), 0.0, []
    while not past.gone:
        past.ended("killed by SIGKILL", 1.0, now)
        if past.due is not None:
            pauses.append(past.due - now)
            now = past.due
            past.started()
    assert pauses == [0.5, 1, 2, 4, 8, 16]
    assert past.total == len(pauses) == Restarts.IN_A_ROW


def test_a_start_that_lasted_makes_the_count_begin_anew() -> None:
    past = Restarts()
    for _ in range(3 * Restarts.IN_A_ROW):
        past.ended("ended with code 1", Restarts.CALM_S, 0.0)
        assert past.due == Restarts.FIRST_PAUSE_S
        past.started()
    assert past.total == 3 * Restarts.IN_A_ROW


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("2026-01-02T03:04:05.123456Z [info     ] serving                        instance=batcher-0 service=batcher",
         "info: serving"),
        ("2026-01-02T03:04:05Z [\x1b[32mwarning  \x1b[0m] waiting    what=nats", "warning: waiting what=nats"),
        ("[17] 2026/01/02 03:04:05.885153 [INF] Server is ready", "INF: Server is ready"),
        ("17:M 02 Jan 2026 03:04:05.866 * Ready", "* Ready"),
        ("17:signal-handler (1767323045) Received SIGTERM", "Received SIGTERM"),
        ('{"event": "x", "timestamp": "2026-01-02T03:04:05Z"}', '{"event": "x", "timestamp": "2026-01-02T03:04:05Z"}'),
    ],
)  # fmt: skip
def test_log_lines_of_every_kind_are_read_with_their_time(raw: str, text: str) -> None:
    line = read_line(raw)
    assert line is not None
    assert line.text == text
    assert line.at is not None
    assert abs(line.at - 1767323045) < 1 + 14 * 3600  # the servers write local time


@pytest.mark.parametrize("shown", [r" _ | | __|_   _/ __|_   _|", "", "     https://docs.nats.io/jetstream",
                                   "---------------- JETSTREAM ----------------", "-" * 43])  # fmt: skip
def test_banners_are_left_out(shown: str) -> None:
    assert read_line(f"[17] 2026/01/02 03:04:05.900046 [INF] {shown}") is None


def test_a_line_without_a_time_is_kept_as_it_is() -> None:
    line = read_line("    raise ValueError()")
    assert line is not None
    assert (line.at, line.text) == (None, "    raise ValueError()")


async def test_a_wrong_interpreter_and_a_misspelt_variable_are_named(tmp_path: Path) -> None:
    ports = [word for name in ("nats", "redis", "http") for word in (f"--{name}-port", "0")]
    code, output = await run(tmp_path, "up", *ports, "--vllm-python", str(tmp_path), PACELINE_VLLM_OPTION="{}")
    assert code == 1
    assert f"{tmp_path} is no interpreter" in output
    assert "PACELINE_VLLM_OPTION is not read by anybody: PACELINE_VLLM_OPTIONS is meant, perhaps" in output
