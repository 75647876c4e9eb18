"""Text <-> tokens from a model card; nothing here needs a model library.

Control tokens (end of turn, start of a message, ...) come from templates and from ids only: text that merely spells
one is tokenised as the plain text it is. Text goes out through `Detokenizer` (whole characters only) and then
`StopFilter` (nothing that may yet turn out to be a stop string).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from paceline.chat_template import ChatTemplate, Rendered
from paceline.errors import BadRequest
from paceline.model_card import ModelCard, entries, parse_tokenizer

__all__ = ["Detokenizer", "ModelCard", "StopFilter", "Tokenizer"]


_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """One model's vocabulary and chat template. Loading takes a fraction of a second; share one per process."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self._specials = parse_tokenizer(card.tokenizer)
        self._plain = parse_tokenizer(card.tokenizer)
        self._plain.encode_special_tokens = True  # in this library's words: as plain text
        added = self._specials.get_added_tokens_decoder()
        self.control: dict[int, str] = {i: token.content for i, token in added.items() if token.special}
        """Control tokens: id to spelling."""
        self._template = ChatTemplate(card.chat_template, [*self.control.values()], self._named_tokens())

    def _named_tokens(self) -> dict[str, str]:
        """What templates know as bos_token and eos_token."""
        bos = "" if self.card.bos_id is None else self.control.get(self.card.bos_id, "")
        eos = self.control.get(self.card.end_ids[0], "") if self.card.end_ids else ""
        return {"bos_token": bos, "eos_token": eos}

    def encode(self, text: str, *, special: bool = False, start: bool = True) -> list[int]:
        """Ids of `text`. With `special`, spelled-out control tokens become control tokens. The start token is put
        before it, once, where the model wants one and `start` allows it."""
        encoder = self._specials if special else self._plain
        if not text.isascii() and _SURROGATE.search(text):
            raise BadRequest("the text holds half a surrogate pair, which is no character")
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return self._started(ids) if start else ids

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The conversation in the model's own template, opened for the assistant's answer.

        Control tokens are those of the template alone. Raises BadRequest (param messages) where the template refuses.
        """
        return self._started(self._ids(self._template.render(messages)))

    def _ids(self, rendered: Iterable[Rendered]) -> list[int]:
        ids: list[int] = []
        for part in rendered:
            ids += self.encode(part.text, special=part.control, start=False)
        return ids

    def _started(self, ids: list[int]) -> list[int]:
        bos = self.card.bos_id
        if not self.card.add_bos or bos is None or ids[:1] == [bos]:
            return ids
        return [bos, *ids]

    @cached_property
    def _spelled(self) -> list[bytes]:
        return [content for content, _ in entries(self._specials, self.card.vocabulary)]

    @cached_property
    def _shown(self) -> list[bytes]:
        return [b"" if i in self.control else content for i, content in enumerate(self._spelled)]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text: part of a character at times; nothing for a control token."""
        return self._shown[self._known(token)]

    def spelled(self, token: int) -> bytes:
        """As token_bytes, but control tokens are spelled out ("<|im_end|>")."""
        return self._spelled[self._known(token)]

    def _known(self, token: int) -> int:
        if not 0 <= token < self.card.vocabulary:
            raise BadRequest(f"token id {token} is outside the vocabulary of {self.card.vocabulary}", param="tokens")
        return token

    def decode(self, ids: Iterable[int]) -> str:
        """The text of whole output; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


class Detokenizer:
    """Tokens in, text out, in whole characters: bytes of an unfinished one wait for the next token.

    All chunks and flush() joined are exactly Tokenizer.decode of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def flush(self) -> str:
        """The end: what never became a character is one U+FFFD."""
        return self._decoder.decode(b"", True)


class StopFilter:
    """Cuts text at the first stop string to be completed (of two completed by one character: the longer).

    Holds back only a tail that may still become a stop, so the outcome does not depend on how the text was chunked.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the text; from then on nothing comes out."""

    def feed(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.stopped = min(found)
            return self._release(at)
        return self._release(len(self._held) - self._tail())

    def _tail(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        lengths = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0)

    def _release(self, length: int) -> str:
        out, self._held = self._held[:length], "" if self.stopped is not None else self._held[length:]
        return out

    def flush(self) -> str:
        """The end of the text: a tail that became no stop is text after all."""
        return self._release(len(self._held))
