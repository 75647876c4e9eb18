"""Which ends a pass extends, and how likely a runner-up is right."""

from __future__ import annotations

import math

import pytest

from paceline.calibration import Calibration
from paceline.draft_plan import FLOOR, Candidate, Limits, branch_candidates, rows_of_pass
from paceline.draft_tree import DraftTree
from paceline.engine import Guess
from paceline.runner_ups import chances

PROMPT = (1, 2, 3)


def limits(**changes) -> Limits:
    return Limits(**{"most": 100, "rows": 4, "deepest": 50, "longest": 1000, "end_ids": frozenset(), **changes})


def tree_of(*confidences: float, runner: float = 0.3) -> DraftTree:
    """A main chain of tokens 10, 11, ...; the runner-up of each has `runner` and the token + 100."""
    tree = DraftTree(PROMPT)
    node = tree.tip
    for index, confidence in enumerate(confidences):
        node = tree.extend(node, Guess(10 + index, 0.5, ((110 + index, 1.0),)), confidence, [runner], 0.0)
    return tree


def cost(rows: int) -> float:
    return 1.0 + 0.35 * (rows - 1)


def test_runner_ups_are_worth_the_chance_that_the_target_takes_them():
    found = branch_candidates(tree_of(0.5, 0.5), limits())
    assert [(one.token, one.value) for one in found] == [(110, pytest.approx(0.3)), (111, pytest.approx(0.15))]


def test_a_leaf_of_a_branch_goes_on_with_what_is_left_of_its_chance():
    tree = tree_of(0.5)
    fork = tree.hang(tree.tip, 110, 0.0)
    end = tree.extend(fork, Guess(20, 0.5, ((120, 1.0),)), 0.6, [0.2], 0.0)
    found = branch_candidates(tree, limits())
    assert [(one.node, one.token) for one in found] == [(end, None), (fork, 120)]
    assert [one.value for one in found] == [pytest.approx(0.18), pytest.approx(0.06)]


def test_nothing_is_drafted_that_the_target_hardly_reaches():
    assert branch_candidates(tree_of(0.5, runner=FLOOR / 2), limits()) == []
    assert branch_candidates(tree_of(0.5), limits(floor=0.31)) == []


@pytest.mark.parametrize(
    "bound", [{"end_ids": frozenset([110])}, {"longest": len(PROMPT)}, {"deepest": 0}, {"rows": 0}]
)
def test_bounds_of_branches(bound):
    assert branch_candidates(tree_of(0.5), limits(**bound)) == []


def test_a_branch_that_would_arrive_behind_the_filling_cloud_has_to_overtake_it():
    tree = tree_of(0.9, 0.9)
    near, far = branch_candidates(tree, limits(lead=1.5, gain=0.5, mean=0.5))
    assert (near.token, near.value) == (111, pytest.approx(0.9 * 0.3))
    assert (far.token, far.value) == (110, pytest.approx(0.3 * 0.5 ** ((1.5 - 1) / 0.5)))
    assert [one.token for one in branch_candidates(tree, limits(lead=1.5, gain=-0.1, mean=0.5))] == [111]


def test_a_row_joins_when_it_earns_more_for_its_time_than_the_pass_without_it():
    tree = DraftTree(PROMPT)
    main = Candidate(1.0, tree.tip)
    good, fair, poor = (Candidate(value, tree.tip) for value in (0.5, 0.4, 0.2))
    assert rows_of_pass(main, [good, fair, poor], limits(), cost) == [main, good, fair]
    assert rows_of_pass(main, [poor], limits(), cost) == [main]
    assert rows_of_pass(Candidate(0.3, tree.tip), [poor], limits(), cost)[1:] == [poor]
    assert rows_of_pass(main, [good, fair], limits(rows=2), cost) == [main, good]
    assert rows_of_pass(main, [Candidate(0.5, tree.tip, 7)], limits(most=2), cost) == [main]
    assert rows_of_pass(main, [good], limits(), lambda rows: float(rows**2)) == [main]


def test_as_many_rows_as_are_best_together():
    tree = DraftTree(PROMPT)
    main, *branches = (Candidate(value, tree.tip) for value in (1.0, 0.3, 0.25, 0.25))
    grouped = {1: 18.0, 2: 26.0, 3: 33.0, 4: 26.0}
    assert rows_of_pass(main, branches, limits(), grouped.__getitem__) == [main, *branches]


def test_runner_ups_share_what_the_draft_leaves():
    calibration = Calibration()
    hits = sum(calibration.hit(rank) for rank in range(1, 5))
    usual = chances(Guess(1, 0.4, ((2, 0.2), (3, 0.9), (4, 1.45), (5, 1.9))), 0.4, calibration)
    assert sum(usual) == pytest.approx(0.6 * hits)
    assert usual == [pytest.approx(0.6 * calibration.hit(rank)) for rank in range(1, 5)]
    tie = chances(Guess(1, 0.4, ((2, 0.2), (3, 0.2), (4, 1.45), (5, 1.9))), 0.4, calibration)
    clear = chances(Guess(1, 0.4, ((2, 0.2), (3, 3.0), (4, 3.0), (5, 3.0))), 0.4, calibration)
    assert tie[0] < usual[0] < clear[0]
    assert sum(tie) == pytest.approx(sum(clear))


@pytest.mark.parametrize("gap", [math.inf, math.nan, -1.0])
def test_odd_gaps_of_runner_ups_stay_chances(gap):
    found = chances(Guess(1, 0.5, ((2, 0.5), (3, gap))), 0.5, Calibration())
    assert all(0.0 <= chance <= 1.0 for chance in found)
    assert sum(found) <= 0.5
    assert chances(Guess(1, 1.0), 0.9, Calibration()) == []
