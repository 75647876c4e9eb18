"""Drafter-invariant sampling: the one rule by which target and drafters choose a token (docs/speculation.md section 1).

A choice is a function of the logits, the tokens before it, and the Rule alone. Draft and target share the noise, so
they agree wherever their logits nearly do, and no probabilities cross the network (Daliri et al., "Coupling without
communication", arXiv 2408.07978). By the Gumbel-max property a choice is an exact sample of the filtered distribution.

Words: *score* is the logit after penalties, bias and temperature; *noisy score* is score + Gumbel noise; a *survivor*
is a token that the filters left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.engine import Rule, TokenLogprob
from paceline.errors import EngineError
from paceline.wire import Sampling

LOGPROB_FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""
MIN_TEMPERATURE = 1e-6
"""A lower one is greedy. The noise spans 41, so it could only part scores that are closer than 41 times this; and far
lower ones carry the scores beyond what a float holds."""

Logits = NDArray[np.float32]
Scores = NDArray[np.float64]
Ids = NDArray[np.int64]

_MASK = (1 << 64) - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SLACK = 1e-9
"""Rounding allowance of the pruning bound; it only ever keeps more tokens."""


@dataclass(frozen=True)
class Choice:
    """The chosen token; margin: best noisy score minus second-best (inf if only one survives); runners: runner-ups as
    (token, gap of noisy score to the choice), best first."""

    token: int
    margin: float
    runners: tuple[tuple[int, float], ...] = ()


def mix(value: int) -> int:
    """splitmix64 of one unsigned 64-bit integer."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK
    return value ^ (value >> 31)


def hashes(seed: int, choice: int, index: int, tokens: Ids) -> NDArray[np.uint64]:
    """h of each token, bit-equal on every platform: mix(mix(mix(mix(seed) ^ choice) ^ index) ^ token)."""
    state = mix(mix(mix(seed & _MASK) ^ choice) ^ (index & _MASK))
    value = tokens.astype(np.uint64)
    value ^= np.uint64(state)
    value += np.uint64(_GOLDEN)
    value ^= value >> np.uint64(30)
    value *= np.uint64(_MIX1)
    value ^= value >> np.uint64(27)
    value *= np.uint64(_MIX2)
    value ^= value >> np.uint64(31)
    return value


def noise(seed: int, choice: int, index: int, tokens: Ids) -> Scores:
    """Standard Gumbel noise g of each token at output position `index`."""
    return _gumbel(hashes(seed, choice, index, tokens))


def _gumbel(h: NDArray[np.uint64]) -> Scores:
    uniform = ((h >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    result: Scores = -np.log(-np.log(uniform))
    return result


def choose(logits: Logits, rule: Rule, tokens: Sequence[int] | Ids, runners: int = 0) -> Choice:
    """The choice at position len(tokens), where `tokens` is everything before it, prompt and output.

    logits: raw, (vocabulary,), left unchanged. Raises EngineError when no logit is finite or one is NaN.
    """
    sampling = rule.sampling
    index = len(tokens) - rule.prompt_length
    adjusted = _adjusted(logits, sampling, tokens, rule.prompt_length)
    if sampling.temperature < MIN_TEMPERATURE:
        return _greedy(adjusted, runners)
    scores = adjusted.astype(np.float64)
    scores /= sampling.temperature
    survivors = _filtered(scores, sampling)
    if survivors is None:
        return _noisy_best(scores, np.arange(len(scores), dtype=np.int64), rule, index, runners)
    return _noisy_best(scores[survivors], survivors, rule, index, runners)


def needs_tokens(sampling: Sampling) -> bool:
    """Whether a choice depends on the ids before it (penalties), not only on how many there are."""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def probability(logits: Logits, token: int) -> float:
    """Softmax probability of `token` under the raw logits."""
    peak = logits.max()
    return float(np.exp(logits[token] - peak) / np.exp(logits - peak).sum())


def logprobs(logits: Logits, token: int, top: int) -> TokenLogprob:
    """Log-softmax of the raw logits at `token` and at the `top` most likely tokens (ties: smaller id first)."""
    raw = logits.astype(np.float64)
    peak = _peak(raw)
    values = raw - (peak + np.log(np.exp(raw - peak).sum()))
    best = _best_first(values, _head(values, top))[:top] if top else ()
    entries = tuple((int(t), max(float(values[t]), LOGPROB_FLOOR)) for t in best)
    return TokenLogprob(token, max(float(values[token]), LOGPROB_FLOOR), entries)


# --- penalties and bias --------------------------------------------------------------------------------------------


def _adjusted(
    logits: Logits, sampling: Sampling, tokens: Sequence[int] | Ids, prompt_length: int
) -> NDArray[np.floating]:
    """Logits after penalties, bias and barred end tokens; the same array when none is on."""
    barred = sampling.end_ids if len(tokens) - prompt_length < sampling.min_tokens else ()
    penalised = needs_tokens(sampling)
    if not (penalised or sampling.logit_bias or barred):
        return logits
    scores = logits.astype(np.float64)
    if penalised:
        _penalise(scores, sampling, np.asarray(tokens, dtype=np.int64), prompt_length)
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    scores[list(barred)] = -np.inf
    return scores


def _penalise(scores: Scores, sampling: Sampling, tokens: Ids, prompt_length: int) -> None:
    """Repetition over prompt and output (divides positive logits, multiplies negative ones), then presence and
    frequency over the output."""
    if sampling.repetition_penalty != 1:
        seen = np.unique(tokens)
        values = scores[seen]
        penalty = sampling.repetition_penalty
        scores[seen] = np.where(values > 0, values / penalty, values * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        ids, counts = np.unique(tokens[max(prompt_length, 0) :], return_counts=True)
        scores[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts


# --- filters -------------------------------------------------------------------------------------------------------


def _filtered(scores: Scores, sampling: Sampling) -> Ids | None:
    """Ids that top-k, top-p and min-p leave, in that order; None when all three are off.

    A tie at a border is broken towards the smaller id, so that every platform keeps the same set.
    """
    survivors: Ids | None = None
    if 0 < sampling.top_k < len(scores):
        survivors = _best_first(scores, _head(scores, sampling.top_k))[: sampling.top_k]
    if sampling.top_p < 1:
        survivors = _top_p(scores, sampling.top_p, survivors)
    if sampling.min_p > 0:
        ids = np.arange(len(scores), dtype=np.int64) if survivors is None else survivors
        survivors = ids[scores[ids] >= _peak(scores) + np.log(sampling.min_p)]
    return survivors


def _top_p(scores: Scores, top_p: float, survivors: Ids | None) -> Ids:
    """The fewest most likely tokens whose probability, normalised over `survivors`, reaches `top_p`."""
    mass = np.exp((scores if survivors is None else scores[survivors]) - _peak(scores))
    need = top_p * mass.sum()
    ranked = survivors
    if ranked is None:
        depth = 4.0
        peak = _peak(scores)
        while mass[scores >= peak - depth].sum() < need and depth < 4096:
            depth *= 2
        near = np.flatnonzero(scores >= peak - depth)
        ranked = _best_first(scores, near)
    reached = np.cumsum(np.exp(scores[ranked] - _peak(scores)))
    return ranked[: int(np.searchsorted(reached, need)) + 1]


def _head(scores: NDArray[np.floating], count: int) -> Ids:
    """Ids of at least the `count` best scores, ties at the border included; in no order."""
    if count >= len(scores):
        return np.arange(len(scores), dtype=np.int64)
    border = np.partition(scores, len(scores) - count)[len(scores) - count]
    return np.flatnonzero(scores >= border)


def _best_first(scores: NDArray[np.floating], ids: Ids) -> Ids:
    """`ids` by falling score, ties by rising id."""
    return ids[np.lexsort((ids, -scores[ids]))]


def _peak(scores: NDArray[np.floating]) -> float:
    peak = float(scores.max())
    if not -np.inf < peak < np.inf:
        raise EngineError(f"the largest score is {peak}: nothing can be chosen")
    return peak


# --- the choice ----------------------------------------------------------------------------------------------------


def _greedy(scores: NDArray[np.floating], runners: int) -> Choice:
    best = int(scores.argmax())  # numpy answers the first of equals: the smaller id
    peak = _peak(scores)
    if runners:
        ranked = _best_first(scores, _head(scores, runners + 1))[: runners + 1]
        return _ranked_choice(ranked, scores[ranked].astype(np.float64), runners)
    second = max(scores[:best].max(initial=-np.inf), scores[best + 1 :].max(initial=-np.inf))
    return Choice(best, float(peak) - float(second))


def _noisy_best(scores: Scores, ids: Ids, rule: Rule, index: int, runners: int) -> Choice:
    """Best of scores + noise over `ids` (scores[j] belongs to ids[j]).

    Exact, but logarithms are taken for few tokens: a token whose score plus the largest noise drawn falls short of
    the want-th best of a first pool cannot be among the best.
    """
    want = max(2, runners + 1)
    h = hashes(rule.seed, rule.choice, index, ids)
    pool = _first_pool(scores, want)
    noisy = scores[pool] + _gumbel(h[pool])
    if len(pool) < len(scores):
        bound = np.partition(noisy, len(noisy) - want)[len(noisy) - want] if len(noisy) >= want else -np.inf
        largest = float(_gumbel(h.max(keepdims=True))[0])
        pool = np.flatnonzero(scores >= bound - largest - _SLACK)
        noisy = scores[pool] + _gumbel(h[pool])
    head = _head(noisy, want)
    order = head[np.lexsort((ids[pool][head], -noisy[head]))][:want]
    return _ranked_choice(ids[pool][order], noisy[order], runners)


def _first_pool(scores: Scores, want: int) -> Ids:
    """Positions of the most likely tokens, at least `want` of them where there are as many finite ones."""
    peak = _peak(scores)
    depth = 4.0
    pool = np.flatnonzero(scores >= peak - depth)
    while len(pool) < want and depth < 4096:
        depth *= 4
        pool = np.flatnonzero(scores >= peak - depth)
    return pool


def _ranked_choice(ids: Ids, values: Scores, runners: int) -> Choice:
    """values: (noisy) scores of `ids`, best first, at least two where two survive; -inf ones do not count."""
    gaps = [(int(token), float(values[0] - value)) for token, value in zip(ids, values, strict=True) if value > -np.inf]
    margin = gaps[1][1] if len(gaps) > 1 else float("inf")
    return Choice(gaps[0][0], margin, tuple(gaps[1 : runners + 1]))
