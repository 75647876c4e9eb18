"""The grid: which cells, how they are measured, what is made of the runs, resuming, tables and pictures."""

from __future__ import annotations

import copy
import errno
import io
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from loadgen_kit import FakeEdge, FakeRig, paced, run
from rich.console import Console
from typer.testing import CliRunner

from loadgen import grid as measuring
from loadgen import grid_cli, grid_plan, report
from loadgen.__main__ import app
from loadgen.grid import CellMeter
from loadgen.grid_cli import GridRun, line
from loadgen.grid_figures import (
    CellRuns,
    ModeRuns,
    Surroundings,
    cell_report,
    crossing,
    full_throughput,
    ratios,
    sources,
    summary,
)
from loadgen.grid_file import GridFile
from loadgen.grid_markdown import groups, markdown, table
from loadgen.grid_plan import ALL_MODES, BLOCKS, Place, Terms
from loadgen.jobs import Drafting, Wave, Waved, decode_command, decode_reply, encode
from loadgen.modes import CLOUD, DEEP, DEEP_ALT, PACELINE, colocated, sync
from loadgen.pace import Pace
from loadgen.prompts import PROMPTS
from paceline.errors import FatalError, PacelineError, SettingsError
from paceline.wire import Counters

TERMS = Terms(prompts=2, tokens=8, repeats=2)
PLACE = Place("toy", 60.0, 1, 0.0)


def cell_of(place: Place = PLACE, *, skip: tuple[str, ...] = (), **itl_ms: float) -> CellRuns:
    """Two repeats of one wave in which all modes take 20 ms a token but for those named."""
    modes = {}
    for name in ALL_MODES:
        if name in skip or (name == "edge" and place.sessions > 1):
            continue
        ms = itl_ms.get(name, 20.0)
        waves = tuple((Waved((paced(ms + extra, draft_ms=9.0),) * place.sessions),) for extra in (0, 2))
        modes[name] = ModeRuns(waves, 4 if name in BLOCKS else None, {2: 9.0, 4: 8.0} if name in BLOCKS else {})
    around = Surroundings(step_ms={1: 20.0, 4: 30.0}, overhead_ms_p50=2.5, server_draft_ms=7.0)
    return CellRuns(place.pair, place.rtt_ms, place.sessions, place.temperature, modes, around, "abc")


# --- plan ------------------------------------------------------------------------------------------------------------


def test_the_modes_switch_off_what_they_are_measured_without() -> None:
    for mode in (sync(3), DEEP, DEEP_ALT, colocated(3)):
        speculation = mode.speculation
        assert not (speculation.fill or speculation.lookup or speculation.assist)
        assert speculation.alternatives == (mode is DEEP_ALT)
    assert (colocated(3).speculation.hosted, colocated(3).speculation.max_draft, colocated(3).g) == (True, 3, 3)
    assert [mode.drafts for mode in (CLOUD, colocated(2), sync(2), DEEP, DEEP_ALT, PACELINE)] == [False] * 2 + [
        True
    ] * 4
    assert PACELINE.speculation.alternatives and PACELINE.speculation.assist


def test_a_full_plan_has_every_combination_and_counts_its_waves() -> None:
    plan = grid_plan.full(["a", "b"], (0.0, 100.0), (1, 4), (0.0, 0.8), TERMS)
    assert len(plan.places) == len(set(plan.places)) == 16
    assert plan.pairs == ["a", "b"]
    assert [place.sessions for place in plan.places[:8]] == [1] * 4 + [4] * 4
    alone, together = Place("a", 0, 1, 0), Place("a", 0, 4, 0)
    assert plan.ticks([alone]) == 10 * 1 + 7 * (1 + 2 * 2)
    assert plan.ticks([together]) == 10 * 1 + 6 * (1 + 2 * 1)


def test_waves_take_so_many_prompts_at_once() -> None:
    assert TERMS.waves(1) == [range(1), range(1, 2)]
    assert Terms(prompts=4).waves(4) == [range(4)]
    assert Terms(prompts=4).waves(16) == [range(16)]
    assert Terms(prompts=6).waves(4) == [range(4), range(4, 6)]


def test_short_runs_choose_as_long_ones_do() -> None:
    short, long = (TERMS.job(1, DEEP, 0.8, tokens) for tokens in (4, 8))
    assert (short.min_tokens, short.max_tokens, long.max_tokens) == (8, 4, 8)
    assert (short.seed, short.prompt) == (long.seed, long.prompt) == (2, PROMPTS[1])
    beyond = TERMS.job(len(PROMPTS), DEEP, 0.8, 8)
    assert (beyond.prompt, beyond.seed) == (PROMPTS[0], len(PROMPTS) + 1)


def test_edge_alone_is_measured_with_one_session_only() -> None:
    g = {"sync": 3, "colocated": 2}
    assert [mode.name for mode in Terms().modes_at(1, g)] == list(ALL_MODES)
    assert "edge" not in {mode.name for mode in Terms().modes_at(4, g)}
    assert [mode.g for mode in Terms(modes=("sync", "colocated")).modes_at(1, g)] == [2, 3]


def test_waves_travel_as_lines() -> None:
    job = TERMS.job(0, PACELINE, 0.8, 8)
    wave = Wave((job, job), "replay", {1: 20.5, 4: 31.0})
    assert decode_command(encode(wave)) == wave
    waved = Waved((paced(20),), Drafting(9, 1, 2, 1, 0.5, ((1, 20.0),)))
    assert decode_reply(encode(waved)) == waved
    assert waved.span_ms == pytest.approx(50 + 7 * 20)


# --- measuring -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "STATUS_S", 0.0)


async def measured(edge: FakeEdge, place: Place, terms: Terms = TERMS) -> tuple[CellRuns, CellMeter, list[str]]:
    ticks: list[str] = []
    meter = CellMeter(FakeRig(edge), terms, Pace({1: 20.0}), ticks.append)  # type: ignore[arg-type]
    return await meter.measure(place), meter, ticks


async def test_a_cell_is_measured_with_the_best_blocks_interleaved_and_in_rotating_order() -> None:
    edge = FakeEdge()
    cell, _, ticks = await measured(edge, PLACE)
    assert (cell.modes["sync"].g, cell.modes["colocated"].g) == (3, 2)
    assert set(cell.modes["sync"].probes) == set(grid_plan.SYNC_BLOCKS)
    assert {name: len(mode.waves) for name, mode in cell.modes.items()} == dict.fromkeys(ALL_MODES, 4)
    order = [tick.partition(",")[0] for tick in ticks if "repeat" in tick]
    turns = [order[i : i + 7] for i in range(0, len(order), 7)]
    assert [turn[0] for turn in turns] == ["cloud", "colocated", "colocated", "sync"]
    assert all(Counter(turn) == Counter(ALL_MODES) for turn in turns)
    assert len(ticks) == grid_plan.GridPlan((PLACE,), TERMS).ticks([PLACE])
    drafts = {(wave.jobs[0].speculation.hosted, wave.drafts) for wave in edge.waves if wave.jobs[0].speculation.enabled}
    assert drafts == {(True, "none"), (False, "live")}
    assert cell.around.pace_ms == {}
    shown = cell_report(cell)
    assert shown["replay"] is None
    assert "replay_misses" not in shown["modes"]["deep"]


async def test_several_sessions_replay_and_a_wave_with_too_many_misses_is_run_again() -> None:
    terms = Terms(prompts=2, tokens=8, repeats=1, modes=("cloud", "deep"))
    edge = FakeEdge(misses=[0.9, 0.05, 0.02, 0.005])
    cell, _, _ = await measured(edge, Place("toy", 60.0, 4, 0.8), terms)
    assert {wave.drafts for wave in edge.waves if wave.jobs[0].speculation.enabled} == {"replay"}
    assert all(len(wave.jobs) == 4 and wave.pace_ms == {1: 20.0} for wave in edge.waves if wave.drafts == "replay")
    assert cell.modes["deep"].tried_again == 2, "the first 90 % were of the warm-up"
    shown = cell_report(cell)
    assert shown["modes"]["deep"]["replay_misses"] == 0.005
    assert shown["replay"] == {"pace_ms": {1: 20.0}, "misses": 0.005}
    assert shown["draft_ms_per_token"] == 20
    assert "replay_misses" not in shown["modes"]["cloud"]


async def test_a_wave_that_stays_incomplete_counts_in_the_end_and_tells_its_misses() -> None:
    terms = Terms(prompts=2, tokens=8, repeats=1, modes=("deep",))
    cell, _, _ = await measured(FakeEdge(misses=[0.0, 0.2, 0.2, 0.1]), Place("toy", 60.0, 4, 0.8), terms)
    shown = cell_report(cell)
    assert (shown["modes"]["deep"]["replay_misses"], shown["modes"]["deep"]["tried_again"]) == (0.1, 2)
    assert "10.0% not recorded" in line(cell.place, shown)


async def test_texts_are_held_against_the_first_repeat_of_cloud_only_decoding() -> None:
    cell, meter, _ = await measured(FakeEdge(), PLACE, Terms(prompts=1, tokens=8, repeats=1, modes=("cloud", "deep")))
    assert await meter.divergences(cell) == []
    other = paced(20, tokens=(0, 1, 2, 99, 4, 5, 6, 7))
    changed = {**cell.modes, "deep": ModeRuns(((Waved((other,)),),))}
    found = await meter.divergences(CellRuns("toy", 60.0, 1, 0.0, changed, cell.around))
    place = {"pair": "toy", "rtt_ms": 60.0, "sessions": 1, "temperature": 0.0}
    assert found == [{**place, "mode": "deep", "repeat": 0, "prompt": 0, "position": 3, "margin": None}]


# --- figures ---------------------------------------------------------------------------------------------------------


def test_throughput_is_of_all_sessions_until_the_last_token_of_all() -> None:
    slow, fast = paced(30), paced(10)
    mode = ModeRuns(((Waved((fast, slow)), Waved((fast, fast))), (Waved((slow, slow)), Waved((slow, slow)))))
    shown = cell_report(CellRuns("toy", 60.0, 2, 0.0, {"cloud": mode}, Surroundings()))["modes"]["cloud"]
    first, second = 1e3 * 32 / (260 + 120), 1e3 * 32 / 520
    assert shown["tokens_per_s"] == pytest.approx((first + second) / 2)
    assert shown["tokens_per_s_spread"] == pytest.approx([second, first])
    assert shown["spread"] == [15, 30]
    assert shown["itl_ms_mean"] == 22.5
    both_decode = [1e3 * (7 + 2 + 14) / 140, 1e3 * 28 / 420]
    assert shown["tokens_per_s_full"] == pytest.approx(sum(both_decode) / 2)
    assert shown["tokens_per_s_full_spread"] == pytest.approx(sorted(both_decode))


def test_there_is_no_time_in_which_all_decode_where_one_begins_after_another_one_ended() -> None:
    late = run((400.0, 1), (410.0, 1))
    assert full_throughput([Waved((paced(10), late))]) is None
    assert full_throughput([Waved((paced(10),))]) is None


def test_sources_are_told_apart() -> None:
    one = Counters(
        drafted={"edge": 9, "lookup": 2}, verified=7, verified_by={"edge": 6, "lookup": 1}, accepted={"edge": 5},
        rejected=2, rejected_by={"edge": 1, "lookup": 1},
    )  # fmt: skip
    assert sources([paced(20, counters=one), paced(20, counters=one)]) == {
        "edge": {"drafted": 18, "verified": 12, "accepted": 10, "rejected": 2},
        "lookup": {"drafted": 4, "verified": 2, "accepted": 0, "rejected": 2},
    }


def test_a_cell_has_the_shape_of_the_report() -> None:
    shown = cell_report(cell_of(paceline=15))
    assert shown["ratios"]["itl"] == pytest.approx(16 / 21)
    needed = {"pair", "rtt_ms", "sessions", "temperature", "simulated", "modes", "predicted", "draft_ms_per_token",
              "overhead_ms_p50", "step_ms"}  # fmt: skip
    assert needed <= shown.keys()
    figures = {"itl_ms_mean", "itl_ms_p50", "itl_ms_p99", "ttft_ms_p50", "tokens_per_s", "acceptance", "spread",
               "verifier_steps_per_token", "verifier_tokens_per_token", "bytes_up_per_drafted_token",
               "bytes_down_per_committed_token"}  # fmt: skip
    assert all(figures <= mode.keys() for mode in shown["modes"].values())
    assert shown["modes"]["sync"]["g"] == shown["modes"]["colocated"]["g"] == 4
    assert shown["predicted"]["cloud"] == 22.5, "the step, and the way to it"
    several = cell_report(msgspec.structs.replace(cell_of(paceline=15), sessions=2))
    assert several["predicted"]["cloud"] == 20, "the next batch is there before the step ends"
    assert shown["step_ms"]["4"] == 30
    assert shown["draft_ms_per_token"] == 9


def test_ratios_are_against_the_best_baseline_of_the_cell() -> None:
    values = {"cloud": (30, 50), "colocated": (20, 40), "sync": (60, 10), "deep": (1, 99), "paceline": (25, 45)}
    modes = {name: {"itl_ms_mean": itl, "tokens_per_s": rate} for name, (itl, rate) in values.items()}
    found = ratios(modes)
    assert (found["best_baseline"], found["itl"]) == ("colocated", 1.25)
    assert (found["best_throughput_baseline"], found["tokens_per_s"]) == ("cloud", 0.9)
    assert "tokens_per_s_full" not in found
    rates = {"cloud": 80, "colocated": 50, "paceline": 84}
    full = ratios({name: {**modes[name], "tokens_per_s_full": rate} for name, rate in rates.items()})
    assert full["tokens_per_s_full"] == pytest.approx(1.05)
    assert found["speed_up_over_sync"] == {"cloud": 2, "colocated": 3, "deep": 60, "paceline": 2.4}
    assert ratios({"deep": modes["deep"]}) == {}


def test_the_summary_names_the_worst_cell() -> None:
    near, far = Place("toy", 0.0, 1, 0.0), Place("toy", 100.0, 1, 0.0)
    shown = [cell_report(cell_of(near, paceline=15, sync=30)), cell_report(cell_of(far, paceline=30, sync=90))]
    (found,) = summary(shown)
    assert (found["cells"], found["itl_ratio_worst_at_ms"], found["tokens_per_s_ratio_least_at_ms"]) == (2, 100, 100)
    assert found["itl_ratio_worst"] == pytest.approx(31 / 21)
    assert found["speed_up_over_sync"] == pytest.approx([31 / 16, 91 / 31])


def test_a_break_even_is_where_the_line_first_rises_above_the_level() -> None:
    assert crossing([(0, 0.5), (100, 0.9), (200, 1.1)]) == pytest.approx(150)
    assert crossing([(0, 1.2), (100, 1.5)]) == 0
    assert crossing([(0, 0.5), (100, 0.9)]) is None
    assert crossing([]) is None


# --- on disk ---------------------------------------------------------------------------------------------------------


def test_a_report_is_written_after_every_cell_and_resumed(tmp_path: Path) -> None:
    file = tmp_path / "grid.json"
    begun = GridFile.open(file, TERMS, resume=False)
    split = {**PLACE.values, "mode": "deep", "repeat": 0, "prompt": 0, "position": 3, "margin": 0.01}
    begun.add(cell_of(), [split])
    begun.checked({"pair": "toy", "pace_ms": {1: 20.0}})
    assert (begun.parts / f"{PLACE.stem}.json").exists()

    resumed = GridFile.open(file, TERMS, resume=True)
    assert resumed.places == {PLACE}
    assert resumed.cells == [cell_report(cell_of())], "figured anew from the runs"
    other = Place("toy", 20.0, 1, 0.0)
    resumed.add(cell_of(other), [])
    read = orjson.loads(file.read_bytes())
    assert [cell["rtt_ms"] for cell in read["cells"]] == [20, 60]
    assert read["divergences"] == [split]
    assert read["identical_text"] is False
    assert read["replay_checks"] == [{"pair": "toy", "pace_ms": {"1": 20.0}}]
    assert len(read["earlier"]) == 1
    assert read["seconds"] >= read["earlier"][0]["seconds"]

    measured_anew = GridFile.open(file, TERMS, resume=True)
    measured_anew.add(cell_of(paceline=5), [])
    read = orjson.loads(file.read_bytes())
    assert len(read["cells"]) == 2
    assert read["cells"][1]["modes"]["paceline"]["itl_ms_mean"] == 6
    assert read["divergences"] == []


def test_cells_measured_on_other_terms_or_machines_are_not_put_beside_each_other(tmp_path: Path) -> None:
    file = tmp_path / "grid.json"
    GridFile.open(file, TERMS, resume=False).add(cell_of(), [])
    with pytest.raises(SettingsError, match="--resume goes on with it"):
        GridFile.open(file, TERMS, resume=False)
    with pytest.raises(SettingsError, match="tokens 8, asked for 48"):
        GridFile.open(file, Terms(prompts=2, repeats=2), resume=True)
    read = orjson.loads(file.read_bytes())
    file.write_bytes(orjson.dumps({**read, "machine": {**read["machine"], "cores": 4096}}))
    with pytest.raises(SettingsError, match="another machine"):
        GridFile.open(file, TERMS, resume=True)
    for missing in ("terms", "cells", "commit", "seconds"):
        file.write_bytes(orjson.dumps({key: value for key, value in read.items() if key != missing}))
        with pytest.raises(SettingsError, match="no report of a grid"):
            GridFile.open(file, TERMS, resume=True)
    odd = (
        {"terms": [1]},
        {"terms": {"tokens": "x"}},
        {"cells": [{}]},
        {"cells": [1]},
        {"divergences": [{"pair": "x"}]},
    )
    for other in ([], None, 3, {}, *({**read, **fields} for fields in odd)):
        file.write_bytes(orjson.dumps(other))
        with pytest.raises(SettingsError, match="no report of a grid"):
            GridFile.open(file, TERMS, resume=True)


def test_a_report_that_cannot_be_written_leaves_the_one_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "grid.json"
    grid = GridFile.open(file, TERMS, resume=False)
    grid.add(cell_of(), [])
    whole = file.read_bytes()

    def full(_: int, __: str) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(PacelineError, match="cannot be written: no space"):
        grid.add(cell_of(Place("toy", 20.0, 1, 0.0)), [])
    monkeypatch.undo()
    assert file.read_bytes() == whole
    assert GridFile.open(file, TERMS, resume=True).places == {PLACE}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["grid.json"]


def test_a_report_goes_to_a_pipe_or_through_a_link_as_well(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there.json")
    report.write({"a": 1}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert orjson.loads((tmp_path / "there.json").read_bytes()) == {"a": 1}
    report.write({"a": 1}, Path("/dev/null"))
    assert Path("/dev/null").is_char_device()


BAD = [
    "--rtt-ms nan", "--rtt-ms -5", "--rtt-ms inf", "--rtt-ms 10,x", "--rtt-ms ,", "--temperature -1",
    "--temperature nan", "--temperature 11",
]  # fmt: skip
BAD_OF_GRID = ["--sessions nan", "--sessions inf", "--sessions 1.5", "--sessions 0", "--sessions 1e9", "--sessions ,",
               "--modes ,", "--modes deep,dep", "--pair ,", "--pair toy,nope", "--draft-ms nan",
               "--out /dev/null/x"]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        *(f"grid --json JSON {bad}" for bad in (*BAD, *BAD_OF_GRID)),
        *(f"compare --json JSON {bad}" for bad in (*BAD, "--blocks nan", "--blocks 0", "--blocks 65", "--blocks 1.5")),
        *(f"{one} --json /dev/null/x.json" for one in ("grid", "compare", "simulate")),
        *(f"{one} --json /" for one in ("compare", "simulate")),
        "simulate --json JSON --out /dev/null/x", "relay --to x:0", "relay --to x:70000", "relay --to x",
    ],
)  # fmt: skip
def test_a_bad_option_is_refused_before_anything_is_started(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("loadgen.__main__.rig", started)
    monkeypatch.setattr(grid_cli, "rig", started)
    monkeypatch.setattr("loadgen.simulate.run", started)
    monkeypatch.setattr("loadgen.__main__._relay", started)
    done = CliRunner().invoke(app, line.replace("JSON", str(tmp_path / "report.json")).split())
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    assert not (tmp_path / "report.json").exists()


# --- tables and pictures ---------------------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, Any]:
    file = GridFile.open(tmp_path / "grid.json", TERMS, resume=False)
    for rtt_ms, sync_ms in ((0.0, 10.0), (100.0, 50.0)):
        file.add(cell_of(Place("toy", rtt_ms, 1, 0.8), paceline=17, sync=sync_ms), [])
        file.add(cell_of(Place("toy", rtt_ms, 4, 0.8), skip=("colocated", "sync"), paceline=30), [])
    return file.report()


def test_the_tables_show_measured_beside_expected_and_the_break_even(whole: dict[str, Any]) -> None:
    text = markdown(whole, {"toy, 1 session, temperature 0.8": ["picture.png"]})
    assert "| 100 | 21.0 (20.0) |" in text
    assert "51.0 (-, g 4)" in text, "sync, with its block, and no prediction without an acceptance"
    assert "| cloud | 0.86 |" in text
    assert "1.64 at 0 ms" in text
    assert "sync 25 ms; deep none up to 100 ms" in text
    assert "![toy, 1 session, temperature 0.8](picture.png)" in text
    assert [title for title, _ in groups(whole["cells"])] == [
        "toy, 1 session, temperature 0.8", "toy, 4 sessions, temperature 0.8",
    ]  # fmt: skip


def test_the_head_says_when_it_was_simulated_and_what_differs(whole: dict[str, Any]) -> None:
    assert "simulated" not in markdown(whole).split("##")[0].lower()
    assert "All texts were identical" in markdown(whole)
    changed = copy.deepcopy(whole)
    changed |= {"simulated": True, "divergences": [{"margin": 0.02}, {"margin": None}]}
    text = markdown(changed)
    assert "The engine was simulated" in text
    assert "2 near ties, the largest margin 0.02, 1 of unknown margin" in text


def test_a_table_has_as_many_cells_in_every_line() -> None:
    lines = table(["a", "b"], [["1", "2"], ["3", "4"]]).splitlines()
    assert {text.count("|") for text in lines} == {3}


def test_pictures_need_no_display(whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from loadgen.grid_plots import plots

    monkeypatch.delenv("DISPLAY", raising=False)
    shown = plots(whole, tmp_path / "out", "grid")
    assert shown == {
        "toy, 1 session, temperature 0.8": ["grid-toy-1x-t0.8.png"],
        "toy, 4 sessions, temperature 0.8": ["grid-toy-4x-t0.8.png"],
    }
    for (name,) in shown.values():
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_loadgen_starts_without_the_plotting_library() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import loadgen.__main__, loadgen.grid_plots"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- the command -----------------------------------------------------------------------------------------------------


class Stacks:
    """Counts the stacks that a command starts; the edge of each fails at the waves of a broken round trip."""

    def __init__(self, broken_rtt_ms: float | None = None) -> None:
        self.started, self._broken = 0, broken_rtt_ms

    @asynccontextmanager
    async def __call__(self, pair: str, say: object) -> AsyncIterator[FakeRig]:
        self.started += 1
        edge = FakeEdge()
        rig, plain = FakeRig(edge), edge.wave

        async def wave(asked: Wave) -> Waved:
            if rig.rtts[-1] == self._broken:
                raise FatalError("the edge failed")
            return await plain(asked)

        edge.wave = wave  # type: ignore[method-assign]
        yield rig


async def commanded(file: Path, stacks: Stacks, *rtts_ms: float, again: bool = False) -> tuple[int, str]:
    terms = Terms(prompts=1, tokens=8, repeats=1, modes=("cloud", "deep", "paceline"))
    console = Console(file=io.StringIO(), width=200)
    plan = grid_plan.full(["toy"], rtts_ms, (1,), (0.0,), terms)
    made = GridRun(GridFile.open(file, terms, resume=True), console)
    code = await made.run(plan, again=again, only_check=False, out=None)
    return code, console.file.getvalue()  # type: ignore[attr-defined]


async def test_a_command_measures_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, stacks = tmp_path / "grid.json", Stacks()
    monkeypatch.setattr(grid_cli, "rig", stacks)
    assert (await commanded(file, stacks, 0.0))[0] == 0
    code, text = await commanded(file, stacks, 0.0, 50.0)
    assert (code, stacks.started) == (0, 2)
    assert "1 of 2 cells are there" in text
    assert "toy, 50 ms, 1 session, temperature 0: cloud 30.0 (21.5), deep 30.0" in text
    await commanded(file, stacks, 0.0, 50.0)
    assert stacks.started == 2, "nothing is missing"
    await commanded(file, stacks, 50.0, again=True)
    assert stacks.started == 3


async def test_a_cell_that_fails_is_told_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, stacks = tmp_path / "grid.json", Stacks(broken_rtt_ms=20.0)
    monkeypatch.setattr(grid_cli, "rig", stacks)
    code, text = await commanded(file, stacks, 0.0, 20.0, 50.0)
    assert (code, stacks.started) == (1, 2)
    assert [cell["rtt_ms"] for cell in orjson.loads(file.read_bytes())["cells"]] == [0, 50]
    assert "not measured: toy, 20 ms, 1 session, temperature 0" in text


async def test_a_stack_that_does_not_start_is_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def rig(pair: str, say: object) -> AsyncIterator[FakeRig]:
        raise FatalError("the models are not there")
        yield

    monkeypatch.setattr(grid_cli, "rig", rig)
    code, text = await commanded(tmp_path / "grid.json", Stacks(), 0.0, 20.0)
    assert code == 1
    assert "the models are not there" in text
