"""A task ends early when it is won; best networks; a run starts from another one's agents."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
from launch import run as run_command
from small import LEFT, RIGHT, small_agent, small_job

import canal_mpi
from canal_mpi import envs
from canal_mpi.config import resolve
from canal_mpi.errors import CanalError, UsageError
from canal_mpi.games import win_return_of
from canal_mpi.report.report import write_report
from canal_mpi.results.files import read_arrays, write_arrays
from canal_mpi.results.reader import Run

TASKS = [f"small:{RIGHT}", f"small:{LEFT}"]
SETTINGS = {
    "learn.widths": [8],
    "learn.batch_size": 4,
    "learn.learning_starts": 4,
    "replay.buffer_size": 500,
    "evaluation.episodes": 1,
    "evaluation.max_steps": 12,
    "report": False,
}
FORGETS = {"rehearsal.rows": 0, "learn.heads": "shared", "evaluation.epsilon": 0.0}


def train(out: Path, **options: Any) -> Run:
    settings = SETTINGS | options.pop("settings", {})
    usual: dict[str, Any] = {"tasks": TASKS, "order": "same", "steps": 60, "quiet": True}
    run = canal_mpi.train(out=out, settings=settings, **usual | options)
    assert run is not None
    return run


def test_a_task_ends_when_100_episodes_reach_the_return(out: Path) -> None:
    wins = {"train.win_return": [f"{TASKS[0]}=2.0"]}  # what the far end pays, always
    run = train(out, steps=3000, settings=wins)
    steps = dict(zip(run["tasks"]["task"], run["tasks"]["env_steps"], strict=True))
    episodes = run["episodes"]["task"] == TASKS[0]
    assert episodes.sum() == 100
    assert steps[TASKS[0]] == run["episodes"]["step"][episodes].max() < 3000
    assert steps[TASKS[1]] == 3000
    assert run.status == "finished"


def test_99_episodes_are_not_enough() -> None:
    sink = small.Sink()
    agent = small_agent(small_job(train__steps=3000, train__win_return=[f"{RIGHT}=2"]), sink=sink)
    agent.run()
    assert len(sink.rows["episodes"]) == 100
    assert not agent.record.has_won(2.1)


def test_what_gymnasium_knows_is_written_into_the_job() -> None:
    flags = {"tasks": ["CartPole-v1", "Pong", RIGHT], "train.win_return": "known,ALE/Pong-v5=18"}
    job = envs.named(resolve(flags, environ={}))
    assert job.train.win_return == ("CartPole-v1=475.0", "Pong=18")
    assert win_return_of(job.train.win_return, "CartPole-v1") == 475
    assert win_return_of(job.train.win_return, RIGHT) == np.inf


def test_wins_that_mean_nothing_are_refused() -> None:
    for win, words in [
        ("475", "found '475'; expected known, or task=return"),
        ("Alien=3", "found 'Alien=3'; expected known"),
        ("CartPole-v1=much", "'CartPole-v1=much': expected a number"),
    ]:
        flags = {"tasks": "CartPole-v1", "train.win_return": win}
        with pytest.raises(UsageError, match=words):
            envs.named(resolve(flags, environ={}))
    flags = {"tasks": "Pong,Krull", "train.win_return": "known"}
    with pytest.raises(UsageError, match="gymnasium knows none of Pong, Krull; expected numbers"):
        envs.named(resolve(flags, environ={}))


def test_agents_start_from_the_learners_of_another_run(tmp_path: Path) -> None:
    train(tmp_path / "first", steps=200)
    still = {"learn.learning_starts": 10_000, "replay.buffer_size": 20_000}  # it learns nothing
    run = train(tmp_path / "second", init=str(tmp_path / "first"), settings=still)
    assert run.setting("init") == str(tmp_path / "first")
    before, after = (
        read_arrays(tmp_path / name / "checkpoints" / "agent-0" / "learner.h5")
        for name in ("first", "second")
    )
    weights = [name for name in before if name.endswith("/params")]
    assert weights
    for name in weights:
        assert np.array_equal(before[name], after[name]), name


def test_a_run_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "first")
    with pytest.raises(CanalError, match="does not fit this job's network and observations"):
        train(tmp_path / "second", init=str(tmp_path / "first"), settings={"learn.widths": [9]})
    path = tmp_path / "first" / "checkpoints" / "agent-0" / "learner.h5"
    broken = {name: np.full_like(column, np.nan) for name, column in read_arrays(path).items()}
    write_arrays(path, broken, {})
    with pytest.raises(CanalError, match="holds a number that is not finite"):
        train(tmp_path / "second", init=str(tmp_path / "first"))
    with pytest.raises(CanalError, match="nowhere holds no agents"):
        train(tmp_path / "third", init=str(tmp_path / "nowhere"))


def test_lessons_of_a_run_carry_the_network_of_a_tag(out: Path, tmp_path: Path) -> None:
    run = train(out, steps=1500, settings=FORGETS)
    found = {}
    for tag in ("best", "latest"):
        taken = {"share.lessons": str(out), "share.lessons_tag": tag, "reuse.mode": "adopt"}
        settings = FORGETS | taken | {"reuse.pretrain_updates": 0}
        student = train(tmp_path / tag, tasks=TASKS[:1], settings=settings)
        assert student["tasks"]["source"].tolist() == ["lesson"]
        weights = []
        for policy in (student.policy(trust=True), run.policy(trust=True, tag=tag)):
            policy.set_task(TASKS[0])
            weights.append(policy.learner.get_weights())
        assert all(np.array_equal(weights[0][part], weights[1][part]) for part in weights[1])
        found[tag] = weights[0]
    best, latest = found["best"], found["latest"]
    assert not all(np.array_equal(best[part], latest[part]) for part in best)


def test_the_best_networks_are_those_of_right_after_the_tasks(out: Path) -> None:
    run = train(out, steps=1500, settings=FORGETS)
    first = run.score[0, 1, 0].mean(), run.score[0, 2, 0].mean()  # the first task, then and now
    assert first == (2.0, 0.0)  # one network for two opposite ways
    for tag, score in (("latest", 0.0), ("best", 2.0)):
        found = canal_mpi.evaluate(run, tasks=TASKS[:1], episodes=2, tag=tag)
        assert found["return"].mean() == score
        found = canal_mpi.evaluate(run, tasks=TASKS[1:], episodes=2, tag=tag)
        assert found["return"].mean() == 2.0
    write_report([out], experts=())
    page = (out / "report.html").read_text()
    assert "1 → 0." in page and "canal-mpi evaluate RUN --tag best" in page
    start = np.eye(small.PLACES, dtype=np.float32)[0]
    policy = run.policy(trust=True, tag="best")
    assert [policy.act(task, start) for task in (*TASKS, *TASKS)] == [1, 0, 1, 0]
    with pytest.raises(UsageError, match="unknown tag 'bets'; did you mean 'best'"):
        run.policy(trust=True, tag="bets")
    (out / "checkpoints/agent-0/best.h5").unlink()
    with pytest.raises(UsageError, match="has no best networks"):
        run.policy(trust=True, tag="best")


@pytest.mark.atari
def test_one_game_alone_is_a_job(out: Path) -> None:
    options = ["--steps", "300", "--set", "evaluation.max_steps=20", "-q", "--out", str(out)]
    done = run_command(["canal-mpi", "train", "--tasks", "Pong", *options])
    assert done.code == 0, done.err
    assert canal_mpi.load(out).order.tolist() == [["Pong"]]
