"""OpenAI's request format, read strictly: what is served, what is accepted because it changes nothing, and a 400 that
names the parameter for everything else. Pure: bytes in, a `Call` out; tokens come later.

Decisions that a caller may want to know:
- `max_tokens` of /v1/completions is 16 when absent (as OpenAI's); chat goes up to the context. A completion that would
  run past the context is cut there, finish_reason `length`; a prompt that leaves no room is a 400.
- Log-probabilities have one entry for every counted completion token, the end token and the tokens of a stop string
  included, of which the text shows nothing.
- A negative seed is served: its low 63 bits are used.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from paceline.errors import BadRequest
from paceline.wire import MAX_CHAIN_NODES, MAX_COUNT, MIN_REPETITION_PENALTY, Count, Sampling, Speculation
from services.gateway.json_body import converted, json_object

MAX_CHOICES = 128
"""Choices of one call: prompts times n."""
DEFAULT_COMPLETION_TOKENS = 16
_TINY_TOP_P = 1e-9
"""top_p 0 keeps the most likely token only, which any mass above zero does."""

AtLeastOne = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
Prompt = str | tuple[int, ...]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "echo": (None, False),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
"""What is not served, with the values that ask for nothing."""
IGNORED = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "safety_identifier",
    "user",
)
"""What may be sent and has no effect on the answer."""


class StreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SpeculationWish(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Extension: how the answer is made, never what it says."""

    enabled: bool = True
    max_draft: Annotated[int, Meta(ge=1, le=MAX_CHAIN_NODES)] = 8


class _Common(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(min_length=1)]
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    seed: Annotated[int, Meta(ge=-MAX_COUNT - 1, le=MAX_COUNT)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: AtLeastOne | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=10)] | None = None
    min_tokens: Count | None = None
    speculation: SpeculationWish | None = None


class Part(Struct, frozen=True):
    """A piece of a message's content; only text is served."""

    type: str
    text: str | None = None


class ChatMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of an answer may be sent back as they came, null or empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None


class ChatBody(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class CompletionBody(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: AtLeastOne | None = None


@dataclass(frozen=True)
class Call:
    """A request, understood. Exactly one of `messages` and `prompts` is filled; choice j of prompt i has the index
    i * n + j. `logprobs` is how many alternatives are wanted, None for no log-probabilities."""

    model: str
    n: int
    sampling: Sampling
    stop: tuple[str, ...]
    max_tokens: int | None
    seed: int
    logprobs: int | None
    speculation: Speculation
    stream: bool
    include_usage: bool
    messages: tuple[dict[str, str], ...] = ()
    prompts: tuple[Prompt, ...] = ()


def parse_chat(data: bytes) -> Call:
    """Raises BadRequest with `param`."""
    body = converted(_served(json_object(data)), ChatBody)
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs`: true", param="top_logprobs")
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise BadRequest("`max_tokens` and `max_completion_tokens` differ", param="max_completion_tokens")
    messages = tuple(_message(message, index) for index, message in enumerate(body.messages))
    wanted = (body.top_logprobs or 0) if body.logprobs else None
    return _call(body, max_tokens=next(iter(limits), None), logprobs=wanted, messages=messages)


def parse_completion(data: bytes) -> Call:
    """Raises BadRequest with `param`."""
    body = converted(_served(json_object(data)), CompletionBody)
    if body.best_of not in (None, body.n or 1):
        raise BadRequest("`best_of` other than `n` is not supported", param="best_of", code="unsupported_parameter")
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return _call(body, max_tokens=limit, logprobs=body.logprobs, prompts=_prompts(body.prompt))


def _call(
    body: ChatBody | CompletionBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    messages: tuple[dict[str, str], ...] = (),
    prompts: tuple[Prompt, ...] = (),
) -> Call:
    if body.stream_options is not None and not body.stream:
        raise BadRequest("`stream_options` needs `stream`: true", param="stream_options")
    n = body.n or 1
    if n * max(1, len(prompts)) > MAX_CHOICES:
        raise BadRequest(f"{n} choices of {len(prompts)} prompts are over the bound of {MAX_CHOICES}", param="n")
    return Call(
        model=body.model,
        n=n,
        sampling=_sampling(body),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if body.seed is None else body.seed & MAX_COUNT,
        logprobs=logprobs,
        speculation=_speculation(body.speculation or SpeculationWish()),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        messages=messages,
        prompts=prompts,
    )


def _sampling(body: _Common) -> Sampling:
    given = {
        "temperature": body.temperature,
        "top_p": _TINY_TOP_P if body.top_p == 0 else body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": body.logit_bias,
        "min_tokens": body.min_tokens,
    }
    return msgspec.convert({name: value for name, value in given.items() if value is not None}, Sampling)


def _speculation(wish: SpeculationWish) -> Speculation:
    """A client without a draft model: the hosted drafter drafts for it, plain steps fill the gaps."""
    return Speculation(enabled=wish.enabled, max_draft=wish.max_draft, fill=True, hosted=wish.enabled)


def _message(message: ChatMessage, index: int) -> dict[str, str]:
    """Role and plain text, as a chat template wants it; `developer` is what newer clients call `system`."""
    role = "system" if message.role == "developer" else message.role
    where = f"messages[{index}].content"
    if message.content is None:
        raise BadRequest(f"`{where}` is missing", param=where, code="missing_required_parameter")
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    texts = [_text(part, f"{where}[{at}]") for at, part in enumerate(message.content)]
    return {"role": role, "content": "".join(texts)}


def _text(part: Part, where: str) -> str:
    if part.type != "text":
        raise BadRequest(f"content of type {part.type!r} is not supported", param=where, code="unsupported_value")
    if part.text is None:
        raise BadRequest(f"`{where}.text` is missing", param=f"{where}.text", code="missing_required_parameter")
    return part.text


def _prompts(value: str | list[Any]) -> tuple[Prompt, ...]:
    """A text, a list of texts, the ids of one prompt, or a list of such."""
    if isinstance(value, str):
        return (value,)
    if not value:
        raise BadRequest("`prompt` is empty", param="prompt", code="empty_prompt")
    wanted: Any = list[Annotated[int, Meta(ge=0)]] if isinstance(value[0], int) else None
    if wanted is not None:
        return (tuple(converted(value, wanted, "prompt")),)
    kind = list[str] if isinstance(value[0], str) else list[list[Annotated[int, Meta(ge=0)]]]
    found: list[Any] = converted(value, kind, "prompt")
    return tuple(item if isinstance(item, str) else tuple(item) for item in found)


def _served(value: dict[str, Any]) -> dict[str, Any]:
    """Without what is ignored, and without what asks for nothing."""
    for name in NEUTRAL.keys() & value.keys():
        if value[name] not in NEUTRAL[name]:
            message = f"`{name}` with this value is not supported"
            raise BadRequest(message, param=name, code="unsupported_parameter")
    return {name: item for name, item in value.items() if name not in NEUTRAL and name not in IGNORED}
