"""What services.verifier.vllm_core is asked: what to load, and the work of a step. Needs no vllm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.verifier.coupling_torch import Ask, Chosen

LONGEST_DRAFT = 64
"""Tokens of the longest chain that is verified in one step."""


@dataclass(frozen=True)
class Plan:
    """What to load.

    model: a folder with config.json and safetensors. context: tokens of the longest session. cells: tokens of KV for
    all sessions; None: what vLLM finds room for. sessions: that hold KV at a time. threads: on a CPU. step_tokens: most
    of one step. vocabulary: ids that may be chosen; None: all that the model has logits for. options: further engine
    arguments of vLLM by name (tensor_parallel_size, dtype, ...).
    """

    model: Path
    context: int
    cells: int | None
    sessions: int
    threads: int = 1
    step_tokens: int = 2048
    vocabulary: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Work:
    """One session's share of a step: KV for `path`; with `ask`, choices after it and along ask.draft.

    valid: positions of `path` whose KV stands, by the caller's ledger. salt: sessions of one salt may share KV. The
    step fills in `chosen`, and `done` once all of it was fed.
    """

    key: int
    salt: str
    path: list[int]
    valid: int
    ask: Ask | None = None
    chosen: Chosen | None = None
    done: bool = False


def accepted(tokens: Sequence[int], draft: Sequence[int]) -> int:
    """Draft tokens that are the target's own choices."""
    return next((j for j, token in enumerate(draft) if tokens[j] != token), len(draft))
