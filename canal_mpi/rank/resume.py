"""Resuming a run: which checkpoints there are, which all agents can go back to.

Agents inside a round don't depend on each other once its lessons are fetched, so an agent may go
on from any of its checkpoints of a round if every other agent has one of that round too.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from canal_mpi import config
from canal_mpi.errors import DamagedData, RanksDiffer, StorageError, UsageError
from canal_mpi.interfaces import Columns
from canal_mpi.rank.plan import Plan, Request, orders_of, plan_of
from canal_mpi.rank.shutdown import CommonError
from canal_mpi.rank.world import World
from canal_mpi.results.checkpoint import Found, Mark, folder_of, survey, tidy
from canal_mpi.results.files import (
    RunDirectory,
    check_image,
    checked_image,
    parse_arrays,
    parse_attributes,
    read_bytes,
    write_whole,
)
from canal_mpi.results.progress import events, whole
from canal_mpi.settings import Job
from canal_mpi.topology import Tag

FILE_LIMIT = 1 << 36
MAY_CHANGE = (
    *("train.steps", "train.rounds", "train.speed", "tasks", "timeout", "hosts"),
    *("checkpoint.", "report"),
)


Reports = dict[int, dict[str, Any]]  # what one rank of each host finds there, by rank


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on; round 0 is the very beginning."""

    run_id: str
    job: str
    agents: int
    first_agent: int
    round: int = 0
    marks: dict[int, Mark] = field(default_factory=dict)  # by agent
    holders: dict[int, int] = field(default_factory=dict)  # rank that has an agent's file
    damaged: list[str] = field(default_factory=list)
    finished: bool = False

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> "ResumePoint":
        """What rank 0 chose and sent as JSON."""
        marks = {int(agent): Mark(**mark) for agent, mark in facts["marks"].items()}
        holders = {int(agent): rank for agent, rank in facts["holders"].items()}
        return cls(**facts | {"marks": marks, "holders": holders})

    def nothing_is_left(self, plan: Plan) -> bool:
        """Whether the run is finished, and stays so with the job as it is now."""
        before = orders_of(config.from_toml(self.job), self.first_agent, self.agents)
        return self.finished and before == plan.orders


def open_run(world: World, request: Request) -> tuple[RunDirectory, ResumePoint]:
    """Take over the run that is to go on, and agree where all of its agents can."""
    folder = Path(world.from_root(lambda: str(Path(request.resume or "").absolute())))
    directory = RunDirectory(folder)
    world.run_on_all(lambda: directory.reopen() if world.is_root else None)
    reports = _reports(world, folder)
    try:
        facts = world.from_root(lambda: asdict(choose(reports, folder, world.hosts)))
    except CommonError:
        if world.is_root:
            directory.give_back()
        raise
    return directory, ResumePoint.from_dict(facts)


def go_back(world: World, plan: Plan) -> ResumePoint:
    """Agree on the newest round that all living agents have; on the beginning if there is none."""
    reports = _reports(world, plan.folder)
    facts = (plan.run_id, config.to_toml(plan.job), len(plan.orders), plan.first_agent)

    def chosen() -> dict[str, Any]:
        found = [pair for pair in _found(reports) if pair[1].run_id == plan.run_id]
        newest = _newest_common(found, world.living_agents, plan.job.share.free, world.hosts)
        return asdict(ResumePoint(*facts, *newest, _all(reports, "damaged")))

    return ResumePoint.from_dict(world.from_root(chosen))


def clean_up(world: World, folder: Path, point: ResumePoint) -> None:
    """Remove what is newer than the point, so that no later resume can take it for newer."""
    if world.speaks_for_host():
        agents = range(point.first_agent, point.first_agent + point.agents)
        tidy(folder, point.marks or dict.fromkeys(agents, Mark(0, 0)))


def _reports(world: World, folder: Path) -> Reports:
    return world.gather_json(_report(folder) if world.speaks_for_host() else {})


def _report(folder: Path) -> dict[str, Any]:
    """Checkpoints and dead agents here, and how run.h5 says that the run began, if it is whole."""
    found, damaged = survey(folder)
    deaths = (whole(e.get("agent")) for e in events(folder) if e.get("event") == "death")
    dead = [agent for agent in deaths if agent >= 0]  # not env servers
    here = {"files": [asdict(one) for one in found], "damaged": damaged, "dead": dead}
    try:
        about = parse_attributes(checked_image(folder / "run.h5"), "run.h5")
        facts = [about["run_id"], about["job"], int(about["agents"]), int(about["first_agent"])]
        return here | {"run": facts, "finished": about["status"] == "finished"}
    except (StorageError, DamagedData, KeyError):
        return here


def _found(reports: Reports) -> list[tuple[int, Found]]:
    """Every whole checkpoint, with the rank that found it."""
    return [
        (rank, Found(**file | {"mark": Mark(**file["mark"])}))
        for rank, report in reports.items()
        for file in report.get("files", [])
    ]


def _all(reports: Reports, kind: str) -> list[Any]:
    return [item for report in reports.values() for item in report.get(kind, [])]


def choose(reports: Reports, folder: Path, hosts: Sequence[str]) -> ResumePoint:
    """The newest round of the newest run that all of its agents have."""
    found, damaged = _found(reports), _all(reports, "damaged")
    begun = [report["run"] for report in reports.values() if report.get("run")]
    if dead := set(_all(reports, "dead")):
        raise UsageError(
            f"--resume {folder}: this run went on without agent "
            f"{', '.join(map(str, sorted(dead)))}, which died; it can't be resumed. "
            f"Start a new one; --lessons {folder} gives it what was learnt."
        )
    if not found and not begun:
        also = f" ({damaged[0]})" if damaged else ""
        raise UsageError(f"--resume {folder}: no run with a whole checkpoint is there{also}.")
    if not found:
        over = any(report.get("finished") for report in reports.values())
        run_id, job, size, first = begun[0]
        return ResumePoint(run_id, job, size, first, damaged=damaged, finished=over)
    newest = max((one for _, one in found), key=lambda one: (one.run_id, one.mark))
    found = [(rank, one) for rank, one in found if one.run_id == newest.run_id]
    agents = range(newest.first_agent, newest.first_agent + newest.agents)
    common = _newest_common(found, agents, config.from_toml(newest.job).share.free, hosts)
    facts = (newest.run_id, newest.job, newest.agents, newest.first_agent)
    done = any(r.get("finished") and r["run"][:2] == [*facts[:2]] for r in reports.values())
    return ResumePoint(*facts, *common, damaged, done)


def _newest_common(
    found: list[tuple[int, Found]], agents: Sequence[int], free: bool, hosts: Sequence[str]
) -> tuple[int, dict[int, Mark], dict[int, int]]:
    """The newest round that all agents have, each one's newest checkpoint of it, who holds it."""
    rounds = {a: {one.mark.round for _, one in found if one.agent == a} for a in agents}
    common = set.intersection(*rounds.values())
    if free and all(rounds.values()):
        common = set().union(*rounds.values())  # no agent needs the others' rounds
    if not common:
        return 0, {}, {}
    marks, holders = {}, {}
    for agent in agents:
        rank = agent if len(agents) > 1 else 0
        home = hosts[rank] if rank < len(hosts) else ""
        newest = max(common & rounds[agent])
        here = [f for f in found if f[1].agent == agent and f[1].mark.round == newest]
        holders[agent], best = max(here, key=lambda f: (f[1].mark, hosts[f[0]] == home))
        marks[agent] = best.mark
    return max(common), marks, holders


def resumed_plan(request: Request, point: ResumePoint, hosts: Sequence[str]) -> Plan:
    """The plan of the run as it was, with the changes that are allowed; on rank 0 only."""
    from canal_mpi import envs

    folder, size = Path(request.resume or "").absolute(), len(hosts)
    if size != point.agents:
        start = f"mpirun -np {point.agents} " if point.agents > 1 else ""
        raise RanksDiffer(
            f"{folder} is a run of {point.agents} agents; this world has {size}: "
            f"{start}canal-mpi train --resume {request.resume}"
        )
    old = config.from_toml(point.job)
    new = envs.named(config.changed(old, request.flags))
    _check_changes(old, new)
    plan = plan_of(new, folder, point.run_id, point.first_agent, hosts)
    if point.finished and not point.round and not point.nothing_is_left(plan):
        raise UsageError(
            f"{folder} is finished and kept no checkpoint to go on from (checkpoint.keep=true "
            f"keeps them). Start a new run; --lessons {folder} gives it what was learnt."
        )
    for before, after in zip(orders_of(old, point.first_agent, size), plan.orders, strict=True):
        begun = before[: point.round]
        if after[: point.round] != begun:
            raise RanksDiffer(
                f"the tasks of an agent would begin with {', '.join(after[: point.round])}; "
                f"it has learnt {', '.join(begun)}. Add tasks at the end, or start a new run."
            )
    return plan


def _check_changes(old: Job, new: Job) -> None:
    changes = config.differences(old, new)
    odd = {key: pair for key, pair in changes.items() if not key.startswith(MAY_CHANGE)}
    if "train.steps" in changes and new.train.steps < old.train.steps:
        odd["train.steps"] = changes["train.steps"]
    if set(old.tasks) - set(new.tasks):
        odd["tasks"] = changes["tasks"]
    if odd:
        lines = [f"{key}: {before!r} before, {after!r} now" for key, (before, after) in odd.items()]
        raise RanksDiffer(
            f"the job has changed: {'; '.join(lines)}. A resumed run may get more steps, tasks "
            "and rounds, another timeout, other checkpoint settings; else start a new run."
        )


def fetch_checkpoint(world: World, folder: Path, point: ResumePoint) -> Columns:
    """This agent's checkpoint, from its own disk or from the host that has it."""
    data = send_checkpoints(world, folder, point)
    where = f"{folder_of(folder, world.agent)}/{point.marks[world.agent].file}"
    check_image(data, where)
    return parse_arrays(data, where)


def send_checkpoints(world: World, folder: Path, point: ResumePoint) -> bytes:
    """Send checkpoints of this host to agents that are elsewhere now; gives this agent its own."""
    mine, data = -1 if world.is_env_server else world.agent, b""
    for agent, mark in point.marks.items():
        rank, holder = agent - point.first_agent, point.holders[agent]
        path = folder_of(folder, agent) / mark.file
        if world.hosts[rank] == world.hosts[holder]:
            data = read_bytes(path) if agent == mine else data
        elif world.rank == holder:
            world.polled.post(read_bytes(path), rank, Tag.FILE)
            world.polled.settle("sending a checkpoint")
        elif agent == mine:
            data = bytes(
                world.polled.collect(holder, Tag.FILE, FILE_LIMIT, "receiving a checkpoint")
            )
            check_image(data, path.name)
            write_whole(path, data)
    return data


def check_num_envs(state: Columns, num_envs: int, agent: int, host: str) -> None:
    """Refuse to resume with another number of environments than the agent was saved with."""
    saved = len(state["own/cursor"]) if "own/cursor" in state else num_envs
    if saved != num_envs:
        raise RanksDiffer(
            f"agent {agent} was saved with {saved} environments and would have {num_envs} on "
            f"{host}: --set hosts.{host}.envs={saved}, or bring it back to such a host."
        )
