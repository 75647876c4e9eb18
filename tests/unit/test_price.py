"""The price that sources are told."""

from __future__ import annotations

import math

import pytest

from paceline.price import Price


def test_nothing_is_told_before_the_first() -> None:
    price = Price()
    assert price.value is None
    assert not price.changed(None)
    price.note(5.0, 0.3)
    assert price.value == 0.3
    assert price.changed(None)


def test_a_step_of_the_price_is_followed_in_half_a_second_however_often_it_is_noted() -> None:
    for count in (1, 5, 100):
        price = Price()
        price.note(0.0, 0.0)
        for n in range(1, count + 1):
            price.note(0.5 * n / count, 1.0)
        assert price.value == pytest.approx(1 - math.exp(-1))


def test_what_alternates_settles_between() -> None:
    price = Price()
    values = []
    for n in range(400):
        price.note(0.02 * n, n % 2)
        values.append(price.value or 0.0)
    assert max(values[200:]) - min(values[200:]) < 0.05
    assert sum(values[200:]) / 200 == pytest.approx(0.5, abs=0.02)


def test_small_changes_are_not_worth_a_message() -> None:
    price = Price()
    price.note(0.0, 0.50)
    assert [told for told in (0.40, 0.44, 0.46, 0.50, 0.55, 0.56) if price.changed(told)] == [0.40, 0.44, 0.56]
    price = Price()
    price.note(0.0, 0.015)
    assert not price.changed(0.0)
    assert price.changed(0.04)


def test_nonsense_and_a_clock_that_stands_change_nothing() -> None:
    price = Price()
    price.note(0.0, float("nan"))
    assert price.value is None
    price.note(1.0, 7.0)
    assert price.value == 1.0
    price.note(0.5, 0.0)
    assert price.value == 1.0
