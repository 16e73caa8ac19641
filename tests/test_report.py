"""The report: one page that needs nothing else, for whole runs and for broken ones."""

import json
import re
import shutil
from html.parser import HTMLParser
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from madeup import GAMES, write_run

from canal_mpi.games import TEN_GAMES
from canal_mpi.report import figures
from canal_mpi.report.drawing import Figure, files_of, number, plain, styled
from canal_mpi.report.figures import mixes
from canal_mpi.report.report import (
    Beside,
    answers,
    comparison_pictures,
    news,
    page,
    timeline,
    write_report,
)
from canal_mpi.results.compare import Comparison, busy_seconds, compare
from canal_mpi.results.reader import load

GYM = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0")
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
        return [str(attrs["id"]) for _, attrs in self.found if "id" in attrs]


def made(*runs: Path) -> tuple[str, Page]:
    text = page(compare([load(run) for run in runs]))
    return text, Page(text)


def test_the_page_of_a_run_has_every_figure(tmp_path: Path) -> None:
    text, found = made(write_run(tmp_path / "a"))
    ids = set(found.ids())
    assert {"timeline", "curve-0", "curve-2", "forgetting", "time"} <= ids
    assert {"measures", "tasks", "ledger"} <= ids
    assert len(found.ids()) == len(ids)
    order = ["Did it learn?", "Did sharing help?", "Did it forget?", "Where did the time"]
    order += ["Learning curves", "Tasks as they were learnt", "Repeat it"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert "mpirun -np 2 canal-mpi train --job" in text


def test_every_drawing_can_be_read_aloud(tmp_path: Path) -> None:
    _, found = made(write_run(tmp_path / "a"))
    drawings = [attrs for name, attrs in found.found if name == "svg"]
    assert len(drawings) == 5
    for attrs in drawings:
        assert attrs["role"] == "img"
        assert len(attrs["aria-label"] or "") > 20


def test_nothing_is_loaded_from_anywhere(tmp_path: Path) -> None:
    text, found = made(write_run(tmp_path / "a"))
    for name, attrs in found.found:
        assert name not in ("img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "srcset", "action", "onclick", "onload"} & attrs.keys()
        assert attrs.get("href", "data:,") == "data:,"
        assert (attrs.get("xlink:href") or "#").startswith("#")
    assert "url(" not in text.replace("url(#", "")
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_what_a_run_says_is_never_markup(tmp_path: Path) -> None:
    nasty = '<script>alert(1)</script>"><b>&amp;'[:60]
    folder = write_run(tmp_path / "a", tasks=[nasty, "Krull"])
    (folder / "events.jsonl").write_text(json.dumps({"event": "<img src=x>", "time": 1}) + "\n")
    text, found = made(folder, write_run(tmp_path / "<i>b", tasks=[nasty, "Krull"], share=False))
    assert "<script>alert" not in text
    assert [name for name, _ in found.found].count("script") == 1
    assert not [name for name, _ in found.found if name in ("b", "img")]


def test_several_runs_are_set_beside_each_other(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", share=False)]
    text, found = made(*runs)
    ids = found.ids()
    assert {
        "progress-steps",
        "progress-time",
        "scores",
        "compared",
        "run0-timeline",
        "run1-timeline",
    } <= {*ids}
    assert len(ids) == len(set(ids))
    assert "no sharing" in text
    assert "<title>share exact against no sharing · canal-mpi" in text
    assert "× fewer steps" in text and "TA" not in re.sub(r"<(pre|script)>.*?</\1>", "", text)


def current(agent: int, after: int, task: str) -> float:
    return 5.0 if after and task == "Krull" else nan


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "begun": ({"rounds": 0, "status": "running"}, "0 of 3 rounds"),
    "running": ({"rounds": 2, "status": "running"}, "2 of 3 rounds"),
    "degraded": ({"rounds": 1, "status": "degraded"}, "status degraded"),
    "alone": ({"agents": 1, "first": 4}, "no sharing"),
    "unseen": ({"score": lambda *_: nan}, "There are no evaluations"),
    "current": ({"score": current}, "status finished"),
    "short": ({"max_steps": 50}, "limited to 50 steps"),
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


def test_unusual_events_and_all_refusals_are_listed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    events = [{"event": "start"}, {"event": "resumed", "generation": 3}]
    lines = [json.dumps(event) for event in events]
    (folder / "events.jsonl").write_text("\n".join([*lines, '{"torn": ']))
    run = load(folder)
    assert list(news(run)) == [("resumed", "generation 3")]
    run["exchange"]["kind"] = run["exchange"]["kind"].astype("U8")
    run["exchange"]["kind"][:2] = ["refusal", "offer"]
    run["exchange"]["reason"] = np.array(["message fails its checksum", "", ""])
    text = page(compare([run]))
    assert "message fails its checksum" in text and "generation 3" in text
    assert "<td>refusal</td>" in text and "<td>offer</td>" not in text


def test_the_timeline_names_donors_and_what_is_still_to_come(tmp_path: Path) -> None:
    rows = timeline(load(write_run(tmp_path / "a", rounds=2)))
    assert rows[0] == [("Krull", "", "played"), ("Alien", "", "played")]
    assert rows[1] == [("Alien", "1", "a1"), ("Robotank", "", "played")]
    assert rows[2] == [("Robotank", "", "open"), ("Krull", "", "open")]


def test_the_report_is_one_file_beside_the_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    assert write_report([folder]) == [folder / "report.html"]
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_figures_come_as_png_pdf_and_svg_that_are_the_same_every_time(tmp_path: Path) -> None:
    folder, into = write_run(tmp_path / "a"), tmp_path / "figures"
    first = {file: file.read_bytes() for file in write_report([folder], figures=into)}
    begins = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}
    for kind, begin in begins.items():
        pictures = [data for file, data in first.items() if file.suffix == kind]
        assert len(pictures) == 5
        assert all(data.startswith(begin) and len(data) > 500 for data in pictures)
    again = write_report([folder], figures=into)
    assert {file: file.read_bytes() for file in again} == first


def only_the_task_just_learnt(agent: int, after: int, task: str) -> float:
    return 5.0 if after and task == GAMES[(agent + after - 1) % len(GAMES)] else nan


def test_a_figure_with_nothing_to_show_is_left_out_with_what_would_fill_it(tmp_path: Path) -> None:
    text, found = made(write_run(tmp_path / "b", score=only_the_task_just_learnt))
    assert "forgetting" not in found.ids()
    need = "it needs scores right after tasks and at the end: --set evaluation.tasks=after"
    assert f"Left out: What was kept until the end; {need}." in text
    need = "it needs scores of tasks before they are learnt: --set evaluation.tasks=all"
    assert f"Left out: Zero-shot transfer; {need}." in text


def test_zero_shot_transfer_is_told_in_a_sentence(tmp_path: Path) -> None:
    """Every round adds a third of what lies between the first evaluation and the best one."""
    run = write_run(tmp_path / "a", max_steps=100, score=lambda agent, after, task: 2.0 * after)
    text, _ = made(run)
    words = "Zero-shot transfer: the mean score on tasks still to come changed by "
    assert f"{words}+0.333 (range) a round." in text
    assert "Left out: Zero-shot" not in text


def test_students_stand_at_the_round_in_which_they_learnt(tmp_path: Path) -> None:
    from canal_mpi.results.compare import Measured

    with styled():
        figure = figures.curve(Measured(load(write_run(tmp_path / "a"))), 1)
    marks = [line for line in figure.axes.lines if line.get_markersize() > 6]
    places = [(list(line.get_xdata()), line.get_marker()) for line in marks]
    assert places == [([2], "D"), ([1], "o")], "of agent 0 and of agent 1"
    assert [label for label, *_ in figure.keys] == ["agent 0", "agent 1"]


def test_no_axis_of_what_can_not_be_negative_goes_below_zero(tmp_path: Path) -> None:
    good: dict[str, Any] = {"score": lambda agent, after, task: 9000.0 * (1 + after)}
    runs = [write_run(tmp_path / "a", **good), write_run(tmp_path / "b", share=False, **good)]
    comparison = compare([load(run) for run in runs])
    with styled():
        figure = next(figures.progress(comparison))
    low, high = figure.axes.get_ylim()
    assert -0.05 * high <= low <= 0


def test_equal_series_differ_in_line_and_mark(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, lesson_steps=1000) for name in "ab"]
    comparison = compare([load(run) for run in runs])
    for k, group in enumerate(comparison.groups * (3 - len(comparison.groups))):
        group.label = f"group {k}"
    twice = Comparison([*comparison.groups, *comparison.groups][:2], comparison.scale)
    with styled():
        figure = next(figures.progress(twice))
    one, other = figure.axes.lines
    assert (one.get_ydata() == other.get_ydata()).all()
    for name in ("color", "linestyle", "marker", "linewidth"):
        assert getattr(one, f"get_{name}")() != getattr(other, f"get_{name}")() or name == "color"


def test_a_comparison_tells_scores_steps_and_time_in_one_sentence(tmp_path: Path) -> None:
    """Three of six tasks come as lessons; one seed tells no interval."""
    runs = [write_run(tmp_path / name, share=name == "a") for name in "ab"]
    comparison = compare([load(run) for run in runs])
    words = str(Beside(*comparison.groups))
    same = "about the same score at the end (1028 against 1028 % HNS), 1.7 × fewer steps"
    assert words == f"{same}, 1.0 × the time; one seed: may be luck"
    again = [write_run(tmp_path / f"{run.name}2", share=run.name == "a", seed=2) for run in runs]
    comparison = compare([load(run) for run in (*runs, *again)])
    beside = Beside(*comparison.groups)
    assert str(beside).endswith("; 2 seeds") and beside.tone == "good"
    beside.score = 0.7 * beside.base
    assert beside.tone == "" and str(beside).startswith("a lower score")


def test_a_short_run_that_learnt_nothing_is_told_without_alarm(tmp_path: Path) -> None:
    card = answers(compare([load(write_run(tmp_path / "a", score=lambda *_: -1e4))]))[0]
    assert (card.answer, card.tone) == ("better on 0 of 3", "")


def at_the_end(agent: int, after: int, task: str) -> float:
    return -100.0 if after else nan  # an episode of 100 steps, whoever plays


def test_evaluations_that_were_cut_are_not_compared_with_whole_episodes(tmp_path: Path) -> None:
    """A training episode of 500 steps with -500 is no worse than one that was cut after 100."""
    runs = [load(write_run(tmp_path / name, GYM, score=at_the_end, max_steps=100)) for name in "ab"]
    for run in runs:
        run["episodes"]["return"][:] = -500.0
    card = answers(compare(runs[:1]))[0]
    assert card.answer == "not known yet" and card.tone == ""
    assert card.words == "Left out: 3 tasks with evaluations cut after 100 steps."
    table = runs[1]["episodes"]
    short, none = (table["task"] == name for name in GYM[:2])
    table["length"][short] = 100
    table["task"][none] = "another"
    card = answers(compare(runs[1:]))[0]
    assert card.answer == "better on 1 of 1"
    why = (
        "1 task with evaluations cut after 100 steps, 1 task without a training episode that ended"
    )
    assert card.words.endswith(f" Left out: {why}.")


def test_a_run_says_what_its_scores_wait_for(tmp_path: Path) -> None:
    for rounds, words in (
        (0, "No task is finished yet."),
        (1, "Left out: 1 task not finished yet."),
    ):
        run = load(write_run(tmp_path / str(rounds), rounds=rounds, status="stopped"))
        text, card = page(compare([run])), answers(compare([run]))[0]
        assert card.words.endswith(words) and "evaluation.episodes=30" not in text
        assert "Forgetting and time" not in text and ("<h2>Time" in text) == (rounds > 0)


def a_sweep(folder: Path, *clocks: str) -> Comparison:
    """Runs on two mixes of hosts: one of them waits."""
    runs = []
    for hosts in (["nano-1", "nano-2"], ["xavier-1", "nano-1"]):
        for clock in clocks:
            run = load(write_run(folder / f"{hosts[0]}-{clock}"))
            run["agents"]["host"] = np.array(hosts)
            job = str(run.attributes["job"]).replace('exchange = "rounds"', f'exchange = "{clock}"')
            run.attributes["job"] = job
            run["tasks"]["seconds"] *= 2 if clock == "rounds" else 1
            mine = run["tasks"]["agent"] == 0
            run["tasks"]["wait_seconds"][mine] = 12.0 if hosts[0][0] == "x" else 0.0
            runs.append(run)
    return compare(runs)


def test_a_sweep_over_mixes_of_hosts_says_which_is_fastest_and_who_waits(tmp_path: Path) -> None:
    comparison = a_sweep(tmp_path, "rounds", "free")
    text = page(comparison)
    ids = Page(text).ids()
    assert {"mix-wall", "mix-cpu", "mix-waiting", "mix-score", "mixes"} <= {*ids}
    assert "<h1>2 mixes of hosts</h1>" in text
    assert "Which mix is fastest?" in text and "2 nano, free" in text
    assert "Who waits for whom?" in text and "xavier for nano: " in text
    found = {(one.hosts, one.clock): one for one in mixes(comparison)}
    assert len(found) == 4
    assert found["1 xavier, 1 nano", "rounds"].wall == 54.0
    assert found["1 xavier, 1 nano", "rounds"].cpu == 6 * 8.0
    assert found["1 xavier, 1 nano", "free"].waits == {"xavier": 150, "nano": 12.5}
    assert "xavier of 1 xavier, 1 nano" in text
    assert "Not the same work" not in text and "Not all played" not in text


def test_mixes_that_did_other_work_are_not_compared_silently(tmp_path: Path) -> None:
    crowd, alone = (load(write_run(tmp_path / str(n), agents=n)) for n in (2, 1))
    crowd["agents"]["host"], alone["agents"]["host"] = np.array(["x-1"] * 2), np.array(["nano-1"])
    crowd["tasks"]["core_seconds"][:] = 0.5 * busy_seconds(crowd)
    text = page(compare([crowd, alone]))
    assert "Not the same work: runs have 1 to 2 agents." in text
    assert "Not all played as many steps (" in text
    assert "Agents waited for a core (1 x (2 agents), rounds 50 %, " in text


def test_figures_that_mean_the_same_by_their_series_have_one_legend(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", share=False)]
    text, _ = made(*runs)
    assert text.count("no sharing</span>") == 1 and ">no sharing</text>" not in text
    shown = comparison_pictures(compare([load(run) for run in runs]))
    assert b">no sharing</text>" in files_of(shown, tmp_path)[tmp_path / "scores.svg"], "a file too"


@styled()
def test_one_high_score_does_not_press_the_others_flat() -> None:
    for high, scale in ((1.7, "symlog"), (0.3, "linear")):
        figure = Figure("scores", "Scores", xlabel="score")
        figure.intervals(["Krull", "a", "b"], [[x, x, x] for x in (high, 0.05, 0.1)])
        figure.spread()
        assert figure.axes.get_xscale() == scale
        assert ("logarithmic" in figure.axes.get_xlabel()) == (scale == "symlog")


def test_runs_on_the_same_hosts_are_no_mixes(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", share=False)]
    assert mixes(compare([load(run) for run in runs])) == []


def test_a_comparison_of_many_runs_names_none_in_its_title_and_points_to_each(
    tmp_path: Path,
) -> None:
    runs = [write_run(tmp_path / f"a{seed}", seed=seed) for seed in range(6)]
    text, found = made(*runs)
    assert "<h1>6 runs compared</h1>" in text
    assert f"canal-mpi report {runs[5]}" in text
    assert "run0-timeline" not in found.ids()


def test_names_are_drawn_as_they_are_and_as_long_as_there_is_room(tmp_path: Path) -> None:
    assert plain("a\x1b[31m\nb") == "a\ufffd[31m\ufffdb"
    assert plain("x" * 30, 10) == "x" * 9 + "…"
    text, _ = made(write_run(tmp_path / "a", tasks=["$\\frac$", "a\x07b", "模型"]))
    assert "$\\frac$" in text and "模型" in text


def test_numbers_are_for_people() -> None:
    shown = {0.0: "0", -0.00001: "0", 1234567.0: "1,234,567", -12.345: "−12.35", 0.1234: "0.123"}
    assert {value: number(value) for value in shown} == shown
    assert number(nan) == "–"
    assert number(1e300) == "1.00e+300"


def test_cells_that_are_not_numbers_sort_last(tmp_path: Path) -> None:
    text, _ = made(write_run(tmp_path / "a", score=current))
    assert 'data-v="5.0"' in text and 'data-v=""' in text


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
    assert browser.run("document.querySelectorAll('figure svg').length") >= 20
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(17, 20, 24)") == dark


@pytest.mark.root
def test_a_click_sorts_a_table(browser: Any, two_runs: Path) -> None:
    browser.open(two_runs)
    column = "[...document.querySelectorAll('#run0-tasks tbody tr')].map(r => r.cells[4].dataset.v)"
    head = "document.querySelectorAll('#run0-tasks th button')[4].click()"
    before = browser.run(column)
    browser.run(head)
    up = [float(value) for value in browser.run(column)]
    browser.run(head)
    down = [float(value) for value in browser.run(column)]
    assert up == sorted(float(value) for value in before)
    assert down == up[::-1]
    assert before != browser.run(column)
    mark = "document.querySelectorAll('#run0-tasks th')[4].getAttribute('aria-sort')"
    assert browser.run(mark) == "descending"
