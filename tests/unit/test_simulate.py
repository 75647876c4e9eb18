"""`loadgen simulate`: the choice of the best run, a small report from end to end, its page and plots."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from loadgen import simulate, simulate_plots, simulate_tables
from loadgen.__main__ import app
from loadgen.simulate_cells import Cell, best, frontier, goodput, usd_per_million
from loadgen.simulate_maps import Map, break_even
from paceline.fleet_hardware import DRAFTERS

CELL = Cell("A100-80", "llama-8b", 16384, "desktop GPU", 20, sessions=(6,))


def figures(rate: float, p99: float, **more) -> dict:
    return {"tokens_per_s": rate, "itl_ms_p99": p99, "sessions": 1, **more}


def test_the_best_run_keeps_the_objective():
    runs = [figures(100, 30), figures(200, 60), figures(300, 120)]
    assert best(runs, 100) == runs[1]
    assert best(runs, 20) is None


def test_the_frontier_drops_what_is_slower_and_less_smooth():
    runs = [figures(200, 60), figures(100, 30), figures(150, 70), figures(90, 30), figures(300, 120)]
    assert [run["tokens_per_s"] for run in frontier(runs)] == [100, 200, 300]


def test_goodput_compares_and_prices():
    modes = {"plain": [figures(100, 30)], "colocated": [], "paceline": [figures(250, 45), figures(300, 90)]}
    found = goodput(CELL, modes, 50)
    assert found["over_plain"] == pytest.approx(2.5)
    assert found["colocated"] is None and "over_colocated" not in found
    assert found["plain"]["usd_per_million"] == pytest.approx(1e6 * 1.79 / 3600 / 100)
    assert usd_per_million(CELL, 200) == pytest.approx(0.5 * usd_per_million(CELL, 100))
    assert goodput(CELL, modes, 10)["paceline"] is None


def test_a_drafter_beside_the_target_takes_room_from_sessions():
    assert CELL.holds() == int((0.9 * 80e9 - 16.06e9) / 131072 / (16384 + 512))
    assert CELL.holds(DRAFTERS[CELL.llm]) < CELL.holds()
    assert replace(CELL, sessions=(1, 10, 100)).loads(50) == [1, 10]
    assert replace(CELL, sessions=()).fine_loads(24) == [1, *range(2, 25, 2)]


def test_drafting_devices_pay_where_the_cache_bounds_the_batch():
    report = simulate.cell_report(replace(CELL, sessions=(24,)), simulate.SMALL.effort)
    entry = next(item for item in report["goodput"] if item["p99_itl_ms"] == 200)
    assert entry["over_plain"] > 1.8
    assert report["simulated"] is True


def test_the_map_grows_with_acceptance():
    panel = break_even(Map((20,), (0.5, 0.95), 80), 0.2)
    low, high = panel["points"]
    assert high["speedup"] > 1.3 * low["speedup"]
    assert min(low["speedup"], high["speedup"]) > 0.9
    assert high["theory_deep"] > low["theory_deep"]


def test_the_command_writes_a_report_a_page_and_plots(tmp_path, monkeypatch):
    small = replace(simulate.SMALL, cells=(CELL,), loads=((0.0, 1), (0.2, 3)), until_s=0.5)
    monkeypatch.setattr(simulate, "SMALL", small)
    file, out = tmp_path / "simulate.json", tmp_path / "out"
    done = CliRunner().invoke(app, ["simulate", "--quick", "--json", str(file), "--out", str(out), "--workers", "1"])
    assert done.exit_code == 0, done.output
    page = (out / "simulate.md").read_text()
    assert "simulated" in page and "| A100-80 | llama-8b | 16384 |" in page
    assert {path.name for path in out.iterdir()} == {
        "simulate.md", "simulate-goodput.png", "simulate-latency.png", "simulate-break-even.png", "simulate-price.png",
    }  # fmt: skip
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in out.glob("*.png"))


def test_a_page_and_plots_cope_with_schemes_that_keep_no_objective(tmp_path):
    cell = {
        "label": "x", "gpu": "g", "llm": "m", "context": 1, "edge": "e", "rtt_ms": 1.0,
        "modes": {name: [figures(1, 5)] for name in simulate_plots.NAMES},
        "goodput": [{"p99_itl_ms": 100.0, **dict.fromkeys(simulate_plots.NAMES)}],
    }  # fmt: skip
    point = {"rtt_ms": 1, "acceptance": 0.5, "speedup": 1.0, "theory_deep": 0.5}
    step = {"s": 0.0, "price": 0.1, "smoothed": 0.1, "chain": 1.0}
    result = {
        "command": ["simulate"], "commit": "c", "assumptions": simulate.assumptions(), "cells": [cell],
        "break_even": [{"t_d_over_t_1": 0.3, "t_1_ms": 30, "points": [point]}],
        "price": {"steps": [step], "loads": [(0.0, 1)]},
    }  # fmt: skip
    assert "| - | - | - | - | - | - | - | - |" in simulate_tables.page(result)
    assert len(simulate_plots.write(result, tmp_path)) == 4


def _slow(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, RuntimeError])
def test_what_ends_a_simulation_ends_its_workers_at_once(ending: type[BaseException]):
    def interrupted() -> None:
        with simulate._pool(2) as pool:
            futures = [pool.submit(_slow, 300.0) for _ in range(8)]
            assert not any(future.done() for future in futures)
            raise ending

    with pytest.raises(ending):
        interrupted()  # the jobs would take longer than a test may
    assert not multiprocessing.active_children()
