"""Sharing policies: which of the offered lessons an agent wants for a task. They never see MPI."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan

import numpy as np

from canal_mpi.games import human_normalised
from canal_mpi.membuf.similarity import distance
from canal_mpi.types import Array, Offer


@dataclass(frozen=True)
class Need:
    """What an agent knows about the task it is about to learn."""

    task: str
    round: int
    nearest: int = 1  # how many lessons a policy by similarity takes
    donors: int = 1  # how many lessons of the very same task are taken
    measure: str = "weights"  # how embeddings are compared
    embedding: Array = field(default_factory=lambda: np.zeros(0, dtype=np.float32))


def none(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    """Learn alone: nothing is offered and nothing is taken."""
    return []


def exact(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    """The best-scoring lessons of the very same task; ties go to the lowest agent."""
    same = [offer for offer in offers if offer.task == need.task]
    return sorted(same, key=best_first)[: need.donors]


def previous(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    """Every lesson of the round before."""
    return [offer for offer in offers if offer.round == need.round - 1]


def everything(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    """Every lesson there is."""
    return list(offers)


def similar(need: Need, offers: Sequence[Offer]) -> list[Offer]:
    """The lessons whose embeddings are nearest to the task's."""
    comparable = [offer for offer in offers if len(offer.embedding) == len(need.embedding)]

    def nearest_first(offer: Offer) -> tuple[float, tuple[float, int, int]]:
        return (distance(need.measure, need.embedding, offer.embedding), best_first(offer))

    return sorted(comparable, key=nearest_first)[: need.nearest]


def best_first(offer: Offer) -> tuple[float, int, int]:
    """Sorts offers by score; ties go to the lowest agent, those without a score come last."""
    score = float("-inf") if isnan(offer.score) else offer.score
    return (-score, offer.donor, offer.round)


def better(task: str, own_score: float, offers: Sequence[Offer]) -> list[Offer]:
    """The gate: only offers of donors that did better on theirs than the agent does on its own.

    Scores of different games are compared human-normalised; where that is not possible the
    offer passes.
    """

    def passes(offer: Offer) -> bool:
        if offer.task == task:
            return not offer.score <= own_score
        theirs = human_normalised(offer.task, offer.score)
        return not theirs <= human_normalised(task, own_score)

    return [offer for offer in offers if passes(offer)]


Policy = Callable[[Need, Sequence[Offer]], list[Offer]]
POLICIES: Mapping[str, Policy] = {
    "none": none,
    "exact": exact,
    "previous": previous,
    "all": everything,
    "simnet": similar,
    "wasserstein": similar,
}
GATES = ("none", "better")
