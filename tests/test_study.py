"""A study: its runs, what it measures, and what it leaves."""

import csv
import re
import shutil
from dataclasses import replace
from math import inf, isnan, nan
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
from browser import Browser
from click.testing import CliRunner
from launch import run
from madeup import GAMES, Score, write_run

from canal_mpi.cli import cli
from canal_mpi.config import from_toml
from canal_mpi.errors import UsageError
from canal_mpi.experiments import analysis
from canal_mpi.experiments.analysis import (
    Cell,
    Results,
    compared,
    difference,
    findings,
    ratio_of,
)
from canal_mpi.experiments.design import FILE, find, read
from canal_mpi.experiments.page import collect, pictures
from canal_mpi.experiments.points import Point, finished_runs, load_points, save
from canal_mpi.games import RANDOM_AND_HUMAN, TEN_GAMES
from canal_mpi.interfaces import Array
from canal_mpi.results.compare import improvement, mean_score, percent, times
from canal_mpi.results.measures import UNKNOWN, bootstrap

DEFINITION = """
seeds = [1, 2]
agents = 2
baseline = "none"
main = "share"
random_episodes = 4
equal_steps = [{ arm = "share", steps = 2000, baseline = 1000 }]
[settings]
tasks = ["CartPole-v1"]
order = "same"
[arms.none]
about = "agents don't share"
steps = [500, 1000]
settings = { "share.policy" = "none" }
[arms.share]
about = "agents <share>"
steps = [1000, 2000]
[arms.replay]
about = "rows are replayed"
steps = [1000]
seeds = 1
agents = 3
settings = { "reuse.mode" = "replay" }
"""


def written(folder: Path, text: str = DEFINITION) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(text)
    return folder / FILE


# ── its runs ───────────────────────────────────────────────────────────────────────────────────


def test_random_play_comes_first_then_all_arms_of_a_seed_cheap_ones_first(tmp_path: Path) -> None:
    found = read(written(tmp_path)).points()
    names = [point.name.replace("_steps-", " ").replace("_seed-", " ") for point in found]
    assert names[0] == "random 1 1" and [name[-1] for name in names[1:]] == [*"11111", *"2222"]
    assert names[1] == "none 500 1" and {*names[4:6]} == {"share 2000 1", "replay 1000 1"}
    assert names[6] == "none 500 2" and names[9] == "share 2000 2"
    by_name = {point.name: point for point in found}
    chance, none = by_name["random_steps-1_seed-1"], by_name["none_steps-500_seed-2"]
    assert (chance.ranks, chance.job.train.steps, chance.job.evaluation.epsilon) == (1, 1, 1.0)
    assert chance.job.evaluation.episodes == 4 and chance.job.share.policy == "none"
    assert (none.ranks, none.job.train.steps, none.job.seed) == (2, 500, 2)
    assert none.job.share.policy == "none" and none.job.tasks == ("CartPole-v1",)
    replay = by_name["replay_steps-1000_seed-1"]
    assert replay.ranks == 3 and replay.job.reuse.mode == "replay"
    assert none.group == "none_steps-500"


def test_variables_of_the_environment_do_not_change_a_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read(written(tmp_path)).points()
    monkeypatch.setenv("CANAL_LEARN_LR", "0.1")
    assert read(written(tmp_path)).points() == before


def test_the_study_that_comes_along_is_what_was_announced() -> None:
    study = read(find("sharing"))
    found = study.points()
    assert list(study.seeds) == list(range(201, 209)) and study.random_episodes == 100
    runs = {(p.settings["arm"], int(p.settings["steps"])): 0 for p in found}
    for point in found:
        runs[point.settings["arm"], int(point.settings["steps"])] += 1
        assert point.job.task.repeat_action_probability == 0.25 and point.job.tasks == TEN_GAMES
    eight = {("none", s): 8 for s in (5000, 11000, 20000)} | {("improve", 11000): 8}
    eight |= {("share", s): 8 for s in (5000, 11000, 20000, 55000)}
    three = ("rows-only", "network-only", "replay", "ring", "slow-rounds", "slow-free")
    one = ("agents-2", "agents-3", "agents-7", "inside", "simnet", "wasserstein")
    wanted = eight | {(arm, 11000): 3 for arm in three} | {(arm, 11000): 1 for arm in one}
    assert runs == wanted | {("random", 1): 1}
    by_arm = {p.settings["arm"]: p for p in found}
    assert [by_arm[f"agents-{n}"].ranks for n in (2, 3, 7)] == [2, 3, 7]
    assert by_arm["slow-free"].job.share.exchange == "free"
    assert [len(by_arm[a].job.emulate) for a in ("slow-rounds", "slow-free", "share")] == [5, 5, 0]


def test_what_defines_no_study_is_refused(tmp_path: Path) -> None:
    for old, new, words in (
        ("seeds = [1, 2]", "seeds = []", "expected seeds"),
        ("agents = 2", "agents = 0", "1 to 4096 agents"),
        ('baseline = "none"', "", "baseline"),
        ('main = "share"', 'main = "sharing"', "no arm 'sharing'"),
        ('arm = "share"', 'arm = "sharing"', "no arm 'sharing'"),
        ("steps = 2000,", "steps = 2001,", "names a budget that no arm has"),
        ("random_episodes", "random_episode", "random_episode"),
        ("about", "abuot", "abuot"),
        ("[arms.none]", "[arms.none", "does not define a study"),
    ):
        with pytest.raises(UsageError, match=words):
            read(written(tmp_path, DEFINITION.replace(old, new)))
    for old, new, words in (
        ("share.policy", "share.polcy", "did you mean 'share.policy'"),
        ("steps = [500, 1000]", "steps = [0, 1000]", "expected at least 1"),
        ("seeds = [1, 2]", "seeds = [1, 1]", "name each value once"),
    ):
        with pytest.raises(UsageError, match=words):
            read(written(tmp_path, DEFINITION.replace(old, new))).points()
    with pytest.raises(UsageError, match="no study 'sharin': expected sharing"):
        find("sharin")


# ── what it measures ───────────────────────────────────────────────────────────────────────────


def cell(scores: Any, budget: int = 100, arm: str = "arm", **given: Any) -> Cell:
    """A cell of one agent per seed, with scores [seed, task]; each seed costs its budget."""
    final: Array = np.array(scores, dtype=float)[:, None, :]
    seeds = tuple(range(len(final)))
    spent = {"steps": np.full(len(seeds), float(budget))}
    spent |= {"seconds": spent["steps"] / 10}
    facts: dict[str, Any] = {"learnt": final, "points": final, "costs": spent, "seeds": seeds}
    facts["taught"] = np.zeros_like(final, dtype=bool)
    return Cell(arm, budget, final=final, **(facts | given))


def test_students_are_compared_with_players_where_these_have_clearly_learnt() -> None:
    """Three games: learnt by a player and passed on by 80 %; hardly learnt; played by all."""
    player, student = [[110.0, 11, 9], [90.0, 9, 9]], [[90.0, 50, 9], [74.0, 50, 9]]
    points = np.stack([player, student], axis=1)
    taught = np.zeros((2, 2, 3), dtype=bool)
    taught[:, 1, :2] = True
    shared = cell([[0.0] * 3] * 2, points=points, taught=taught)
    (part, low, high), games = shared.passed_on(np.full(3, 10.0), np.ones(3))
    assert games == 1 and part == pytest.approx((82 - 10) / (100 - 10)) and low <= part <= high
    found, games = shared.on([0]).passed_on(np.full(3, 10.0), np.ones(3))
    assert games == 0 and isnan(found[0]), "one seed does not tell what is clearly learnt"


def test_intervals_draw_seeds_and_one_seed_tells_none() -> None:
    value, low, high = cell([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]).mean
    assert value == 1 and 0 <= low < 0.5 and 1.5 < high <= 2
    value, low, high = cell([[0.2, 0.4]]).mean
    assert value == pytest.approx(0.3) and isnan(low) and isnan(high)
    assert all(isnan(x) for x in cell([[0.2, nan]]).mean)  # not all was evaluated
    seeds = cell([[1.0, 3.0]] * 4)  # seeds are alike, games are not: no luck to be told of
    assert seeds.mean == (2, 2, 2)


def test_iqm_and_improvement_by_hand() -> None:
    low, high = cell([[0, 0.1], [0.2, 0.3]]), cell([[0.2, 0.3], [0.4, 10.0]])
    assert high.iqm[0] == pytest.approx(0.35)
    # first game: 0.2 beats 0 and ties 0.2, 0.4 beats both; second: 0.3 beats 0.1, ties 0.3 …
    assert compared(improvement, high, low)[0] == pytest.approx(3.5 / 4)
    assert compared(difference, high, low)[0] == pytest.approx(2.725 - 0.15)
    assert compared(ratio_of(mean_score), high, low)[0] == pytest.approx(2.725 / 0.15)
    assert isnan(compared(ratio_of(mean_score), high, cell([[-1, 0], [0, 1]]))[0])


def test_arms_are_compared_on_the_seeds_that_both_have() -> None:
    many, few = cell([[1.0], [5.0], [9.0]]), cell([[6.0]], seeds=(1,))
    assert compared(difference, few, many)[0] == 1.0
    ours, theirs = analysis.matched(many, few)
    assert ours.seeds == theirs.seeds == (1,) and ours.scores.tolist() == [[5.0]]


def test_the_best_budget_is_the_smallest_within_one_standard_error_of_the_highest() -> None:
    cells = [cell([[k - 0.1], [k + 0.1]], budget) for k, budget in ((0.5, 5), (0.95, 11), (1, 20))]
    assert analysis.best_budget(cells).budget == 11
    assert analysis.best_budget(cells[::-1]).budget == 11
    assert analysis.best_budget([cells[0], cells[2]]).budget == 20
    assert analysis.best_budget([cell([[0.9]], 1), cell([[1.0]], 2)]).budget == 2


def test_what_an_arm_saves_on_its_way_to_a_score() -> None:
    """From 0.2 at 10 steps to 0.6 at 30: 0.4 costs 20, where the base spent 100."""
    base = cell([[0.4], [0.4]], 100)
    ours = [cell([[0.6], [0.6]], 30), cell([[0.2], [0.2]], 10)]
    assert analysis.saving(ours, base, "steps") == pytest.approx((5, 5, 5))
    assert analysis.saving(ours, base, "seconds")[0] == pytest.approx(5)
    assert analysis.saving(ours[:1], base, "steps")[0] == pytest.approx(100 / 30)  # all of it
    assert analysis.saving(ours[1:], base, "steps")[0] == 0  # never gets there
    luck = [cell([[0.2], [0.8]], 30), cell([[0.1], [0.3]], 10)]
    value, low, high = analysis.saving(luck, base, "steps")
    assert low == 0 < value < high  # with the first seed alone it never gets there


def test_forgetting_is_a_part_of_the_score_above_random_play() -> None:
    """From 0.5 to 0.4, random play scores 0.1: a quarter is lost."""
    one = cell([[0.4, 0.4]] * 2, learnt=np.full((2, 1, 2), 0.5))
    assert one.forgetting(np.array([0.1, 0.1]))[0] == pytest.approx(0.25)


def test_a_game_is_clearly_lower_by_more_than_two_standard_errors() -> None:
    base = cell([[0.9, 0.9, 0.9], [1.1, 1.1, 1.1]])  # standard error of a difference: 0.14
    ours = cell([[0.4, 0.8, 1.9], [0.6, 1.0, 2.1]])
    assert analysis.clearly_lower(ours, base).tolist() == [True, False, False]
    assert not analysis.clearly_lower(cell([[0.0]]), cell([[1.0]])).any()  # one seed can't tell


def test_numbers_are_told_with_their_intervals() -> None:
    assert times((2.84, 2.1, inf), "fewer steps") == "2.8 × fewer steps (2.1 to ∞)"
    assert times((1.5, nan, nan)) == "1.5 ×"
    assert times((0.99, nan, nan), "fewer steps", "more steps") == "1.0 × the steps"
    assert times((0.5, 0.25, 2.0), "fewer", "more") == "2.0 × more (0.5 to 4.0)"
    assert times((0.5, 0.0, 2.0), "fewer", "more") == "2.0 × more (0.5 to ∞)"
    assert percent((0.031, 0.02, 0.05)) == "3.1 % (2.0 to 5.0)"
    assert percent((0.031, -0.02, 0.05), "+") == "+3.1 % (−2.0 to +5.0)"
    assert percent(UNKNOWN) == "not known"


# ── what it leaves ─────────────────────────────────────────────────────────────────────────────


def hns(score: float) -> Score:
    """Every task that was learnt is played at this human-normalised score, others at random."""

    def points(agent: int, after: int, task: str) -> float:
        low, high = RANDOM_AND_HUMAN[task]
        order = (*GAMES[agent % 3 :], *GAMES[: agent % 3])
        return low + score * (high - low) * (order.index(task) < after)

    return points


def made(folder: Path, arm: str, steps: int, seed: int, score: float, agents: int = 2) -> Point:
    """A point of a study with its run, which is made up."""
    name = f"{arm}_steps-{steps}_seed-{seed}"
    given: dict[str, Any] = {"share": arm in ("share", "replay"), "lesson_steps": 0}
    path = write_run(
        folder / name, GAMES, agents, score=hns(score), seed=seed, steps=steps, **given
    )
    labels = {"arm": arm, "steps": str(steps), "seed": str(seed)}
    return Point(name, from_toml((path / "job.toml").read_text()), agents, labels)


def a_study(folder: Path) -> list[Point]:
    """Three games, two agents; of six tasks in a run three come as lessons that cost nothing."""
    study = read(written(folder))
    points = [made(folder, "random", 1, 1, 0.0, agents=1)]
    for seed, luck in ((1, -0.02), (2, 0.02)):
        points += [made(folder, "none", steps, seed, steps / 2000 + luck) for steps in (500, 1000)]
        points += [
            made(folder, "share", steps, seed, steps / 1000 + luck) for steps in (1000, 2000)
        ]
    points.append(made(folder, "replay", 1000, 1, 0.4))
    assert {point.name for point in points} == {point.name for point in study.points()}
    save(folder, "study", points)
    return points


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study whose runs are finished, for tests that change nothing."""
    folder = tmp_path_factory.mktemp("study")
    a_study(folder)
    return folder


def results_of(folder: Path, points: list[Point] | None = None) -> Results:
    points = points or load_points(folder, "study")
    return Results(read(folder / FILE), points, finished_runs(folder, points))


def test_no_forgetting_is_claimed_where_scores_were_measured_at_the_end_alone(there: Path) -> None:
    points = load_points(there, "study")
    runs = finished_runs(there, points)
    for one in runs.values():
        one.job["evaluation.tasks"] = "final"
    results = Results(read(there / FILE), points, runs)
    assert not any("forgets" in words for words in findings(results))
    (lost,) = [it for *_, shown in pictures(results) for it in shown if it.key == "forgetting"]
    assert lost.needs.startswith("it needs a budget among `forgetting`")


def test_runs_become_cells_with_scores_and_costs(there: Path) -> None:
    results = results_of(there)
    found = [(c.arm, c.budget, c.seeds) for c in results.cells]
    assert found[:3] == [("none", 500, (1, 2)), ("none", 1000, (1, 2)), ("share", 1000, (1, 2))]
    assert found[3:] == [("share", 2000, (1, 2)), ("replay", 1000, (1,))]
    none, share = results.of("none", 1000)[0], results.of("share", 2000)[0]
    assert results.scale.name == "HNS" and none.final.shape == (2, 2, 3)
    assert none.by_seed == pytest.approx([0.48, 0.52]) and share.by_seed == pytest.approx(
        [1.98, 2.02]
    )
    assert [cell.costs["steps"].tolist() for cell in (none, share)] == [[6000, 6000]] * 2
    assert none.costs["seconds"].tolist() == [3 * 8] * 2  # ten per task, two of them evaluation
    assert none.costs["waiting"] == pytest.approx([6 / 48] * 2)
    assert none.costs["evaluation"][0] == 2400
    krull = np.mean([RANDOM_AND_HUMAN["Krull"][0]])
    assert results.random[0] == pytest.approx(krull) and results.missing == []


def test_findings_are_sentences_with_numbers_and_intervals(there: Path) -> None:
    """None's best is 0.5 at 6,000 steps; share has 1.0 at 3,000 already, in the same time."""
    first, equal, *rest = findings(results_of(there))
    assert first.startswith("To the score of none at 1,000, its best budget (50.0 % (48.0 to 52.0)")
    assert "share gets with 2.0 × fewer steps (2.0 to 2.0) and 1.0 × the wall time" in first
    assert equal.startswith("At equal total steps (6,000 and 6,000) share at 2,000 ends 4.0 ×")
    assert equal.endswith("lower by more than two standard errors on 0 of 3 games.")
    forgets = "share forgets 0.0 % (0.0 to 0.0) at 1,000, 0.0 % (0.0 to 0.0) at 2,000."
    assert rest[0] == f"Of its score above random play {forgets}"
    whole = "100.0 % (100.0 to 100.0)"
    passed = f"{whole} at 1,000 (3 games), {whole} at 2,000 (3 games) of their players' score"
    assert rest.pop(1).startswith(f"Students of share have, without own steps, {passed}")
    assert rest[1] == "share takes 0 steps for decisions."
    assert rest[2].endswith("2.8 for share at 1,000 and 2.8 for none at 1,000.")
    assert rest[3].startswith(
        "replay at 1,000 against share: score −58.0 % in points of HNS, 1.0 ×"
    )
    assert rest[3].endswith(" the wall time, 12 % of it waiting.")
    one = [p for p in load_points(there, "study") if p.job.seed == 1]
    first, *_, decides, _ = findings(results_of(there, one))
    assert "2.0 × fewer steps and" in first and decides == "share takes 0 steps for decisions."


@pytest.mark.slow
def test_files_of_a_study_hold_every_score_and_say_what_is_missing(tmp_path: Path) -> None:
    points = a_study(tmp_path)
    extra = replace(points[-1], name="replay_steps-1000_seed-2")
    said = collect(tmp_path, "study", [*points, extra])
    files = [f"Scores: {tmp_path / 'table.csv'}", f"Report: {tmp_path / 'report.html'}"]
    assert said[0].startswith("To the score of none at 1,000") and said[-2:] == files
    page = (tmp_path / "report.html").read_text()
    assert "Not finished yet: 1 runs (replay_steps-1000_seed-2)" in page
    assert "agents &lt;share&gt;" in page and "<share>" not in page
    order = ["score-steps", "score-time", "iqm", "profile", "improvement", "forgetting"]
    order += ["ablations", "arms-seconds", "arms-waiting", "game-0"]
    places = [page.index(f'<figure id="{key}"') for key in order]
    assert places == sorted(places) and places[-1] < page.index("<table")  # tables come last
    assert page.count("<figure id=") == len(order) + 2 and "Steps of all agents" in page
    cells = re.sub(r"<[^>]*>", " ", page[page.index("<table") :]).split("\n")
    rows = [" ".join(row.split()) for row in cells]
    assert "random play 1598 ± 0 228 ± 0 2.2 ± 0.4" in rows
    assert "none at 1,000 48 52" in rows and "replay at 1,000 40 –" in rows
    assert any(row.startswith("share at 2,000 2") for row in rows) and "200.0 % (" in page
    for kind, magic in (("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")):
        assert (tmp_path / f"figures/score-steps.{kind}").read_bytes().startswith(magic)
    with (tmp_path / "table.csv").open() as file:
        scores = list(csv.DictReader(file))
    assert len(scores) == 9 * 2 * 3 and scores[0]["arm"] == "none"
    wanted = next(row for row in scores if row["budget"] == "2000")
    assert float(wanted["score"]) == pytest.approx(1.98)


def test_ablations_are_set_beside_the_main_arm(there: Path) -> None:
    sections = pictures(results_of(there))
    shown = [figure for *_, figures in sections for figure in figures]
    labels = {
        figure.key: [text.get_text() for text in figure.axes.get_yticklabels()] for figure in shown
    }
    assert labels["ablations"] == ["replay at 1,000"]
    profile = next(figure for figure in shown if figure.key == "profile").axes.lines[1]
    assert profile.get_ydata()[[0, -1]].tolist() == [100, 0]  # all above 0, none above the best
    assert labels["arms-seconds"] == ["share at 1,000", "replay at 1,000"]
    assert labels["improvement"] == [
        "share at 1,000 > none at 1,000",
        "share at 2,000 > none at 1,000",
    ]


def test_samples_of_other_numbers_of_seeds_are_drawn_on_their_own() -> None:
    many, few = np.array([[1.0], [2.0], [3.0]]), np.array([[2.0], [2.0]])
    value, low, high = bootstrap(lambda x, y: mean_score(x) - mean_score(y), many, few)
    assert value == 0 and -1 <= low < 0 < high <= 1


def test_games_without_human_scores_are_measured_from_random_play_to_the_baseline() -> None:
    scale = analysis.scale_of(["CartPole-v1"], np.array([20.0]), [])
    assert (scale.name, scale.zero[0], scale.one[0]) == ("score", 20.0, 21.0)


def test_nothing_finished_is_said_and_nothing_written(tmp_path: Path) -> None:
    points = read(written(tmp_path)).points()
    assert collect(tmp_path, "study", points)[0].startswith("Nothing to compare yet")
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


@pytest.mark.slow
def test_the_same_published_files_give_the_same_page_and_nothing_of_it_is_cut_off(
    tmp_path: Path,
) -> None:
    """Of each run only run.h5 and job.toml are needed."""
    a_study(tmp_path)
    found = []
    for _ in range(2):
        cli(["report", str(tmp_path)], standalone_mode=False)
        files = ("table.csv", "report.html", "figures/iqm.svg", "figures/iqm.pdf")
        found.append([(tmp_path / name).read_bytes() for name in files])
        for file in (tmp_path / "jobs").glob("*"):
            file.unlink()
        sleep(1.1)  # times in PDF are whole seconds
    assert found[0] == found[1]
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed (Debian package chromium; make test-all)")
    browser = Browser(tmp_path)
    try:
        for width in (1200, 400):
            browser.open(tmp_path / "report.html", width)
            assert browser.run("document.documentElement.scrollWidth") <= width
    finally:
        browser.close()


def refused(words: list[str], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        CliRunner().invoke(cli, words, standalone_mode=False, catch_exceptions=False)


def test_a_folder_holds_a_study_or_a_sweep(tmp_path: Path) -> None:
    small = ["--tasks", "CartPole-v1", "--order", "same", "--frames", "500"]
    for kind, other, new in (
        ("study", "sweep", [*small, "--policies", "none"]),
        ("sweep", "study", [str(written(tmp_path))]),
    ):
        folder = tmp_path / kind
        save(folder, kind, read(written(tmp_path)).points()[:1])
        before = (folder / "experiment.json").read_bytes()
        for words in (["--resume", str(folder)], [*new, "--out", str(folder)]):
            refused([other, *words], f"holds a {kind}")
            refused([other, *words, "--dry-run"], f"holds a {kind}")
        assert (folder / "experiment.json").read_bytes() == before


def test_what_makes_no_study_is_refused(tmp_path: Path) -> None:
    file = str(written(tmp_path))
    save(tmp_path / "there", "study", read(Path(file)).points())
    refused(["study", file, "--arms", "none,distil", "--dry-run"], "--arms distil: the study has")
    refused(["study", file, "--steps", "7", "--dry-run"], "--steps 7: the study has")
    refused(["study", file, "--seeds", "9", "--dry-run"], "--seeds 9: the study has 1, 2")
    refused(["study", file, "--resume", str(tmp_path / "there")], "leave out .STUDY")
    write_run(tmp_path / "other/none_steps-500_seed-1", share=False)
    for words in ([], ["--dry-run"]):
        refused(
            ["study", file, "--out", str(tmp_path / "other"), *words], "is a run of another job"
        )


@pytest.mark.long
@pytest.mark.mpi
def test_a_study_runs_in_parts_from_its_start_to_its_report_and_repeats_nothing(
    tmp_path: Path,
) -> None:
    text = DEFINITION.replace(
        "[settings]", '[settings]\n"learn.widths" = [32]\n"learn.learning_starts" = 100'
    )
    text = text.replace("2000", "300").replace("1000", "200").replace("500", "100")
    text = text.replace("[settings]", '[settings]\n"evaluation.episodes" = 1')
    out = tmp_path / "study"
    command = ["canal-mpi", "study", str(written(tmp_path, text)), "--out", str(out)]
    told = run([*command, "--dry-run"], timeout=120)
    assert told.code == 0 and "10 points, 0 finished" in told.out and not out.exists(), told.err
    part = run([*command, "--arms", "none", "--seeds", "1"], timeout=240)
    assert part.code == 0, part.out + part.err
    runs = {file: file.stat().st_mtime_ns for file in out.glob("*/run.h5")}
    assert len(runs) == 3 and (out / "report.html").is_file()
    resume = ["canal-mpi", "study", "--resume", str(out)]
    more = run([*resume, "--arms", "share", "--seeds", "1"], timeout=240)
    assert more.code == 0 and more.out.count("started") == 2, more.out + more.err
    assert {file: file.stat().st_mtime_ns for file in runs} == runs
    shown = run(["canal-mpi", "report", str(out)], timeout=60)
    assert shown.code == 0 and "5 of 10 points are finished" in shown.out
    kept = {file.name for file in (out / "share_steps-200_seed-1").iterdir()}
    assert kept == {"run.h5", "job.toml"}
