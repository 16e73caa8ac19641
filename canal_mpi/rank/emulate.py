"""Hosts that are not there: on one machine every rank plays one, under its name, at its speed.

The job's `emulate` has a text for every rank, such as `nano-1` or `nano-1@0.25`, so that the run's
files tell what was played and a resumed run plays the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from canal_mpi.cluster.hostfile import NAME, Host, read_hosts, speed_of, total
from canal_mpi.errors import UsageError
from canal_mpi.hosts import on_host
from canal_mpi.job import Job, Layer


@dataclass(frozen=True)
class Device:
    """What a rank runs on, or plays to run on."""

    host: str
    speed: float = 1.0


def emulated(file: str | None) -> Layer:
    """The setting that makes ranks play the hosts that a file describes."""
    if file is None:
        return {}
    return {"emulate": tuple(word for host in read_hosts(Path(file)) for word in _words(host))}


def _words(host: Host) -> list[str]:
    speed = "" if host.speed == 1 else f"@{host.speed:g}"
    return [f"{host.name}{speed}"] * host.ranks


def servers_of(file: str | None) -> int:
    """How many of the ranks of a file run environments."""
    return 0 if file is None else total(read_hosts(Path(file)), serving=True)


def devices(job: Job, hosts: Sequence[str]) -> list[Device]:
    """What ranks on these hosts run on, or play: agents first, then env servers."""
    if not job.emulate:
        return [_device(job, host) for host in hosts]
    if len(set(hosts)) > 1:
        raise UsageError(
            f"hosts are played on one machine; these ranks are on {len(set(hosts))} hosts: "
            "leave out --emulate, or the hostfile of mpirun."
        )
    return [_device(job, text) for text in job.emulate][: len(hosts)]


def check_size(job: Job, ranks: int) -> None:
    """UsageError where the job lets more or fewer ranks play hosts than there are."""
    if job.emulate and len(job.emulate) != ranks:
        raise UsageError(
            f"the job lets {len(job.emulate)} ranks play hosts, but the world has {ranks}: "
            f"start it with mpirun -np {len(job.emulate)}."
        )


def _device(job: Job, text: str) -> Device:
    """A host with the speed behind its @, or the one that the job's rules give it."""
    name, at, speed = text.partition("@")
    if job.emulate and not NAME.fullmatch(name):
        raise UsageError(f"emulate: '{text}': expected a host, as in nano-1 or nano-1@0.25.")
    ruled = on_host(job, name).train.speed
    return Device(name, speed_of(speed, f"emulate: '{text}'") if at else ruled)


def told(played: Sequence[Device]) -> str:
    """The slow ones in few words, as in `2 at 0.25 of this machine's speed`."""
    slow = sorted({device.speed for device in played if device.speed < 1})
    counts = [(sum(device.speed == speed for device in played), speed) for speed in slow]
    return ", ".join(f"{count} at {speed:g}" for count, speed in counts)
