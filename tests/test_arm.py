"""x86-64 and aarch64 ranks in one job: real aarch64 wheels under qemu (tools/arm)."""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import ROOT, Result, run

import canal_mpi
from canal_mpi.results.checkpoint import read_lesson

Compared = Callable[[str, object], None]
X86, ARM = (str(ROOT / folder / "bin" / "canal-mpi") for folder in (".venv", ".venv-arm"))
UNDER_QEMU: dict[str, Any] = {  # PMIx's shared memory and the memory patcher crash there
    "PMIX_MCA_gds": "hash",
    "OMPI_MCA_memory": "^patcher",
    "OMPI_MCA_btl": "self,tcp",
    "OMPI_MCA_pml": "ob1",
}
JOB = ["train", "--job", "smoke", "--steps", "100", "--set", "evaluation.max_steps=20"]
JOB += ["--set", "timeout=1500"]  # Numba compiles for minutes under qemu, without a sign of life
INTERPRETED = {"NUMBA_DISABLE_JIT": "1"}  # the same loops in Python, for networks that are tiny
TINY = ["--set", "learn.widths=8,8", "--set", "learn.batch_size=4", "--set", "learn.n_step=1"]
pytestmark = [pytest.mark.root, pytest.mark.mpi, pytest.mark.alone]


@pytest.fixture(scope="module", autouse=True)
def arm() -> None:
    """An aarch64 canal-mpi; made once, in about three minutes."""
    if platform.machine() != "x86_64":
        pytest.skip("emulates aarch64 on x86-64")
    if not (ROOT / ".venv-arm" / "ready").exists():
        made = run([str(ROOT / "tools" / "arm")], timeout=1200)
        assert made.code == 0, made.out + made.err


def mixed(*programs: str, options: list[str], **environment: str) -> Result:
    """One job of these programs, a rank each."""
    parts = [word for one in programs for word in (":", "-np", "1", one, *options)]
    words = ["mpirun", "--oversubscribe", *parts[1:]]
    return run(words, timeout=900, **UNDER_QEMU, **environment)


def machines(folder: Path) -> list[str]:
    return [str(name) for name in canal_mpi.load(folder)["agents"]["machine"]]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_lessons_cross_both_ways_between_x86_and_arm(
    compiled: bool, out: Path, record_property: Compared
) -> None:
    options = [*JOB, *([] if compiled else TINY), "--out", str(out)]
    done = mixed(X86, ARM, options=options, **({} if compiled else INTERPRETED))
    assert done.code == 0, done.out + done.err
    loaded = canal_mpi.load(out)
    assert loaded.status == "finished"
    assert machines(out) == ["x86_64", "aarch64"]
    ledger = loaded["exchange"]
    taken = ledger["kind"] == "lesson"
    pairs = {
        (int(a), int(b)) for a, b in zip(ledger["donor"][taken], ledger["to"][taken], strict=True)
    }
    assert {(0, 1), (1, 0)} <= pairs
    assert not (ledger["kind"] == "refusal").any()
    for path in out.glob("membuf/agent-*/*.h5"):
        assert len(read_lesson(path)[0].rows["action"])
    told = f"lessons {sorted(pairs)} crossed between agents on {', '.join(machines(out))}"
    record_property("compared", f"{told}; none was refused, and all membufs are whole")


@pytest.mark.long
def test_an_arm_agent_alone_plays_the_moves_of_an_x86_agent(
    tmp_path: Path, record_property: Compared
) -> None:
    """Random play is whole numbers and random streams: bit-identical on both architectures."""
    options = [*JOB, "--tasks", "Krull", "--set", "learn.learning_starts=1000", "--share", "none"]
    options += ["--set", "explore.eps_end=1.0", "--set", "evaluation.episodes=0"]
    for program, name in ((X86, "x86"), (ARM, "arm")):
        done = run([program, *options, "--out", str(tmp_path / name)], timeout=900, **UNDER_QEMU)
        assert done.code == 0, done.out + done.err
    a, b = (next((tmp_path / name).glob("membuf/agent-0/*.h5")) for name in ("x86", "arm"))
    ours, theirs = read_lesson(a)[0].rows, read_lesson(b)[0].rows
    for name in ours:
        assert np.array_equal(ours[name], theirs[name]), name
    told = f"{', '.join(sorted(ours))} of {len(ours['action'])} rows of play"
    record_property("compared", f"{told} are bit-identical on both")


@pytest.mark.long
def test_an_env_server_on_the_other_architecture_plays(
    out: Path, record_property: Compared
) -> None:
    done = mixed(ARM, X86, options=[*JOB, "--env-server", "--out", str(out)])
    assert done.code == 0, done.out + done.err
    assert machines(out) == ["aarch64"]
    assert canal_mpi.load(out)["tasks"]["env_steps"].tolist() == [100] * 3
    record_property("compared", "an aarch64 agent played 3 × 100 steps on an x86-64 env server")


@pytest.mark.long
def test_a_run_of_one_architecture_is_resumed_on_the_other(
    out: Path, record_property: Compared
) -> None:
    options = [*JOB, "--set", "train.rounds=1", "--set", "checkpoint.keep=true", "--out", str(out)]
    done = run([X86, *options], timeout=300)
    assert done.code == 0, done.err
    more = ["train", "--resume", str(out), "--set", "train.rounds=2"]
    done = run([ARM, *more], timeout=900, **UNDER_QEMU)
    assert done.code == 0, done.out + done.err
    assert machines(out) == ["aarch64"]
    assert canal_mpi.load(out)["tasks"]["round"].tolist() == [1, 2]
    record_property("compared", "round 1 was learnt on x86-64, round 2 on aarch64")
