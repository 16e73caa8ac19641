"""Sharing policies: which of the offered lessons an agent wants for a task. They never see MPI."""

from collections.abc import Mapping, Sequence
from math import isnan

from canal_mpi.types import Offer, Policy


def none(task: str, offers: Sequence[Offer]) -> list[Offer]:
    """Learn alone: nothing is offered and nothing is taken."""
    return []


def exact(task: str, offers: Sequence[Offer]) -> list[Offer]:
    """The best-scoring lesson of the very same task; ties go to the lowest agent."""
    same = [offer for offer in offers if offer.task == task]
    return sorted(same, key=_best_first)[:1]


def _best_first(offer: Offer) -> tuple[float, int, int]:
    score = float("-inf") if isnan(offer.score) else offer.score
    return (-score, offer.donor, offer.round)


POLICIES: Mapping[str, Policy] = {"none": none, "exact": exact}
