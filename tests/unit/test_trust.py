"""What a source's word is worth."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.trust import HIGHEST, LOWEST, Trust

stated_values = st.one_of(st.floats(0.0, 1.0), st.floats(allow_nan=True, allow_infinity=True))


@pytest.mark.parametrize("source", ["edge", "hosted"])
def test_a_source_is_believed_at_first(source: str) -> None:
    trust = Trust()
    for stated in (0.05, 0.3, 0.7, 0.95):
        assert trust.probability(source, stated) == pytest.approx(stated)
        assert trust.for_session().probability(source, stated) == pytest.approx(stated)


def test_a_look_up_is_worth_more_the_longer_it_matches() -> None:
    trust = Trust()
    assert trust.probability("lookup", 2) == pytest.approx(0.35, abs=0.01)
    assert trust.probability("lookup", 3) == pytest.approx(0.52, abs=0.02)
    assert trust.probability("lookup", 4) == pytest.approx(0.65, abs=0.01)
    assert trust.probability("lookup", 8) > 0.8


@pytest.mark.parametrize("stated", [0.8, 0.95, 1.0])
def test_a_liar_loses_its_credit_within_thirty_lies(stated: float) -> None:
    session = Trust().for_session()
    for _ in range(30):
        session.learn("edge", stated, False)
    assert session.probability("edge", stated) < 0.1
    assert session.counts("edge") == (30, 0)
    assert session.probability("hosted", stated) == pytest.approx(min(stated, HIGHEST), abs=0.01), "another source"


def test_a_boaster_is_marked_down_to_what_it_earns_and_a_modest_one_up() -> None:
    rng = random.Random(3)
    for stated, true in ((0.95, 0.4), (0.3, 0.85)):
        trust = Trust()
        session = trust.for_session()
        for _ in range(300):
            session.learn("edge", stated, rng.random() < true)
        assert session.probability("edge", stated) == pytest.approx(true, abs=0.12)
        assert session.acceptance("edge") == pytest.approx(true, abs=0.2)


def test_the_model_learns_what_all_its_sessions_show() -> None:
    """Stated .9 is right in .6 and stated .5 in .35: a new session knows."""
    rng, trust = random.Random(4), Trust()
    for _ in range(40):
        session = trust.for_session()
        for _ in range(40):
            stated, true = rng.choice([(0.9, 0.6), (0.5, 0.35)])
            session.learn("edge", stated, rng.random() < true)
    fresh = trust.for_session()
    assert fresh.probability("edge", 0.9) == pytest.approx(0.6, abs=0.08)
    assert fresh.probability("edge", 0.5) == pytest.approx(0.35, abs=0.08)
    assert trust.acceptance("edge") == pytest.approx(0.47, abs=0.15)


def test_a_lasting_liar_does_not_ruin_the_others() -> None:
    """It teaches the model less and less, and an honest session is believed by its own record."""
    rng, trust = random.Random(5), Trust()
    liar, honest = trust.for_session(), trust.for_session()
    for _ in range(600):
        for _ in range(10):
            liar.learn("edge", 0.95, False)
        honest.learn("edge", 0.95, rng.random() < 0.95)
    assert liar.probability("edge", 0.95) < 0.1
    assert honest.probability("edge", 0.95) > 0.8
    assert liar.counts("edge")[0] == 6000
    assert trust.counts("edge")[0] < 1000


@given(
    st.lists(st.tuples(st.sampled_from(["edge", "hosted", "lookup"]), stated_values, st.booleans()), max_size=40),
    stated_values,
)
def test_whatever_is_stated_a_probability_comes_out(samples: list[tuple[str, float, bool]], stated: float) -> None:
    trust = Trust()
    session = trust.for_session()
    for source, value, fits in samples:
        session.learn(source, value, fits)
    for source in ("edge", "hosted", "lookup"):
        assert LOWEST <= session.probability(source, stated) <= HIGHEST
        assert LOWEST <= trust.probability(source, stated) <= HIGHEST
        assert 0.0 <= session.acceptance(source) <= 1.0


def probes(trust: Trust, start: float, end: float) -> list[float]:
    """When a source that is asked about ten times a second is tried."""
    times = [start + n / 10 for n in range(round((end - start) * 10))]
    return [now for now in times if trust.probe("edge", now)]


def test_what_looks_worthless_is_tried_now_and_then_and_ever_more_rarely() -> None:
    trust = Trust()
    tried = probes(trust, 100.0, 240.0)
    assert tried == pytest.approx([102, 106, 114, 130, 160, 190, 220])
    trust.learn("edge", 0.9, False)
    assert probes(trust, 240.0, 249.0) == []
    trust.learn("edge", 0.9, True)
    assert probes(trust, 249.0, 256.0) == pytest.approx([251, 255]), "it fitted: soon again"


def test_each_session_has_its_own_probes() -> None:
    trust = Trust()
    one, other = trust.for_session(), trust.for_session()
    assert not one.probe("edge", 0.0)
    assert one.probe("edge", 2.0)
    assert not other.probe("edge", 2.0)
    assert other.probe("edge", 4.0)


def test_a_source_that_was_poor_comes_back() -> None:
    session = Trust().for_session()
    for _ in range(40):
        session.learn("edge", 0.9, False)
    assert session.probability("edge", 0.9) < 0.1
    for _ in range(25):
        session.learn("edge", 0.9, True)
    assert session.probability("edge", 0.9) > 0.6
