"""Draft state, session, choice of the batch and fill rule in simulated time: what alternatives, the window, the cutting
of blocks, the lead over a filling cloud and the price are worth."""

from __future__ import annotations

from functools import cache

import pytest
from draft_kit import MACHINE, PROMPT, Machine, Outcome, Simulation, measured

from paceline.draft_plan import FLOOR
from paceline.draft_state import SUPPLY
from paceline.wire import Speculation

DEEP = {"fill": False, "alternatives": False}
SURE = Machine(acceptance=0.98)
PLAIN_MS = MACHINE.times.at(1)


@cache
def deep(round_trip_s: float) -> Outcome:
    return measured(round_trip_s, **DEEP)


@cache
def deep_alt(round_trip_s: float) -> Outcome:
    return measured(round_trip_s, fill=False)


@pytest.mark.parametrize("round_trip_s", [0.06, 0.1])
def test_a_deep_window_beats_the_best_synchronous_block_with_few_steps(round_trip_s):
    best = min(measured(round_trip_s, depth=1, fill=False, max_draft=size, seeds=2).ms for size in (3, 4))
    assert deep(round_trip_s).ms <= 0.8 * best
    assert deep_alt(round_trip_s).ms <= 0.7 * best
    assert deep(round_trip_s).steps <= 0.52


@pytest.mark.parametrize(("round_trip_s", "saved"), [(0.06, 0.08), (0.1, 0.11), (0.2, 0.17)])
def test_held_alternatives_save_round_trips(round_trip_s, saved):
    assert deep_alt(round_trip_s).ms <= (1 - saved) * deep(round_trip_s).ms
    assert deep_alt(round_trip_s).steps <= 0.55
    assert deep_alt(round_trip_s).bytes_up < deep(round_trip_s).bytes_up


@pytest.mark.parametrize("round_trip_s", [0.0, 0.02, 0.06, 0.1, 0.2, 0.3])
def test_filled_bubbles_are_no_slower_than_plain_decoding(round_trip_s):
    plain = PLAIN_MS + 1000 * round_trip_s / 300
    assert measured(round_trip_s, seeds=3).ms <= 1.03 * plain


def test_on_a_long_link_a_filling_cloud_is_not_chased_in_vain():
    simulation = Simulation(Speculation(), 0.3)
    simulation.run()
    counts = simulation.state.counts
    assert simulation.reasons["behind"] > simulation.reasons["drafting"]
    assert 0 < counts.drafted < 0.5 * simulation.length


@pytest.mark.parametrize("round_trip_s", [0.06, 0.1])
def test_a_draft_that_nearly_always_fits_hides_the_link(round_trip_s):
    outcome = measured(round_trip_s, machine=SURE, seeds=2)
    assert outcome.ms <= 1.35 * 1000 * SURE.draft_s
    assert outcome.steps <= 0.8
    assert outcome.bytes_up <= 12


def test_the_window_covers_the_round_trip():
    simulation = Simulation(Speculation(**DEEP), 0.1)
    simulation.run()
    pace = simulation.state.pace
    assert pace.round_trip_s == pytest.approx(0.1, abs=0.01)
    assert pace.draft_s == pytest.approx(MACHINE.draft_s)
    assert 7 + 8 <= pace.window <= 8 + 9
    assert simulation.session.counters.duplicate == 0
    assert (simulation.state.counts.resends, simulation.state.counts.incarnations) == (0, 1)


def test_a_pass_costs_what_its_rows_were_measured_to():
    simulation = Simulation(Speculation(fill=False), 0.1)
    simulation.run()
    rows = simulation.state.pace.costs.measured
    assert rows[1] == pytest.approx(0.020)
    assert rows[2] == pytest.approx(0.026)
    assert rows[4] == pytest.approx(0.038)


@pytest.mark.parametrize("price", [0.2, 0.5, 0.9])
def test_only_a_high_price_shortens_what_is_drafted_and_never_stops_it(price):
    free = Simulation(Speculation(**DEEP), 0.1)
    free.run()
    dear = Simulation(Speculation(**DEEP), 0.1, price=price)
    dear.run()
    assert dear.state.committed == dear.text.tokens[: PROMPT + dear.length]
    if price**SUPPLY < FLOOR:
        assert dear.state.counts.drafted == free.state.counts.drafted
    else:
        assert dear.reasons["price"] > 0
        assert 0.3 * dear.length < dear.state.counts.drafted < free.state.counts.drafted


def test_the_dearer_the_verifier_the_fewer_branches_are_drafted():
    shares = []
    for price in (0.0, 0.7, 1.0):
        simulation = Simulation(Speculation(fill=False), 0.1, price=price)
        simulation.run()
        counts = simulation.state.counts
        shares.append(counts.branched / counts.drafted)
    assert shares[0] > 0.25
    assert shares[1] < 0.5 * shares[0]
    assert shares[2] < 0.05, "a few before the price is heard"


def test_calibration_follows_what_is_accepted():
    simulation = Simulation(Speculation(**DEEP), 0.0, machine=SURE)
    before = simulation.state.calibration.mean
    simulation.run()
    assert before < 0.8
    assert simulation.state.calibration.mean > 0.9


@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_text_is_right_on_a_link_that_loses_repeats_and_reorders(fill, seed):
    simulation = Simulation(Speculation(fill=fill), 0.04, seed=seed, length=120, loss=0.15)
    simulation.run()
    assert simulation.state.committed == simulation.text.tokens[: PROMPT + 120]
    assert simulation.state.finish == "length"


def test_on_a_good_link_nothing_is_sent_twice():
    simulation = Simulation(Speculation(fill=False), 0.1)
    simulation.run()
    counts = simulation.state.counts
    assert simulation.session.counters.duplicate == 0
    assert (counts.resends, counts.incarnations) == (0, 1)
    assert counts.branches > 100
    assert simulation.state.tree.taken > 20
