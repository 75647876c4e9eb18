"""What simulated engines say: a deterministic language over a byte vocabulary, or a script. Pure.

The language makes each token's logits from a hash of the tokens before it and the position, so text never repeats, and
a KV or position mistake anywhere near shows in the text. Everything here is a function of its arguments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.coupling import noise
from paceline.errors import SettingsError

if TYPE_CHECKING:
    from paceline.model_card import ModelCard

END_ID, USER_ID, ASSISTANT_ID = 256, 257, 258
VOCABULARY = 259
LETTERS = (10, 32, *range(97, 123))
"""Bytes that the language uses: line end, space, a to z."""
ANY = "*"
"""Script key that fits every prompt."""

_SHARPNESS = 2.5
_SCRIPTED = 40.0
_TEMPLATE = (
    "{% for m in messages %}{{ '<|assistant|>' if m['role'] == 'assistant' else '<|user|>' }}{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Script = Mapping[tuple[int, ...] | str, Sequence[int]]


def toy_card(model: str = "toy", context: int = 2048) -> ModelCard:
    """Card of the simulated model: ids 0..255 are bytes, then <|end|> (the end token), <|user|>, <|assistant|>."""
    from paceline import model_card as cards  # needs the text libraries; the rest of this module does not

    letters = {byte: letter for letter, byte in cards.byte_alphabet().items()}
    tokens = [letters[byte] for byte in range(256)] + ["<|end|>", "<|user|>", "<|assistant|>"]
    kinds = [cards.NORMAL] * 256 + [cards.CONTROL] * 3
    tokenizer = cards.byte_level_bpe(tokens, kinds, (), "gpt-2")
    return cards.ModelCard(
        model=model,
        context=context,
        vocabulary=VOCABULARY,
        fingerprint=cards.fingerprint(cards.entries(cards.parse_tokenizer(tokenizer), VOCABULARY)),
        end_ids=(END_ID,),
        bos_id=None,
        add_bos=False,
        chat_template=_TEMPLATE,
        tokenizer=tokenizer,
        simulated=True,
    )


@dataclass(frozen=True)
class World:
    """The language and the script of one simulated model.

    order: tokens that a position looks back on. support: ids the language uses. floor: logit of all other ids (-inf
    forbids them). script: what follows a prompt, then the end token; the keys are whole prompts, else parts of a
    prompt (longest first), else ANY. Where a script speaks, its token leads by 40, at any usual temperature.
    """

    vocabulary: int = VOCABULARY
    seed: int = 0
    order: int = 8
    support: tuple[int, ...] = LETTERS
    floor: float = -20.0
    end_id: int = END_ID
    script: Script = field(default_factory=dict)

    def logits(self, tokens: Sequence[int], prompt_length: int) -> NDArray[np.float32]:
        """(vocabulary,) logits of the position after `tokens`, the first `prompt_length` of which are the prompt."""
        result = np.full(self.vocabulary, self.floor, dtype=np.float32)
        ids = np.asarray(self.support, dtype=np.int64)
        result[ids] = _SHARPNESS * noise(self.context_seed(tokens), 0, 0, ids)
        scripted = self._scripted(tokens, prompt_length)
        if scripted is not None:
            result[scripted] = _SCRIPTED
        return result

    def context_seed(self, tokens: Sequence[int]) -> int:
        """64 bits from the position and the tokens that it looks back on."""
        tail = [self.seed, len(tokens), *tokens[-self.order :]]
        return int.from_bytes(hashlib.blake2b(repr(tail).encode(), digest_size=8).digest(), "little")

    def _scripted(self, tokens: Sequence[int], prompt_length: int) -> int | None:
        """The scripted token at this position: the end token after the script's last; None without a script."""
        if not self.script:
            return None
        line = self._line(tuple(tokens[:prompt_length]))
        if line is None:
            return None
        index = len(tokens) - prompt_length
        return line[index] if index < len(line) else self.end_id

    def _line(self, prompt: tuple[int, ...]) -> Sequence[int] | None:
        if prompt in self.script:
            return self.script[prompt]
        parts = sorted((key for key in self.script if isinstance(key, tuple)), key=len, reverse=True)
        found = next((key for key in parts if contains(prompt, key)), ANY)
        return self.script.get(found)


def contains(whole: Sequence[int], part: Sequence[int]) -> bool:
    """Whether `part` stands somewhere in `whole`, without a gap."""
    return any(tuple(whole[at : at + len(part)]) == tuple(part) for at in range(len(whole) - len(part) + 1))


@dataclass(frozen=True)
class Simulation:
    """Contents of the settings' `simulated_file`: JSON with any of these keys.

    script: {prompt text or "*": text or list of ids}. acceptance: how often a draft fits. mode: see SimulatedDraft.
    seed, floor: of the World. base_ms, per_token_ms, memory_ms: step time of the target; draft_ms: of one draft.
    """

    world: World = field(default_factory=World)
    acceptance: float = 0.8
    mode: Literal["agree", "echo", "anti", "mix"] = "agree"
    base_ms: float = 0.0
    per_token_ms: float = 0.0
    memory_ms: float = 0.0
    draft_ms: float = 0.0

    @classmethod
    def load(cls, path: Path | None) -> Simulation:
        """Defaults for None. Raises SettingsError naming the file and what is wrong in it."""
        if path is None:
            return cls()
        try:
            return _simulation(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise SettingsError(f"simulated_file {path}: {error}") from error


def _simulation(values: dict[str, Any]) -> Simulation:
    script = {key if key == ANY else tuple(key.encode()): _ids(line) for key, line in values.pop("script", {}).items()}
    of_world = {key: values.pop(key) for key in ("seed", "floor") if key in values}
    return Simulation(world=World(script=script, **of_world), **values)


def _ids(line: str | list[int]) -> tuple[int, ...]:
    return tuple(line.encode()) if isinstance(line, str) else tuple(line)
