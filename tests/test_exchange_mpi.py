"""Lessons among real ranks: over every topology, in step or not, from runs before."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from launch import LAZY, SMOKE, TINY, check_time_line, columns, differences, mpirun, run
from thread_links import known

from canal_mpi.results.status import RunStatus
from canal_mpi.topology.graphs import edges

pytestmark = pytest.mark.mpi

GRAPHS = ("full", "ring", "star", "grid", "hypercube", "random:3", "line", "torus", "tree", "none")
PROGRAM = str(Path(__file__).parent / "exchange_program.py")


@pytest.fixture
def one_way(tmp_path: Path) -> str:
    """A directed file: a loop of three that tells two others in turn."""
    path = tmp_path / "edges.txt"
    path.write_text("0 1\n1 -> 2\n2 0\n2 3\n3 4\n")
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.long)])
def test_every_lesson_reaches_whom_a_path_connects(mpi: str, one_way: str) -> None:
    for ranks in (5, 8):
        command = ["mpirun", "-np", str(ranks), "python", PROGRAM, *GRAPHS, one_way]
        result = run(command, mpi, timeout=300)
        assert (result.code, result.out) == (0, "all as it should be\n"), result.err


def learnt(run_file: Path) -> dict[tuple[int, int], tuple[str, str]]:
    """Task and donors by agent and round."""
    with h5py.File(run_file) as file:
        names = ("agent", "round", "task", "donors")
        rows = zip(*(file[f"tasks/{name}"][()].tolist() for name in names), strict=True)
        return {(agent, round_): (t.decode(), d.decode()) for agent, round_, t, d in rows}


@pytest.mark.parametrize("topology", ["ring", "hypercube", "path_graph", "edges.txt"])
@pytest.mark.alone
def test_agents_learn_from_the_lessons_that_reachability_gives_them(
    topology: str, one_way: str, out: Path
) -> None:
    ranks, graph = 5, one_way if topology == "edges.txt" else topology
    options = ("--topology", graph, "--set", "evaluation.episodes=0", "--out", str(out))
    result = mpirun(ranks, "train", *SMOKE, *LAZY, *options)
    assert result.code == 0, result.err
    check_time_line(result.out)
    found, joined = learnt(out / "run.h5"), edges(graph, ranks)
    for (agent, round_), (task, donors) in found.items():
        heard = known(joined, ranks, agent, round_)
        # who learnt from a lesson alone has no own rows to offer
        played = [d for d, r in sorted(heard) if found[d, r] == (task, "")]
        assert {*donors.split(",")} - {""} == {*map(str, played)}
    with h5py.File(out / "run.h5") as file:
        ledger = {name: column[()] for name, column in file["exchange"].items()}
    crossed = ledger["kind"] == b"transfer"
    ends = zip(ledger["from"][crossed].tolist(), ledger["to"][crossed].tolist(), strict=True)
    assert set(ends) <= joined


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["ring", "random:3", "watts_strogatz_graph:k=2,p=0.5"])
def test_the_same_seed_gives_the_same_bits_on_a_sparse_graph(topology: str, tmp_path: Path) -> None:
    for name, mpi in (("a", "openmpi"), ("b", "mpich")):
        options = ("--topology", topology, "--out", str(tmp_path / name))
        assert mpirun(5, "train", *TINY, *options, mpi=mpi).code == 0
    a, b = (columns(tmp_path / name / "run.h5") for name in ("a", "b"))
    assert differences(a, b) == []


def seconds(run_file: Path) -> np.ndarray:
    """How long each agent was at its tasks."""
    with h5py.File(run_file) as file:
        agent, spent = file["tasks/agent"][()], file["tasks/seconds"][()]
    return np.bincount(agent, spent)


@pytest.mark.alone
@pytest.mark.slow
def test_with_the_free_clock_agents_do_not_wait_for_a_slow_one(tmp_path: Path) -> None:
    def train(clock: str, slow_rank: str) -> np.ndarray:
        options = ("--tasks", "plugins:Sleepy-v0,plugins:Sleepy-v1", "--order", "rotate")
        out = tmp_path / f"{clock}{slow_rank}"
        quick = ("--set", "evaluation.episodes=0", "--steps", "100", "--out", str(out))
        clocked = ("--set", "share.policy=plugins:nothing", "--exchange", clock)
        result = mpirun(3, "train", *LAZY, *options, *quick, *clocked, SLOW_RANK=slow_rank)
        assert result.code == 0, result.err
        return seconds(out / "run.h5")

    every = train("free", "")
    for slow in ("0", "2"):
        others = [agent for agent in range(3) if agent != int(slow)]
        even, free, rounds = (
            s[others] for s in (every, train("free", slow), train("rounds", slow))
        )
        assert (free < 1.5 * even).all()
        assert (rounds > 2.5 * even).all()
        with h5py.File(tmp_path / f"rounds{slow}" / "run.h5") as file:
            waited = np.bincount(file["tasks/agent"][()], file["tasks/wait_seconds"][()])
        assert (waited[others] > 0.4 * rounds).all()


@pytest.mark.alone
@pytest.mark.slow
def test_the_free_clock_loses_no_row_and_no_lesson(mpi: str, out: Path) -> None:
    options = ("--exchange", "free", "--topology", "ring", "--out", str(out))
    result = mpirun(5, "train", *SMOKE, *LAZY, *options, mpi=mpi)
    assert result.code == 0, result.err
    check_time_line(result.out)
    assert "15 of 15 tasks" in result.out and RunStatus(out).round == 3
    found = learnt(out / "run.h5")
    assert sorted(found) == [(agent, round_) for agent in range(5) for round_ in (1, 2, 3)]
    with h5py.File(out / "run.h5") as file:
        assert file.attrs["status"] == "finished"
        kinds = file["exchange/kind"][()]
        used = sum(len(donors.split(",")) for _, donors in found.values() if donors)
    assert (kinds == b"lesson").sum() == used
    assert (kinds == b"refusal").sum() == 0


def test_lessons_of_an_earlier_run_are_learnt_from(tmp_path: Path) -> None:
    first, alone, again = (tmp_path / name for name in ("first", "alone", "again"))
    assert mpirun(3, "train", *TINY, "--out", str(first)).code == 0
    options = (*TINY, "--lessons", str(first))
    result = run(["canal-mpi", "train", *options, "--out", str(alone)])
    assert result.code == 0, result.err
    assert "3 lessons of" in result.out  # of those who played: the others had no rows to offer
    assert all("before" in donors for _, donors in learnt(alone / "run.h5").values())
    assert mpirun(2, "train", *options, "--topology", "none", "--out", str(again)).code == 0
    assert all("before" in donors for _, donors in learnt(again / "run.h5").values())


def test_a_folder_without_lessons_is_refused(tmp_path: Path, out: Path) -> None:
    result = run(["canal-mpi", "train", "--lessons", str(tmp_path), "--out", str(out)])
    assert result.code == 2
    assert "no lessons there" in result.err


def test_a_damaged_lesson_file_is_left_out_by_name(tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    assert run(["canal-mpi", "train", *TINY, "--out", str(first)]).code == 0
    path = first / "membuf" / "agent-0" / "round-02-Acrobot-v1.h5"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    options = (*TINY, "--lessons", str(first), "--out", str(again))
    result = run(["canal-mpi", "train", *options])
    assert result.code == 0
    assert "2 lessons of" in result.out
    assert path.name in (again / "logs" / "agent-0.log").read_text()
