"""An environment that misbehaves ends the job: one line, a documented code, in time, for good."""

import time
from pathlib import Path

import pytest
from launch import SMOKE, Result, mpirun, processes_with, run
from misbehaving import HANG, WAYS

pytestmark = pytest.mark.mpi
TIMEOUT = 6
START = 40  # seconds in which ranks on a busy machine load their libraries and begin to train
CODES = {70, 76}  # a rank failed, a rank hung
KILLED = {137, 139, 9, 11}  # mpirun's own, where a signal ended a rank; Open MPI adds 128
JOB = (*SMOKE, "--set", "learn.algorithm=plugins:Lazy", "--set", f"timeout={TIMEOUT}")


def misbehave(kind: str, ranks: int, serves: bool, mpi: str, out: Path) -> Result:
    options = (*JOB, "--tasks", f"misbehaving:{kind}-v0", "--out", str(out), "-q")
    server = ("--env-server",) if serves else ()
    return mpirun(ranks + serves, "train", *options, *server, mpi=mpi, timeout=150)


def nothing_is_left(out: Path) -> bool:
    end = time.monotonic() + 3
    while (left := processes_with(str(out))) and time.monotonic() < end:
        time.sleep(0.1)
    return not left


def check(kind: str, result: Result, out: Path) -> None:
    said = result.complaints
    assert len(said) == 1, f"{kind}: {result.err}"
    allowed = CODES | (KILLED if kind in ("StepHolds", "StepKilled", "StepCrashes") else set())
    allowed |= {3} if kind == "StepLeaves" else set()
    assert result.code in allowed, f"{kind}: {result.code} {result.err}"
    limit = START + (TIMEOUT + 5 if kind in HANG else 0)
    assert result.seconds < limit, f"{kind}: {result.seconds:.0f} s, {said[0]}"
    assert kind in said[0] or kind in ("StepLeaves", "StepKilled", "StepCrashes"), said[0]
    assert nothing_is_left(out), f"{kind}: {processes_with(str(out))}"


@pytest.mark.long
@pytest.mark.parametrize("serves", [False, True], ids=["local", "server"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", WAYS)
def test_whatever_an_environment_does_the_job_ends(
    kind: str, ranks: int, serves: bool, mpi: str, out: Path
) -> None:
    check(kind, misbehave(kind, ranks, serves, mpi, out), out)


@pytest.mark.slow
def test_one_of_each_kind_ends_the_job(out: Path) -> None:
    for kind, ranks, serves in (
        ("StepHolds", 1, False),
        ("MakeHangs", 2, False),
        ("ResetHangs", 1, True),
        ("StepCrashes", 1, True),
        ("StepShort", 2, False),
    ):
        folder = out / kind
        check(kind, misbehave(kind, ranks, serves, "openmpi", folder), folder)


def test_a_process_without_launcher_that_hangs_is_ended_too(out: Path) -> None:
    words = ("--tasks", "misbehaving:StepHangs-v0", "--out", str(out), "-q")
    result = run(["canal-mpi", "train", *JOB, *words], timeout=100)
    assert result.code == 76, result.err
    assert "has not moved for 6 s in training misbehaving:StepHangs-v0" in result.complaints[0]
    assert result.complaints[0].endswith(f"To go on: canal-mpi train --resume {out}")
    assert nothing_is_left(out)


def test_a_start_that_fails_leaves_no_folder_but_one_that_was_there(out: Path) -> None:
    result = misbehave("MakeRaises", 2, False, "openmpi", out)
    words = "task 'misbehaving:MakeRaises-v0' can't be made: ZeroDivisionError: on purpose "
    words += "(misbehaving.py, line 21); -v shows the traceback."
    assert result.complaints == [f"canal-mpi: {words}"] and result.code == 70, result.err
    assert not out.exists()

    out.mkdir()
    train = ["canal-mpi", "train", *JOB, "--tasks", "misbehaving:StepRaises-v0"]
    result = run([*train, "--out", str(out), "-v"], MAKE_RAISES="1")
    assert result.code == 70 and "Traceback" in result.err and list(out.iterdir()) == []

    assert run([*train, "--out", str(out), "-q"]).code == 70  # in a step: it can be resumed
    before = sorted(out.rglob("*.h5"))
    assert before
    result = run(["canal-mpi", "train", "--resume", str(out), "-q"], MAKE_RAISES="1")
    assert (
        result.code == 70 and "can't be made" in result.err and sorted(out.rglob("*.h5")) == before
    )
