"""The official client through gateway, batcher, verifier and hosted drafter on one bus, with simulated engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_kit import Bench, bench, soon

from edge_client.client import EdgeClient
from edge_client.events import Committed, Cut
from edge_client.session import Request
from paceline.engine_simulated import SimulatedDraft
from paceline.service import Service
from paceline.settings import Settings
from paceline.simulated_world import World
from services.batcher.batcher import body as batcher_body
from services.drafter.drafter import body as drafter_body
from services.verifier.verifier import body as verifier_body

HI: Any = [{"role": "user", "content": "hi"}]
BODIES = {"verifier": verifier_body, "drafter": drafter_body, "batcher": batcher_body}


@asynccontextmanager
async def whole(
    folder: Path, names: Sequence[str] = ("verifier", "drafter", "batcher"), *, context: int = 2048, **simulated: Any
) -> AsyncIterator[Bench]:
    """`simulated`: contents of the simulated engines' file. Ready when a batcher and a verifier were heard of."""
    file = folder / "simulated.json"
    file.write_text(json.dumps(simulated))
    values = {
        "model": "toy",
        "models_dir": folder / "models",
        "engine": "simulated",
        "simulated_file": file,
        "lease_ttl_s": 1.0,
    }
    services: list[Service] = []
    async with bench(folder, alive=False, context=context) as made, AsyncExitStack() as stack:
        for name in names:
            settings = Settings.of(**{**values, "instance": f"{name}-1"})
            service = Service(name, settings, made.bus, made.store, made.store)
            services.append(service)
            stack.push_async_callback(service.stop)
            await stack.enter_async_context(BODIES[name](service))
        await _answering(made)
        yield made
    assert [service.failure for service in services if service.failure] == []


async def _answering(made: Bench) -> None:
    """Wait until every service has heard of the others."""
    async with asyncio.timeout(10), made.client() as client:
        while True:
            with contextlib.suppress(openai.InternalServerError):
                await client.completions.create(model="toy", prompt="x", max_tokens=1)
                return
            await asyncio.sleep(0.05)


async def streamed(client: openai.AsyncOpenAI, **options: Any) -> tuple[str, Any, str | None]:
    """Text, usage and finish of one streamed chat."""
    text, usage, finish = "", None, None
    stream = await client.chat.completions.create(
        model="toy", messages=HI, stream=True, stream_options={"include_usage": True}, **options
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, usage, finish


async def test_speculation_changes_how_an_answer_is_made_and_not_what_it_says(tmp_path: Path) -> None:
    async with whole(tmp_path, base_ms=4, acceptance=0.8) as made, made.client() as client:
        asked: dict[str, Any] = {"max_tokens": 40, "seed": 5, "temperature": 0.8}
        text, usage, finish = await streamed(client, **asked)
        off: dict[str, Any] = {"speculation": {"enabled": False}}
        plain, plain_usage, _ = await streamed(client, extra_body=off, **asked)
        answer = await client.chat.completions.create(model="toy", messages=HI, **asked)
    assert text == plain == answer.choices[0].message.content
    assert (usage.completion_tokens, finish) == (40, "length")
    assert plain_usage.speculation["drafted"] == 0
    assert plain_usage.speculation["verifier_steps"] == 40
    assert 0 < usage.speculation["accepted"] <= usage.completion_tokens
    assert usage.speculation["by_source"]["hosted"]["accepted"] > 0
    assert usage.speculation["verifier_steps"] < 40


@pytest.mark.parametrize("max_draft", [1, 3, 4, 6])
async def test_usage_is_what_was_delivered(tmp_path: Path, max_draft: int) -> None:
    script = "abcdefghijklmnopqrstuvwxyz0123"
    async with whole(tmp_path, script={"*": script}, acceptance=1.0, base_ms=1) as made, made.client() as client:
        for _ in range(5):
            text, usage, finish = await streamed(
                client, max_tokens=10, extra_body={"speculation": {"max_draft": max_draft}}
            )
            assert (text, usage.completion_tokens, finish) == (script[:10], 10, "length")
            assert usage.total_tokens == usage.prompt_tokens + 10
            assert usage.speculation["accepted"] <= 10


async def test_ends_in_the_middle_of_a_block(tmp_path: Path) -> None:
    async with whole(tmp_path, script={"*": "abcdefgh"}, acceptance=1.0, base_ms=3) as made, made.client() as client:
        for stop, limit, shown, count, reason in (
            ("d", 6, "abc", 4, "stop"),
            ("g", 6, "abcdef", 6, "length"),
            ("fg", 20, "abcde", 7, "stop"),
            ("nope", 20, "abcdefgh", 9, "stop"),
        ):
            text, usage, finish = await streamed(client, stop=[stop], max_tokens=limit)
            assert (text, usage.completion_tokens, finish) == (shown, count, reason)


async def test_characters_stops_and_scores_with_drafts(tmp_path: Path) -> None:
    script = "né ☃ 😀 fin"
    simulated = {"script": {"*": script}, "acceptance": 0.7, "floor": float("-inf")}
    async with whole(tmp_path, **simulated) as made, made.client() as client:
        text, _, _ = await streamed(client)
        answer = await client.chat.completions.create(model="toy", messages=HI, logprobs=True, top_logprobs=5)
    assert text == script
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens == len(script.encode()) + 1
    assert bytes(b for entry in logprobs.content[:-1] for b in entry.bytes or ()) == script.encode()


async def test_choices_are_sessions_of_one_seed(tmp_path: Path) -> None:
    async with whole(tmp_path) as made, made.client() as client:
        answers = [
            await client.chat.completions.create(model="toy", messages=HI, n=3, seed=11, max_tokens=16)
            for _ in range(2)
        ]
        greedy = await client.chat.completions.create(model="toy", messages=HI, n=2, temperature=0, max_tokens=16)
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    assert greedy.choices[0].message.content == greedy.choices[1].message.content


@pytest.mark.parametrize(("length", "limit", "count"), [(63, None, 1), (60, 20, 4), (60, 2, 2)])
async def test_a_completion_is_cut_at_the_context(tmp_path: Path, length: int, limit: int | None, count: int) -> None:
    async with whole(tmp_path, context=64) as made, made.client() as client:
        answer = await client.completions.create(model="toy", prompt="x" * length, max_tokens=limit or 16)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (count, "length")


async def test_sampling_options_reach_the_target(tmp_path: Path) -> None:
    async with whole(tmp_path, script={"*": "aaaa"}, acceptance=1.0) as made, made.client() as client:
        banned = await client.completions.create(model="toy", prompt="x", logit_bias={"97": -100}, temperature=0)
        long = await client.completions.create(
            model="toy", prompt="x", max_tokens=12, temperature=0, extra_body={"min_tokens": 8}
        )
    assert "a" not in banned.choices[0].text
    assert long.usage is not None
    assert long.choices[0].text.startswith("aaaa")
    assert long.usage.completion_tokens >= 8


async def test_a_client_that_leaves_stops_the_work(tmp_path: Path) -> None:
    async with whole(tmp_path, base_ms=20) as made, made.client() as client:
        stream = await client.chat.completions.create(model="toy", messages=HI, stream=True)
        session = next(iter(made.gateway.sessions._speaker._live.values())).session
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        await stream.close()
        async with asyncio.timeout(2):
            while (record := await made.store.load(session)) is None or record.finish is None:
                await asyncio.sleep(0.02)
        assert record.finish == "cancelled"
        await soon(lambda: made.gateway.sessions.count == 0)


async def test_without_a_hosted_drafter_answers_go_on(tmp_path: Path) -> None:
    async with whole(tmp_path, ("verifier", "batcher")) as made, made.client() as client:
        text, usage, _ = await streamed(client, max_tokens=12)
    assert len(text) == 12
    assert usage.speculation["drafted"] == 0


async def test_a_verifier_that_never_comes_is_named_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path, alive=False) as made, made.client() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="toy", messages=HI)
    assert (caught.value.status_code, caught.value.code) == (503, "batcher_unavailable")


async def test_the_clients_own_helpers(tmp_path: Path) -> None:
    async with whole(tmp_path, script={"*": "four words and more"}) as made, made.client() as client:
        async with client.chat.completions.stream(
            model="toy", messages=HI, n=2, logprobs=True, top_logprobs=2, stream_options={"include_usage": True}
        ) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        raw = await client.chat.completions.with_raw_response.create(model="toy", messages=HI)
        legacy = [
            part async for part in await client.completions.create(model="toy", prompt="x", stream=True, logprobs=1)
        ]
    assert {"content.delta", "content.done", "logprobs.content.done"} <= kinds
    assert [choice.message.content for choice in final.choices] == ["four words and more"] * 2
    assert final.usage is not None
    assert final.choices[0].logprobs is not None
    assert len(final.choices[0].logprobs.content or ()) * 2 == final.usage.completion_tokens
    assert raw.parse().choices[0].message.content == "four words and more"
    assert "".join(part.choices[0].text for part in legacy) == "four words and m"
    scored = [part.choices[0].logprobs for part in legacy]
    assert [token for part in scored if part for token in part.tokens or ()] == list("four words and m")


@pytest.mark.parametrize("cut", [False, True])
async def test_an_edge_device_gets_the_text_of_plain_clients_even_if_its_link_is_cut(tmp_path: Path, cut: bool) -> None:
    async with whole(tmp_path, base_ms=8) as made, made.client() as client:
        prompt = tuple(b"Tell me")
        plain = await client.completions.create(
            model="toy", prompt=list(prompt), max_tokens=60, seed=3, extra_body={"speculation": {"enabled": False}}
        )
        request = Request(tokens=prompt, max_tokens=60, seed=3)
        engine = SimulatedDraft(World())
        tokens: list[int] = []
        cuts_at = [10, 30] if cut else []
        seen = 0
        async with EdgeClient.connect(made.url, made.key, model="toy", engine=engine) as device:
            async for event in device.generate(request):
                seen += isinstance(event, Cut)
                if isinstance(event, Committed):
                    tokens += event.tokens
                if cuts_at and len(tokens) >= cuts_at[0]:
                    del cuts_at[0]
                    await asyncio.gather(*(socket.close() for socket in list(made.gateway._edges._open)))
        assert bytes(tokens).decode() == plain.choices[0].text
        assert seen == (2 if cut else 0)
        await soon(lambda: made.gateway.sessions.count == 0)
