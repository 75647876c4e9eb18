"""The model card: everything about a model's text side, so that a gateway works without any model library.

`byte_level_bpe` builds the tokenizer inside a card from a vocabulary and its merges, by the name that GGUF gives the
splitting rule (`tokenizer.ggml.pre`). A rule that was never compared with llama.cpp's is refused by its name.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Self

import msgspec
import tokenizers
from msgspec import Struct
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from paceline.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token attributes, numbered as in GGUF's tokenizer.ggml.token_type."""


class ModelCard(Struct, frozen=True, kw_only=True):
    """One model's tokenizer, chat template and limits. `tokenizer` is Hugging Face tokenizer JSON; `context` and
    `vocabulary` are in tokens (`vocabulary` counts padding ids: every id the model has a logit for)."""

    model: str
    context: int
    vocabulary: int
    fingerprint: str
    """SHA-256 over the vocabulary's content: equal fingerprints mean that ids can be exchanged."""
    end_ids: tuple[int, ...]
    """Tokens that end an answer, the model's main one first."""
    bos_id: int | None
    add_bos: bool
    """Whether plain text is to begin with bos_id."""
    chat_template: str
    tokenizer: str
    simulated: bool = False

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ModelError when there is no card, or none that can be read."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError as error:
            raise ModelError(f"no model card at {path}: `paceline models pull` makes it") from error
        except (OSError, msgspec.DecodeError) as error:
            raise ModelError(f"the model card {path} cannot be read: {error}") from error

    def save(self, path: Path) -> None:
        write_whole(path, msgspec.json.encode(self))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that others see whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def fingerprint(vocabulary: Iterable[tuple[bytes, int]]) -> str:
    """Content hash of (piece, attribute) in the order of ids: each piece's length as uint32 LE, the piece, one
    attribute byte. Pieces are the bytes a token stands for; control tokens are spelled out."""
    digest = hashlib.sha256()
    for piece, attribute in vocabulary:
        digest.update(struct.pack("<I", len(piece)) + piece + bytes([attribute]))
    return digest.hexdigest()


@cache
def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet (GPT-2): the printable character that stands for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet.values())
    return alphabet | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def piece(token: str, attribute: int = NORMAL) -> bytes:
    """The bytes that an entry of a byte-level vocabulary stands for; only NORMAL entries are in the byte alphabet."""
    alphabet = byte_alphabet()
    if attribute == NORMAL and all(c in alphabet for c in token):
        return bytes(alphabet[c] for c in token)
    return token.encode()


_ELISION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _by_regex(_ELISION + _WORDS % "")


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _by_regex(_ELISION + _WORDS % "{1,3}")


SPLITTERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "llama-bpe": _llama3,
    "qwen2": _qwen2,
    "smollm": _smollm,
}
"""Splitting rules by GGUF's name, each compared with llama.cpp's own tokenisation."""


def byte_level_bpe(tokens: Sequence[str], attributes: Sequence[int], merges: Iterable[str], pre: str) -> str:
    """Tokenizer JSON for a byte-level BPE vocabulary; `merges` are "left right", best first.

    CONTROL (and UNKNOWN) tokens become special added tokens, USER_DEFINED ones plain added tokens. Raises ModelError
    for a splitting rule that is not in SPLITTERS.
    """
    if pre not in SPLITTERS:
        raise ModelError(f"pre-tokenizer {pre!r} is not supported; supported are {', '.join(sorted(SPLITTERS))}")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [_pair(merge) for merge in merges]
    whole_words = pre == "llama-bpe"
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=whole_words))
    tokenizer.pre_tokenizer = SPLITTERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    typed = list(zip(tokens, attributes, strict=True))
    tokenizer.add_special_tokens([_added(token, special=True) for token, kind in typed if kind in (UNKNOWN, CONTROL)])
    tokenizer.add_tokens([_added(token, special=False) for token, kind in typed if kind == USER_DEFINED])
    return str(tokenizer.to_str())


def _pair(merge: str) -> tuple[str, str]:
    """Split at the first space that is not the first character: a token may itself begin with one."""
    cut = merge.index(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _added(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)
