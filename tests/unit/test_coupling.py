"""The rule of choice: noise bit by bit, exact sampling, filters and penalties against a slow reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.coupling import LOGPROB_FLOOR, MIN_TEMPERATURE, choose, hashes, logprobs, mix, noise, probability
from paceline.engine import Rule
from paceline.errors import EngineError
from paceline.wire import Sampling

MASK = (1 << 64) - 1

# (seed, choice, index, token) -> h, made by a C program. Any implementation of the rule, in any language, has to give
# these.
H_TABLE = {
    (0, 0, 0, 0): 0x2130748AAAC80268,
    (1, 0, 0, 0): 0xE28195DDD9EE4956,
    (1, 0, 0, 1): 0x3FA25E1657E024C1,
    (1, 1, 0, 0): 0xC965D6348C188782,
    (1, 0, 1, 0): 0x91DF2B1652002E2D,
    (7, 0, 12, 49151): 0xEE85D4ECE789B7F0,
    (7, 3, 12, 49151): 0xF8740512ACDACA35,
    (9223372036854775807, 0, 4095, 151935): 0x08F30F8F397FF89D,
    (123456789, 2, 100000, 16777215): 0x12E3A794E4FBBC00,
    (42, 0, -1, 5): 0xA2936DC03D23BD1F,
}


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def greedy(**fields: object) -> Rule:
    return Rule(Sampling(temperature=0, **fields), 0, 0)


def slow_h(seed: int, choice: int, index: int, token: int) -> int:
    return mix(mix(mix(mix(seed) ^ choice) ^ (index & MASK)) ^ token)


def slow_scores(logits: Sequence[float], rule: Rule, tokens: Sequence[int]) -> list[float]:
    """Scores after penalties, bias, barred ends and temperature, token by token."""
    s, output = rule.sampling, list(tokens)[rule.prompt_length :]
    scores = []
    for token, logit in enumerate(logits):
        value = float(logit)
        if token in tokens and s.repetition_penalty != 1:
            value = value / s.repetition_penalty if value > 0 else value * s.repetition_penalty
        if token in output:
            value -= s.presence_penalty + s.frequency_penalty * output.count(token)
        value += s.logit_bias.get(token, 0.0)
        if len(output) < s.min_tokens and token in s.end_ids:
            value = -math.inf
        scores.append(value / s.temperature if s.temperature else value)
    return scores


def slow_survivors(scores: list[float], s: Sampling) -> list[int]:
    ranked = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
    if s.top_k:
        ranked = ranked[: s.top_k]
    peak = scores[ranked[0]]
    if s.top_p < 1:
        weights = [math.exp(scores[t] - peak) for t in ranked]
        total, mass, kept = sum(weights), 0.0, []
        for token, weight in zip(ranked, weights, strict=True):
            kept.append(token)
            mass += weight
            if mass >= s.top_p * total:
                break
        ranked = kept
    if s.min_p > 0:
        ranked = [t for t in ranked if scores[t] >= peak + math.log(s.min_p)]
    return ranked


def slow_ranking(logits: Sequence[float], rule: Rule, tokens: Sequence[int]) -> list[tuple[int, float]]:
    """(token, noisy score) of all survivors, best first."""
    scores = slow_scores(logits, rule, tokens)
    index = len(tokens) - rule.prompt_length
    if rule.sampling.temperature == 0:
        found = [(t, v) for t, v in enumerate(scores) if v > -math.inf]
    else:
        found = []
        for token in slow_survivors(scores, rule.sampling):
            u = ((slow_h(rule.seed, rule.choice, index, token) >> 12) + 0.5) * 2.0**-52
            found.append((token, scores[token] - math.log(-math.log(u))))
    return sorted(found, key=lambda pair: (-pair[1], pair[0]))


class TestNoise:
    def test_splitmix64_is_the_published_one(self) -> None:
        # first outputs of Vigna's reference generator from state 0
        assert [mix(0), mix(0x9E3779B97F4A7C15), mix((2 * 0x9E3779B97F4A7C15) & MASK)] == [
            0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F,
        ]  # fmt: skip

    @pytest.mark.parametrize("key", H_TABLE, ids=str)
    def test_table_of_constants(self, key: tuple[int, int, int, int]) -> None:
        seed, choice, index, token = key
        assert int(hashes(seed, choice, index, np.array([token]))[0]) == H_TABLE[key]

    @given(st.integers(0, 2**63 - 1), st.integers(0, 99), st.integers(-5, 10**6), st.integers(0, 2**24 - 1))
    def test_vectors_equal_integers(self, seed: int, choice: int, index: int, token: int) -> None:
        assert int(hashes(seed, choice, index, np.array([token]))[0]) == slow_h(seed, choice, index, token)

    def test_is_standard_gumbel(self) -> None:
        g = noise(3, 0, 0, np.arange(200_000))
        assert np.isfinite(g).all()
        assert g.mean() == pytest.approx(0.5772, abs=0.01)
        assert g.var() == pytest.approx(math.pi**2 / 6, abs=0.03)

    def test_differs_between_seeds_choices_and_positions(self) -> None:
        ids = np.arange(4)
        drawn = {tuple(noise(*key, ids)) for key in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]}
        assert len(drawn) == 4


class TestDistribution:
    DRAWS = 6000

    def counts(self, logits: np.ndarray, sampling: Sampling) -> np.ndarray:
        rule = Rule(sampling, 11, 0)
        drawn = [choose(logits, rule, range(position)).token for position in range(self.DRAWS)]
        return np.bincount(drawn, minlength=len(logits))

    def check(self, counts: np.ndarray, expected: np.ndarray) -> None:
        """Chi-square; 5 sigma above its mean (the draws are fixed by the seed, so this cannot flicker)."""
        assert counts[expected == 0].sum() == 0
        seen = expected > 0
        chi = (((counts - expected) ** 2)[seen] / expected[seen]).sum()
        freedom = seen.sum() - 1
        assert chi < freedom + 5 * math.sqrt(2 * freedom)

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
    def test_is_the_softmax(self, temperature: float) -> None:
        logits = array(2, 1.5, 1, 0.2, -1, 0.9)
        weights = np.exp(logits.astype(float) / temperature)
        self.check(self.counts(logits, Sampling(temperature=temperature)), self.DRAWS * weights / weights.sum())

    def test_top_k_renormalises(self) -> None:
        logits = array(2, 1.5, 1, 0.2, -1, 0.9)
        weights = np.exp(logits.astype(float)) * (logits >= 1)
        self.check(self.counts(logits, Sampling(top_k=3)), self.DRAWS * weights / weights.sum())

    def test_a_large_vocabulary_is_pruned_exactly(self) -> None:
        """Every token is as likely as any other: pruning must not favour any."""
        counts = self.counts(np.zeros(300, dtype=np.float32), Sampling())
        self.check(counts, np.full(300, self.DRAWS / 300))


class TestFilters:
    LOGITS = array(math.log(0.4), math.log(0.3), math.log(0.15), math.log(0.1), math.log(0.05))

    def survivors(self, **fields: object) -> set[int]:
        rule = Rule(Sampling(temperature=1.0, **fields), 5, 0)
        return {choose(self.LOGITS, rule, range(n)).token for n in range(400)}

    def test_each_alone(self) -> None:
        assert self.survivors() == {0, 1, 2, 3, 4}
        assert self.survivors(top_k=2) == {0, 1}
        assert self.survivors(top_p=0.8) == {0, 1, 2}
        assert self.survivors(min_p=0.3) == {0, 1, 2}

    def test_order_is_top_k_top_p_min_p(self) -> None:
        # .4/.85 + .3/.85 = .82 of what top-k left: top-p after top-k keeps two, before it would keep three
        assert self.survivors(top_k=3, top_p=0.8) == {0, 1}
        # min-p compares with the best one, whatever the others
        assert self.survivors(top_p=0.9, min_p=0.5) == {0, 1}

    def test_a_single_survivor_has_no_rival(self) -> None:
        assert choose(self.LOGITS, Rule(Sampling(top_k=1), 5, 0), ()).margin == math.inf

    def test_ties_at_the_border_keep_the_smaller_id(self) -> None:
        rule = Rule(Sampling(top_k=2), 5, 0)
        assert {choose(array(1, 1, 1, 1), rule, range(n)).token for n in range(100)} == {0, 1}


class TestGreedy:
    def test_ties_go_to_the_smaller_id(self) -> None:
        choice = choose(array(1, 3, 3, 2), greedy(), (), runners=2)
        assert (choice.token, choice.margin, choice.runners) == (1, 0.0, ((2, 0.0), (3, 1.0)))

    @pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 9e-7])
    @pytest.mark.parametrize("fields", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1e-6}])
    def test_a_tiny_temperature_is_greedy(self, temperature: float, fields: dict[str, float]) -> None:
        rule = Rule(Sampling(temperature=temperature, **fields), 3, 1)  # type: ignore[arg-type]
        logits = array(-3e38, 2.0, 17.5, 17.0)
        assert choose(logits, rule, [1], runners=1) == choose(logits, greedy(**fields), [1], runners=1)

    @pytest.mark.parametrize("seed", range(5))
    def test_the_lowest_temperature_with_noise_is_served(self, seed: int) -> None:
        rule = Rule(Sampling(temperature=MIN_TEMPERATURE), seed, 0)
        assert choose(array(-3e38, 3e38, 17.0), rule, []).token == 1

    def test_margin_without_runners(self) -> None:
        assert choose(array(1, 3, 2.5), greedy(), ()).margin == 0.5

    def test_repetition_divides_positive_and_multiplies_negative(self) -> None:
        rule = greedy(repetition_penalty=2.0)
        assert choose(array(3, 2, -9), rule, (0,)).token == 1  # 3 / 2 is below 2
        assert choose(array(-1, -1.5, -9), rule, (0,)).token == 1  # -1 * 2 is below -1.5

    def test_repetition_sees_the_prompt_and_presence_does_not(self) -> None:
        logits = array(2, 1)
        prompt_only = Rule(Sampling(temperature=0, presence_penalty=2), 0, 1)
        assert choose(logits, prompt_only, (0,)).token == 0
        assert choose(logits, prompt_only, (0, 0)).token == 1
        assert choose(logits, Rule(Sampling(temperature=0, repetition_penalty=3), 0, 1), (0,)).token == 1

    def test_frequency_counts(self) -> None:
        rule = greedy(frequency_penalty=0.6)
        assert choose(array(2, 1), rule, (0,)).token == 0
        assert choose(array(2, 1), rule, (0, 0)).token == 1

    def test_bias(self) -> None:
        assert choose(array(2, 1), greedy(logit_bias={1: 1.5}), ()).token == 1
        assert choose(array(2, 1), greedy(logit_bias={0: -100}), ()).token == 1

    def test_end_is_barred_until_min_tokens(self) -> None:
        rule = Rule(Sampling(temperature=0, min_tokens=2, end_ids=(0,)), 0, 3)
        tokens = [7, 7, 7]
        assert choose(array(5, 1), rule, tokens).token == 1
        assert choose(array(5, 1), rule, [*tokens, 1]).token == 1
        assert choose(array(5, 1), rule, [*tokens, 1, 1]).token == 0

    def test_logits_are_left_unchanged(self) -> None:
        logits = array(2, 1)
        choose(logits, greedy(logit_bias={0: 5}, repetition_penalty=2), (0, 1))
        assert logits.tolist() == [2, 1]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_nothing_finite_is_an_error(self, bad: float, temperature: float) -> None:
        with pytest.raises(EngineError):
            choose(array(bad, bad), Rule(Sampling(temperature=temperature), 0, 0), ())


FLOATS = st.floats(-12, 12, width=16)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.dictionaries(st.integers(0, 5), FLOATS, max_size=3),
    min_tokens=st.integers(0, 4),
    end_ids=st.just((2, 4)),
)


class TestAgainstReference:
    @settings(max_examples=300, deadline=None)
    @given(
        logits=st.lists(st.one_of(FLOATS, st.just(-math.inf)), min_size=6, max_size=40),
        sampling=SAMPLINGS,
        seed=st.integers(0, 2**63 - 1),
        tokens=st.lists(st.integers(0, 5), max_size=8),
        prompt=st.integers(0, 3),
        runners=st.integers(0, 4),
    )
    def test_choice_margin_and_runners(
        self, logits: list[float], sampling: Sampling, seed: int, tokens: list[int], prompt: int, runners: int
    ) -> None:
        rule = Rule(sampling, seed, min(prompt, len(tokens)))
        if max(slow_scores(array(*logits), rule, tokens)) == -math.inf:
            with pytest.raises(EngineError):
                choose(array(*logits), rule, tokens)
            return
        ranked = [pair for pair in slow_ranking(array(*logits), rule, tokens) if pair[1] > -math.inf]
        choice = choose(array(*logits), rule, tokens, runners)
        assert choice.token == ranked[0][0]
        rival = ranked[0][1] - ranked[1][1] if len(ranked) > 1 else math.inf
        assert choice.margin == pytest.approx(rival, abs=1e-6)
        assert [token for token, _ in choice.runners] == [token for token, _ in ranked[1 : runners + 1]]

    @settings(max_examples=25, deadline=None)
    @given(st.integers(0, 2**32), st.sampled_from([0.2, 0.8, 1.5]), st.sampled_from([0, 50]), st.sampled_from([1, 0.9]))
    def test_large_vocabulary(self, seed: int, temperature: float, top_k: int, top_p: float) -> None:
        logits = np.random.default_rng(seed).normal(0, 4, 3000).astype(np.float32)
        rule = Rule(Sampling(temperature=temperature, top_k=top_k, top_p=top_p), seed, 0)
        ranked = slow_ranking(logits, rule, ())
        choice = choose(logits, rule, (), 3)
        assert [choice.token, *(t for t, _ in choice.runners)] == [t for t, _ in ranked[:4]]

    def test_arrays_and_lists_give_the_same(self) -> None:
        rule = Rule(Sampling(frequency_penalty=0.5, repetition_penalty=1.2), 9, 1)
        logits = np.random.default_rng(0).normal(0, 2, 50).astype(np.float32)
        tokens = [3, 4, 4, 9]
        assert choose(logits, rule, tokens) == choose(logits, rule, np.array(tokens))


def test_agreement_reaches_the_bound_of_coupling() -> None:
    """Two models at total variation distance d agree on at least (1 - d) / (1 + d) of the positions."""
    random = np.random.default_rng(1)
    target = random.normal(0, 2, 200).astype(np.float32)
    draft = (target + random.normal(0, 0.4, 200)).astype(np.float32)
    p, q = (np.exp(z) / np.exp(z).sum() for z in (target.astype(float), draft.astype(float)))
    d = np.abs(p - q).sum() / 2
    rule = Rule(Sampling(), 4, 0)
    same = np.mean([choose(target, rule, range(n)).token == choose(draft, rule, range(n)).token for n in range(4000)])
    assert same >= (1 - d) / (1 + d) - 0.03
    assert same <= 1 - d + 0.03


class TestProbabilities:
    def test_probability_is_of_the_raw_logits(self) -> None:
        assert probability(array(math.log(3), 0), 0) == pytest.approx(0.75)

    def test_logprobs(self) -> None:
        entry = logprobs(array(math.log(2), 0, 0, -math.inf), 3, 5)
        assert entry.token == 3
        assert entry.logprob == LOGPROB_FLOOR
        assert [token for token, _ in entry.top] == [0, 1, 2, 3]
        assert [value for _, value in entry.top] == pytest.approx([math.log(0.5), *[math.log(0.25)] * 2, LOGPROB_FLOOR])

    def test_none_of_the_others(self) -> None:
        assert logprobs(array(0, 0), 1, 0).top == ()
        assert len(logprobs(np.zeros(100, dtype=np.float32), 1, 3).top) == 3
