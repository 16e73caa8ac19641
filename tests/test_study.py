"""A study: its runs, what it measures, and what it leaves."""

from dataclasses import replace
from math import inf, isnan
from pathlib import Path
from shutil import copytree
from time import sleep
from typing import Any
from xml.etree import ElementTree

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from launch import run
from madeup import GAMES, Score, write_run

from canal_mpi.cli import cli
from canal_mpi.commands.study import _with_others
from canal_mpi.config import from_toml
from canal_mpi.errors import DamagedData, UsageError
from canal_mpi.results.reading import load
from canal_mpi.results.verify import verify
from canal_mpi.study.arms import ARMS, about, numbers, points_of_study
from canal_mpi.study.level import Level, clearly_above
from canal_mpi.study.pairs import Pair
from canal_mpi.study.tables import tables
from canal_mpi.study.transfer import over_seeds
from canal_mpi.study.weigh import Study, goals, seeds_of_goals, weigh
from canal_mpi.study.write import _another, collect, summary
from canal_mpi.sweep.folder import check_same_job, load_points, save
from canal_mpi.sweep.grid import Point, seeds

ORDERS = (GAMES, (*GAMES[1:], GAMES[0]))  # of two agents that rotate
PUBLISHED = Path(__file__).parents[1] / "docs" / "study"
LITTLE: dict[str, object] = {"tasks": ["CartPole-v1"], "order": "same", "train.frames": 500}


def points(**changes: object) -> list[Point]:
    """A small study."""
    given: dict[str, object] = {"arms": ["none", "distill", "replay"], "seeds": seeds("2", 1)}
    given |= {"other_seeds": 1, "agents": [3], "topologies": ["full"], "flags": LITTLE}
    return points_of_study(**(given | {"job_file": None} | changes))  # type: ignore[arg-type]


# ── its runs ───────────────────────────────────────────────────────────────────────────────────


def test_the_scale_comes_first_then_the_main_arms_then_others_with_fewer_seeds() -> None:
    assert [point.name for point in points()] == [
        "random_seed-1",
        "expert_seed-1",
        "expert_seed-2",
        "none_seed-1",
        "distill_seed-1",
        "none_seed-2",
        "distill_seed-2",
        "replay_seed-1",
    ]


def test_other_numbers_of_agents_and_topologies_are_run_with_the_main_arms_only() -> None:
    """Fewer agents without sharing are the first ones of `none`, more of them are run."""
    given = {"topologies": ["full", "ring"], "seeds": seeds("1", 7)}
    found = points(arms=["none", "distill"], agents=[3, 2, 4], **given)
    ranks = {point.name: (point.ranks, point.job.share.topology) for point in found}
    assert ranks == {
        "random_seed-7": (1, "full"),
        "expert_seed-7": (1, "full"),
        "none_seed-7": (3, "full"),
        "distill_seed-7": (3, "full"),
        "distill-ring_seed-7": (3, "ring"),
        "distill-2_seed-7": (2, "full"),
        "none-4_seed-7": (4, "full"),
        "distill-4_seed-7": (4, "full"),
    }


def test_without_the_arm_none_fewer_agents_without_sharing_are_run_too() -> None:
    found = points(arms=["distill"], agents=[3, 2], seeds=seeds("1", 1))
    names = {"distill_seed-1", "none-2_seed-1", "distill-2_seed-1"}
    assert {p.name for p in found} == names | {"random_seed-1", "expert_seed-1"}


def test_every_arm_means_its_settings() -> None:
    found = {p.settings["arm"]: p.job for p in points(arms=list(ARMS))}
    modes = {name: found[name].reuse.mode for name in ("replay", "mix", "distill", "adopt")}
    assert modes == {name: name for name in modes}
    policies = [found[name].share.policy for name in ("none", "replay", "mix", "all")]
    assert policies == ["none", "exact", "exact", "all"]
    assert {job.seed for job in found.values()} <= {1, 2}
    assert found["none"].evaluation.tasks == "seen" and found["none"].evaluation.every == 100


def test_experts_learn_each_task_alone_and_random_play_learns_nothing() -> None:
    found = {p.settings["arm"]: p.job for p in points()}
    expert, chance = found["expert"], found["random"]
    assert expert.learn.identity == "separate" and expert.memory.rows == 0
    assert expert.share.policy == "none" and expert.train.frames == 500
    assert expert.evaluation.episodes == 10
    assert chance.train.frames == 1 and chance.evaluation.epsilon == 1.0


def test_settings_of_the_user_win_over_those_of_the_study() -> None:
    flags = LITTLE | {"evaluation.every": 0, "evaluation.episodes": 30}
    found = {p.settings["arm"]: p.job for p in points(flags=flags)}
    assert found["none"].evaluation.every == 0 and found["expert"].evaluation.episodes == 30


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arms": ["none", "none"]}, "'none_seed-1' twice"),
        ({"seeds": seeds("4,4", 1)}, "twice"),
        ({"topologies": ["full", "full"]}, "twice"),
        ({"agents": [3, 2, 2]}, "--agents names one twice"),
        ({"agents": [3, 3]}, "--agents names one twice"),
        ({"arms": ["none"], "agents": [3, 2]}, "tried with distill: add it to --arms"),
        ({"arms": ["none"], "topologies": ["full", "ring"]}, "tried with distill"),
        ({"flags": LITTLE | {"reuse.network": False}}, "what a study varies"),
        ({"arms": ["os:path"]}, "unknown arm"),
        ({"flags": LITTLE | {"share.policy": "simnet"}}, "what a study varies"),
        ({"flags": LITTLE | {"evaluation.tasks": "current"}}, "no forgetting"),
        ({"flags": LITTLE | {"evaluation.episodes": 0}}, "needs scores"),
    ],
)
def test_what_would_count_twice_or_tell_nothing_is_refused(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        points(**changes)


def test_a_job_that_evaluates_more_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[evaluation]\ntasks = "all"\nevery = 70\n')
    found = {p.settings["arm"]: p.job for p in points(job_file=str(tmp_path / "job.toml"))}
    assert found["none"].evaluation.tasks == "all" and found["none"].evaluation.every == 70
    assert found["expert"].evaluation.tasks == "current"


@pytest.mark.parametrize("text", ["1", "5,x", "", "5000", "0"])
def test_numbers_of_agents_that_make_no_study_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        numbers(text)


def test_an_arm_is_told_in_words() -> None:
    assert about("none-2") == "agents don't share; 2 agents"
    assert about("distill-ring").endswith("half of the lesson; topology ring")


# ── what it measures ───────────────────────────────────────────────────────────────────────────


def learnt(score: float) -> Score:
    """The score of an agent on the tasks that it has learnt, else 0."""
    return lambda agent, after, task: score * (ORDERS[agent].index(task) < after)


def expert(agent: int, after: int, task: str) -> float:
    """100, but on Robotank hardly better than random play."""
    return 1.0 if task == "Robotank" else 100.0


def a_study(folder: Path, sharing: float = 90.0, steps: int = 200, seeds: int = 1) -> Study:
    """Two arms of two agents: without sharing every task ends at 80."""
    chance = write_run(folder / "random", agents=1, score=lambda *key: 0.0, share=False)
    best = write_run(folder / "expert", agents=1, score=expert, share=False)
    none = write_run(folder / "none", score=learnt(80), share=False)
    shared = write_run(folder / "distill", score=learnt(sharing), lesson_steps=steps)
    arms = {"none": [load(none)] * seeds, "distill": [load(shared)] * seeds}
    found = weigh(arms, [load(best)], [load(chance)])
    assert found is not None
    return found


def test_games_in_which_experts_do_not_clearly_beat_random_play_are_left_out(
    tmp_path: Path,
) -> None:
    study = a_study(tmp_path)
    assert study.counts.tolist() == [True, True, False]
    assert study.comparison.tasks == ["Krull", "Alien"]
    assert study.expert.mean.tolist() == [100.0, 100.0, 1.0]
    assert study.expert.error.tolist() == [1.0, 1.0, 1.0]  # of 101 and 99


@pytest.mark.parametrize(
    ("gap", "error", "spread", "counts"),
    [
        (5.0, 1.0, 4.0, True),
        (2.5, 1.0, 2.0, False),
        (5.0, 1.0, 6.0, False),
        (-9.0, 1.0, 4.0, False),
    ],
)
def test_a_game_counts_where_the_gap_is_larger_than_its_error_and_than_episodes_scatter(
    gap: float, error: float, spread: float, counts: bool
) -> None:
    chance = Level(np.array([10.0]), np.array([error]), np.array([spread]), 20)
    assert clearly_above(replace(chance, mean=chance.mean + gap), chance).tolist() == [counts]


def test_time_advantage_by_hand(tmp_path: Path) -> None:
    """Without: 0, .4, .6, .8 after 0, 2, 4, 6 thousand steps, so .72 after 5,200; with it: .45,
    .675, .9 after 2,000, 3,200 and 3,600, so .72 after 3,280."""
    arm = a_study(tmp_path).arm("distill")
    assert arm is not None
    found, low, high = arm.advantage(0.9)
    assert found == pytest.approx(5200 / 3280) and low <= found <= high
    assert arm.steps == 3600 and arm.average[0] == pytest.approx(0.9)
    assert arm.improvement == (1.0, 1.0, 1.0) and arm.forgetting[0] == pytest.approx(0)
    assert arm.icr == pytest.approx(1.8)
    assert arm.learning_advantage[0] == pytest.approx(1.8 / 1.6)


def test_pairs_tell_how_soon_they_reached_a_part_of_the_expert(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    none, shared = study.arms
    assert len(none.pairs) == len(shared.pairs) == 4
    assert none.reached(0) == (4, 1000.0, 1.0)
    assert none.reached(2) == (0, inf, inf)  # 0.8 is less than 0.9
    assert shared.reached(2)[0] == 4
    lessons = {(p.agent, p.task): p.own_steps for p in shared.pairs if p.lesson}
    assert lessons == {(0, "Alien"): 200, (1, "Krull"): 200}


@pytest.mark.parametrize(("score", "worse"), [(90.0, 0), (78.0, 0), (70.0, 2)])
def test_single_runs_are_clearly_worse_by_the_error_of_their_evaluations(
    tmp_path: Path, score: float, worse: int
) -> None:
    """An evaluation of two episodes has a standard error of 1: two of them differ by 1.4."""
    arm = a_study(tmp_path, score).arm("distill")
    assert arm is not None and arm.worse.runs == (worse, 2)
    assert isnan(arm.worse.chance)  # one seed


def pair(seed: int, score: float, lesson: bool, agent: int = 0, task: str = "Krull") -> Pair:
    """A pair that ended its task with that score."""
    return Pair("arm", seed, agent, task, lesson, 100, 0.0, score, score, 0.0, (), ())


@pytest.mark.parametrize(
    ("shared", "worse"),
    [
        ([0.5, 0.6, 0.7], 0),
        ([0.35, 0.45, 0.55], 0),  # 0.05 lower; runs scatter by 0.1, so the error is 0.08
        ([0.2, 0.3, 0.4], 1),  # 0.2 lower
        ([0.35, 0.35, 0.35], 1),  # 0.15 lower; they scatter by 0.07, so the error is 0.058
    ],
)
def test_over_seeds_a_pair_is_worse_by_more_than_runs_differ(
    shared: list[float], worse: int
) -> None:
    alone = [pair(k, score, False) for k, score in enumerate([0.4, 0.5, 0.6])]
    students = [pair(k, score, True) for k, score in enumerate(shared)]
    both = list(zip(students, alone, strict=True))
    assert over_seeds(both, alone) == ((worse, 1), 1)
    assert over_seeds(both[:1], alone[:1]) == ((0, 0), 0)  # how runs differ is not known


def test_where_runs_differ_more_than_they_reach_no_harm_could_be_found() -> None:
    """Alone 0, 0.6 and 1.2: a student would have to be below 0.6 by 0.69 to be found."""
    alone = [pair(k, score, False) for k, score in enumerate([0.0, 0.6, 1.2])]
    students = [pair(k, score, True) for k, score in enumerate([0.0, 0.0, 0.0])]
    both = list(zip(students, alone, strict=True))
    assert over_seeds(both, alone) == ((0, 1), 0)


def uneven(folder: Path, first: float, second: float, sharing: float) -> Study:
    """Without sharing seeds 1 and 2 end at these scores; the arm that shares has seed 2 alone."""
    chance = load(write_run(folder / "random", agents=1, score=lambda *key: 0.0, share=False))
    best = load(write_run(folder / "expert", agents=1, score=expert, share=False))
    nones = [
        load(write_run(folder / f"none-{seed}", score=learnt(score), share=False, seed=seed))
        for seed, score in ((1, first), (2, second))
    ]
    shared = load(write_run(folder / "distill", score=learnt(sharing), seed=2))
    study = weigh({"none": nones, "distill": [shared]}, [best], [chance])
    assert study is not None
    return study


def test_how_many_pairs_differ_by_chance_is_told_from_other_seeds(tmp_path: Path) -> None:
    """Without sharing seed 2 ends at 60 instead of 80: clearly worse, one way of two."""
    found = uneven(tmp_path, 80, 60, 70).arms[1].worse
    assert found.chance == 0.5 and found.runs == (0, 2)  # 70 against 60


def test_an_arm_is_compared_on_the_seeds_that_both_have(tmp_path: Path) -> None:
    study = uneven(tmp_path, 80, 40, 50)
    arm = study.arms[1]
    assert arm.matched is not None and arm.matched[1].average[0] == pytest.approx(0.4)
    assert arm.improvement[0] == 1.0 and arm.advantage(0.9)[0] > 1
    assert goals(study)[1][1].startswith("0.50 against 0.40; P = 1.00")
    assert seeds_of_goals(study) == "seed 2"
    by_seed = next(table for table in tables(study) if table.title == "Seed by seed")
    assert [row[:2] for row in by_seed.rows] == [["1", "none"], ["2", "none"], ["2", "distill"]]
    assert by_seed.rows[2][3:5] == ["0.50", "0.40"]


def test_runs_of_experts_that_differ_more_than_their_episodes_give_the_error(
    tmp_path: Path,
) -> None:
    """Scores of 20, 100 and 180: ± 46 over runs, ± 29 over the six episodes."""
    experts = [
        load(write_run(tmp_path / str(k), agents=1, score=lambda *_, s=score: s, share=False))
        for k, score in enumerate((20.0, 100.0, 180.0))
    ]
    level = Level.of(experts)
    assert level.mean[0] == 100 and level.error[0] == pytest.approx(80 / np.sqrt(3))


def test_luck_before_anything_was_learnt_reaches_nothing(tmp_path: Path) -> None:
    """Agent 0 looks at Krull before the first step and scores 100; it ends at 80."""
    a_study(tmp_path)
    chance, best, none = (load(tmp_path / n) for n in ("random", "expert", "none"))
    first = {"agent": 0, "round": 1, "task": "Krull", "env_steps": 0, "score": 100.0, "seconds": 0}
    for name, column in none["curve"].items():
        none["curve"][name] = np.concatenate([[first[name]], column]).astype(column.dtype)
    study = weigh({"none": [none]}, [best], [chance])
    assert study is not None
    pair = next(p for p in study.arms[0].pairs if (p.agent, p.task) == (0, "Krull"))
    assert pair.steps_to[0] == pytest.approx(1000 * 0.5 / 0.8) and isnan(pair.steps_to[2])


def test_looks_at_a_lesson_that_was_dropped_reach_nothing(tmp_path: Path) -> None:
    """Agent 0 on Alien: 200 steps with a lesson end at 90, it is dropped, 1,000 more end at 60."""
    a_study(tmp_path)
    chance, best, shared = (load(tmp_path / n) for n in ("random", "expert", "distill"))
    dropped = (shared["exchange"]["to"] == 0) & (shared["exchange"]["task"] == "Alien")
    shared["exchange"]["kind"] = np.where(dropped, "drop", shared["exchange"]["kind"])
    mine = (shared["tasks"]["agent"] == 0) & (shared["tasks"]["task"] == "Alien")
    shared["tasks"]["env_steps"][mine] = 1200
    last = {"agent": 0, "round": 2, "task": "Alien", "env_steps": 1200, "score": 60.0, "seconds": 9}
    for name, column in shared["curve"].items():
        shared["curve"][name] = np.concatenate([column, [last[name]]]).astype(column.dtype)
    study = weigh({"distill": [shared]}, [best], [chance])
    assert study is not None
    pair = next(p for p in study.arms[0].pairs if (p.agent, p.task) == (0, "Alien"))
    assert pair.steps_to[0] == pytest.approx(200 + 1000 * 0.5 / 0.6) and isnan(pair.steps_to[1])


def test_evaluations_that_steer_are_told_with_their_steps(tmp_path: Path) -> None:
    """Two agents, three tasks, one look at each. Of the eight episodes on a task in both arms six
    are by play (500 steps), two by a lesson (100)."""
    study = a_study(tmp_path)
    none, shared = study.arms
    assert none.exams == (0, 0)
    episodes = shared.runs[0].run.setting("evaluation.episodes")
    assert shared.lengths == dict.fromkeys(GAMES, 400.0)
    assert shared.exams == (6, 6 * episodes * 400.0)
    counted = shared.advantage_with_exams(0.9)
    assert 0 < counted < shared.advantage(0.9)[0]
    del shared.lengths["Robotank"]  # no episode ended: the longest that an evaluation may be
    assert replace(shared).exams == (6, episodes * (4 * 400.0 + 2 * 3000.0))


def test_who_needs_no_step_at_all_has_no_bound_to_its_advantage(tmp_path: Path) -> None:
    a_study(tmp_path)
    chance, best, none, shared = (
        load(tmp_path / n) for n in ("random", "expert", "none", "distill")
    )
    shared["tasks"]["env_steps"][:] = 0
    study = weigh({"none": [none], "distill": [shared]}, [best], [chance])
    assert study is not None and study.arms[1].advantage(0.9)[0] == inf
    text = summary(study, points()[0], [])
    assert "∞" in text and "inf" not in text


def test_one_value_has_no_error_and_missing_scores_no_advantage(tmp_path: Path) -> None:
    found = {table.title: table for table in tables(a_study(tmp_path))}
    assert found["What lessons changed"].rows[0][1] == "0.10 ± –"
    chance, best, none, shared = (
        load(tmp_path / n) for n in ("random", "expert", "none", "distill")
    )
    shared.score[0, -1] = np.nan
    study = weigh({"none": [none], "distill": [shared]}, [best], [chance])
    assert study is not None and isnan(study.arms[1].advantage(0.9)[0])


def test_games_that_do_not_count_are_shown_in_points(tmp_path: Path) -> None:
    table = tables(a_study(tmp_path))[-1]
    assert table.head == ["arm", "Krull", "Alien", "Robotank"]
    assert table.rows[1] == ["distill", "90.0 → 90.0", "90.0 → 90.0", "90.0 → 90.0"]
    assert table.rows[-1] == ["experts", "100.0", "100.0", "1.0"]


def test_fewer_agents_without_sharing_are_the_first_ones_of_none(tmp_path: Path) -> None:
    a_study(tmp_path)
    two = load(write_run(tmp_path / "two", agents=2, score=learnt(90)))
    three = load(write_run(tmp_path / "three", agents=3, score=lambda *k: 50.0, share=False))
    scale = [load(tmp_path / "expert")], [load(tmp_path / "random")]
    study = weigh({"none": [three], "distill-2": [two]}, *scale)
    assert study is not None
    assert [arm.label for arm in study.arms] == ["none", "distill-2", "none-2"]
    base = study.arms[1].base
    assert base is study.arms[2] and base.group.agents == 2 and isnan(base.seconds)
    assert all(isnan(seconds) for pair in base.pairs for seconds in pair.seconds_to)
    assert {pair.agent for pair in base.pairs} == {0, 1}
    assert base.steps == study.arms[0].steps * 2 / 3


def test_goals_say_whether_they_were_reached(tmp_path: Path) -> None:
    good = {want: met for want, _, met in goals(a_study(tmp_path / "a", 90.0, 0, seeds=2))}
    assert list(good.values()) == [False, True, True, True]  # two of three rounds are played
    bad = [met for _, _, met in goals(a_study(tmp_path / "b", 60.0, seeds=2))]
    assert bad == [False, False, True, False]  # 60 never reaches 90 % of 80
    one = [met for _, _, met in goals(a_study(tmp_path / "c", 60.0))]
    assert one == [False, False, True, None]  # with one seed nobody knows how runs differ


def test_agents_that_never_get_there_have_no_advantage(tmp_path: Path) -> None:
    arm = a_study(tmp_path, 60.0).arm("distill")
    assert arm is not None and arm.advantage(0.9) == (0.0, 0.0, 0.0)


def test_human_normalised_gain_counts_every_pair_once_on_its_own_task(tmp_path: Path) -> None:
    """Each pair took two lessons, one of another task; before them it scored 10."""
    a_study(tmp_path)
    chance, best, none, shared = (
        load(tmp_path / n) for n in ("random", "expert", "none", "distill")
    )
    ledger = shared["exchange"]
    for name, column in ledger.items():
        ledger[name] = np.concatenate([column, column])
    ledger["task"][: len(ledger["task"]) // 2] = "Robotank"
    ledger["score_before"][:] = 10.0
    study = weigh({"none": [none], "distill": [shared]}, [best], [chance])
    assert study is not None
    alien, krull = ((90 - 10) / (7127.7 - 227.8), (90 - 10) / (2665.5 - 1598.0))
    assert study.arms[1].hns == pytest.approx(alien + krull)
    assert study.arms[1].megabytes == 0  # nothing was transferred in the made-up ledger


def test_without_experts_or_where_none_is_better_than_chance_there_is_no_study(
    tmp_path: Path,
) -> None:
    runs = [load(write_run(tmp_path / "none", score=learnt(80), share=False))]
    flat = [load(write_run(tmp_path / "flat", agents=1, score=lambda *key: 0.0, share=False))]
    assert weigh({"none": runs}, [], flat) is None
    assert weigh({"none": runs}, flat, flat) is None


# ── what it leaves ─────────────────────────────────────────────────────────────────────────────


def made(folder: Path, arm: str, ranks: int) -> Point:
    """The point whose run was made up in this folder, or one that has none yet."""
    file = folder / arm / "job.toml"
    job = from_toml(file.read_text()) if file.exists() else points()[0].job
    return Point(arm, job, ranks, {"arm": arm, "seed": "1"})


def all_made(folder: Path) -> list[Point]:
    """The points of `a_study`."""
    ranks = {"random": 1, "expert": 1, "none": 2, "distill": 2}
    return [made(folder, arm, number) for arm, number in ranks.items()]


def test_files_of_a_study_hold_every_pair_and_say_what_is_missing(tmp_path: Path) -> None:
    a_study(tmp_path)
    said = collect(tmp_path, [*all_made(tmp_path), made(tmp_path, "mix", 2)])
    assert said[0] == f"Results: {tmp_path / 'study.h5'}"
    text = (tmp_path / "summary.md").read_text()
    assert "Not finished yet: mix." in text
    assert "| Robotank | 0.0 ± 1.0 | 1.0 ± 1.0 | left out |" in text
    assert "| TA_mean(90 %) at least 2.5 | 1.59 (" in text
    assert "(progress.svg)" in text
    words = [word.text for word in ElementTree.parse(tmp_path / "progress.svg").iter()]
    assert {"none", "distill", "environment steps of all agents"} <= set(words)
    page = (tmp_path / "report.html").read_text()
    assert "Does sharing pay?" in page and "Time advantage of sharing" in page
    assert "Negative transfer" in page and "lost from then to the end" in page
    assert list(verify(tmp_path / "study.h5")) == []
    with h5py.File(tmp_path / "study.h5") as file:
        assert list(file["scale/counts"][()]) == [True, True, False]
        assert list(file["pairs/arm"][()]) == [b"none"] * 4 + [b"distill"] * 4
        assert file["arms/ta_mean_90"][()][1, 0] == pytest.approx(5200 / 3280)
        assert isnan(file["arms/ta_mean_90"][()][0, 0])
        assert all("description" in column.attrs for column in file["pairs"].values())


def test_the_published_study_is_what_its_runs_tell(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    copytree(PUBLISHED, folder)
    (folder / "summary.md").unlink()
    collect(folder, load_points(folder))
    for name in ("summary.md", "progress.svg"):
        assert (folder / name).read_text() == (PUBLISHED / name).read_text()


def test_where_no_expert_is_better_than_chance_the_scale_is_shown(tmp_path: Path) -> None:
    for name, agents in (("random", 1), ("expert", 1), ("none", 2)):
        write_run(tmp_path / name, agents=agents, score=lambda *key: 0.0, share=False)
    (tmp_path / "report.html").write_text("of runs that are no longer there")
    there = all_made(tmp_path)[:3]
    said = "\n".join(collect(tmp_path, there))
    assert "nothing can be weighed" in said
    assert "| Krull | 0.0 ± 1.0 | 0.0 ± 1.0 | left out |" in said
    assert (tmp_path / "summary.md").read_text() in said
    assert not (tmp_path / "report.html").exists()


def test_a_run_of_another_job_is_left_out_and_said(tmp_path: Path) -> None:
    """The run.h5 of `none` was copied over that of `distill`."""
    a_study(tmp_path)
    there = all_made(tmp_path)
    (tmp_path / "distill/run.h5").write_bytes((tmp_path / "none/run.h5").read_bytes())
    said = collect(tmp_path, there)
    assert said[0].startswith("distill is left out: its run.h5 is of another job (share.policy: ")
    assert "| distill |" not in (tmp_path / "summary.md").read_text()


def test_a_run_with_an_unknown_setting_or_other_agents_is_left_out_and_said(
    tmp_path: Path,
) -> None:
    a_study(tmp_path)
    there = all_made(tmp_path)
    assert collect(tmp_path, there)[0].startswith("Results")
    run = load(tmp_path / "none")
    run.attributes["job"] = "[share]\nbrandnew = 1\n"
    assert _another(run, there[2]).startswith("none is left out: the job in its run.h5 can't be")
    other = replace(there[3], ranks=3)
    assert "(agents: 2 there, 3 here)" in collect(tmp_path, [*there[:3], other])[0]


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    a_study(tmp_path)
    there = all_made(tmp_path)
    found = []
    for _ in range(2):
        collect(tmp_path, there)
        found.append((tmp_path / "study.h5").read_bytes())
        sleep(1.1)  # times in HDF5 are whole seconds
    assert found[0] == found[1]


def test_the_page_compares_arms_that_have_all_seeds(tmp_path: Path) -> None:
    study = uneven(tmp_path, 80, 40, 50)
    assert [group.label for group in study.comparison.groups] == ["none"]


def test_runs_with_another_number_of_agents_are_not_taken_for_those_of_a_study(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "none_seed-1", share=False)
    job = from_toml((run / "job.toml").read_text())
    check_same_job(run, Point("none_seed-1", job, 2))
    with pytest.raises(UsageError, match="agents: 2 there, 5 here"):
        check_same_job(run, Point("none_seed-1", job, 5))


@pytest.mark.parametrize(
    ("policy", "setting", "refused"),
    [("none", "updates", False), ("exact", "updates", True), ("none", "temperature", True)],
)
def test_a_run_without_sharing_counts_however_lessons_are_used(
    tmp_path: Path, policy: str, setting: str, refused: bool
) -> None:
    """The temperature is that of rehearsal, too."""
    job = from_toml((write_run(tmp_path / "run", share=policy == "exact") / "job.toml").read_text())
    change: Any = {setting: 9.0}
    other = replace(job, reuse=replace(job.reuse, **change))
    point = Point("run", other, 2, {"arm": policy, "seed": "1"})
    if refused:
        with pytest.raises(UsageError, match=rf"reuse\.{setting}"):
            check_same_job(tmp_path / "run", point)
    else:
        assert check_same_job(tmp_path / "run", point) == "finished"


def test_a_later_study_of_the_same_folder_keeps_the_arms_of_the_earlier_one(
    tmp_path: Path,
) -> None:
    save(tmp_path, points(arms=["none", "distill"], seeds=seeds("1", 1)))
    more = _with_others(tmp_path, points(arms=["replay"], seeds=seeds("1", 1)))
    assert {point.settings["arm"] for point in more} == {
        "random",
        "expert",
        "replay",
        "none",
        "distill",
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"reuse.frames": 0.7}, r"reuse\.frames \(0\.7 and 0\.1\)"),
        ({"evaluation.episodes": 7}, r"evaluation\.episodes"),
        ({"reuse.temperature": 5.0}, r"reuse\.temperature"),
    ],
)
def test_arms_that_differ_in_more_than_their_ways_to_share_are_not_compared(
    tmp_path: Path, flags: dict[str, object], words: str
) -> None:
    save(tmp_path, points(arms=["none", "distill"], seeds=seeds("1", 1)))
    with pytest.raises(UsageError, match=words):
        _with_others(tmp_path, points(arms=["replay"], flags=LITTLE | flags))


def test_another_number_of_agents_is_no_seed_of_an_arm(tmp_path: Path) -> None:
    save(tmp_path, points(arms=["none", "distill"], seeds=seeds("1", 1)))
    with pytest.raises(UsageError, match=r"has 4 agents, none_seed-1 3, so they can't be seeds"):
        _with_others(tmp_path, points(arms=["none", "distill"], agents=[4], seeds=seeds("1", 2)))


def test_arms_of_another_topology_are_compared_where_their_name_tells_it(tmp_path: Path) -> None:
    save(tmp_path, points(arms=["none", "distill"], seeds=seeds("1", 1)))
    more = points(arms=["distill"], topologies=["full", "ring"], seeds=seeds("1", 1))
    assert "distill-ring_seed-1" in {point.name for point in _with_others(tmp_path, more)}
    with pytest.raises(UsageError, match=r"share\.topology"):
        _with_others(tmp_path, points(arms=["replay"], topologies=["ring"], seeds=seeds("1", 1)))


def test_a_dry_run_over_runs_of_another_job_is_refused_like_the_run(tmp_path: Path) -> None:
    write_run(tmp_path / "none_seed-1", share=False)
    with pytest.raises(UsageError, match="is a run of another job"):
        CliRunner().invoke(
            cli,
            ["study", "--arms", "none,distill", "--dry-run", "--out", str(tmp_path)],
            standalone_mode=False,
            catch_exceptions=False,
        )


SMALL = ("--tasks", "CartPole-v1", "--order", "same", "--frames", "500")


@pytest.mark.parametrize(
    ("made_by", "words"),
    [
        ("study", ["sweep", "--resume", "{}", "--report"]),
        ("study", ["sweep", *SMALL, "--policies", "none", "--out", "{}"]),
        ("study", ["sweep", *SMALL, "--policies", "none", "--out", "{}", "--dry-run"]),
        ("sweep", ["study", "--resume", "{}"]),
        ("sweep", ["study", *SMALL, "--arms", "none,distill", "--out", "{}"]),
    ],
)
def test_a_folder_holds_a_study_or_a_sweep(tmp_path: Path, made_by: str, words: list[str]) -> None:
    point = points()[0]
    save(tmp_path, [point if made_by == "study" else replace(point, settings={"seed": "1"})])
    before = (tmp_path / "sweep.json").read_bytes()
    with pytest.raises(UsageError, match=f"holds a {made_by}"):
        CliRunner().invoke(
            cli,
            [word.format(tmp_path) for word in words],
            standalone_mode=False,
            catch_exceptions=False,
        )
    assert (tmp_path / "sweep.json").read_bytes() == before


def test_what_could_not_start_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    flags = LITTLE | {"order": "canal"}
    with pytest.raises(UsageError, match="order 'canal' knows the ten games only"):
        save(tmp_path / "new", points(flags=flags))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, r"none_seed-1\.toml can't be read: No such file"),
        ("foo = [", r"none_seed-1\.toml is not as canal-mpi writes it: "),
        ('[train]\nframes = "many"', r"none_seed-1\.toml is not as .*train\.frames = 'many'"),
    ],
)
def test_a_damaged_job_file_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    save(tmp_path, points(arms=["none", "distill"], seeds=seeds("1", 1)))
    file = tmp_path / "jobs" / "none_seed-1.toml"
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(DamagedData, match=words):
        load_points(tmp_path)


def test_nothing_finished_is_said_and_nothing_written(tmp_path: Path) -> None:
    assert collect(tmp_path, points())[0].startswith("Nothing to compare yet")
    assert list(tmp_path.iterdir()) == []


def test_the_summary_is_a_page_of_markdown(tmp_path: Path) -> None:
    text = summary(a_study(tmp_path), points()[0], [])
    assert text.startswith("# Does sharing pay?\n") and text.endswith("|\n")
    assert "Not finished" not in text
    assert "| forgetting at most 0.05 | 0.000 (0.000 – 0.000) | reached |" in text
    assert (
        "| negative transfer in at most 1 of 20 pairs | one seed can't tell | not known |" in text
    )
    lost = text[text.index("lost from then to the end") :]
    assert "| distill | 0.00 ± 0.00 | 0.00 ± 0.00 |" in lost


def test_negative_transfer_is_not_explained_where_nobody_shares(tmp_path: Path) -> None:
    a_study(tmp_path)
    collect(tmp_path, all_made(tmp_path)[:3])
    for name in ("summary.md", "report.html"):
        assert "Negative transfer" not in (tmp_path / name).read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arms", "none,distil"], "distill"),
        (["--agents", "1"], "expected numbers from 2 to 4096"),
        (["--report"], "of which study?"),
        (["--resume", "x", "--arms", "none"], "leave out --arms"),
        (["--seeds", "x"], "expected how many"),
    ],
)
def test_what_makes_no_study_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CliRunner().invoke(
            cli, ["study", *arguments], standalone_mode=False, catch_exceptions=False
        )


JOB = """
tasks = ["CartPole-v1", "Acrobot-v1"]
order = "rotate"
[train]
frames = 1500
[learn]
widths = [32]
starts = 100
[evaluation]
episodes = 3
max_steps = 200
"""


@pytest.mark.mpi
def test_a_study_runs_from_its_start_to_its_report_and_repeats_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    out = tmp_path / "study"
    command = ["canal-mpi", "study", "--job", str(tmp_path / "job.toml"), "--seeds", "1"]
    command += ["--arms", "none,distill", "--agents", "2", "--out", str(out)]
    told = run([*command, "--dry-run"], timeout=120)
    assert told.code == 0 and "4 points, 0 finished" in told.out and not out.exists()
    first = run(command, timeout=240)
    assert first.code == 0, first.out + first.err
    assert "# Does sharing pay?" in first.out
    times = {file: file.stat().st_mtime_ns for file in out.glob("*/run.h5")}
    assert len(times) == 4
    again = run(command, timeout=60)
    assert again.code == 0 and "started" not in again.out
    assert {file: file.stat().st_mtime_ns for file in out.glob("*/run.h5")} == times
    shown = run(["canal-mpi", "study", "--resume", str(out), "--report"], timeout=60)
    assert shown.code == 0 and "4 of 4 points are finished" in shown.out
    assert run(["canal-mpi", "inspect", "--verify", str(out / "study.h5")]).code == 0
