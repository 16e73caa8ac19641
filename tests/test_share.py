from dataclasses import replace
from itertools import permutations
from math import inf, nan

import pytest

from canal_mpi.interfaces import Offer
from canal_mpi.membuf.selection import POLICIES, Need, everything, exact, none, previous, similar

NEED = Need("Krull", 3)


def offer(donor: int, score: float, task: str = "Krull", round_: int = 1) -> Offer:
    return Offer(donor, round_, task, score, 100, 1000)


def test_none_takes_nothing() -> None:
    assert none(NEED, [offer(0, 5.0)]) == []


def test_exact_takes_only_the_very_same_task() -> None:
    assert exact(NEED, [offer(0, 5.0, "Alien"), offer(1, 9.0, "krull")]) == []
    assert exact(NEED, [offer(0, 9.0, "Alien"), offer(1, 1.0)]) == [offer(1, 1.0)]


def test_exact_takes_nothing_where_nothing_is_offered() -> None:
    assert exact(NEED, []) == []


# The first of each list is the best: ties go to the later round, then to the lowest agent; NaN
# counts as the median.
@pytest.mark.parametrize(
    "offers",
    [
        [offer(4, 7.0), offer(0, 5.0), offer(1, 6.5)],
        [offer(4, 7.0), offer(0, -3.0), offer(1, -inf)],
        [offer(1, 7.0), offer(2, 7.0), offer(3, 7.0)],
        [offer(1, 0.0), offer(0, nan), offer(2, nan)],
        [offer(2, -1e9), offer(0, nan), offer(1, nan)],
        [offer(0, nan), offer(1, nan), offer(2, nan)],
        [offer(1, 7.0, round_=3), offer(1, 7.0, round_=2), offer(2, 7.0, round_=1)],
        [replace(offer(2, 7.0), episodes=9), replace(offer(0, 7.0), episodes=3), offer(1, nan)],
    ],
)
def test_exact_takes_the_best_score_whatever_order_the_offers_come_in(
    offers: list[Offer],
) -> None:
    for mixed in permutations(offers):
        assert exact(NEED, mixed) == offers[:1]


@pytest.mark.parametrize(
    ("most", "donors"), [(1, [3]), (2, [3, 4]), (3, [3, 4, 1]), (9, [3, 4, 1])]
)
def test_exact_takes_as_many_lessons_of_the_task_as_are_asked_for(
    most: int, donors: list[int]
) -> None:
    offers = [offer(1, 5.0), offer(0, 9.0, "Alien"), offer(4, nan), offer(3, 7.0)]
    taken = exact(Need("Krull", 3, donors=most), offers)
    assert [found.donor for found in taken] == donors


def test_a_policy_leaves_the_offers_as_they_are() -> None:
    offers = [offer(2, 1.0), offer(1, 2.0)]
    for policy in POLICIES.values():
        policy(NEED, offers)
    assert offers == [offer(2, 1.0), offer(1, 2.0)]


def test_policies_are_known_by_their_names() -> None:
    assert {
        "none": none,
        "exact": exact,
        "previous": previous,
        "all": everything,
        "simnet": similar,
        "wasserstein": similar,
    } == POLICIES


def test_a_lesson_is_named_by_its_donor_and_round() -> None:
    assert offer(3, 1.0, round_=7).key == (3, 7)
