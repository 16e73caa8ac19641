"""The report: one page that needs nothing else, for whole runs and for broken ones."""

import csv
import json
import re
import shutil
from html.parser import HTMLParser
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from madeup import exchanged, write_run

from canal_mpi.errors import UsageError
from canal_mpi.games import TEN_GAMES
from canal_mpi.report import svg
from canal_mpi.report.page import page
from canal_mpi.report.parts import table
from canal_mpi.report.write import write_report
from canal_mpi.results.compare import compare
from canal_mpi.results.reading import load
from canal_mpi.schema import Rows

VOID = {"meta", "link", "br", "i"}


class Page(HTMLParser):
    """Every element with its attributes; complains of elements that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID - {"i"}:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def ids(self) -> list[str]:
        return [
            str(attrs["id"]) for _, attrs in self.found if "id" in attrs and attrs["id"] != "to"
        ]


def made(*runs: Path) -> tuple[str, Page]:
    text = page(compare([load(run) for run in runs]))
    return text, Page(text)


def test_the_page_of_a_run_has_every_figure(tmp_path: Path) -> None:
    text, found = made(write_run(tmp_path / "a"))
    ids = set(found.ids())
    assert {"timeline", "topology", "flow", "curve-0", "curve-2", "heat-0", "heat-1"} <= ids
    assert {"forgetting", "isolated", "time", "bytes", "measures", "tasks"} <= ids
    assert len(found.ids()) == len(ids)
    for question in ("Did it learn?", "Did sharing help?", "Did it forget?", "Where did the time"):
        assert question in text
    assert "mpirun -np 2 canal-mpi train --job" in text


def test_every_drawing_can_be_read_aloud(tmp_path: Path) -> None:
    _, found = made(write_run(tmp_path / "a"))
    drawings = [attrs for name, attrs in found.found if name == "svg"]
    assert len(drawings) >= 11
    for attrs in drawings:
        assert attrs["role"] == "img"
        assert len(attrs["aria-label"] or "") > 20


def test_nothing_is_loaded_from_anywhere(tmp_path: Path) -> None:
    text, found = made(write_run(tmp_path / "a"))
    for name, attrs in found.found:
        assert name not in ("img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "srcset", "action", "onclick", "onload"} & attrs.keys()
        assert attrs.get("href", "data:,") == "data:,"
    assert "url(" not in text.replace("url(#to)", "")
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_what_a_run_says_is_never_markup(tmp_path: Path) -> None:
    nasty = '<script>alert(1)</script>"><b>&amp;'[:60]
    folder = write_run(tmp_path / "a", tasks=[nasty, "Krull"])
    (folder / "events.jsonl").write_text(json.dumps({"event": "<img src=x>", "time": 1}) + "\n")
    text, found = made(folder)
    assert "<script>alert" not in text
    assert [name for name, _ in found.found].count("script") == 1
    assert not [name for name, _ in found.found if name in ("b", "img")]


def test_several_runs_are_set_beside_each_other(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", share=False)]
    text, found = made(*runs)
    ids = found.ids()
    assert {"progress", "advantage", "versus-0", "compared", "run0-timeline", "run1-timeline"} <= {
        *ids
    }
    assert len(ids) == len(set(ids))
    assert "no sharing" in text
    assert 'class="n best"' in text
    assert "TA = " in text


def current(agent: int, after: int, task: str) -> float:
    return 5.0 if after and task == "Krull" else nan


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "begun": ({"rounds": 0, "status": "running"}, "0 of 3 rounds"),
    "running": ({"rounds": 2, "status": "running"}, "2 of 3 rounds"),
    "degraded": ({"rounds": 1, "status": "degraded"}, "status degraded"),
    "alone": ({"agents": 1, "first": 4}, "no sharing"),
    "unseen": ({"score": lambda *_: nan}, "There are no evaluations"),
    "current": ({"score": current}, "evaluation.tasks=all"),
    "short": ({"max_steps": 50}, "cut after 50 steps"),
    "one task": ({"tasks": ["Krull"], "agents": 1}, "no sharing"),
    "enormous": ({"score": lambda *_: 1e300}, "status finished"),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_run_that_lacks_something_is_shown_with_a_note(tmp_path: Path, kind: str) -> None:
    settings, words = ODD[kind]
    text, found = made(write_run(tmp_path / "a", **settings))
    assert words in text
    assert "timeline" in found.ids()
    assert not re.search(r"\bnan\b|\binf\b", re.sub(r"<(style|script|pre)>.*?</\1>", "", text))


def test_refusals_drops_and_events_are_listed(tmp_path: Path) -> None:
    from canal_mpi.report.tables import fault_rows

    folder = write_run(tmp_path / "a")
    run, rows = load(folder), Rows()
    exchanged(rows, 2, 0, 1, "Krull", "refusal", "message fails its checksum")
    taken = {name.partition("/")[2]: column for name, column in rows.take().items()}
    for name, column in taken.items():
        text = column.dtype.kind == "S"
        run["exchange"][name] = np.char.decode(column) if text else column
    events = [{"event": "start"}, {"event": "resumed", "time": 0, "generation": 3}]
    lines = [json.dumps(event) for event in events]
    (folder / "events.jsonl").write_text("\n".join([*lines, '{"torn": ']))
    found = list(fault_rows(run))
    assert found[0][1] == "refusal: message fails its checksum"
    assert found[1] == ["1970-01-01T00:00:00+00:00", "resumed", "generation 3"]
    assert len(found) == 2


def test_the_report_is_one_file_beside_the_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    assert write_report([folder]) == [folder / "report.html"]
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_tables_and_measures_come_as_csv_and_json(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", share=False)]
    files = write_report(runs, tmp_path / "out.html", csv=True, as_json=True)
    assert tmp_path / "out.json" in files
    facts = json.loads((tmp_path / "out.json").read_text(), parse_constant=refuse)
    assert facts["scale"] == "HNS"
    assert facts["groups"][0]["label"] == "share exact"
    assert facts["groups"][0]["versus"]["probability of improvement"] == 0.5
    rows = list(csv.reader((tmp_path / "out" / "a-tasks.csv").open()))
    assert len(rows) == 7
    assert (tmp_path / "out" / "compared.csv").exists()


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def test_figures_come_as_png(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py", reason="resvg-py is not installed (extra: png)")
    files = write_report([write_run(tmp_path / "a")], png=True)
    pictures = [file for file in files if file.suffix == ".png"]
    assert len(pictures) > 10
    for file in pictures:
        assert file.read_bytes().startswith(b"\x89PNG")
        assert file.stat().st_size > 500


def test_png_without_its_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "resvg_py", None)
    with pytest.raises(UsageError, match=r"canal-mpi\[png\]"):
        write_report([write_run(tmp_path / "a")], png=True)


def test_numbers_are_for_people() -> None:
    shown = {0.0: "0", -0.00001: "0", 1234567.0: "1,234,567", -12.345: "−12.35", 0.1234: "0.123"}
    assert {value: svg.number(value) for value in shown} == shown
    assert svg.number(nan) == "–"


def test_ticks_are_round_and_inside() -> None:
    assert svg.ticks(0, 1000) == [0, 250, 500, 750, 1000]
    assert svg.ticks(-0.13, 0.97) == pytest.approx([0, 0.5])
    assert svg.ticks(5, 5) == [5]


def test_a_topology_is_drawn_with_arrows_where_it_goes_one_way() -> None:
    both = svg.graph(["0", "1"], [(0, 1), (1, 0)], "t", "a")
    one = svg.graph(["0", "1"], [(0, 1)], "t", "a")
    assert both.count("<line") == one.count("<line") == 1
    assert "marker-end" in one
    assert "marker-end" not in both
    assert svg.graph(["0"], [], "t", "a").count("<circle") == 1


def test_cells_that_are_not_numbers_sort_last() -> None:
    found = table("c", ["a"], [[1.0], [nan]])
    assert 'data-v="1.0"' in found
    assert 'data-v=""' in found


def test_a_run_of_five_agents_and_ten_games_takes_seconds(tmp_path: Path) -> None:
    import time

    folder = write_run(tmp_path / "a", TEN_GAMES, 5)
    start = time.process_time()
    write_report([folder])
    assert time.process_time() - start < 20


# In a real browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from browser import Browser

    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed (Debian package chromium; make test-all)")
    shown = Browser(tmp_path_factory.mktemp("browser"))
    yield shown
    shown.close()


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / "a", TEN_GAMES, 5)]
    runs.append(write_run(folder / "b", TEN_GAMES, 5, share=False))
    return write_report(runs)[0]


@pytest.mark.root
@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (390, False), (1280, True)], ids=["wide", "phone", "dark"]
)
def test_chromium_shows_the_page_without_a_complaint(
    browser: Any, two_runs: Path, width: int, dark: bool
) -> None:
    before = len(browser.events)
    browser.open(two_runs, width, 900, dark)
    news = browser.events[before:]
    complaints = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    assert not [event for event in news if event.get("method") in complaints]
    sent = [e["params"] for e in news if e.get("method") == "Network.requestWillBeSent"]
    assert {request["request"]["url"] for request in sent} == {two_runs.as_uri()}
    assert browser.run("document.documentElement.scrollWidth") <= width
    sizes = "[...document.querySelectorAll('details')].forEach(d => d.open = true);"
    sizes += "Math.min(...[...document.querySelectorAll('figure svg')].map(s => s.clientWidth))"
    assert browser.run(sizes) > 100
    assert browser.run("document.querySelectorAll('figure svg').length") >= 40
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(17, 20, 24)") == dark


@pytest.mark.root
def test_a_click_sorts_a_table(browser: Any, two_runs: Path) -> None:
    browser.open(two_runs)
    column = "[...document.querySelectorAll('#run0-tasks tbody tr')].map(r => r.cells[5].dataset.v)"
    head = "document.querySelectorAll('#run0-tasks th button')[5].click()"
    before = browser.run(column)
    browser.run(head)
    up = [float(value) for value in browser.run(column)]
    browser.run(head)
    down = [float(value) for value in browser.run(column)]
    assert up == sorted(float(value) for value in before)
    assert down == up[::-1]
    assert before != browser.run(column)
    mark = "document.querySelectorAll('#run0-tasks th')[5].getAttribute('aria-sort')"
    assert browser.run(mark) == "descending"
