"""Every message survives encoding, on the bus and on the WAN; what is no message never gets through."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import subjects, wire
from paceline.errors import BadRequest

TOKENS = st.lists(st.integers(0, (1 << 24) - 1), max_size=20).map(tuple)
NAMES = st.from_regex(r"\A[A-Za-z0-9_\-]{1,64}\Z")
COUNTS = st.integers(0, 1 << 40)
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
SEEDS = st.integers(0, (1 << 63) - 1)


@st.composite
def samplings(draw: st.DrawFn) -> wire.Sampling:
    return wire.Sampling(
        temperature=draw(st.floats(0, 10)),
        top_k=draw(st.integers(0, 1000)),
        top_p=draw(st.floats(0.001, 1)),
        min_p=draw(st.floats(0, 1)),
        presence_penalty=draw(st.floats(-2, 2)),
        logit_bias=draw(st.dictionaries(st.integers(0, 50_000), st.floats(-100, 100), max_size=4)),
        end_ids=draw(TOKENS),
    )


@st.composite
def blocks(draw: st.DrawFn) -> wire.DraftBlock:
    first, chains = draw(st.integers(1, 1 << 20)), []
    for _ in range(draw(st.integers(1, 4))):
        tokens = tuple(draw(st.lists(st.integers(0, (1 << 24) - 1), min_size=1, max_size=8)))
        conf = draw(st.sampled_from([b"", bytes(len(tokens))]))
        at = draw(st.integers(0, 1 << 20))
        after = draw(st.integers(1, first - 1)) if first > 1 and draw(st.booleans()) else None
        chain = wire.Chain(
            first=first, position=at, tokens=tokens, conf=conf, after=after, at=at if after is None else None
        )
        chains.append(chain)
        first += len(tokens)
    return wire.DraftBlock(
        session=draw(NAMES), source=draw(st.sampled_from(["edge", "hosted", "lookup"])), incarnation=draw(COUNTS),
        chains=tuple(chains), t_sent=draw(COUNTS), connection=draw(COUNTS), t_received=draw(FLOATS),
    )  # fmt: skip


@st.composite
def verdicts(draw: st.DrawFn) -> wire.Verdict:
    tokens = draw(TOKENS)
    entry = wire.LogprobEntry(logprob=draw(FLOATS), top=((1, -0.5), (2, -9999.0)))
    return wire.Verdict(
        session=draw(NAMES), epoch=draw(COUNTS), at=draw(st.integers(0, 1 << 20)), tokens=tokens,
        kinds="f" * len(tokens), logprobs=draw(st.sampled_from([None, (entry,) * len(tokens)])),
        counters=draw(st.sampled_from([None, wire.Counters(drafted={"edge": 3}, accepted={"lookup": 2}, steps=4)])),
        seen=draw(st.dictionaries(st.sampled_from(["edge", "hosted"]), st.tuples(COUNTS, COUNTS), max_size=2)),
        gap=draw(st.sampled_from([(), ("edge",)])), finish=draw(st.sampled_from([None, "stop", "error"])),
        error=draw(st.sampled_from([None, wire.Failure(status=409, code="history_lost", message="gone", param="p")])),
        timing=draw(st.sampled_from([None, wire.Timing(t_sent=4, wait_ms=0.5, step_ms=9.0)])),
    )  # fmt: skip


@st.composite
def opens(draw: st.DrawFn) -> wire.SessionOpen:
    return wire.SessionOpen(
        model="org/model:v1.0", fingerprint="f" * 64, tokens=draw(TOKENS), sampling=draw(samplings()), seed=draw(SEEDS),
        stop=tuple(draw(st.lists(st.text(max_size=10), max_size=4))), max_tokens=draw(st.none() | COUNTS),
        speculation=wire.Speculation(max_draft=draw(st.integers(1, 64)), fill=draw(st.booleans())), session=draw(NAMES),
    )  # fmt: skip


@st.composite
def batches(draw: st.DrawFn) -> wire.VerifyBatch:
    item = wire.VerifyItem(
        session=draw(NAMES), tenant="t", epoch=draw(COUNTS), at=7, prompt_length=3, prefix_hash="00ff",
        seed=draw(SEEDS), sampling=draw(samplings()),
        history=wire.History(start=0, tokens=draw(TOKENS)), want="logprobs", logprobs=5,
    )  # fmt: skip
    return wire.VerifyBatch(batch="b", items=(item, item))


MESSAGES = st.one_of(blocks(), verdicts(), opens(), batches())


@given(MESSAGES)
@settings(deadline=None)
def test_round_trip(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message
    assert wire.decode_wan(wire.encode_wan(message)) == message
    assert wire.decode(wire.encode(message), type(message)) == message


@given(MESSAGES, st.data())
@settings(deadline=None)
def test_damaged_bytes_raise_wire_error_and_nothing_else(message: wire.Message, data: st.DataObject) -> None:
    encoded = bytearray(wire.encode_wan(message))
    for _ in range(data.draw(st.integers(1, 5))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(encoded[: data.draw(st.integers(0, len(encoded)))])
    for decode in (wire.decode, wire.decode_wan):
        with contextlib.suppress(wire.WireError):
            decode(damaged)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5) | FLOATS, _nested))
def test_any_json_that_is_no_message_is_refused(value: Any) -> None:
    try:
        data = orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits
        return
    for decode in (wire.decode, wire.decode_wan):
        with pytest.raises(BadRequest):
            decode(data)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "object"),
        (b"{}", "type"),
        (b'{"type":"nope"}', "nope"),
        (b'{"type":"draft"}', "session"),
        (b'{"type":"resume","session":"a b","secret":"s","position":0,"prefix_hash":""}', "session"),
        (b'{"type":"resume","session":"a","secret":"s","position":-1,"prefix_hash":""}', "position"),
        (b'{"type":"resume","session":"a","secret":"s","position":1.5,"prefix_hash":""}', "position"),
        (b'{"type":"open","model":"m","fingerprint":"f","tokens":[16777216]}', "tokens"),
        (b'{"type":"open","model":"m","fingerprint":"f","tokens":[1],"sampling":{"temperature":-1}}', "temperature"),
        (b'{"type":"open","model":"m","fingerprint":"f","tokens":[1],"seed":9223372036854775808}', "seed"),
        (b'{"type":"open","model":"m","fingerprint":"f","tokens":[1],"speculation":{"max_draft":65}}', "max_draft"),
        (b'{"type":"open","model":"m","fingerprint":"f","tokens":[1],"max_tokens":9223372036854775808}', "max_tokens"),
        (b'{"type":"open","model":"m","fingerprint":"f","tokens":[1],"max_tokens":99999999999999999999}', "max_tokens"),
        (
            b'{"type":"open","model":"m","fingerprint":"f","tokens":[1],"sampling":{"top_k":18446744073709551615}}',
            "top_k",
        ),
        (
            b'{"type":"open","model":"m","fingerprint":"f","tokens":[1],"sampling":{"repetition_penalty":1e-310}}',
            "penalty",
        ),
        (b'{"type":"ping","t_sent":18446744073709551615}', "t_sent"),
    ],
)
def test_the_refusal_names_what_was_wrong(text: bytes, named: str) -> None:
    with pytest.raises(wire.WireError, match=named) as caught:
        wire.decode(text)
    assert caught.value.code == "malformed_message"


def block(*chains: dict[str, Any]) -> bytes:
    return orjson.dumps({"type": "draft", "session": "s", "source": "edge", "incarnation": 1, "chains": list(chains)})


@pytest.mark.parametrize(
    ("chains", "named"),
    [
        ([], "chains"),
        ([{"first": 1, "position": 3, "tokens": []}], "tokens"),
        ([{"first": 1, "position": 3, "tokens": [1]}], "exactly one of"),
        ([{"first": 3, "position": 3, "tokens": [1], "after": 1, "at": 3}], "exactly one of"),
        ([{"first": 1, "position": 3, "tokens": [1], "at": 4}], "differs"),
        ([{"first": 2, "position": 3, "tokens": [1], "after": 2}], "not below"),
        ([{"first": 0, "position": 3, "tokens": [1], "at": 3}], "first"),
        ([{"first": 1 << 63, "position": 3, "tokens": [1], "at": 3}], "first"),
        ([{"first": 1, "position": 3, "tokens": [1] * 65, "at": 3}], "64"),
        ([{"first": 1, "position": 3, "tokens": [1, 2], "at": 3, "conf": "AA=="}], "conf"),
        ([{"first": 1, "position": 3, "tokens": [1], "at": 3}, {"first": 3, "position": 4, "tokens": [1], "after": 1}],
         "next"),
        ([{"first": 1 + i, "position": 3, "tokens": [1], "at": 3} for i in range(17)], "16"),
        ([{"first": 1, "position": 3, "tokens": [-1], "at": 3}], "tokens"),
    ],
)  # fmt: skip
def test_impossible_chains_are_refused(chains: list[dict[str, Any]], named: str) -> None:
    with pytest.raises(wire.WireError, match=named):
        wire.decode(block(*chains))


def test_another_type_than_expected_is_refused() -> None:
    with pytest.raises(wire.WireError, match="type `ack`, expected draft, close"):
        wire.decode(wire.encode(wire.Ack()), wire.DraftBlock, wire.SessionClose)


def test_a_frame_over_the_bound_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(wire.WireError, match=rf"{wire.MAX_WAN_BYTES + 1} bytes .* {wire.MAX_WAN_BYTES}"):
        wire.decode_wan(b" " * (wire.MAX_WAN_BYTES + 1))


@pytest.mark.parametrize("depth", [400, 900, 1023, 5000])
def test_deep_nesting_is_refused_and_no_crash(depth: int) -> None:
    for opening, closing in ((b'{"a":', b"}"), (b"[", b"]"), (b'[{"c":', b"}]")):
        with pytest.raises(wire.WireError):
            wire.decode_wan(opening * depth + b"1" + closing * depth)


def test_infinity_and_nan_never_reach_the_wire() -> None:
    message = wire.Verdict(session="s", epoch=1, at=0, price=math.inf)
    assert b"nf" not in wire.encode(message).replace(b"conf", b"")
    assert orjson.loads(wire.encode(message))["price"] is None


def test_wan_frames_are_small() -> None:
    chain = wire.Chain(first=101, position=1200, tokens=tuple(range(40_000, 40_008)), conf=bytes(8), after=100)
    draft = wire.DraftBlock(
        session="0123456789abcdef", source="edge", incarnation=65_537, chains=(chain,), t_sent=123_456
    )
    verdict = wire.Verdict(
        session="0123456789abcdef", epoch=1_790_000_000_000_001, at=1200, tokens=(40_000, 40_001, 40_002), kinds="eec",
        seen={"edge": (65_537, 108)},
    )  # fmt: skip
    assert len(wire.encode_wan(draft)) <= 180
    assert len(wire.encode_wan(verdict)) <= 140
    assert len(wire.encode_wan(draft)) < 0.8 * len(wire.encode(draft))


def test_short_names_are_unique_and_none_is_a_long_one() -> None:
    fields = {field.encode_name for kind in wire.ALL_MESSAGES for field in msgspec.structs.fields(kind)}
    assert len(wire.LONG_KEYS) == len(wire.SHORT_KEYS)
    assert not set(wire.LONG_KEYS) & fields


def test_every_message_type_is_in_the_union_and_has_its_own_tag() -> None:
    tags = [kind.__struct_config__.tag for kind in wire.ALL_MESSAGES]
    assert len(set(tags)) == len(tags)
    assert set(wire.AnyMessage.__args__) == set(wire.ALL_MESSAGES)


def test_prefix_hash_is_over_little_endian_words() -> None:
    assert wire.prefix_hash([]) == wire.prefix_hash(())
    assert len(wire.prefix_hash([1, 2])) == 16
    assert len({wire.prefix_hash(tokens) for tokens in ([], [0], [0, 0], [1], [256], [1, 2], [2, 1])}) == 7


@given(st.text(min_size=1, max_size=30))
def test_any_name_is_one_subject_token(name: str) -> None:
    made = subjects.POLICY.at(model=name)
    assert made.count(".") == 1
    assert not set(made) & set(" \t\r\n*>")


@given(st.text(max_size=10), st.text(max_size=10))
def test_different_names_are_different_subjects(one: str, other: str) -> None:
    assert (subjects.token(one) == subjects.token(other)) == (one == other)


def test_sessions_spread_over_all_partitions() -> None:
    counts = [0] * subjects.PARTITIONS
    for number in range(6400):
        counts[subjects.partition_of(f"session-{number}")] += 1
    assert min(counts) > 50
    assert max(counts) < 160
