"""Whatever is killed, frozen or restarted under a running stream: the stream goes on, with the undisturbed text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from integration_kit import answer, edge, options, request

from paceline.stack import LocalStack
from paceline.wire import Speculation

TOKENS = 150


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[LocalStack, Path]]:
    folder = tmp_path_factory.mktemp("faults")
    async with LocalStack(options(folder, verifier=2)) as made:
        yield made, folder


async def restart(stack: LocalStack, name: str) -> None:
    await stack.restart(name, kill=True)


async def kill_the_busy_verifier(stack: LocalStack, name: str) -> None:
    """Both, one after the other: whichever holds the session is among them, and one is always up."""
    for verifier in ("verifier-0", "verifier-1"):
        await stack.restart(verifier, kill=True)


async def freeze(stack: LocalStack, name: str) -> None:
    with stack.frozen(name):
        await asyncio.sleep(5)  # longer than a verifier's status lives


async def stop_for_a_while(stack: LocalStack, name: str) -> None:
    await stack.kill(name)
    await asyncio.sleep(2)  # the outage itself
    await stack.start(name)


CASES = [
    ("nats restarts", restart, "nats"),
    ("nats is away for two seconds", stop_for_a_while, "nats"),
    ("redis restarts", restart, "redis"),
    ("redis is away for two seconds", stop_for_a_while, "redis"),
    ("both verifiers are killed in turn", kill_the_busy_verifier, "verifier"),
    ("a verifier is frozen", freeze, "verifier-0"),
    ("the other verifier is frozen", freeze, "verifier-1"),
    ("the batcher is killed and another takes over", restart, "batcher"),
    ("the gateway is killed and the edge resumes", restart, "gateway"),
    ("policy restarts", restart, "policy"),
]


@pytest.mark.parametrize(("name", "fault", "target"), CASES, ids=[name.replace(" ", "-") for name, *_ in CASES])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_stream_survives(stack: tuple[LocalStack, Path], name: str, fault, target: str) -> None:
    running, folder = stack
    async with edge(running, folder) as client:
        asked = request(client, TOKENS, temperature=0.8)
        undisturbed = await answer(client, request(client, TOKENS, Speculation(enabled=False), temperature=0.8))
        async with asyncio.timeout(60):
            disturbed = await answer(client, asked, fault=lambda: fault(running, target))
    assert ("Resumed" in disturbed.events) == (target == "gateway")
    assert undisturbed.finish == "length"
    assert len(undisturbed.tokens) == TOKENS
    assert (disturbed.tokens, disturbed.text, disturbed.finish) == (
        undisturbed.tokens,
        undisturbed.text,
        undisturbed.finish,
    )
