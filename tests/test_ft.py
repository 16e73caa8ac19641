"""Going on without ranks that died: --ft on Open MPI's ULFM, with real ranks really killed."""

import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from launch import LAZY, SMOKE, TINY, Result, kill, logged, run, start, wait_until
from thread_links import ThreadLink

from canal_mpi.interfaces import Offer
from canal_mpi.membuf.wire import encode
from canal_mpi.rank.recover import edges_among, merged
from canal_mpi.settings import ShareConfig
from canal_mpi.topology.graphs import full, ring

TOLERANT = ["mpirun", "--with-ft", "ulfm", "-np"]


def offer(donor: int, round_: int, task: str = "A") -> Offer:
    return Offer(donor, round_, task, 1.0, 10, 100)


# ── what is left of the exchange ───────────────────────────────────────────────────────────────


def test_the_living_form_the_same_topology_anew() -> None:
    assert edges_among([0, 2, 3], "ring", ring(5), 1, ["h"] * 3) == {
        (a, b) for a in (0, 2, 3) for b in (0, 2, 3) if a != b
    }
    assert edges_among([1, 4], "edges.txt", {(1, 4), (4, 0), (0, 1)}, 1, ["h"] * 2) == {(1, 4)}


def test_a_lesson_of_the_dead_is_known_where_a_copy_is_left() -> None:
    mine, lost = offer(0, 1), offer(3, 2)
    copied = offer(3, 1)
    known = [[mine, copied, lost], [copied], [copied, mine]]
    found = merged(known, {0: [(0, 1)], 2: [(3, 1)], 4: [(3, 1), (0, 1)]})
    assert [(one.key, holder) for one, holder in found] == [((0, 1), 0), ((3, 1), 2)]


def test_after_a_death_a_lesson_is_fetched_from_its_new_holder_by_relays() -> None:
    edges = {(0, 1), (1, 0), (1, 2), (2, 1)}
    links = ThreadLink.mesh(3, edges)
    data = encode({"x": np.arange(5)})
    links[2].stock([offer(4, 1)], {(4, 1): data}, 2)
    for link in links:
        link.begin(2)
        link.recover([(offer(4, 1), 2), (offer(0, 1), 0)])
    assert [one.key for one in links[0].offers()] == [(4, 1)]
    [parcel] = links[0].fetch(links[0].offers())
    assert parcel.data == data and parcel.sender == 1


def test_a_link_that_was_restored_still_knows_its_own_offers() -> None:
    before, after = (ThreadLink.mesh(2, full(2))[0] for _ in range(2))
    before.share = ShareConfig(exchange="free")
    before.begin(1)
    before.publish(offer(0, 1), b"rows")
    after.load_state_dict(before.state_dict())
    assert after.known() == before.known()
    assert [one.key for one in after.known()[0]] == [(0, 1)]


# ── real ranks ─────────────────────────────────────────────────────────────────────────────────


def table(out: Path, name: str) -> dict[str, Any]:
    with h5py.File(out / "run.h5") as file:
        return {"status": str(file.attrs["status"])} | {k: v[()] for k, v in file[name].items()}


def check(out: Path, dead: set[int], agents: int, rounds: int = 3) -> None:
    """The run says who died, and everybody else has learnt everything."""
    faults, tasks = table(out, "faults"), table(out, "tasks")
    assert faults["status"] == "degraded"
    assert set(faults["agent"].tolist()) == dead
    for agent in set(range(agents)) - dead:
        assert sorted(tasks["round"][tasks["agent"] == agent]) == list(range(1, rounds + 1))


def tolerant(ranks: int, out: Path, *options: str) -> Result:
    command = [*TOLERANT, str(ranks), "canal-mpi", "train", *TINY, "--ft"]
    return run([*command, "--out", str(out), *options], timeout=120)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("policy", ["is_killed", "raises"])
def test_the_others_finish_when_an_agent_dies(policy: str, out: Path) -> None:
    result = tolerant(4, out, "--share", f"plugins:{policy}", "--topology", "ring")
    assert result.code == 0, result.err
    check(out, {1}, 4)
    assert "agent 1 (rank 1 on " in result.err
    assert re.search(r"died in round [12]; the others go on from round [12]", result.out)
    [lost] = table(out, "faults")["lost"].tolist()
    assert lost in (b"round 1 (Acrobot-v1)", b"")  # unless a neighbour was quick enough
    tasks = table(out, "tasks")
    assert tasks["round"][tasks["agent"] == 1].tolist() == [1]  # what it had finished is kept
    again = run(["mpirun", "-np", "3", "canal-mpi", "train", "--resume", str(out)])
    assert again.code == 0 and "is finished" in again.out
    back = run(["mpirun", "-np", "4", "canal-mpi", "train", "--resume", str(out)])
    assert back.code == 2 and "agent 1 died, and the others are rounds ahead" in back.err
    if policy == "is_killed":
        for command in ("report", "ls", "inspect"):
            assert run(["canal-mpi", command, str(out)]).code == 0, command
        assert run(["canal-mpi", "inspect", str(out / "run.h5"), "--verify"]).code == 0


def kill_with_checkpoint(job: "subprocess.Popen[str]", out: Path, name: str) -> None:
    """Kill an agent as soon as it has a checkpoint."""
    wait_until(lambda: logged(out, "checkpoint round", name), job)
    kill(out, name)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("exchange", ["rounds", "free"])
def test_rank_0_may_be_the_one_that_dies_and_others_with_it(exchange: str, out: Path) -> None:
    command = [*TOLERANT, "5", "canal-mpi", "train", *SMOKE, *LAZY, "--ft", "--frames", "1500"]
    job = start([*command, "--exchange", exchange, "--out", str(out)])
    for name in ("agent-0", "agent-3"):
        kill_with_checkpoint(job, out, name)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    check(out, {0, 3}, 5)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("exchange", ["rounds", "free"])
def test_a_run_that_lost_a_rank_is_stopped_and_resumed(exchange: str, out: Path) -> None:
    """In rounds without the dead agent; with the free clock it comes back, too."""
    options = (*SMOKE, *LAZY, "--ft", "--frames", "6000", "--exchange", exchange)
    job = start([*TOLERANT, "3", "canal-mpi", "train", *options, "--out", str(out)])
    kill_with_checkpoint(job, out, "agent-2")
    wait_until(lambda: "death" in (out / "events.jsonl").read_text(), job)
    time.sleep(2)
    job.send_signal(signal.SIGUSR1)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 75, err
    assert "mpirun -np 2 canal-mpi train --resume" in err
    ranks = 2 if exchange == "rounds" else 3
    command = ["mpirun", "-np", str(ranks), "canal-mpi", "train", "--resume", str(out)]
    result = run(command, timeout=300)
    assert result.code == 0, result.err
    if ranks == 2:
        check(out, {2}, 3)
    else:
        tasks = table(out, "tasks")
        assert tasks["status"] == "finished" and len(tasks["round"]) == 9
    assert run(["canal-mpi", "inspect", str(out), "--verify"]).code == 0


@pytest.mark.mpi
def test_an_env_server_plays_on_for_the_others(out: Path) -> None:
    options = ("--env-server", "--share", "plugins:is_killed")
    result = tolerant(4, out, *options)
    assert result.code == 0, result.err
    check(out, {1}, 3)


@pytest.mark.mpi
def test_ft_is_refused_where_no_death_would_be_survived(mpi: str, out: Path) -> None:
    alone = run(["canal-mpi", "train", *SMOKE, "--ft", "--out", str(out)], mpi)
    assert alone.code == 2 and "--ft is for several ranks" in alone.err
    command = ["mpirun", "-np", "2", "canal-mpi", "train", *SMOKE, "--ft", "--out", str(out)]
    result = run(command, mpi)
    assert result.code == 2 and len(result.complaints) == 1
    words = {"openmpi": "mpirun --with-ft ulfm", "mpich": "--ft needs Open MPI"}[mpi]
    assert words in result.complaints[0]
