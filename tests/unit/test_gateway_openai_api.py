"""OpenAI's request format: what is served, what is neutral, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as PlainParams

from paceline.errors import BadRequest
from paceline.wire import Speculation
from services.gateway.openai_api import (
    IGNORED,
    MAX_CHOICES,
    NEUTRAL,
    Call,
    ChatBody,
    CompletionBody,
    parse_chat,
    parse_completion,
)


def chat(**fields: Any) -> Call:
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(json.dumps(body).encode())


def plain(prompt: Any, **fields: Any) -> Call:
    return parse_completion(json.dumps({"model": "toy", "prompt": prompt, **fields}).encode())


def refusal(call: Any, *args: Any, **fields: Any) -> tuple[str, str | None]:
    with pytest.raises(BadRequest) as caught:
        call(*args, **fields)
    assert caught.value.status == 400
    assert caught.value.message
    return caught.value.code, caught.value.param


@pytest.mark.parametrize(("params", "body"), [(ChatParams, ChatBody), (PlainParams, CompletionBody)])
def test_every_field_of_the_official_client_is_known(params: Any, body: Any) -> None:
    known = {*body.__struct_fields__, *NEUTRAL, *IGNORED}
    assert set(params.__annotations__) | set(params.__optional_keys__) <= known


def test_defaults_are_those_of_openai() -> None:
    call = chat()
    assert (call.n, call.stop, call.max_tokens, call.logprobs, call.stream) == (1, (), None, None, False)
    assert (call.sampling.temperature, call.sampling.top_p) == (1.0, 1.0)
    assert call.speculation == Speculation(hosted=True, fill=True)
    assert plain("x").max_tokens == 16


def test_null_is_the_same_as_absent() -> None:
    names = set(ChatBody.__struct_fields__) - {"model", "messages"}
    call = chat(**dict.fromkeys([*names, *NEUTRAL, *IGNORED]))
    assert call.sampling == chat().sampling


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"top_p": 1.5}, "invalid_value", "top_p"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": True}, "invalid_type", "n"),
        ({"n": MAX_CHOICES + 1}, "invalid_value", "n"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "invalid_value", "max_completion_tokens"),
        ({"max_tokens": 1 << 63}, "invalid_value", "max_tokens"),
        ({"max_tokens": 1 << 64}, "invalid_value", "max_tokens"),
        ({"max_completion_tokens": 1 << 64}, "invalid_value", "max_completion_tokens"),
        ({"top_k": 1 << 64}, "invalid_value", "top_k"),
        ({"min_tokens": 1 << 64}, "invalid_value", "min_tokens"),
        ({"min_tokens": 10**300}, "invalid_value", "min_tokens"),
        ({"seed": 1 << 64}, "invalid_value", "seed"),
        ({"repetition_penalty": 1e-310}, "invalid_value", "repetition_penalty"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": None}, "invalid_type", "messages"),
        ({"messages": ["hi"]}, "invalid_type", "messages[0]"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "age": 3}]}, "unknown_parameter", "messages[0].age"),
        ({"stop": [""]}, "invalid_value", "stop[0]"),
        ({"stop": ["a"] * 17}, "invalid_value", "stop"),
        ({"logit_bias": {"x": 1}}, "invalid_type", "logit_bias"),
        ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "unknown_parameter", "stream_options.x"),
        ({"speculation": {"max_draft": 0}}, "invalid_value", "speculation.max_draft"),
        ({"speculation": {"depth": 1}}, "unknown_parameter", "speculation.depth"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"store": True}, "unsupported_parameter", "store"),
        ({"best_of": 2}, "unknown_parameter", "best_of"),
        ({"colour": "red"}, "unknown_parameter", "colour"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], code: str, param: str) -> None:
    assert refusal(chat, **fields) == (code, param)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'"x"', b'{"a": NaN}', b"\xff\xfe", b'{"model": "\xff"}'])
def test_a_body_that_is_no_json_object(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat(body)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize("half", [r"\ud800", r"\udfff", r"a\ud83dz"])
def test_half_a_surrogate_pair_is_named(half: str) -> None:
    with pytest.raises(BadRequest, match="surrogate") as caught:
        parse_chat(b'{"model": "%s"}' % half.encode())
    assert caught.value.code == "invalid_json"


def test_a_missing_model() -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat(b'{"messages": [{"role": "user", "content": "x"}]}')
    assert (caught.value.code, caught.value.param) == ("missing_required_parameter", "model")


def test_content_in_parts_is_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = chat(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}])
    assert call.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"})


def test_an_image_is_refused_where_it_stands() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    messages = [{"role": "user", "content": parts}]
    assert refusal(chat, messages=messages) == ("unsupported_value", "messages[0].content[1]")


def test_an_answer_may_be_sent_back_as_it_came() -> None:
    back = {"role": "assistant", "content": "yes", "refusal": None, "annotations": [], "audio": None,
            "function_call": None, "tool_calls": None}  # fmt: skip
    assert chat(messages=[back]).messages == ({"role": "assistant", "content": "yes"},)


@pytest.mark.parametrize(
    ("prompt", "found"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3))), ("", ("",))],
)
def test_the_forms_of_a_prompt(prompt: Any, found: Any) -> None:
    assert plain(prompt).prompts == found


@pytest.mark.parametrize(
    ("prompt", "code", "param"),
    [
        ([], "empty_prompt", "prompt"),
        ({}, "invalid_type", "prompt"),
        (None, "invalid_type", "prompt"),
        ([1, "a"], "invalid_type", "prompt[1]"),
        (["a", 1], "invalid_type", "prompt[1]"),
        ([-1], "invalid_value", "prompt[0]"),
        ([[1], [-2]], "invalid_value", "prompt[1][0]"),
        ([True], "invalid_type", "prompt[0]"),
        ([{}], "invalid_type", "prompt[0]"),
    ],
)
def test_prompts_that_are_none(prompt: Any, code: str, param: str) -> None:
    assert refusal(plain, prompt) == (code, param)


def test_choices_of_all_prompts_are_bounded() -> None:
    assert refusal(plain, ["a"] * 65, n=2) == ("invalid_value", "n")


def test_best_of_is_served_only_where_it_changes_nothing() -> None:
    assert plain("a", best_of=2, n=2).n == 2
    assert refusal(plain, "a", best_of=2) == ("unsupported_parameter", "best_of")


def test_sampling_values_arrive() -> None:
    call = chat(temperature=0, top_p=0.5, top_k=-1, min_p=0.1, repetition_penalty=1.2, presence_penalty=-1,
                frequency_penalty=1, logit_bias={"5": -100}, min_tokens=2, max_completion_tokens=7)  # fmt: skip
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 0, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, -1, 1)
    assert (sampling.logit_bias, sampling.min_tokens, call.max_tokens) == ({5: -100.0}, 2, 7)


def test_top_p_zero_keeps_the_most_likely_token() -> None:
    assert 0 < chat(top_p=0).sampling.top_p < 1e-6


@pytest.mark.parametrize("seed", [0, 1, -1, (1 << 63) - 1, -(1 << 63)])
def test_any_int64_is_a_seed(seed: int) -> None:
    assert 0 <= chat(seed=seed).seed < 1 << 63
    assert chat(seed=seed).seed == chat(seed=seed).seed


def test_an_absent_seed_is_drawn() -> None:
    assert chat().seed != chat().seed


def test_speculation_off_needs_no_drafter() -> None:
    assert chat(speculation={"enabled": False}).speculation == Speculation(enabled=False, hosted=False)
    assert chat(speculation={"max_draft": 3}).speculation.max_draft == 3


def test_logprobs_of_both_endpoints() -> None:
    assert (chat(logprobs=True).logprobs, chat(logprobs=True, top_logprobs=4).logprobs) == (0, 4)
    assert (chat(logprobs=False).logprobs, plain("x", logprobs=0).logprobs, plain("x").logprobs) == (None, 0, None)
