"""Chat templates: the model's own Jinja text, run in a sandbox, with the callers' text kept apart from the markers.

A message may spell a control token ("<|im_end|>") to break out of its turn. Before rendering, each such spelling in a
message is split by an unguessable mark; the template runs as usual; what it rendered is then cut at the control tokens
that are still whole, which can only be its own, and the marks are taken out of the text between them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import BadRequest, ModelError


class Rendered(NamedTuple):
    """A stretch of rendered text: one control token spelled out, or text that holds none."""

    text: str
    control: bool


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    """Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=False, **options)


def _environment() -> jinja2.Environment:
    """As Hugging Face runs chat templates, so that templates from there render to the same text."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    environment.filters["tojson"] = _to_json
    return environment


class ChatTemplate:
    """A compiled template. `control` are the spellings of the control tokens, `named` what the template may ask for
    by name (bos_token, eos_token). An empty template is a model that has none: render refuses."""

    def __init__(self, source: str, control: Sequence[str], named: dict[str, str]) -> None:
        self._named = named
        longest_first = sorted(control, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        try:
            self._template = _environment().from_string(source) if source else None
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template cannot be compiled: {error}") from error

    def render(self, messages: Sequence[dict[str, Any]]) -> list[Rendered]:
        """The conversation, open for the assistant's turn. Raises BadRequest, param `messages`."""
        if self._template is None:
            raise BadRequest("this model has no chat template; use plain completions", param="messages")
        mark = f"\ufdd0{secrets.token_hex(8)}\ufdd0"
        marked = [self._split_markers(message, mark) for message in messages]
        try:
            text = self._template.render(messages=marked, add_generation_prompt=True, **self._named)
        except (jinja2.TemplateError, TypeError, ValueError) as error:  # the latter two: fields of a strange shape
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error
        return [*self._cut(text, mark)]

    def _split_markers(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._markers.sub(lambda found: found[0][:1] + mark + found[0][1:], value)
        if isinstance(value, dict):
            return {key: self._split_markers(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._split_markers(item, mark) for item in value]
        return value

    def _cut(self, text: str, mark: str) -> Iterator[Rendered]:
        at = 0
        for found in self._markers.finditer(text):
            if found.start() > at:
                yield Rendered(text[at : found.start()].replace(mark, ""), control=False)
            yield Rendered(found[0], control=True)
            at = found.end()
        if at < len(text):
            yield Rendered(text[at:].replace(mark, ""), control=False)
