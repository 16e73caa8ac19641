"""The Python API: train, evaluate and load in this process; the notebook from top to bottom."""

import logging
import os
import signal
import subprocess
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any, get_type_hints

import pytest
import small
from launch import ROOT, differences, environment
from launch import columns as columns_of

import canal_mpi
from canal_mpi.errors import CanalError, Stopped, UsageError, logger
from canal_mpi.results.reader import Run

RIGHT, LEFT = f"small:{small.RIGHT}", f"small:{small.LEFT}"
WALKS: dict[str, Any] = {"tasks": [RIGHT, LEFT], "order": "same", "steps": 60, "quiet": True}
SETTINGS = {
    "learn.widths": [8],
    "learn.batch_size": 4,
    "learn.learning_starts": 4,
    "replay.buffer_size": 500,
    "evaluation.episodes": 1,
    "evaluation.max_steps": 12,
    "report": False,
}


def train(**options: Any) -> Run:
    run = canal_mpi.train(**WALKS | {"settings": SETTINGS} | options)
    assert run is not None
    return run


def test_a_run_is_trained_loaded_and_evaluated_here(out: Path) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)]
    run = train(out=out)
    assert repr(run) == f"Run('{out}': finished, agents: 1, tasks: 2)"
    assert repr(run.policy(trust=True)) == f"Policy(agent 0 of job default: {RIGHT}, {LEFT})"
    scores = canal_mpi.evaluate(run, tasks=[LEFT], episodes=3, max_steps=20)
    assert scores["task"].tolist() == [LEFT] * 3
    assert scores["episode"].tolist() == [0, 1, 2]
    after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)]
    assert after == handlers
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]
    assert train(out=out, force=True).status == "finished"  # the folder is free again


def test_its_bits_are_those_of_the_command(tmp_path: Path) -> None:
    train(out=tmp_path / "a")
    settings = [f"--set={key}={str(value).lower()}" for key, value in SETTINGS.items()]
    command = [
        "canal-mpi",
        "train",
        "--tasks",
        f"{RIGHT},{LEFT}",
        "--order",
        "same",
        "--steps",
        "60",
        "-q",
    ]
    command += [*settings, "--out", str(tmp_path / "b")]
    subprocess.run(command, env=environment("openmpi"), check=True, timeout=120)
    a, b = (columns_of(tmp_path / name / "run.h5") for name in "ab")
    assert differences(a, b) == []


def test_what_is_wrong_is_an_exception(out: Path) -> None:
    with pytest.raises(UsageError, match=r"knows no 'stepz'; did you mean 'steps'"):
        canal_mpi.train("smoke", stepz=3)
    with pytest.raises(CanalError, match="unknown job 'smok'; did you mean 'smoke'"):
        canal_mpi.train("smok")
    train(out=out)
    with pytest.raises(CanalError, match="holds a run already"):
        train(out=out)
    with pytest.raises(AttributeError, match="no attribute 'tain'"):
        canal_mpi.tain  # type: ignore[attr-defined]  # noqa: B018


def test_a_signal_saves_and_the_run_is_resumed_here(out: Path) -> None:
    def interrupt() -> None:
        while not list(out.glob("checkpoints/agent-0/round-0001-*")):
            sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    Thread(target=interrupt).start()
    with pytest.raises(Stopped, match=r"everything is saved\. To go on: canal-mpi train --resume"):
        train(out=out, steps=5000)
    assert canal_mpi.load(out).status == "stopped"
    with pytest.raises(UsageError, match="resume takes everything from the run: leave out out"):
        canal_mpi.train(resume=out, out=out)
    run = canal_mpi.train(resume=out, quiet=True)
    assert run is not None
    assert run.status == "finished"
    assert run["tasks"]["env_steps"].tolist() == [5000, 5000]


def test_another_thread_is_refused(out: Path) -> None:
    found: list[BaseException] = []

    def attempt() -> None:
        try:
            train(out=out)
        except UsageError as error:
            found.append(error)

    thread = Thread(target=attempt)
    thread.start()
    thread.join()
    assert "main thread" in str(found[0])


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="extra: look")
    nbclient = pytest.importorskip("nbclient", reason="extra: look")
    pytest.importorskip("ipykernel", reason="extra: look")
    notebook = nbformat.read(ROOT / "examples" / "first_run.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    patience = {"timeout": 300, "startup_timeout": 300}
    nbclient.NotebookClient(notebook, resources=resources, **patience).execute()
    shown = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    text = str(shown)
    assert "Run('" in text
    assert "image/png" in text
    assert "\\x1b" not in text  # no table that refreshes: there is no terminal
    assert (tmp_path / "runs" / "notebook" / "run.h5").exists()


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(canal_mpi.__file__).parent / "py.typed").exists()
    assert get_type_hints(canal_mpi.train)["return"] == Run | None
    assert get_type_hints(canal_mpi.load)["return"] is Run
