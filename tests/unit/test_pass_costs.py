"""What a pass of the draft model costs by its rows."""

from __future__ import annotations

import pytest

from paceline.pass_costs import FURTHER_ROW, PassCosts


def test_costs_are_learned_and_guessed_where_they_were_not():
    costs = PassCosts()
    assert costs.of(2) / costs.of(1) == pytest.approx(1 + FURTHER_ROW)
    assert costs.measured == {}
    costs.learn(1, 0.020)
    costs.learn(2, 0.030)
    assert [costs.of(rows) for rows in (1, 2, 3)] == pytest.approx([0.020, 0.030, 0.030 + FURTHER_ROW * 0.020])
    assert costs.measured == pytest.approx({1: 0.020, 2: 0.030})
    costs.learn(40, 0.100)
    assert costs.of(40) > costs.of(3)


def test_more_rows_may_cost_less():
    costs = PassCosts()
    for rows, seconds in ((1, 0.018), (2, 0.024), (3, 0.033), (4, 0.030)):
        costs.learn(rows, seconds)
    assert costs.of(4) < costs.of(3)


def test_a_first_pass_of_many_rows_tells_of_one_row_too():
    costs = PassCosts()
    costs.learn(3, 0.030)
    assert costs.of(1) == pytest.approx(0.030 / (1 + 2 * FURTHER_ROW))
    assert costs.of(3) == pytest.approx(0.030)
