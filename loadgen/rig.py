"""What a report runs on: a stack of its own, a relay for the WAN, and an edge process on the relay's far side."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from edge_client.api import GatewayApi
from loadgen.edge_process import EdgeProcess, edge_process
from loadgen.relay import Link, Relay, round_trip
from paceline import models
from paceline.settings import Settings
from paceline.stack import LocalStack, StackOptions
from paceline.wire import SystemReport

Say = Callable[[str], None]

VLLM_PYTHON = Path(".venv-vllm/bin/python")
"""Of the environment that `make setup-vllm` makes, from the folder of the project."""


@dataclass
class Rig:
    """`pair` is the model pair's name, and the model's on the gateway."""

    pair: str
    stack: LocalStack
    relay: Relay
    edge: EdgeProcess
    simulated: bool = False

    @property
    def far_url(self) -> str:
        """The gateway as the edge sees it, through the relay."""
        return f"http://127.0.0.1:{self.relay.port}"

    async def at_distance(self, rtt_ms: float) -> None:
        """Shape the link, and link the edge up anew over it."""
        self.relay.reshape(round_trip(rtt_ms))
        self.simulated = await self.edge.connect(self.far_url, self.stack.key, self.pair)

    async def system(self) -> SystemReport:
        """What the policy sees now."""
        async with aiohttp.ClientSession() as http:
            return await GatewayApi(http, self.stack.gateway_url, self.stack.key).system()


@dataclass(frozen=True)
class Cores:
    """CPUs of the edge process, and of the verifier and the hosted drafter beside it; None: wherever the system puts
    them."""

    edge: int | None
    verifier: int | None

    @classmethod
    def apart(cls) -> Cores:
        """One core each, where the machine has two."""
        cpus = sorted(os.sched_getaffinity(0))
        return cls(cpus[0], cpus[1]) if len(cpus) > 1 else cls(None, None)


@asynccontextmanager
async def rig(pair: str, say: Say, *, rtt_ms: float = 0.0, engine: str = "llama") -> AsyncIterator[Rig]:
    """`engine`: of the target, unless the pair is a simulated one. Everything ready inside, nothing left afterwards;
    after a failure (an interrupt is none) the logs stay, and `say` tells where."""
    root = Path(tempfile.mkdtemp(prefix="paceline-loadgen-"))
    try:
        async with _standing(pair, root, rtt_ms, say, engine) as standing:
            yield standing
    except Exception:
        _keep_logs(root)
        say(f"logs: {root / 'logs'}")
        raise
    except BaseException:
        shutil.rmtree(root)
        raise
    shutil.rmtree(root)


def _keep_logs(root: Path) -> None:
    """Keys and data go."""
    for path in root.iterdir():
        if path.is_file():
            path.unlink()
        elif path.name != "logs":
            shutil.rmtree(path)


@asynccontextmanager
async def _standing(pair: str, root: Path, rtt_ms: float, say: Say, engine: str) -> AsyncIterator[Rig]:
    settings, cores = Settings.load(model=pair), Cores.apart()
    if models.pair_named(pair, settings.catalog_file).simulated:
        engine = "simulated"
    say("starting NATS, Redis and the six services")
    async with LocalStack(_options(settings, root, cores, engine)) as stack:
        host, _, port = stack.gateway_url.removeprefix("http://").partition(":")
        relay = await Relay(host, int(port), round_trip(rtt_ms)).start()
        try:
            say("starting the edge and loading its draft model")
            async with edge_process(settings, root / "logs" / "edge.log", cores.edge) as edge:
                standing = Rig(pair, stack, relay, edge)
                await standing.at_distance(rtt_ms)
                yield standing
        finally:
            relay.reshape(Link())
            await relay.close()


def _options(settings: Settings, root: Path, cores: Cores, engine: str) -> StackOptions:
    """`settings` for every service but for what the stack gives each by itself."""
    own = {"instance", "nats_url", "redis_url", "keys_file", "http_port", "health_port", "engine", "api_key"}
    values = settings.model_dump(exclude=own, exclude_none=True)
    pin = {} if cores.verifier is None else dict.fromkeys(("verifier", "drafter"), (cores.verifier,))
    options = StackOptions(root=root, settings={**values, "engine": engine}, pin=pin)
    return options.with_vllm(VLLM_PYTHON) if engine == "vllm" else options
