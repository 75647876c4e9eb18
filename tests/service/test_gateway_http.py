"""The HTTP API as the official openai client and a strict raw reader see it, against a scripted batcher."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from gateway_kit import TOKENIZER, Bench, ScriptedBatcher, bench, ids, soon

from paceline import subjects
from paceline.bus import Received
from paceline.engine_simulated import toy_card
from paceline.errors import ContextLengthExceeded, Overloaded
from paceline.wire import (
    DrainReport,
    DrainRequest,
    Failure,
    LogprobEntry,
    SystemQuery,
    SystemReport,
)
from services.gateway import http

HI: Any = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def desk(tmp_path: Path) -> AsyncIterator[tuple[Bench, ScriptedBatcher]]:
    async with bench(tmp_path, keepalive_s=0.2) as made:
        batcher = ScriptedBatcher(made.bus, made.store)
        await batcher.start()
        yield made, batcher


async def raw(
    desk: Bench, path: str, body: Any, key: str | None = None, encoding: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    headers = {"Authorization": f"Bearer {key or desk.key}", "Content-Type": "application/json"}
    if encoding is not None:
        headers["Content-Encoding"] = encoding
    data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    async with aiohttp.ClientSession() as web, web.post(desk.url + path, data=data, headers=headers) as answer:
        return answer.status, dict(answer.headers), await answer.read()


def strict(text: bytes | str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def events(body: bytes) -> list[Any]:
    """The data of a stream; every line is checked."""
    found = []
    for block in body.decode("utf-8").split("\n\n"):
        if not block:
            continue
        assert "\n" not in block
        assert block.startswith(("data: ", ":")), block
        if block.startswith("data: "):
            found.append(block.removeprefix("data: "))
    assert found[-1] == "[DONE]"
    return [strict(item) for item in found[:-1]]


# --- answers -------------------------------------------------------------------------------------------------------


async def test_the_official_client_lists_and_gets_models(desk: tuple[Bench, ScriptedBatcher]) -> None:
    async with desk[0].client() as client:
        listed = await client.models.list()
        one = await client.models.retrieve("toy")
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("some/other")
    assert [model.id for model in listed.data] == ["toy"]
    card = toy_card()
    extension = one.paceline  # type: ignore[attr-defined]
    assert (extension["context"], extension["fingerprint"]) == (card.context, card.fingerprint)
    assert extension["chat_template"] == card.chat_template
    assert "tokenizer" not in extension
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_an_edge_gets_the_whole_card(desk: tuple[Bench, ScriptedBatcher]) -> None:
    headers = {"Authorization": f"Bearer {desk[0].key}"}
    async with aiohttp.ClientSession(headers=headers) as web, web.get(desk[0].url + "/v1/models/toy?card=1") as got:
        value = await got.json()
    assert value["tokenizer"] == toy_card().tokenizer


async def test_a_chat_is_answered(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk
    async with made.client() as client:
        answer = await client.chat.completions.create(model="toy", messages=HI)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello, world", "stop")
    opening = next(iter(batcher.sessions.values())).opening
    assert opening.tokens == tuple(TOKENIZER.chat(HI))
    assert (opening.tenant, opening.speculation.hosted, opening.speculation.fill) == ("TEN-A", True, True)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(opening.tokens)
    assert answer.usage.completion_tokens == len("Hello, world") + 1
    speculation = answer.usage.speculation  # type: ignore[attr-defined]
    assert speculation["drafted"] == sum(part["drafted"] for part in speculation["by_source"].values())
    assert speculation["verifier_steps"] == 5
    await soon(lambda: made.gateway.sessions.count == 0)


async def test_every_prompt_has_n_choices_in_order(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk
    batcher.script = lambda opening: (*opening.tokens, *ids(str(opening.choice)))
    async with made.client() as client:
        answer = await client.completions.create(model="toy", prompt=["a", "bc"], n=2)
        of_ids = await client.completions.create(model="toy", prompt=list(b"xyz"))
    assert [choice.text for choice in answer.choices] == ["a0", "a1", "bc0", "bc1"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 14)
    assert of_ids.choices[0].text == "xyz0"
    seeds = {played.opening.seed for played in list(batcher.sessions.values())[:4]}
    assert len(seeds) == 1


@pytest.mark.parametrize("include_usage", [True, False])
async def test_every_line_of_a_stream_keeps_the_schema(
    desk: tuple[Bench, ScriptedBatcher], include_usage: bool
) -> None:
    made, batcher = desk
    batcher.script = lambda opening: ids("abcdef" * (opening.choice + 1))
    body = {"model": "toy", "messages": HI, "stream": True, "n": 2,
            "stream_options": {"include_usage": include_usage}}  # fmt: skip
    status, headers, data = await raw(made, "/v1/chat/completions", body)
    assert status == 200
    assert headers["Content-Type"].startswith("text/event-stream")
    found = events(data)
    chunks = [chunk for chunk in found if chunk["choices"]]
    for index in (0, 1):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "abcdef" * (index + 1)
    assert len({chunk["id"] for chunk in found}) == 1
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    without = [chunk for chunk in found if not chunk["choices"]]
    if not include_usage:
        assert without == []
        assert all("usage" not in chunk for chunk in found)
        return
    assert without == found[-1:]
    assert all(chunk["usage"] is None for chunk in chunks)
    usage = without[0]["usage"]
    assert usage["completion_tokens"] == 6 + 12 + 2
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("block", [1, 3, 4, 6, 8])
@pytest.mark.parametrize(
    ("options", "text", "reason", "tokens"),
    [
        ({"max_tokens": 6, "stop": ["d"]}, "abc", "stop", 4),
        ({"max_tokens": 6, "stop": ["g"]}, "abcdef", "length", 6),
        ({"max_tokens": 4, "stop": ["d"]}, "abc", "stop", 4),
        ({"max_tokens": 20}, "abcdefgh", "stop", 9),
        ({"max_tokens": 5}, "abcde", "length", 5),
    ],
)
async def test_the_first_end_in_token_order_wins(
    desk: tuple[Bench, ScriptedBatcher], block: int, options: Any, text: str, reason: str, tokens: int
) -> None:
    made, batcher = desk
    batcher.script, batcher.block = lambda opening: ids("abcdefgh"), block
    async with made.client() as client:
        answer = await client.chat.completions.create(model="toy", messages=HI, **options)
        parts, usage = [], None
        async for chunk in await client.chat.completions.create(
            model="toy", messages=HI, stream=True, stream_options={"include_usage": True}, **options
        ):
            usage = chunk.usage or usage
            parts += [choice.delta.content or "" for choice in chunk.choices]
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, reason)
    assert answer.usage is not None
    assert usage is not None
    assert answer.usage.completion_tokens == usage.completion_tokens == tokens
    assert "".join(parts) == text


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(("script", "shown"), [("Hi\nUser: no", ["Hi"]), ("Hi\nUsual", ["Hi", "\nUsual"])])
async def test_a_stop_string_over_two_chunks(
    desk: tuple[Bench, ScriptedBatcher], chat: bool, script: str, shown: list[str]
) -> None:
    made, batcher = desk
    batcher.script, batcher.block = lambda opening: ids(script), 5
    async with made.client() as client:
        pieces: list[str] = []
        if chat:
            async for chunk in await client.chat.completions.create(
                model="toy", messages=HI, stream=True, stop=["\nUser:"]
            ):
                pieces.append(chunk.choices[0].delta.content or "")
        else:
            async for part in await client.completions.create(
                model="toy", prompt="x", stream=True, stop="\nUser:", max_tokens=50
            ):
                pieces.append(part.choices[0].text)
    assert [piece for piece in pieces if piece] == shown


@pytest.mark.parametrize("block", [1, 2, 3])
async def test_characters_are_never_torn(desk: tuple[Bench, ScriptedBatcher], block: int) -> None:
    made, batcher = desk
    text = "aé☃😀ü" * 3
    batcher.script, batcher.block = lambda opening: ids(text), block
    async with made.client() as client:
        pieces = [
            chunk.choices[0].delta.content or ""
            async for chunk in await client.chat.completions.create(model="toy", messages=HI, stream=True)
        ]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


async def test_log_probabilities_with_a_floor_are_strict_json(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk
    batcher.top = lambda token: LogprobEntry(logprob=-0.1, top=((token, -0.1), (98, -9999.0)))
    batcher.script = lambda opening: ids("aé")
    body = {"model": "toy", "messages": HI, "logprobs": True, "top_logprobs": 5, "stream": True}
    _, _, data = await raw(made, "/v1/chat/completions", body)
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in events(data)]
    entries = [entry for part in logprobs if part for entry in part["content"]]
    assert [bytes(entry["bytes"]) for entry in entries] == [b"a", b"\xc3", b"\xa9", b"<|end|>"]
    assert entries[0]["top_logprobs"][1] == {"token": "b", "logprob": -9999.0, "bytes": [98]}
    plain = {"model": "toy", "prompt": "x", "logprobs": 5}
    _, _, data = await raw(made, "/v1/completions", plain)
    found = strict(data)["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "<|end|>"]
    assert found["text_offset"] == [0, 1, 2, 2]
    assert len(found["top_logprobs"]) == len(found["token_logprobs"]) == 4


async def test_verdicts_that_are_lost_are_repaired_in_the_stream(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk
    batcher.script, batcher.block = lambda opening: ids("abcdefghijklmnop"), 1
    batcher.lose = lambda index: index % 3 == 1 or index == 16
    async with made.client() as client:
        answer = await client.chat.completions.create(model="toy", messages=HI)
    assert answer.choices[0].message.content == "abcdefghijklmnop"
    assert answer.usage is not None
    assert answer.usage.speculation["accepted"] == 16  # type: ignore[attr-defined]


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("length", [64, 100])
async def test_a_prompt_that_leaves_no_room_is_refused_before_the_stream(
    tmp_path: Path, stream: bool, length: int
) -> None:
    async with bench(tmp_path, context=64) as made:
        batcher = ScriptedBatcher(made.bus, made.store)
        await batcher.start()
        status, _, data = await raw(made, "/v1/completions", {"model": "toy", "prompt": "x" * length, "stream": stream})
        assert status == 400
        error = strict(data)["error"]
        assert error["code"] == "context_length_exceeded"
        assert "64" in error["message"]
        assert str(length) in error["message"]
        assert batcher.sessions == {}
        status, _, _ = await raw(made, "/v1/completions", {"model": "toy", "prompt": "x" * 63})
        assert status == 200


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"model": "nope", "messages": HI}, 404, "model_not_found", "model"),
        ({"model": "toy", "messages": HI, "temperature": -1}, 400, "invalid_value", "temperature"),
        ({"model": "toy", "messages": HI, "n": 0}, 400, "invalid_value", "n"),
        ({"model": "toy", "messages": []}, 400, "invalid_value", "messages"),
        ({"model": "toy", "messages": HI, "logit_bias": {"999": 1}}, 400, "invalid_value", "logit_bias"),
        (b"{not json", 400, "invalid_json", None),
        (b"[" * 100_000, 400, "invalid_json", None),
        (b'{"model": "toy", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, "invalid_json", None),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_bad_requests_have_openais_shape(
    desk: tuple[Bench, ScriptedBatcher], body: Any, status: int, code: str, param: str | None, stream: bool
) -> None:
    sent = {**body, "stream": stream} if isinstance(body, dict) else body
    got, headers, data = await raw(desk[0], "/v1/chat/completions", sent)
    error = strict(data)["error"]
    assert headers["Content-Type"].startswith("application/json")
    assert (got, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic abc", "Bearer "])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/system/drain"])
async def test_without_a_good_key_nothing_is_served(
    desk: tuple[Bench, ScriptedBatcher], header: str | None, path: str
) -> None:
    headers = {"Authorization": header} if header else {}
    async with aiohttp.ClientSession() as web, web.post(desk[0].url + path, data=b"{}", headers=headers) as answer:
        error = (await answer.json())["error"]
    assert answer.status == 401
    assert error["type"] == "authentication_error"
    assert error["code"] in ("missing_api_key", "invalid_api_key")
    assert "wrong" not in error["message"]


async def test_prompts_that_hold_nothing_or_strange_ids(desk: tuple[Bench, ScriptedBatcher]) -> None:
    for prompt, code in (("", "empty_prompt"), ([300], "invalid_value"), ([[1], []], "empty_prompt")):
        status, _, data = await raw(desk[0], "/v1/completions", {"model": "toy", "prompt": prompt})
        assert (status, strict(data)["error"]["code"], strict(data)["error"]["param"]) == (400, code, "prompt")


async def test_unknown_paths_and_methods_have_the_shape_too(desk: tuple[Bench, ScriptedBatcher]) -> None:
    async with aiohttp.ClientSession() as web:
        async with web.get(desk[0].url + "/v1/nothing") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "unknown_url")
        async with web.get(desk[0].url + "/v1/completions") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (405, "method_not_allowed")


async def test_a_body_that_never_comes_is_given_up(
    desk: tuple[Bench, ScriptedBatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "BODY_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", desk[0].gateway.port)
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {desk[0].key}", "Content-Length: 99"]
    writer.write("\r\n".join([*lines, "", "{"]).encode())
    line = await asyncio.wait_for(reader.readline(), 3)
    writer.close()
    assert b" 408 " in line


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(tmp_path: Path) -> None:
    async with bench(tmp_path, context=64) as made:
        chat = {"messages": [{"role": "user", "content": "x" * 400_000}]}
        for path, prompt in (("/v1/completions", {"prompt": "é" * 200_000}), ("/v1/chat/completions", chat)):
            status, _, data = await raw(made, path, {"model": "toy", **prompt})
            error = strict(data)["error"]
            assert (status, error["code"]) == (400, "context_length_exceeded")
            assert "64" in error["message"]
            assert "400000" in error["message"]


@pytest.mark.parametrize(
    ("encoding", "body", "code"),
    [
        ("gzip", b"this is no gzip", "invalid_encoding"),
        ("gzip", b"", "invalid_encoding"),
        ("gzip", gzip.compress(b"{}")[:-4], "invalid_encoding"),
        ("gzip", gzip.compress(b"{}") + b"more", "invalid_encoding"),
        ("deflate", b"this is no deflate", "invalid_encoding"),
        ("deflate", zlib.compress(b"{}")[:-1], "invalid_encoding"),
        ("br", b"\x0b\x02\x80{}\x03", "unsupported_encoding"),
        ("zstd", b"\x28\xb5\x2f\xfd", "unsupported_encoding"),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}")), "unsupported_encoding"),
        ("foo", b"{}", "unsupported_encoding"),
    ],
)
async def test_a_damaged_or_unknown_compression_is_a_bad_request(
    desk: tuple[Bench, ScriptedBatcher], encoding: str, body: bytes, code: str
) -> None:
    status, headers, data = await raw(desk[0], "/v1/completions", body, encoding=encoding)
    assert headers["Content-Type"].startswith("application/json")
    error = strict(data)["error"]
    assert (status, error["code"], error["type"]) == (400, code, "invalid_request_error")


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("X-GZIP", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda data: zlib.compress(data, wbits=-15)),
        ("identity", bytes),
    ],
)
async def test_compressed_bodies_are_served_within_the_limit(
    tmp_path: Path, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    async with bench(tmp_path, max_body_bytes=1000) as made:
        await ScriptedBatcher(made.bus, made.store).start()
        for size, wanted in ((10, 200), (2000, 413)):
            body = json.dumps({"model": "toy", "prompt": "x" * size}).encode()
            status, _, data = await raw(made, "/v1/completions", pack(body), encoding=encoding)
            assert status == wanted, data


async def test_a_body_over_the_limit_names_both_numbers(tmp_path: Path) -> None:
    async with bench(tmp_path, max_body_bytes=1000) as made:
        for body in (b" " * 1001, json.dumps({"model": "toy", "prompt": "x" * 2000}).encode()):
            status, _, data = await raw(made, "/v1/completions", body)
            error = strict(data)["error"]
            assert (status, error["code"]) == (413, "too_large")
            assert "1000" in error["message"]
            assert str(len(body)) in error["message"]


async def test_the_batchers_refusal_reaches_the_client(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk
    batcher.refuse = Overloaded("300 sessions are the bound", retry_after_s=7)
    status, headers, data = await raw(made, "/v1/chat/completions", {"model": "toy", "messages": HI, "stream": True})
    assert (status, headers["Retry-After"]) == (429, "7")
    assert strict(data)["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "prompt"), [("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "hi"})]
)
async def test_a_refusal_names_the_parameter_that_the_client_used(
    desk: tuple[Bench, ScriptedBatcher], path: str, prompt: dict[str, Any], stream: bool
) -> None:
    made, batcher = desk
    batcher.refuse = ContextLengthExceeded("9 tokens, 8 fit", param="tokens")
    status, _, data = await raw(made, path, {"model": "toy", "stream": stream, **prompt})
    assert (status, strict(data)["error"]["param"]) == (400, *prompt)


async def test_when_one_choice_is_refused_the_others_are_closed(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk
    seen = []
    forever = asyncio.Event()

    async def gate(_: Any) -> None:
        await forever.wait()

    opened = batcher._open

    async def second_refused(opening: Any, received: Received) -> None:
        seen.append(opening.session)
        if len(seen) == 2:
            raise Overloaded("no more")
        await opened(opening, received)

    batcher.gate, batcher._open = gate, second_refused  # type: ignore[method-assign]
    status, _, _ = await raw(made, "/v1/chat/completions", {"model": "toy", "messages": HI, "n": 3})
    assert status == 429
    await batcher.until(lambda: {seen[0], seen[2]} <= set(batcher.closed))
    forever.set()
    await soon(lambda: made.gateway.sessions.count == 0)


async def test_nobody_listening_is_a_503_within_a_second_that_names_the_component(tmp_path: Path) -> None:
    async with bench(tmp_path, alive=False) as made:
        started = asyncio.get_running_loop().time()
        status, _, data = await raw(made, "/v1/chat/completions", {"model": "toy", "messages": HI})
        assert (status, strict(data)["error"]["code"]) == (503, "batcher_unavailable")
        assert asyncio.get_running_loop().time() - started < 1.3
        await made.components()
        await soon(lambda: not made.gateway.sessions.fleet.missing())
        started = asyncio.get_running_loop().time()
        status, _, data = await raw(made, "/v1/chat/completions", {"model": "toy", "messages": HI})
        assert (status, strict(data)["error"]["code"]) == (503, "batcher_unavailable")
        assert asyncio.get_running_loop().time() - started < 1


async def test_a_bus_that_is_away_is_a_503(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, _ = desk
    await soon(lambda: not made.gateway.sessions.fleet.missing())
    made.bus.lose()
    status, _, data = await raw(made, "/v1/chat/completions", {"model": "toy", "messages": HI})
    assert (status, strict(data)["error"]["code"]) == (503, "bus_unavailable")
    made.bus.restore()
    status, _, _ = await raw(made, "/v1/chat/completions", {"model": "toy", "messages": HI})
    assert status == 200


# --- silence, errors, ends -----------------------------------------------------------------------------------------


async def test_silence_is_filled_with_comments_that_clients_ignore(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk

    async def slow(played: Any) -> None:
        await asyncio.sleep(1.0 if played.steps in (0, 2) else 0)

    batcher.gate = slow
    timeout = openai.Timeout(10, read=0.5)
    async with made.client(timeout=timeout) as client:
        chunks = [c async for c in await client.chat.completions.create(model="toy", messages=HI, stream=True)]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello, world"
    assert len(chunks) == 1 + 4 + 1  # role, four blocks of text, finish: no chunk for a comment
    _, _, data = await raw(made, "/v1/chat/completions", {"model": "toy", "messages": HI, "stream": True})
    assert data.startswith(b": keep-alive\n\n")
    assert data.count(b": keep-alive\n\n") >= 6


async def test_an_error_in_mid_stream_reaches_the_client(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk

    async def break_(played: Any) -> None:
        if played.steps == 2:
            failure = Failure(status=500, code="engine_failed", message="the step failed twice")
            await batcher.commit(played, (), "error", error=failure)

    batcher.gate = break_
    async with made.client() as client:
        shown: list[str] = []

        async def read() -> None:
            async for chunk in await client.chat.completions.create(model="toy", messages=HI, stream=True):
                shown.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError, match="the step failed twice") as caught:
            await read()
        assert ("".join(shown), caught.value.code) == ("Hello,", "engine_failed")
        with pytest.raises(openai.InternalServerError, match="the step failed twice"):
            await client.chat.completions.create(model="toy", messages=HI)


@pytest.mark.parametrize("stage", ["opening", "waiting", "streaming", "whole"])
async def test_a_client_that_leaves_ends_its_sessions_everywhere(
    desk: tuple[Bench, ScriptedBatcher], stage: str
) -> None:
    made, batcher = desk
    held = asyncio.Event()

    async def gate(played: Any) -> None:
        if stage == "waiting" or played.steps == 2:
            await held.wait()

    batcher.gate = gate
    batcher.silent = stage == "opening"
    client = made.client()

    async def call() -> None:
        stream = await client.chat.completions.create(model="toy", messages=HI, stream=stage != "whole", n=2)
        async for _ in stream:  # type: ignore[union-attr]
            pass

    task = asyncio.create_task(call())
    if stage == "opening":
        await batcher.until(lambda: made.gateway.running == 1)
        await asyncio.sleep(0.1)
    else:
        await soon(lambda: len(batcher.sessions) == 2)
        await soon(lambda: stage == "waiting" or all(played.steps == 2 for played in batcher.sessions.values()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await client.close()
    await batcher.until(lambda: len(set(batcher.closed)) == 2, seconds=2)
    held.set()
    await soon(lambda: made.gateway.running == 0)
    if stage != "opening":
        assert all(played.finish == "cancelled" for played in batcher.sessions.values())
        await soon(lambda: made.gateway.sessions.count == 0)


async def test_a_client_that_leaves_after_the_end_cancels_nothing(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk
    async with made.client() as client:
        async for _ in await client.chat.completions.create(model="toy", messages=HI, stream=True):
            pass
    await soon(lambda: made.gateway.sessions.count == 0)
    assert batcher.closed == []


async def test_a_storm_of_clients_that_leave_at_any_moment_leaves_nothing_behind(
    desk: tuple[Bench, ScriptedBatcher],
) -> None:
    made, batcher = desk
    chance = random.Random(7)
    batcher.gate = lambda played: asyncio.sleep(0.01)
    body: dict[str, Any] = {"model": "toy", "messages": HI}
    await raw(made, "/v1/chat/completions", body)
    await soon(lambda: made.gateway.sessions.count == 0)
    before = len(asyncio.all_tasks())

    async def call(number: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.uniform(0, 0.12)):
                await raw(made, "/v1/chat/completions", {**body, "stream": number % 2 == 0, "n": 1 + number % 3})

    for _ in range(5):
        await asyncio.gather(*(call(number) for number in range(20)))
    await soon(lambda: made.gateway.running == 0 and made.gateway.sessions.count == 0, seconds=8)
    await soon(lambda: len(asyncio.all_tasks()) <= before + 1, seconds=8)
    assert all(played.finish is not None for played in batcher.sessions.values())


async def test_presence_is_spoken_for_waiting_clients(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, batcher = desk

    async def slow(played: Any) -> None:
        await asyncio.sleep(1.2 if played.steps == 0 else 0)

    batcher.gate = slow
    async with made.client() as client:
        await client.chat.completions.create(model="toy", messages=HI)
    assert len(batcher.presences) >= 3
    assert {presence.connection for presence in batcher.presences} == {1}


async def test_a_stopping_gateway_lets_streams_end_and_takes_no_more(tmp_path: Path) -> None:
    async with bench(tmp_path, drain_s=5.0) as made:
        batcher = ScriptedBatcher(made.bus, made.store)

        async def slow(_: Any) -> None:
            await asyncio.sleep(0.1)

        batcher.gate = slow
        await batcher.start()
        call = asyncio.create_task(raw(made, "/v1/chat/completions", {"model": "toy", "messages": HI, "stream": True}))
        await soon(lambda: len(batcher.sessions) == 1)
        made.service.stopping.set()
        status, _, data = await raw(made, "/v1/chat/completions", {"model": "toy", "messages": HI})
        assert (status, strict(data)["error"]["code"]) == (503, "stopping")
        drained = asyncio.create_task(made.gateway.drain())
        _, _, data = await call
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events(data)) == "Hello, world"
        await asyncio.wait_for(drained, 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_that_outlast_the_drain_are_told(tmp_path: Path, stream: bool) -> None:
    async with bench(tmp_path, drain_s=0.5) as made:
        batcher = ScriptedBatcher(made.bus, made.store, gate=lambda played: asyncio.sleep(30))
        await batcher.start()
        call = asyncio.create_task(
            raw(made, "/v1/chat/completions", {"model": "toy", "messages": HI, "stream": stream})
        )
        await soon(lambda: len(batcher.sessions) == 1)
        await made.gateway.drain()
        status, headers, data = await call
        assert stream or (status, headers["Retry-After"]) == (503, "1")
        assert b'"code":"stopping"' in data
        assert b"[DONE]" not in data
        for played in batcher.sessions.values():
            assert played.task is not None
            played.task.cancel()


# --- health and the system -----------------------------------------------------------------------------------------


async def test_readiness_names_what_is_missing(tmp_path: Path) -> None:
    async with bench(tmp_path, alive=False) as made, aiohttp.ClientSession() as web:
        async with web.get(made.url + "/healthz") as answer:
            assert answer.status == 200
        async with web.get(made.url + "/readyz") as answer:
            assert answer.status == 503
            assert {"batcher", "verifier"} <= (await answer.json())["not_ready"].keys()
        await made.components()
        await asyncio.sleep(0.7)
        async with web.get(made.url + "/readyz") as answer:
            assert answer.status == 200


async def test_metrics_count_requests_by_route(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, _ = desk
    await raw(made, "/v1/chat/completions", {"model": "toy", "messages": HI})
    await raw(made, "/v1/chat/completions", {"model": "nope", "messages": HI})
    async with aiohttp.ClientSession() as web, web.get(made.url + "/metrics") as answer:
        text = await answer.text()
    assert 'paceline_http_requests_total{route="chat_completions",status="2xx"} 1.0' in text
    assert 'paceline_http_requests_total{route="chat_completions",status="4xx"} 1.0' in text
    assert made.key not in text


async def test_the_system_and_draining(desk: tuple[Bench, ScriptedBatcher]) -> None:
    made, _ = desk
    headers = {"Authorization": f"Bearer {made.admin}"}

    async def report(received: Received) -> None:
        assert received.respond is not None
        await received.respond(SystemReport(verifiers=(), batchers=(), drafters=(), decisions=()))

    async def drain(received: Received) -> None:
        message = received.message
        assert received.respond is not None
        assert isinstance(message, DrainRequest)
        await received.respond(DrainReport(verifier=message.verifier, moved=3, remaining=0, seconds=0.5))

    async with aiohttp.ClientSession(headers=headers) as web:
        async with web.get(made.url + "/v1/system") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "policy_unavailable")
        await made.bus.subscribe(subjects.SYSTEM.at(), report, SystemQuery)
        await made.bus.subscribe(subjects.DRAIN.at(), drain, DrainRequest)
        async with web.get(made.url + "/v1/system") as answer:
            assert (await answer.json())["verifiers"] == []
        async with web.post(made.url + "/v1/system/drain", json={"verifier": "v1"}) as answer:
            assert (await answer.json())["moved"] == 3
        async with web.post(made.url + "/v1/system/drain", json={}) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "verifier")
    status, _, data = await raw(made, "/v1/system/drain", {"verifier": "v1"})
    assert (status, strict(data)["error"]["code"]) == (403, "forbidden")
