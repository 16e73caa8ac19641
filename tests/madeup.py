"""Made-up runs, written by the real writer: scores by a rule that can be worked out by hand."""

from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path
from typing import Any

from canal_mpi.config import resolve, to_toml
from canal_mpi.results.store import Rows, RunInfo, Store

Score = Callable[[int, int, str], float]  # of an agent after a round on a task; NaN: not evaluated
GAMES = ("Krull", "Alien", "Robotank")


def rising(agent: int, after: int, task: str) -> float:
    """Something that grows with rounds and differs between agents and tasks."""
    return 100.0 * after + 10 * agent + len(task)


def write_run(
    folder: Path,
    tasks: Sequence[str] = GAMES,
    agents: int = 2,
    *,
    score: Score = rising,
    share: bool = True,
    seed: int = 1,
    rounds: int | None = None,
    status: str = "finished",
    steps: int = 1000,
    lesson_steps: int = 200,
    max_steps: int = 3000,
    first: int = 0,
) -> Path:
    """A run of agents that rotate through the tasks; `rounds` of them are over."""
    orders = [[*tasks[k % len(tasks) :], *tasks[: k % len(tasks)]] for k in range(agents)]
    flags: dict[str, Any] = {
        "tasks": list(tasks),
        "train.steps": steps,
        "order": "rotate",
        "seed": seed,
    }
    flags |= {"evaluation.tasks": "all", "evaluation.max_steps": max_steps}
    flags |= {} if share else {"share.policy": "none"}
    job = to_toml(resolve(flags, environ={}))
    edges = [(a, b) for a in range(agents) for b in range(agents) if a != b and share]
    info = RunInfo("20260101-000000", seed, job, tasks, first, orders, edges, {"numpy": "2.4"})
    store, rows = Store(folder / "run.h5", info), Rows()
    done = len(tasks) if rounds is None else rounds
    learnt: dict[str, int] = {}
    for agent in range(agents):
        _agent_row(rows, first + agent)
        _evaluated(rows, first + agent, 0, tasks, score)
    for round_ in range(1, done + 1):
        before = dict(learnt)
        for agent in range(agents):
            task = orders[agent][round_ - 1]
            donor = before.get(task, -1) if share else -1
            played = steps if donor < 0 else lesson_steps
            _round(rows, first + agent, round_, task, donor, score, played)
            _evaluated(rows, first + agent, round_, tasks, score)
            learnt.setdefault(task, first + agent)
    store.append(rows.take(), 0)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.toml").write_text(job)
    store.write(status)
    return folder


def _agent_row(rows: Rows, agent: int) -> None:
    place: dict[str, Any] = {"rank": agent, "host": f"host-{agent % 2}", "machine": "x86_64"}
    rows.add("agents", agent=agent, device="cpu", threads=1, role="agent", speed=1.0, **place)


def _evaluated(rows: Rows, agent: int, after: int, tasks: Sequence[str], score: Score) -> None:
    for task in tasks:
        value = score(agent, after, task)
        for episode in range(2 if value == value else 0):  # one above the mean, one below
            rows.add(
                "evaluation",
                agent=agent,
                after_round=after,
                task=task,
                episode=episode,
                score=value + 1 - 2 * episode,
                length=50,
                seconds=0.0,
            )


def _round(
    rows: Rows, agent: int, round_: int, task: str, donor: int, score: Score, steps: int
) -> None:
    key: dict[str, Any] = {"agent": agent, "round": round_, "task": task}
    for part in (1, 2):
        where: dict[str, Any] = {"episode": part, "step": steps * part // 2, "length": steps // 2}
        rows.add("episodes", **key, **where, **{"return": score(agent, round_, task) * part / 2})
        times: dict[str, Any] = {"env_seconds": 1.0, "learn_seconds": 2.0, "wait_seconds": 0.0}
        turn: dict[str, Any] = {
            "step": 500 * part,
            "loss": 0.1 / part,
            "epsilon": 0.5,
            "return_mean": 1.0,
        }
        rows.add("train", **key, **turn, **times)
    rows.add("curve", **key, env_steps=steps, score=score(agent, round_, task), seconds=1.0)
    rows.add(
        "tasks",
        **key,
        source="env" if donor < 0 else "lesson",
        donors="" if donor < 0 else str(donor),
        env_steps=steps,
        probe_steps=0,
        evaluation_steps=0,
        updates=steps,
        score=score(agent, round_, task),
        seconds=10.0,
        cpu_seconds=8.0,
        core_seconds=0.5,
        env_seconds=2.0,
        learn_seconds=4.0,
        pretrain_seconds=0.0,
        probe_seconds=0.0,
        remember_seconds=0.0,
        wait_seconds=1.0,
        evaluate_seconds=2.0,
        exchange_seconds=0.5,
        save_seconds=0.25,
    )
    if donor >= 0:
        exchanged(rows, round_, donor, agent, task)


def exchanged(
    rows: Rows, round_: int, donor: int, to: int, task: str, kind: str = "lesson", reason: str = ""
) -> None:
    """A row of the ledger."""
    rows.add(
        "exchange",
        kind=kind,
        round=round_,
        donor=donor,
        to=to,
        task=task,
        rows=1000,
        bytes=10_000,
        raw_bytes=134_000,
        seconds=0.1,
        score=nan,
        kl=nan,
        agreement=1.0,
        reason=reason,
        **{"from": donor},
    )
