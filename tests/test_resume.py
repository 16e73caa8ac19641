"""Which checkpoints a resumed run takes, which changes it allows, and real ranks that stop."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import termios
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import pytest
from conftest import Once
from launch import (
    SMOKE,
    TINY,
    columns,
    differences,
    kill,
    mpirun,
    nothing_is_left,
    run,
    saved,
    start,
    wait_until,
)

from canal_mpi import config
from canal_mpi.errors import RanksDiffer, UsageError
from canal_mpi.rank.plan import Request
from canal_mpi.rank.recover import gone_agents
from canal_mpi.rank.resume import ResumePoint, choose, resumed_plan, who_is_gone
from canal_mpi.results.checkpoint import Found, Mark
from canal_mpi.results.files import read_attributes

JOB = config.resolve({"tasks": ["CartPole-v1", "Acrobot-v1"], "order": "same"}, environ={})
TEXT = config.to_toml(JOB)
RUN = Path("runs/x")


def report(*files: tuple[int, int, int], agents: int = 2, run_id: str = "a") -> dict[str, Any]:
    """What one host says: (agent, round, save) of its checkpoints."""
    found = [Found(agent, Mark(*mark), run_id, agents, 0, TEXT) for agent, *mark in files]
    return {"files": [asdict(one) for one in found], "damaged": []}


def chosen(*reports: dict[str, Any], hosts: list[str]) -> ResumePoint:
    sent = json.dumps(asdict(choose(dict(enumerate(reports)), RUN, hosts, len(hosts))))
    return ResumePoint.from_dict(json.loads(sent))


def test_the_newest_round_that_all_have_is_taken_with_each_ones_newest_checkpoint() -> None:
    one = report((0, 2, 4), (0, 3, 5), (1, 2, 6), (1, 2, 7))
    choice = chosen(one, {}, hosts=["a", "a"])
    assert choice.round == 2
    assert choice.marks == {0: Mark(2, 4), 1: Mark(2, 7)}
    assert choice.holders == {0: 0, 1: 0}


def test_a_file_on_the_agents_own_host_is_preferred_unless_another_is_newer() -> None:
    choice = chosen(report((0, 1, 1), (1, 1, 2)), report((1, 1, 2), (0, 1, 3)), hosts=["a", "b"])
    assert choice.holders == {0: 1, 1: 1}


def test_agents_without_a_common_round_begin_again() -> None:
    choice = chosen(report((0, 1, 1), (1, 2, 6)), hosts=["a", "a"])
    assert (choice.round, choice.marks) == (0, {})


def test_checkpoints_of_an_older_run_in_the_same_folder_don_t_count() -> None:
    old, new = report((0, 3, 9), (1, 3, 9), run_id="1"), report((0, 1, 1), (1, 1, 1), run_id="2")
    choice = chosen(old, new, hosts=["a", "b"])
    assert (choice.run_id, choice.round) == ("2", 1)


def test_checkpoints_of_another_run_than_that_of_run_h5_are_left_out_by_name() -> None:
    own, other = report((0, 1, 1), (1, 1, 1), run_id="1"), report((0, 3, 9), run_id="2")
    choice = chosen(own | {"run": ["1", TEXT, 2, 0], "finished": False}, other, hosts=["a", "b"])
    assert (choice.run_id, choice.round) == ("1", 1)
    assert choice.damaged == [f"{RUN}/checkpoints/agent-0/{Mark(3, 9).file} is of another run."]
    with pytest.raises(UsageError, match=r"are of different runs \(1, 2\)"):
        chosen(other | {"run": ["1", TEXT, 2, 0], "finished": False}, hosts=["a"])


def test_a_folder_without_a_run_is_refused() -> None:
    with pytest.raises(UsageError, match="no run with a whole checkpoint"):
        chosen({}, hosts=["a"])


POINT = ResumePoint("a", TEXT, 2, 0, 1, {0: Mark(1, 1), 1: Mark(1, 1)}, {0: 0, 1: 0})


def planned(**flags: Any) -> Any:
    named = {key.replace("__", "."): value for key, value in flags.items()}
    return resumed_plan(Request(named, resume="runs/x"), POINT, ["here"] * 2)


def test_a_resumed_run_may_get_more_of_everything() -> None:
    plan = planned(train__steps=30000, timeout=9.0, checkpoint__interval=7)
    assert (plan.job.train.steps, plan.job.timeout, plan.run_id) == (30000, 9.0, "a")
    plan = planned(tasks=["CartPole-v1", "Acrobot-v1", "MountainCar-v0"])
    assert [len(order) for order in plan.orders] == [3, 3]


def test_a_changed_job_is_refused_with_the_difference() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"learn__lr": 0.1}, "learn.lr: 0.0005 before, 0.1 now"),
        ({"seed": 2}, "seed: 1 before, 2 now"),
        ({"train__steps": 5}, "train.steps: 20000 before, 5 now"),
        ({"tasks": ["CartPole-v1"]}, "tasks:"),
        ({"tasks": ["Acrobot-v1", "CartPole-v1"]}, "it has learnt CartPole-v1"),
    ]
    for flags, words in cases:
        with pytest.raises(RanksDiffer) as error:
            planned(**flags)
        assert words in str(error.value)


def gone(ranks: int, dead: int = 0, force: bool = False) -> list[int]:
    """The agents of a run of three that have no rank in a world of so many."""
    deaths = [{"event": "death", "agent": agent, "phase": "training"} for agent in range(dead)]
    told = report((0, 1, 1), agents=3) | {"gone": gone_agents(deaths)}
    _, found = who_is_gone({0: told}, Request(resume="runs/x", force=force), ranks)
    return [fault["agent"] for fault in found]


def test_the_dead_leave_first_and_the_living_only_when_told_to() -> None:
    assert gone(3) == gone(3, dead=1) == []
    assert gone(2, dead=1) == [0] and gone(1, dead=2) == [0, 1]
    assert gone(2, force=True) == [2] and gone(1, dead=1, force=True) == [2, 0]
    for ranks, dead, words in (
        (2, 0, "mpirun -np 3 canal-mpi train --resume runs/x; with --force the last agents leave"),
        (1, 1, "a run of 3 agents, of which 1 died; this world has 1"),
        (4, 0, "new agents would be rounds behind, but a new run can use --lessons runs/x"),
    ):
        with pytest.raises(RanksDiffer, match=words):
            gone(ranks, dead)


def test_who_was_restarted_or_left_out_is_told_by_the_last_resume() -> None:
    death = {"event": "death", "agent": 1, "task": "A", "time": "odd", "round": None}
    assert [fault["agent"] for fault in gone_agents([death])] == [1]
    assert gone_agents([death, {"event": "resume", "gone": []}]) == []
    kept = gone_agents([{"event": "resume", "gone": [death, 7]}, {"event": "death", "agent": -1}])
    assert [fault["agent"] for fault in kept] == [1]


def test_a_dead_agent_that_the_others_are_ahead_of_can_not_come_back() -> None:
    told = report((0, 3, 4), (1, 1, 1)) | {"gone": gone_agents([{"event": "death", "agent": 1}])}
    with pytest.raises(UsageError, match="Start 1 ranks to go on without it"):
        chosen(told, {}, hosts=["a", "a"])


# Real ranks

SMALL = ("--set", "learn.widths=8", "--set", "checkpoint.interval=50")
LONG = (*SMOKE, *SMALL, "--frames", "2000")


@pytest.fixture(scope="session")
def whole(once: Once) -> Path:
    """The run that nobody disturbed."""

    def train(out: Path) -> None:
        result = mpirun(3, "train", *LONG, "--out", str(out), timeout=300)
        assert result.code == 0, result.err

    return once("whole", train)


def begin(out: Path, mpi: str, *options: str) -> "subprocess.Popen[str]":
    """Start a run and wait until it trains."""
    command = ["mpirun", "-np", "3", "canal-mpi", "train", *LONG, "--out", str(out), *options]
    job = start(command, mpi)
    wait_until(lambda: saved(out, 6), job)
    return job


def end(job: "subprocess.Popen[str]") -> str:
    """What it said, once it is over."""
    _, err = job.communicate(timeout=120)
    return err


def goes_on_to_the_same_end(out: Path, whole: Path, mpi: str) -> None:
    assert nothing_is_left(out, 30)
    result = mpirun(3, "train", "--resume", str(out), mpi=mpi, timeout=300)
    assert result.code == 0, result.err
    for file in ("run.h5", *(f"checkpoints/agent-{k}/learner.h5" for k in range(3))):
        assert differences(columns(whole / file), columns(out / file)) == []
    with h5py.File(out / "run.h5") as file:
        assert file.attrs["status"] == "finished" and file.attrs["resumes"] == 1


@pytest.mark.slow
@pytest.mark.mpi
def test_sigusr1_stops_politely_and_a_resumed_run_ends_the_same(
    mpi: str, out: Path, whole: Path
) -> None:
    job = begin(out, mpi)
    job.send_signal(signal.SIGUSR1)
    err = end(job)
    assert job.returncode == 75, err
    said = [line for line in err.splitlines() if line.startswith("canal-mpi:")]
    assert len(said) == 1 and "got SIGUSR1; everything is saved" in said[0]
    assert "MPI_ABORT" not in err and "MPI_Abort" not in err
    assert f"mpirun -np 3 canal-mpi train --resume {out}" in said[0]
    with h5py.File(out / "run.h5") as file:
        assert file.attrs["status"] == "stopped"
    assert run(["canal-mpi", "inspect", "--verify", str(out)]).code == 0
    goes_on_to_the_same_end(out, whole, mpi)


@pytest.mark.slow
@pytest.mark.mpi
def test_after_ctrl_c_under_plain_mpirun_ls_says_stopped_at_once(out: Path, whole: Path) -> None:
    job = begin(out, "openmpi")
    job.send_signal(signal.SIGINT)
    end(job)  # mpirun closes the output of its ranks, and kills them half a second later
    [_, line] = run(["canal-mpi", "ls", str(out)]).out.splitlines()
    assert line.split()[1] == "stopped" and line.split()[-1] == "yes"
    goes_on_to_the_same_end(out, whole, "openmpi")


@pytest.mark.slow
@pytest.mark.mpi
def test_a_killed_rank_costs_nothing_but_time(mpi: str, out: Path, whole: Path) -> None:
    job = begin(out, mpi)
    kill(out)
    err = end(job)
    assert job.returncode != 0 and "--resume" in err, err
    goes_on_to_the_same_end(out, whole, mpi)


@pytest.mark.slow
@pytest.mark.mpi
def test_a_rank_killed_inside_an_exchange_or_an_evaluation_costs_no_bit(
    out: Path, tmp_path: Path
) -> None:
    trigger, job = tmp_path / "trigger", (*TINY, "--share", "chaos_hooks:exact", "-q", "--out")
    assert mpirun(2, "train", *job, str(tmp_path / "at_once")).code == 0
    options: tuple[str, ...] = (*job, str(out))
    for phase in ("exchanging", "evaluating"):
        trigger.write_text(f"{phase} 1")
        quick = {"CHAOS_TRIGGER": str(trigger), "NUMBA_DISABLE_JIT": "1"}
        result = mpirun(2, "train", *options, **quick)
        assert result.code != 0 and not trigger.exists(), result.err
        options = ("--resume", str(out), "-q")
    assert mpirun(2, "train", *options, **quick).code == 0
    assert differences(columns(tmp_path / "at_once/run.h5"), columns(out / "run.h5")) == []


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("rank", [0, 1])
def test_when_a_rank_falls_silent_the_others_save(rank: int, out: Path, whole: Path) -> None:
    job = begin(out, "openmpi", "--set", "timeout=8", "--set", "checkpoint.interval=0")
    kill(out, f"agent-{rank}", signal.SIGSTOP)
    err = end(job)
    assert job.returncode == 76, err
    assert f"rank {rank} on " in err and "has been silent for" in err, err
    for other in {0, 1, 2} - {rank}:
        log = (out / f"logs/agent-{other}.log").read_text()
        assert log.count("checkpoint round-") >= 2, log
    goes_on_to_the_same_end(out, whole, "openmpi")


@pytest.mark.mpi
def test_a_time_limit_ends_in_a_run_that_can_go_on_and_only_as_it_was(
    out: Path, tmp_path: Path
) -> None:
    result = mpirun(
        2, "train", *SMOKE, *SMALL, "--frames", "200000", "--max-time", "8s", "--out", str(out)
    )
    assert result.code == 75, result.err
    assert "its time is over (--max-time)" in result.err
    for options, code, words in (
        (["--seed", "3"], 78, "seed: 1 before, 3 now"),
        (["--job", "smoke"], 2, "leave out --job"),
    ):
        refused = mpirun(2, "train", "--resume", str(out), *options)
        assert refused.code == code and words in refused.complaints[0], refused.err
        assert len(refused.complaints) == 1
    alone = run(["canal-mpi", "train", "--resume", str(out)])
    assert alone.code == 78 and "mpirun -np 2 canal-mpi train --resume" in alone.err
    none = run(["canal-mpi", "train", "--resume", str(tmp_path / "nothing")])
    assert none.code == 2, none.err
    assert not (tmp_path / "nothing").exists()


@pytest.mark.slow
@pytest.mark.mpi
def test_a_run_killed_before_it_wrote_results_begins_again(out: Path, whole: Path) -> None:
    job = begin(out, "openmpi")
    kill(out, "agent-0")
    end(job)
    (out / "run.h5").unlink()  # as it is before the first round is written
    shutil.rmtree(out / "checkpoints")
    goes_on_to_the_same_end(out, whole, "openmpi")


@pytest.mark.slow
@pytest.mark.mpi
def test_agents_may_leave_a_run_and_what_they_learnt_is_kept(mpi: str, out: Path) -> None:
    job = begin(out, mpi)
    job.send_signal(signal.SIGUSR1)
    assert "everything is saved" in end(job)
    learnt = len(tasks_of(out, 2))
    refused = mpirun(2, "train", "--resume", str(out), mpi=mpi)
    assert refused.code == 78 and "--force the last agents leave" in refused.complaints[0]
    result = mpirun(2, "train", "--resume", str(out), "--force", mpi=mpi, timeout=300)
    assert result.code == 0, result.err
    assert [len(tasks_of(out, agent)) for agent in (0, 1, 2)] == [3, 3, learnt]
    with h5py.File(out / "run.h5") as file:
        assert file.attrs["status"] == "degraded"
        assert file["faults/agent"][()].tolist() == [2]
        assert file["faults/phase"][()].tolist() == [b"left out"]
    assert run(["canal-mpi", "inspect", "--verify", str(out)]).code == 0


def tasks_of(out: Path, agent: int) -> list[int]:
    with h5py.File(out / "run.h5") as file:
        tasks = file["tasks"]
        found: list[int] = tasks["round"][()][tasks["agent"][()] == agent].tolist()
    return found


@pytest.mark.mpi
def test_a_closed_terminal_stops_one_agent_alone_politely(out: Path) -> None:
    leader, follower = os.openpty()
    command = ["canal-mpi", "train", *LONG, "--frames", "200000", "--out", str(out)]
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    take_terminal = partial(fcntl.ioctl, follower, termios.TIOCSCTTY, 0)
    job = start(command, start_new_session=True, preexec_fn=take_terminal, **streams)
    os.close(follower)
    drain = threading.Thread(target=read_until_closed, args=(leader,), daemon=True)
    drain.start()
    wait_until(lambda: saved(out), job)
    os.kill(job.pid, signal.SIGHUP)
    assert job.wait(60) == 75
    with h5py.File(out / "run.h5") as file:
        assert file.attrs["status"] == "stopped"


def read_until_closed(leader: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(leader, 4096):
            pass


@pytest.mark.slow
@pytest.mark.mpi
def test_ranks_that_were_all_stopped_for_long_blame_nobody(out: Path, whole: Path) -> None:
    job = begin(out, "openmpi", "--set", "timeout=8")
    for number, seconds in ((signal.SIGSTOP, 12.0), (signal.SIGCONT, 0.0)):
        for rank in range(3):
            kill(out, f"agent-{rank}", number)
        time.sleep(seconds)
    err = end(job)
    assert job.returncode == 0, err
    assert "this rank itself did not move for" in (out / "logs/agent-0.log").read_text()
    assert differences(columns(whole / "run.h5"), columns(out / "run.h5")) == []


@pytest.mark.slow
@pytest.mark.mpi
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_used(out: Path, whole: Path) -> None:
    job = begin(out, "openmpi")
    job.send_signal(signal.SIGUSR1)
    end(job)
    newest = sorted((out / "checkpoints/agent-2").glob("round-*"))[-1]
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    again = mpirun(3, "train", "--resume", str(out), timeout=300)
    assert again.code == 0, again.err
    assert f"warning: {newest} is damaged" in again.err
    assert differences(columns(whole / "run.h5"), columns(out / "run.h5")) == []
    finished = mpirun(3, "train", "--resume", str(out))
    assert finished.code == 0 and "is finished" in finished.out


@pytest.mark.slow
@pytest.mark.mpi
def test_a_finished_run_goes_on_with_more_rounds(out: Path, tmp_path: Path) -> None:
    at_once = tmp_path / "at_once"
    job = (*SMOKE, *SMALL)
    assert mpirun(2, "train", *job, "--out", str(at_once)).code == 0
    first = ("--set", "train.rounds=1", "--set", "checkpoint.keep=true")
    assert mpirun(2, "train", *job, *first, "--out", str(out)).code == 0
    more = mpirun(2, "train", "--resume", str(out), "--set", "train.rounds=0")
    assert more.code == 0, more.err
    assert differences(columns(at_once / "run.h5"), columns(out / "run.h5")) == []


@pytest.mark.mpi
def test_a_finished_run_keeps_no_checkpoints_and_says_so(out: Path) -> None:
    assert (
        mpirun(2, "train", *SMOKE, *SMALL, "--set", "train.rounds=1", "--out", str(out)).code == 0
    )
    assert list(out.glob("checkpoints/*/round-*")) == []
    more = mpirun(2, "train", "--resume", str(out), "--set", "train.rounds=0")
    assert more.code == 2 and "kept no checkpoint to go on from" in more.complaints[0]
    again = mpirun(2, "train", "--resume", str(out))
    assert again.code == 0 and "is finished" in again.out


@pytest.mark.slow
@pytest.mark.mpi
def test_one_agent_alone_stops_at_ctrl_c_and_goes_on(out: Path, tmp_path: Path) -> None:
    at_once, command = tmp_path / "at_once", ["canal-mpi", "train", *LONG, "--agent", "2"]
    assert run([*command, "--out", str(at_once)]).code == 0
    job = start([*command, "--out", str(out)])
    wait_until(lambda: saved(out, pattern="agent-2/round-0002*"), job)
    job.send_signal(signal.SIGINT)
    err = end(job)
    assert job.returncode == 75, err
    assert "SIGINT: saving; again to stop at once" in err and "everything is saved" in err
    started = read_attributes(out / "run.h5")["started"]
    again = run(["canal-mpi", "train", "--resume", str(out)])
    assert again.code == 0, again.err
    assert read_attributes(out / "run.h5")["started"] == started, "the run began when it first did"
    assert differences(columns(at_once / "run.h5"), columns(out / "run.h5")) == []


@pytest.mark.slow
@pytest.mark.mpi
def test_a_short_storm_of_faults_changes_no_bit() -> None:
    tool = Path(__file__).parent.parent / "tools" / "chaos"
    result = run(["python", str(tool), "--seed", "7", "--count", "4", "--ranks", "2"], timeout=900)
    assert result.code == 0, result.out + result.err
    assert "every end the same bits" in result.out
