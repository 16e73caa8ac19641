import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canal_mpi.topology.graphs import Edges, both_ways, edges
from canal_mpi.topology.reach import (
    LAWS,
    MOST_WARNINGS,
    UNREACHED,
    Spread,
    agents,
    degrees,
    diameter,
    distances,
    known,
    spread,
    unheard,
    warnings,
    worst_spread,
)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Edges, int]:
    size = draw(st.integers(1, 8))
    pairs = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))
    return {(a, b) for a, b in draw(st.lists(pairs)) if a != b}, size


def flood(found: Edges, size: int, rounds: int) -> list[list[set[tuple[int, int]]]]:
    """What each agent knows at the beginning of each round, told from neighbour to neighbour."""
    heard: list[set[tuple[int, int]]] = [set() for _ in range(size)]
    story = [[set(lessons) for lessons in heard]]
    for round_ in range(1, rounds):
        before = [set(lessons) | {(agent, round_)} for agent, lessons in enumerate(heard)]
        for a, b in found:
            heard[b] |= before[a] - {lesson for lesson in before[a] if lesson[0] == b}
        heard = [lessons | {k for k in before[a] if k[0] != a} for a, lessons in enumerate(heard)]
        story.append([set(lessons) for lessons in heard])
    return story


def test_distances_count_hops_along_the_arrows() -> None:
    found = {(0, 1), (1, 2), (2, 0)}
    assert distances(found, 4) == [
        [0, 1, 2, UNREACHED],
        [2, 0, 1, UNREACHED],
        [1, 2, 0, UNREACHED],
        [UNREACHED, UNREACHED, UNREACHED, 0],
    ]
    assert diameter(found, 4) == 2
    assert degrees(found, 4) == [1, 1, 1, 0]


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(1, 6))
def test_a_lesson_is_known_d_hops_away_after_d_rounds(
    graph: tuple[Edges, int], rounds: int
) -> None:
    found, size = graph
    story = flood(found, size, rounds)
    for agent in range(size):
        for round_ in range(1, rounds + 1):
            assert known(found, size, agent, round_) == story[round_ - 1][agent]


@given(graphs())
def test_nobody_is_unheard_exactly_where_all_are_reached(graph: tuple[Edges, int]) -> None:
    hops = distances(*graph)
    missing = unheard(*graph)
    for a, row in enumerate(hops):
        for b, way in enumerate(row):
            assert (way == UNREACHED) == (a in missing.get(b, []))
    assert bool(warnings(*graph)) == bool(missing)


def test_warnings_name_who_is_alone_and_who_never_hears_of_whom() -> None:
    assert warnings(edges("ring", 5), 5) == []
    assert warnings(set(), 1) == []
    assert warnings(set(), 4) == ["no edge touches agents 0 to 3."]
    assert warnings({(0, 1), (1, 2), (2, 1)}, 4) == [
        "no edge touches agent 3.",
        "agent 0 never hears of agents 1, 2: no path leads there.",
    ]
    assert warnings(both_ways([(0, 1), (2, 3)]), 4) == [
        "agents 0, 1 never hear of agents 2, 3: no path leads there.",
        "agents 2, 3 never hear of agents 0, 1: no path leads there.",
    ]


def test_many_warnings_are_cut_short_and_still_name_the_agents() -> None:
    words = warnings({(a, a + 1) for a in range(29)}, 30)
    assert len(words) == MOST_WARNINGS + 1
    assert words[0] == "agent 0 never hears of agents 1 to 29: no path leads there."
    assert words[-1] == "nor do all lessons reach agents 5 to 28."


def test_agents_are_listed_shortly() -> None:
    assert agents([3]) == "agent 3"
    assert agents([4, 0, 1, 2, 7]) == "agents 0 to 2, 4, 7"


@settings(deadline=None)
@given(graphs())
def test_a_lesson_arrives_once_at_everybody_a_path_leads_to(graph: tuple[Edges, int]) -> None:
    hops = distances(*graph)
    for donor in range(graph[1]):
        way = spread(*graph, donor)
        reached = sum(hop > 0 for hop in hops[donor])
        assert way.transfers == reached
        assert way.rounds == max(hops[donor])
        assert bool(reached) <= way.busiest <= max(degrees(*graph))


def test_a_lesson_of_a_star_and_of_a_ring() -> None:
    assert spread(edges("star", 6), 6, 3) == Spread(rounds=2, transfers=5, busiest=4)
    assert worst_spread(edges("star", 6), 6) == Spread(rounds=2, transfers=5, busiest=5)
    assert worst_spread(edges("ring", 9), 9) == Spread(rounds=4, transfers=8, busiest=2)


@pytest.mark.parametrize("name", LAWS)
def test_the_law_of_a_topology_gives_its_diameter(name: str) -> None:
    for size in range(1, 71):
        assert LAWS[name].hops(size) == diameter(edges(name, size), size), size
