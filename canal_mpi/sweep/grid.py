"""The points of a sweep: every combination of what is varied, each with its whole job."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from canal_mpi import config
from canal_mpi.cluster.hostfile import MOST_RANKS, Host, is_here, read_hosts, total
from canal_mpi.errors import UsageError
from canal_mpi.job import Job, Layer
from canal_mpi.rank.emulate import emulated
from canal_mpi.results.files import NAME, file_name

MOST_POINTS = 10_000
DIGITS = 19  # fewer than that has a number
AGENTS = 5  # of a point, where nothing else says


@dataclass(frozen=True)
class Choice:
    """One value of something that is varied, and what it means for a run."""

    label: str
    flags: Layer = field(default_factory=dict)
    ranks: int = 0  # 0: says nothing about it
    servers: int = 0
    hosts: tuple[Host, ...] = ()


@dataclass(frozen=True)
class Axis:
    """Something that is varied; `name` is its column in tables."""

    name: str
    choices: Sequence[Choice]


@dataclass(frozen=True)
class Point:
    """One run of a sweep; on `hosts`, or where there are none on this machine."""

    name: str
    job: Job
    ranks: int
    settings: dict[str, str] = field(default_factory=dict)  # axis -> label
    servers: int = 0  # of the ranks
    hosts: tuple[Host, ...] = ()
    network: str = ""  # by which hosts reach each other


def points_of(
    axes: Sequence[Axis], flags: Layer, job_file: str | None, ranks: int = AGENTS
) -> list[Point]:
    """Every combination of the axes, the last one varying fastest."""
    count = 1
    for axis in axes:
        count *= len(axis.choices)
    if count > MOST_POINTS:
        raise UsageError(f"the sweep has {count} points; at most {MOST_POINTS} are possible.")
    names = [axis.name for axis in axes]
    combinations = itertools.product(*(axis.choices for axis in axes))
    found = [_point(dict(zip(names, c, strict=True)), flags, job_file, ranks) for c in combinations]
    if again := named_twice(found):
        raise UsageError(f"two points of the sweep are '{again}': name each value once.")
    return found


def named_twice(points: Sequence[Point]) -> str:
    """The first name that two points have; empty where none is."""
    names = [point.name for point in points]
    return next((name for name in names if names.count(name) > 1), "")


def _point(chosen: dict[str, Choice], flags: Layer, job_file: str | None, ranks: int) -> Point:
    layer = dict(flags)
    servers, hosts = 0, tuple[Host, ...]()
    for choice in chosen.values():
        layer |= choice.flags
        ranks, servers = choice.ranks or ranks, choice.servers or servers
        hosts = choice.hosts or hosts
    job = whole_job(layer, job_file)
    settings = {name: choice.label for name, choice in chosen.items()}
    return Point(name_of(settings) or file_name(job.name), job, ranks, settings, servers, hosts)


def whole_job(flags: Layer, job_file: str | None) -> Job:
    """The job as a run of it would write it down."""
    from canal_mpi import tasks

    job = tasks.named(config.resolve(flags, job_file))
    if job.share.lessons:
        there = str(Path(job.share.lessons).absolute())
        job = replace(job, share=replace(job.share, lessons=there))
    return job


def name_of(settings: dict[str, str]) -> str:
    """A name made of settings: `nano4-xavier1_ring_lr-0.001_seed-2`."""
    plain = {"arm", "hosts", "topology", "policy"}
    words = [
        label if axis in plain else f"{axis.rpartition('.')[2]}-{label}"
        for axis, label in settings.items()
    ]
    name = "_".join(words)
    if not name or NAME.fullmatch(name):
        return name
    return f"{file_name(name)[:55]}-{sha256(name.encode()).hexdigest()[:8]}"


def seeds(text: str, first: int) -> Axis:
    """`3`: three seeds from the job's own on; `4,7`: these."""
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) for word in words if word.isdecimal() and len(word) < DIGITS]
    many = len(words) > 1
    if len(numbers) < len(words) or not (many or 1 <= numbers[0] <= MOST_POINTS):
        short = text if len(text) < 80 else f"{text[:80]}…"
        raise UsageError(f"--seeds {short}: expected how many, as in 3, or which, as in 4,7,9.")
    chosen = numbers if many else range(first, first + numbers[0])
    return Axis("seed", [Choice(str(seed), {"seed": seed}) for seed in chosen])


def agents(text: str) -> Axis:
    """Numbers of agents, as in `2,5`."""
    found = crowds(text)
    if not found:
        raise UsageError(f"-n {text[:80]}: expected numbers of agents, as in 5 or 2,3,5.")
    return Axis("agents", [Choice(str(number), ranks=number) for number in found])


def crowds(text: str, least: int = 1) -> list[int]:
    """Numbers of agents in a text such as `2,5`; none where one of them is none."""
    words = [word.strip() for word in text.split(",")]
    fit = (w.isdecimal() and len(w) < DIGITS and least <= int(w) <= MOST_RANKS for w in words)
    return [int(word) for word in words] if all(fit) else []


def varied(text: str) -> Axis:
    """`learn.lr=0.001,0.0005`; lists in brackets, as in `learn.widths=[32],[64,64]`."""
    key, equals, values = text.partition("=")
    key = key.strip()
    if not equals or not values.strip():
        raise UsageError(f"--vary {text}: expected a setting and values, as in learn.lr=0.01,0.1.")
    found = config.parse_value(f"[{values}]")
    if not isinstance(found, list):
        found = [config.parse_value(value.strip()) for value in values.split(",")]
    return named(key, key, found)


def named(axis: str, key: str, values: Sequence[object]) -> Axis:
    """Values of one setting."""
    labels = [value if isinstance(value, str) else _label(value) for value in values]
    pairs = zip(labels, values, strict=True)
    return Axis(axis, [Choice(label, {key: value}) for label, value in pairs])


def _label(value: object) -> str:
    if isinstance(value, list):
        return "-".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def hostfiles(patterns: Sequence[str], emulate: bool, shared_disk: bool = False) -> Axis:
    """Mixes of hosts, one a file; played on this machine, or used as they are.

    Rank 0 writes the results, so the first host must be this one, or all share a disk.
    """
    files = [file for pattern in patterns for file in _matching(Path(pattern))]
    if not files:
        raise UsageError(f"--hostfiles {' '.join(patterns)}: there is no such file.")
    return Axis("hosts", [_mix(file, emulate, shared_disk) for file in files])


def _matching(pattern: Path) -> list[Path]:
    return sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))


def _mix(file: Path, emulate: bool, shared_disk: bool) -> Choice:
    hosts = read_hosts(file)
    facts = (total(hosts), total(hosts, serving=True))
    if emulate:
        return Choice(file.stem, emulated(str(file)), *facts)
    if not shared_disk and not is_here(hosts[0].name):
        raise UsageError(
            f"{file}: its first host, {hosts[0].name}, gets the results, but is not this machine: "
            "give --emulate to play the hosts here, start the sweep on that host, or say "
            "--shared-disk where --out is on a disk that all of them share."
        )
    return Choice(file.stem, {}, *facts, tuple(hosts))
