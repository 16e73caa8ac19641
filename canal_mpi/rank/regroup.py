"""Going on without ranks that died (`--ft`, Open MPI's ULFM): a smaller world, the same numbers.

Whoever notices a death revokes the communicators, so that everybody notices; the living shrink the
world, and go back to their newest common checkpoints.
"""

import json
import os
from dataclasses import replace
from time import time
from typing import Any

from canal_mpi.errors import RankFailed, UsageError
from canal_mpi.rank.launcher import Launcher
from canal_mpi.rank.plan import Plan
from canal_mpi.rank.watch import Watch
from canal_mpi.rank.world import FT_SIGN, Agreed, World
from canal_mpi.schema import ROWS_LIMIT
from canal_mpi.topology import survivors
from canal_mpi.topology.desk import Desk
from canal_mpi.types import Key

Fault = dict[str, Any]  # a row of /faults, what the rank was for, whether its end was told
SLACK = 10.0  # seconds


def check(launcher: Launcher | None) -> None:
    """Refuse --ft where no death would be survived."""
    if os.environ.get(FT_SIGN) in ("1", "true"):
        return
    if launcher is None:
        raise UsageError("--ft is for several ranks: mpirun --with-ft ulfm -np 5 canal-mpi train")
    if "Open MPI" in launcher.name:
        raise UsageError("--ft needs Open MPI's fault tolerance: mpirun --with-ft ulfm …")
    raise UsageError(
        f"--ft needs Open MPI; this is {launcher.name}, where a dead rank ends the job. Leave it "
        "out: what was saved can be taken up with --resume."
    )


def shrink(world: World, faults: list[Fault]) -> list[Fault]:
    """Go on with the living alone; all faults so far, with what was heard last of the dead."""
    from canal_mpi.topology.crowd import shrunk, split
    from canal_mpi.topology.mpimail import Mail

    assert world.comm is not None and world.mail is not None
    before, watch = world.alive, world.watch
    world.past.append((world.mail, world.comm, world.agents_comm))  # buffers outlive requests
    watch.serve = watch.on_beat = _nothing
    seconds = watch.timeout + SLACK  # a living rank may be silent for so long
    world.comm = shrunk(world.comm, before, world.agents_comm, seconds)
    world.alive, world.agents_comm = list(world.comm.numbers), None
    world.watch = _renewed(world, watch)
    world.mail = Mail(world.comm, world.watch.idle)
    world.agents_comm = split(world.comm, world.agents, seconds)
    world.fallen = False
    known = {*world.alive, *(world.ranks.index(fault["rank"]) for fault in faults)}
    new = [_fault(world, watch, rank) for rank in range(world.size) if rank not in known]
    return list(json.loads(world.broadcast(json.dumps(faults + new).encode())))


def _renewed(world: World, old: Watch) -> Watch:
    """A watch on the new communicator that knows what the old one knew."""
    watch = Watch(world.comm, old.timeout, world.alive, old.size)
    watch.names, watch.wish = old.names, old.wish
    for rank, progress in enumerate(old.progress):
        gone = replace(progress, phase="died")
        watch.progress[rank] = progress if rank in world.alive else gone
    return watch


def _fault(world: World, watch: Watch, rank: int) -> Fault:
    p, agent = watch.progress[rank], rank < world.agents
    return {
        "role": f"agent {rank}" if agent else "env server",
        "agent": rank if agent else -1,
        "round": p.round,
        "task": p.task,
        "phase": p.phase,
        "rank": world.ranks[rank],
        "host": world.hosts[rank],
        "time": time(),
        "lost": "",
        "told": False,
    }


def check_left(world: World, hint: str) -> None:
    """Without an agent, or without an env server where there was one, nothing goes on."""
    if world.alive[0] >= world.agents:
        raise Agreed(f"no agent is left.{hint}", RankFailed.code)
    if world.agents < world.size and world.alive[-1] < world.agents:
        raise Agreed(f"no env server is left.{hint}", RankFailed.code)


def edges_left(world: World, plan: Plan) -> list[tuple[int, int]]:
    """Who hears whom among the living."""
    living, share = world.living_agents, plan.job.share
    if not plan.edges:
        return []
    before, hosts = set(plan.edges), [world.hosts[rank] for rank in living]
    return sorted(survivors.edges_among(living, share.topology, before, plan.job.seed, hosts))


def reacquaint(world: World, link: Desk) -> set[Key]:
    """Let everybody know every lesson that somebody still holds; which those are."""
    known = survivors.pack_known(link.known())
    messages = world.gather(known, limit=ROWS_LIMIT, among=world.agents)
    told = survivors.pack_merged(survivors.merged(messages))
    found = survivors.unpack_merged(world.broadcast(told, world.agents))
    link.regroup(found)
    return {heard.offer.key for heard in found}


def note_lost(fault: Fault, finished: dict[int, str], held: set[Key]) -> None:
    """Lessons of tasks that a dead agent had finished, and that nobody holds; where it was."""
    if fault["agent"] >= 0:  # the last heartbeat may be older than its last rows
        fault["round"] = max(fault["round"], 1 + max(finished, default=0))
    lost = [(r, task) for r, task in finished.items() if (fault["agent"], r) not in held]
    fault["lost"] = ", ".join(f"round {r} ({task})" for r, task in lost)[:200]


def _nothing() -> None:
    """Nobody to answer."""
