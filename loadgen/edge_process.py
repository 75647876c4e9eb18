"""The handle of a report's edge process (loadgen.edge_worker)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NoReturn

from loadgen.jobs import (
    Command,
    Connect,
    Connected,
    Job,
    Recall,
    Recalled,
    Reply,
    Run,
    Trouble,
    Wave,
    Waved,
    decode_reply,
    encode,
)
from paceline.errors import FatalError
from paceline.settings import Settings, child_environment

LINE_BYTES = 16 << 20
CONNECT_S = 120.0
JOB_S, TOKEN_S = 60.0, 2.0
END_S = 10.0


class EdgeProcess:
    """Made by `edge_process`. Every call is bounded in time and raises FatalError when the process is of no use."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self._log = process, log

    async def connect(self, url: str, key: str, model: str) -> bool:
        """Link up; whether the model is simulated."""
        reply = await self._ask(Connect(url, key, model), CONNECT_S)
        if not isinstance(reply, Connected):
            raise FatalError(f"the edge cannot connect: {reply}")
        return reply.simulated

    async def run(self, job: Job) -> Run:
        reply = await self._ask(job, JOB_S + TOKEN_S * job.max_tokens)
        return reply if isinstance(reply, Run) else _failed(reply)

    async def recall(self, file: Path) -> int:
        """Use this file of recorded drafts; how many guesses it holds."""
        reply = await self._ask(Recall(str(file)), CONNECT_S)
        return reply.guesses if isinstance(reply, Recalled) else _failed(reply)

    async def wave(self, wave: Wave) -> Waved:
        reply = await self._ask(wave, JOB_S + TOKEN_S * sum(job.max_tokens for job in wave.jobs))
        return reply if isinstance(reply, Waved) else _failed(reply)

    async def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _ask(self, command: Command, within_s: float) -> Reply:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                self._process.stdin.write(encode(command))
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise FatalError(f"the edge gave no answer within {within_s:.0f} s; its log: {self._log}") from error
        except ConnectionError as error:
            raise FatalError(f"the edge process is gone; its log: {self._log}") from error
        if not line:
            raise FatalError(f"the edge process ended; its log: {self._log}")
        return decode_reply(line)


def _failed(reply: Reply) -> NoReturn:
    raise FatalError(f"the edge failed: {reply.message if isinstance(reply, Trouble) else reply}")


@asynccontextmanager
async def edge_process(settings: Settings, log: Path, pin: int | None) -> AsyncIterator[EdgeProcess]:
    """An edge process on CPU `pin`, its log in `log`; ended at the end."""
    command = [sys.executable, "-m", "loadgen.edge_worker", *([] if pin is None else ["--pin", str(pin)])]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=child_environment(settings.environment()),
            limit=LINE_BYTES,
        )
    edge = EdgeProcess(process, log)
    try:
        yield edge
    finally:
        await edge.close()
