"""Brings agents and env servers together: who plays for whom, over how many lanes."""

from pathlib import Path

from canal_mpi.hosts import on_host
from canal_mpi.job import Job
from canal_mpi.rank import envwire as wire
from canal_mpi.rank.envport import Port
from canal_mpi.rank.envserver import EnvServer, Seat, Worker
from canal_mpi.rank.remote import Lane
from canal_mpi.rank.world import World
from canal_mpi.tasks import common_spaces
from canal_mpi.types import Progress, Spaces


def server_of(world: World, agent: int) -> int:
    """The rank that plays for an agent: agents are dealt over the servers in turn."""
    servers = [rank for rank in world.alive if rank >= world.agents]
    return servers[agent % len(servers)]


def agents_of(world: World, server: int) -> list[int]:
    """The living agents that a server plays for."""
    return [agent for agent in world.living_agents if server_of(world, agent) == server]


def lanes_to(world: World, server: int, games: int) -> int:
    """Lanes for each agent of a server, so that its cores are used and no game waits needlessly."""
    agents = len(agents_of(world, server))
    cores = int(world.cards[server]["cores"])
    return max(1, min(games, cores // max(agents, 1), 64))


def lanes_of_agent(world: World, job: Job, spaces: Spaces) -> list[Lane]:
    """This agent's lanes; `job` as it is on the agent's host."""
    assert world.comm is not None
    there, games = server_of(world, world.rank), job.train.envs
    room, size = wire.request_size(games), wire.answer_size(spaces, games)
    ports = [
        Port.of_agent(world.comm, there, lane, size)
        for lane in range(lanes_to(world, there, games))
    ]
    name, watch = world.watch.names[there], world.watch
    return [Lane(port, name, room, watch.attend, job.timeout) for port in ports]


def server(world: World, job: Job, log_file: Path) -> EnvServer:
    """This rank's server, its workers loaded."""
    assert world.comm is not None
    spaces = common_spaces(job.tasks, job.task)
    mine = agents_of(world, world.rank)
    jobs = {agent: on_host(job, world.places[agent]) for agent in mine}
    games = {agent: jobs[agent].train.envs for agent in mine}
    pairs = [(a, lane) for a in mine for lane in range(lanes_to(world, world.rank, games[a]))]
    workers = [Worker(jobs[agent], log_file) for agent, _ in pairs]
    for worker in workers:
        worker.ready(lambda: world.watch.beat(world.watch.mine))
    world.watch.progress[world.rank] = Progress("serving")
    seats = []
    for (agent, lane), worker in zip(pairs, workers, strict=True):
        size, room = wire.request_size(games[agent]), wire.answer_size(spaces, games[agent])
        seats.append(Seat(agent, Port.of_server(world.comm, agent, lane, size), worker, room))
    return EnvServer(seats, lambda: world.watch.idle(world.lead, "serving"))
