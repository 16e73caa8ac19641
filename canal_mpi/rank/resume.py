"""Resuming a run: which checkpoints there are, which all agents can go back to.

Agents inside a round don't depend on each other once its lessons are fetched, so an agent may go
on from any of its checkpoints of a round if every other agent has one of that round too.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from canal_mpi import config
from canal_mpi.errors import DamagedData, RanksDiffer, StorageError, UsageError
from canal_mpi.interfaces import Columns
from canal_mpi.launcher import start_command
from canal_mpi.rank.plan import Plan, Request, orders_of, plan_of
from canal_mpi.rank.recover import Fault, gone_agents, left_out
from canal_mpi.rank.shutdown import CommonError
from canal_mpi.rank.world import World
from canal_mpi.results.checkpoint import Found, Mark, folder_of, load_state, survey, tidy
from canal_mpi.results.files import (
    RunDirectory,
    read_attributes,
    read_bytes,
    write_whole,
)
from canal_mpi.results.progress import events
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
    gone: list[Fault] = field(default_factory=list)  # agents that the run goes on without
    past: dict[int, Mark] = field(default_factory=dict)  # their last checkpoints

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> "ResumePoint":
        """What rank 0 chose and sent as JSON."""
        marks, past = (
            {int(agent): Mark(**mark) for agent, mark in facts[name].items()}
            for name in ("marks", "past")
        )
        holders = {int(agent): rank for agent, rank in facts["holders"].items()}
        return cls(**facts | {"marks": marks, "past": past, "holders": holders})

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
    ranks = world.agents
    try:
        agents, gone = world.from_root(lambda: who_is_gone(reports, request, ranks))
        if gone:
            numbers = world.leave_out(agents, [fault["agent"] for fault in gone])
            reports = {numbers[rank]: report for rank, report in reports.items()}
        facts = world.from_root(lambda: asdict(choose(reports, folder, world.hosts, ranks, gone)))
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
        agents = set(range(point.first_agent, point.first_agent + point.agents))
        agents -= {fault["agent"] for fault in point.gone}
        tidy(folder, point.marks or dict.fromkeys(agents, Mark(0, 0)))


def _reports(world: World, folder: Path) -> Reports:
    return world.gather_json(_report(folder) if world.speaks_for_host() else {})


def _report(folder: Path) -> dict[str, Any]:
    """Checkpoints and dead agents here, and what run.h5, or else job.toml, says of the run."""
    found, damaged = survey(folder)
    here = {"files": [asdict(one) for one in found], "damaged": damaged}
    here["gone"] = gone_agents(events(folder))
    try:
        about = read_attributes(folder / "run.h5")
        facts = [about["run_id"], about["job"], int(about["agents"]), int(about["first_agent"])]
        return here | {"run": facts, "finished": about["status"] in ("finished", "degraded")}
    except (StorageError, DamagedData, KeyError):
        pass
    try:
        logs = [path.stem.partition("-")[2] for path in folder.glob("logs/agent-*.log")]
        numbers = [int(text) for text in logs if text.isdecimal()]
        return here | {"job": read_bytes(folder / "job.toml").decode(), "logs": numbers}
    except (StorageError, DamagedData, UnicodeDecodeError):
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


def _newest_run(reports: Reports, folder: Path, ranks: int) -> tuple[str, str, int, int]:
    """The id, the job, the number of agents and the first agent of the run in a folder."""
    if found := _found(reports):
        own = [one for _, one in found if one.run_id in _ids(reports)] or [one for _, one in found]
        newest = max(own, key=lambda one: (one.run_id, one.mark))
        return newest.run_id, newest.job, newest.agents, newest.first_agent
    for report in reports.values():
        if "run" in report:
            run_id, job, agents, first = report["run"]
            return run_id, job, agents, first
    for report in reports.values():
        if "job" in report:  # it was ended before it had written anything else
            first = min(report["logs"], default=0) if ranks == 1 else 0
            return f"{datetime.now():%Y%m%d-%H%M%S}", report["job"], ranks, first
    damaged = _all(reports, "damaged")
    also = f" ({damaged[0]})" if damaged else ""
    raise UsageError(f"--resume {folder}: no run with a whole checkpoint is there{also}.")


def _ids(reports: Reports) -> set[str]:
    """The runs whose run.h5 is on one of the hosts."""
    return {report["run"][0] for report in reports.values() if "run" in report}


def who_is_gone(reports: Reports, request: Request, ranks: int) -> tuple[int, list[Fault]]:
    """The number of agents, and those for whom there is no rank: the dead, then the last ones."""
    run = request.resume or ""
    agents = _newest_run(reports, Path(run).absolute(), ranks)[2]
    dead = {fault["agent"]: fault for fault in _all(reports, "gone")}
    if ranks not in (agents, agents - len(dead)) and not (request.force and ranks < agents):
        died = f", of which {len(dead)} died" if dead else ""
        remedy = f"; new agents would be rounds behind, but a new run can use --lessons {run}."
        raise RanksDiffer(
            f"{run} is a run of {agents} agents{died}; this world has {ranks}: "
            f"{start_command(agents)} train --resume {run}"
            f"{remedy if ranks > agents else '; with --force the last agents leave.'}"
        )
    order = sorted(range(agents), key=lambda agent: (agent in dead, agent))
    return agents, [dead.get(agent) or left_out(agent) for agent in order[ranks:]]


def choose(
    reports: Reports, folder: Path, hosts: Sequence[str], ranks: int, gone: Sequence[Fault] = ()
) -> ResumePoint:
    """The newest round of the newest run that all of its agents have, but those that are gone."""
    facts = _newest_run(reports, folder, ranks)
    found, damaged = _found(reports), _all(reports, "damaged")
    run_id, job, size, first = facts
    left = [fault["agent"] for fault in gone]
    restarted = {fault["agent"] for fault in _all(reports, "gone")} - {*left}
    same = [r for r in reports.values() if r.get("run", [])[:2] == [run_id, job]]
    done = any(report["finished"] for report in same) and not restarted
    if not found:
        return ResumePoint(*facts, damaged=damaged, finished=done, gone=[*gone])
    damaged += [
        f"{folder_of(folder, one.agent) / one.mark.file} is of another run."
        for _, one in found
        if one.run_id > run_id
    ]
    found = [(rank, one) for rank, one in found if one.run_id == run_id]
    agents = [agent for agent in range(first, first + size) if agent not in left]
    free = config.from_toml(job).share.free
    round_, marks, holders = _newest_common(found, agents, free, hosts)
    if not round_ and _ids(reports) and run_id not in _ids(reports):
        raise UsageError(
            f"--resume {folder}: its run.h5 and its checkpoints are of different runs "
            f"({max(_ids(reports))}, {run_id}), and the checkpoints are not those of all agents."
        )
    if restarted and not round_:
        raise UsageError(
            f"--resume {folder}: agent {', '.join(map(str, sorted(restarted)))} died, and the "
            f"others are rounds ahead of its last checkpoint. Start {len(agents) - len(restarted)} "
            f"ranks to go on without it, or a new run with --lessons {folder}."
        )
    past, whose = dict[int, Mark](), dict[int, int]()
    for agent in left:
        if any(one.agent == agent for _, one in found):
            _, mark, holder = _newest_common(found, [agent], True, hosts)
            past, whose = past | mark, whose | holder
    return ResumePoint(
        *facts, round_, marks, holders | whose, damaged, done, gone=[*gone], past=past
    )


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
    send_checkpoints(world, folder, point)
    return load_state(folder_of(folder, world.agent) / point.marks[world.agent].file)


def send_checkpoints(world: World, folder: Path, point: ResumePoint) -> None:
    """Send checkpoints of this host to agents that are elsewhere now; receive this agent's own."""
    mine = -1 if world.is_env_server else world.agent
    for agent, mark in point.marks.items():
        rank, holder = agent - point.first_agent, point.holders[agent]
        path = folder_of(folder, agent) / mark.file
        if world.hosts[rank] == world.hosts[holder]:
            continue
        if world.rank == holder:
            world.polled.post(read_bytes(path), rank, Tag.FILE)
            world.polled.settle("sending a checkpoint")
        elif agent == mine:
            phase = "receiving a checkpoint"
            write_whole(path, bytes(world.polled.collect(holder, Tag.FILE, FILE_LIMIT, phase)))


def check_num_envs(state: Columns, num_envs: int, agent: int, host: str) -> None:
    """Refuse to resume with another number of environments than the agent was saved with."""
    saved = len(state["own/cursor"]) if "own/cursor" in state else num_envs
    if saved != num_envs:
        raise RanksDiffer(
            f"agent {agent} was saved with {saved} environments and would have {num_envs} on "
            f"{host}: --set hosts.{host}.envs={saved}, or bring it back to such a host."
        )
