import subprocess
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
    edges,
    from_text,
    is_file,
    out_neighbors,
    parse_topology,
    warnings,
)
from canal_mpi.topology.spread import spreads

SIZES = [*range(1, 9), 16, 33, 64, 70]
NAMED = [*TOPOLOGIES, "random:1", "random:3", "hosts"]


def both_ways(*pairs: tuple[int, int]) -> Edges:
    return {edge for a, b in pairs for edge in ((a, b), (b, a))}


def degrees(found: Edges, size: int) -> list[int]:
    near = out_neighbors(found)
    return [len(near.get(agent, ())) for agent in range(size)]


def test_every_topology_joins_existing_agents_both_ways() -> None:
    for name in NAMED:
        for size in SIZES:
            found = edges(name, size)
            assert all(0 <= a < size and 0 <= b < size and a != b for a, b in found)
            assert found == {(b, a) for a, b in found}
        assert edges(name, 1) == set()


def test_none_full_ring_star_and_tree_at_every_size() -> None:
    for size in SIZES:
        assert edges("none", size) == set()
        assert len(edges("full", size)) == size * (size - 1)
        heard = {a: {b for b, c in edges("ring", size) if c == a} for a in range(size)}
        for agent in range(size):
            assert heard[agent] == {(agent - 1) % size, (agent + 1) % size} - {agent}
        assert edges("star", size) == both_ways(*((0, a) for a in range(1, size)))
        assert len(edges("tree", size)) == 2 * (size - 1)
        assert max(degrees(edges("tree", size), size)) <= 3


def test_small_topologies_literally() -> None:
    assert edges("ring", 2) == both_ways((0, 1))
    assert edges("ring", 4) == both_ways((0, 1), (1, 2), (2, 3), (3, 0))
    assert edges("star", 3) == both_ways((0, 1), (0, 2))
    assert edges("full", 3) == both_ways((0, 1), (0, 2), (1, 2))


def test_two_agents_are_joined_by_every_topology_but_none() -> None:
    for name in NAMED:
        assert edges(name, 2) == (set() if name == "none" else both_ways((0, 1)))


@given(st.sampled_from([name for name in NAMED if name != "none"]), st.integers(1, 70))
def test_every_agent_reaches_all_others(name: str, size: int) -> None:
    assert warnings(edges(name, size), size) == []


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
def test_a_random_graph_gives_all_agents_enough_neighbours(
    size: int, least: int, seed: int
) -> None:
    found = edges(f"random:{least}", size, seed)
    assert found == both_ways(*found)
    assert warnings(found, size) == []
    assert min(degrees(found, size)) >= min(least, size - 1)
    assert max(degrees(found, size)) <= max(least, 2) + 2


def test_a_random_graph_depends_on_the_seed_alone() -> None:
    assert edges("random:3", 20, 5) == edges("random:3", 20, 5)
    assert edges("random:3", 20, 5) != edges("random:3", 20, 6)


def test_a_random_graph_without_a_proper_number_is_refused() -> None:
    for name in ("random", "random:", "random:x", "random:0", "random:-1"):
        for refuse in (parse_topology, lambda text: edges(text, 5)):
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
    assert max(way.rounds for way in spreads(found, size)) <= 3
    assert warnings(found, size) == []
    inside = {(a, b) for a in range(size) for b in range(size) if a != b and hosts[a] == hosts[b]}
    assert inside <= found
    bridges = sorted((hosts[a], hosts[b]) for a, b in found - inside)
    assert bridges == sorted((a, b) for a in set(hosts) for b in set(hosts) if a != b)


def test_bridges_are_spread_over_the_agents_of_a_host() -> None:
    found = by_host(["a", "a", "b", "b", "c", "c"])
    assert found == both_ways((0, 1), (2, 3), (4, 5), (0, 2), (1, 4), (3, 5))


def test_a_file_may_hold_arrows_comments_and_empty_lines() -> None:
    text = "# who hears whom\n0 1\n\n  1 -> 2  # an arrow\n2->0\n\t3\t4\r\n#\n"
    assert from_text(text, 5, "it") == {(0, 1), (1, 2), (2, 0), (3, 4)}
    assert from_text("# nothing\n", 5, "it") == set()


def test_edges_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "edges.txt"
    path.write_text("0 1\n1 0\n")
    assert edges(str(path), 2) == {(0, 1), (1, 0)}


WRONG_LINES = [
    ("0 1\n# five agents\n1 7\n", 5, "3: agent 7 does not exist: this run has agents 0 to 4"),
    ("7 1\n", 5, "1: agent 7 does not exist: this run has agents 0 to 4 (mpirun -np 5)."),
    ("0 5", 5, "1: agent 5 does not exist: this run has agents 0 to 4"),
    ("0 1\n", 1, "1: agent 1 does not exist: this run has agent 0 only"),
    ("0 1\n2 2\n", 5, "2: agent 2 can't hear itself; remove the edge."),
    ("0 1\nring\n", 5, "2: found 'ring'; expected two agents, as in '0 1'."),
    ("0 1 2", 5, "1: found '0 1 2'; expected two agents"),
    ("0", 5, "1: found '0'; expected two agents"),
    ("\n\n-1 0", 5, "3: found '-1 0'; expected two agents"),
    ("0.5 1", 5, "1: found '0.5 1'; expected two agents"),
    ("0,1", 5, "1: found '0,1'; expected two agents"),
    ("² 1", 5, "1: found '² 1'; expected two agents"),
    ("0 <- 1  # back", 5, "1: found '0 <- 1  # back'; expected two agents"),
    ("0 " + "9" * 5000, 5, "1: found '0 999"),
]


def test_a_wrong_line_is_named_with_what_is_wrong() -> None:
    for text, size, message in WRONG_LINES:
        with pytest.raises(UsageError) as caught:
            from_text(text, size, "it")
        assert str(caught.value).startswith(f"it, line {message}")


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


WATTS = "watts_strogatz_graph"
KNOWN = "full, grid, hosts, hypercube, line, none, random:K, ring, star, torus, tree"


def refusal(name: str, size: int = 5) -> str:
    with pytest.raises(UsageError) as caught:
        edges(name, size)
    return str(caught.value)


def test_an_unknown_name_suggests_the_closest_and_lists_the_known_ones() -> None:
    rest = f"known: {KNOWN}, or a generator of networkx."
    close = {"rign": "ring", "Full": "full", "strar": "star", "watts_strogatz:k=2": WATTS}
    for name, meant in close.items():
        head = name.partition(":")[0]
        assert refusal(name) == f"unknown topology '{head}'; did you mean '{meant}'? {rest}"
    assert refusal("moebius") == f"unknown topology 'moebius'; {rest}"
    assert "unknown topology" in refusal("a" * 300)


# ── networkx ───────────────────────────────────────────────────────────────────────────────────


def test_every_generator_of_networkx_is_a_topology() -> None:
    assert edges("cycle_graph", 6) == edges("ring", 6)
    assert edges("star_graph:n=4", 5) == edges("star", 5)
    assert edges("hypercube_graph:n=3", 8) == edges("hypercube", 8)
    assert edges("grid_2d_graph:m=2,n=3", 6) == edges("grid", 6)
    assert len(edges("petersen_graph", 10)) == 30
    directed = edges("gn_graph", 8)
    assert len(directed) == 7 and not directed & {(b, a) for a, b in directed}
    assert all(a != b for a, b in edges("scale_free_graph", 20))


def test_a_random_generator_gets_the_seed_of_the_job() -> None:
    name = f"{WATTS}:k=2,p=0.5"
    parse_topology(name)
    assert edges(name, 20, 5) == edges(name, 20, 5) == both_ways(*edges(name, 20, 5))
    assert edges(name, 20, 5) != edges(name, 20, 6)
    assert edges(f"{name},seed=6", 20, 5) == edges(name, 20, 6)
    assert edges("random_geometric_graph:radius=2", 5, 2**63 - 1) == edges("full", 5)


def test_what_is_wrong_with_a_generator_is_said() -> None:
    for name, words in {
        WATTS: f"topology '{WATTS}': missing a required argument: 'k'; it takes n, k, p, seed.",
        f"{WATTS}:k=2,tires=3": "missing a required argument: 'p'; it takes n, k, p, seed.",
        f"{WATTS}:k=2,p=1,P=3": "got an unexpected keyword argument 'P'; it takes n, k, p, seed.",
        f"{WATTS}:k=two,p=0.1": "found 'two'; expected a number.",
        f"{WATTS}:k=2,p=nan": "found 'nan'; expected a number.",
        f"{WATTS}:k=2,p=": "found ''; expected a number.",
        f"{WATTS}:k=9,p=0.1": "with 5 agents: k>n, choose smaller k or larger n.",
        "petersen_graph": "found 10 nodes; expected 5, one per agent.",
        "star_graph": "found 6 nodes; expected 5, one per agent; n may be given: n=….",
        "hypercube_graph": "missing a required argument: 'n'; it takes n.",
        "random_powerlaw_tree_sequence": "with 5 agents: ",
        "line_graph:G=2": "with 5 agents: ",
    }.items():
        assert words in refusal(name)


def test_our_own_names_do_not_load_networkx() -> None:
    program = "import sys; from canal_mpi.topology import graphs, spread, exchange\n"
    program += "for name in [*graphs.TOPOLOGIES, 'random:3', 'hosts']: graphs.edges(name, 8)\n"
    program += "print('networkx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


# ── from outside ───────────────────────────────────────────────────────────────────────────────


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


def test_a_topology_from_outside_is_checked(outside: str) -> None:
    for function, reason in {
        "beyond": "agent 5 does not exist",
        "negative": "agent -1 does not exist",
        "mirror": "agent 1 can't hear itself",
        "nothing": "found None; expected pairs of agents",
    }.items():
        assert refusal(f"{outside}:{function}").startswith(
            f"topology '{outside}:{function}': {reason}"
        )


def test_checked_edges_are_a_set_of_their_own() -> None:
    given = {(0, 1)}
    found = check(given, 2, "it")
    found.add((1, 0))
    assert given == {(0, 1)}
