"""The edge process of a report: `python -m loadgen.edge_worker [--pin CPU]`, driven through standard input.

It is the edge client's library in a process of its own, so that drafting has a core to itself and no measuring code
beside it. Standard output carries replies only; logs go to standard error. It ends with its input.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import BinaryIO

import aiohttp

from edge_client.api import GatewayApi
from edge_client.client import EdgeClient, Request
from edge_client.drafts import load_draft
from edge_client.events import Committed, Finished
from loadgen.jobs import Command, Connect, Connected, Job, Reply, Run, Trouble, decode_command, encode
from paceline.engine import DraftEngine, Rule
from paceline.errors import PacelineError
from paceline.model_card import ModelCard
from paceline.settings import Settings
from paceline.wire import Sampling


class Worker:
    """Holds the draft model and the link; does one job at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._link = AsyncExitStack()
        self._client: EdgeClient | None = None
        self._engine: DraftEngine | None = None

    async def do(self, command: Command) -> Reply:
        try:
            return await (self._connect(command) if isinstance(command, Connect) else self._complete(command))
        except (PacelineError, OSError) as error:
            return Trouble(f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        await self._link.aclose()
        if self._engine is not None:
            await self._engine.close()

    async def _connect(self, asked: Connect) -> Connected:
        await self._link.aclose()
        card = await _card(asked)
        if self._engine is None:
            self._engine = await load_draft(card, self._settings, _say)
        link = EdgeClient.connect(asked.url, asked.key, card=card, engine=self._engine)
        self._client = await self._link.enter_async_context(link)
        return Connected(simulated=card.simulated)

    async def _complete(self, job: Job) -> Run:
        if self._client is None or self._engine is None:
            raise PacelineError("connect first")
        tokens = self._client.chat([{"role": "user", "content": job.prompt}])
        sampling = Sampling(temperature=job.temperature, min_tokens=job.min_tokens, end_ids=self._client.card.end_ids)
        if job.alone:
            return await draft_alone(self._engine, tokens, sampling, job)
        return await served(self._client, tokens, sampling, job)


async def served(client: EdgeClient, tokens: tuple[int, ...], sampling: Sampling, job: Job) -> Run:
    """One session through the gateway."""
    request = Request(
        tokens=tokens, sampling=sampling, max_tokens=job.max_tokens, seed=job.seed, logprobs=job.logprobs,
        speculation=job.speculation,
    )  # fmt: skip
    started, commits, end = time.monotonic(), list[Committed](), None
    async for event in client.generate(request):
        if isinstance(event, Committed):
            commits.append(event)
        elif isinstance(event, Finished):
            end = event
    if end is None or end.finish == "error":
        raise PacelineError(f"the session failed: {end.error if end else 'no end was seen'}")
    return _run(started, len(tokens), commits, end)


def _run(started: float, prompt_tokens: int, commits: list[Committed], end: Finished) -> Run:
    stats = end.stats
    return Run(
        tokens=tuple(token for commit in commits for token in commit.tokens),
        text="".join(commit.text for commit in commits),
        kinds="".join(commit.kinds for commit in commits),
        chunks=tuple(((commit.t - started) * 1e3, len(commit.tokens)) for commit in commits if commit.tokens),
        finish=end.finish,
        prompt_tokens=prompt_tokens,
        counters=stats.counters,
        bytes_up=stats.bytes_up,
        nodes_up=stats.nodes_up,
        bytes_down=stats.bytes_down,
        tokens_down=stats.tokens_down,
        draft_ms=stats.draft_ms,
        cuts=stats.cuts,
        logprobs=tuple(entry for commit in commits for entry in commit.logprobs or ()),
    )


async def draft_alone(engine: DraftEngine, prompt: tuple[int, ...], sampling: Sampling, job: Job) -> Run:
    """The draft model's own answer: nothing crosses the network."""
    rule, path = Rule(sampling, job.seed, len(prompt)), list(prompt)
    started, chunks = time.monotonic(), list[tuple[float, int]]()
    finish = "length"
    for _ in range(job.max_tokens):
        token = (await engine.guess("alone", path, rule)).token
        path.append(token)
        chunks.append(((time.monotonic() - started) * 1e3, 1))
        if token in sampling.end_ids:
            finish = "stop"
            break
    engine.release("alone")
    tokens = tuple(path[len(prompt) :])
    return Run(tokens=tokens, text="", kinds="", chunks=tuple(chunks), finish=finish, prompt_tokens=len(prompt))


async def _card(asked: Connect) -> ModelCard:
    async with aiohttp.ClientSession() as http:
        return await GatewayApi(http, asked.url, asked.key).card(asked.model)


def _say(what: str, done: int = 0, total: int | None = None) -> None:
    if not done:  # once a stage, not at every per cent
        print(what, file=sys.stderr, flush=True)


async def serve(commands: BinaryIO, replies: BinaryIO) -> None:
    worker = Worker(Settings.load())
    try:
        while line := await asyncio.to_thread(commands.readline):
            replies.write(encode(await worker.do(decode_command(line))))
            replies.flush()
    finally:
        await worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pin", type=int, help="CPU to run on")
    chosen = parser.parse_args()
    if chosen.pin is not None:
        os.sched_setaffinity(0, {chosen.pin})
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints, prints to standard error
    with Path("/dev/stdin").open("rb") as commands:
        asyncio.run(serve(commands, replies))


if __name__ == "__main__":
    main()
