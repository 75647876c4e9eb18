"""Paceline on one machine: NATS, Redis and the services as child processes.

`LocalStack` is for programs and tests (fault injection included); paceline.stack_cli is `python -m paceline.stack`,
where a supervisor holds the stack and starts again what dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from paceline.errors import FatalError, SettingsError
from paceline.model_card import write_whole
from paceline.processes import (
    Child,
    Ready,
    check_free,
    free_ports,
    http_ready,
    nats_command,
    nats_ready,
    redis_command,
    redis_ready,
)
from paceline.settings import Settings, child_environment

SERVICES = ("policy", "migrator", "verifier", "drafter", "batcher", "gateway")
"""In the order of starting."""
SERVERS = ("nats", "redis")
TENANT = "local"
STATE_FILE = "stack.json"
READY_S = 180.0
OF_AN_ENVIRONMENT = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables that tell an interpreter where its packages are."""


@dataclass(frozen=True)
class StackOptions:
    """`root` holds logs, server data, the keys file and the state file. Port 0: any free one."""

    root: Path
    nats_port: int = 0
    redis_port: int = 0
    http_port: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    """Processes of each service; one of each unless said otherwise, 0: none."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Fields of paceline.settings.Settings for every service."""
    own: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """More fields, by service (`verifier`) or process (`verifier-1`)."""
    pin: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """CPU numbers, by service, server or process."""
    python: Mapping[str, str] = field(default_factory=dict)
    """Interpreter of a service that has an environment of its own; else the one that runs this."""
    tied: bool = True
    """The children die with this process."""
    ready_s: float = READY_S

    def with_vllm(self, python: Path) -> StackOptions:
        """The same with verifiers on vLLM, which have an environment of their own. Raises SettingsError."""
        if not (python.is_file() and os.access(python, os.X_OK)):
            wrong = "is no interpreter" if python.exists() else "does not exist"
            raise SettingsError(
                f"{python} {wrong}: `make setup-vllm` makes an environment with vLLM, .venv-vllm/bin/python"
            )
        return replace(
            self,
            settings={**self.settings, "engine": "llama"},
            own={**self.own, "verifier": {**self.own.get("verifier", {}), "engine": "vllm"}},
            python={**self.python, "verifier": str(python.absolute())},
        )


class ProcessState(msgspec.Struct, frozen=True):
    pid: int
    started: float
    log: str
    ports: dict[str, int]
    restarts: int = 0
    last_end: str = ""
    """How it ended before the last restart, or for good."""
    gone: bool = False
    """It died too often in a row and is not started again."""


class StackState(msgspec.Struct, frozen=True):
    """The state file: what runs, where it listens, and who may call."""

    gateway: str
    nats: str
    redis: str
    key_file: str
    processes: dict[str, ProcessState]
    supervisor: ProcessState | None = None


class LocalStack:
    """Use as `async with LocalStack(StackOptions(root=...)) as stack:`; everything is ready inside.

    Processes are named nats, redis, verifier-0, verifier-1, batcher-0, ...; `verifier` means verifier-0.
    """

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        self.root = options.root.resolve()
        self.children: dict[str, Child] = {}
        self.key = ""
        """An API key of the tenant `local`, admin."""
        self.supervisor: ProcessState | None = None
        """When set, the state file is kept from the first start on, so that nothing is lost if this process dies."""
        self._ports = _Ports(options)

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self._ports.http}"

    @property
    def nats_url(self) -> str:
        return f"nats://127.0.0.1:{self._ports.nats}"

    @property
    def redis_url(self) -> str:
        return f"redis://127.0.0.1:{self._ports.redis}/0"

    @property
    def key_file(self) -> Path:
        return self.root / "key"

    async def __aenter__(self) -> Self:
        try:
            await self.up()
        except BaseException:
            await self.down()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.down()

    def check_ports(self) -> None:
        """Raises PortTaken for the first port that was asked for and is in use."""
        self._ports.check()

    async def up(self) -> None:
        """Start everything and wait until all of it is ready; writes the state file."""
        self.check_ports()
        self.root.mkdir(parents=True, exist_ok=True)
        await self._start_all([self._server(name) for name in SERVERS])
        if self._count("gateway"):
            self.key = await self._make_key()
        await self._start_all([self._service(name, index) for name in SERVICES for index in range(self._count(name))])
        self.save()

    async def down(self) -> None:
        """Stop the gateways, which let their streams end, then the other services, then the servers."""
        for group in stop_order(self.children):
            await asyncio.gather(*(self.children[name].stop() for name in group))
        (self.root / STATE_FILE).unlink(missing_ok=True)

    def child(self, name: str) -> Child:
        found = self.children.get(name) or self.children.get(f"{name}-0")
        if found is None:
            raise FatalError(f"no process {name} in this stack; there are {', '.join(self.children)}")
        return found

    async def add(self, service: str) -> Child:
        """One more process of a service, ready."""
        index = sum(name.startswith(f"{service}-") for name in self.children)
        child = self._service(service, index)
        await self._start_all([child])
        return child

    async def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone."""
        await self.child(name).kill()

    async def stop(self, name: str) -> int | None:
        """SIGTERM, and the exit code."""
        return await self.child(name).stop()

    def signal(self, name: str, number: int) -> None:
        """For example SIGSTOP and SIGCONT, to freeze and thaw."""
        self.child(name).signal(number)

    async def start(self, name: str, *, ready: bool = True) -> None:
        """Start a process that ended: same ports, same data."""
        child = self.child(name)
        child.start()
        if ready:
            await child.wait_ready(self.options.ready_s)

    async def restart(self, name: str, *, kill: bool = False) -> None:
        child = self.child(name)
        await (child.kill() if kill else child.stop())
        await self.start(name)

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        self.signal(name, signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(name, signal.SIGCONT)

    # --- making the children ---

    async def _start_all(self, children: list[Child]) -> None:
        for child in children:
            self.children[child.name] = child
            child.start()
        if self.supervisor:
            self.save()
        waits = [asyncio.create_task(child.wait_ready(self.options.ready_s)) for child in children]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()

    def _count(self, service: str) -> int:
        return self.options.counts.get(service, 1)

    def _server(self, name: str) -> Child:
        data, port = self.root / f"{name}-data", getattr(self._ports, name)
        command = nats_command(port, data) if name == "nats" else redis_command(port, data)
        ready = nats_ready(port) if name == "nats" else redis_ready(port)
        return self._child(name, command, child_environment({}), ready, {name: port}, self._pin(name, name))

    def _service(self, service: str, index: int) -> Child:
        name = f"{service}-{index}"
        health = free_ports(1)[0]
        port = self._ports.http if service == "gateway" and index == 0 else health
        values: dict[str, object] = {
            "nats_url": self.nats_url, "redis_url": self.redis_url, "instance": name,
            "keys_file": self.root / "keys.toml", **self.options.settings, **self.options.own.get(service, {}),
            **self.options.own.get(name, {}), "http_port" if service == "gateway" else "health_port": port,
        }  # fmt: skip
        environment = child_environment(Settings.of(**values).environment(), PYTHONUNBUFFERED="1")
        python = self.options.python.get(service, sys.executable)
        if python != sys.executable:  # another environment, maybe of another version
            environment = {name: value for name, value in environment.items() if name not in OF_AN_ENVIRONMENT}
        command = [python, "-m", f"services.{service}"]
        ready = http_ready(f"http://127.0.0.1:{port}/readyz")
        return self._child(name, command, environment, ready, {"http": port}, self._pin(name, service))

    def _child(  # noqa: PLR0917 - one call a kind of child
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        ready: Ready,
        ports: Mapping[str, int],
        pin: Sequence[int],
    ) -> Child:
        log = self.root / "logs" / f"{name}.log"
        return Child(name, command, environment, log, ready, ports, pin, self.options.tied)

    def _pin(self, name: str, kind: str) -> Sequence[int]:
        return self.options.pin.get(name) or self.options.pin.get(kind) or ()

    async def _make_key(self) -> str:
        """A key of the tenant `local` in root/keys.toml; the key itself is kept in root/key, readable by the owner."""
        keys = self.root / "keys.toml"
        if self.key_file.exists() and keys.exists():
            return self.key_file.read_text().strip()
        words = ("add", "--tenant", TENANT, "--file", str(keys), "--admin")
        command = [sys.executable, "-m", "services.gateway.keys", *words]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=child_environment({})
        )
        output, errors = await process.communicate()
        if process.returncode:
            raise FatalError(f"no key could be made: {errors.decode()}")
        key = output.decode().strip()
        self.key_file.touch(mode=0o600)
        self.key_file.write_text(key + "\n")
        return key

    def save(self) -> None:
        """Write the state file, whole."""
        processes = {name: _state_of(child) for name, child in self.children.items()}
        state = StackState(
            self.gateway_url, self.nats_url, self.redis_url, str(self.key_file), processes, self.supervisor
        )
        write_whole(self.root / STATE_FILE, msgspec.json.format(msgspec.json.encode(state)))


def _state_of(child: Child) -> ProcessState:
    past = child.restarts
    return ProcessState(child.pid, child.born, str(child.log), dict(child.ports), past.total, past.last_end, past.gone)


class _Ports:
    """The three ports that people use; each checked, or chosen when 0."""

    def __init__(self, options: StackOptions) -> None:
        self._asked = {"nats": options.nats_port, "redis": options.redis_port, "http": options.http_port}
        self.nats, self.redis, self.http = (
            asked or free for asked, free in zip(self._asked.values(), free_ports(3), strict=True)
        )

    def check(self) -> None:
        """Raises PortTaken for the first port that was asked for and is in use."""
        for name, port in self._asked.items():
            if port:
                check_free(port, f"PACELINE_{name.upper()}_PORT (with make: {name.upper()}_PORT=...)")


def stop_order(names: Iterable[str]) -> list[list[str]]:
    """What to stop together, group by group."""
    groups: list[list[str]] = [[], [], []]
    for name in names:
        groups[2 if name in SERVERS else 0 if name.startswith("gateway") else 1].append(name)
    return groups


def read_state(root: Path) -> StackState | None:
    """What runs under `root`; None: nothing was left by `up`."""
    file = root / STATE_FILE
    return msgspec.json.decode(file.read_bytes(), type=StackState) if file.exists() else None


if __name__ == "__main__":
    from paceline.stack_cli import main

    main()
