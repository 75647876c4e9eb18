"""An operator at work under running streams: a drain, and a load that makes the policy act."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest_asyncio
from integration_kit import answer, edge, options, request

from paceline.stack import LocalStack
from paceline.wire import Speculation


async def call(stack: LocalStack, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {stack.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.request(method, stack.gateway_url + path, json=body) as got,
    ):
        assert got.status == 200, await got.text()
        return await got.json()


async def system(stack: LocalStack) -> dict[str, Any]:
    return await call(stack, "GET", "/v1/system")


async def until(stack: LocalStack, what: Callable[[dict[str, Any]], bool], within_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + within_s
    while True:
        seen = await system(stack)
        if what(seen):
            return seen
        assert time.monotonic() < deadline, (seen["decisions"], seen["batchers"], seen["verifiers"])
        await asyncio.sleep(0.2)


@pytest_asyncio.fixture
async def pair_of_verifiers(tmp_path: Path) -> AsyncIterator[LocalStack]:
    async with LocalStack(options(tmp_path, verifier=2)) as stack:
        yield stack


async def test_a_drain_moves_running_streams_and_an_undo_takes_sessions_again(
    pair_of_verifiers: LocalStack, tmp_path: Path
) -> None:
    stack = pair_of_verifiers
    async with edge(stack, tmp_path) as client:
        asked = request(client, 200, temperature=0.8)
        undisturbed = await answer(client, replace(asked, speculation=Speculation(enabled=False)))
        streams = [asyncio.create_task(answer(client, asked)) for _ in range(4)]
        both = await until(stack, lambda seen: all(one["sessions"] for one in seen["verifiers"]), 10)
        assert {one["verifier"] for one in both["verifiers"]} == {"verifier-0", "verifier-1"}
        report = await call(stack, "POST", "/v1/system/drain", {"verifier": "verifier-0"})
        assert report["moved"] >= 1
        assert report["remaining"] == 0
        assert not all(stream.done() for stream in streams), "the streams ended before they were moved"
        for stream in streams:
            got = await stream
            assert (got.tokens, got.text, got.finish) == (undisturbed.tokens, undisturbed.text, "length")
        drained = await until(stack, lambda seen: seen["decisions"][0]["admit"] == ["verifier-1"], 5)
        states = {one["verifier"]: one["state"] for one in drained["verifiers"]}
        assert states == {"verifier-0": "draining", "verifier-1": "ready"}
        await call(stack, "POST", "/v1/system/drain", {"verifier": "verifier-0", "undo": True})
        await until(stack, lambda seen: "verifier-0" in seen["decisions"][0]["admit"], 5)


async def test_a_saturated_verifier_lowers_the_window_cap_and_calm_lifts_it(tmp_path: Path) -> None:
    small = options(tmp_path)
    settings = {**small.settings, "max_step_tokens": 4}
    async with LocalStack(replace(small, settings=settings)) as stack, edge(stack, tmp_path) as client:
        before = (await until(stack, lambda seen: bool(seen["decisions"]), 5))["decisions"][0]
        asked = request(client, 2000)
        streams = [asyncio.create_task(answer(client, asked)) for _ in range(12)]
        cap = before["window_cap"]
        loaded = await until(stack, lambda seen: seen["decisions"][0]["window_cap"] < cap, 20)
        assert loaded["decisions"][0]["fill"], "what a fill costs others is the batcher's business"
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        calm = await until(stack, lambda seen: seen["decisions"][0]["window_cap"] == cap, 30)
        assert calm["decisions"][0]["version"] > loaded["decisions"][0]["version"]
