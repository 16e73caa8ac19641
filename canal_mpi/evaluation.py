"""`canal-mpi evaluate` on every rank: pairs of agent and task are spread, scores come together."""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from canal_mpi import config
from canal_mpi.agent.loop import episodes
from canal_mpi.envs import common_spaces, env_maker
from canal_mpi.errors import DamagedData, UsageError, check_name, import_extra
from canal_mpi.games import human_normalised
from canal_mpi.interfaces import (
    TERMINATED,
    TRUNCATED,
    Array,
    Beat,
    Columns,
    Env,
    Progress,
    Step,
)
from canal_mpi.membuf.wire import decode, encode
from canal_mpi.rank.build import make_learner
from canal_mpi.rank.shutdown import Shutdown
from canal_mpi.results import files
from canal_mpi.results.checkpoint import folder_of
from canal_mpi.results.progress import digits, table
from canal_mpi.results.reader import LIMIT, Run, load
from canal_mpi.results.store import AGENT, ROWS_LIMIT, TASK, Column
from canal_mpi.settings import Job
from canal_mpi.state import random_stream, strip_prefix, with_prefix
from canal_mpi.topology import Tag

COLUMNS = {
    "agent": AGENT,
    "task": TASK,
    "episode": Column("<i4", "episode, counted from 0"),
    "return": Column("<f8", "sum of the rewards as the game gives them", "game points"),
    "length": Column("<i8", "steps of the episode", "agent steps"),
}
LEARNER = "learner.h5"  # beside an agent's checkpoints: its newest networks
ZOOM = ["-vf", "scale=iw*2:ih*2:flags=neighbor"]  # of ffmpeg, for pictures as small as Atari's


@dataclass(frozen=True)
class EvaluationRequest:
    """What the user asked for on the command line."""

    run: Path
    agents: Sequence[int] = ()
    tasks: Sequence[str] = ()
    episodes: int = 20
    max_steps: int | None = None
    video: bool = False
    save_steps: bool = False
    out: Path | None = None
    trust: bool = False
    tag: str = "latest"


Pair = tuple[int, str]  # agent, task


def evaluate_rank(request: EvaluationRequest, shutdown: Shutdown) -> Columns:
    """Agree on the pairs, play this rank's part of them, bring the scores together.

    Returns the row of every episode, on rank 0.
    """
    world = shutdown.world
    world.handshake(json.dumps(asdict(request), sort_keys=True, default=str))
    plan = world.from_root(lambda: _plan(request))
    job = config.from_toml(plan["job"])
    run, out = Path(plan["run"]), Path(plan["out"])
    most = request.max_steps or job.evaluation.max_steps
    wanted = replace(job.evaluation, episodes=request.episodes, max_steps=most)
    job = replace(job, evaluation=wanted)
    world.heartbeat.timeout = job.timeout
    agents = sorted({int(agent) for agent, _ in plan["pairs"]})
    here = world.gather_json([a for a in agents if (folder_of(run, a) / LEARNER).exists()])
    shares = world.from_root(lambda: spread(plan["pairs"], list(here.values())))
    mine, beat = shares[world.rank], world.heartbeat.beat
    rows = world.run_on_all(lambda: _play(request, job, run, out, mine, beat))
    messages = world.gather(encode(rows), Tag.ROWS, ROWS_LIMIT)
    parts = [decode(message, ROWS_LIMIT) for message in messages.values()]
    columns = _write(run, out, parts) if world.is_root else {}
    world.finish()
    return columns


def _plan(request: EvaluationRequest) -> dict[str, Any]:
    """What rank 0 works out from the files of the run."""
    run = load(request.run)
    job = job_of(run, request.trust)
    tasks = [task for task in request.tasks if task != "all"] or list(job.tasks)
    for agent in request.agents:
        check_name(f"agent of {run.folder}", str(agent), map(str, run.agents), outside=False)
    for task in tasks:
        check_name(f"task of {run.folder}", task, job.tasks, outside=False)
    out = request.out or run.folder / "evaluations"
    return {
        "job": config.to_toml(job),
        "run": str(run.folder.absolute()),
        "out": f"{out.absolute()}/{datetime.now():%Y%m%d-%H%M%S}",  # how its files begin
        "pairs": [(agent, task) for agent in request.agents or run.agents for task in tasks],
    }


def _play(
    request: EvaluationRequest, job: Job, run: Path, out: Path, pairs: Sequence[Pair], beat: Beat
) -> Columns:
    """This rank's pairs: a row for every episode."""
    policy = cache(lambda agent: Policy(folder_of(run, agent) / LEARNER, job, agent, request.tag))
    found = []
    for agent, task in pairs:
        spaces, learner = policy(agent).spaces, policy(agent).learner
        policy(agent).set_task(task)
        rng = random_stream(job.seed, agent, task, "evaluate-again")
        env = env_maker(job, spaces)(task, "evaluate-again", agent)
        recording = Recording(env, request, Path(f"{out}-agent-{agent}-{files.file_name(task)}"))
        notify = partial(beat, Progress("evaluating", 0, task))
        seen = recording.add if recording.wanted else None
        scores = episodes(env, learner.act, rng, job.evaluation, notify, seen)
        found += [(agent, task.encode(), k, *score) for k, score in enumerate(scores)]
        recording.close()
        env.close()
    return {
        name: np.array([row[k] for row in found], dtype=column.dtype)
        for k, (name, column) in enumerate(COLUMNS.items())
    }


def _write(run: Path, out: Path, parts: list[Columns]) -> Columns:
    """Rank 0: one file with every episode, and the table."""
    columns = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
    order = np.lexsort((columns["episode"], columns["task"], columns["agent"]))
    columns = {name: column[order] for name, column in columns.items()}
    facts = {"description": "Episodes that `canal-mpi evaluate` let agents play.", "run": str(run)}
    about = {f"episodes/{name}": column.attributes for name, column in COLUMNS.items()}
    files.write_arrays(Path(f"{out}.h5"), with_prefix("episodes", columns), facts, about=about)
    rows = [["agent", "task", "episodes", "return", "HNS"]]
    pairs = zip(columns["agent"].tolist(), columns["task"].tolist(), strict=True)
    for agent, task in dict.fromkeys(pairs):
        returns = columns["return"][(columns["agent"] == agent) & (columns["task"] == task)]
        mean, name = float(returns.mean()), task.decode()
        hns = human_normalised(name, mean)
        share = "" if np.isnan(hns) else f"{hns:.1%}"
        rows.append([str(agent), name, str(len(returns)), digits(mean, 1), share])
    print("\n".join([*table(rows), f"{out}.h5"]), flush=True)
    return columns


class Recording:
    """What is kept of an evaluation besides its scores: a video of the first episode, every step.

    Both are of the first environment.
    """

    def __init__(self, env: Env, request: EvaluationRequest, path: Path) -> None:
        self.path, self.wanted = path, request.video or request.save_steps
        self._episode, self._save_steps = 0, request.save_steps
        self._steps: dict[str, list[Array]] = {}
        self._game: Any = getattr(env, "games", [None])[0]
        self._rate = self._game.film() if request.video else 0
        self._video: Any = None

    def add(self, actions: Array, step: Step) -> None:
        """One more step."""
        if self._rate and not self._episode:
            picture = self._game.picture()
            self._video = self._video or self._open(picture)
            self._video.append_data(picture)
        if self._save_steps:
            row = {"episode": np.int32(self._episode), "action": actions[0]}
            row |= {"reward": step.reward[0], "flags": step.flags[0], "after": step.obs[0].copy()}
            for name, value in row.items():
                self._steps.setdefault(name, []).append(np.asarray(value))
        self._episode += bool(step.flags[0] & (TERMINATED | TRUNCATED))

    def _open(self, picture: Array) -> Any:
        imageio = import_extra("imageio", "video")
        import_extra("imageio_ffmpeg", "video")  # imageio alone can't write MP4
        self.path.parent.mkdir(parents=True, exist_ok=True)
        options = {"fps": self._rate, "macro_block_size": 2}
        options |= {"output_params": ZOOM if len(picture) < 300 else []}
        return imageio.get_writer(self.path.with_suffix(".mp4"), format="FFMPEG", **options)

    def close(self) -> None:
        """Write what was kept."""
        if self._video:
            self._video.close()
        if self._steps:
            columns = {name: np.stack(values) for name, values in self._steps.items()}
            files.write_arrays(self.path.with_suffix(".h5"), columns, {"kind": "steps"})


def spread(pairs: Sequence[Pair], having: Sequence[Sequence[int]]) -> list[list[Pair]]:
    """Pairs for each rank, from the agents whose checkpoints each rank can read."""
    shares: list[list[Pair]] = [[] for _ in having]
    for pair in pairs:
        able = [rank for rank, agents in enumerate(having) if pair[0] in agents]
        if not able:
            raise UsageError(
                f"no rank finds checkpoints/agent-{pair[0]}/learner.h5: agent {pair[0]} has "
                "finished no task yet, or its host is not part of this world."
            )
        min((shares[rank] for rank in able), key=len).append(pair)
    return shares


class Policy:
    """Acts greedily for any task of a run, as an agent's learner.h5 and, maybe, best.h5 have it."""

    def __init__(self, path: Path, job: Job, agent: int, tag: str) -> None:
        check_name("tag", tag, ("best", "latest"), outside=False)
        self.agent, self.job, self._best = agent, job, Columns()  # instead of newest networks
        if tag == "best":
            if not (best := path.with_name("best.h5")).is_file():
                words = "has no best networks: the run evaluated none, or ended early."
                raise UsageError(f"{path.parent} {words}")
            self._best = files.read_finite(best, LIMIT)
        self.spaces = common_spaces(job.tasks, job.task)
        self.learner = make_learner(job, agent, self.spaces, job.tasks[0])
        arrays = files.read_finite(path, LIMIT)
        if not arrays:
            raise DamagedData(f"{path} holds no network.")
        self._latest, self._task, self._actions = deepcopy(arrays) if self._best else {}, "", 0
        try:
            self.learner.load_state_dict(arrays)
        except (DamagedData, TypeError, KeyError, ValueError, RuntimeError, IndexError) as error:
            raise DamagedData(f"{path} does not fit the run's job: {error}.") from error

    def __repr__(self) -> str:
        """One line."""
        return f"Policy(agent {self.agent} of job {self.job.name}: {', '.join(self.job.tasks)})"

    def act(self, task: str, observation: Array) -> int:
        """The action for one observation of a task, given as the environment gives it."""
        check_name("task of the run", task, self.job.tasks, outside=False)
        flat = np.asarray(observation, dtype=self.spaces.dtype).reshape(-1)
        full = np.zeros(self.spaces.shape, dtype=self.spaces.dtype)
        full.reshape(-1)[: flat.size] = flat
        self.set_task(task)
        return int(self.learner.act(full[None])[0]) % self._actions

    def set_task(self, task: str) -> None:
        """Act for this task from now on."""
        if task == self._task:
            return
        if self._latest:
            self.learner.load_state_dict(self._latest)
        self.learner.set_task(task)
        if network := strip_prefix(task, self._best):
            self.learner.set_weights(network)
        self._task, self._actions = task, common_spaces([task], self.job.task).actions


def job_of(run: Run, trust: bool) -> Job:
    """The job of a run; modules that it names are not imported unless it is trusted."""
    job = config.from_toml(str(run.attributes["job"]))
    if job.modules and not trust:
        raise UsageError(
            f"{run.folder} wants to import {', '.join(job.modules)}; "
            "--trust (trust=True) allows that, for runs of your own."
        )
    return job


def load_policy(run: Run, agent: int, trust: bool = False, tag: str = "latest") -> Policy:
    """An agent of a run, able to act."""
    check_name(f"agent of {run.folder}", str(agent), map(str, run.agents), outside=False)
    job = job_of(run, trust)
    path = folder_of(run.folder, agent) / LEARNER
    if not path.exists():
        raise UsageError(f"{path} is missing: agent {agent} has finished no task on this host.")
    return Policy(path, job, agent, tag)
