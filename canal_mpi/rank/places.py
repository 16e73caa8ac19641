"""What the job's rules for hosts come to: checks and warnings about who runs where."""

from collections.abc import Mapping, Sequence

from canal_mpi.errors import RanksDiffer, UsageError
from canal_mpi.hosts import on_host
from canal_mpi.job import Job
from canal_mpi.types import Columns


def check_places(job: Job, hosts: Sequence[str]) -> None:
    """Refuse agents that meet inside a task and take a different number of steps a turn."""
    meets = job.sync.mode != "none" or job.lsc.save
    envs = {host: on_host(job, host).train.envs for host in hosts}
    if meets and len(set(envs.values())) > 1:
        words = ", ".join(f"{number} on {host}" for host, number in envs.items())
        raise UsageError(
            f"agents that share inside a task (sync, lsc) need the same number of environments; "
            f"the rules for hosts give {words}."
        )


def crowded(job: Job, cards: Sequence[Mapping[str, str]]) -> list[str]:
    """A warning for every host whose ranks have more threads than it has cores."""
    wanted: dict[str, int] = {}
    cores = {card["host"]: int(card["cores"]) for card in cards}
    for card in cards:
        host = card["host"]
        wanted[host] = wanted.get(host, 0) + on_host(job, host).learn.threads
    return [
        f"{host} has {cores[host]} cores for {number} compute threads: "
        "learn.threads = 1 is faster where cores are short."
        for host, number in wanted.items()
        if number > cores[host] and on_host(job, host).learn.threads > 1
    ]


def check_checkpoint(state: Columns, envs: int, agent: int, host: str) -> None:
    """Refuse to go on with another number of environments than the agent was saved with."""
    saved = len(state["own/cursor"]) if "own/cursor" in state else envs
    if saved != envs:
        raise RanksDiffer(
            f"agent {agent} was saved with {saved} environments and would have {envs} on {host}: "
            f"--set hosts.{host}.envs={saved}, or bring it back to such a host."
        )
