"""The embedded pair's card against llama.cpp's own reading of the same file."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import models
from paceline.errors import ModelError
from paceline.gguf_card import PROBES, check_card
from paceline.llama_context import LlamaVocab
from paceline.model_card import ModelCard
from paceline.settings import cache_dir
from paceline.tokenizer import Tokenizer

pytestmark = pytest.mark.models

IM_START, IM_END = 1, 2
odd = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "  ", "\r\n", "\n\n", "'ll", "don't", " the", "tion", "12", "½٣",
     "é", "e\u0301", "😀", "👩\u200d💻", "中文", "한국", "\u00a0", "\u2028", "\u3000", "\x00", "\ufeff", "𝟙", "ſ"]
)  # fmt: skip
texts = st.lists(odd | st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=8).map("".join)


@pytest.fixture(scope="module")
def pulled() -> models.PulledPair:
    return models.pull("smollm2", cache_dir() / "models")


@pytest.fixture(scope="module")
def tokenizer(pulled: models.PulledPair) -> Tokenizer:
    return Tokenizer(ModelCard.load(pulled.card))


@pytest.fixture(scope="module")
def engine(pulled: models.PulledPair) -> Iterator[LlamaVocab]:
    with LlamaVocab(pulled.target) as vocabulary:
        yield vocabulary


def test_size_ends_start_and_all_probes(tokenizer: Tokenizer, engine: LlamaVocab) -> None:
    check_card(tokenizer.card, engine)
    assert tokenizer.card.end_ids[0] == IM_END


def test_every_token_is_spelled_alike(tokenizer: Tokenizer, engine: LlamaVocab) -> None:
    assert [i for i in range(engine.size) if tokenizer.spelled(i) != engine.piece(i)] == []


@settings(max_examples=300, deadline=None)
@given(text=texts, special=st.booleans())
def test_any_text(tokenizer: Tokenizer, engine: LlamaVocab, text: str, special: bool) -> None:
    assert tokenizer.encode(text, special=special) == engine.tokenize(text.encode(), special=special, add_bos=True)


@pytest.mark.parametrize("text", [*PROBES, "<|im_start|> hi", "<|im_end|>"])
def test_a_message_is_its_text_between_the_templates_markers(
    tokenizer: Tokenizer, engine: LlamaVocab, text: str
) -> None:
    """Whatever a message spells, llama.cpp reads the same between the markers, and there are no more of those."""
    ids = tokenizer.chat([{"role": "system", "content": "s"}, {"role": "user", "content": text}])
    expected: list[int] = []
    for role, content in (("system", "s"), ("user", text)):
        expected += [IM_START, *engine.tokenize(f"{role}\n{content}".encode())]
        expected += [IM_END, *engine.tokenize(b"\n")]
    assert ids == [*expected, IM_START, *engine.tokenize(b"assistant\n")]


def test_a_damaged_card_does_not_pass(tokenizer: Tokenizer, engine: LlamaVocab) -> None:
    wrong_rule = tokenizer.card.tokenizer.replace('"add_prefix_space":false', '"add_prefix_space":true')
    assert wrong_rule != tokenizer.card.tokenizer
    changes = [{"tokenizer": wrong_rule}, {"vocabulary": 49153}, {"end_ids": (5,)}, {"add_bos": True}]
    for change in changes:
        with pytest.raises(ModelError, match=r"llama\.cpp"):
            check_card(msgspec.structs.replace(tokenizer.card, **change), engine)


def test_the_whole_pair_verifies(pulled: models.PulledPair) -> None:
    assert models.verify("smollm2", cache_dir() / "models") == pulled
