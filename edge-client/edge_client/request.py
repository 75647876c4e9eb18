"""What a session is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from paceline import wire
from paceline.errors import BadRequest
from paceline.model_card import ModelCard

_SAMPLING, _SPECULATION = wire.Sampling(), wire.Speculation()


@dataclass(frozen=True)
class Request:
    """A prompt in the target's token ids, and how to go on. max_tokens None: up to the context; seed None: drawn."""

    tokens: tuple[int, ...]
    sampling: wire.Sampling = _SAMPLING
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    choice: int = 0
    logprobs: int | None = None
    speculation: wire.Speculation = _SPECULATION


def opening(request: Request, card: ModelCard, *, drafts_here: bool) -> wire.SessionOpen:
    """The message that opens the session. Without a draft model here or a hosted one speculation is off. Raises
    BadRequest for an empty prompt."""
    sampling, speculation = request.sampling, request.speculation
    if not request.tokens:
        raise BadRequest("the prompt is empty", param="tokens")
    if not sampling.end_ids:
        sampling = msgspec.structs.replace(sampling, end_ids=card.end_ids)
    if not drafts_here and not speculation.hosted:
        speculation = msgspec.structs.replace(speculation, enabled=False)
    return wire.SessionOpen(
        model=card.model,
        fingerprint=card.fingerprint,
        tokens=request.tokens,
        sampling=sampling,
        stop=request.stop,
        max_tokens=request.max_tokens,
        seed=request.seed,
        choice=request.choice,
        logprobs=request.logprobs,
        speculation=speculation,
    )
