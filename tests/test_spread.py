from math import ceil, log2
from pathlib import Path

from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_links import distances, known

from canal_mpi.cli import cli
from canal_mpi.errors import UsageError
from canal_mpi.topology.graphs import (
    Edges,
    bfs_parents,
    both_ways,
    columns,
    edges,
    out_neighbors,
    warnings,
)
from canal_mpi.topology.spread import (
    Spread,
    neighbour_table,
    spreads,
    summary,
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


def test_neighbours_are_those_that_arrows_lead_to() -> None:
    assert out_neighbors({(0, 1), (1, 2), (2, 0)}) == {0: [1], 1: [2], 2: [0]}


def test_an_agent_hears_first_from_its_nearest_neighbour_of_the_lowest_number() -> None:
    found = both_ways([(0, 3), (0, 1), (1, 2), (3, 2), (2, 4)])
    assert bfs_parents(out_neighbors(found), 0) == {1: 0, 3: 0, 2: 1, 4: 2}
    assert bfs_parents(out_neighbors({(0, 1)}), 1) == {}
    assert bfs_parents({}, 4) == {}


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
def test_warnings_name_the_agents_that_some_lessons_never_reach(graph: tuple[Edges, int]) -> None:
    hops, size = distances(*graph), graph[1]
    deaf = [str(b) for b in range(size) if any(row[b] < 0 for row in hops)]
    words = "".join(warnings(*graph))
    assert bool(words) == bool(deaf)
    assert f" {', '.join(deaf)}:" in words if deaf else not words
    assert warnings(set(), 1) == []


@settings(deadline=None)
@given(graphs())
def test_a_lesson_arrives_once_wherever_a_path_leads(graph: tuple[Edges, int]) -> None:
    hops = distances(*graph)
    most = max(map(len, out_neighbors(graph[0]).values()), default=0)
    for way, row in zip(spreads(*graph), hops, strict=True):
        reached = sum(hop > 0 for hop in row)
        assert way.transfers == reached
        assert way.rounds == max(row)
        assert bool(reached) <= way.busiest <= most


def test_a_lesson_of_a_star_and_of_a_ring() -> None:
    star = spreads(edges("star", 6), 6)
    assert star[3] == Spread(rounds=2, transfers=5, busiest=4)
    assert star[0] == Spread(rounds=1, transfers=5, busiest=5)
    assert set(spreads(edges("ring", 9), 9)) == {Spread(rounds=4, transfers=8, busiest=2)}


def tree_hops(size: int) -> int:
    depth = size.bit_length() - 1
    return 2 * depth - (size < 3 << depth - 1) if depth else 0


def test_the_diameters_follow_the_laws_in_the_docs() -> None:
    for size in range(1, 71):
        rows = ceil(size / columns(size))
        laws = {
            "none": 0,
            "full": min(size - 1, 1),
            "ring": size // 2,
            "line": size - 1,
            "star": min(size - 1, 2),
            "tree": tree_hops(size),
            "grid": rows + columns(size) - 2,
            "hypercube": ceil(log2(size)),
        }
        ways = {name: spreads(edges(name, size), size) for name in laws}
        found = {name: max(way.rounds for way in ways[name]) for name in laws}
        assert found == laws


# ── canal-mpi topology ─────────────────────────────────────────────────────────────────────────


def topology(*words: str) -> Result:
    return CliRunner().invoke(cli, ["topology", *words])


def test_the_neighbours_of_many_agents_are_cut_short() -> None:
    lines = neighbour_table(edges("ring", 200), 200)
    assert "199" in lines[0]
    assert lines[-1] == "  … and 136 more"
    assert len(lines) < 30
    assert neighbour_table(edges("full", 5), 5) == ["  every agent → all others"]
    assert neighbour_table({(0, 1)}, 2) == ["    0 → all others      1 → nobody"]


def test_the_summary_gives_degree_diameter_rounds_and_bytes() -> None:
    assert summary("ring", edges("ring", 8), 8, 1.5) == [
        "ring · 8 agents · 8 edges both ways",
        "  neighbours  2 per agent",
        "  diameter    4",
        "  a lesson    of 1.5 MB reaches all others within 4 exchanges: 7 transfers, 10.5 MB;",
        "              one agent sends at most 3 MB of it",
    ]
    assert summary("f", {(0, 1), (1, 2), (2, 1)}, 4, 1)[-1] == (
        "  warning     some lessons never reach agents 0, 1, 2, 3: no path leads there."
    )
    assert summary("full", set(), 1, 1)[0] == "full · 1 agent · no edges"


def test_the_command_prints_who_hears_whom() -> None:
    found = topology("ring", "-n", "8")
    assert found.exit_code == 0, found.output
    assert "ring · 8 agents · 8 edges both ways" in found.output
    assert "  0 → 1, 7" in found.output


def test_the_command_takes_hosts_a_seed_a_generator_and_a_file(tmp_path: Path) -> None:
    assert "hosts · 5 agents" in topology("hosts", "--hosts", "nano-1:2,xavier:3").output
    assert "5 edges both ways" in topology("watts_strogatz_graph:k=2,p=0.1").output
    first, second = (topology("random:3", "-n", "20", "--seed", seed).output for seed in "12")
    assert first != second
    (tmp_path / "edges.txt").write_text("0 -> 1\n")
    assert "1 one way" in topology(str(tmp_path / "edges.txt"), "-n", "2").output


def test_what_cannot_be_shown_is_said() -> None:
    for words, message in {
        ("rign",): "did you mean 'ring'",
        ("random:x",): "as in random:3",
        ("ring", "--lesson-mb", "nan"): "--lesson-mb nan: expected a positive number",
        ("hosts", "-n", "4", "--hosts", "a:2,b"): "names 3 agents, but -n says 4",
        ("hosts", "--hosts", "a:x"): "'x' is not understood",
        ("hosts", "--hosts", "a:9999"): "expected a name and 1 to 4096 ranks",
    }.items():
        found = topology(*words)
        assert isinstance(found.exception, UsageError)
        assert message in str(found.exception)
    for option in (("-n", "0"), ("-n", "100000"), ("--seed", "-1")):
        found = topology("random:3", *option)
        assert found.exit_code == 2
        assert f"{option[1]} is not in the range" in found.output
