"""docs/extending.md as a stranger follows it: its commands, in a folder with examples/."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from launch import ROOT, environment

import canal_mpi

PAGE = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = dict(re.findall(r"\n## ([^\n]+)\n(.*?)(?=\n## |\Z)", PAGE, re.S))
COMMANDS = {
    title: [
        line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.split("\n")
    ]
    for title, text in SECTIONS.items()
}


def follow(folder: Path, section: str) -> str:
    """Type the commands of a section into a shell; what they print."""
    lines, shown = [line for line in COMMANDS[section] if line], ""
    assert lines
    for line in lines:
        done = subprocess.run(
            line.split(),
            cwd=folder,
            env=environment("openmpi", PYTHONPATH=""),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        shown += done.stdout
    return shown


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in (ROOT / "examples").glob("*.py"):
        shutil.copy(file, tmp_path)
    return tmp_path


@pytest.mark.mpi
def test_an_environment_of_ones_own_is_learnt_and_evaluated(folder: Path) -> None:
    shown = follow(folder, "An environment")
    assert "corridor:Corrid" in shown
    run = canal_mpi.load(folder / "runs" / "corridor")
    assert sorted(run["tasks"]["source"]) == ["env", "env", "lesson", "lesson"]
    late = run["episodes"]["return"][run["episodes"]["step"] > 500]
    assert late.mean() > 0.5  # the shortest way pays 0.98


def test_a_network_of_ones_own_is_trained(folder: Path) -> None:
    follow(folder, "A network")
    run = canal_mpi.load(folder / "runs" / "residual")
    assert run.status == "finished"
    assert run.setting("learn.network") == "residual:Residual"


@pytest.mark.slow
def test_a_learner_of_ones_own_is_trained(folder: Path) -> None:
    follow(folder, "A learner")
    assert canal_mpi.load(folder / "runs" / "plain")["tasks"]["updates"].min() > 200


@pytest.mark.slow
@pytest.mark.mpi
def test_a_topology_of_ones_own_carries_lessons(folder: Path) -> None:
    follow(folder, "A topology")
    run = canal_mpi.load(folder / "runs" / "pairs")
    found = {(int(a), int(b)) for a, b in zip(*run.adjacency.nonzero(), strict=True)}
    assert found == {(0, 1), (1, 0), (2, 3), (3, 2), (0, 2)}
    assert len(run["exchange"]["kind"])


@pytest.mark.slow
@pytest.mark.mpi
def test_a_policy_and_a_measure_of_ones_own_agree(folder: Path) -> None:
    follow(folder, "A sharing policy")
    run = canal_mpi.load(folder / "runs" / "cautious")
    taken = run["exchange"]["kind"] == "lesson"
    shown = follow(folder, "A measure")
    saved = [int(number) for number in re.findall(r"agent \d: (-?\d+)%", shown)]
    assert len(saved) == 2
    assert (max(saved) > 0) == bool(taken.any())


@pytest.mark.slow
@pytest.mark.mpi
def test_a_script_trains_alone_and_as_ranks(folder: Path) -> None:
    shown = follow(folder, "From Python")
    assert "agents: 1, tasks: 3" in shown
    assert "agents: 2, tasks: 3" in shown
    assert shown.count("Run('") == 2  # of two ranks the first one reads the run


def test_what_is_wrong_in_a_module_of_ones_own_is_shown(folder: Path) -> None:
    broken = {
        "no_import": (
            "import nowhere_to_be_found",
            "ModuleNotFoundError: No module named 'nowhere_",
        ),
        "no_name": (
            "\nsize = undefined",
            "NameError: name 'undefined' is not defined (no_name.py, line 2)",
        ),
        "no_syntax": ("def f(:", "SyntaxError: "),
        "no_return": ("import sys; sys.exit(3)", "SystemExit: 3 (no_return.py, line 1)"),
    }
    for module, (text, words) in broken.items():
        (folder / f"{module}.py").write_text(text)
        for option in (("--tasks", f"{module}:Mine-v0"), ("--topology", f"{module}:edges")):
            code, err = refused(folder, *option)
            assert code == 2
            assert f"can't import '{module}': {words}" in err
    code, err = refused(folder, "--tasks", "corridor:CorridorUp-v0")
    assert code == 2
    assert "module 'corridor' registers no environment 'CorridorUp-v0'" in err
    (folder / "mine.py").write_text("def even(need): return []")
    for option, words in {
        ("--topology", "missing:edges"): "no such module in",
        ("--share", "mine.py:even"): "a module is named without .py: 'mine'",
        ("--share", "mine:evn"): "module 'mine' has no 'evn'; did you mean 'even'?",
        (
            "--share",
            "mine:even",
        ): "policy 'mine:even': expected a function or class that takes (need, offers)",
        (
            "--tasks",
            "Harbour-v0",
        ): "unknown task 'Harbour-v0'; `canal-mpi config --list-tasks` lists",
    }.items():
        code, err = refused(folder, *option)
        assert code == 2 and words in err, err


def refused(folder: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        ["canal-mpi", "train", "--job", "smoke", *options],
        cwd=folder,
        env=environment("openmpi", PYTHONPATH=""),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


def test_every_example_is_in_the_page() -> None:
    for file in (ROOT / "examples").iterdir():
        if file.suffix in (".py", ".ipynb"):
            assert f"{file.stem}" in PAGE, file.name
