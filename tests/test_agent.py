"""The loop of an agent, with fakes around it, and with the real learner on a task it can learn."""

from collections.abc import Callable
from dataclasses import replace
from math import exp, nan
from threading import Thread
from typing import Any

import numpy as np
import pytest
from fakes import CHAIN, Chains, FakeLearner, chain_parcel, tiny_agent
from fakes import tiny_job as job_with
from small import Donors, Sink
from thread_links import ThreadLink

from canal_mpi.agent.state import TaskProgress, TaskSchedule
from canal_mpi.config import resolve
from canal_mpi.interfaces import Array, Columns, FetchResult, Offer, Progress, TransferEvent
from canal_mpi.learn.dqn import DQN
from canal_mpi.membuf.lesson import unpack
from canal_mpi.rank.build import make_agent, make_learner
from canal_mpi.results.store import TABLES
from canal_mpi.settings import Job
from canal_mpi.topology.exchange import alone
from canal_mpi.topology.graphs import full

LEARNABLE: dict[str, Any] = {
    "train__steps": 600,
    "train__log_interval": 100,
    "learn__widths": [32],
    "learn__batch_size": 32,
    "learn__learning_starts": 32,
    "learn__lr": 5e-3,
    "learn__gamma": 0.9,
    "explore__eps_decay": 200.0,
    "explore__eps_end": 0.1,
    "evaluation__epsilon": 0.0,
}


def steady(rows: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, str]]]:
    """The rows without what may differ between two equal runs."""
    return {
        table: [
            {name: repr(v) for name, v in row.items() if not TABLES[table][name].volatile}
            for row in listed
        ]
        for table, listed in rows.items()
    }


def seeded(number: int) -> Callable[[str], int]:
    """Seeds of an agent for the pieces of its network."""
    return lambda name: number


def optimal(learner: DQN) -> bool:
    places = np.eye(CHAIN.shape[0], dtype=np.float32)[:-1]
    return bool((learner.act(places) == 1).all())


# The order of things


def test_each_turn_sends_then_learns_then_receives() -> None:
    log: list[str] = []
    agent = tiny_agent(
        job_with(train__steps=3, evaluation__episodes=0),
        envs=Chains(log=log),
        learner=FakeLearner(log),
    )
    agent.run()
    turn = ["send", "update", "receive"]
    trained = log.index("close") + 1
    assert log[:trained] == ["begin left", "send", "receive", *turn, *turn, "close"]
    assert set(log[trained:]) <= {"begin left", "consolidate"}
    assert log.count("consolidate") == 1


@pytest.mark.parametrize(("ratio", "updates"), [(0.25, 5), (1, 19), (2, 38), (0, 0)])
def test_updates_per_step_sets_the_number_of_updates(ratio: float, updates: int) -> None:
    """Twenty steps; nothing can be learnt in the first one, before there is a row."""
    sink, log = Sink(), list[str]()
    job = job_with(learn__updates_per_step=ratio)
    tiny_agent(job, learner=FakeLearner(log), sink=sink).run()
    assert log.count("update") == updates
    assert sink.rows["tasks"][0]["updates"] == updates
    assert sink.rows["tasks"][0]["env_steps"] == 20


def test_a_quarter_of_an_update_a_step_is_one_every_fourth_step() -> None:
    log: list[str] = []
    job = job_with(learn__updates_per_step=0.25, evaluation__episodes=0)
    tiny_agent(job, envs=Chains(log=log), learner=FakeLearner(log)).run()
    sends = [log[:at].count("send") for at, word in enumerate(log) if word == "update"]
    assert sends == [4, 8, 12, 16, 20]


def test_nothing_is_learnt_before_enough_rows_are_there() -> None:
    log: list[str] = []
    tiny_agent(job_with(learn__learning_starts=15), learner=FakeLearner(log)).run()
    assert log.count("update") == 5
    log.clear()
    tiny_agent(job_with(learn__batch_size=18), learner=FakeLearner(log)).run()
    assert log.count("update") == 2


def test_every_round_is_flushed_and_leaves_a_checkpoint_and_a_membuf() -> None:
    sink = Sink()
    tiny_agent(job_with(), ("left", "right"), sink=sink).run()
    assert sink.flushed == [1, 2]
    assert set(sink.saved) == {
        ("checkpoints", "learner"),
        ("checkpoints", "best"),
        ("membuf", "round-01-left"),
        ("membuf", "round-02-right"),
    }
    assert len(sink.saved["membuf", "round-01-left"]["action"]) == 21


# Exploration


def test_epsilon_falls_from_start_to_end() -> None:
    job = job_with(explore__eps_start=0.9, explore__eps_end=0.1, explore__eps_decay=50.0)
    agent = tiny_agent(job)
    agent.progress = TaskProgress(TaskSchedule(20, epsilon=job.explore.eps_start))
    assert agent.epsilon(0) == pytest.approx(0.9)
    assert agent.epsilon(50) == pytest.approx(0.1 + 0.8 * exp(-1))
    assert agent.epsilon(10_000) == pytest.approx(0.1)
    schedule = [agent.epsilon(step) for step in range(100)]
    assert schedule == sorted(schedule, reverse=True)


def test_without_epsilon_every_action_is_greedy() -> None:
    envs = Chains()
    job = job_with(explore__eps_start=0.0, explore__eps_end=0.0)
    tiny_agent(job, envs=envs, learner=FakeLearner(action=1)).run()
    assert envs.envs[0].actions == [1] * 20


def test_epsilon_is_the_share_of_random_actions() -> None:
    envs = Chains()
    job = job_with(
        train__steps=4000, explore__eps_start=0.4, explore__eps_end=0.4, learn__updates_per_step=0
    )
    tiny_agent(job, envs=envs, learner=FakeLearner(action=0)).run()
    other = sum(envs.envs[0].actions)
    assert 700 < other < 900  # half of the random ones, 800 on average


def test_the_epsilon_of_a_row_is_the_schedules() -> None:
    sink = Sink()
    agent = tiny_agent(job_with(), sink=sink)
    agent.run()
    found = [(row["step"], row["epsilon"]) for row in sink.rows["train"]]
    assert found == [(10, agent.epsilon(10)), (20, agent.epsilon(20))]


def test_the_last_turns_of_a_task_have_their_row_too() -> None:
    sink = Sink()
    tiny_agent(job_with(train__steps=25), sink=sink).run()
    assert [row["step"] for row in sink.rows["train"]] == [10, 20, 25]


# Evaluation


def test_the_score_is_the_mean_return_of_greedy_episodes() -> None:
    sink = Sink()
    job = job_with(evaluation__episodes=3, evaluation__epsilon=0.0)
    tiny_agent(job, learner=FakeLearner(action=1), sink=sink).run()
    assert [row["score"] for row in sink.rows["evaluation"]] == [1.0] * 3
    assert [row["length"] for row in sink.rows["evaluation"]] == [5] * 3
    assert [row["episode"] for row in sink.rows["evaluation"]] == [0, 1, 2]


def test_an_evaluation_episode_is_cut_at_its_limit() -> None:
    sink = Sink()
    job = job_with(evaluation__max_steps=7, evaluation__epsilon=0.0)
    tiny_agent(job, envs=Chains(cut_after=0), learner=FakeLearner(action=0), sink=sink).run()
    assert sink.rows["evaluation"][0]["length"] == 7
    assert sink.rows["evaluation"][0]["score"] == 0.0


MEASURED = {
    "final": [("left", 3), ("right", 3)],
    "after": [("left", 1), ("right", 2), ("left", 3), ("right", 3)],
    "all": [(task, after) for after in (0, 1, 2, 3) for task in ("left", "right")],
}


@pytest.mark.parametrize("tasks", MEASURED)
def test_evaluations_come_after_the_last_round_and_cost_no_env_steps(tasks: str) -> None:
    envs, sink = Chains(), Sink()
    job, order = job_with(evaluation__tasks=tasks), ("left", "right", "left")
    tiny_agent(job, order, number=3, envs=envs, sink=sink).run()
    played, measured = envs.made[:3], envs.made[3:]
    assert played == [(task, "train", 3) for task in order]
    assert measured == [(task, f"evaluate-{after}", 3) for task, after in MEASURED[tasks]]
    found = [(row["task"], row["after_round"]) for row in sink.rows["evaluation"]]
    assert found == MEASURED[tasks]
    assert [row["env_steps"] for row in sink.rows["tasks"]] == [20, 20, 20]


@pytest.mark.parametrize("tasks", ["after", "all"])
def test_an_evaluation_uses_the_network_of_its_round(tasks: str) -> None:
    """The network of each round is told apart by its Q-values of one state."""
    job = job_with(evaluation__tasks=tasks, learn__heads="shared", learn__lr=0.1)
    agent, state = tiny_agent(job, ("left", "right")), np.eye(CHAIN.shape[0], dtype=np.float32)[:1]
    learner = agent.learner = DQN(CHAIN, job, seeded(3))
    learner.set_task("left")
    expected, seen = {0: learner.q_values(state)}, dict[tuple[str, int], Array]()
    evaluate, learnt = agent.evaluate, agent.record.learnt

    def note(donors: list[str]) -> None:
        expected[agent.record.round] = learner.q_values(state)
        learnt(donors)

    def spy(task: str, purpose: str) -> list[tuple[float, int]]:
        seen[task, int(purpose[-1])] = learner.q_values(state)
        return evaluate(task, purpose)

    agent.evaluate, agent.record.learnt = spy, note  # type: ignore[method-assign]
    agent.run()
    for (_, after), values in seen.items():
        np.testing.assert_array_equal(values, expected[after])
    assert len(seen) == {"after": 3, "all": 6}[tasks]
    np.testing.assert_array_equal(learner.q_values(state), expected[2])


def test_without_evaluation_nothing_is_measured() -> None:
    envs, sink = Chains(), Sink()
    tiny_agent(job_with(evaluation__episodes=0), envs=envs, sink=sink).run()
    assert "evaluation" not in sink.rows
    assert [purpose for _, purpose, _ in envs.made] == ["train"]


def test_a_random_action_in_an_evaluation_works_with_the_real_learner() -> None:
    job = job_with(evaluation__epsilon=1.0, evaluation__episodes=2)
    sink = Sink()
    tiny_agent(job, learner=DQN(CHAIN, job, seeded(1)), sink=sink).run()
    assert len(sink.rows["evaluation"]) == 2


# Lessons


def test_an_agent_with_a_lesson_plays_no_training_step() -> None:
    envs, sink, log = Chains(), Sink(), list[str]()
    link = Donors([chain_parcel("left", 30)])
    tiny_agent(job_with(), envs=envs, learner=FakeLearner(log), link=link, sink=sink).run()
    assert [purpose for _, purpose, _ in envs.made] == ["evaluate-1"]
    row = sink.rows["tasks"][0]
    assert (row["source"], row["donors"], row["env_steps"]) == ("lesson", "1", 0)
    assert log.count("update") == row["updates"] == 20
    assert all(train["epsilon"] == 0 for train in sink.rows["train"])


def test_an_agent_without_own_rows_offers_nothing_but_still_takes_part() -> None:
    link, sink = Donors([chain_parcel("left", 30)]), Sink()
    tiny_agent(job_with(), link=link, sink=sink).run()
    assert link.published == [(None, b"")]
    assert [row["kind"] for row in sink.rows["exchange"]] == ["lesson"]


def test_a_lesson_of_another_task_is_not_taken() -> None:
    sink = Sink()
    tiny_agent(job_with(), link=Donors([chain_parcel("right", 30)]), sink=sink).run()
    assert sink.rows["tasks"][0]["source"] == "env"


def test_own_play_is_offered_and_can_be_opened_by_the_others() -> None:
    link = Donors()
    job = job_with(train__steps=23)
    tiny_agent(job, number=2, link=link).run()
    ((offer, data),) = link.published
    assert offer is not None
    assert (offer.donor, offer.round, offer.task, offer.bytes) == (2, 1, "left", len(data))
    lesson = unpack(data, offer, CHAIN, 1 << 20)
    rows = lesson.rows
    assert lesson.network == {}
    assert len(rows["action"]) == offer.rows == 24


def test_the_ledger_says_who_was_told_of_a_lesson() -> None:
    link, sink = ThreadLink.mesh(3, {(2, 1)})[2], Sink()
    tiny_agent(job_with(train__steps=23), number=2, link=link, sink=sink).run()
    (noted,) = sink.rows["exchange"]
    assert (noted["kind"], noted["from"], noted["to"]) == ("offer", 2, 1)
    assert (noted["round"], noted["rows"]) == (1, 24)
    assert noted["raw_bytes"] == 24 * CHAIN.row_bytes


def damaged(parcel: FetchResult) -> FetchResult:
    data = bytearray(parcel.data)
    data[-1] ^= 1
    return replace(parcel, data=bytes(data))


def other_task(parcel: FetchResult) -> FetchResult:
    return replace(chain_parcel("right", 30), offer=parcel.offer)


def refused(parcel: FetchResult) -> FetchResult:
    return replace(parcel, data=b"", refusal="the donor no longer has it")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(damaged, "checksum"), (other_task, "task"), (refused, "no longer")],
)
def test_a_damaged_lesson_is_refused_noted_and_the_task_is_played(spoil: Any, reason: str) -> None:
    envs, sink = Chains(), Sink()
    link = Donors([spoil(chain_parcel("left", 30))])
    tiny_agent(job_with(), envs=envs, link=link, sink=sink).run()
    refusal = sink.rows["exchange"][0]
    assert refusal["kind"] == "refusal"
    assert reason in refusal["reason"]
    assert sink.rows["tasks"][0]["source"] == "env"
    assert sink.rows["tasks"][0]["env_steps"] == 20
    assert ("left", "train", 0) in envs.made


def test_a_lesson_over_the_limit_is_refused() -> None:
    sink, parcel = Sink(), chain_parcel("left", 40_000)
    job = job_with(share__max_message_mb=1, replay__buffer_size=1000)
    tiny_agent(job, link=Donors([parcel]), sink=sink).run()
    assert "limit" in sink.rows["exchange"][0]["reason"]
    assert sink.rows["tasks"][0]["source"] == "env"


def test_a_task_with_a_short_lesson_is_still_learnt() -> None:
    sink = Sink()
    job = job_with(learn__batch_size=32, learn__learning_starts=32, train__steps=100)
    tiny_agent(job, link=Donors([chain_parcel("left", 10)]), sink=sink).run()
    row = sink.rows["tasks"][0]
    assert (row["updates"], row["env_steps"]) == (100, 0)


def test_a_lesson_that_ends_with_a_cut_can_be_opened() -> None:
    link = Donors()
    envs = Chains(cut_after=10)
    job = job_with(explore__eps_start=0.0, explore__eps_end=0.0)
    tiny_agent(job, envs=envs, link=link).run()  # 20 steps to the left: cut at 10 and at 20
    ((offer, data),) = link.published
    assert offer is not None
    unpack(data, offer, CHAIN, 1 << 20)


def test_waiting_at_the_end_of_a_round_is_in_the_next_row_of_train() -> None:
    sink = Sink()
    tiny_agent(job_with(), ("left", "right"), link=Donors(wait=5.0), sink=sink).run()
    assert sum(row["wait_seconds"] for row in sink.rows["train"]) >= 5.0


# The real learner


def test_the_greedy_policy_becomes_optimal() -> None:
    job = job_with(**LEARNABLE)
    learner, sink = DQN(CHAIN, job, seeded(3)), Sink()
    tiny_agent(job, learner=learner, sink=sink).run()
    assert optimal(learner)
    assert sink.rows["evaluation"][0]["length"] == 5


def test_the_greedy_policy_becomes_optimal_from_a_lesson_alone() -> None:
    job = job_with(**LEARNABLE)
    learner, sink = DQN(CHAIN, job, seeded(3)), Sink()
    parcel = chain_parcel("left", 300, actions=(1, 1, 0, 1, 1, 1, 0, 0, 1))
    tiny_agent(job, learner=learner, link=Donors([parcel]), sink=sink).run()
    assert sink.rows["tasks"][0]["env_steps"] == 0
    assert optimal(learner)


def short_run(seed: int) -> tuple[dict[str, list[dict[str, str]]], Columns]:
    job = job_with(**LEARNABLE | {"train__steps": 150, "seed": seed})
    learner, sink = make_learner(job, 0, CHAIN, "left"), Sink()
    tiny_agent(job, ("left", "right"), learner=learner, sink=sink).run()
    return steady(sink.rows), learner.state_dict()


def test_the_same_seed_gives_the_same_rows_and_weights() -> None:
    rows, weights = short_run(1)
    again, same = short_run(1)
    other, different = short_run(2)
    assert rows == again
    assert all((weights[name] == same[name]).all() for name in weights)
    assert rows != other
    assert weights.keys() == same.keys() == different.keys()
    for name in ("blocks/trunk/params", "blocks/head/left/params", "blocks/head/right/params"):
        assert (weights[name] != different[name]).any()


# Several agents


def crowd(job: Job, size: int) -> list[tuple[Sink, DQN]]:
    """Agents in threads, each with the tasks in an order of its own."""
    links = ThreadLink.mesh(size, full(size))
    orders = [tuple(job.tasks[(k + n) % 2] for n in range(2)) for k in range(size)]
    members = [(Sink(), DQN(CHAIN, job, seeded(k))) for k in range(size)]
    agents = [
        tiny_agent(job, orders[k], k, learner=members[k][1], link=links[k], sink=members[k][0])
        for k in range(size)
    ]
    threads = [Thread(target=agent.run, daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return members


def test_agents_in_threads_learn_from_each_other() -> None:
    job = job_with(**LEARNABLE | {"train__steps": 203, "share__donors": 1})
    members = crowd(job, 3)
    for number, (sink, _) in enumerate(members):
        first, second = sink.rows["tasks"]
        assert (first["source"], first["env_steps"]) == ("env", 203)
        assert (second["source"], second["env_steps"]) == ("lesson", 0)
        donor = int(second["donors"])
        assert donor % 2 != number % 2  # an agent that began with the other task
        lesson = next(row for row in sink.rows["exchange"] if row["kind"] == "lesson")
        assert (lesson["donor"], lesson["from"], lesson["to"]) == (donor, donor, number)
        assert lesson["rows"] * CHAIN.row_bytes == lesson["raw_bytes"]


def test_agents_in_threads_give_the_same_rows_again() -> None:
    job = job_with(**LEARNABLE | {"train__steps": 103})
    once, again = crowd(job, 2), crowd(job, 2)
    assert [steady(sink.rows) for sink, _ in once] == [steady(sink.rows) for sink, _ in again]


def test_the_best_offer_is_taken_and_ties_go_to_the_lowest_agent() -> None:
    low, high = chain_parcel("left", 30, donor=2), chain_parcel("left", 30, donor=1)
    sink = Sink()
    job = job_with(share__donors=1)
    tiny_agent(job, link=Donors([low, high]), sink=sink).run()
    assert sink.rows["tasks"][0]["donors"] == "1"
    better = replace(low, offer=replace(low.offer, score=2.0))
    sink = Sink()
    tiny_agent(job, link=Donors([better, high]), sink=sink).run()
    assert sink.rows["tasks"][0]["donors"] == "2"


# What py puts together


def test_a_built_agent_learns_gymnasium_tasks() -> None:
    settings = {"tasks": "CartPole-v1,Acrobot-v1", "train.steps": 60, "learn.batch_size": 8}
    job = resolve(
        settings
        | {"learn.learning_starts": 8, "evaluation.episodes": 1, "evaluation.max_steps": 10},
        environ={},
    )
    sink, beats = Sink(), list[str]()

    def beat(progress: Progress) -> None:
        beats.append(progress.phase)

    agent = make_agent(job, 0, job.tasks, alone, sink, beat)
    assert agent.replay.spaces.shape == (6,)
    agent.run()
    assert [row["env_steps"] for row in sink.rows["tasks"]] == [60, 60]
    assert all(row["length"] <= 10 for row in sink.rows["evaluation"])
    assert {"training", "evaluating", "exchanging"} <= set(beats)
    states = sink.saved["membuf", "round-01-CartPole-v1"]["state"]
    assert (states[:, 4:] == 0).all()


def test_a_link_that_refuses_an_offer_is_noted() -> None:
    class Wary(Donors):
        def publish(self, offer: Offer | None, data: bytes) -> None:
            odd = Offer(1, 1, "", nan, 0, 0)
            self.on_transfer(
                TransferEvent("refusal", odd, 1, 0, 1, reason="offer of an empty lesson")
            )

    sink = Sink()
    tiny_agent(job_with(), link=Wary(), sink=sink).run()
    noted = sink.rows["exchange"][-1]
    assert (noted["kind"], noted["from"], noted["to"]) == ("refusal", 1, 0)
    assert noted["reason"] == "offer of an empty lesson"
