import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from canal_mpi.cli import cli
from canal_mpi.errors import UsageError
from canal_mpi.topology.draw import MOST_DRAWN, WIDE, host_of_each, picture, summary, svg
from canal_mpi.topology.graphs import TOPOLOGIES, edges
from canal_mpi.topology.layout import hidden, places

NAMES = [*TOPOLOGIES, "random:3", "hosts"]
SVG = "{http://www.w3.org/2000/svg}"


def topology(*words: str) -> Result:
    return CliRunner().invoke(cli, ["topology", *words])


@pytest.mark.parametrize("size", [1, 2, 5, 8, 31, 70])
@pytest.mark.parametrize("name", NAMES)
def test_agents_stand_apart_inside_the_picture(name: str, size: int) -> None:
    points = places(name, size)
    assert len({(round(x, 6), round(y, 6)) for x, y in points}) == size
    assert all(0 <= x <= 1 + 1e-9 and 0 <= y <= 1 + 1e-9 for x, y in points)


def test_hosts_stand_in_circles_of_their_own() -> None:
    points = places("hosts", 6, ["a", "a", "b", "b", "c", "c"])

    def gap(a: int, b: int) -> float:
        return sum((p - q) ** 2 for p, q in zip(points[a], points[b], strict=True))

    assert gap(0, 1) < min(gap(0, 2), gap(1, 3), gap(1, 4), gap(0, 5))


def test_an_edge_over_another_agent_is_known_as_hidden() -> None:
    assert hidden({(0, 2), (0, 1)}, [(0, 0), (1, 0), (2, 0)], 0.1) == {(0, 2)}


@pytest.mark.parametrize("size", [1, 2, 5, 8, MOST_DRAWN])
@pytest.mark.parametrize("name", NAMES)
def test_every_agent_is_in_the_terminals_picture(name: str, size: int) -> None:
    lines = picture(name, edges(name, size), size)
    drawn = lines[: len(lines) - 1 - lines[::-1].index("")]
    assert max(map(len, drawn)) <= WIDE
    assert sorted(int(n) for n in re.findall("[0-9]+", " ".join(drawn))) == list(range(size))


def test_many_agents_are_told_in_words() -> None:
    lines = picture("ring", edges("ring", 200), 200)
    assert lines[0] == ""
    assert "199" in lines[1]
    assert lines[-1] == "  … and 136 more"
    assert len(lines) < 30


def test_the_summary_gives_degree_diameter_rounds_and_bytes() -> None:
    assert summary("ring", edges("ring", 8), 8, 1.5) == [
        "ring · 8 agents · 8 edges both ways",
        "  neighbours  2 an agent",
        "  diameter    4",
        "  a lesson    of 1.5 MB reaches all others within 4 exchanges: 7 transfers, 10.5 MB;",
        "              one agent sends at most 3 MB of it",
    ]
    assert summary("f", {(0, 1), (1, 2), (2, 1)}, 4, 1)[-2:] == [
        "  warning     no edge touches agent 3.",
        "  warning     agent 0 never hears of agents 1, 2: no path leads there.",
    ]
    assert summary("full", set(), 1, 1)[0] == "full · 1 agent · no edges"


@pytest.mark.parametrize("name", NAMES)
def test_the_svg_is_well_formed_and_says_what_it_shows(name: str) -> None:
    found = edges(name, 8)
    root = ElementTree.fromstring(svg(name, found, 8, summary(name, found, 8, 1)))
    title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None and desc is not None
    assert title.text == summary(name, found, 8, 1)[0]
    assert "neighbours" in str(desc.text)
    assert len(root.findall(f"{SVG}circle")) == 8
    paths = root.findall(f"{SVG}g/{SVG}path")
    assert len(paths) == len(found) / 2
    assert not any("marker-end" in path.attrib for path in paths)


def test_a_directed_edge_has_a_tip() -> None:
    found = {(0, 1), (1, 0), (1, 2)}
    root = ElementTree.fromstring(svg("<&>", found, 3, summary("<&>", found, 3, 1)))
    paths = root.findall(f"{SVG}g/{SVG}path")
    assert ["marker-end" in path.attrib for path in paths] == [False, True]


def test_the_svg_knows_the_dark() -> None:
    assert "prefers-color-scheme: dark" in svg("ring", set(), 2, ["ring"])


def test_the_command_draws_and_writes(tmp_path: Path) -> None:
    file = tmp_path / "ring.svg"
    found = topology("ring", "-n", "8", "--svg", str(file))
    assert found.exit_code == 0, found.output
    assert "ring · 8 agents · 8 edges both ways" in found.output
    assert ElementTree.fromstring(file.read_text()).tag == f"{SVG}svg"


def test_the_command_takes_hosts_a_seed_and_a_file(tmp_path: Path) -> None:
    assert "hosts · 5 agents" in topology("hosts", "--hosts", "nano-1:2,xavier:3").output
    first, second = (topology("random:3", "-n", "20", "--seed", seed).output for seed in "12")
    assert first != second
    (tmp_path / "edges.txt").write_text("0 -> 1\n")
    assert "1 one way" in topology(str(tmp_path / "edges.txt"), "-n", "2").output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rign",), "did you mean 'ring'"),
        (("ring", "-n", "0"), "-n 0: expected 1 to 256 agents"),
        (("ring", "-n", "100000"), "expected 1 to 256 agents"),
        (("random:x",), "as in random:3"),
        (("random:3", "--seed", "-1"), "--seed -1: expected at least 0"),
        (("ring", "--lesson-mb", "nan"), "--lesson-mb nan: expected a positive number"),
        (("hosts", "-n", "4", "--hosts", "a:2,b"), "room for 3 agents, but -n says 4"),
        (("hosts", "--hosts", "a:x"), "expected names, as in nano-1:2,xavier"),
    ],
)
def test_what_cannot_be_drawn_is_said(words: tuple[str, ...], message: str) -> None:
    found = topology(*words)
    assert isinstance(found.exception, UsageError)
    assert message in str(found.exception)


def test_a_list_of_hosts_gives_each_agent_its_host() -> None:
    assert host_of_each("a:2, b", None) == ["a", "a", "b"]
    assert len(host_of_each("a:999999999", None)) < 300
