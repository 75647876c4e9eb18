"""The model card of a GGUF file, and the check that its tokenizer agrees with llama.cpp's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import gguf

from paceline.errors import ModelError
from paceline.model_card import CONTROL, ModelCard, byte_level_bpe, entries, fingerprint, parse_tokenizer
from paceline.tokenizer import Tokenizer

_END_KEYS = ("eos", "eot", "eom")
_END_TEXTS = frozenset(
    [*(f"<|{name}|>" for name in ("im_end", "endoftext", "eot_id", "eom_id", "end", "end_of_text")), "<end_of_turn>"]
)
"""Control tokens that end an answer even where a file's metadata forgets to say so; llama.cpp knows the same ones."""

_STARTS_BY_DEFAULT = {"llama-bpe"}
"""Splitting rules whose models begin with the start token unless the file says otherwise."""

PROBES = (
    "", "Hello, world!", "Caf\u00e9 d\u00e9j\u00e0", "Cafe\u0301", "two  spaces", "   lead", "trail   ", "\n\n\t x",
    "a\r\nb\r\n\r\nc", "\U0001f600 smile \U0001f469\u200d\U0001f4bb", "12345 6.78 \u00bd\u0663", "it's WE'LL I'M 'tis",
    "snake_case::f(x[0])->y;  // c", "\u4f60\u597d\uff0c\u4e16\u754c\u3002", "\u00a0nbsp\u3000wide\u2028line",
    "\u0395\u03bb\u03bb\u03ac\u03b4\u03b1 \u0440\u0443\u0441 \u05e9\u05dc\u05d5\u05dd \ud55c\uad6d",
)  # fmt: skip
"""Texts on which tokenizers are known to differ: accents composed and not, runs of blanks, line ends, emoji, digits."""


class EngineVocabulary(Protocol):
    """llama.cpp's view of a vocabulary (llama_context.LlamaVocab)."""

    size: int

    def tokenize(self, text: bytes, special: bool = False, add_bos: bool = False) -> list[int]: ...

    def is_end(self, token: int) -> bool: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def add_bos(self) -> bool: ...


def card_from_gguf(path: Path, name: str) -> ModelCard:
    """Read the card out of the file's metadata. Raises ModelError for what is not byte-level BPE or not known."""
    metadata = _Metadata(path)
    kind = metadata.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"{path}: tokenizer {kind!r} is not supported; byte-level BPE ('gpt2') is")
    pre = metadata.text("tokenizer.ggml.pre")
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    given: list[int] = metadata.require("tokenizer.ggml.token_type")
    if len(given) != len(tokens):
        raise ModelError(f"{path} is damaged: {len(tokens)} tokens, {len(given)} token types")
    attributes = [CONTROL if token in _END_TEXTS else kind for token, kind in zip(tokens, given, strict=True)]
    named = [metadata.number(f"tokenizer.ggml.{key}_token_id") for key in _END_KEYS]
    tokenizer = byte_level_bpe(tokens, attributes, metadata.require("tokenizer.ggml.merges"), pre)
    return ModelCard(
        model=name,
        context=metadata.require(f"{metadata.text('general.architecture')}.context_length"),
        vocabulary=len(tokens),
        fingerprint=fingerprint(entries(parse_tokenizer(tokenizer), len(tokens))),
        end_ids=_end_ids(named, tokens),
        bos_id=metadata.number("tokenizer.ggml.bos_token_id"),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", pre in _STARTS_BY_DEFAULT),
        chat_template=metadata.text("tokenizer.chat_template"),
        tokenizer=tokenizer,
    )


class _Metadata:
    """A GGUF file's key-value part."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fields = gguf.GGUFReader(path).fields
        except (OSError, ValueError, IndexError) as error:  # IndexError: cut short
            raise ModelError(f"{path} is no readable GGUF file: {error}") from error

    def get(self, key: str, default: Any) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        if key not in self._fields:
            raise ModelError(f"{self._path} lacks {key}")
        return self.get(key, None)

    def text(self, key: str) -> str:
        return str(self.get(key, ""))

    def number(self, key: str) -> int | None:
        value = self.get(key, None)
        return None if value is None else int(value)


def _end_ids(named: Iterable[int | None], tokens: Sequence[str]) -> tuple[int, ...]:
    """The ids that the file names, then the tokens that are known to end an answer."""
    spelled = [i for i, token in enumerate(tokens) if token in _END_TEXTS]
    return tuple(dict.fromkeys([i for i in named if i is not None] + spelled))


def check_card(card: ModelCard, engine: EngineVocabulary) -> None:
    """Raises ModelError, naming what differs first, unless the card agrees with the engine on size, start token,
    end tokens, and the ids of all PROBES with and without control tokens."""
    facts = {
        "tokens": (card.vocabulary, engine.size),
        "as start token": (card.bos_id if card.add_bos else None, engine.bos_id if engine.add_bos else None),
        "of its end tokens as such": (len(card.end_ids), sum(map(engine.is_end, card.end_ids))),
    }
    for what, (ours, theirs) in facts.items():
        if ours != theirs:
            raise ModelError(f"{card.model}: the card has {ours} {what}, llama.cpp has {theirs}")
    tokenizer = Tokenizer(card)
    for text in (*PROBES, *(f"{spelling} hi" for spelling in tokenizer.control.values())):
        _check_probe(tokenizer, text, engine)


def _check_probe(tokenizer: Tokenizer, text: str, engine: EngineVocabulary) -> None:
    for special in (False, True):
        ours = tokenizer.encode(text, special=special, start=False)
        theirs = engine.tokenize(text.encode(), special=special)
        if ours != theirs:
            raise ModelError(f"{tokenizer.card.model}: {text!r} is {ours} by the card and {theirs} by llama.cpp")
