"""Going on without ranks that died (`--ft`, Open MPI's ULFM): a smaller world, the same numbers.

Whoever notices a death revokes the communicators, so that everybody notices; the living shrink the
world, and go back to their newest common checkpoints.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import time
from typing import Any

from canal_mpi.errors import RankFailed, UsageError
from canal_mpi.interfaces import Columns, Key, Offer, Progress
from canal_mpi.launcher import Launcher
from canal_mpi.membuf.lesson import pack_offers, unpack_offers
from canal_mpi.membuf.wire import decode, encode
from canal_mpi.rank.plan import Plan
from canal_mpi.rank.shutdown import CommonError
from canal_mpi.rank.world import World
from canal_mpi.results.checkpoint import Mark, folder_of
from canal_mpi.results.files import read_arrays
from canal_mpi.results.progress import number, whole
from canal_mpi.results.store import ROWS_LIMIT
from canal_mpi.state import strip_prefix, with_prefix
from canal_mpi.topology import Tag
from canal_mpi.topology.exchange import Exchange
from canal_mpi.topology.graphs import Edges, edges, scales

FT_SIGN = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft ulfm
Fault = dict[str, Any]  # a row of /faults, the rank's role, whether its death was reported


def check_ft(launcher: Launcher | None) -> None:
    """Refuse --ft where no death would be survived."""
    if os.environ.get(FT_SIGN) in ("1", "true"):
        return
    if launcher is None:
        raise UsageError("--ft is for several ranks: mpirun --with-ft ulfm -np 5 canal-mpi train")
    if "Open MPI" in launcher.name:
        raise UsageError("--ft needs Open MPI's fault tolerance: mpirun --with-ft ulfm …")
    raise UsageError(
        f"--ft needs Open MPI; this is {launcher.name}, where a dead rank ends the job. Leave it "
        "out: --resume goes on from what was saved."
    )


def shrink(world: World, faults: Sequence[Fault], hint: str) -> list[Fault]:
    """Go on with the living alone; all faults so far, with what was heard last of the dead."""
    last = list(world.heartbeat.progress)
    world.shrink()
    known = {*world.alive, *(fault["rank"] for fault in faults)}
    new = [_fault(world, last[rank], rank) for rank in range(world.size) if rank not in known]
    all_faults: list[Fault] = world.from_root(lambda: [*faults, *new])
    if world.root >= world.agents:
        raise CommonError(f"no agent is left.{hint}", RankFailed.code)
    if world.agents < world.size and world.alive[-1] < world.agents:
        raise CommonError(f"no env server is left.{hint}", RankFailed.code)
    return all_faults


def _fault(world: World, last: Progress, rank: int) -> Fault:
    agent = rank if rank < world.agents else -1
    facts = {"agent": agent, "rank": rank, "host": world.hosts[rank], "time": time()}
    return _told(vars(last) | facts) | {"reported": False}


def gone_agents(events: Iterable[Mapping[str, Any]]) -> list[Fault]:
    """The agents that a run goes on without, as its events tell; nothing there is trusted."""
    gone: dict[int, Fault] = {}
    for event in events:
        if event.get("event") == "death" and whole(event.get("agent")) >= 0:  # no env server
            gone[whole(event["agent"])] = _told(event)
        elif event.get("event") == "resume":
            left = event.get("gone")
            told = [_told(one) for one in left if isinstance(one, dict)] if left else []
            gone = {fault["agent"]: fault for fault in told}
    return list(gone.values())


def _told(event: Mapping[str, Any]) -> Fault:
    fault: Fault = {name: whole(event.get(name)) for name in ("agent", "round", "rank")}
    fault |= {name: str(event.get(name, ""))[:200] for name in ("task", "phase", "host", "lost")}
    fault["time"] = number(event.get("time"))
    role = f"agent {fault['agent']}" if fault["agent"] >= 0 else "env server"
    return fault | {"role": role, "reported": True}


def left_out(agent: int) -> Fault:
    """An agent for whom a resumed run has no rank: what it learnt stays on disk."""
    return _told({"agent": agent, "rank": agent, "phase": "left out", "time": time()})


def rows_of_gone(
    world: World, folder: Path, past: Mapping[int, Mark], holders: Mapping[int, int]
) -> dict[int, dict[int, bytes]]:
    """The rows of agents that are gone, by agent and round, from their last checkpoints."""
    mine: Columns = {}
    for agent, mark in past.items():
        if holders[agent] == world.rank:
            sink = strip_prefix("sink", read_arrays(folder_of(folder, agent) / mark.file))
            mine |= with_prefix(str(agent), strip_prefix("history", sink))
    found = world.gather(encode(mine), Tag.CONTROL, ROWS_LIMIT, world.agents)
    together = {k: v for data in found.values() for k, v in decode(data, ROWS_LIMIT).items()}
    known: dict[int, dict[int, bytes]] = {}
    for name, rows in decode(world.broadcast(encode(together), world.agents), ROWS_LIMIT).items():
        owner, _, round_ = name.partition("/")
        known.setdefault(int(owner), {})[int(round_)] = rows.tobytes()
    return known


def remaining_edges(world: World, plan: Plan) -> list[tuple[int, int]]:
    """Who hears whom among the living."""
    living, before = world.living_agents, set(plan.edges)
    hosts = [world.hosts[rank] for rank in living]
    topology, seed = plan.job.share.topology, plan.job.seed
    return sorted(edges_among(living, topology, before, seed, hosts)) if before else []


def edges_among(
    living: Sequence[int], topology: str, before: Edges, seed: int, hosts: Sequence[str]
) -> Edges:
    """The same topology with fewer agents; of a file, or a function, the edges that are left."""
    if not scales(topology):
        return {(a, b) for a, b in before if a in living and b in living}
    return {(living[a], living[b]) for a, b in edges(topology, len(living), seed, hosts)}


def note_lost(fault: Fault, finished: dict[int, str], held: set[Key]) -> None:
    """Lessons of tasks that a dead agent had finished, and that nobody holds; where it was."""
    if fault["agent"] >= 0:  # the last heartbeat may be older than its last rows
        fault["round"] = max(fault["round"], 1 + max(finished, default=0))
    lost = [(r, task) for r, task in finished.items() if (fault["agent"], r) not in held]
    fault["lost"] = ", ".join(f"round {r} ({task})" for r, task in lost)[:200]


def resync_offers(world: World, link: Exchange) -> set[Key]:
    """Let everybody know every lesson that somebody still holds; which those are."""
    offers, held = link.known()
    messages = world.gather(pack_offers(offers), Tag.CONTROL, ROWS_LIMIT, world.agents)
    holders = world.gather_json(held, world.agents)
    known = [unpack_offers(data, ROWS_LIMIT) for _, data in sorted(messages.items())]
    found = merged(known, holders)
    data = world.broadcast(pack_offers([offer for offer, _ in found]), world.agents)
    offers = unpack_offers(data, ROWS_LIMIT)
    left = world.broadcast_json([holder for _, holder in found], world.agents)
    link.recover([*zip(offers, left, strict=True)])
    return {offer.key for offer in offers}


def merged(
    known: Iterable[Sequence[Offer]], held: Mapping[int, Sequence[Sequence[int]]]
) -> list[tuple[Offer, int]]:
    """Every lesson that somebody holds, with its holder: the donor if possible."""
    offers = {offer.key: offer for theirs in known for offer in theirs}
    found = []
    for key, offer in sorted(offers.items()):
        holders = [agent for agent, keys in held.items() if list(key) in map(list, keys)]
        if holders:
            found.append((offer, key[0] if key[0] in holders else min(holders)))
    return found
