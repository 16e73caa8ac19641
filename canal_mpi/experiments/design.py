"""What is run: the grid of a sweep, or the arms of a study at several budgets on the same seeds."""

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from canal_mpi import config
from canal_mpi.errors import UsageError
from canal_mpi.experiments.points import MAX_POINTS, Point, checked, name_of, resolved
from canal_mpi.experiments.runner import guess
from canal_mpi.launch.hostfile import MOST_RANKS, emulated, is_here, read_hosts, total
from canal_mpi.results.files import file_name
from canal_mpi.settings import Layer

MAX_DIGITS = 18  # of a number in an option
DEFAULT_AGENTS = 5
FILE = "study.toml"  # the definition, in the folder of a study
RANDOM = "random"
RANDOM_PLAY: Layer = {"share.policy": "none", "learn.heads": "separate", "rehearsal.rows": 0}
RANDOM_PLAY |= {"evaluation.interval": 0, "evaluation.epsilon": 1.0, "evaluation.tasks": "final"}


# ── a sweep ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Choice:
    """One value of something that is varied: settings of the job, and facts of the point."""

    label: str
    settings: Layer = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # ranks, servers, hostfile


Axis = tuple[str, Sequence[Choice]]  # something that is varied, by its column in tables


def grid(
    axes: Sequence[Axis], flags: Layer, job_file: str | None = None, network: str = ""
) -> list[Point]:
    """Every combination of the axes, the last one varying fastest."""
    count = prod(len(choices) for _, choices in axes)
    if count > MAX_POINTS:
        raise UsageError(f"the sweep has {count} points; at most {MAX_POINTS} are possible.")
    found = []
    for choices in itertools.product(*(choices for _, choices in axes)):
        layer = dict(flags)
        facts: dict[str, Any] = {"ranks": DEFAULT_AGENTS, "network": network}
        for choice in choices:
            layer |= choice.settings
            facts |= choice.facts
        job = resolved(layer, job_file)
        settings = {name: one.label for (name, _), one in zip(axes, choices, strict=True)}
        name = name_of(settings) or file_name(job.name)
        found.append(Point(name, job, settings=settings, **facts))
    return checked(found)


def _numbers(text: str, least: int, most: int) -> list[int]:
    """The numbers of a text such as `2,5`; none where one of them is wrong."""
    words = [word.strip() for word in text.split(",")]
    right = (w.isdecimal() and len(w) <= MAX_DIGITS and least <= int(w) <= most for w in words)
    return [int(word) for word in words] if all(right) else []


def seeds(text: str, first: int) -> Axis:
    """The axis of seeds: `3` are three, from the first one on; `4,7` are these."""
    found = _numbers(text, 0, 10**MAX_DIGITS)
    if len(found) == 1:
        found = list(range(first, first + found[0])) if found[0] <= MAX_POINTS else []
    if not found:
        raise UsageError(f"--seeds {text[:80]}: expected how many, as in 3, or which, as in 4,7,9.")
    return named("seed", "seed", found)


def agents(text: str) -> Axis:
    """Numbers of agents, as in `2,5`."""
    found = _numbers(text, 1, MOST_RANKS)
    if not found:
        raise UsageError(f"-n {text[:80]}: expected numbers of agents, as in 5 or 2,3,5.")
    return "agents", [Choice(str(number), facts={"ranks": number}) for number in found]


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
    return axis, [Choice(_label(value), {key: value}) for value in values]


def _label(value: object) -> str:
    if isinstance(value, list):
        return "-".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def hostfiles(patterns: Sequence[str], emulate: bool, shared_disk: bool = False) -> Axis:
    """Mixes of hosts, one per file; emulated on this machine, or used as they are."""
    paths = [Path(pattern) for pattern in patterns]
    files = [f for p in paths for f in sorted(Path(p.anchor).glob(str(p.relative_to(p.anchor))))]
    if not files:
        raise UsageError(f"--hostfiles {' '.join(patterns)}: there is no such file.")
    return "hosts", [_mix(file, emulate, shared_disk) for file in files]


def _mix(file: Path, emulate: bool, shared_disk: bool) -> Choice:
    """Rank 0 writes the results, so the first host must be this one, or all share a disk."""
    hosts = read_hosts(file)
    facts: dict[str, Any] = {"ranks": total(hosts), "servers": total(hosts, serving=True)}
    if emulate:
        return Choice(file.stem, {"emulate": emulated(hosts)}, facts)
    if not shared_disk and not is_here(hosts[0].name):
        raise UsageError(
            f"{file}: its first host, {hosts[0].name}, gets the results, but is not this machine: "
            "give --emulate to play the hosts here, start the sweep on that host, or say "
            "--shared-disk where --out is on a disk that all of them share."
        )
    return Choice(file.stem, {}, facts | {"hostfile": str(file.absolute())})


# ── a study, as one TOML file says ─────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Arm:
    """A way to share at several budgets."""

    name: str
    steps: Sequence[int]  # budgets: steps per task
    seeds: int  # how many of the study's
    agents: int
    about: str = ""
    settings: Layer = field(default_factory=dict)
    forgetting: Sequence[int] = ()  # budgets at which it is measured, right after each task


@dataclass(frozen=True)
class Study:
    """What is run and compared."""

    seeds: Sequence[int]
    baseline: str
    main: str
    arms: Mapping[str, Arm]
    title: str = "Does sharing pay?"
    random_episodes: int = 100
    settings: Layer = field(default_factory=dict)
    equal_steps: Sequence[Mapping[str, Any]] = ()  # arm, steps; baseline: its steps

    def points(self) -> list[Point]:
        """Every run: random play, then all arms of one seed before the next, cheap ones first."""
        chance = RANDOM_PLAY | {"evaluation.episodes": self.random_episodes}
        found = [self._point(Arm(RANDOM, [1], 1, 1, settings=chance), 1, self.seeds[0])]
        for k, seed in enumerate(self.seeds):
            arms = [arm for arm in self.arms.values() if k < arm.seeds]
            runs = [self._point(arm, steps, seed) for arm in arms for steps in arm.steps]
            found += sorted(runs, key=guess)
        return checked(found)

    def _point(self, arm: Arm, steps: int, seed: int) -> Point:
        labels = {"arm": arm.name, "steps": str(steps), "seed": str(seed)}
        flags = self.settings | {"train.steps": steps} | arm.settings | {"seed": seed}
        if steps in arm.forgetting:
            flags["evaluation.tasks"] = "after"
        return Point(name_of(labels), resolved(flags, environ={}), arm.agents, labels)


def find(name: str) -> Path:
    """The file of a study that comes with the package, or the user's own."""
    known = {p.stem: p for f in config.job_folders() for p in sorted(f.glob("studies/*.toml"))}
    path = known.get(name, Path(name))
    if not path.is_file():
        names = ", ".join(sorted(known))
        raise UsageError(f"there is no study '{name}': expected {names}, or path/to/my.toml.")
    return path


def read(path: Path) -> Study:
    """The study that a file defines; UsageError says what is wrong with it."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        defaults = {"agents": tree.pop("agents", 5), "seeds": len(tree["seeds"])}
        arms = {name: Arm(name, **(defaults | arm)) for name, arm in tree.pop("arms").items()}
        study = Study(arms=arms, **tree)
        named = [study.baseline, study.main, *(pair["arm"] for pair in study.equal_steps)]
        if odd := [name for name in named if name not in arms]:
            raise ValueError(f"it has no arm '{odd[0]}'")
        for pair in study.equal_steps:
            budgets = (arms[pair["arm"]].steps, arms[study.baseline].steps)
            if pair["steps"] not in budgets[0] or pair["baseline"] not in budgets[1]:
                raise ValueError(f"equal_steps names a budget that no arm has: {dict(pair)}")
        if not study.seeds or not all(1 <= arm.agents <= MOST_RANKS for arm in arms.values()):
            raise ValueError(f"expected seeds, and 1 to {MOST_RANKS} agents in each arm")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} does not define a study: {error}.") from error
    return study
