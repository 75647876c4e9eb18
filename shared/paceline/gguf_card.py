"""The model card of a GGUF file, and the check that its tokenizer agrees with llama.cpp's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import gguf

from paceline.errors import ModelError
from paceline.model_card import CONTROL, ModelCard, byte_level_bpe, fingerprint, piece
from paceline.tokenizer import Tokenizer

_END_KEYS = ("eos", "eot", "eom")
_END_TEXTS = frozenset(
    ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|fim_pad|>")
    + ("<|repo_name|>", "<|file_sep|>", "<end_of_turn>", "<EOT>", "<|END_OF_TURN_TOKEN|>")
)

PROBES = (
    "", "Hello, world!", "<|im_start|> hi", "Caf\u00e9 d\u00e9j\u00e0", "Cafe\u0301", "two  spaces", "   lead", "trail   ",
    "a\r\nb\r\n\r\nc", "\n\n\t x", "\U0001f600 smile \U0001f469\u200d\U0001f4bb", "12345 6.78 \u00bd\u0663", "it's WE'LL I'M 'tis",
    "snake_case::f(x[0])->y;  // c", "\u4f60\u597d\uff0c\u4e16\u754c\u3002", "\u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac \u0440\u0443\u0441 \u05e9\u05dc\u05d5\u05dd", "\u00a0nbsp\u3000wide\u2028line",
)  # fmt: skip
"""Texts on which tokenizers are known to differ: accents composed and not, runs of blanks, line ends, emoji, digits."""


class Vocabulary(Protocol):
    """llama.cpp's view of a vocabulary (llama_context.LlamaVocab)."""

    size: int

    def tokenize(self, text: bytes, special: bool = False, add_bos: bool = False) -> list[int]: ...

    def piece(self, token: int) -> bytes: ...


def card_from_gguf(path: Path, name: str) -> ModelCard:
    """Read the card out of the file's metadata. Raises ModelError for what is not byte-level BPE or not known."""
    fields = _fields(path)
    kind = fields("tokenizer.ggml.model", "none")
    if kind != "gpt2":
        raise ModelError(f"{path}: tokenizer {kind!r} is not supported; byte-level BPE ('gpt2') is")
    tokens: list[str] = fields("tokenizer.ggml.tokens")
    attributes: list[int] = fields("tokenizer.ggml.token_type")
    bos = fields("tokenizer.ggml.bos_token_id", -1)
    return ModelCard(
        model=name,
        context=fields(f"{fields('general.architecture')}.context_length"),
        vocabulary=len(tokens),
        fingerprint=fingerprint((piece(*entry), entry[1]) for entry in zip(tokens, attributes, strict=True)),
        end_ids=_end_ids([fields(f"tokenizer.ggml.{key}_token_id", -1) for key in _END_KEYS], tokens, attributes),
        bos_id=bos if bos >= 0 else None,
        add_bos=bool(fields("tokenizer.ggml.add_bos_token", False)),
        chat_template=fields("tokenizer.chat_template", ""),
        tokenizer=byte_level_bpe(
            tokens, attributes, fields("tokenizer.ggml.merges"), fields("tokenizer.ggml.pre", "none")
        ),
    )


class _fields:  # noqa: N801
    pass


def _end_ids(named: Sequence[int], tokens: Sequence[str], attributes: Sequence[int]) -> tuple[int, ...]:
    """The ids the file names, then control tokens that are known to end an answer (as llama.cpp takes them)."""
    spelled = [i for i, token in enumerate(tokens) if attributes[i] == CONTROL and token in _END_TEXTS]
    return tuple(dict.fromkeys([i for i in named if i >= 0] + spelled))
