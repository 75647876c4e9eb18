"""Prompts of a call as token ids, checked against the vocabulary and the context before any session is opened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from paceline.errors import BadRequest, ContextLengthExceeded
from paceline.tokenizer import Tokenizer
from services.gateway.openai_api import Call, Prompt

LONG_TEXT = 20_000
"""Bytes beyond which tokenising goes to a thread, so that other streams do not wait for it."""


class Prompts:
    """One model's."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context = tokenizer.card.context
        self._vocabulary = tokenizer.card.vocabulary
        self._longest = max(len(tokenizer.token_bytes(token)) for token in range(self._vocabulary))

    async def of(self, call: Call) -> list[tuple[int, ...]]:
        """Token ids of each prompt. Raises BadRequest (also for a bias outside the vocabulary) and
        ContextLengthExceeded, `param` named."""
        for token in call.sampling.logit_bias:
            self._check_token(token, "logit_bias")
        if not call.messages:
            return [await self._plain(prompt) for prompt in call.prompts]
        texts = [message["content"] for message in call.messages]
        return [await self._encoded(texts, lambda: self._tokenizer.chat(call.messages), "messages")]

    async def _plain(self, prompt: Prompt) -> tuple[int, ...]:
        """Plain completions may spell control tokens: whoever renders a template himself needs them."""
        if isinstance(prompt, tuple):
            return self._checked(prompt, "prompt")
        return await self._encoded([prompt], lambda: self._tokenizer.encode(prompt, special=True), "prompt")

    async def _encoded(self, texts: Sequence[str], encode: Callable[[], list[int]], param: str) -> tuple[int, ...]:
        size = sum(len(text.encode()) for text in texts)
        least = -(-size // self._longest)
        if least >= self._context:
            raise self._too_long(f"at least {least}", param)
        tokens = await asyncio.to_thread(encode) if size > LONG_TEXT else encode()
        return self._checked(tuple(tokens), param)

    def _checked(self, tokens: tuple[int, ...], param: str) -> tuple[int, ...]:
        if not tokens:
            raise BadRequest("the prompt is empty", param=param, code="empty_prompt")
        self._check_token(max(tokens), param)
        if len(tokens) >= self._context:
            raise self._too_long(str(len(tokens)), param)
        return tokens

    def _check_token(self, token: int, param: str) -> None:
        if not 0 <= token < self._vocabulary:
            raise BadRequest(f"token id {token} is outside the vocabulary of {self._vocabulary}", param=param)

    def _too_long(self, count: str, param: str) -> ContextLengthExceeded:
        message = f"the model's context is {self._context} tokens; this prompt of {count} leaves no room for an answer"
        return ContextLengthExceeded(message, param=param)
