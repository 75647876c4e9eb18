"""What a newcomer runs: the demo on real models, and a comparison on simulated ones."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


def loadgen(*arguments: str, timeout_s: float) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "loadgen", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_streams_an_answer_and_ends_with_a_table() -> None:
    text = loadgen("demo", timeout_s=280)
    answer = text.partition("--show-drafts")[2].partition("the same prompts")[0]
    assert len(answer.split()) >= 40, f"an answer of 64 tokens or more:\n{text}"
    table = text.partition("the same prompts")[2]
    for mode in ("cloud", "sync", "deep", "paceline"):
        assert re.search(rf"{mode}\b.* \d+\.\d ", table), table
    assert "identical" in table or "near tie" in table


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_comparison_on_simulated_models_gives_identical_texts(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    options = ["--pair", "toy", "--rtt-ms", "20", "--temperature", "0,0.8", "--prompts", "2", "--tokens", "24"]
    loadgen("compare", *options, "--repeats", "1", "--json", str(file), timeout_s=170)
    report = orjson.loads(file.read_bytes())
    assert report["simulated"] is True
    assert report["identical_text"] is True
    assert report["divergences"] == []
    assert (report["prompts"], report["prompt_set"]) == (2, "everyday")
    assert [cell["temperature"] for cell in report["cells"]] == [0, 0.8]
    for cell in report["cells"]:
        assert set(cell["modes"]) == {"cloud", "sync", "deep", "paceline", "edge"}
        assert cell["modes"]["sync"]["g"] in (4, 6, 9)
        assert cell["modes"]["deep"]["acceptance"] > 0
        assert cell["modes"]["cloud"]["verifier_steps_per_token"] == pytest.approx(1, abs=0.1)
        assert cell["modes"]["paceline"]["bytes_up_per_drafted_token"] > 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_grid_measures_its_cells_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, out = tmp_path / "grid.json", tmp_path / "out"
    options = ["--pair", "toy", "--rtt-ms", "10", "--temperature", "0.8", "--prompts", "1", "--tokens", "12"]
    options += ["--repeats", "1", "--modes", "cloud,colocated,deep_alt,paceline", "--json", str(file)]
    loadgen("grid", *options, "--sessions", "1,2", timeout_s=110)
    report = orjson.loads(file.read_bytes())
    assert report["simulated"] is True
    assert report["identical_text"] is True
    assert [cell["sessions"] for cell in report["cells"]] == [1, 2]
    for cell in report["cells"]:
        assert set(cell["modes"]) == {"cloud", "colocated", "deep_alt", "paceline"}
        assert cell["modes"]["colocated"]["sources"]["hosted"]["accepted"] > 0
        assert "edge" not in cell["modes"]["colocated"]["sources"]
        assert cell["modes"]["deep_alt"]["sources"]["edge"]["accepted"] > 0
        assert cell["ratios"]["itl"] > 0
    assert report["cells"][1]["replay"]["pace_ms"]
    (check,) = report["replay_checks"]
    assert check["identical_text"] is True
    assert check["guesses_again"] > 0
    assert check["differing"] == 0

    again = loadgen("grid", *options, "--sessions", "1,2", "--resume", "--out", str(out), timeout_s=20)
    assert "2 of 2 cells are there" in again
    assert orjson.loads((out / "grid.json").read_bytes())["cells"] == report["cells"]
    assert "## toy, 2 sessions, temperature 0.8" in (out / "grid.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("number", "background"), [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, False)]
)
def test_a_command_that_is_ended_leaves_nothing_behind(
    number: signal.Signals, background: bool, tmp_path: Path
) -> None:
    """background: as a script's shell starts it, with interrupts ignored."""
    command = [sys.executable, "-m", "loadgen", "grid", "--pair", "toy", "--json", str(tmp_path / "grid.json")]
    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    if background:
        command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=environment, text=True) as running:
        try:
            assert running.stdout is not None
            next(line for line in running.stdout if "starting the edge" in line)
            (root,) = folder.glob("paceline-loadgen-*")
            children = psutil.Process(running.pid).children(recursive=True)
            assert len(children) >= 8, f"NATS, Redis and the six services, in {root}"
            running.send_signal(number)
            assert running.wait(timeout=40) == 130
        finally:
            running.kill()
    assert list(folder.glob("paceline-loadgen-*")) == []
    assert not [child for child in children if child.is_running()]
