"""A verifier's step curve: measured before the first session, learned from every step, kept from run to run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.engine import Decided, EngineStatus, Failed, Outcome, Rule, TargetItem
from paceline.engine_simulated import SimulatedTarget, Timing, World
from paceline.settings import Settings
from paceline.wire import Sampling
from services.verifier import ladder
from services.verifier.curve import LearnedCurve, curve_file, fed_tokens

RULE = Rule(Sampling(temperature=0), seed=0, prompt_length=2)


class Clocked:
    """A target whose step of m rows takes `ms(m)` on a clock of its own; `most` rows fit."""

    def __init__(self, base_ms: float, token_ms: float, most: int = 1000) -> None:
        self.now, self.most, self.rows, self.released = 0.0, most, [], False
        self._base_ms, self._token_ms = base_ms, token_ms

    def clock(self) -> float:
        return self.now

    async def step(self, items: Sequence[TargetItem]) -> list[Outcome]:
        (item,) = items
        rows = len(item.draft) + 1
        if rows > self.most:
            return [Failed(item.session, "no_room", "full")]
        if not item.history:
            self.rows.append(rows)
        self.now += (self._base_ms + self._token_ms * rows) / 1000
        return [Decided(item.session, 0, 1, (1.0,))]

    def trim(self, session: str, length: int) -> None:
        assert length == 0

    def release(self, session: str) -> None:
        self.released = True


def climbed(engine: Clocked) -> list[tuple[int, int, float]]:
    seen: list[tuple[int, int, float]] = []
    learn = lambda *sample: seen.append(sample)  # noqa: E731
    asyncio.run(ladder.climb(engine, 257, learn, engine.clock))  # type: ignore[arg-type]
    assert engine.released
    return seen


def test_two_rounds_of_rungs_each_with_its_own_time() -> None:
    seen = climbed(Clocked(30.0, 5.0))
    sizes = [1, 2, 4, 8, 16]
    assert [size for size, _, _ in seen] == sizes * 2
    assert [round(ms, 6) for _, _, ms in seen] == [30.0 + 5.0 * size for size in sizes] * 2
    assert {context for _, context, _ in seen} == {ladder.PROMPT}


def test_a_slow_engine_is_measured_once_and_stops_at_the_first_rung_that_takes_too_long() -> None:
    assert [size for size, _, _ in climbed(Clocked(0.0, 300.0))] == [1, 2, 4, 8]


def test_a_fast_engine_is_asked_for_larger_steps_and_one_without_room_for_fewer() -> None:
    assert [size for size, _, _ in climbed(Clocked(1.0, 0.001))][:9] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert [size for size, _, _ in climbed(Clocked(1.0, 0.001, most=5))] == [1, 2, 4] * 2


async def test_the_ladder_leaves_nothing_in_a_real_ledger() -> None:
    engine = SimulatedTarget(World(), Timing(base_ms=0.5))
    curve = LearnedCurve()
    assert not curve.known
    await curve.prepare(engine, 257)
    assert engine.status().cells_used == 0
    table = curve.table()
    assert table is not None
    assert table.samples == 18
    await engine.close()


def item(session: str = "s", *, at: int = 10, start: int = 0, history: int = 0, draft: int = 0, decides: bool = True):
    return TargetItem(session, "t", at, start, (1,) * history, (1,) * draft, RULE if decides else None)


def test_what_a_step_feeds_is_told_where_it_is_certain() -> None:
    assert fed_tokens([item(draft=3), item("other")]) == 5
    assert fed_tokens([item(draft=3), item("other", start=10, history=5, at=15)]) is None
    assert fed_tokens([item(start=10, history=5, at=15, decides=False)]) is None


async def test_what_was_learned_is_there_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "curves" / "m.json"
    first = LearnedCurve(file)
    for _ in range(20):
        for rows in (1, 2, 4, 8):
            first.step_done([item(draft=rows - 1)], rows, 20.0 + 10.0 * rows)
    await first.save()
    again = LearnedCurve(file)
    engine = SimulatedTarget(World(), Timing(base_ms=500))
    async with asyncio.timeout(0.4):
        await again.prepare(engine, 257)  # without a step: it knows
    before, after = first.curve.times(), again.curve.times()
    assert before is not None
    assert after is not None
    assert after.at(4, 10) == pytest.approx(before.at(4, 10), rel=0.01)
    assert after.at(4, 10) == pytest.approx(60.0, rel=0.05)
    await engine.close()


async def test_a_broken_file_is_no_file_and_an_unwritable_one_no_end(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    engine = SimulatedTarget(World(), Timing(base_ms=0.2))
    empty = b'{"version": 1, "samples": 5, "spread": 0.1, "segments": {"1": [1' + 11 * b", 0" + b"]}}"
    for broken in (b"{", b"[]", b'{"knots": "x"}', b"\xff", b"", b"\0" * 4096, 100_000 * b"[", empty):
        file.write_bytes(broken)
        curve = LearnedCurve(file)
        await curve.prepare(engine, 257)
        assert curve.known
    await curve.save()
    assert json.loads(file.read_bytes())
    lost = LearnedCurve(file / "below-a-file.json")
    lost.step_done([item()], 1, 5.0)
    await lost.save()
    file.unlink()
    await lost.save()  # there is room now, and no further step
    assert json.loads((file / "below-a-file.json").read_bytes())
    await engine.close()


def test_one_file_for_each_model_engine_and_number_of_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def status(engine: str, device: str = "") -> EngineStatus:
        return EngineStatus(engine, False, 1, 1, 0, 0, device=device)

    one = curve_file(Settings.of(model="a/b:c", threads=2), status("llama"))
    assert one.parent == tmp_path / "paceline" / "curves"
    assert one.name.startswith("a-b-c-llama-2-")
    assert one == curve_file(Settings.of(model="a/b:c", threads=2), status("llama"))
    assert one != curve_file(Settings.of(model="a/b:c", threads=1), status("llama"))
    halves = Settings.of(model="a/b:c", threads=2, vllm_options={"dtype": "half"})
    assert one == curve_file(halves, status("llama"))
    several = [curve_file(Settings.of(model="a/b:c", threads=2), status("vllm", device)) for device in ("CPU", "H200")]
    assert len({one, *several, curve_file(halves, status("vllm", "H200"))}) == 4
