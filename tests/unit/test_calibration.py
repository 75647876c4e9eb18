"""What a draft's numbers are worth: learned, followed, bounded, and kept."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.calibration import HIGHEST, LOWEST, PRIOR_HITS, PRIOR_MEAN, Calibration, OnlineLogistic
from paceline.calibration_file import SAVE_S, CalibrationFile, calibration_path, load_calibration

GAPS = (0.1, 0.4, 1.0, 2.5, 5.0)


def sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score))


def teach(calibration: Any, truth: dict[float, float], count: int, seed: int = 1) -> None:
    """`count` decided drafts, right with the probability that `truth` gives for their gap."""
    source = random.Random(seed)
    for _ in range(count):
        gap = source.choice(GAPS)
        calibration.learn(sigmoid(gap), gap, 0 if source.random() < truth[gap] else 1)


class TestOnlineLogistic:
    def test_recovers_the_weights_behind_its_samples(self) -> None:
        source, model = random.Random(3), OnlineLogistic((0.0, 0.0), 1.0, keep=0.9995)
        for _ in range(6000):
            x = (1.0, source.uniform(-3, 3))
            model.learn(x, source.random() < sigmoid(0.5 - 1.2 * x[1]))
        assert model.weights == pytest.approx([0.5, -1.2], abs=0.2)
        assert model.probability((1.0, 1.0)) == pytest.approx(sigmoid(-0.7), abs=0.05)

    def test_starts_at_its_prior_and_returns_to_it_where_nothing_speaks_for_more(self) -> None:
        model = OnlineLogistic((0.3, 1.0), 5.0, keep=0.9)
        assert model.probability((1.0, 2.0)) == pytest.approx(sigmoid(2.3))
        for _ in range(60):
            model.learn((1.0, 0.0), False)
        low = model.weights[0]
        assert low < -0.4
        assert model.weights[1] == pytest.approx(1.0, abs=0.05)
        for _ in range(200):
            model.learn((0.0, 0.0), False)
        assert model.weights == pytest.approx([0.3, 1.0], abs=0.05)

    def test_an_offset_is_what_is_known_from_elsewhere(self) -> None:
        model, source = OnlineLogistic((0.0,), 1.0), random.Random(5)
        for _ in range(2000):
            model.learn((1.0,), source.random() < sigmoid(2.0 - 1.0), 2.0)
        assert model.weights[0] == pytest.approx(-1.0, abs=0.25)
        assert model.probability((1.0,), 2.0) == pytest.approx(sigmoid(1.0), abs=0.05)

    @given(st.lists(st.tuples(st.floats(), st.floats(), st.booleans()), max_size=60))
    def test_any_input_leaves_finite_weights(self, samples: list[tuple[float, float, bool]]) -> None:
        model = OnlineLogistic((0.1, 1.0, -1.0), 2.0)
        for one, two, hit in samples:
            model.learn((1.0, one, two), hit)
            assert 0.0 < model.probability((1.0, two, one)) < 1.0
        assert all(math.isfinite(weight) for weight in model.weights)

    def test_dump_and_restore(self) -> None:
        model, other = OnlineLogistic((0.0, 1.0), 2.0), OnlineLogistic((0.0, 1.0), 2.0)
        for i in range(50):
            model.learn((1.0, i % 3), i % 2 == 0)
        assert other.restore(json.loads(json.dumps(model.dump())))
        for one in (model, other):
            one.learn((1.0, 2.0), True)
        assert other.weights == pytest.approx(model.weights)
        good = model.dump()
        for bad in [None, 7, [], {}, {**good, "weights": [1.0]}, {**good, "weights": [math.nan, 1.0]},
                    {**good, "curvature": [[1.0, 2.0], [0.0, 1.0]]}, {**good, "curvature": [[-1.0, 0.0], [0.0, 1.0]]},
                    {**good, "weights": ["x", 1.0]}, {**good, "weights": [1e9, 1.0]}]:  # fmt: skip
            assert not other.restore(bad)
        other.reset()
        assert other.weights == [0.0, 1.0]


class TestCalibration:
    def test_the_prior_says_what_was_measured(self) -> None:
        """Median gap, median probability and acceptance of slices of the records, within their noise."""
        prior = Calibration()
        by_gap = [(0.14, 0.19, 0.38), (0.69, 0.33, 0.5), (1.24, 0.37, 0.76), (2.42, 0.67, 0.93), (4.8, 0.96, 0.99)]
        by_confidence = [(0.56, 0.09, 0.42), (0.64, 0.29, 0.58), (1.02, 0.48, 0.76), (1.89, 0.7, 0.87)]
        for gap, confidence, acceptance in [*by_gap, *by_confidence]:
            assert prior.acceptance(confidence, gap) == pytest.approx(acceptance, abs=0.12)
        assert prior.mean == PRIOR_MEAN
        assert [prior.hit(k) for k in range(1, 5)] == pytest.approx(PRIOR_HITS)

    @pytest.mark.parametrize("session", [False, True])
    def test_recovers_known_acceptances(self, session: bool) -> None:
        truth = {gap: sigmoid(-1.0 + 0.7 * gap) for gap in GAPS}
        shared = Calibration()
        calibration = shared.for_session() if session else shared
        teach(calibration, truth, 4000)
        for gap, acceptance in truth.items():
            assert calibration.acceptance(sigmoid(gap), gap) == pytest.approx(acceptance, abs=0.15 if session else 0.1)
            assert shared.acceptance(sigmoid(gap), gap) == pytest.approx(acceptance, abs=0.1)
        assert calibration.mean == pytest.approx(sum(truth.values()) / len(truth), abs=0.15)

    def test_a_session_follows_its_text_at_once_and_the_pair_slowly(self) -> None:
        shared = Calibration()
        steady, changed = shared.for_session(), shared.for_session()
        for _ in range(40):
            changed.learn(0.6, 1.0, -1)
        own, others = changed.acceptance(0.6, 1.0), steady.acceptance(0.6, 1.0)
        assert own < 0.2
        assert own < others - 0.05
        assert changed.mean < shared.mean - 0.2
        for _ in range(80):
            changed.learn(0.6, 1.0, 0)
        assert changed.acceptance(0.6, 1.0) > 0.8
        assert changed.mean > 0.9

    def test_follows_a_change(self) -> None:
        calibration = Calibration()
        teach(calibration, dict.fromkeys(GAPS, 0.9), 2000)
        assert calibration.acceptance(0.6, 0.4) > 0.75
        teach(calibration, dict.fromkeys(GAPS, 0.2), 2000)
        for gap in GAPS:
            assert calibration.acceptance(sigmoid(gap), gap) < 0.4

    def test_hits_by_rank(self) -> None:
        calibration, source = Calibration(), random.Random(2)
        session = calibration.for_session()
        for _ in range(1500):
            session.learn(0.5, 1.0, source.choices([1, 2, 3, 4, -1], [0.3, 0.3, 0.1, 0.1, 0.2])[0])
        for one, tolerance in ((calibration, 0.08), (session, 0.2)):
            assert [one.hit(k) for k in (1, 2, 3, 4)] == pytest.approx([0.3, 0.3, 0.1, 0.1], abs=tolerance)
            assert sum(one.hit(k) for k in range(1, 5)) <= 1
            assert one.hit(0) == one.hit(5) == one.hit(-1) == 0
        before = [calibration.hit(k) for k in range(1, 5)]
        calibration.learn(0.5, 1.0, 0)
        assert [calibration.hit(k) for k in range(1, 5)] == before

    @given(st.lists(st.tuples(st.floats(), st.floats(), st.integers()), max_size=40))
    def test_bounded_whatever_it_is_told(self, samples: list[tuple[float, float, int]]) -> None:
        calibration = Calibration()
        session = calibration.for_session()
        for confidence, gap, rank in samples:
            session.learn(confidence, gap, rank)
            for one in (calibration, session):
                assert LOWEST <= one.acceptance(confidence, gap) <= HIGHEST
                assert 0 <= one.mean <= 1
                assert 0 <= sum(one.hit(k) for k in range(1, 5)) <= 1 + 1e-9

    def test_certainty_stays_within_bounds(self) -> None:
        calibration = Calibration()
        for _ in range(3000):
            calibration.learn(1.0, math.inf, 0)
        assert calibration.acceptance(1.0, math.inf) == HIGHEST
        for _ in range(3000):
            calibration.learn(1.0, math.inf, 2)
        assert calibration.acceptance(1.0, math.inf) < 0.05


class TestKept:
    def test_dump_and_load(self) -> None:
        calibration = Calibration()
        teach(calibration, dict.fromkeys(GAPS, 0.3), 300)
        again = Calibration.load(json.loads(json.dumps(calibration.dump())))
        assert again.dump() == calibration.dump()
        assert again.acceptance(0.5, 1.0) == calibration.acceptance(0.5, 1.0) < Calibration().acceptance(0.5, 1.0)

    @pytest.mark.parametrize(
        "change",
        [{"version": 2}, {"hits": [1, 2]}, {"hits": [99, 99, 99, 99]}, {"hits": [-1, 0, 0, 0]}, {"misses": "many"},
         {"mean": 1.5}, {"mean": None}, {"learned": -1}, {"fits": {}}, {"fits": 3}],
    )  # fmt: skip
    def test_nonsense_is_as_nothing(self, change: dict[str, Any]) -> None:
        calibration = Calibration()
        teach(calibration, dict.fromkeys(GAPS, 0.3), 300)
        assert Calibration.load({**calibration.dump(), **change}).dump() == Calibration().dump()
        for data in (None, 3, "x", [], {}, [1]):
            assert Calibration.load(data).dump() == Calibration().dump()

    def test_the_file(self, tmp_path: Path) -> None:
        now = 100.0
        path = tmp_path / "deeper" / "pair.json"
        file = CalibrationFile(path, clock=lambda: now)
        assert not file.save(force=True)
        teach(file.calibration, dict.fromkeys(GAPS, 0.3), 100)
        assert not file.save()
        now += SAVE_S
        assert file.save()
        assert not file.save(force=True)
        assert load_calibration(path).dump() == file.calibration.dump()
        file.calibration.learn(0.5, 1.0, 0)
        file.close()
        assert CalibrationFile(path).calibration.learned == 101
        assert [one.name for one in path.parent.iterdir()] == ["pair.json"]

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 5000, b"null", b'{"version": 1}', b"1" * 99999])
    def test_a_broken_file_is_survived_and_replaced(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "pair.json"
        path.write_bytes(content)
        file = CalibrationFile(path)
        assert file.calibration.dump() == Calibration().dump()
        file.calibration.learn(0.5, 1.0, 0)
        file.close()
        assert load_calibration(path).learned == 1

    def test_a_place_that_cannot_be_written_is_survived(self, tmp_path: Path) -> None:
        (tmp_path / "taken").write_text("a file")
        file = CalibrationFile(tmp_path / "taken" / "pair.json")
        file.calibration.learn(0.5, 1.0, 0)
        file.close()
        file.calibration.learn(0.5, 1.0, 0)
        assert not file.save(force=True)

    def test_one_file_for_each_target_and_draft(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
        path = calibration_path("0123456789abcdef0123", "smollm2/draft x")
        assert path == Path("/cache/paceline/calibration/0123456789abcdef-smollm2_draft_x.json")
