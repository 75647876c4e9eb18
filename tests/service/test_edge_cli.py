"""The command line `paceline` as a process of its own, against a scripted gateway."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
import termios
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from edge_kit import CARD, END, KEY, ScriptedGateway, ids, refused, scripted_gateway

from paceline import wire
from paceline.settings import Settings, child_environment

TEXT = "Fair winds\nand a following sea."


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as running:
        yield running


@asynccontextmanager
async def paceline(
    *words: str, gateway: str, models: Path, key: str | None = KEY, model: str = CARD.model, stdin: str | None = None
) -> AsyncIterator[Process]:
    values = {"gateway_url": gateway, "models_dir": models, "model": model}
    settings = Settings.load(**values, **({"api_key": key} if key else {}))
    wanted = {"PACELINE_" + name.upper() for name in (*values, *(["api_key"] if key else []))}
    environment = {name: value for name, value in settings.environment().items() if name in wanted}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "edge_client", *words, stdout=PIPE, stderr=PIPE,
        stdin=PIPE if stdin is not None else asyncio.subprocess.DEVNULL,
        env=child_environment(environment, COLUMNS="200", PYTHONWARNINGS="error"),
    )  # fmt: skip
    if stdin is not None and process.stdin is not None:
        process.stdin.write(stdin.encode())
        process.stdin.close()
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@dataclass
class Terminal:
    """A process on a pseudo-terminal of 60 columns."""

    process: Process
    controller: int
    shown: str = ""

    def type(self, keys: str) -> None:
        os.write(self.controller, keys.encode())

    async def until(self, words: str) -> None:
        """Until `words` are on the screen, after what was waited for before."""
        seen = len(self.shown)
        async with asyncio.timeout(30):
            while words not in self.shown[seen:]:
                self.shown += await self._read()

    async def _read(self) -> str:
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.controller, came.set)
        try:
            await came.wait()
        finally:
            loop.remove_reader(self.controller)
        return os.read(self.controller, 65536).decode()


@asynccontextmanager
async def chat_on_a_terminal(gateway: ScriptedGateway, models: Path) -> AsyncIterator[Terminal]:
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 60))
    settings = Settings.load(gateway_url=gateway.url, models_dir=models, model=CARD.model, api_key=KEY)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "edge_client", "chat", stdin=terminal, stdout=terminal, stderr=terminal,
        env=child_environment(settings.environment(), TERM="xterm"), start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    try:
        yield Terminal(process, controller)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(controller)


async def ended(process: Process) -> tuple[int, str, str]:
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    assert "Traceback" not in err.decode()
    return process.returncode or 0, out.decode(), err.decode()


async def answer(gateway: ScriptedGateway, text: str = TEXT) -> None:
    told = await gateway.session()
    await told.commit(ids(text[:4]))
    await told.commit(ids(text[4:]))
    await told.commit((END,), finish="stop")


async def test_run_prints_the_text_alone_on_stdout(gateway: ScriptedGateway, tmp_path: Path) -> None:
    async with paceline("run", "hello", gateway=gateway.url, models=tmp_path) as process:
        await answer(gateway)
        assert await ended(process) == (0, TEXT + "\n", "")
    told = await gateway.session()
    assert told.opened.speculation == wire.Speculation()
    assert bytes(t for t in told.opened.tokens if t < 256).decode().count("hello") == 1


async def test_a_cut_leaves_the_piped_text_whole(gateway: ScriptedGateway, tmp_path: Path) -> None:
    async with paceline("run", "--stats", "hello", gateway=gateway.url, models=tmp_path) as process:
        told = await gateway.session()
        await told.commit(ids(TEXT[:7]))
        assert process.stdout is not None
        first = await process.stdout.readexactly(7)
        told.cut()
        await told.until(lambda: bool(told.resumes))
        await told.commit(ids(TEXT[7:]), finish="stop")
        code, out, err = await ended(process)
    assert (code, first.decode() + out) == (0, TEXT + "\n")
    assert "link lost" in err
    assert "1 cut " in err


async def test_options_reach_the_cloud(gateway: ScriptedGateway, tmp_path: Path) -> None:
    words = ["run", "hi", "-t", "0.5", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.1",
             "--repetition-penalty", "1.2", "--presence-penalty", "0.3", "--frequency-penalty", "-0.2", "--seed", "5",
             "-n", "12", "--stop", "a",
             "--stop", "b", "--no-speculation", "--max-draft", "4", "--depth", "1", "--no-fill"]  # fmt: skip
    async with paceline(*words, gateway=gateway.url, models=tmp_path) as process:
        await answer(gateway)
        assert (await ended(process))[0] == 0
    opened = (await gateway.session()).opened
    assert opened.sampling == wire.Sampling(
        temperature=0.5, top_k=9, top_p=0.9, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=-0.2, end_ids=CARD.end_ids,
    )  # fmt: skip
    assert opened.speculation == wire.Speculation(enabled=False, max_draft=4, depth=1, fill=False)
    assert (opened.seed, opened.max_tokens, opened.stop) == (5, 12, ("a", "b"))


async def test_json_is_one_object(gateway: ScriptedGateway, tmp_path: Path) -> None:
    async with paceline("run", "--json", "-", gateway=gateway.url, models=tmp_path, stdin="from stdin") as process:
        await answer(gateway)
        code, out, err = await ended(process)
    told = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert (told["text"], told["finish_reason"]) == (TEXT, "stop")
    assert told["tokens"] == [*ids(TEXT), END]
    assert told["usage"]["completion_tokens"] == len(TEXT) + 1
    assert bytes((await gateway.session()).opened.tokens[1:11]) == b"from stdin"


async def test_show_drafts_without_a_terminal_prints_text_and_legend(gateway: ScriptedGateway, tmp_path: Path) -> None:
    async with paceline("run", "--show-drafts", "hello", gateway=gateway.url, models=tmp_path) as process:
        await answer(gateway)
        code, out, err = await ended(process)
    assert (code, out) == (0, TEXT + "\n")
    assert "filled 32" in err


async def test_interrupt_ends_the_session_in_the_cloud(gateway: ScriptedGateway, tmp_path: Path) -> None:
    async with paceline("run", "hello", gateway=gateway.url, models=tmp_path) as process:
        told = await gateway.session()
        await told.commit(ids("Fair"))
        assert process.stdout is not None
        await process.stdout.readexactly(4)
        process.send_signal(signal.SIGINT)
        code, out, err = await ended(process)
    assert (code, out, told.closes) == (130, "\n", 1)
    assert "ended in the cloud too" in err


async def test_interrupt_before_the_first_token(gateway: ScriptedGateway, tmp_path: Path) -> None:
    async with paceline("run", "hello", gateway=gateway.url, models=tmp_path) as process:
        told = await gateway.session()
        process.send_signal(signal.SIGINT)
        code, out, _ = await ended(process)
    assert (code, out, told.closes) == (130, "", 1)


async def test_interrupt_while_the_gateway_does_not_answer(gateway: ScriptedGateway, tmp_path: Path) -> None:
    gateway.awake.clear()
    async with paceline("run", "hello", gateway=gateway.url, models=tmp_path) as process:
        while not gateway.connects:
            gateway.changed.clear()
            await gateway.changed.wait()
        process.send_signal(signal.SIGINT)
        assert (await ended(process))[0] == 130


async def test_a_second_interrupt_leaves_at_once(gateway: ScriptedGateway, tmp_path: Path) -> None:
    gateway.answer_close = False
    async with paceline("run", "hello", gateway=gateway.url, models=tmp_path) as process:
        told = await gateway.session()
        process.send_signal(signal.SIGINT)
        await told.until(lambda: told.closes == 1)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(3):
            assert (await ended(process))[0] == 130


async def test_a_wrong_key(gateway: ScriptedGateway, tmp_path: Path) -> None:
    async with paceline("run", "hello", gateway=gateway.url, models=tmp_path, key="sk-7f3c9e") as process:
        code, out, err = await ended(process)
    assert (code, out) == (1, "")
    assert "error: the API key is not known here" in err
    assert "PACELINE_API_KEY=$(cat .state/key)" in err
    assert "7f3c9e" not in err


async def test_no_key(gateway: ScriptedGateway, tmp_path: Path) -> None:
    async with paceline("run", "hello", gateway=gateway.url, models=tmp_path, key=None) as process:
        code, _, err = await ended(process)
    assert code == 1
    assert "no API key" in err
    assert "`make up` on this machine makes one" in err


async def test_a_gateway_that_is_away(tmp_path: Path) -> None:
    async with paceline("run", "hello", gateway="http://127.0.0.1:9", models=tmp_path) as process:
        code, _, err = await ended(process)
    assert code == 1
    assert "error: no gateway answers at http://127.0.0.1:9: connection refused" in err
    assert "--gateway" in err


async def test_an_error_in_json(tmp_path: Path) -> None:
    async with paceline("run", "--json", "hello", gateway="http://127.0.0.1:9", models=tmp_path) as process:
        code, out, _ = await ended(process)
    assert (code, json.loads(out)["error"]["code"]) == (1, "unavailable")


async def test_a_model_that_the_gateway_does_not_serve(gateway: ScriptedGateway, tmp_path: Path) -> None:
    async with paceline("run", "hello", gateway=gateway.url, models=tmp_path, model="nope") as process:
        code, _, err = await ended(process)
    assert code == 1
    assert f"model `nope` is not served at {gateway.url}; served there: {CARD.model}" in err


@pytest.mark.parametrize("status", [200, 404])
async def test_somebody_elses_server(tmp_path: Path, status: int) -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b"<html><h1>It works</h1></html>"
        head = f"HTTP/1.1 {status} X\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(page, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with paceline("run", "hello", gateway=url, models=tmp_path) as process:
            code, _, err = await ended(process)
    assert code == 1
    assert f"what answers at {url} is no Paceline gateway (HTTP {status}, text/html)" in err
    assert "<html>" not in err
    assert "--gateway" in err


async def test_a_draft_model_that_is_missing_names_the_command(gateway: ScriptedGateway, tmp_path: Path) -> None:
    import msgspec

    gateway.card = msgspec.structs.replace(CARD, model="smollm2", simulated=False)
    async with paceline("run", "hello", gateway=gateway.url, models=tmp_path, model="smollm2") as process:
        code, _, err = await ended(process)
    assert code == 1
    assert "`paceline models pull smollm2`" in err.replace("\n", " ")
    assert "--hosted" in err


async def test_a_refused_opening(gateway: ScriptedGateway, tmp_path: Path) -> None:
    answer = refused(400, "context_length_exceeded", "9000 tokens, the context holds 2048")

    def refuse(opened: wire.SessionOpen, socket: object) -> bool:
        asyncio.get_running_loop().create_task(socket.send_bytes(wire.encode_wan(answer)))  # type: ignore[attr-defined]
        return True

    gateway.on_open = refuse
    async with paceline("run", "hello", gateway=gateway.url, models=tmp_path) as process:
        code, out, err = await ended(process)
    assert (code, out) == (1, "")
    assert "9000 tokens, the context holds 2048" in err


async def test_an_empty_prompt(gateway: ScriptedGateway, tmp_path: Path) -> None:
    async with paceline("run", "  ", gateway=gateway.url, models=tmp_path) as process:
        code, _, err = await ended(process)
    assert code == 2
    assert "the prompt is empty" in err


async def test_chat_keeps_the_conversation(gateway: ScriptedGateway, tmp_path: Path) -> None:
    async with paceline("chat", "-t", "0", gateway=gateway.url, models=tmp_path, stdin="one\ntwo\n") as process:
        first = await gateway.session(0)
        await first.commit(ids("uno"))
        await first.commit((END,), finish="stop")
        second = await gateway.session(1)
        await second.commit(ids("dos"), finish="stop")
        code, out, _ = await ended(process)
    assert (code, out) == (0, "uno\ndos\n")
    asked = bytes(token if token < 256 else ord("|") for token in second.opened.tokens).decode()
    assert asked.index("one") < asked.index("uno") < asked.index("two")
    assert gateway.connects == 1


async def test_commands_of_a_chat_are_not_sent(gateway: ScriptedGateway, tmp_path: Path) -> None:
    words = "/help\n/nope\nhi\n"
    async with paceline("chat", gateway=gateway.url, models=tmp_path, stdin=words) as process:
        told = await gateway.session()
        await told.commit(ids("hello"), finish="stop")
        code, out, err = await ended(process)
    assert (code, out, len(gateway.sessions)) == (0, "hello\n", 1)
    assert err.count("begin a new conversation") == 2
    assert "there is no command /nope" in err


async def test_what_is_typed_during_an_answer_waits_unseen(gateway: ScriptedGateway, tmp_path: Path) -> None:
    """On a terminal: it neither lands in the answer nor is lost, and the next prompt shows it."""
    async with chat_on_a_terminal(gateway, tmp_path) as terminal:
        await terminal.until("you> ")
        terminal.type("one\r")
        first = await gateway.session(0)
        await first.commit(ids("The first "))
        await terminal.until("The first ")
        terminal.type("two\r")
        await asyncio.sleep(0.3)  # an echo would come now
        await first.commit(ids("answer."), finish="stop")
        second = await gateway.session(1)
        await second.commit(ids("The second."), finish="stop")
        await terminal.until("The second.")
        terminal.type("\x04")
        async with asyncio.timeout(10):
            assert await terminal.process.wait() == 0
    assert "The first answer.\r\n" in terminal.shown
    assert "you> two" in terminal.shown.partition("answer.")[2]
    assert bytes(token for token in second.opened.tokens if token < 256).decode().count("two") == 1


async def test_status_and_drain(gateway: ScriptedGateway, tmp_path: Path) -> None:
    async with paceline("status", gateway=gateway.url, models=tmp_path) as process:
        code, out, _ = await ended(process)
    assert code == 0
    for word in ("verifier-1", "ready", "312/4096", "batcher-1", "fill on", "verifiers 42 % busy"):
        assert word in out
    async with paceline("status", "--json", gateway=gateway.url, models=tmp_path) as process:
        assert json.loads((await ended(process))[1])["verifiers"][0]["verifier"] == "verifier-1"
    async with paceline("drain", "verifier-1", gateway=gateway.url, models=tmp_path) as process:
        code, out, _ = await ended(process)
    assert (code, out) == (0, "moved 3 sessions off verifier-1 in 0.5 s\n")
    async with paceline("drain", "nobody", gateway=gateway.url, models=tmp_path) as process:
        assert await ended(process) == (1, "", "error: no verifier `nobody` is known\n")


async def test_models_list_and_pull(tmp_path: Path) -> None:
    async with paceline("models", "list", gateway="http://127.0.0.1:9", models=tmp_path) as process:
        code, out, _ = await ended(process)
    assert code == 0
    assert {"smollm2", "smollm2-hi", "toy"} <= {line.split()[0] for line in out.splitlines()}
    async with paceline("models", "pull", "toy", gateway="http://127.0.0.1:9", models=tmp_path) as process:
        assert (await ended(process))[0] == 0
    assert (tmp_path / "toy" / "card.json").is_file()
    async with paceline("models", "pull", "nope", gateway="http://127.0.0.1:9", models=tmp_path) as process:
        code, _, err = await ended(process)
    assert code == 1
    assert "nope" in err
    assert "--hosted" not in err


async def test_the_card_is_fetched_once_and_again_when_it_changed(gateway: ScriptedGateway, tmp_path: Path) -> None:
    import aiohttp
    import msgspec

    from edge_client.api import GatewayApi

    async with aiohttp.ClientSession() as http:
        api = GatewayApi(http, gateway.url, KEY)
        assert await api.card(CARD.model, tmp_path) == CARD
        assert await api.card(CARD.model, tmp_path) == CARD
        assert gateway.card_requests == 1
        gateway.card = msgspec.structs.replace(CARD, context=64)
        assert (await api.card(CARD.model, tmp_path)).context == 64
        assert gateway.card_requests == 2
        (tmp_path / f"{CARD.fingerprint}.json").write_text("{")
        assert (await api.card(CARD.model, tmp_path)).context == 64
        msgspec.structs.replace(gateway.card, model="another").save(tmp_path / f"{CARD.fingerprint}.json")
        assert (await api.card(CARD.model, tmp_path)).model == CARD.model


async def test_a_draft_model_with_another_vocabulary_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import msgspec

    from edge_client.drafts import load_draft
    from paceline import models
    from paceline.errors import ModelError

    settings = Settings.load(models_dir=tmp_path)
    text = CARD.tokenizer.replace('"a":97', '"a":98', 1).replace('"b":98', '"b":97', 1)
    assert text != CARD.tokenizer
    other = msgspec.structs.replace(CARD, model="smollm2", simulated=False, tokenizer=text, fingerprint="other")
    target = msgspec.structs.replace(CARD, model="smollm2", simulated=False)
    folder = tmp_path / "smollm2"
    folder.mkdir()
    other.save(folder / "draft-card.json")
    files = [folder / name for name in ("target.gguf", "draft.gguf", "card.json", "draft-card.json")]
    monkeypatch.setattr(models, "find", lambda *_, **__: models.PulledPair("smollm2", *files))
    with pytest.raises(ModelError, match=r"\b97\b"):
        await load_draft(target, settings, lambda *_: None)
