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
from itertools import zip_longest
from pathlib import Path
from typing import Self

import msgspec
import tokenizers
from msgspec import Struct
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from paceline.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
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
        write_whole(path, msgspec.json.encode(self), mode=0o644)


def write_whole(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Write a file that others see whole or not at all. `mode` are its permission bits."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def parse_tokenizer(text: str) -> tokenizers.Tokenizer:
    """From Hugging Face tokenizer JSON; raises ModelError."""
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the binding raises bare Exception for any fault of the JSON
        raise ModelError(f"no readable tokenizer JSON: {error}") from error


Entry = tuple[bytes, int]
"""One id of a vocabulary: the bytes it stands for (a control token's spelling) and its attribute."""


def entries(tokenizer: tokenizers.Tokenizer, size: int) -> list[Entry]:
    """The vocabulary by id. Ids that the tokenizer does not know (a model's padding) are empty and UNUSED."""
    found: list[Entry] = [(b"", UNUSED)] * size
    for token, i in tokenizer.get_vocab(with_added_tokens=False).items():
        found[i] = (piece(token), NORMAL)
    for i, added in tokenizer.get_added_tokens_decoder().items():
        found[i] = (added.content.encode(), CONTROL if added.special else USER_DEFINED)
    return found


def fingerprint(vocabulary: Iterable[Entry]) -> str:
    """Content hash in the order of ids: each piece's length as uint32 LE, the piece, one attribute byte."""
    digest = hashlib.sha256()
    for content, attribute in vocabulary:
        digest.update(struct.pack("<I", len(content)) + content + bytes([attribute]))
    return digest.hexdigest()


def check_vocabularies(a: ModelCard, b: ModelCard) -> None:
    """Raises ModelError, naming the first id that differs in content or kind, unless all ids mean the same."""
    if a.fingerprint == b.fingerprint:
        return
    ours, theirs = (entries(parse_tokenizer(card.tokenizer), card.vocabulary) for card in (a, b))
    both = zip_longest(ours, theirs)
    first = next((i for i, (one, other) in enumerate(both) if one != other), None)
    if first is None:
        raise ModelError(f"the card of {a.model} or {b.model} is damaged: equal vocabularies, unequal fingerprints")
    shown = [
        repr(side[first][0].decode("utf-8", "replace")) if first < len(side) else "nothing" for side in (ours, theirs)
    ]
    raise ModelError(
        f"the vocabularies of {a.model} and {b.model} differ: token {first} is {shown[0]} in the one and {shown[1]} in "
        "the other; drafts can only be exchanged between models of one vocabulary"
    )


@cache
def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet (GPT-2): the printable character that stands for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in alphabet.values())
    return alphabet | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def piece(token: str) -> bytes:
    """The bytes that an entry of a byte-level vocabulary stands for."""
    alphabet = byte_alphabet()
    return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()


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

    CONTROL (and UNKNOWN) tokens become special added tokens, USER_DEFINED ones plain added tokens; UNUSED ones are
    left out. Raises ModelError for a splitting rule that is not in SPLITTERS.
    """
    if pre not in SPLITTERS:
        raise ModelError(f"pre-tokenizer {pre!r} is not supported; supported are {', '.join(sorted(SPLITTERS))}")
    vocabulary = {token: i for i, token in enumerate(tokens) if attributes[i] != UNUSED}
    tokenizer = tokenizers.Tokenizer(_bpe(vocabulary, merges, whole_words=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = SPLITTERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    typed = list(zip(tokens, attributes, strict=True))
    tokenizer.add_special_tokens([_added(token, special=True) for token, kind in typed if kind in (UNKNOWN, CONTROL)])
    tokenizer.add_tokens([_added(token, special=False) for token, kind in typed if kind == USER_DEFINED])
    return str(tokenizer.to_str())


def _bpe(vocabulary: dict[str, int], merges: Iterable[str], *, whole_words: bool) -> models.BPE:
    """whole_words: a word that is itself a token is taken as it is, without merging up to it."""
    try:
        pairs = [_pair(merge) for merge in merges]
        return models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=whole_words)
    except Exception as error:  # the binding raises bare Exception for merges that the vocabulary lacks
        raise ModelError(f"vocabulary and merges do not fit each other: {error}") from error


def _pair(merge: str) -> tuple[str, str]:
    """Split at the first space that is not the first character: a token may itself begin with one."""
    cut = merge.index(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _added(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)
