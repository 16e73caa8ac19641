from math import isnan

import pytest

from canal_mpi.errors import UsageError
from canal_mpi.games import (
    CANAL_ORDERS,
    ORDERS,
    RANDOM_AND_HUMAN,
    TEN_GAMES,
    canal,
    human_normalised,
    order_of,
    random,
)

SEVEN_ORDERS = """
RoadRunner, Riverraid, StarGunner, Krull, Robotank, Jamesbond, Alien, Kangaroo, Frostbite, BattleZone
Krull, StarGunner, Frostbite, BattleZone, Jamesbond, Alien, Kangaroo, Robotank, Riverraid, RoadRunner
Jamesbond, Robotank, Frostbite, Krull, Alien, Kangaroo, BattleZone, Riverraid, RoadRunner, StarGunner
Alien, Kangaroo, BattleZone, Robotank, Frostbite, RoadRunner, Krull, Riverraid, StarGunner, Jamesbond
Frostbite, BattleZone, RoadRunner, Riverraid, StarGunner, Krull, Alien, Kangaroo, Jamesbond, Robotank
BattleZone, Jamesbond, StarGunner, Krull, Robotank, RoadRunner, Riverraid, Kangaroo, Alien, Frostbite
StarGunner, Krull, Alien, BattleZone, Robotank, Frostbite, Kangaroo, RoadRunner, Jamesbond, Riverraid
"""  # noqa: E501
SCORES = """
RoadRunner 11.5 7845.0
Riverraid 1338.5 17118.0
StarGunner 664.0 10250.0
Krull 1598.0 2665.5
Robotank 2.2 11.9
Jamesbond 29.0 302.8
Alien 227.8 7127.7
Kangaroo 52.0 3035.0
Frostbite 65.2 4334.7
BattleZone 2360.0 37187.5
"""


def literal_orders() -> list[tuple[str, ...]]:
    return [tuple(line.split(", ")) for line in SEVEN_ORDERS.strip().splitlines()]


def test_there_are_ten_games() -> None:
    assert len(TEN_GAMES) == len(set(TEN_GAMES)) == 10


def test_the_seven_orders_are_those_of_the_original() -> None:
    found = [order_of("canal", TEN_GAMES, agent, seed=1) for agent in range(7)]
    assert found == literal_orders()
    assert len(CANAL_ORDERS) == 7


def test_the_seven_orders_do_not_depend_on_the_seed_or_on_how_tasks_are_listed() -> None:
    for agent in range(7):
        assert order_of("canal", TEN_GAMES[::-1], agent, seed=99) == literal_orders()[agent]


def test_after_two_rounds_of_five_agents_every_game_was_learnt() -> None:
    learnt = {game for agent in range(5) for game in canal(TEN_GAMES, agent, 1)[:2]}
    assert learnt == set(TEN_GAMES)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("count", [1, 2, 7, 10])
def test_every_order_gives_each_task_once(name: str, count: int) -> None:
    tasks = TEN_GAMES[:count]
    for agent in range(12):
        assert sorted(order_of(name, tasks, agent, seed=3)) == sorted(tasks)


def test_a_part_of_the_games_keeps_the_order_among_them() -> None:
    tasks = ["Alien", "Krull", "Frostbite"]
    assert order_of("canal", tasks, 1, 1) == ("Krull", "Frostbite", "Alien")
    assert order_of("canal", tasks, 3, 1) == ("Alien", "Frostbite", "Krull")


def test_agents_beyond_the_seventh_get_seeded_permutations() -> None:
    found = [order_of("canal", TEN_GAMES, agent, seed=5) for agent in range(7, 30)]
    assert found == [order_of("random", TEN_GAMES, agent, seed=5) for agent in range(7, 30)]
    assert len(set(found)) == len(found)
    assert found[0] == order_of("canal", TEN_GAMES, 7, seed=5)
    assert found[0] != order_of("canal", TEN_GAMES, 7, seed=6)


def test_random_orders_depend_on_seed_and_agent_only() -> None:
    assert random(TEN_GAMES, 0, 1) == random(TEN_GAMES, 0, 1)
    assert len({tuple(random(TEN_GAMES, agent, 1)) for agent in range(20)}) == 20
    assert len({tuple(random(TEN_GAMES, 0, seed)) for seed in range(20)}) == 20


def test_random_orders_start_with_every_task_about_as_often() -> None:
    firsts = [random("abcde", agent, 1)[0] for agent in range(2000)]
    assert all(320 < firsts.count(task) < 480 for task in "abcde")


def test_rotated_orders_start_with_the_agents_own_task() -> None:
    assert order_of("rotate", "abc", 0, 1) == ("a", "b", "c")
    assert order_of("rotate", "abc", 2, 1) == ("c", "a", "b")
    assert order_of("rotate", "abc", 4, 1) == ("b", "c", "a")


def test_the_same_order_is_as_listed_for_everybody() -> None:
    assert {order_of("same", ("c", "a", "b"), agent, agent) for agent in range(9)} == {
        ("c", "a", "b")
    }


def test_the_canal_order_rotates_where_there_are_other_tasks() -> None:
    tasks = ["Krull", "CartPole-v1", "Pong"]
    for agent in range(9):
        assert order_of("canal", tasks, agent, 1) == order_of("rotate", tasks, agent, 1)
    assert order_of("canal", ["Pong"], 8, 1) == ("Pong",)


def test_an_unknown_order_suggests_the_closest() -> None:
    with pytest.raises(UsageError, match="unknown order 'rotat'; did you mean 'rotate'"):
        order_of("rotat", TEN_GAMES, 0, 1)


def test_an_order_from_outside_must_give_each_task_once() -> None:
    with pytest.raises(UsageError, match=r"gives agent 2 \('a',\); expected each task once"):
        order_of(f"{__name__}:first_only", "abc", 2, 1)
    assert order_of(f"{__name__}:backwards", "abc", 2, 1) == ("c", "b", "a")


def first_only(tasks: str, agent: int, seed: int) -> list[str]:
    return [tasks[0]]


def backwards(tasks: str, agent: int, seed: int) -> list[str]:
    return list(tasks[::-1])


def test_reference_scores_are_the_published_ones() -> None:
    lines = [line.split() for line in SCORES.strip().splitlines()]
    expected = {game: (float(low), float(high)) for game, low, high in lines}
    assert expected == RANDOM_AND_HUMAN
    assert list(RANDOM_AND_HUMAN) == list(TEN_GAMES)


def test_normalised_scores_are_0_for_random_and_1_for_human_play() -> None:
    for game in TEN_GAMES:
        low, high = RANDOM_AND_HUMAN[game]
        assert human_normalised(game, low) == 0
        assert human_normalised(game, high) == 1
        assert human_normalised(game, (low + high) / 2) == pytest.approx(0.5)
        assert human_normalised(game, low - (high - low)) == pytest.approx(-1)


def test_normalised_scores_of_the_published_pixel_agent() -> None:
    assert human_normalised("Krull", 3805) == pytest.approx(2.0674, abs=1e-4)
    assert human_normalised("Frostbite", 328.3) == pytest.approx(0.0616, abs=1e-4)


def test_a_task_without_reference_has_no_normalised_score() -> None:
    assert isnan(human_normalised("CartPole-v1", 500))
    assert isnan(human_normalised("Krull", float("nan")))
