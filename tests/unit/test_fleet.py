"""Many sessions in virtual time: the closed forms hold, the price settles, chains fade where they do not pay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline import fleet_baselines, fleet_traces, theory
from paceline.fleet import Fleet, Scenario
from paceline.fleet_baselines import Batch
from paceline.fleet_hardware import GPUS, LLMS, Edge, StepCost
from paceline.fleet_meter import Link
from paceline.wire import Speculation

TRACE = fleet_traces.load("smollm2-t0.8")
DEEP = Speculation(fill=False, alternatives=False, lookup=False, assist=False, max_draft=16)
PACELINE = Speculation(max_draft=16)
DESKTOP = Edge("desktop", 0.008, 0.9, row=0.1)
MEMORY_BOUND = StepCost(GPUS["A100-80"], LLMS["llama-8b"])


def flat(seconds: float):
    """A step takes the same, whatever is in it."""
    return lambda tokens, context, per_session: seconds


def compute_bound(tokens: float, context: float, per_session: float) -> float:
    """Eight tokens are free, every further one costs as much as they do each."""
    return 0.02 * max(1.0, tokens / 8)


def one(**more) -> Scenario:
    world = {
        "step_s": flat(0.02),
        "trace": TRACE.at(0.8),
        "edge": Edge("e", 0.01, 0.8),
        "link": Link(0.1),
        "endless": True,
        "noise": 0.0,
    }
    return Scenario(**(world | more))


def ms_per_token(scenario: Scenario, tokens: int = 1500) -> float:
    return 1000 / Fleet(scenario).measured(100, tokens).tokens_per_s


# --- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "acceptance"), [(0, 0.8), (2, 0.6), (4, 0.8), (8, 0.9)])
def test_a_server_that_drafts_for_itself_takes_what_the_theory_says(block, acceptance):
    batch = Batch(flat(0.02), TRACE.at(acceptance), Link(0.1), 20, block=block, draft_s=flat(0.003), noise=0.0)
    measured = 20 * 1000 / fleet_baselines.decode(batch, 20, 300).tokens_per_s
    assert measured == pytest.approx(theory.colocated(acceptance, block, 3.0, 20.0), rel=0.05)


@pytest.mark.parametrize(("block", "round_trip", "acceptance"), [(3, 0.02, 0.6), (4, 0.1, 0.8), (8, 0.2, 0.9)])
def test_synchronous_drafting_takes_what_the_theory_says(block, round_trip, acceptance):
    speculation = Speculation(max_draft=block, depth=1, fill=False, alternatives=False, lookup=False, assist=False)
    measured = ms_per_token(one(speculation=speculation, link=Link(round_trip), trace=TRACE.at(acceptance)))
    expected = theory.synchronous(acceptance, block, 10.0, 1000 * round_trip, 20.0)
    assert measured == pytest.approx(expected, rel=0.07)


@pytest.mark.parametrize(("round_trip", "acceptance"), [(0.03, 0.6), (0.1, 0.8), (0.2, 0.9)])
def test_a_deep_window_takes_what_the_theory_says(round_trip, acceptance):
    measured = ms_per_token(one(speculation=DEEP, link=Link(round_trip), trace=TRACE.at(acceptance)))
    assert measured == pytest.approx(theory.deep(acceptance, 10.0, 1000 * round_trip, 20.0), rel=0.1)


def test_plain_decoding_takes_a_step_a_token():
    assert ms_per_token(one(speculation=Speculation(enabled=False)), 300) == pytest.approx(20.0, rel=0.02)


# --- worlds ----------------------------------------------------------------------------------------------------------


def test_a_run_repeats_and_every_session_gets_its_text():
    scenario = one(load=((0.0, 12),), tokens=40, endless=False, noise=0.05, speculation=PACELINE)
    fleets = [Fleet(scenario), Fleet(scenario)]
    assert fleets[0].whole() == fleets[1].whole()
    for client in fleets[0].clients:
        assert client.live.session.finish == "length"
        assert client.live.session.committed == client.live.course.truth(48)
        assert client.edge is not None and client.edge.state.committed == client.live.session.committed
    assert Fleet(replace(scenario, seed=2)).whole() != fleets[0].whole()


def test_sessions_beyond_the_cache_wait_and_then_get_their_turn():
    scenario = one(load=((0.0, 30),), tokens=30, endless=False, context=1000, kv_tokens=10_500, speculation=PACELINE)
    fleet = Fleet(scenario)
    fleet.run()
    assert max(moment.running for moment in fleet.moments) == 10
    assert [client.live.session.finish for client in fleet.clients] == ["length"] * 30


def test_sessions_join_and_leave():
    fleet = Fleet(one(load=((0.0, 4), (1.0, 9), (2.0, 2)), speculation=PACELINE))
    for moment, running in ((0.9, 4), (1.9, 9), (3.0, 2)):
        fleet.run(until_s=moment)
        assert len(fleet.cloud.lives) == running
    cancelled = [client.live.session.finish for client in fleet.clients]
    assert cancelled == ["cancelled"] * 7 + [None] * 2


# --- the price -------------------------------------------------------------------------------------------------------


def settled_chains(step_s, context: int, counts: tuple[int, ...]) -> list[float]:
    """Drafts for each decided session, by number of sessions."""
    scenarios = [
        one(step_s=step_s, edge=DESKTOP, trace=TRACE.at(0.8), link=Link(0.03), context=context, speculation=PACELINE,
            load=((0.0, count),))
        for count in counts
    ]  # fmt: skip
    return [Fleet(scenario).measured(20, max(20, 600 // scenario.load[0][1])).chain for scenario in scenarios]


def test_drafts_fade_as_load_grows_where_arithmetic_is_the_bound():
    one, two, few, many = settled_chains(compute_bound, 0, (1, 2, 4, 32))
    assert one > 0.9
    assert min(two, few) > 0.5  # each is in every step that another one needs, so more often and with less
    assert many < 0.25


def test_what_is_free_in_a_step_is_used_whoever_waits_for_a_block():
    """Eight rows are free: four sessions commit 50 tokens a second each by plain steps alone."""
    fleet = Fleet(one(step_s=compute_bound, edge=DESKTOP, link=Link(0.02), speculation=PACELINE, load=((0.0, 4),)))
    figures = fleet.measured(20, 150)
    assert figures.tokens_per_s > 1.4 * 4 * 50, "who is left out of others' steps has 1.36"
    assert figures.batch > 3.8


def test_the_dearer_the_verifier_the_fewer_drafts_are_made_in_vain():
    """Eight sessions would use what is free by themselves; a device that drafts all the time would draft 10 tokens for
    each that is committed at 16 sessions."""
    for sessions in (16, 32):
        load = ((0.0, sessions),)
        fleet = Fleet(one(step_s=compute_bound, edge=DESKTOP, link=Link(0.02), speculation=PACELINE, load=load))
        figures = fleet.measured(20, 40)
        assert figures.drafted_per_token < 4.0
        assert figures.tokens_per_s > 0.99 * 8 / 0.02


def test_drafts_stay_where_memory_is_the_bound():
    few, many = settled_chains(MEMORY_BOUND.step_s, 16_384, (4, 24))
    assert many > few > 0.5
    assert many > 1.0


def swing(step_s, edge: Edge, context: int, before: int, after: int, round_trips: float = 5.0) -> float:
    """Highest minus lowest price as told, from so many round trips and three time constants of the smoothing after the
    load went from `before` to `after` sessions."""
    link = Link(0.06, 0.003)
    load = ((0.0, before), (2.5, after))
    fleet = Fleet(
        one(step_s=step_s, edge=edge, link=link, context=context, speculation=PACELINE, noise=0.02, load=load)
    )
    fleet.run(until_s=2.5 + round_trips * link.round_trip_s + 1.5)
    first = len(fleet.moments)
    fleet.run(until_s=fleet.clock.now + 2.0)
    prices = [moment.smoothed for moment in fleet.moments[first:]]
    return max(prices) - min(prices)


@pytest.mark.parametrize("counts", [(1, 16), (16, 1), (32, 16), (16, 32)])
@pytest.mark.parametrize("step_s", [compute_bound, MEMORY_BOUND.step_s], ids=["compute", "memory"])
def test_the_price_settles_after_a_change_of_the_load(counts, step_s):
    assert swing(step_s, Edge("laptop", 0.025, 0.8), 16_384, *counts) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(1000, 500), (500, 1000)])
def test_the_price_settles_when_half_of_a_thousand_sessions_leave_or_arrive(counts):
    cost = StepCost(GPUS["H200"], LLMS["llama-8b-fp8"])
    assert swing(cost.step_s, Edge("phone", 0.06, 0.8, row=0.5), 256, *counts) < 0.15


@pytest.mark.parametrize("step_s", [compute_bound, MEMORY_BOUND.step_s], ids=["compute", "memory"])
@pytest.mark.parametrize("sessions", [1, 16, 48])
def test_paceline_commits_no_less_than_plain_decoding(sessions, step_s):
    load = ((0.0, sessions),)
    batch = Batch(step_s, TRACE, Link(0.06), sessions, 4096)
    plain = fleet_baselines.decode(batch, 10, 40)
    asked = one(step_s=step_s, edge=DESKTOP, link=Link(0.06), context=4096, speculation=PACELINE, load=load)
    ours = Fleet(asked).measured(20, max(16, 300 // sessions))
    assert ours.tokens_per_s >= 0.97 * plain.tokens_per_s
