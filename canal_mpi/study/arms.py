"""The runs of a study: every arm with every seed, single-task experts, and random play."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from canal_mpi import config, pick
from canal_mpi.cluster.hostfile import MOST_RANKS
from canal_mpi.errors import UsageError
from canal_mpi.job import Job, Layer
from canal_mpi.sweep.folder import only_of_lessons
from canal_mpi.sweep.grid import Axis, Choice, Point, crowds, name_of, named_twice, whole_job

NONE, DEFAULT = "none", "distill"  # the two main arms
EXPERT, RANDOM = "expert", "random"  # runs that give the scale
LOOKS = 5  # evaluations inside a task that is played in full


@dataclass(frozen=True)
class Arm:
    """A way to share, as settings over those of the study."""

    about: str
    flags: Layer


ARMS: dict[str, Arm] = {
    "none": Arm("agents don't share", {"share.policy": "none"}),
    "replay": Arm(
        "CANAL's way: the lesson's rows alone, no own steps",
        {"share.policy": "exact", "reuse.mode": "replay", "reuse.network": False},
    ),
    "mix": Arm(
        "batches half of the lesson, half of own play",
        {"share.policy": "exact", "reuse.mode": "mix", "reuse.network": False},
    ),
    "distill": Arm(
        "the default: the donor's network is imitated on the lesson; who stays clearly below it "
        "plays, with batches half of the lesson",
        {"share.policy": "exact", "reuse.mode": "distill", "reuse.network": True},
    ),
    "all": Arm(
        "the default, but lessons of all tasks are taken",
        {"share.policy": "all", "reuse.mode": "distill", "reuse.network": True},
    ),
    "adopt": Arm(
        "the oracle: the default, but the student starts from the donor's weights",
        {"share.policy": "exact", "reuse.mode": "adopt", "reuse.network": True},
    ),
}
ALONE: Layer = {
    "share.policy": "none",
    "learn.identity": "separate",
    "memory.rows": 0,
    "train.rounds": 0,
}


def points_of_study(
    arms: Sequence[str],
    seeds: Axis,
    other_seeds: int,
    agents: Sequence[int],
    topologies: Sequence[str],
    flags: Layer,
    job_file: str | None,
) -> list[Point]:
    """What gives the scale first, then the main arms seed by seed, then the others.

    The first number of agents and the first topology are those of all arms; with others only the
    main arms are run. Fewer agents that don't share are the first ones of `none`: no run is needed.
    """
    for name in arms:
        pick.check("arm", name, ARMS, outside=False)
    job = config.resolve(flags, job_file)
    _check(flags, job)
    ways = [_Way(name, ARMS[name].flags, agents[0], topologies[0]) for name in arms]
    for option, named in (("--topologies", topologies), ("--agents", agents)):
        if len(set(named)) < len(named):
            raise UsageError(f"{option} names one twice.")
    if DEFAULT not in arms and (topologies[1:] or agents[1:]):
        raise UsageError(
            f"other topologies and numbers of agents are tried with {DEFAULT}: add it to --arms."
        )
    for topology in topologies[1:]:
        ways.append(_Way(f"{DEFAULT}-{topology}", ARMS[DEFAULT].flags, agents[0], topology))
    for number in agents[1:]:
        known = NONE in arms and number < agents[0]
        for name in (DEFAULT,) if known else (NONE, DEFAULT):
            ways.append(_Way(f"{name}-{number}", ARMS[name].flags, number, topologies[0]))
    how, looks = job.evaluation, max(job.train.frames // LOOKS, 1)
    base: Layer = {"evaluation.tasks": "seen" if how.tasks == "current" else how.tasks}
    base |= {"evaluation.every": how.every or looks} | flags
    found = [_random_play(base, seeds.choices[0], job_file)]
    for k, seed in enumerate(seeds.choices):
        found.append(_expert(base, job, seed, job_file))
        for way in ways:
            main = way.label in (NONE, DEFAULT)
            if main or k < other_seeds:
                layer = base | way.flags | {"share.topology": way.topology} | seed.flags
                found.append(_point(way.label, seed, layer, way.agents, job_file))
    if again := named_twice(found):
        raise UsageError(f"the study has '{again}' twice: name every arm, seed and so on once.")
    turn = {RANDOM: 0, EXPERT: 0, NONE: 1, DEFAULT: 1}
    return sorted(found, key=lambda point: turn.get(point.settings["arm"], 2))


def _check(flags: Layer, job: Job) -> None:
    """Refuse what makes no study, before anything is started."""
    for key in ("share.policy", "reuse.mode", "reuse.network", "share.topology"):
        if key in flags:
            raise UsageError(f"{key} is what a study varies: give --arms or --topologies.")
    if flags.get("evaluation.tasks") == "current":
        raise UsageError("evaluation.tasks = current tells no forgetting: give seen or all.")
    if job.evaluation.episodes < 1:
        raise UsageError("evaluation.episodes = 0: a study needs scores; give 3 or more.")
    if job.emulate:
        raise UsageError("a study compares at full speed: leave out emulated hosts.")


def check_alike(points: Sequence[Point]) -> None:
    """Refuse arms that differ in more than what makes an arm: they could not be compared."""
    arms = [point for point in points if point.settings["arm"] not in (EXPERT, RANDOM)]
    varied = {"seed"}.union(*(arm.flags for arm in ARMS.values()))
    for one, other in combinations(arms, 2):
        if one.settings["arm"] == other.settings["arm"] and one.ranks != other.ranks:
            raise UsageError(
                f"{one.name} has {one.ranks} agents, {other.name} {other.ranks}, so they can't be "
                "seeds of one arm: name another --out, or put that number second in --agents."
            )
        odd = config.differences(one.job, other.job)
        silent = "none" in (one.job.share.policy, other.job.share.policy)
        for key, (a, b) in odd.items():
            known = key in varied or (key == "share.topology" and (silent or _named(one, other)))
            if not known and not (silent and only_of_lessons(key)):
                raise UsageError(
                    f"{one.name} and {other.name} differ in {key} ({a!r} and {b!r}), so they can't "
                    "be compared in one study: name another --out."
                )


def _named(*points: Point) -> bool:
    """Whether the topology of one of them is in the name of its arm."""
    return any(p.settings["arm"].endswith(f"-{p.job.share.topology}") for p in points)


@dataclass(frozen=True)
class _Way:
    label: str
    flags: Layer
    agents: int
    topology: str


def _expert(base: Layer, job: Job, seed: Choice, job_file: str | None) -> Point:
    """One agent with a network for each task: an expert of each, in one run."""
    episodes = max(10, job.evaluation.episodes)
    layer = base | ALONE | {"evaluation.tasks": "current", "evaluation.episodes": episodes}
    return _point(EXPERT, seed, layer | seed.flags, 1, job_file)


def _random_play(base: Layer, seed: Choice, job_file: str | None) -> Point:
    """One agent that learns nothing and is evaluated with random actions."""
    layer = base | ALONE | {"train.frames": 1, "evaluation.every": 0, "evaluation.epsilon": 1.0}
    layer |= {"evaluation.tasks": "current", "evaluation.episodes": 20}
    return _point(RANDOM, seed, layer | seed.flags, 1, job_file)


def _point(label: str, seed: Choice, layer: Layer, ranks: int, job_file: str | None) -> Point:
    settings = {"arm": label, "seed": seed.label}
    return Point(name_of(settings), whole_job(layer, job_file), ranks, settings)


def about(label: str) -> str:
    """What an arm is, in a few words."""
    name, _, other = label.partition("-")
    words = ARMS[name].about if name in ARMS else name
    if not other:
        return words
    return f"{words}; {other} agents" if other.isdecimal() else f"{words}; topology {other}"


def numbers(text: str) -> list[int]:
    """Numbers of agents, the first for all arms."""
    found = crowds(text, least=2)
    if not found:
        raise UsageError(
            f"--agents {text[:80]}: expected numbers from 2 to {MOST_RANKS}, as in 5 or 5,2,3."
        )
    return found
