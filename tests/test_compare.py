"""The measures of made-up runs, from the file to the number."""

from math import nan
from pathlib import Path

import h5py
import numpy as np
import pytest
from madeup import GAMES, rising, write_run

from canal_mpi.errors import UsageError
from canal_mpi.results.compare import Measured, compare, scale_for
from canal_mpi.results.reader import load

EXACT = 1e-9
KRULL, ALIEN, ROBOTANK = (1598.0, 2665.5), (227.8, 7127.7), (2.2, 11.9)


def hns(task: str, score: float) -> float:
    zero, one = {"Krull": KRULL, "Alien": ALIEN, "Robotank": ROBOTANK}[task]
    return (score - zero) / (one - zero)


def test_the_measures_of_a_hand_made_run_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    run = Measured(load(write_run(tmp_path / "a")))
    assert run.scale.name == "HNS"
    found = run.measures()
    # agent a on task i after round t scores 100 t + 10 a + len(i), the mean of its two episodes
    at_end = {a: [hns(i, 300 + 10 * a + len(i)) for i in GAMES] for a in (0, 1)}
    average = found["performance/average"].value
    assert average == pytest.approx([np.mean(at_end[0]), np.mean(at_end[1])], abs=EXACT)
    # agent 0 learns Krull, Alien, Robotank; agent 1 Alien, Robotank, Krull
    lost = [
        [hns("Krull", 105) - hns("Krull", 305), hns("Alien", 205) - hns("Alien", 305), 0.0],
        [0.0, hns("Alien", 115) - hns("Alien", 315), hns("Robotank", 218) - hns("Robotank", 318)],
    ]
    assert found["forgetting/continual_world"].value == pytest.approx(np.array(lost), abs=EXACT)
    # Krull rose by 100 and by 200 after round 1: on the mean 150 points
    kept = found["forgetting/maintenance"].value
    assert kept[0, 0] == pytest.approx(150 / (KRULL[1] - KRULL[0]), abs=EXACT)
    best = [sum(hns(i, 100 * t + 10 + len(i)) for i in GAMES) for t in range(4)]
    assert found["shell/icr"].value == pytest.approx(best, abs=EXACT)
    assert found["shell/tpot"].value == pytest.approx(np.cumsum(best), abs=EXACT)
    gain = found["transfer/zero_shot"].value
    assert gain[0, 1, 0] == pytest.approx(100 / (ALIEN[1] - ALIEN[0]), abs=EXACT)
    assert np.isnan(gain[0, 0, 0])


def test_the_file_of_a_finished_run_carries_its_measures(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    found = Measured(load(folder)).measures()
    with h5py.File(folder / "run.h5") as file:
        assert file["measures"].attrs["scale"] == "HNS"
        for name, measure in found.items():
            data = file["measures"][name]
            assert np.array_equal(data[()], measure.value, equal_nan=True)
            assert data.attrs["description"] == measure.about
    write_run(tmp_path / "b", status="running")
    with h5py.File(tmp_path / "b" / "run.h5") as file:
        assert "measures" not in file


def test_steps_of_lessons_and_probes_count(tmp_path: Path) -> None:
    run = Measured(load(write_run(tmp_path / "a")))
    # round 1: both play; round 2: agent 0 takes Alien from agent 1; round 3: both take lessons
    assert run.steps.tolist() == [[0, 1000, 1200, 1400], [0, 1000, 2000, 2200]]


def test_evaluations_that_are_cut_short_are_scaled_by_what_was_seen(tmp_path: Path) -> None:
    run = Measured(load(write_run(tmp_path / "a", max_steps=300)))
    assert run.scale.name == "range"
    assert run.P[:, 0].mean() == pytest.approx(0, abs=EXACT)
    assert run.P.max() == pytest.approx(1, abs=EXACT)


def test_tasks_without_human_scores_are_scaled_by_what_was_seen(tmp_path: Path) -> None:
    run = Measured(load(write_run(tmp_path / "a", tasks=["CartPole-v1", "Acrobot-v1"])))
    assert run.scale.name == "range"
    assert run.whole


def test_a_score_that_never_changes_is_zero(tmp_path: Path) -> None:
    run = Measured(load(write_run(tmp_path / "a", score=lambda *_: 5.0, max_steps=10)))
    assert pytest.approx(0, abs=EXACT) == run.P


def test_experts_are_what_scores_are_a_part_of(tmp_path: Path) -> None:
    runs = [load(write_run(tmp_path / "a"))]
    experts = [
        load(write_run(tmp_path / game, [game], 1, share=False, score=lambda *_: 500.0))
        for game in GAMES
    ]
    found = compare(runs, experts)
    assert found.scale.name == "expert"
    assert found.groups[0].runs[0].P[0, 3, 0] == pytest.approx(305 / 500, abs=EXACT)
    # the expert has 500 all the time: the sum of the curve is a part of 500
    assert found.versus(found.groups[0])["relative performance (RP)"] < 1


def test_without_evaluations_nothing_is_told(tmp_path: Path) -> None:
    run = Measured(load(write_run(tmp_path / "a", score=lambda *_: nan)))
    assert not run.whole
    assert all(np.isnan(m.value).all() for m in run.measures().values())


def test_evaluations_of_the_current_task_alone_tell_what_was_learnt(tmp_path: Path) -> None:
    def current(agent: int, after: int, task: str) -> float:
        order = [*GAMES[agent:], *GAMES[:agent]]
        return 50.0 if after and order[after - 1] == task else nan

    run = Measured(load(write_run(tmp_path / "a", score=current)))
    found = run.measures()
    assert np.isfinite(found["performance/learnt"].single)
    assert np.isnan(found["performance/average"].single)


def test_a_run_that_goes_on_is_measured_up_to_the_last_whole_round(tmp_path: Path) -> None:
    run = Measured(load(write_run(tmp_path / "a", rounds=2, status="running")))
    assert run.rounds_done == 2
    assert run.P.shape == (2, 3, 3)
    assert run.whole


# Comparing


def pair(tmp_path: Path) -> list[Path]:
    share = write_run(tmp_path / "share", agents=3, score=lambda a, t, i: 2000.0 + 1000 * t)
    none = write_run(
        tmp_path / "none", agents=3, share=False, score=lambda a, t, i: 2000.0 + 1000 * t
    )
    return [share, none]


def test_the_time_advantage_is_the_ratio_of_steps(tmp_path: Path) -> None:
    found = compare([load(path) for path in pair(tmp_path)])
    share, none = found.groups
    assert (share.label, none.label) == ("share exact", "no sharing")
    assert found.baseline is none
    # the same scores: 9000 steps without sharing; 3000 + 600 + 600 with lessons of 200 steps
    assert found.versus(share)[
        "× fewer steps to 100 % of the score without sharing"
    ] == pytest.approx(9000 / 4200, abs=EXACT)
    assert found.versus(share)["probability of improvement"] == 0.5
    assert found.versus(none) == {}


def test_runs_that_differ_in_the_seed_are_one_group(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / str(seed), seed=seed) for seed in (1, 2, 3)]
    found = compare([load(path) for path in paths])
    assert [len(group.runs) for group in found.groups] == [3]
    assert found.groups[0].final.shape == (6, 3)


def test_a_single_agent_gives_the_advantages_of_many(tmp_path: Path) -> None:
    score = lambda a, t, i: 3000.0 * t + (a == 1)  # noqa: E731
    many = load(write_run(tmp_path / "many", agents=3, score=score))
    one = load(write_run(tmp_path / "one", agents=1, share=False, score=score))
    found = compare([many, one])
    versus = found.versus(found.groups[0])
    assert found.single is found.groups[1]
    assert versus["ILA"] == pytest.approx(1.0, abs=1e-3)
    # the clock is the busiest agent's steps: 1000 + 200 + 200 against 3000
    assert versus["× fewer steps to 100 % of the score of one agent"] == pytest.approx(
        3000 / 1400, rel=1e-3
    )


def test_runs_of_other_tasks_are_not_compared(tmp_path: Path) -> None:
    a = load(write_run(tmp_path / "a"))
    b = load(write_run(tmp_path / "b", tasks=["Krull"]))
    with pytest.raises(UsageError, match="other tasks"):
        compare([a, b])


def test_the_scale_of_many_runs_is_one(tmp_path: Path) -> None:
    a = load(write_run(tmp_path / "a", max_steps=10))
    b = load(write_run(tmp_path / "b", max_steps=10, score=lambda *key: 2 * rising(*key)))
    scale = scale_for([a, b])
    assert scale.one[0] == pytest.approx(2 * rising(1, 3, "Krull"), abs=EXACT)
