import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canal_mpi.errors import UsageError
from canal_mpi.topology.graphs import (
    TOPOLOGIES,
    Edges,
    by_host,
    check,
    check_name,
    edges,
    from_text,
    is_file,
    lonely,
)
from canal_mpi.topology.reach import degrees, diameter, unheard

SIZES = [*range(1, 9), 16, 33, 64, 70]
NAMED = [*TOPOLOGIES, "random:1", "random:3", "hosts"]


def both_ways(*pairs: tuple[int, int]) -> Edges:
    return {edge for a, b in pairs for edge in ((a, b), (b, a))}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMED)
def test_every_topology_joins_existing_agents_both_ways(name: str, size: int) -> None:
    found = edges(name, size)
    assert all(0 <= a < size and 0 <= b < size and a != b for a, b in found)
    assert found == {(b, a) for a, b in found}


@pytest.mark.parametrize("name", NAMED)
def test_a_lone_agent_has_no_edges(name: str) -> None:
    assert edges(name, 1) == set()


@pytest.mark.parametrize("size", SIZES)
def test_none_has_no_edges(size: int) -> None:
    assert edges("none", size) == set()


@pytest.mark.parametrize("size", SIZES)
def test_full_joins_everybody_with_everybody(size: int) -> None:
    assert len(edges("full", size)) == size * (size - 1)


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_gives_everybody_the_neighbours_beside_it(size: int) -> None:
    heard = {a: {b for b, c in edges("ring", size) if c == a} for a in range(size)}
    for agent in range(size):
        assert heard[agent] == {(agent - 1) % size, (agent + 1) % size} - {agent}


@pytest.mark.parametrize("size", SIZES)
def test_a_star_has_agent_0_in_the_middle(size: int) -> None:
    assert edges("star", size) == both_ways(*((0, a) for a in range(1, size)))


def test_small_topologies_literally() -> None:
    assert edges("ring", 2) == both_ways((0, 1))
    assert edges("ring", 4) == both_ways((0, 1), (1, 2), (2, 3), (3, 0))
    assert edges("star", 3) == both_ways((0, 1), (0, 2))
    assert edges("full", 3) == both_ways((0, 1), (0, 2), (1, 2))


def test_two_agents_are_joined_by_every_topology_but_none() -> None:
    for name in NAMED:
        assert edges(name, 2) == (set() if name == "none" else both_ways((0, 1)))


@given(st.sampled_from([name for name in NAMED if name != "none"]), st.integers(1, 70))
def test_everybody_reaches_everybody(name: str, size: int) -> None:
    assert unheard(edges(name, size), size) == {}


@pytest.mark.parametrize("size", SIZES)
def test_a_tree_has_an_edge_less_than_agents_and_two_children_at_most(size: int) -> None:
    found = edges("tree", size)
    assert len(found) == 2 * (size - 1)
    assert max(degrees(found, size)) <= 3


@given(st.integers(1, 70))
def test_grid_and_torus_give_at_most_four_neighbours(size: int) -> None:
    assert max(degrees(edges("grid", size), size)) <= 4
    assert max(degrees(edges("torus", size), size)) <= 4
    assert edges("grid", size) <= edges("torus", size)


def test_a_grid_is_as_near_to_a_square_as_can_be() -> None:
    assert edges("grid", 6) == both_ways((0, 1), (1, 2), (3, 4), (4, 5), (0, 3), (1, 4), (2, 5))
    assert edges("grid", 5) == both_ways((0, 1), (1, 2), (3, 4), (0, 3), (1, 4))
    assert edges("torus", 5) == edges("grid", 5) | both_ways((0, 2))
    assert set(degrees(edges("torus", 16), 16)) == {4}


@given(st.integers(1, 70))
def test_agents_of_a_hypercube_differ_in_one_bit(size: int) -> None:
    found = edges("hypercube", size)
    assert all((a ^ b).bit_count() == 1 for a, b in found)
    wanted = [(a, b) for a in range(size) for b in range(size) if (a ^ b).bit_count() == 1]
    assert found == set(wanted)


@given(st.integers(1, 70), st.integers(1, 80), st.integers(0, 2**63 - 1))
def test_a_random_graph_gives_everybody_enough_neighbours(size: int, least: int, seed: int) -> None:
    found = edges(f"random:{least}", size, seed)
    assert found == both_ways(*found)
    assert unheard(found, size) == {}
    assert min(degrees(found, size)) >= min(least, size - 1)
    assert max(degrees(found, size)) <= max(least, 2) + 2


def test_a_random_graph_depends_on_the_seed_alone() -> None:
    assert edges("random:3", 20, 5) == edges("random:3", 20, 5)
    assert edges("random:3", 20, 5) != edges("random:3", 20, 6)


@pytest.mark.parametrize("name", ["random", "random:", "random:x", "random:0", "random:-1"])
def test_a_random_graph_without_a_proper_number_is_refused(name: str) -> None:
    for refuse in (check_name, lambda text: edges(text, 5)):
        with pytest.raises(UsageError) as caught:
            refuse(name)
        assert str(caught.value) == (
            f"topology '{name}': expected the least number of neighbours, as in random:3."
        )


@given(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=40))
def test_hosts_are_full_inside_and_joined_by_one_bridge_each(hosts: list[str]) -> None:
    size = len(hosts)
    found = edges("hosts", size, hosts=hosts)
    assert found == both_ways(*found)
    assert diameter(found, size) <= 3
    assert unheard(found, size) == {}
    inside = {(a, b) for a in range(size) for b in range(size) if a != b and hosts[a] == hosts[b]}
    assert inside <= found
    bridges = sorted((hosts[a], hosts[b]) for a, b in found - inside)
    assert bridges == sorted((a, b) for a in set(hosts) for b in set(hosts) if a != b)


def test_bridges_are_spread_over_the_agents_of_a_host() -> None:
    found = by_host(["a", "a", "b", "b", "c", "c"])
    assert found == both_ways((0, 1), (2, 3), (4, 5), (0, 2), (1, 4), (3, 5))


@pytest.mark.parametrize("size", SIZES)
def test_lonely_agents_are_those_without_an_edge(size: int) -> None:
    assert lonely(edges("none", size), size) == list(range(size))
    assert lonely(edges("ring", size), size) == ([0] if size == 1 else [])
    assert lonely({(0, 2)}, 4) == [1, 3]


def test_a_file_may_hold_arrows_comments_and_empty_lines() -> None:
    text = "# who hears whom\n0 1\n\n  1 -> 2  # an arrow\n2->0\n\t3\t4\r\n#\n"
    assert from_text(text, 5, "it") == {(0, 1), (1, 2), (2, 0), (3, 4)}


def test_a_file_without_edges_is_a_topology_too() -> None:
    assert from_text("# nothing\n", 5, "it") == set()


def test_edges_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "edges.txt"
    path.write_text("0 1\n1 0\n")
    assert edges(str(path), 2) == {(0, 1), (1, 0)}


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        (
            "0 1\n# five agents\n1 7\n",
            5,
            "it, line 3: agent 7 does not exist: this run has agents 0 to 4 (mpirun -np 5).",
        ),
        (
            "7 1\n",
            5,
            "it, line 1: agent 7 does not exist: this run has agents 0 to 4 (mpirun -np 5).",
        ),
        ("0 5", 5, "it, line 1: agent 5 does not exist: this run has agents 0 to 4"),
        ("0 1\n", 1, "it, line 1: agent 1 does not exist: this run has agent 0 only"),
        ("0 1\n1 0\n0 -> 1", 5, "it, line 3: the edge 0 1 is there already; remove one."),
        ("0 1\n2 2\n", 5, "it, line 2: agent 2 can't hear itself; remove the edge."),
        ("0 1\nring\n", 5, "it, line 2: found 'ring'; expected two agents, as in '0 1'."),
        ("0 1 2", 5, "it, line 1: found '0 1 2'; expected two agents"),
        ("0", 5, "it, line 1: found '0'; expected two agents"),
        ("\n\n-1 0", 5, "it, line 3: found '-1 0'; expected two agents"),
        ("0.5 1", 5, "it, line 1: found '0.5 1'; expected two agents"),
        ("0,1", 5, "it, line 1: found '0,1'; expected two agents"),
        ("² 1", 5, "it, line 1: found '² 1'; expected two agents"),
        ("0 <- 1  # back", 5, "it, line 1: found '0 <- 1  # back'; expected two agents"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_wrong(text: str, size: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_text(text, size, "it")
    assert str(caught.value).startswith(message)


def test_an_agent_with_thousands_of_digits_is_refused() -> None:
    with pytest.raises(UsageError):
        from_text("0 " + "9" * 5000, 5, "it")


def test_a_wrong_line_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "edges.txt"
    path.write_text("0 1\n1 7\n")
    with pytest.raises(UsageError) as caught:
        edges(str(path), 5)
    assert str(caught.value).startswith(f"topology file {path}, line 2: agent 7 does not exist")


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path / "missing.txt"), str(tmp_path / "missing")):
        with pytest.raises(
            UsageError, match=rf"topology file {name} can't be read: .*No such file"
        ):
            edges(name, 5)


def test_a_directory_or_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "noise.txt"
    path.write_bytes(b"\xff\xfe\x00")
    for name in (str(tmp_path), str(path)):
        with pytest.raises(UsageError, match="can't be read"):
            edges(name, 5)


def test_files_are_told_from_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_file("a/b")
    assert is_file("edges.txt")
    assert not is_file("ring")
    assert not is_file("rnig")
    assert not is_file("")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("0 1")
    (tmp_path / "ring").write_text("0 1")
    assert is_file("mine")
    assert not is_file("ring")
    assert edges("mine", 2) == {(0, 1)}


KNOWN = "full, grid, hosts, hypercube, line, none, random:K, ring, star, torus, tree"


@pytest.mark.parametrize(("name", "meant"), [("rign", "ring"), ("Full", "full"), ("strar", "star")])
def test_an_unknown_name_suggests_the_closest(name: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        edges(name, 5)
    assert str(caught.value) == (
        f"unknown topology '{name}'; did you mean '{meant}'? known: {KNOWN}."
    )


def test_a_name_like_no_other_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        edges("moebius", 5)
    assert str(caught.value) == f"unknown topology 'moebius'; known: {KNOWN}."


def test_a_very_long_name_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown topology"):
        edges("a" * 300, 5)


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "topology_from_outside"
    (tmp_path / f"{name}.py").write_text(
        "def line(size):\n    return [(a, a + 1) for a in range(size - 1)]\n"
        "def beyond(size):\n    return {(0, size)}\n"
        "def mirror(size):\n    return {(1, 1)}\n"
        "def negative(size):\n    return {(0, -1)}\n"
        "def nothing(size):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_a_topology_may_come_from_outside(outside: str) -> None:
    assert edges(f"{outside}:line", 4) == {(0, 1), (1, 2), (2, 3)}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("beyond", "agent 5 does not exist"),
        ("negative", "agent -1 does not exist"),
        ("mirror", "agent 1 can't hear itself"),
    ],
)
def test_a_topology_from_outside_is_checked(outside: str, function: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"topology '{outside}:{function}': {reason}"):
        edges(f"{outside}:{function}", 5)


def test_a_topology_from_outside_that_gives_no_edges_at_all_is_refused(outside: str) -> None:
    with pytest.raises(UsageError):
        edges(f"{outside}:nothing", 5)


def test_checked_edges_are_a_set_of_their_own() -> None:
    given = {(0, 1)}
    found = check(given, 2, "it")
    found.add((1, 0))
    assert given == {(0, 1)}
