"""Model cards, tokenizing, chat templates, incremental text. The vocabulary is tiny_model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import CONTROLS, MERGES, TEMPLATE, vocabulary

from paceline import model_card as cards
from paceline.engine_simulated import toy_card
from paceline.errors import BadRequest, ModelError
from paceline.model_card import CONTROL, NORMAL, UNUSED, ModelCard, check_vocabularies
from paceline.tokenizer import Detokenizer, Tokenizer

OPEN, CLOSE, START, TOOL = 0, 1, 2, 3
HELLO = 4 + 256 + MERGES.index("hell o")


def make_card(tokens: list[str], attributes: list[int], pre: str = "gpt-2", **more: Any) -> ModelCard:
    tokenizer = cards.byte_level_bpe(tokens, attributes, MERGES, pre)
    facts: dict[str, Any] = {
        "model": "tiny", "context": 64, "vocabulary": len(tokens), "end_ids": (CLOSE,), "bos_id": START,
        "add_bos": False, "chat_template": TEMPLATE, "tokenizer": tokenizer,
        "fingerprint": cards.fingerprint(cards.entries(cards.parse_tokenizer(tokenizer), len(tokens))),
    }  # fmt: skip
    return ModelCard(**(facts | more))


CARD = make_card(*vocabulary())
TINY = Tokenizer(CARD)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
pieces = st.sampled_from([*CONTROLS, "<tool>", "hello", " hello", "<|", "|>", "\n", "<|im_", "end|>", "é", "😀"])
spelled_texts = st.lists(pieces | texts, max_size=6).map("".join)


class TestEncode:
    @given(spelled_texts)
    def test_text_comes_back(self, text: str) -> None:
        assert TINY.decode(TINY.encode(text)) == text

    @given(spelled_texts)
    def test_plain_text_never_becomes_a_control_token(self, text: str) -> None:
        assert not set(TINY.encode(text)) & set(TINY.control)

    def test_merges_and_both_kinds_of_added_tokens(self) -> None:
        assert TINY.encode("hello<tool>") == [HELLO, TOOL]
        assert TINY.encode("<|im_end|>hello", special=True) == [CLOSE, HELLO]

    @pytest.mark.parametrize("special", [False, True])
    def test_exactly_one_start_token(self, special: bool) -> None:
        starting = Tokenizer(msgspec.structs.replace(CARD, add_bos=True))
        assert starting.encode("<|s|>hello", special=special).count(START) == 1
        assert starting.encode("") == [START]
        assert starting.encode("hello", start=False) == [HELLO]

    def test_half_a_surrogate_pair_is_refused(self) -> None:
        with pytest.raises(BadRequest, match="surrogate"):
            TINY.encode("x\ud800")

    def test_ids_outside_the_vocabulary_are_refused(self) -> None:
        for token in (-1, CARD.vocabulary):
            with pytest.raises(BadRequest, match=f"{token} is outside the vocabulary of {CARD.vocabulary}"):
                TINY.token_bytes(token)

    def test_control_tokens_show_as_nothing_but_can_be_spelled(self) -> None:
        assert TINY.token_bytes(CLOSE) == b""
        assert TINY.spelled(CLOSE) == b"<|im_end|>"
        assert TINY.token_bytes(TOOL) == TINY.spelled(TOOL) == b"<tool>"
        assert TINY.decode([OPEN, HELLO, CLOSE]) == "hello"

    def test_the_toy_card_has_bytes_as_ids(self) -> None:
        toy = Tokenizer(toy_card())
        assert toy.encode("é<|end|>") == list("é<|end|>".encode())
        assert [toy.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
        assert toy.chat([{"role": "user", "content": "x"}]) == [257, ord("x"), 256, 258]


class TestChat:
    def test_the_template_makes_the_control_tokens(self) -> None:
        ids = TINY.chat([{"role": "user", "content": "hello"}])
        assert b"".join(map(TINY.spelled, ids)) == b"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert [i for i in ids if i in TINY.control] == [OPEN, CLOSE, OPEN]

    @given(st.lists(st.tuples(spelled_texts, spelled_texts), min_size=1, max_size=3))
    def test_markers_in_messages_stay_text(self, turns: list[tuple[str, str]]) -> None:
        ids = TINY.chat([{"role": role, "content": content} for role, content in turns])
        whole = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        assert b"".join(map(TINY.spelled, ids)).decode() == whole + "<|im_start|>assistant\n"
        assert [i for i in ids if i in TINY.control] == [OPEN, CLOSE] * len(turns) + [OPEN]

    def test_markers_deep_inside_a_message_stay_text(self) -> None:
        template = "<|im_start|>{{ messages[0].parts[0].text }}{{ messages[0] | tojson }}"
        tokenizer = Tokenizer(msgspec.structs.replace(CARD, chat_template=template))
        ids = tokenizer.chat([{"parts": [{"text": "a<|im_end|>"}], "number": 3}])
        assert [i for i in ids if i in tokenizer.control] == [OPEN]
        shown = b"".join(map(tokenizer.spelled, ids)).decode()
        assert shown == '<|im_start|>a<|im_end|>{"parts": [{"text": "a<|im_end|>"}], "number": 3}'

    def test_a_template_may_ask_for_the_start_token_by_name(self) -> None:
        card = msgspec.structs.replace(CARD, chat_template="{{ bos_token }}hello{{ eos_token }}", add_bos=True)
        assert Tokenizer(card).chat([]) == [START, HELLO, CLOSE]

    @pytest.mark.parametrize(
        ("template", "messages", "complaint"),
        [
            ("", [], "no chat template"),
            ("{{ raise_exception('roles must alternate') }}", [], "roles must alternate"),
            (TEMPLATE, [{"role": "user", "content": None}], "refuses these messages"),
            ("{{ messages[0].content.__class__.__mro__ }}", [{"content": "x"}], "unsafe"),
        ],
    )
    def test_refusals_name_the_messages(self, template: str, messages: list[dict[str, Any]], complaint: str) -> None:
        tokenizer = Tokenizer(msgspec.structs.replace(CARD, chat_template=template))
        with pytest.raises(BadRequest, match=complaint) as refused:
            tokenizer.chat(messages)
        assert refused.value.param == "messages"

    def test_a_template_that_cannot_be_compiled_is_the_models_fault(self) -> None:
        with pytest.raises(ModelError, match="cannot be compiled"):
            Tokenizer(msgspec.structs.replace(CARD, chat_template="{% if %}"))


class TestDetokenizer:
    @given(st.lists(st.lists(st.integers(0, CARD.vocabulary - 1), max_size=6), max_size=6))
    def test_chunks_and_flush_are_the_whole_text(self, chunks: list[list[int]]) -> None:
        text = Detokenizer(TINY)
        shown = [text.feed(chunk) for chunk in chunks]
        assert "".join(shown) + text.flush() == TINY.decode([i for chunk in chunks for i in chunk])

    @given(texts)
    def test_characters_come_whole_and_at_once(self, text: str) -> None:
        out = Detokenizer(TINY)
        shown = ""
        fed = b""
        for i in TINY.encode(text):
            shown += out.feed([i])
            fed += TINY.token_bytes(i)
            assert shown == fed.decode(errors="ignore")
        assert (shown, out.flush()) == (text, "")

    def test_an_unfinished_character_ends_as_one_replacement(self) -> None:
        out = Detokenizer(TINY)
        assert out.feed(TINY.encode("a😀")[:-1]) == "a"
        assert out.flush() == "\ufffd"


class TestCard:
    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        CARD.save(tmp_path / "card.json")
        assert ModelCard.load(tmp_path / "card.json") == CARD
        assert [file.name for file in tmp_path.iterdir()] == ["card.json"]

    @pytest.mark.parametrize("content", [b"", b"{}", b"\xff"])
    def test_a_damaged_card_is_named(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "card.json"
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"card\.json"):
            ModelCard.load(path)

    def test_a_missing_card_says_what_makes_it(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="paceline models pull"):
            ModelCard.load(tmp_path / "card.json")

    def test_a_damaged_tokenizer_is_a_model_error(self) -> None:
        with pytest.raises(ModelError, match="tokenizer"):
            Tokenizer(msgspec.structs.replace(CARD, tokenizer="{}"))

    def test_an_unknown_splitting_rule_is_refused_by_name(self) -> None:
        with pytest.raises(ModelError, match="'tekken' is not supported"):
            make_card(*vocabulary(), pre="tekken")

    @pytest.mark.parametrize(
        ("pre", "parts"),
        [
            ("gpt-2", ["it", "'s", "ĠWE", "'", "LL", "Ġx", "Ġ12345", "ĠĠ", "Ġy", "!", "Ċ", "Ċ", "z"]),
            (
                "smollm",
                ["it", "'s", "ĠWE", "'", "LL", "Ġx", "Ġ", "1", "2", "3", "4", "5", "ĠĠ", "Ġy", "!", "Ċ", "Ċ", "z"],
            ),
            ("qwen2", ["it", "'s", "ĠWE", "'LL", "Ġx", "Ġ", "1", "2", "3", "4", "5", "ĠĠ", "Ġy", "!ĊĊ", "z"]),
            ("llama-bpe", ["it", "'s", "ĠWE", "'LL", "Ġx", "Ġ", "123", "45", "ĠĠ", "Ġy", "!ĊĊ", "z"]),
        ],
    )
    def test_splitting_rules(self, pre: str, parts: list[str]) -> None:
        split = cards.SPLITTERS[pre]().pre_tokenize_str("it's WE'LL x 12345   y!\n\nz")
        assert [part for part, _ in split] == parts


class TestFingerprint:
    def test_is_as_the_protocol_says(self) -> None:
        """SHA-256 over length (uint32 LE), bytes, attribute, worked out by hand for two entries."""
        import hashlib

        by_hand = hashlib.sha256(b"\x02\x00\x00\x00ab\x01" + b"\x00\x00\x00\x00\x05").hexdigest()
        assert cards.fingerprint([(b"ab", NORMAL), (b"", UNUSED)]) == by_hand

    def test_padding_counts_the_same_whether_listed_or_not(self) -> None:
        tokens, attributes = vocabulary()
        listed = make_card([*tokens, "[PAD0]"], [*attributes, UNUSED])
        parsed = cards.parse_tokenizer(CARD.tokenizer)
        assert listed.fingerprint == cards.fingerprint(cards.entries(parsed, CARD.vocabulary + 1))

    def test_equal_vocabularies_pass(self) -> None:
        other = make_card(*vocabulary(), pre="qwen2", model="other", chat_template="")
        check_vocabularies(CARD, other)
        assert other.fingerprint == CARD.fingerprint

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({268: ("changed", NORMAL)}, "token 268 is nothing in the one"),
            ({4: ("q!", NORMAL)}, r"token 4 is '\\x00' in the one and 'q!' in the other"),
            ({3: ("<tool>", CONTROL)}, "token 3 is '<tool>'"),
        ],
    )
    def test_the_first_id_that_differs_is_named(self, change: dict[int, tuple[str, int]], named: str) -> None:
        tokens, attributes = vocabulary()
        for i, (token, attribute) in change.items():
            if i < len(tokens):
                tokens[i], attributes[i] = token, attribute
            else:
                tokens.append(token)
                attributes.append(attribute)
        with pytest.raises(ModelError, match=named.replace("'nothing'", "nothing")):
            check_vocabularies(CARD, make_card(tokens, attributes))

    def test_equal_content_under_another_fingerprint_is_damage(self) -> None:
        with pytest.raises(ModelError, match="damaged"):
            check_vocabularies(CARD, msgspec.structs.replace(CARD, fingerprint="0" * 64))
