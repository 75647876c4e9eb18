"""/v1/chat/completions and /v1/completions: one session a choice, its verdicts turned into OpenAI's answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from aiohttp import web
from msgspec.structs import replace

from paceline import telemetry
from paceline.errors import NotFound, RequestError, Unavailable
from paceline.service import Service
from paceline.tokenizer import Tokenizer
from paceline.wire import SessionOpen, Verdict
from services.gateway.answers import Answer, Shape, error_body, failure_error
from services.gateway.choice_text import ChoiceText, Delta
from services.gateway.http import as_request_error, body_of, identified, json_response
from services.gateway.live import Live
from services.gateway.meter import Meter
from services.gateway.openai_api import Call
from services.gateway.prompts import Prompts
from services.gateway.sessions import Sessions
from services.gateway.stream import ClientGone, EventStream
from services.gateway.tenants import Keyring


@dataclass(frozen=True)
class Completions:
    """The two endpoints; `stopped` is set when streams that still run must end."""

    service: Service
    sessions: Sessions
    tokenizer: Tokenizer
    prompts: Prompts
    keyring: Keyring
    stopped: asyncio.Event

    async def serve(self, request: web.Request, parse: Callable[[bytes], Call], shape: Shape) -> web.StreamResponse:
        tenant = identified(request, self.keyring)
        call = parse(await body_of(request))
        self._check_model(call)
        await self.sessions.require_components()
        prompts = await self.prompts.of(call)
        openings = self._openings(call, prompts, tenant.name)
        with _named_as_asked(call):
            async with self.sessions.opened(openings) as lives:
                self.service.metrics.add(telemetry.PROMPT_TOKENS, sum(map(len, prompts)))
                reply = self._reply(call, prompts, lives, shape)
                return await (reply.stream(request) if call.stream else reply.whole())

    def _check_model(self, call: Call) -> None:
        if call.model != self.sessions.model:
            message = f"the model {call.model!r} is not served here; {self.sessions.model!r} is"
            raise NotFound(message, code="model_not_found", param="model")

    def _openings(self, call: Call, prompts: Sequence[tuple[int, ...]], tenant: str) -> list[SessionOpen]:
        card = self.tokenizer.card
        opening = SessionOpen(
            model=call.model,
            fingerprint=card.fingerprint,
            tokens=(),
            sampling=replace(call.sampling, end_ids=card.end_ids),
            stop=call.stop,
            max_tokens=call.max_tokens,
            seed=call.seed,
            logprobs=call.logprobs,
            speculation=call.speculation,
            tenant=tenant,
        )
        return [replace(opening, tokens=tokens, choice=choice) for tokens in prompts for choice in range(call.n)]

    def _reply(self, call: Call, prompts: Sequence[Sequence[int]], lives: list[Live], shape: Shape) -> Reply:
        answer = Answer(
            shape=shape,
            model=call.model,
            fingerprint=self.tokenizer.card.fingerprint,
            created=int(time.time()),
            scored=call.logprobs is not None,
            include_usage=call.include_usage,
        )
        choices = [ChoiceText(self.tokenizer, call.stop) for _ in lives]
        return Reply(self, lives, choices, answer, sum(map(len, prompts)))


@contextmanager
def _named_as_asked(call: Call) -> Iterator[None]:
    """The batcher knows a prompt as `tokens`; the client is told the name that it used."""
    try:
        yield
    except RequestError as error:
        if error.param == "tokens":
            error.param = "messages" if call.messages else "prompt"
        raise


@dataclass(frozen=True)
class Reply:
    """One call's sessions on their way to its client."""

    owner: Completions
    lives: list[Live]
    choices: list[ChoiceText]
    answer: Answer
    prompt_tokens: int

    async def whole(self) -> web.Response:
        parts: list[list[Delta]] = [[] for _ in self.lives]
        async with aclosing(self._deltas()) as deltas:
            async for index, delta in deltas:
                parts[index].append(delta)
        return json_response(self.answer.whole(self.choices, parts, self.prompt_tokens))

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Once headers are out an error can only be told in the stream, which then ends without [DONE]."""
        async with EventStream(request, self.owner.service.settings.keepalive_s) as stream:
            try:
                await self._stream_deltas(stream)
            except ClientGone:
                raise
            except Exception as error:
                await stream.send(error_body(as_request_error(error, request)))
        return stream.response

    async def _stream_deltas(self, stream: EventStream) -> None:
        async with aclosing(self._deltas()) as deltas:
            async for index, delta in deltas:
                for chunk in self.answer.chunks(index, delta):
                    await stream.send(chunk)
        if self.answer.include_usage:
            await stream.send(self.answer.usage_chunk(self.choices, self.prompt_tokens))
        await stream.done()

    async def _deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Raises what ended a choice without an answer."""
        meter = Meter(self.owner.service.metrics, time.monotonic)
        async with aclosing(merged(self.lives, self.owner.stopped)) as verdicts:
            async for index, verdict in verdicts:
                if verdict.finish in ("cancelled", "error"):
                    raise failure_error(verdict.finish, verdict.error)
                meter.tokens(len(verdict.tokens))
                yield index, self.choices[index].feed(verdict)
        meter.end()


async def merged(lives: Sequence[Live], stopped: asyncio.Event) -> AsyncGenerator[tuple[int, Verdict]]:
    """The verdicts of several sessions as they come, each session's in order, until all have finished. Raises what a
    follower raises, and Unavailable when the gateway stops first."""
    stop: asyncio.Task[object] = asyncio.create_task(stopped.wait(), name="gateway stops")
    waiting = {_next(live): index for index, live in enumerate(lives)}
    try:
        while waiting:
            done, _ = await asyncio.wait([stop, *waiting], return_when=asyncio.FIRST_COMPLETED)
            if stop in done:
                raise Unavailable("the gateway stopped before the answer was complete", code="stopping")
            for ready in [task for task in waiting if task in done]:
                index, verdict = waiting.pop(ready), ready.result()
                if verdict.finish is None:
                    waiting[_next(lives[index])] = index
                yield index, verdict
    finally:
        for task in (stop, *waiting):
            task.cancel()
        await asyncio.gather(stop, *waiting, return_exceptions=True)


def _next(live: Live) -> asyncio.Task[Verdict]:
    return asyncio.create_task(live.follower.next(), name=f"follow {live.session}")
