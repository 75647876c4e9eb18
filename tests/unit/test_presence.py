"""Parking, cancelling, and how long a session waits for drafts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.batcher.patience import GRACE_S, HOSTED_WAIT_S, Patience
from services.batcher.presence import Presence


def presence(**changes: float) -> Presence:
    return Presence(ttl_s=2.0, parked_ttl_s=60.0, since=0.0, **changes)  # type: ignore[arg-type]


def test_parked_after_two_seconds_cancelled_after_sixty_more() -> None:
    one = presence()
    one.bind(1, 10.0)
    assert one.state(12.0) == "present"
    assert one.state(12.1) == "parked"
    assert one.state(72.0) == "parked"
    assert one.state(72.1) == "expired"


def test_a_session_taken_over_starts_parked() -> None:
    one = presence()
    assert one.state(0.0) == "parked"
    assert one.state(60.1) == "expired"
    assert one.hear(0, 100.0, now=5.0, unix_now=100.0)
    assert one.state(5.0) == "present"


def test_old_word_counts_for_nothing() -> None:
    one = presence()
    assert not one.hear(1, 100.0, now=50.0, unix_now=102.1)
    assert one.state(50.0) == "parked"
    assert one.hear(1, 100.0, now=50.0, unix_now=101.5)
    assert one.state(50.4) == "present"
    assert one.state(50.6) == "parked", "it was 1.5 s old when it came"


def test_word_that_overtook_another_does_not_take_time_back() -> None:
    one = presence()
    one.hear(1, 100.0, now=50.0, unix_now=100.0)
    one.hear(1, 99.0, now=50.0, unix_now=100.0)
    assert one.state(52.0) == "present"


def test_the_highest_connection_wins() -> None:
    one = presence()
    one.bind(3, 0.0)
    assert not one.hear(2, 100.0, now=10.0, unix_now=100.0)
    assert one.state(10.0) == "parked"
    assert one.hear(4, 100.0, now=10.0, unix_now=100.0)
    assert not one.hear(3, 100.0, now=10.0, unix_now=100.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 5), st.floats(0, 100)), max_size=30))
def test_nobody_is_present_beyond_two_seconds_of_silence(words: list[tuple[int, float, float]]) -> None:
    one, now = presence(), 0.0
    for connection, age, step in words:
        now += step
        one.hear(connection, 1000.0 + now - age, now=now, unix_now=1000.0 + now)
    assert one.state(now + 2.01) != "present"
    assert one.state(now + 62.02) == "expired"


# --- patience ---


def test_a_starved_session_waits_three_round_trips_and_a_little() -> None:
    one = Patience()
    one.starve(0.0)
    assert not one.exhausted(3 * 0.1 + GRACE_S - 0.01, hosted=False)
    assert one.exhausted(3 * 0.1 + GRACE_S + 0.01, hosted=False)
    assert one.exhausted(HOSTED_WAIT_S, hosted=True)


def test_nobody_waits_who_is_not_starved() -> None:
    assert not Patience().exhausted(1e9, hosted=False)


def test_the_round_trip_rises_at_once_and_falls_slowly() -> None:
    one = Patience()
    one.starve(0.0)
    one.block_came(0.4)
    assert one.round_trip_s == pytest.approx(0.4)
    one.starve(1.0)
    one.block_came(1.1)
    assert one.round_trip_s == pytest.approx(0.37)


def test_plain_steps_in_between_do_not_shorten_the_estimate() -> None:
    """The block takes a second; plain steps are taken meanwhile."""
    one = Patience()
    for at in (0.0, 0.5):
        one.starve(at)
        one.stepped()
    one.starve(0.9)
    one.block_came(1.0)
    assert one.round_trip_s == pytest.approx(1.0)


def test_a_block_that_plain_steps_were_ahead_of_shows_that_the_wait_was_too_short() -> None:
    """Two seconds away, where a wait of the first guess gives up after less than half a second."""
    one, now = Patience(), 0.0
    while now < 2.0:
        one.starve(now)
        now = one.ends_at(hosted=False) or now
        one.stepped()
    one.starve(2.0)
    one.late_block_came(2.0)
    assert one.round_trip_s == pytest.approx(2.0)
    one.stepped()
    one.starve(2.5)
    one.late_block_came(2.6)
    assert one.round_trip_s == pytest.approx(2.0), "the gap between two late ones is no round trip"
    one.starve(3.0)
    assert not one.exhausted(5.0, hosted=False)
    one.block_came(5.0)
    assert one.round_trip_s == pytest.approx(2.0)


def test_a_step_and_a_pause_begin_the_wait_anew() -> None:
    one = Patience()
    one.starve(0.0)
    one.stepped()
    assert not one.exhausted(10.0, hosted=False)
    one.starve(10.0)
    one.pause()
    one.starve(20.0)
    one.block_came(20.1)
    assert one.round_trip_s == pytest.approx(0.1), "what passed while nobody was there is no round trip"
