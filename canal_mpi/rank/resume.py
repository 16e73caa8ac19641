"""Going on where a run stopped: which checkpoints there are, which all agents can go back to.

Agents inside a round don't depend on each other once its lessons are fetched, so an agent may go
on from any of its checkpoints of a round if every other agent has one of that round too.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from canal_mpi import config
from canal_mpi.errors import DamagedData, RanksDiffer, StorageError, UsageError
from canal_mpi.job import Job
from canal_mpi.rank.plan import Plan, Request, orders_of, plan_of
from canal_mpi.rank.world import World
from canal_mpi.results.checkpoint import Found, Mark, folder_of, survey, tidy
from canal_mpi.results.files import write_whole
from canal_mpi.results.hdf5 import check_image, parse_arrays, parse_attributes, read_bytes
from canal_mpi.results.runs import events, whole
from canal_mpi.topology.reach import agents as agents_named
from canal_mpi.types import Columns

FILES = 34  # tag
FILE_LIMIT = 1 << 36
MAY_CHANGE = (
    *("train.frames", "train.rounds", "train.speed", "tasks", "timeout", "hosts"),
    *("checkpoint.", "report."),
)
FORBIDDEN = ("job_file", "out", "name", "force", "agent", "emulate")


Reports = dict[int, dict[str, Any]]
Chosen = dict[int, tuple[int, Found]]


@dataclass(frozen=True)
class Choice:
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

    def to_json(self) -> bytes:
        """The choice for the other ranks."""
        marks = {agent: [mark.round, mark.save] for agent, mark in self.marks.items()}
        return json.dumps(asdict(self) | {"marks": marks}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Choice":
        """The choice that rank 0 made."""
        facts = json.loads(data)
        facts["marks"] = {int(agent): Mark(*mark) for agent, mark in facts["marks"].items()}
        facts["holders"] = {int(agent): rank for agent, rank in facts["holders"].items()}
        return cls(**facts)


def folder_to_resume(request: Request) -> Path:
    """The run that is asked for; nothing else may say where a run goes or what it is."""
    odd = [name for name in FORBIDDEN if getattr(request, name) not in (None, False)]
    if odd:
        word = {"job_file": "job"}.get(odd[0], odd[0])
        raise UsageError(f"--resume takes everything from the run: leave out --{word}.")
    return Path(request.resume or "").absolute()


def choose(world: World, folder: Path) -> Choice:
    """Look for checkpoints on every host and agree on the newest round that all agents have."""
    reports = _reports(world, folder)
    return Choice.from_json(
        world.from_root(lambda: _choice(reports, folder, world.hosts).to_json())
    )


def go_back(world: World, plan: Plan) -> Choice:
    """Agree on the newest round that all living agents have; on the beginning if there is none."""
    reports, job = _reports(world, plan.folder), config.to_toml(plan.job)
    facts = (plan.run_id, job, len(plan.orders), plan.first_agent)

    def chosen() -> bytes:
        found = [pair for pair in _found(reports) if pair[1].run_id == plan.run_id]
        round_, pairs = _common(found, world.living_agents, plan.job.share.free, world.hosts)
        return _chosen(facts, round_, pairs, _damaged(reports)).to_json()

    return Choice.from_json(world.from_root(chosen))


def _reports(world: World, folder: Path) -> Reports:
    """What one rank of each host finds there, by rank."""
    report = json.dumps(_report(folder) if world.speaks_for_host() else {}).encode()
    return {rank: json.loads(words) for rank, words in world.gather(report).items()}


def clean_up(world: World, folder: Path, choice: Choice) -> None:
    """Remove what lies beyond the choice, so that no later resume can take it for newer."""
    if world.speaks_for_host():
        agents = range(choice.first_agent, choice.first_agent + choice.agents)
        tidy(folder, choice.marks or dict.fromkeys(agents, Mark(0, 0)))


def _report(folder: Path) -> dict[str, Any]:
    found, damaged = survey(folder)
    jobs = sorted({one.job for one in found})
    files = [
        (f.agent, f.mark.round, f.mark.save, f.run_id, f.agents, f.first_agent, jobs.index(f.job))
        for f in found
    ]
    start, finished = _beginning(folder)
    deaths = (whole(e.get("agent")) for e in events(folder) if e.get("event") == "death")
    dead = sorted({agent for agent in deaths if agent >= 0})  # not env servers
    found_here = {"files": files, "jobs": jobs, "damaged": damaged, "dead": dead}
    return found_here | {"run": start, "finished": finished}


def _beginning(folder: Path) -> tuple[list[Any], bool]:
    """What run.h5 says about the run, and whether it is finished; nothing where it is damaged."""
    try:
        data = read_bytes(folder / "run.h5")
        check_image(data, "run.h5")
        about = parse_attributes(data, "run.h5")
        facts = [about["run_id"], about["job"], int(about["agents"]), int(about["first_agent"])]
        return facts, about["status"] == "finished"
    except (StorageError, DamagedData, KeyError):
        return [], False


def _found(reports: Reports) -> list[tuple[int, Found]]:
    """Every whole checkpoint, with the rank that found it."""
    found: list[tuple[int, Found]] = []
    for rank, report in reports.items():
        for agent, round_, save, run_id, agents, first, job in report.get("files", []):
            mark, text = Mark(round_, save), report["jobs"][job]
            found.append((rank, Found(agent, mark, run_id, agents, first, text)))
    return found


def _damaged(reports: Reports) -> list[str]:
    return [words for report in reports.values() for words in report.get("damaged", [])]


def _choice(reports: Reports, folder: Path, hosts: list[str]) -> Choice:
    found, damaged = _found(reports), _damaged(reports)
    begun = [report["run"] for report in reports.values() if report.get("run")]
    dead = sorted({agent for report in reports.values() for agent in report.get("dead", [])})
    if dead:
        raise UsageError(
            f"--resume {folder}: this run went on without {agents_named(dead)}, which died; it "
            f"can't be resumed. Start a new one; --lessons {folder} gives it what was learnt."
        )
    if not found and not begun:
        also = f" ({damaged[0]})" if damaged else ""
        raise UsageError(f"--resume {folder}: no run with a whole checkpoint is there{also}.")
    if not found:
        run_id, text, agents, first = begun[0]
        return Choice(run_id, text, agents, first, damaged=damaged)
    newest = max((one for _, one in found), key=lambda one: (one.run_id, one.mark))
    found = [(rank, one) for rank, one in found if one.run_id == newest.run_id]
    agents = range(newest.first_agent, newest.first_agent + newest.agents)
    round_, chosen = _common(found, agents, config.from_toml(newest.job).share.free, hosts)
    facts = (newest.run_id, newest.job, newest.agents, newest.first_agent)
    done = any(r.get("finished") and r["run"][:2] == [*facts[:2]] for r in reports.values())
    return _chosen(facts, round_, chosen, damaged, done)


def _chosen(
    facts: tuple[str, str, int, int],
    round_: int,
    chosen: Chosen,
    damaged: list[str],
    done: bool = False,
) -> Choice:
    marks = {agent: one.mark for agent, (_, one) in chosen.items()}
    holders = {agent: rank for agent, (rank, _) in chosen.items()}
    return Choice(*facts, round_, marks, holders, damaged, done)


def _common(
    found: list[tuple[int, Found]], agents: Sequence[int], free: bool, hosts: list[str]
) -> tuple[int, Chosen]:
    """The newest round that all agents have, and each one's newest checkpoint of it."""
    rounds = {a: {one.mark.round for _, one in found if one.agent == a} for a in agents}
    common = set.intersection(*rounds.values())
    if free and all(rounds.values()):
        common = set().union(*rounds.values())  # no agent needs the others' rounds
    if not common:
        return 0, {}
    chosen: Chosen = {}
    for agent in agents:
        rank = agent if len(agents) > 1 else 0
        home = hosts[rank] if rank < len(hosts) else ""
        newest = max(common & rounds[agent])
        here = [f for f in found if f[1].agent == agent and f[1].mark.round == newest]
        chosen[agent] = max(here, key=lambda f: (f[1].mark, hosts[f[0]] == home))
    return max(common), chosen


def resumed_plan(request: Request, choice: Choice, folder: Path, hosts: list[str]) -> Plan:
    """The plan of the run as it was, with the changes that are allowed; on rank 0 only."""
    from canal_mpi import tasks

    size = len(hosts)
    if size != choice.agents:
        start = f"mpirun -np {choice.agents} " if choice.agents > 1 else ""
        raise RanksDiffer(
            f"{folder} is a run of {choice.agents} agents; this world has {size}: "
            f"{start}canal-mpi train --resume {request.resume}"
        )
    old = config.from_toml(choice.job)
    new = tasks.named(config.changed(old, request.flags))
    _check_changes(old, new)
    plan = plan_of(new, folder, choice.run_id, choice.first_agent, hosts)
    for before, after in zip(orders_of(old, choice.first_agent, size), plan.orders, strict=True):
        begun = before[: choice.round]
        if after[: choice.round] != begun:
            raise RanksDiffer(
                f"the tasks of an agent would begin with {', '.join(after[: choice.round])}; "
                f"it has learnt {', '.join(begun)}. Add tasks at the end, or start a new run."
            )
    return plan


def _check_changes(old: Job, new: Job) -> None:
    changes = config.differences(old, new)
    odd = {key: pair for key, pair in changes.items() if not key.startswith(MAY_CHANGE)}
    if "train.frames" in changes and new.train.frames < old.train.frames:
        odd["train.frames"] = changes["train.frames"]
    if set(old.tasks) - set(new.tasks):
        odd["tasks"] = changes["tasks"]
    if odd:
        lines = [f"{key}: {before!r} before, {after!r} now" for key, (before, after) in odd.items()]
        raise RanksDiffer(
            f"the job has changed: {'; '.join(lines)}. A resumed run may get more frames, tasks "
            "and rounds, another timeout, other checkpoint settings; else start a new run."
        )


def fetch(world: World, folder: Path, choice: Choice) -> Columns:
    """This agent's checkpoint, from its own disk or from the host that has it."""
    mine, data = world.agent, hand_over(world, folder, choice)
    where = f"{folder_of(folder, mine)}/{choice.marks[mine].file}"
    check_image(data, where)
    return parse_arrays(data, where)


def hand_over(world: World, folder: Path, choice: Choice) -> bytes:
    """Send checkpoints of this host to the agents that live elsewhere now; this rank's own."""
    mine, data = -1 if world.serves else world.agent, b""
    for agent, mark in choice.marks.items():
        rank, holder = agent - choice.first_agent, choice.holders[agent]
        path = folder_of(folder, agent) / mark.file
        if world.hosts[rank] == world.hosts[holder]:
            data = read_bytes(path) if agent == mine else data
        elif world.rank == holder and world.mail is not None:
            world.mail.post(read_bytes(path), rank, FILES)
            world.mail.settle("sending a checkpoint")
        elif agent == mine and world.mail is not None:
            data = bytes(world.mail.collect(holder, FILES, FILE_LIMIT, "receiving a checkpoint"))
            check_image(data, path.name)
            write_whole(path, data)
    return data
