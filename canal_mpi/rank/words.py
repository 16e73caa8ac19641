"""What a run says of itself: the first lines, how to go on, what to type next."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from canal_mpi import __version__
from canal_mpi.rank.emulate import Device, told
from canal_mpi.rank.places import crowded
from canal_mpi.rank.plan import Plan, Request
from canal_mpi.rank.world import World
from canal_mpi.topology.reach import warnings


def greeting(
    world: World, plan: Plan, devices: Sequence[Device], room: tuple[int, int], before: int
) -> str:
    """What runs, where, and what it costs: bytes of replay and memory, lessons from before."""
    job, size, hosts = plan.job, world.agents, len(set(world.places))
    emulated = "emulated " * bool(job.emulate)
    slow = f" ({words} of full speed)" if (words := told(devices)) else ""
    sharing = "no sharing"
    if plan.edges or before:
        sharing = f"{job.share.policy} over {job.share.topology}, {job.share.exchange}"
    sharing += f", {before} lessons of {job.share.lessons}" if before else ""
    replay, memory = (size / 1e6 for size in room)
    return (
        f"canal-mpi {__version__} · job {job.name} · {size} agent{'s' * (size > 1)} on "
        f"{hosts} {emulated}host{'s' * (hosts > 1)}{slow}{_servers_named(world)} · {sharing} · "
        f"seed {job.seed} · {len(plan.orders[0])} tasks × {job.train.frames:,} steps · "
        f"replay {replay:.0f} MB and memory {memory:.0f} MB an agent · {plan.folder}"
    )


def remarks(world: World, plan: Plan, request: Request) -> Iterator[str]:
    """What a user may want to know before the run goes on."""
    job, size, file = plan.job, world.agents, request.job_file
    if world.launcher is None:
        job_flag = f" --job {shlex.quote(file)}" if file else ""
        yield (
            f"One agent (agent {world.agent}), no sharing; five that share: "
            f"mpirun -np 5 canal-mpi train{job_flag}"
        )
    if "none" not in (job.share.policy, job.share.topology):
        yield from (f"warning: {words}" for words in warnings(set(plan.edges), size))
    yield from (f"warning: {words}" for words in crowded(job, world.cards[:size]))


def resume_command(world: World, folder: Path) -> str:
    """What goes on with this run."""
    words = shlex.quote(short_path(folder))
    return f"{_launched(world)}canal-mpi train --resume {words}{_server_options(world)}"


def next_steps(world: World, plan: Plan) -> str:
    """Where the results are, and what one may do with them."""
    folder, options, sharing = short_path(plan.folder), _server_options(world), bool(plan.edges)
    again = f"canal-mpi train --job {shlex.quote(f'{folder}/job.toml')}{options}"
    many = max(5, world.size) if options else 5
    five = f"mpirun -np {many} {again} --share exact"
    other = f"{_launched(world)}{again} --share none" if sharing else five
    return (
        f"Results: {folder}/run.h5\nNext:\n"
        f"  canal-mpi report {shlex.quote(folder)}   (one page about this run)\n"
        f"  {other}   ({'the same without sharing' if sharing else 'five that share'})"
    )


def short_path(path: Path) -> str:
    """A path as one would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _launched(world: World) -> str:
    """What this program was started with, in front of its own name."""
    return f"mpirun -np {world.size} " if world.launcher else ""


def _server_options(world: World) -> str:
    """The options that put env servers where they are now."""
    return "".join(f" --env-server-rank {rank}" for rank in world.ranks[world.agents :])


def _servers_named(world: World) -> str:
    """Where the environments run, if not with the agents."""
    names = [name.removesuffix(" (env server)") for name in world.watch.names]
    there = " and ".join(names[world.agents :])
    return f" · environments on {there}" if there else ""
