"""What rank 0 works out before anything starts, and sends to the others."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from time import thread_time
from typing import Any, NamedTuple

import numpy as np

from canal_mpi import config
from canal_mpi.config import on_host
from canal_mpi.errors import StorageError, UsageError
from canal_mpi.games import order_of
from canal_mpi.interfaces import Progress
from canal_mpi.results.files import NAME, file_name
from canal_mpi.settings import Job, Layer
from canal_mpi.topology.graphs import edges

SLOWEST = 0.05  # speed factor of an emulated host

# Seconds on a core that takes PRODUCT, with the console's RAM and the default network
PRODUCT = 47e-6  # two matrices of 128 × 128
STEP = 800e-6  # an agent step without learning
UPDATE = 550e-6  # an update with a batch of 128
FIXED = 0.4  # part of it that does not depend on the batch
DISTILL = 0.75  # imitating until it no longer improves, against the most updates that are allowed
EVALUATED = 700e-6  # a step of an evaluation
EPISODE = 1000  # steps of an evaluation episode
START = 10.0  # until all ranks are there
PIXELS_STEP, PIXELS_UPDATE = 1.5e-3, 55e-3  # with the cnn and a batch of 32, roughly


@dataclass(frozen=True)
class Request:
    """What the user asked for on the command line."""

    flags: Layer = field(default_factory=dict)
    job_file: str | None = None
    out: str | None = None
    name: str | None = None
    force: bool = False
    agent: int | None = None
    env_servers: int = 0
    verbosity: int = 0
    resume: str | None = None
    max_time: float | None = None  # seconds
    ft: bool = False  # go on without ranks that die


class Device(NamedTuple):
    """The host that a rank runs on, or emulates, and the part of full speed it is held to."""

    host: str
    speed: float = 1.0


@dataclass(frozen=True)
class Plan:
    """What every rank has to know, worked out by rank 0."""

    job: Job
    folder: Path
    run_id: str
    first_agent: int
    orders: list[list[str]]
    edges: list[tuple[int, int]]

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON can carry it."""
        return vars(self) | {"job": config.to_toml(self.job), "folder": str(self.folder)}

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> "Plan":
        """The plan that rank 0 sent."""
        job, folder = config.from_toml(facts["job"]), Path(facts["folder"])
        pairs = [(int(a), int(b)) for a, b in facts["edges"]]
        return cls(**facts | {"job": job, "folder": folder, "edges": pairs})

    def peers(self, agent: int, round_: int, task: str) -> list[int]:
        """Neighbours, both ways, that learn this task in this round too."""
        both = {(a, b) for a, b in self.edges if (b, a) in self.edges}
        same = [k for k, order in enumerate(self.orders) if order[round_ - 1] == task]
        return [k for k in same if (agent, k) in both]


def make_plan(request: Request, hosts: Sequence[str], size: int) -> Plan:
    """Read files, check names, decide who does what; on rank 0 only. One host per agent.

    `size` counts env servers too.
    """
    from canal_mpi import envs

    job = envs.named(config.resolve(request.flags, request.job_file))
    first = _first_agent(request, len(hosts))
    if job.emulate and len(job.emulate) != size:
        raise UsageError(
            f"the job emulates hosts on {len(job.emulate)} ranks, but the world has {size}: "
            f"start it with mpirun -np {len(job.emulate)}."
        )
    if job.init:
        if not list(Path(job.init).glob("checkpoints/agent-*/learner.h5")):
            raise UsageError(f"--init {job.init} holds no agents; name the folder of a run.")
        job = replace(job, init=str(Path(job.init).absolute()))
    if job.share.lessons:
        _check_lessons(job)
        there = str(Path(job.share.lessons).absolute())  # a resume may start elsewhere
        job = replace(job, share=replace(job.share, lessons=there))
    run_id = datetime.now().strftime("%Y%m%d-%H%M%S")
    return plan_of(job, _folder(request, job), run_id, first, hosts)


def plan_of(job: Job, folder: Path, run_id: str, first: int, hosts: Sequence[str]) -> Plan:
    """Who learns what and hears whom in a job, checked."""
    orders = orders_of(job, first, len(hosts))
    labels = [device.host for device in devices(job, hosts)]
    found = edges(job.share.topology, len(labels), job.seed, labels)
    heard = [] if job.share.policy == "none" else sorted(found)
    plan = Plan(job, folder, run_id, first, orders, heard)
    check_equal_envs(job, labels)
    return plan


def orders_of(job: Job, first: int, size: int) -> list[list[str]]:
    """The tasks of every agent."""
    orders = [list(order_of(job.order, job.tasks, first + k, job.seed)) for k in range(size)]
    rounds = job.train.rounds or len(job.tasks)
    return [order[:rounds] for order in orders]


def devices(job: Job, hosts: Sequence[str]) -> list[Device]:
    """What ranks on these hosts run on, or emulate (`job.emulate`): agents first."""
    if job.emulate and len(set(hosts)) > 1:
        raise UsageError(
            f"hosts are emulated on one machine; these ranks are on {len(set(hosts))} hosts: "
            "leave out --emulate, or the hostfile of mpirun."
        )
    return [_device(job, text) for text in job.emulate or hosts][: len(hosts)]


def _device(job: Job, text: str) -> Device:
    """A host with the speed behind its @, or the one that the job's rules give it."""
    name, at, factor = text.partition("@")
    try:
        speed = float(factor) if at else on_host(job, name).train.speed
    except ValueError:
        speed = 0.0
    if job.emulate and not (NAME.fullmatch(name) and SLOWEST <= speed <= 1):
        raise UsageError(
            f"emulate: '{text}': expected a host, possibly with a speed from {SLOWEST} to 1, as in "
            "nano-1 or nano-1@0.25."
        )
    return Device(name, speed)


def _check_lessons(job: Job) -> None:
    from canal_mpi.results.checkpoint import check_folder

    if job.share.policy == "none":
        raise UsageError("--lessons and --share none contradict each other; leave one out.")
    check_folder(job.share.lessons)


def check_env_servers(number: int, size: int) -> None:
    """UsageError where a world of this size can't give so many ranks to environments."""
    if number < 0:
        raise UsageError(f"--env-servers {number}: expected 0 or more.")
    if number and number >= size:
        raise UsageError(
            f"--env-servers {number} leaves no rank for an agent: the world has {size} "
            f"rank{'s' * (size > 1)}; start more with mpirun -np."
        )


def _first_agent(request: Request, size: int) -> int:
    agent = request.agent
    if agent is not None and size > 1:
        raise UsageError(
            f"--agent {agent} is for one rank; this world has {size}: "
            "leave it out, or start without mpirun."
        )
    if agent is not None and agent < 0:
        raise UsageError(f"--agent {agent}: agents count from 0.")
    return agent or 0


def _folder(request: Request, job: Job) -> Path:
    if request.out and request.name:
        raise UsageError("--out and --name both say where the run goes; give one of them.")
    if request.out == "" or request.name == "":
        raise UsageError("--out and --name can't be empty.")
    if request.name and not NAME.fullmatch(request.name):
        raise UsageError(f"--name {request.name}: use letters, digits, dots, dashes, at most 64.")
    name = request.name or f"{file_name(job.name)[:40]}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        return Path(request.out or f"runs/{name}").absolute()
    except OSError as error:
        raise StorageError(f"the current directory can't be used: {error.strerror}.") from error


def check_equal_envs(job: Job, hosts: Sequence[str]) -> None:
    """Refuse agents that share inside a task and take a different number of steps at a time."""
    envs = {host: on_host(job, host).train.num_envs for host in hosts}
    if job.row_exchange.save_interval and len(set(envs.values())) > 1:
        words = ", ".join(f"{number} on {host}" for host, number in envs.items())
        raise UsageError(
            "agents that share inside a task (row_exchange) need the same number of environments; "
            f"the rules for hosts give {words}."
        )


class Workload:
    """Roughly the seconds that every agent's rounds and its evaluation take on a core of its own.

    Once a run is on its way only the ratios of the speeds count.
    """

    def __init__(self, plan: Plan) -> None:
        job, learnt, (step, update) = plan.job, set[str](), step_seconds(plan.job)
        self.rounds = np.zeros((len(plan.orders), len(plan.orders[0])))  # [agent, round - 1]
        for r, tasks in enumerate(zip(*plan.orders, strict=True)):
            play = job.train.steps * (step + job.learn.updates_per_step * update)
            self.rounds[:, r] = [_taught(job, step, update) if t in learnt else play for t in tasks]
            learnt.update(tasks if plan.edges else ())
        count = self.rounds.shape[1]
        final, all_ = count, (count + 1) * len(job.tasks)
        networks = {"final": final, "after": 2 * final, "all": all_}[job.evaluation.tasks]
        steps = job.evaluation.episodes * min(job.evaluation.max_steps, EPISODE)
        self.evaluation = networks * steps * EVALUATED * step / STEP
        kind = (job.learn.network, job.task.obs, job.learn.device)
        usual = kind[:2] == ("mlp", "ram") or kind == ("cnn", "pixels", "cpu")
        self.known = usual and job.learn.algorithm == "dqn"  # whether the speeds above hold

    def seconds(self, cores: float, speeds: Sequence[float]) -> float:
        """How long it takes on so many cores, for agents at these parts of full speed."""
        slowed = self.rounds / np.array(speeds)[:, None]
        rounds = np.maximum(slowed.max(axis=0), self.rounds.sum(axis=0) / cores).sum()
        agents = len(self.rounds)
        return START + float(rounds) + self.evaluation * max(1 / min(speeds), agents / cores)

    def done(self, agents: Sequence[Progress]) -> float:
        """The fraction that living agents have behind them."""
        done = total = 0.0
        for rounds, p in zip(self.rounds, agents, strict=True):
            if p.phase != "died":
                total += rounds.sum() + self.evaluation
                part, evaluates = p.step / max(p.steps, 1), p.phase == "evaluating"
                over = len(rounds) if evaluates else max(p.round - 1, 0)
                done += rounds[:over].sum() + part * [*rounds, self.evaluation][over]
        return done / total if total else 0.0


def step_seconds(job: Job) -> tuple[float, float]:
    """Seconds of a step without learning; of an update, with those on old tasks beside it."""
    old = job.rehearsal.ratio if job.rehearsal.rows else 0.0
    if job.learn.network == "cnn":
        return PIXELS_STEP, PIXELS_UPDATE * job.learn.batch_size / 32 / (1 - old)
    sides = (128 * job.task.frame_stack, *job.learn.widths, 18)
    work = sum(a * b for a, b in pairwise(sides)) * job.learn.batch_size
    usual = (128 * 128 + 128 * 128 + 128 * 18) * 128
    return STEP, UPDATE * (FIXED + (1 - FIXED) * work / usual) / (1 - old)


def core_speed() -> float:
    """How fast a core here is, against the one that the seconds above are from; takes 20 ms.

    Other ranks work meanwhile: cores that share a unit are as slow as they will be.
    """
    matrix, took = np.ones((128, 128), dtype=np.float32), []
    for _ in range(20):
        start = thread_time()  # others may have the core meanwhile
        for _ in range(20):
            matrix @ matrix
        took.append((thread_time() - start) / 20)
    return PRODUCT / float(np.median(took))


def _taught(job: Job, step: float, update: float) -> float:
    """Seconds of learning a task from a lesson."""
    reuse, steps = job.reuse, job.train.steps
    own = reuse.steps * steps if reuse.mode != "replay" else 0.0
    teaches = reuse.mode in ("distill", "adopt")
    updates = DISTILL * reuse.pretrain_updates * steps if teaches else steps * (own == 0)
    return own * (step + job.learn.updates_per_step * update) + updates * update
