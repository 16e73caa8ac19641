"""The ten games of CANAL: reference scores, the built-in orders, and other ways to order tasks."""

from collections.abc import Callable, Mapping, Sequence

from canal_mpi.errors import UsageError, lookup
from canal_mpi.state import random_stream

RANDOM_AND_HUMAN: Mapping[str, tuple[float, float]] = {
    "RoadRunner": (11.5, 7845.0),
    "Riverraid": (1338.5, 17118.0),
    "StarGunner": (664.0, 10250.0),
    "Krull": (1598.0, 2665.5),
    "Robotank": (2.2, 11.9),
    "Jamesbond": (29.0, 302.8),
    "Alien": (227.8, 7127.7),
    "Kangaroo": (52.0, 3035.0),
    "Frostbite": (65.2, 4334.7),
    "BattleZone": (2360.0, 37187.5),
}
TEN_GAMES = tuple(RANDOM_AND_HUMAN)

WHOLE_GAME = 3000  # steps after which most games are over: only then human scores compare

# Each row is the order of one agent, as indices into TEN_GAMES; after two rounds of the first five
# agents every game has been learnt by somebody.
CANAL_ORDERS = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
    (3, 2, 8, 9, 5, 6, 7, 4, 1, 0),
    (5, 4, 8, 3, 6, 7, 9, 1, 0, 2),
    (6, 7, 9, 4, 8, 0, 3, 1, 2, 5),
    (8, 9, 0, 1, 2, 3, 6, 7, 5, 4),
    (9, 5, 2, 3, 4, 0, 1, 7, 6, 8),
    (2, 3, 6, 9, 4, 8, 7, 0, 5, 1),
)


def human_normalised(task: str, score: float) -> float:
    """(score - random) / (human - random); NaN for a task without reference scores."""
    if task not in RANDOM_AND_HUMAN:
        return float("nan")
    random, human = RANDOM_AND_HUMAN[task]
    return (score - random) / (human - random)


def canal(tasks: Sequence[str], agent: int, seed: int) -> list[str]:
    """The original's seven orders, then seeded permutations; other tasks than its ten: rotated."""
    if not set(tasks) <= set(TEN_GAMES):
        return rotate(tasks, agent, seed)
    if agent >= len(CANAL_ORDERS):
        return random(tasks, agent, seed)
    return [TEN_GAMES[k] for k in CANAL_ORDERS[agent] if TEN_GAMES[k] in tasks]


def random(tasks: Sequence[str], agent: int, seed: int) -> list[str]:
    """A permutation of its own for every agent, from the seed."""
    return [tasks[k] for k in random_stream(seed, agent, "", "order").permutation(len(tasks))]


def rotate(tasks: Sequence[str], agent: int, seed: int) -> list[str]:
    """As listed, but agent k starts with the k-th task."""
    start = agent % len(tasks)
    return [*tasks[start:], *tasks[:start]]


def same(tasks: Sequence[str], agent: int, seed: int) -> list[str]:
    """As listed, for every agent."""
    return list(tasks)


def win_return_of(wins: Sequence[str], task: str) -> float:
    """The mean return at which a task is won, from `task=return`; infinite where none is named."""
    found = dict(win.rpartition("=")[::2] for win in wins)
    try:
        return float(found.get(task, "inf"))
    except ValueError as error:
        raise UsageError(
            f"train.win_return: '{task}={found[task]}': expected a number, as in {task}=18."
        ) from error


Order = Callable[[Sequence[str], int, int], list[str]]
ORDERS: Mapping[str, Order] = {"canal": canal, "random": random, "rotate": rotate, "same": same}


def order_of(name: str, tasks: Sequence[str], agent: int, seed: int) -> tuple[str, ...]:
    """The tasks of one agent, in its order; each of the job's tasks exactly once."""
    found = tuple(lookup("order", name, ORDERS)(tasks, agent, seed))
    if sorted(found) != sorted(tasks):
        raise UsageError(f"order '{name}' gives agent {agent} {found}; expected each task once.")
    return found
