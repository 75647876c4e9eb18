"""paceline.coupling for many rows at once, on the device that holds the logits.

The rule is defined there, and a test compares the two on the same logits; this module changes only how it is computed.
Scores are float64, as there. Logits never leave the device: what comes back are the tokens chosen, their margins, and
the log-probabilities that were asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.coupling import LOGPROB_FLOOR, MIN_TEMPERATURE, Choice, choose, logprobs, mix, needs_tokens
from paceline.engine import Rule, TokenLogprob
from paceline.errors import EngineError
from paceline.wire import Sampling

AT_ONCE = 64
"""Rows that are copied to float64 at the same time: 25 MB for a vocabulary of 49,152."""
_RANKED = 1024
"""Most likely tokens that are ranked at first; top-p needs more only on a nearly flat distribution."""
_MASK = (1 << 64) - 1
_NOTHING: NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Ask:
    """Choose after `path`, after path + draft[:1], ... and after path + draft: len(draft) + 1 rows of logits.

    logprobs: how many of the most likely tokens to report at each row; None: no log-probabilities.
    """

    rule: Rule
    path: Sequence[int]
    draft: tuple[int, ...] = ()
    logprobs: int | None = None

    @property
    def rows(self) -> int:
        return len(self.draft) + 1


@dataclass(frozen=True)
class Chosen:
    """One entry a row, at least up to the first draft token that differs: the choice and its margin
    (paceline.coupling.Choice); a margin of NaN stands for a row on which nothing can be chosen. logprobs: one entry a
    row where they were asked for, else empty."""

    tokens: list[int]
    margins: list[float]
    logprobs: list[TokenLogprob] = field(default_factory=list)


def choose_rows(logits: Tensor, asks: Sequence[Ask]) -> list[Chosen]:
    """The choices of all asks; logits: raw, (rows of all asks in order, vocabulary), left unchanged.

    On a CPU, which has no use for many rows at once, by paceline.coupling itself: it takes logarithms for few tokens,
    and a row behind the first draft token that differs is not looked at.
    """
    if logits.device.type != "cpu":
        return choose_on_device(logits, asks)
    values = logits.to(torch.float32).numpy()
    starts = accumulate((ask.rows for ask in asks), initial=0)
    return [_in_turn(values[start : start + ask.rows], ask) for start, ask in zip(starts, asks, strict=False)]


def _in_turn(logits: NDArray[np.float32], ask: Ask) -> Chosen:
    chosen = Chosen([], [])
    path = np.asarray([*ask.path, *ask.draft], dtype=np.int64) if needs_tokens(ask.rule.sampling) else None
    for j, row in enumerate(logits):
        length = len(ask.path) + j
        try:
            choice = choose(row, ask.rule, range(length) if path is None else path[:length])
        except EngineError:
            choice = Choice(-1, math.nan)  # no draft fits it
        chosen.tokens.append(choice.token)
        chosen.margins.append(choice.margin)
        if math.isnan(choice.margin):
            break
        if ask.logprobs is not None:
            chosen.logprobs.append(logprobs(row, choice.token, ask.logprobs))
        if j == len(ask.draft) or choice.token != ask.draft[j]:
            break
    return chosen


def choose_on_device(logits: Tensor, asks: Sequence[Ask]) -> list[Chosen]:
    """As choose_rows, for all rows at once."""
    rows = [row for ask in asks for row in _rows(ask)]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    margins = torch.empty(len(rows), dtype=torch.float64, device=logits.device)
    plain = [i for i, row in enumerate(rows) if row.greedy and not row.edited]
    others = [i for i, row in enumerate(rows) if not row.greedy or row.edited]
    if plain:
        values = logits if not others else logits[plain]
        tokens[plain], margins[plain] = _best(values)
    for start in range(0, len(others), AT_ONCE):
        part = others[start : start + AT_ONCE]
        tokens[part], margins[part] = _noisy_best(logits[part].to(torch.float64), [rows[i] for i in part])
    return _by_ask(logits, asks, tokens.tolist(), margins.tolist())


def _by_ask(logits: Tensor, asks: Sequence[Ask], tokens: list[int], margins: list[float]) -> list[Chosen]:
    found, start = [], 0
    for ask in asks:
        end = start + ask.rows
        values: list[TokenLogprob] = []
        if ask.logprobs is not None:
            values = [_logprobs(logits[i], tokens[i], ask.logprobs) for i in range(start, end)]
        found.append(Chosen(tokens[start:end], margins[start:end], values))
        start = end
    return found


class _Row(NamedTuple):
    """What differs from row to row. output_index: of the position; before: the ids that penalties look at."""

    rule: Rule
    output_index: int
    before: NDArray[np.int64]

    @property
    def sampling(self) -> Sampling:
        return self.rule.sampling

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < MIN_TEMPERATURE

    @property
    def barred(self) -> tuple[int, ...]:
        return tuple(self.sampling.end_ids) if self.output_index < self.sampling.min_tokens else ()

    @property
    def edited(self) -> bool:
        """Whether logits are changed before the temperature."""
        return bool(needs_tokens(self.sampling) or self.sampling.logit_bias or self.barred)


def _rows(ask: Ask) -> list[_Row]:
    at, penalised = len(ask.path), needs_tokens(ask.rule.sampling)
    tokens = np.asarray([*ask.path, *ask.draft], dtype=np.int64) if penalised else _NOTHING
    return [_Row(ask.rule, at + j - ask.rule.prompt_length, tokens[: at + j]) for j in range(ask.rows)]


# --- scores --------------------------------------------------------------------------------------------------------


def _noisy_best(scores: Tensor, rows: Sequence[_Row]) -> tuple[Tensor, Tensor]:
    """scores: raw logits, float64, (rows, vocabulary); used up."""
    for i, row in enumerate(rows):
        if row.edited:
            _edit(scores[i], row)
    sampled = [i for i, row in enumerate(rows) if not row.greedy]
    bad = ~torch.isfinite(scores.amax(dim=1))
    if sampled:
        temperature = [1.0 if row.greedy else row.sampling.temperature for row in rows]
        scores /= torch.tensor(temperature, dtype=torch.float64, device=scores.device)[:, None]
        # A temperature near zero may carry a score beyond what a float holds.
        bad |= ~torch.isfinite(scores.amax(dim=1))
        whole = len(sampled) == len(rows)
        part = scores if whole else scores[sampled]
        _filter(part, [rows[i] for i in sampled])
        _add_noise(part, [rows[i] for i in sampled])
        if not whole:
            scores[sampled] = part
    tokens, margins = _best(scores)
    margins[bad] = torch.nan
    return tokens, margins


def _edit(scores: Tensor, row: _Row) -> None:
    """Penalties, bias and barred end tokens of one row, in place; as paceline.coupling does it."""
    sampling = row.sampling
    if sampling.repetition_penalty != 1:
        seen = _ids(np.unique(row.before), scores)
        values, penalty = scores[seen], sampling.repetition_penalty
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        output = row.before[max(row.rule.prompt_length, 0) :]
        ids, counts = np.unique(output, return_counts=True)
        taken = sampling.presence_penalty + sampling.frequency_penalty * counts
        scores[_ids(ids, scores)] -= torch.from_numpy(taken.astype(np.float64)).to(scores.device)
    if sampling.logit_bias:
        bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float64, device=scores.device)
        scores[_ids(np.asarray(list(sampling.logit_bias), dtype=np.int64), scores)] += bias
    if row.barred:
        scores[_ids(np.asarray(row.barred, dtype=np.int64), scores)] = -torch.inf


def _ids(ids: NDArray[np.int64], scores: Tensor) -> Tensor:
    return torch.from_numpy(ids).to(scores.device)


def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The choice (smaller id on a tie) and the margin of each row."""
    tokens = scores.argmax(dim=1)
    best = scores.topk(min(2, scores.shape[1]), dim=1).values.to(torch.float64)
    margins = best[:, 0] - best[:, 1] if best.shape[1] > 1 else torch.full_like(best[:, 0], torch.inf)
    margins[~torch.isfinite(best[:, 0])] = torch.nan
    return tokens, margins


# --- filters -------------------------------------------------------------------------------------------------------


def _filter(scores: Tensor, rows: Sequence[_Row]) -> None:
    """What top-k, top-p and min-p drop, in that order, becomes minus infinity, in place."""
    size = scores.shape[1]
    ranked = [i for i, r in enumerate(rows) if 0 < r.sampling.top_k < size or r.sampling.top_p < 1]
    floors = [float(np.log(r.sampling.min_p)) if r.sampling.min_p > 0 else -np.inf for r in rows]
    peak = scores.amax(dim=1, keepdim=True)
    floor = peak + torch.tensor(floors, dtype=torch.float64, device=scores.device)[:, None]
    if ranked:
        part = scores[ranked]
        part.masked_fill_(~_survivors(part, [rows[i].sampling for i in ranked]), -torch.inf)
        scores[ranked] = part
    if any(np.isfinite(floors)):
        scores.masked_fill_(scores < floor, -torch.inf)


def _survivors(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Of top-k and top-p. Both keep a number of the most likely tokens: those above the last one kept, and of its
    equals the ones with the smallest ids."""
    limits = [s.top_k if 0 < s.top_k < scores.shape[1] else scores.shape[1] for s in samplings]
    limit = torch.tensor(limits, device=scores.device)
    values, kept = _kept(scores, samplings, limit)
    border = values.gather(1, (kept - 1)[:, None])
    above = scores > border
    equal = scores == border
    room = (kept - above.sum(dim=1))[:, None]
    return above | (equal & (equal.cumsum(dim=1) <= room))


def _kept(scores: Tensor, samplings: Sequence[Sampling], limit: Tensor) -> tuple[Tensor, Tensor]:
    """The best scores of each row, falling, and how many of them are kept."""
    size = scores.shape[1]
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=scores.device)[:, None]
    narrow = limit < size
    deepest = max([1, *(int(n) for n in limit[narrow].tolist())])
    peak = scores.amax(dim=1, keepdim=True)
    whole = (scores - peak).exp_().sum(dim=1, keepdim=True)
    depth = min(size, max(_RANKED, deepest))
    while True:
        values = scores.topk(depth, dim=1).values
        mass = (values - peak).exp_()
        mass.masked_fill_(torch.arange(depth, device=scores.device)[None, :] >= limit[:, None], 0.0)
        reached = mass.cumsum(dim=1)
        need = top_p * torch.where(narrow[:, None], reached[:, -1:], whole)
        enough = bool(((reached[:, -1:] >= need) | (top_p >= 1) | narrow[:, None]).all())
        if enough or depth == size:
            break
        depth = size
    within = torch.where(top_p[:, 0] < 1, (reached < need).sum(dim=1) + 1, limit)
    return values, torch.minimum(torch.minimum(within, limit), torch.tensor(depth, device=scores.device))


# --- noise ---------------------------------------------------------------------------------------------------------


def _add_noise(scores: Tensor, rows: Sequence[_Row]) -> None:
    """Gumbel noise, in place."""
    states = torch.tensor([_state(row) for row in rows], device=scores.device)
    scores += _gumbel(_uniforms(states, scores.shape[1]))


def _state(row: _Row) -> int:
    """The hash before the token goes in, as the int64 of the same bits."""
    rule = row.rule
    value = mix(mix(mix(rule.seed & _MASK) ^ rule.choice) ^ (row.output_index & _MASK))
    return _signed(value)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN, _MIX1, _MIX2 = (_signed(v) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _uniforms(states: Tensor, size: int) -> Tensor:
    """The upper 52 bits of splitmix64(state ^ token), (states, size): int64 arithmetic wraps as uint64's does, and a
    mask makes its shift a logical one."""
    value = states[:, None] ^ torch.arange(size, device=states.device)[None, :]
    value += _GOLDEN
    value ^= (value >> 30) & ((1 << 34) - 1)
    value *= _MIX1
    value ^= (value >> 27) & ((1 << 37) - 1)
    value *= _MIX2
    value ^= (value >> 31) & ((1 << 33) - 1)
    return (value >> 12) & ((1 << 52) - 1)


def _gumbel(drawn: Tensor) -> Tensor:
    uniform = (drawn.to(torch.float64) + 0.5) * 2.0**-52
    return uniform.log_().neg_().log_().neg_()


# --- log-probabilities ---------------------------------------------------------------------------------------------


def _logprobs(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Log-softmax of one row of raw logits at `token` and at the `top` most likely tokens (ties: smaller id first)."""
    values = logits.to(torch.float64).log_softmax(dim=0)
    entries: list[tuple[int, float]] = []
    if top:
        border = values.topk(min(top, len(values))).values[-1]
        ids = (values >= border).nonzero()[:, 0]
        pairs = zip(ids.tolist(), values[ids].tolist(), strict=True)
        entries = sorted(((i, max(v, LOGPROB_FLOOR)) for i, v in pairs), key=lambda pair: (-pair[1], pair[0]))[:top]
    return TokenLogprob(token, max(float(values[token]), LOGPROB_FLOOR), tuple(entries))
