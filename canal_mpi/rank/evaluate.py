"""`canal-mpi evaluate` on every rank: pairs of agent and task are spread, scores come together."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from canal_mpi import config, seeding
from canal_mpi.columns import decode, encode
from canal_mpi.errors import UsageError
from canal_mpi.exam import episodes
from canal_mpi.games import human_normalised
from canal_mpi.job import Job
from canal_mpi.pick import suggestion
from canal_mpi.rank import build
from canal_mpi.rank.ending import Stopping
from canal_mpi.rank.policy import Policy, checkpoint, job_of, policy_from
from canal_mpi.rank.roles import conduct
from canal_mpi.rank.world import ROWS, World
from canal_mpi.results.files import file_name, write_whole
from canal_mpi.results.film import Film
from canal_mpi.results.hdf5 import image, write_arrays, write_dataset
from canal_mpi.results.reading import load
from canal_mpi.schema import ROWS_LIMIT
from canal_mpi.show import digits
from canal_mpi.types import CUT, ENDED, Array, Columns, Env, Progress, Step

ABOUT = {
    "agent": ("agent, counted from 0", ""),
    "task": ("task", ""),
    "episode": ("episode, counted from 0", ""),
    "return": ("sum of the rewards as the game gives them", "game points"),
    "length": ("steps of the episode", "agent steps"),
}


@dataclass(frozen=True)
class Wish:
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


Pair = tuple[int, str]


def evaluate(wish: Wish) -> int:
    """The whole program on one rank; returns its exit code."""
    stopping = Stopping(World())
    return conduct(stopping, Evaluation(stopping.world, wish).go)


class Evaluation:
    """One evaluation of a run, from the handshake to the table."""

    def __init__(self, world: World, wish: Wish) -> None:
        self.world, self.wish = world, wish
        self._policies: dict[int, Policy] = {}

    def go(self) -> None:
        """Agree on the pairs, play this rank's part of them, bring the scores together."""
        world = self.world
        world.handshake(json.dumps(asdict(self.wish), sort_keys=True, default=str))
        plan = json.loads(world.from_root(self._plan))
        self.job, self.folder = config.from_toml(plan["job"]), Path(plan["folder"])
        self.out, self.stamp = Path(plan["out"]), str(plan["stamp"])
        world.watch.timeout = self.job.timeout
        pairs = [(int(agent), str(task)) for agent, task in plan["pairs"]]
        mine = self._spread(pairs)
        rows = world.together(lambda: self._play(mine))
        messages = world.gather(encode(rows), ROWS, ROWS_LIMIT)
        if world.leads:
            self._write([decode(message, ROWS_LIMIT) for message in messages.values()])
        world.finish()

    def _plan(self) -> bytes:
        """What rank 0 works out from the files of the run."""
        wish, run = self.wish, load(self.wish.run)
        job = job_of(run, wish.trust)
        odd = [agent for agent in wish.agents if agent not in run.agents]
        if odd:
            known = ", ".join(map(str, run.agents))
            raise UsageError(f"{run.folder} has no agent {odd[0]}; its agents: {known}.")
        tasks = [task for task in wish.tasks if task != "all"] or list(job.tasks)
        for task in tasks:
            if task not in job.tasks:
                hint = suggestion(task, job.tasks) or f"; its tasks: {', '.join(job.tasks)}."
                raise UsageError(f"{run.folder} has no task '{task}'{hint}")
        pairs = [(agent, task) for agent in wish.agents or run.agents for task in tasks]
        facts = {
            "job": config.to_toml(job),
            "folder": str(run.folder.absolute()),
            "out": str((wish.out or run.folder / "evaluations").absolute()),
            "stamp": datetime.now().strftime("%Y%m%d-%H%M%S"),
            "pairs": pairs,
        }
        return json.dumps(facts).encode()

    def _spread(self, pairs: list[Pair]) -> list[Pair]:
        """This rank's pairs: each goes to the least busy rank whose host has the checkpoint."""
        agents = sorted({agent for agent, _ in pairs})
        here = [agent for agent in agents if checkpoint(self.folder, agent).is_file()]
        answers = self.world.gather(json.dumps(here).encode())
        shares = self.world.from_root(
            lambda: json.dumps(
                spread(pairs, [json.loads(words) for words in answers.values()])
            ).encode()
        )
        return [(int(a), str(t)) for a, t in json.loads(shares)[self.world.rank]]

    def _play(self, pairs: list[Pair]) -> Columns:
        found: list[tuple[int, str, int, float, int]] = []
        for agent, task in pairs:
            exam = self._examine(agent, task)
            found += [(agent, task, k, total, length) for k, (total, length) in enumerate(exam)]
        names = np.array([task.encode() for _, task, *_ in found], dtype="S64")
        return {
            "agent": np.array([row[0] for row in found], dtype="<i4"),
            "task": names,
            "episode": np.array([row[2] for row in found], dtype="<i4"),
            "return": np.array([row[3] for row in found], dtype="<f8"),
            "length": np.array([row[4] for row in found], dtype="<i8"),
        }

    def _examine(self, agent: int, task: str) -> list[tuple[float, int]]:
        if agent not in self._policies:
            path = checkpoint(self.folder, agent)
            self._policies[agent] = policy_from(path, self.job, agent)
        policy, world = self._policies[agent], self.world
        policy.learner.begin(task)
        job = self._settings()
        rng = seeding.stream(job.seed, agent, task, "evaluate-again")
        env = build.env_maker(job, policy.spaces)(task, "evaluate-again", agent)
        progress = Progress("evaluating", 0, task)
        notes = Notes(env, self.wish, self.out / f"{self.stamp}-agent-{agent}-{file_name(task)}")
        settings = job.evaluation
        exam = episodes(
            env,
            policy.learner.act,
            rng,
            settings,
            lambda: world.watch.beat(progress),
            notes.seen if notes.wanted else None,
        )
        notes.close()
        env.close()
        return exam

    def _settings(self) -> Job:
        most = self.wish.max_steps or self.job.evaluation.max_steps
        wanted = replace(self.job.evaluation, episodes=self.wish.episodes, max_steps=most)
        return replace(self.job, evaluation=wanted)

    def _write(self, parts: list[Columns]) -> None:
        """Rank 0: one file with every episode, and the table."""
        columns = {name: np.concatenate([part[name] for part in parts]) for name in ABOUT}
        order = np.lexsort((columns["episode"], columns["task"], columns["agent"]))
        columns = {name: column[order] for name, column in columns.items()}
        path = self.out / f"{self.stamp}.h5"

        def fill(file: Any) -> None:
            file.attrs["description"] = "Episodes that `canal-mpi evaluate` let agents play."
            file.attrs["run"] = str(self.folder)
            for name, column in columns.items():
                about, unit = ABOUT[name]
                marks: dict[str, Any] = {"description": about} | ({"unit": unit} if unit else {})
                write_dataset(file.require_group("episodes"), name, column, **marks)

        write_whole(path, image(fill))
        print("\n".join([*score_lines(columns), str(path)]), flush=True)


class Notes:
    """What is kept of an evaluation besides its scores: a film, or every step."""

    def __init__(self, env: Env, wish: Wish, path: Path) -> None:
        self.path, self.wanted = path, wish.video or wish.save_steps
        self._total, self._episode = 0.0, 0
        self._steps: dict[str, list[Array]] | None = {} if wish.save_steps else None
        self._game = getattr(env, "games", [None])[0]
        self._film: Film | None = None
        if wish.video:
            if not hasattr(self._game, "picture"):
                raise UsageError("--video films Atari games only; leave it out for other tasks.")
            self._film = Film(path.with_suffix(".mp4"))

    def seen(self, actions: Array, step: Step) -> None:
        """One step of the first environment."""
        self._total += float(step.reward[0])
        if self._film and not self._episode:
            self._film.add(self._game.picture(), f"return {self._total:g}")
        if self._steps is not None:
            row = {"episode": np.int32(self._episode), "action": actions[0]}
            row |= {"reward": step.reward[0], "flags": step.flags[0], "after": step.obs[0].copy()}
            for name, value in row.items():
                self._steps.setdefault(name, []).append(np.asarray(value))
        if step.flags[0] & (ENDED | CUT):
            self._total, self._episode = 0.0, self._episode + 1

    def close(self) -> None:
        """Write what was kept."""
        if self._film:
            self._film.close()
        if self._steps:
            columns = {name: np.stack(values) for name, values in self._steps.items()}
            write_arrays(self.path.with_suffix(".h5"), columns, {"kind": "steps"})


def spread(pairs: list[Pair], having: list[list[int]]) -> list[list[Pair]]:
    """Pairs for each rank, from the agents whose checkpoints each rank can read."""
    shares: list[list[Pair]] = [[] for _ in having]
    for pair in pairs:
        able = [rank for rank, agents in enumerate(having) if pair[0] in agents]
        if not able:
            raise UsageError(
                f"no rank finds a checkpoint of agent {pair[0]}: it has finished no task yet, or "
                "its host is not part of this world."
            )
        min((shares[rank] for rank in able), key=len).append(pair)
    return shares


def score_lines(columns: Columns) -> list[str]:
    """Mean return and HNS of every pair."""
    lines = [f" agent  task            episodes {'return':>10} {'HNS':>8}"]
    keys = sorted({(int(a), t) for a, t in zip(columns["agent"], columns["task"], strict=True)})
    for agent, task in keys:
        here = (columns["agent"] == agent) & (columns["task"] == task)
        mean, name = float(columns["return"][here].mean()), task.decode()
        hns = human_normalised(name, mean)
        share = "" if np.isnan(hns) else f"{hns:>8.1%}"
        numbers = f"{int(here.sum()):>8} {digits(mean, 1):>10} {share}"
        lines.append(f" {agent:>4}   {name:<15.15} {numbers}".rstrip())
    return lines
