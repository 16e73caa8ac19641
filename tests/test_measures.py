"""Measures against values worked out by hand, and against rliable and l2metrics themselves."""

import numpy as np
import pytest

from canal_mpi.results import compare as c
from canal_mpi.results import measures as m

# Two agents, two tasks, t = 0, 1, 2. Agent 0 learns task 0 then 1; agent 1 task 1 then 0.
P = np.array(
    [
        [[0.1, 0.0], [0.7, 0.2], [0.4, 0.9]],
        [[0.0, 0.1], [0.3, 0.5], [0.8, 0.6]],
    ]
)
WHEN = np.array([[1, 2], [2, 1]])
EXACT = 1e-9


def close(a: object, b: object) -> bool:
    return np.allclose(
        np.asarray(a, float), np.asarray(b, float), atol=EXACT, rtol=0, equal_nan=True
    )


def test_forgetting_is_what_was_lost_since_the_task() -> None:
    assert close(m.forgetting(P, WHEN), [[0.3, 0.0], [0.0, -0.1]])


def test_a_task_that_was_never_learnt_has_no_forgetting() -> None:
    assert close(m.forgetting(P, np.array([[1, 0], [0, 1]])), [[0.3, np.nan], [np.nan, -0.1]])


def test_tasks_of_the_last_round_alone_tell_nothing_of_forgetting() -> None:
    final = P.copy()
    final[:, :-1] = np.nan
    assert np.isnan(m.forgetting(final, WHEN)).all()


def test_isolated_forgetting_and_zero_shot_transfer_follow_each_agents_order() -> None:
    drops, gains = m.isolated(P, WHEN)
    nan = np.nan
    # agent 0: its 1st task fell from 0.7 to 0.4 while it learnt its 2nd
    assert close(drops, [[[nan, 0.3], [nan, nan]], [[nan, -0.1], [nan, nan]]])
    # agent 0: its 2nd task rose from 0.0 to 0.2 while it learnt its 1st
    assert close(gains, [[[nan, nan], [0.2, nan]], [[nan, nan], [0.3, nan]]])


def test_maintenance_is_later_evaluations_minus_the_first() -> None:
    assert close(m.maintenance(P, WHEN), [[-0.3, np.nan], [np.nan, 0.1]])


def test_instant_reward_takes_the_best_agent_of_each_task() -> None:
    assert close(m.instant_reward(P), [0.2, 1.2, 1.7])


def test_learning_advantage_is_a_ratio_to_the_single_agent() -> None:
    instant, total = c.learning_advantage(P, P[:1])
    assert close(instant, [2.0, 1.2 / 0.9, 1.7 / 1.3])
    assert close(total, [2.0, 1.4 / 1.0, 3.1 / 2.3])


def test_steps_to_a_level_lie_between_evaluations() -> None:
    steps, scores = np.array([0.0, 100, 200]), np.array([0.0, 0.5, 0.4])
    assert c.steps_to(0.25, steps, scores) == pytest.approx(50, abs=EXACT)
    assert c.steps_to(0.5, steps, scores) == pytest.approx(100, abs=EXACT)
    assert c.steps_to(0.0, steps, scores) == 0
    assert np.isnan(c.steps_to(0.6, steps, scores))


def test_time_advantage_compares_steps_to_the_same_reward() -> None:
    single = np.array([0.0, 1000, 2000]), np.array([0.0, 1.0, 2.0])
    five = np.array([0.0, 200, 400]), np.array([0.0, 1.0, 2.5])
    # 1.0: after 1000 steps alone, after 200 together
    assert c.time_advantage(1.0, *five, *single) == pytest.approx(5.0, abs=EXACT)
    # 2.0: 2000 steps alone; together 200 + 200 * (1.0 / 1.5)
    assert c.time_advantage(2.0, *five, *single) == pytest.approx(2000 / (200 + 400 / 3), abs=EXACT)


def test_a_level_that_is_not_above_zero_has_no_time_advantage() -> None:
    base = np.array([0.0, 100]), np.array([-0.5, -0.1])
    for level in (-0.05, 0.0, np.nan):
        assert np.isnan(c.time_advantage(level, *base, *base))


def test_forward_transfer_is_the_gain_in_area_over_what_was_left_to_gain() -> None:
    found = c.forward_transfer(np.array([0.6, 0.2, 1.0]), np.array([0.2, 0.6, 1.0]))
    assert close(found, [0.5, -1.0, np.nan])


def test_forward_transfer_keeps_scores_between_zero_and_one() -> None:
    assert close(c.forward_transfer(np.array([1.7, -3.0]), np.array([0.5, -1.0])), [1.0, 0.0])


def test_the_area_of_a_straight_line_is_its_middle() -> None:
    curve = c.resampled(np.array([0.0, 100.0]), np.array([0.2, 0.6]), 100)
    assert c.area(curve) == pytest.approx(0.4, abs=EXACT)


def test_a_curve_holds_its_last_value_until_the_budget() -> None:
    curve = c.resampled(np.array([0.0, 20.0]), np.array([0.0, 1.0]), 100)
    # a triangle of 20, then 80 at 1
    assert c.area(curve) == pytest.approx(0.9, abs=EXACT)
    assert np.isnan(c.resampled(np.zeros(0), np.zeros(0), 100)).all()


def test_relative_performance_is_the_ratio_of_sums_over_common_steps() -> None:
    assert c.relative_performance(np.array([1.0, 3, 99]), np.array([1.0, 1])) == 2.0
    assert np.isnan(c.relative_performance(np.ones(2), np.zeros(2)))


def test_the_interquartile_mean_leaves_out_both_ends() -> None:
    assert m.interquartile_mean(np.array([[0.0, 1, 2], [3, 100, -50], [1.5, 2.5, 2.0]])) == (
        pytest.approx((1 + 1.5 + 2 + 2 + 2.5) / 5, abs=EXACT)
    )


def test_improvement_counts_wins_and_half_of_ties() -> None:
    x, y = np.array([[1.0, 5.0], [2.0, 5.0]]), np.array([[1.0, 9.0], [0.0, 9.0]])
    # task 0: (1>1: tie 0.5, 1>0, 2>1, 2>0) = 3.5 / 4; task 1: never
    assert c.improvement(x, y) == pytest.approx(0.4375, abs=EXACT)


def test_an_interval_holds_the_value_and_is_the_same_again() -> None:
    scores = np.random.default_rng(1).normal(1.0, 0.2, (6, 4))
    value, low, high = m.bootstrap(m.interquartile_mean, scores)
    assert low < value == m.interquartile_mean(scores) < high
    assert (value, low, high) == m.bootstrap(m.interquartile_mean, scores)


def test_what_is_not_known_is_nan_and_not_zero() -> None:
    nothing = np.full((2, 1, 3), np.nan)
    never = np.zeros((2, 3), dtype=int)
    assert np.isnan(m.mean(m.forgetting(nothing, never)))
    assert np.isnan(m.mean(m.maintenance(nothing, never)))
    assert np.isnan(m.interquartile_mean(np.full((2, 2), np.nan)))
    assert np.isnan(m.bootstrap(m.interquartile_mean, np.full((2, 2), np.nan))).all()


# Against the libraries that others use


def test_iqm_and_improvement_are_those_of_rliable() -> None:
    metrics = pytest.importorskip(
        "rliable.metrics", reason="rliable is not installed (extra: look)"
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(1, 1, (7, 10)), rng.normal(0.5, 1, (5, 10))
    assert m.interquartile_mean(x) == pytest.approx(metrics.aggregate_iqm(x), abs=EXACT)
    assert c.improvement(x, y) == pytest.approx(metrics.probability_of_improvement(x, y), abs=EXACT)


def test_the_bootstrap_of_one_task_is_that_of_rliable() -> None:
    pytest.importorskip("rliable", reason="rliable is not installed (extra: look)")
    try:
        from rliable import library
        from rliable.metrics import aggregate_iqm
    except TypeError as error:  # arch 7, which it needs, does not know pandas 3
        pytest.skip(f"rliable can't be imported beside this pandas: {error}")

    # of one task: with several rliable draws the seeds of each anew, and we draw them for all
    scores = np.random.default_rng(0).normal(1, 1, (40, 1))
    _, found = library.get_interval_estimates(
        {"a": scores},
        lambda x: np.array([aggregate_iqm(x)]),
        reps=5_000,
        random_state=np.random.RandomState(0),
    )
    theirs, ours = found["a"][:, 0], m.bootstrap(m.interquartile_mean, scores)[1:]
    assert list(ours) == pytest.approx(list(theirs), abs=0.03)  # of a width of 0.5


def test_rp_and_pm_are_those_of_l2metrics() -> None:
    pytest.importorskip("l2metrics", reason="l2metrics is not installed")
    import pandas as pd
    from l2metrics.performance_maintenance import PerformanceMaintenance
    from l2metrics.ste_relative_performance import STERelativePerf

    rng = np.random.default_rng(3)
    curve, expert = (np.linspace(0, top, 80) + rng.normal(0, 0.05, 80) for top in (1.0, 0.8))
    frame = pd.DataFrame({"exp_num": range(80), "regime_num": 0, "score": curve})
    ste = {"a": [pd.DataFrame({"exp_num": range(80), "block_type": "train", "score": expert})]}
    evaluated = P[0, 1:, 0]  # after the task, and once more later
    blocks = pd.DataFrame(
        {
            "block_num": [0, 1, 2],
            "block_type": ["train", "test", "test"],
            "block_subtype": ["wake", "wake", "wake"],
            "task_name": "a",
            "regime_num": [0, 1, 2],
        }
    )
    told = {"task_name": ["a"] * 3, "regime_num": [0, 1, 2], "term_perf": [0.0, *evaluated]}
    empty = pd.DataFrame(told)
    relative = STERelativePerf("score", ste).calculate(frame, blocks, empty.copy())
    kept = PerformanceMaintenance("score").calculate(frame, blocks, empty.copy())
    found = relative["ste_rel_perf"].dropna().iloc[0][0]
    assert c.relative_performance(curve, expert) == pytest.approx(found, abs=EXACT)
    found = kept["perf_maintenance_mrlep"].dropna().iloc[0]
    assert m.maintenance(P[:1], np.array([[1, 0]]))[0, 0] == pytest.approx(found, abs=EXACT)
