"""Sets of prompts: the built-in ones, files of a user's own, and what reports and commands make of them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from loadgen_kit import FakeEdge, FakeRig
from rich.console import Console
from typer.testing import CliRunner

from loadgen import __main__ as command
from loadgen import demo, grid_cli, grid_plan, replay_check
from loadgen import grid as measuring
from loadgen.compare import Comparison, Plan
from loadgen.grid_cli import GridRun
from loadgen.grid_file import GridFile
from loadgen.grid_plan import Place, Terms
from loadgen.modes import DEEP
from loadgen.pace import Pace
from loadgen.prompts import BUILT_IN, CODE, EVERYDAY, PROMPTS, PromptSet, prompt_set, split
from loadgen.recording import key_of
from paceline.engine import Rule
from paceline.errors import SettingsError
from paceline.wire import Sampling

OWN = "Why is the sky blue?\n\nWhat does this do?\n    for i in x:\n        print(i)\n"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.txt"
    file.write_text(OWN, encoding="utf-8")
    return file


# --- the sets --------------------------------------------------------------------------------------------------------


def test_the_built_in_sets_are_what_they_were_and_in_their_order() -> None:
    """Reports of other days name them; a change needs another name."""
    assert prompt_set("everyday") is EVERYDAY
    assert EVERYDAY.texts == PROMPTS
    digests = {name: hashlib.sha256("\n".join(made.texts).encode()).hexdigest() for name, made in BUILT_IN.items()}
    assert {name: digest[:16] for name, digest in digests.items()} == {
        "everyday": "eb881906a46441af", "code": "b4b7e12c51b89bf2",
    }  # fmt: skip


def test_the_coding_tasks_are_twelve_and_several_bring_code_along() -> None:
    assert prompt_set("code").texts == CODE
    assert len(set(CODE)) == 12
    snippets = [text.split("```")[1].splitlines()[1:] for text in CODE if text.count("```") == 2]
    assert len(snippets) >= 6
    assert all(5 <= len(lines) <= 15 for lines in snippets)
    assert not set(CODE) & set(PROMPTS)


def test_prompts_of_a_file_stand_between_blank_lines_and_keep_their_lines(own: Path) -> None:
    held = prompt_set(str(own))
    assert held.texts == ("Why is the sky blue?", "What does this do?\n    for i in x:\n        print(i)")
    assert held.name == f"own.txt@{hashlib.sha256(OWN.encode()).hexdigest()[:8]}"
    assert split("\n \t\n  a\n  b \r\n\r\nc\r\n\n\nd") == ("  a\n  b", "c", "d")


def test_a_file_is_utf_8_with_or_without_a_mark_and_told_by_its_content(own: Path) -> None:
    before = prompt_set(str(own))
    own.write_bytes("\ufeffWarum grün?\n".encode())
    after = prompt_set(str(own))
    assert after.texts == ("Warum grün?",)
    assert after.name != before.name


def test_a_file_that_gives_no_prompts_is_told(tmp_path: Path) -> None:
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.write_text("\n  \n\n")
    latin.write_bytes("grün".encode("latin-1"))
    with pytest.raises(SettingsError, match=r"no prompt set `.*cod`: neither everyday, code nor a file"):
        prompt_set(str(tmp_path / "cod"))
    with pytest.raises(SettingsError, match=r"empty\.txt: the file holds none"):
        prompt_set(str(empty))
    with pytest.raises(SettingsError, match=r"latin\.txt: the file is no UTF-8 text"):
        prompt_set(str(latin))
    with pytest.raises(SettingsError, match=r"cannot be read: Is a directory"):
        prompt_set(str(tmp_path))


def test_no_more_prompts_are_taken_than_a_set_holds() -> None:
    few = PromptSet("few", ("a", "b"))
    assert (few.count(None, 8), few.count(None, 1), few.count(1, 8), few.count(2, 8)) == (2, 1, 1, 2)
    with pytest.raises(SettingsError, match="3 prompts asked for, the set few holds 2"):
        few.count(3, 8)
    assert [few.text(number) for number in range(3)] == ["a", "b", "a"], "more sessions than prompts"


# --- grids -----------------------------------------------------------------------------------------------------------


def test_jobs_are_of_the_set_that_the_terms_name() -> None:
    terms = Terms(prompt_set="code", tokens=8)
    made = terms.job(1, DEEP, 0.0, 8, BUILT_IN["code"])
    assert made.prompt == CODE[1]
    assert terms.job(13, DEEP, 0.0, 8, BUILT_IN["code"]).prompt == CODE[1]
    with pytest.raises(AssertionError, match="of code, not of everyday"):
        terms.job(1, DEEP, 0.0, 8)


def test_a_grid_of_another_set_is_not_gone_on_with(own: Path, tmp_path: Path) -> None:
    file = tmp_path / "grid.json"
    mine = prompt_set(str(own)).name
    GridFile.open(file, Terms(prompt_set=mine), resume=False).write()
    terms = orjson.loads(file.read_bytes())["terms"]
    assert (terms["prompts"], terms["prompt_set"]) == (4, mine)
    assert GridFile.open(file, Terms(prompt_set=mine), resume=True).places == set()
    with pytest.raises(SettingsError, match=f"prompt_set {mine}, asked for everyday"):
        GridFile.open(file, Terms(), resume=True)
    own.write_text(OWN + "\nOne more?\n")
    with pytest.raises(SettingsError, match=rf"prompt_set {mine}, asked for own\.txt@"):
        GridFile.open(file, Terms(prompt_set=prompt_set(str(own)).name), resume=True)


def test_a_grid_from_before_there_were_sets_is_of_everyday_questions(tmp_path: Path) -> None:
    file = tmp_path / "grid.json"
    GridFile.open(file, Terms(), resume=False).write()
    report = orjson.loads(file.read_bytes())
    del report["terms"]["prompt_set"]
    file.write_bytes(orjson.dumps(report))
    assert GridFile.open(file, Terms(), resume=True).terms == Terms()
    with pytest.raises(SettingsError, match="prompt_set everyday, asked for code"):
        GridFile.open(file, Terms(prompt_set="code"), resume=True)


async def test_a_grid_asks_for_the_prompts_of_its_set_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = FakeEdge()

    @asynccontextmanager
    async def rig(pair: str, say: object) -> AsyncIterator[FakeRig]:
        yield FakeRig(edge)

    monkeypatch.setattr(measuring, "STATUS_S", 0.0)
    monkeypatch.setattr(grid_cli, "rig", rig)
    terms = Terms(prompts=2, prompt_set="code", tokens=8, repeats=1, modes=("cloud", "deep"))
    file = GridFile.open(tmp_path / "grid.json", terms, resume=False)
    run = GridRun(file, Console(file=io.StringIO()), BUILT_IN["code"])
    plan = grid_plan.GridPlan((Place("toy", 20.0, 1, 0.0),), terms)
    assert await run.run(plan, again=False, only_check=False, out=None) == 0
    assert {job.prompt for wave in edge.waves for job in wave.jobs} == set(CODE[:2])
    assert "2 prompts of the set `code` (" in grid_cli.markdown(file.report())


async def test_the_replay_is_proved_on_the_prompts_of_the_set() -> None:
    edge = FakeEdge()
    terms = Terms(prompts=2, prompt_set="code", tokens=8)
    await replay_check.check_replay(FakeRig(edge), terms, Pace({1: 1.0}), prompts=BUILT_IN["code"])  # type: ignore[arg-type]
    assert {job.prompt for wave in edge.waves for job in wave.jobs} == set(CODE[:2])


def test_recorded_drafts_of_one_prompt_are_never_those_of_another() -> None:
    """The path of a guess begins with the prompt, and its seed and length count too."""
    rule = Rule(Sampling(min_tokens=8), seed=1, prompt_length=20)
    prompts = {text: tuple(text.encode()[-20:]) for made in BUILT_IN.values() for text in made.texts}
    answer = tuple(b" The same answer.")
    keys = {key_of((*prompt, *answer), rule) for prompt in prompts.values()}
    assert len(keys) == len(set(prompts.values())) > 24


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What compare, grid and demo would run."""
    seen: list[Any] = []

    async def compared(pair: str, plan: Plan, file: Path | None) -> int:
        seen.append((plan.prompt_set, plan.prompts))
        return 0

    async def gridded(self: GridRun, plan: grid_plan.GridPlan, **_: object) -> int:
        seen.append((plan.terms.prompt_set, tuple(self._prompts.texts[: plan.terms.prompts])))
        return 0

    async def shown(pair: str, console: Console, prompts: PromptSet, engine: str) -> int:
        assert engine == "llama"
        seen.append((prompts.name, prompts.texts))
        return 0

    monkeypatch.setattr(command, "_compare", compared)
    monkeypatch.setattr(GridRun, "run", gridded)
    monkeypatch.setattr(command, "run_demo", shown)
    return seen


def invoked(*arguments: str) -> BaseException | None:
    """The error that a command ended with."""
    done = CliRunner().invoke(command.app, list(arguments))
    return None if done.exit_code == 0 else done.exception


def test_commands_take_the_first_prompts_of_a_set(planned: list[Any], own: Path, tmp_path: Path) -> None:
    grid = ("grid", "--json", str(tmp_path / "grid.json"))
    mine = prompt_set(str(own))
    for arguments in (
        ("compare",), ("compare", "--prompt-set", "code", "--prompts", "12"), ("compare", "--prompt-set", str(own)),
        grid, (*grid, "--prompt-set", "code"), (*grid, "--prompt-set", str(own)),
        (*grid, "--prompt-set", "code", "--quick"), ("demo",), ("demo", "--prompt-set", "code"),
    ):  # fmt: skip
        assert invoked(*arguments) is None
    assert planned == [
        ("everyday", PROMPTS[:8]), ("code", CODE), (mine.name, mine.texts),
        ("everyday", PROMPTS[:4]), ("code", CODE[:4]), (mine.name, mine.texts),
        ("code", CODE[:2]), ("everyday", PROMPTS), ("code", CODE),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["compare", "grid"])
def test_commands_refuse_more_prompts_than_there_are_and_files_that_are_not_there(
    name: str, planned: list[Any], own: Path, tmp_path: Path
) -> None:
    start = [name, "--json", str(tmp_path / "report.json"), "--prompt-set"]
    assert str(invoked(*start, str(own), "--prompts", "3")).endswith("holds 2")
    assert str(invoked(*start, "code", "--prompts", "13")) == "13 prompts asked for, the set code holds 12"
    error = invoked(*start, str(tmp_path / "none.txt"))
    assert isinstance(error, SettingsError)
    assert planned == []


async def test_a_comparison_says_which_prompts_it_was_made_on() -> None:
    plan = Plan(
        rtts_ms=(20.0,), prompts=CODE[:3], tokens=8, repeats=1, blocks=(3,), edge=False, prompt_set="code"
    )  # fmt: skip
    edge = FakeEdge()
    report = await Comparison(FakeRig(edge), plan, lambda _: None).report()  # type: ignore[arg-type]
    assert (report["prompts"], report["prompt_set"]) == (3, "code")
    assert msgspec.json.encode(report)


def test_the_demo_shows_the_first_line_of_a_prompt() -> None:
    assert demo.brief("Why?") == "Why?"
    assert demo.brief(CODE[2]).endswith("give the corrected function. ...")
