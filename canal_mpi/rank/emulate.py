"""Emulated hosts: on one machine every rank takes the name and the speed of a host.

The job's `emulate` has a text for every rank, such as `nano-1` or `nano-1@0.25`, so that the run's
files say what was emulated and a resumed run emulates the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from canal_mpi.config import on_host
from canal_mpi.errors import UsageError
from canal_mpi.launch.hostfile import NAME, Host, read_hosts, speed_of, total
from canal_mpi.settings import Job, Layer


@dataclass(frozen=True)
class Device:
    """The host that a rank runs on, or emulates."""

    host: str
    speed: float = 1.0


def emulated(file: str | None) -> Layer:
    """The setting that makes ranks emulate the hosts that a file describes."""
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
    """What ranks on these hosts run on, or emulate: agents first, then env servers."""
    if not job.emulate:
        return [_device(job, host) for host in hosts]
    if len(set(hosts)) > 1:
        raise UsageError(
            f"hosts are emulated on one machine; these ranks are on {len(set(hosts))} hosts: "
            "leave out --emulate, or the hostfile of mpirun."
        )
    return [_device(job, text) for text in job.emulate][: len(hosts)]


def check_size(job: Job, ranks: int) -> None:
    """UsageError where the job emulates more or fewer hosts than there are ranks."""
    if job.emulate and len(job.emulate) != ranks:
        raise UsageError(
            f"the job emulates hosts on {len(job.emulate)} ranks, but the world has {ranks}: "
            f"start it with mpirun -np {len(job.emulate)}."
        )


def _device(job: Job, text: str) -> Device:
    """A host with the speed behind its @, or the one that the job's rules give it."""
    name, at, speed = text.partition("@")
    if job.emulate and not NAME.fullmatch(name):
        raise UsageError(f"emulate: '{text}': expected a host, as in nano-1 or nano-1@0.25.")
    ruled = on_host(job, name).train.speed
    return Device(name, speed_of(speed, f"emulate: '{text}'") if at else ruled)


def describe_slow(found: Sequence[Device]) -> str:
    """The slow devices in few words, as in `2 at 0.25`."""
    slow = sorted({device.speed for device in found if device.speed < 1})
    counts = [(sum(device.speed == speed for device in found), speed) for speed in slow]
    return ", ".join(f"{count} at {speed:g}" for count, speed in counts)
