"""The rule on the device against paceline.coupling, on the same logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.coupling import choose, logprobs
from paceline.engine import Rule
from paceline.errors import EngineError
from paceline.wire import Sampling
from services.verifier.coupling_torch import Ask, Chosen, choose_on_device, choose_rows

VOCABULARY = 3000

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-7, 0.3, 0.8, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 2, 40, VOCABULARY - 1, VOCABULARY + 1]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.sampled_from([{}, {3: 4.0, 7: -100.0}]),
    min_tokens=st.sampled_from([0, 5]),
    end_ids=st.sampled_from([(), (0, 11)]),
)
rules = st.builds(
    Rule,
    sampling=samplings,
    seed=st.integers(0, 2**64 - 1),
    prompt_length=st.integers(0, 12),
    choice=st.integers(0, 3),
)


def assert_by_the_rule(found: Chosen, ask: Ask, logits: np.ndarray) -> None:
    path = [*ask.path, *ask.draft]
    for j in range(ask.rows):
        expected = choose(logits[j], ask.rule, path[: len(ask.path) + j])
        assert found.tokens[j] == expected.token
        assert found.margins[j] == pytest.approx(expected.margin, abs=1e-9)
        if ask.logprobs is not None:
            value = logprobs(logits[j], expected.token, ask.logprobs)
            assert found.logprobs[j].token == expected.token
            assert found.logprobs[j].logprob == pytest.approx(value.logprob, abs=1e-9)
            assert [i for i, _ in found.logprobs[j].top] == [i for i, _ in value.top]


@settings(deadline=None, max_examples=300)
@given(
    st.lists(rules, min_size=1, max_size=4), st.integers(0, 2**32 - 1), st.sampled_from([0.1, 2.0, 8.0]), st.booleans()
)
def test_choices_margins_and_logprobs(rules: list[Rule], seed: int, spread: float, coarse: bool) -> None:
    """coarse: many equal logits, so that ties come up at every border."""
    random = np.random.default_rng(seed)
    asks = []
    for number, rule in enumerate(rules):
        path = random.integers(0, VOCABULARY, 12 + number).tolist()
        asks.append(Ask(rule, path, tuple(random.integers(0, VOCABULARY, number).tolist()), (None, 0, 5)[number % 3]))
    logits = random.normal(0, spread, (sum(ask.rows for ask in asks), VOCABULARY)).astype(np.float32)
    if coarse:
        logits = np.round(logits)
    before = torch.from_numpy(logits.copy())
    start = 0
    for ask, found in zip(asks, choose_on_device(before, asks), strict=True):
        assert_by_the_rule(found, ask, logits[start : start + ask.rows])
        start += ask.rows
    assert np.array_equal(before.numpy(), logits)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_on_which_nothing_can_be_chosen(temperature: float, value: float) -> None:
    logits = np.random.default_rng(1).normal(size=(3, 100)).astype(np.float32)
    logits[1] = value
    rule = Rule(Sampling(temperature=temperature), seed=1, prompt_length=1)
    found = choose_on_device(torch.from_numpy(logits), [Ask(rule, [5]), Ask(rule, [5]), Ask(rule, [5])])
    with pytest.raises(EngineError):
        choose(logits[1], rule, [5])
    assert [math.isnan(chosen.margins[0]) for chosen in found] == [False, True, False]
    for i in (0, 2):
        assert_by_the_rule(found[i], Ask(rule, [5]), logits[i : i + 1])


def test_the_same_on_a_vocabulary_of_the_usual_size() -> None:
    random = np.random.default_rng(3)
    logits = random.normal(0, 3, (40, 49152)).astype(np.float32)
    kinds = [Sampling(temperature=t, top_p=p, top_k=k) for t in (0.0, 0.9) for p in (1.0, 0.95) for k in (0, 50)]
    asks = [Ask(Rule(kind, seed=i, prompt_length=2), [1, 2, 3], tuple(range(4))) for i, kind in enumerate(kinds)]
    for i, (ask, found) in enumerate(zip(asks, choose_on_device(torch.from_numpy(logits), asks), strict=True)):
        assert_by_the_rule(found, ask, logits[5 * i : 5 * i + 5])


def test_on_a_cpu_row_by_row_up_to_the_first_difference() -> None:
    logits = np.random.default_rng(5).normal(0, 3, (9, VOCABULARY)).astype(np.float32)
    logits[8] = np.nan
    rule = Rule(Sampling(temperature=0.8), seed=7, prompt_length=1)
    wrong = Ask(rule, [5, 6], (1, 2, 3), 2)
    right = [choose(logits[4 + j], rule, range(2 + j)).token for j in range(3)]
    for chosen, ask, end in zip(
        choose_rows(torch.from_numpy(logits), [wrong, Ask(rule, [5, 6], tuple(right), 2), Ask(rule, [5])]),
        [wrong, Ask(rule, [5, 6], tuple(right), 2), Ask(rule, [5])],
        [1, 4, 1],
        strict=True,
    ):
        assert len(chosen.tokens) == len(chosen.margins) == end
        assert len(chosen.logprobs) == (0 if ask.logprobs is None else end)
    spoilt, taken = choose_rows(
        torch.from_numpy(logits[[8, 4, 5, 6, 7]]), [Ask(rule, [5]), Ask(rule, [5, 6], tuple(right))]
    )
    assert math.isnan(spoilt.margins[0])
    assert taken.tokens[:3] == right
