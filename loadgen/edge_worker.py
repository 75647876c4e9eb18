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
from edge_client.client import EdgeClient, EdgeSession, Request
from edge_client.drafts import load_draft
from edge_client.events import Committed, Finished
from loadgen.deepen import deepen
from loadgen.jobs import (
    Command,
    Connect,
    Connected,
    Drafting,
    Job,
    Recall,
    Recalled,
    Reply,
    Run,
    Trouble,
    Wave,
    Waved,
    decode_command,
    encode,
)
from loadgen.pace import Pace
from loadgen.recording import RecordedDraft, Recording
from paceline.engine import DraftEngine, Rule
from paceline.errors import PacelineError
from paceline.model_card import ModelCard
from paceline.settings import Settings
from paceline.wire import Sampling

FEW_MISSES = 0.005
"""Share of a replayed wave's guesses that were not recorded; after more the recording is deepened."""
MOST_DEEPER = 600
"""Guesses that this takes at most."""


class Worker:
    """Holds the draft model and the links; does one command at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._links = AsyncExitStack()
        self._clients: list[EdgeClient] = []
        self._asked: Connect | None = None
        self._engine: DraftEngine | None = None
        self._recording = Recording()

    async def do(self, command: Command) -> Reply:
        try:
            match command:
                case Connect():
                    return await self._connect(command)
                case Recall():
                    self._recording = Recording(Path(command.file))
                    return Recalled(len(self._recording))
                case Wave():
                    return await self._wave(command)
                case Job():
                    engine = self._drafts(command)
                    return await self._complete(self._client(0), engine, command)
        except (PacelineError, OSError) as error:
            return Trouble(f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        await self._links.aclose()
        if self._engine is not None:
            await self._engine.close()

    async def _connect(self, asked: Connect) -> Connected:
        await self._links.aclose()
        self._clients, self._asked = [], asked
        card = await _card(asked)
        if self._engine is None:
            self._engine = await load_draft(card, self._settings, _say)
        await self._link_up(card, 1)
        return Connected(simulated=card.simulated)

    async def _link_up(self, card: ModelCard, links: int) -> None:
        """As many links as that, each as an edge of its own would have it."""
        asked = self._asked
        if asked is None or self._engine is None:
            raise PacelineError("connect first")
        dialled = [
            self._links.enter_async_context(EdgeClient.connect(asked.url, asked.key, card=card, engine=self._engine))
            for _ in range(links - len(self._clients))
        ]
        self._clients += await asyncio.gather(*dialled)

    def _client(self, number: int) -> EdgeClient:
        if number >= len(self._clients):
            raise PacelineError("connect first")
        return self._clients[number]

    def _drafts(self, job: Job) -> DraftEngine | None:
        return self._engine if job.alone or job.speculation.enabled else None

    async def _wave(self, wave: Wave) -> Waved:
        """All at once; when one fails, the others are given up."""
        await self._link_up(self._client(0).card, len(wave.jobs))
        engine = self._source(wave)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._complete(self._client(i), self._engine if job.alone else engine, job))
                    for i, job in enumerate(wave.jobs)
                ]
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        if engine is not None and wave.drafts == "replay" and engine.drafting.miss_share > FEW_MISSES:
            await deepen(engine.live, self._recording, engine.said, MOST_DEEPER)
        self._recording.save()
        return Waved(tuple(task.result() for task in tasks), engine.drafting if engine else Drafting())

    def _source(self, wave: Wave) -> RecordedDraft | None:
        if wave.drafts == "none" or self._engine is None:
            return None
        return RecordedDraft(self._engine, self._recording, Pace(wave.pace_ms) if wave.drafts == "replay" else None)

    async def _complete(self, client: EdgeClient, engine: DraftEngine | None, job: Job) -> Run:
        tokens = client.chat([{"role": "user", "content": job.prompt}])
        sampling = Sampling(
            temperature=job.temperature, min_tokens=job.min_tokens, end_ids=client.card.end_ids,
            logit_bias=job.logit_bias,
        )  # fmt: skip
        if job.alone:
            assert engine is not None, "a link is up, so the draft model is loaded"
            return await draft_alone(engine, tokens, sampling, job)
        return await served(client, engine, tokens, sampling, job)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def served(
    client: EdgeClient, engine: DraftEngine | None, tokens: tuple[int, ...], sampling: Sampling, job: Job
) -> Run:
    """One session through the gateway, drafted by `engine` (None: nothing comes from here)."""
    request = Request(
        tokens=tokens, sampling=sampling, max_tokens=job.max_tokens, seed=job.seed, logprobs=job.logprobs,
        speculation=job.speculation,
    )  # fmt: skip
    started, commits, end = time.monotonic(), list[Committed](), None
    async with EdgeSession(client, request, client.tokenizer, engine) as session:
        async for event in session:
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
