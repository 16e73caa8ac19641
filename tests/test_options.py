"""Every option reaches the code that it names: each test fails if the option is ignored."""

import sys
from collections.abc import Callable
from dataclasses import replace
from math import exp, log, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from small import (
    LEFT,
    RIGHT,
    WALK,
    WAY,
    Donors,
    Sink,
    expert,
    learner,
    moves,
    parcel,
    played,
    random_batch,
    small_agent,
    small_dqn,
    small_job,
    walked,
)
from thread_links import ThreadLink

from canal_mpi.agent import loop
from canal_mpi.agent.loop import Agent
from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import LIFE, Array, Batch, Offer
from canal_mpi.learn.dqn import DQN, policy_kl
from canal_mpi.learn.simnet import train_simnet
from canal_mpi.membuf.lesson import unpack
from canal_mpi.membuf.wire import encode
from canal_mpi.rank import build
from canal_mpi.rank.build import make_agent, make_link
from canal_mpi.rank.plan import Plan
from canal_mpi.rank.world import World
from canal_mpi.settings import Job
from canal_mpi.topology.exchange import Exchange, alone


def _set_head(dqn: DQN, biases: list[float], target: list[float] | None = None) -> None:
    """Make the network give the same values everywhere."""
    head = dqn.blocks[dqn.block_names(dqn.task)["head"]]
    for weights, wanted in ((head.params, biases), (head.target_params, target or biases)):
        weights[:] = 0
        weights[-len(wanted) :] = wanted


def _values(dqn: DQN, task: str) -> Array:
    dqn.set_task(task)
    return dqn.q_values(np.eye(5, dtype=np.float32))


class _Run:
    """An agent's run with everything worth asking about it."""

    def __init__(
        self,
        job: Job,
        link: Donors | None = None,
        order: tuple[str, ...] = (RIGHT,),
        prepare: Callable[[Agent], None] = lambda agent: None,
        peers: tuple[int, ...] = (),
    ) -> None:
        self.sink, self.link = Sink(), link or Donors()
        agent = small_agent(job, order, self.link, self.sink, peers=lambda round_, task: peers)
        self.agent, self.dqn = agent, learner(agent)
        self.batches: list[Batch] = []
        self.taught: set[bool] = set()  # whether there was a teacher at each update
        update = self.dqn.update

        def spy(batch: Batch) -> float:
            self.batches.append(batch)
            self.taught.add(self.dqn.teacher is not None)
            return update(batch)

        self.dqn.update = spy  # type: ignore[method-assign]
        prepare(agent)
        agent.run()

    @property
    def score(self) -> float:
        """Return of the last episode of an evaluation."""
        return float(self.sink.rows["evaluation"][-1]["score"])

    def task(self, round_: int = 1) -> dict[str, Any]:
        return self.sink.rows["tasks"][round_ - 1]


def _lesson(job: Job, score: float = 2.0, task: str = RIGHT) -> Donors:
    return Donors([parcel(task, score=score, network=expert(job, task))])


# ── learn ──────────────────────────────────────────────────────────────────────────────────────


def test_layer_norm_adds_a_scale_and_a_shift_for_every_unit() -> None:
    sizes = [
        len(small_dqn(small_job(learn__layer_norm=on)).blocks["trunk"].params)
        for on in (False, True)
    ]
    assert sizes == [5 * 8 + 8, 5 * 8 + 8 + 2 * 8]


@pytest.mark.parametrize(
    ("identity", "pieces"),
    [
        ("shared", {"trunk", "head"}),
        ("per_task", {"trunk", f"head/{RIGHT}", f"head/{LEFT}"}),
        ("separate", {f"trunk/{RIGHT}", f"trunk/{LEFT}", f"head/{RIGHT}", f"head/{LEFT}"}),
    ],
)
def test_the_identity_decides_what_tasks_share(identity: str, pieces: set[str]) -> None:
    dqn = small_dqn(small_job(learn__heads=identity))
    right, left = _values(dqn, RIGHT), _values(dqn, LEFT)
    head = dqn.blocks[dqn.block_names(LEFT)["head"]].params.copy()
    dqn.set_task(RIGHT)
    for seed in range(5):
        dqn.update(random_batch(seed))
    assert dqn.blocks.keys() == pieces
    assert np.array_equal(right, left) == (identity == "shared")
    assert not np.array_equal(_values(dqn, RIGHT), right)
    assert np.array_equal(_values(dqn, LEFT), left) == (identity == "separate")
    kept = np.array_equal(dqn.blocks[dqn.block_names(LEFT)["head"]].params, head)
    assert kept == (identity != "shared")


@pytest.mark.parametrize(
    ("lr_decay_fraction", "rates"),
    [(0.0, [1, 1, 1, 1]), (0.5, [1, 1, 0.5, 0]), (1.0, [0.75, 0.5, 0.25, 0])],
)
def test_the_learning_rate_settles_in_the_last_part_of_a_task(
    lr_decay_fraction: float, rates: list[float]
) -> None:
    """Of 40 steps: the rates of the updates at the end of each quarter."""
    job = small_job(learn__lr_decay_fraction=lr_decay_fraction, learn__learning_starts=1)
    run = _Run(job)
    assert run.task()["env_steps"] == 40
    found = [batch.lr_scale for batch in run.batches]
    assert [found[k] for k in (-31, -21, -11, -1)] == pytest.approx(rates)


def test_the_learning_rate_decays_while_a_student_learns_from_a_lesson() -> None:
    for mode, updates, last in (("replay", 40, 1 / 20), ("distill", 12, 1 / 6)):
        job = small_job(reuse__mode=mode, learn__lr_decay_fraction=0.5)
        rates = [batch.lr_scale for batch in _Run(job, _lesson(job)).batches][:updates]
        assert rates[0] == 1 and rates[-1] == pytest.approx(last)


def test_no_rate_is_negative_where_environments_do_not_divide_the_steps() -> None:
    job = small_job(train__num_envs=7, learn__learning_starts=1)
    rates = [batch.lr_scale for batch in _Run(job).batches]
    assert rates[0] == 1.0 and min(rates) == 0.0


def test_a_part_of_the_learning_rate_moves_weights_by_that_part() -> None:
    moved = []
    for rate in (1.0, 0.25, 0.0):
        dqn = small_dqn(small_job())
        before = dqn.blocks["trunk"].params.copy()
        dqn.update(random_batch(0)._replace(lr_scale=rate))
        moved.append(np.abs(dqn.blocks["trunk"].params - before).max())
    assert moved[1] == pytest.approx(moved[0] / 4, rel=1e-3) and moved[2] == 0 < moved[0]


def test_batches_of_old_tasks_are_distilled() -> None:
    run = _Run(small_job(rehearsal__distill_coef=2.0), order=(LEFT, RIGHT))
    old = [batch for batch in run.batches if batch.stored_q is not None]
    assert {(batch.task, batch.distill) for batch in old} == {(LEFT, 2.0)}
    assert {batch.distill for batch in run.batches if batch.stored_q is None} == {0.0}


def test_grad_clip_bounds_the_whole_gradient() -> None:
    norms = {}
    for clip in (0.0, 0.5):
        dqn = small_dqn(small_job(learn__max_grad_norm=clip, learn__loss="mse"))
        dqn.update(random_batch(0, scale=100.0))
        norms[clip] = float(np.linalg.norm(np.concatenate([p.grad for p in dqn.blocks.values()])))
    assert norms[0.0] > 5
    assert norms[0.5] == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("reward", "seen"),
    [("clip", {-1.0, 0.0, 1.0}), ("none", {-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0})],
)
def test_the_reward_is_clipped_or_left_alone(reward: str, seen: set[float]) -> None:
    agent = small_agent(small_job(learn__reward=reward, learn__n_step=1, learn__batch_size=200))
    agent.replay.begin([played(70)])
    assert set(agent.replay.sample(np.random.default_rng(0)).returns.tolist()) == seen


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_n_step_rewards_are_summed_before_bootstrapping(steps: int) -> None:
    agent = small_agent(small_job(learn__n_step=steps, learn__gamma=0.5, learn__reward="none"))
    agent.replay.begin([played(1000)])
    batch = agent.replay.sample(np.random.default_rng(0))
    first = batch.states[:, 0].astype(int)
    assert batch.discounts.tolist() == [0.5**steps] * 4
    np.testing.assert_array_equal(batch.next_states[:, 0], first + steps)
    expected = [sum(0.5**k * ((s + k) % 7 - 3.0) for k in range(steps)) for s in first]
    assert batch.returns.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("loss", "value"), [("huber", 9.5), ("mse", 100.0)])
def test_the_loss_is_the_one_asked_for(loss: str, value: float) -> None:
    dqn = small_dqn(small_job(learn__loss=loss))
    _set_head(dqn, [0.0, 0.0])
    batch = random_batch(0)
    batch.returns[:], batch.discounts[:] = 10, 0
    assert dqn.update(batch) == pytest.approx(value)


@pytest.mark.parametrize("ends", [True, False])
def test_a_lost_life_stops_bootstrapping_only_if_asked(ends: bool) -> None:
    agent = small_agent(
        small_job(learn__terminal_on_life_loss=ends, learn__n_step=1, learn__batch_size=100)
    )
    agent.replay.begin([played(10, dict.fromkeys(range(10), LIFE))])
    discounts = agent.replay.sample(np.random.default_rng(0)).discounts
    assert set(discounts.tolist()) == {0.0 if ends else float(np.float32(0.99))}


def test_the_target_follows_as_often_as_asked() -> None:
    dqn = small_dqn(small_job(learn__target_update_interval=3))
    trunk, followed = dqn.blocks["trunk"], []
    for seed in range(6):
        dqn.update(random_batch(seed))
        followed.append(np.array_equal(trunk.params, trunk.target_params))
    assert followed == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("double", "target_update_interval", "goal"),
    [(True, 10, 5.0), (False, 10, 9.0), (True, 0, 1.0), (False, 0, 1.0)],
)
def test_double_chooses_by_the_online_network_and_no_target_means_none(
    double: bool, target_update_interval: int, goal: float
) -> None:
    settings = {"double": double, "target_update_interval": target_update_interval, "loss": "mse"}
    dqn = small_dqn(small_job(**{f"learn__{name}": value for name, value in settings.items()}))
    _set_head(dqn, [1.0, 0.0], target=[5.0, 9.0])
    batch = random_batch(0)
    batch.returns[:], batch.discounts[:], batch.actions[:] = 0, 1, 1
    # the value of action 1 is 0, so the difference is the goal itself
    assert dqn.loss(batch)[0] == pytest.approx(goal**2)


# ── memory ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rows", [0, 60, 120])
def test_memory_rows_bound_what_is_kept_of_all_tasks(rows: int) -> None:
    run = _Run(small_job(rehearsal__rows=rows, train__steps=150), order=(RIGHT, LEFT))
    kept = [len(past.export()["flags"]) for past in run.agent.rehearsal.tasks.values()]
    assert sum(kept) <= rows
    assert (len(kept) > 0) == (rows > 0)
    if rows == 120:
        assert len(kept) == 2 and sum(kept) > 60


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.0, 1, 1), (0.9, 0.05, 0.2), (0.5, 0.3, 0.7)])
def test_the_rehearsal_ratio_is_a_probability(ratio: float, low: float, high: float) -> None:
    job = small_job(rehearsal__ratio=ratio, train__steps=150)
    run = _Run(job, order=(RIGHT, LEFT))
    first, second = run.task(1)["updates"], run.task(2)["updates"]
    assert {batch.task for batch in run.batches[:first]} == {RIGHT}
    tasks = [batch.task for batch in run.batches[first:]]
    assert tasks.count(LEFT) == second > 100 and low <= tasks.count(LEFT) / len(tasks) <= high


@pytest.mark.parametrize("alpha", [1.0, 2.5])
def test_alpha_weighs_playing_an_old_task_as_before(alpha: float) -> None:
    """Values of 0 are two actions by chance; the stored ones, 3 and 0, have a spread of 1.5."""
    dqn = small_dqn(small_job(reuse__temperature=0.5 / 1.5))
    _set_head(dqn, [0.0, 0.0])
    stored = np.tile(np.array([3.0, 0.0], dtype=np.float32), (8, 1))
    found, grad = dqn.loss(random_batch(0)._replace(stored_q=stored, distill=alpha))
    chance = 1 / (1 + exp(-6))
    apart = log(2) + chance * log(chance) + (1 - chance) * log(1 - chance)
    assert found == pytest.approx(alpha * apart, rel=1e-4)
    assert grad[0] / alpha == pytest.approx([(0.5 - chance) / 8, (chance - 0.5) / 8], rel=1e-4)


def test_without_alpha_old_rows_are_learnt_from_as_new_ones() -> None:
    batch, job = random_batch(0), small_job()
    dqn, plain = (small_dqn(job) for _ in range(2))
    assert dqn.update(batch._replace(stored_q=np.ones((8, 2), dtype="<f4"))) == plain.update(batch)
    assert np.array_equal(dqn.blocks["trunk"].grad, plain.blocks["trunk"].grad)


@pytest.mark.parametrize("ewc", [0.0, 10.0])
def test_ewc_is_measured_and_pulls_only_if_asked(ewc: float) -> None:
    run = _Run(small_job(rehearsal__ewc_lambda=ewc, rehearsal__ewc_batches=2))
    assert (run.dqn.blocks["trunk"].fisher is not None) == (ewc > 0)
    run.dqn.blocks["trunk"].params[:] += 1.0  # away from where the task ended
    plain = small_dqn(small_job())
    plain.load_state_dict(run.dqn.state_dict())
    for dqn in (run.dqn, plain):
        dqn.update(random_batch(0))
    assert np.array_equal(run.dqn.blocks["trunk"].grad, plain.blocks["trunk"].grad) == (ewc == 0)


def test_ewc_alpha_weighs_the_old_fisher_information() -> None:
    fisher = []
    for alpha in (0.0, 0.75):
        dqn = small_dqn(
            small_job(
                rehearsal__ewc_lambda=1.0, rehearsal__ewc_alpha=alpha, rehearsal__ewc_batches=1
            )
        )
        dqn.consolidate(lambda: random_batch(0))
        fisher.append(dqn.blocks["trunk"].fisher)
    assert fisher[0].any()
    np.testing.assert_allclose(fisher[1], 0.25 * fisher[0], rtol=1e-6)


@pytest.mark.parametrize("batches", [1, 7])
def test_ewc_batches_are_drawn_for_the_fisher_information(batches: int) -> None:
    dqn, drawn = small_dqn(small_job(rehearsal__ewc_lambda=1.0, rehearsal__ewc_batches=batches)), []
    dqn.consolidate(lambda: drawn.append(1) or random_batch(0))  # type: ignore[func-returns-value]
    assert len(drawn) == batches


# ── reuse ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mode", "steps", "updates"),
    [("replay", 0, 40), ("mix", 8, 8), ("distill", 8, 20), ("adopt", 8, 20)],
)
def test_the_mode_decides_what_a_lesson_is_used_for(mode: str, steps: int, updates: int) -> None:
    job = small_job(reuse__mode=mode)
    run = _Run(job, _lesson(job))
    assert (run.task()["env_steps"], run.task()["updates"]) == (steps, updates)
    assert run.task()["source"] == "lesson" and run.task()["donors"] == "1"
    assert run.taught == {mode in ("distill", "adopt")} == {run.batches[0].distill > 0}


def test_adopt_starts_from_the_donors_weights() -> None:
    job = small_job(reuse__mode="adopt", reuse__steps=0.0, reuse__pretrain_updates=0.0)
    run = _Run(job, _lesson(job))
    wanted = expert(job)
    for name, column in run.dqn.get_weights().items():
        np.testing.assert_array_equal(column, wanted[name])
    assert run.score == 2.0 and run.task()["env_steps"] == 0


@pytest.mark.parametrize("mode", ["distill", "adopt"])
def test_without_the_donors_network_a_lesson_is_mixed_in(mode: str) -> None:
    run = _Run(small_job(reuse__mode=mode), Donors([parcel()]))
    assert (run.task()["env_steps"], run.task()["updates"]) == (8, 8)
    assert run.taught == {False}


@pytest.mark.parametrize("mode", ["distill", "adopt"])
@pytest.mark.parametrize("network", ["shape", "missing"])
def test_a_network_that_does_not_fit_is_left_out_and_the_lesson_mixed_in(
    mode: str, network: str
) -> None:
    job = small_job(reuse__mode=mode)
    brain = expert(job)
    if network == "shape":
        brain["head"] = brain["head"][:-1]
    else:
        del brain["head"]
    run = _Run(job, Donors([parcel(network=brain)]))
    assert (run.task()["env_steps"], run.task()["updates"]) == (8, 8)
    assert run.taught == {False}


def test_adopting_a_network_without_a_head_is_damaged_data() -> None:
    job = small_job()
    dqn, brain = small_dqn(job), expert(job)
    del brain["head"]
    with pytest.raises(DamagedData):
        dqn.set_weights(brain)


@pytest.mark.parametrize("part", [0.25, 0.5, 1.0])
def test_reuse_frames_are_own_steps_with_a_lesson(part: float) -> None:
    job = small_job(reuse__steps=part, reuse__mode="mix")
    assert _Run(job, _lesson(job)).task()["env_steps"] == 40 * part


@pytest.mark.parametrize("study", [0.0, 0.5, 2.0])
def test_study_is_updates_before_the_first_own_step(study: float) -> None:
    job = small_job(reuse__pretrain_updates=study, reuse__steps=0.0)
    assert _Run(job, _lesson(job)).task()["updates"] == 40 * study


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_share_is_the_part_of_a_batch_that_comes_from_lessons(share: float) -> None:
    job = small_job(reuse__lesson_fraction=share, reuse__mode="mix", reuse__steps=1.0)
    marked = walked(RIGHT, 60)
    marked["reward"][:] = -7.0  # no own row pays that
    drawn: list[float] = []

    def heartbeat(agent: Agent) -> None:
        sample = agent.replay.sample

        def spy(rng: np.random.Generator) -> Batch:
            batch = sample(rng)
            if len(agent.replay.own) > 4:
                drawn.append(float((batch.returns < 0).mean()))
            return batch

        agent.replay.sample = spy  # type: ignore[method-assign]

    _Run(job, Donors([parcel(rows=marked)]), prepare=heartbeat)
    assert len(drawn) > 30 and set(drawn) == {share}


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (1.0, 1, 1), (0.5, 0.3, 0.7)])
def test_share_is_also_the_part_of_batches_of_another_tasks_lesson(
    share: float, low: float, high: float
) -> None:
    job = small_job(reuse__lesson_fraction=share, share__policy="all", train__steps=150)
    run = _Run(job, _lesson(job, task=LEFT))
    tasks = [batch.task for batch in run.batches]
    assert run.task()["env_steps"] == 150
    assert low <= tasks.count(LEFT) / len(tasks) <= high


@pytest.mark.parametrize("temperature", [0.1, 2.0])
def test_the_temperature_is_that_of_the_imitated_policy(temperature: float) -> None:
    job, batch = small_job(reuse__temperature=temperature), random_batch(0)
    dqn, plain = small_dqn(job), small_dqn(job)
    dqn.set_teacher(expert(job))
    values, wanted = dqn.q_values(batch.states), np.array([[0.0, 1.0]] * 8)
    extra = policy_kl(values, wanted, temperature)[0]
    found = dqn.update(batch._replace(imitation=1.5)) - plain.update(batch)
    assert found == pytest.approx(1.5 * extra, rel=1e-3)


@pytest.mark.parametrize("weight", [0.0, 0.5, 3.0])
def test_imitate_weighs_the_policy_kl(weight: float) -> None:
    job = small_job(reuse__imitation_coef=weight, reuse__steps=0.0)
    run = _Run(job, _lesson(job))
    assert {batch.distill for batch in run.batches} == {weight}
    assert all((batch.stored_q is not None) == (weight > 0) for batch in run.batches)


def test_imitation_fades_over_the_own_steps() -> None:
    job = small_job(reuse__imitation_coef=2.0, reuse__steps=0.5)
    run = _Run(job, _lesson(job))
    found = [batch.imitation + batch.distill for batch in run.batches]
    assert {batch.imitation for batch in run.batches[:12]} == {0.0}
    assert found == pytest.approx([2.0] * 12 + [2 - 0.1 * step for step in range(20)])


def test_a_student_stops_when_it_agrees_with_its_teacher_as_well_as_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "CHECK_INTERVAL", 10)
    job = small_job(reuse__pretrain_updates=10.0, reuse__steps=0.0, learn__lr_decay_fraction=0.0)
    measured = iter([1.0, 0.5, 0.495, 0.4, 0.6, 0.399, 0.39, 0.5, 0.1])

    def prepare(agent: Agent) -> None:
        agent.learner.agreement = lambda obs: (next(measured), 0.75)  # type: ignore[method-assign]

    run = _Run(job, _lesson(job), prepare=prepare)
    assert run.task()["updates"] == 80, "the fourth check without an improvement of 1 %"
    assert [b.lr_scale for b in run.batches[::10]] == [1, 1, 1, 0.5, 0.5, 0.25, 0.125, 0.125]
    (row,) = (row for row in run.sink.rows["exchange"] if row["kind"] == "lesson")
    assert (row["score"], row["kl"], row["agreement"]) == (2.0, 0.5, 0.75)


def test_a_student_learns_to_act_like_its_teacher_and_the_ledger_says_how_well() -> None:
    job = small_job(reuse__pretrain_updates=10.0, reuse__steps=0.0, learn__lr=0.01)
    run = _Run(job, _lesson(job))
    assert run.task()["env_steps"] == run.task()["probe_steps"] == 0
    assert run.task()["updates"] <= 400
    (row,) = (row for row in run.sink.rows["exchange"] if row["kind"] == "lesson")
    assert 0 <= row["kl"] < 0.1 and row["agreement"] == 1.0
    assert run.score == 2.0


def test_held_out_rows_are_not_learnt_from() -> None:
    job = small_job(reuse__steps=0.0)
    run = _Run(job, Donors([parcel(rows=played(400), network=expert(job))]))
    held = set(run.agent.held_out[:, 0].astype(int).tolist())
    learnt = set(moves(run.agent.replay.lessons[0].export()))
    assert 0 < len(held) <= 51
    assert len(learnt & held) <= 1, "the state behind the last move may begin the next segment"
    assert len(learnt | held) >= 400


@pytest.mark.parametrize("mode", ["mix", "distill"])
def test_rows_alone_are_replayed_where_there_are_no_own_steps(mode: str) -> None:
    run = _Run(small_job(reuse__mode=mode, reuse__steps=0.0), Donors([parcel()]))
    assert (run.task()["env_steps"], run.task()["updates"]) == (0, 40)


def _knows_the_way(agent: Agent) -> None:
    dqn = learner(agent)
    _set_head(dqn, [0.0, 1.0])


@pytest.mark.parametrize("sent", [True, False])
def test_the_network_travels_with_the_lesson_if_asked(sent: bool) -> None:
    run = _Run(small_job(reuse__network=sent))
    ((offer, data),) = run.link.published
    assert offer is not None
    lesson = unpack(data, offer, WALK, 1 << 20)
    assert lesson.network.keys() == ({"trunk", "head"} if sent else set())
    for name, column in lesson.network.items():
        np.testing.assert_array_equal(column, run.dqn.get_weights()[name])


# ── share ──────────────────────────────────────────────────────────────────────────────────────


def _probed(job: Job, task: str) -> Array:
    """What another agent would send along as the embedding of a task."""
    agent = small_agent(job, (task,), number=5)
    agent.task = task
    return agent.probe()


@pytest.mark.parametrize(
    ("policy", "donors"),
    [("none", []), ("exact", [1]), ("previous", [2]), ("all", [1, 2])],
)
def test_the_policy_decides_which_lessons_are_taken(policy: str, donors: list[int]) -> None:
    parcels = [parcel(LEFT, donor=1, round_=9), parcel(RIGHT, donor=2, round_=1)]
    run = _Run(small_job(share__policy=policy), Donors(parcels), (RIGHT, LEFT))
    second = run.link.fetched[-len(donors) :] if donors else run.link.fetched
    assert [donor for donor, _ in second] == donors
    assert run.task(2)["donors"] == ",".join(map(str, donors))


@pytest.mark.parametrize(
    ("most", "donors", "rows"), [(1, "2", [30]), (2, "1,2", [60, 30]), (9, "1,2,3", [60, 30, 60])]
)
@pytest.mark.parametrize("score", [1.0, nan])
def test_rows_of_several_donors_are_learnt_from_and_the_best_teaches(
    most: int, donors: str, rows: list[int], score: float
) -> None:
    job = small_job(
        reuse__mode="adopt",
        share__donors=most,
        reuse__steps=0.0,
        reuse__pretrain_updates=0.0,
    )
    parcels = [
        parcel(donor=1, score=score, network=expert(job, LEFT)),
        parcel(donor=2, score=2.0, network=expert(job), rows=walked(RIGHT, 30)),
        parcel(donor=3, score=score, network=expert(job, LEFT)),
    ]
    run = _Run(job, Donors(parcels))
    assert run.task()["donors"] == donors
    assert [len(lesson) for lesson in run.agent.replay.lessons] == rows
    np.testing.assert_array_equal(run.dqn.get_weights()["head"], expert(job)["head"])


@pytest.mark.parametrize("policy", ["simnet", "wasserstein"])
@pytest.mark.parametrize(("nearest", "donors"), [(1, [2]), (2, [2, 1])])
def test_nearest_lessons_are_taken_by_similarity(
    policy: str, nearest: int, donors: list[int]
) -> None:
    job = small_job(share__policy=policy, share__nearest=nearest)
    like = _probed(job, RIGHT)
    parcels = [
        parcel(RIGHT, donor=1, embedding=np.where(np.arange(len(like)) % 2, like, 0)),
        parcel(RIGHT, donor=2, embedding=like),
        parcel(RIGHT, donor=3, embedding=-100 * like),
    ]
    run = _Run(job, Donors(parcels))
    assert [donor for donor, _ in run.link.fetched][: len(donors)] == donors
    assert len(run.link.fetched) == nearest


@pytest.mark.parametrize("policy", ["simnet", "wasserstein"])
def test_an_offer_carries_what_the_policy_compares_by(policy: str) -> None:
    job = small_job(share__policy=policy)
    run = _Run(job)
    offer = run.link.published[0][0]
    assert offer is not None and len(offer.embedding) == len(_probed(job, RIGHT)) > 0
    plain = _Run(small_job()).link.published[0][0]
    assert plain is not None and len(plain.embedding) == 0


@pytest.mark.parametrize("rows", [60, 110, 500])
def test_share_rows_bound_a_lesson(rows: int) -> None:
    run = _Run(small_job(share__rows=rows, train__steps=300))
    offer = run.link.published[0][0]
    assert offer is not None and min(rows - 51, 300) < offer.rows <= min(rows, 301)


def test_a_lesson_of_few_rows_is_still_a_lesson() -> None:
    run = _Run(small_job(share__rows=10))
    offer, data = run.link.published[0]
    assert offer is not None and 2 <= offer.rows <= 10
    assert len(unpack(data, offer, WALK, 1 << 20).rows["action"]) == offer.rows


@pytest.mark.parametrize("steps", [10, 33])
def test_the_probe_takes_as_many_steps_as_asked(steps: int) -> None:
    job = small_job(share__policy="wasserstein", share__probe=steps)
    assert _Run(job, _lesson(job)).task()["probe_steps"] == steps
    assert _Run(small_job(share__probe=steps), _lesson(job)).task()["probe_steps"] == 0


def test_lessons_cross_the_wire_packed_or_not_as_asked() -> None:
    found = {}
    for packs in (True, False):

        def prepare(agent: Agent, packs: bool = packs) -> None:
            agent.sharing.packs = packs

        run = _Run(small_job(train__steps=200), prepare=prepare)
        ((offer, data),) = run.link.published
        assert offer is not None and offer.bytes == len(data)
        found[packs] = data, unpack(data, offer, WALK, 1 << 20).rows
    (packed, rows), (plain, same) = found[True], found[False]
    assert len(packed) < 0.5 * len(plain)
    for name, column in rows.items():
        np.testing.assert_array_equal(column, same[name])


@pytest.mark.parametrize("packs", [True, False])
def test_whether_lessons_are_packed_is_handed_to_the_agent(packs: bool) -> None:
    job, sink = small_job(), Sink()
    agent = make_agent(job, 0, (RIGHT,), alone, sink, lambda progress: None, packs=packs)
    assert agent.sharing.packs == packs


def test_lessons_are_packed_always_never_or_between_hosts() -> None:
    for pack, here, between in (
        ("always", True, True),
        ("never", False, False),
        ("auto", False, True),
    ):
        world, plan = _two_agents(share__pack=pack)
        assert build.should_compress(world, plan) == here
        world.hosts = ["a", "b"]
        assert build.should_compress(world, plan) == between


def _two_agents(**settings: Any) -> tuple[World, Plan]:
    """A world of two agents that hear each other, and their plan."""
    edges, heartbeat = [(0, 1), (1, 0)], SimpleNamespace(idle=None)
    plan = Plan(small_job(**settings), Path(), "", 0, [[RIGHT], [RIGHT]], edges)
    world = SimpleNamespace(agents_comm=object(), agents=2, agent=0, heartbeat=heartbeat, ft=False)
    world.hosts = ["a", "a"]
    return cast(World, world), plan


def _made_link(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Exchange:
    """The link that a rank makes."""
    fake = SimpleNamespace(MpiTransport=lambda *args, **_: None)  # MPI stays unloaded
    monkeypatch.setitem(sys.modules, "canal_mpi.topology.transport", fake)
    link = make_link(*_two_agents(**settings))(lambda event: None)
    assert isinstance(link, Exchange)
    return link


@pytest.mark.parametrize(("exchange", "free"), [("rounds", False), ("free", True)])
def test_the_exchange_is_in_rounds_or_free(
    exchange: str, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _made_link(monkeypatch, share__exchange=exchange).share.free == free


@pytest.mark.parametrize("patience", [0.1, 7.5])
def test_a_lesson_is_waited_for_as_long_as_asked(
    patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _made_link(monkeypatch, share__timeout=patience).share.timeout == patience


@pytest.mark.parametrize("hold", [1, 3])
def test_lessons_are_kept_for_others_up_to_a_size(
    hold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = _made_link(monkeypatch, share__cache_mb=hold)
    assert link.cache_bytes == hold << 20
    donor, student = ThreadLink.mesh(2, {(0, 1)}, replace(link.share, exchange="free"))
    for round_ in (1, 2, 3):
        donor.begin(round_)
        data = encode({"rows": np.zeros(900_000, dtype=np.uint8)})
        donor.publish(Offer(0, round_, RIGHT, 0.0, 9, len(data)), data)
    parcels = student.fetch(student.offers())
    assert [bool(one.data) for one in parcels] == [hold == 3, hold == 3, True]
    assert [one.refusal for one in parcels if not one.data] == ["agent 0 no longer has it"] * (
        2 * (hold == 1)
    )


# ── simnet ─────────────────────────────────────────────────────────────────────────────────────


def _simnet(**settings: Any) -> tuple[Array, int]:
    drawn = iter(range(1000))
    embedding = train_simnet(WALK, small_job(**settings), lambda: random_batch(next(drawn)))
    return embedding, next(drawn)


@pytest.mark.parametrize("width", [3, 5])
def test_the_simnet_is_as_wide_as_asked(width: int) -> None:
    assert len(_simnet(simnet__width=width)[0]) == 5 * width + width + 2 * width + 2


@pytest.mark.parametrize("updates", [0, 4, 9])
def test_the_simnet_is_updated_as_often_as_asked(updates: int) -> None:
    assert _simnet(simnet__updates=updates)[1] == updates


def test_the_simnet_learns_at_its_own_rate() -> None:
    start = _simnet(simnet__updates=0)[0]
    moved = [
        float(np.abs(_simnet(simnet__updates=1, simnet__lr=lr, learn__lr=0.5)[0] - start).max())
        for lr in (1e-3, 1e-2)
    ]
    assert moved[1] == pytest.approx(10 * moved[0], rel=0.01)


def test_the_simnets_distance_compares_weights_or_outputs() -> None:
    assert len(_simnet(simnet__distance="outputs")[0]) == 256 * 2
    assert len(_simnet(simnet__distance="weights")[0]) == 42
    for kind in ("weights", "outputs"):
        agent = small_agent(small_job(share__policy="simnet", simnet__distance=kind))
        assert agent.sharing.measure == kind


def test_every_task_may_have_an_input_layer_of_its_own() -> None:
    for own in (True, False):  # where there are two layers
        dqn = small_dqn(small_job(learn__widths=[8, 8] if own else [8]))
        assert ("input" in dqn.block_names(RIGHT)) == own
        dqn.set_task(LEFT)
        assert (f"input/{LEFT}" in dqn.blocks) == own


# ── lsc ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("save", "load", "sent"),
    [(0, 10, []), (10, 20, [20, 20]), (15, 20, [15, 15]), (5, 15, [15, 15])],
)
def test_rows_are_saved_and_loaded_as_often_as_asked(save: int, load: int, sent: list[int]) -> None:
    answers = [parcel(rows=walked(RIGHT, 5), donor=1, round_=1).data] * 9
    link = Donors(answers=answers)
    run = _Run(
        small_job(row_exchange__save_interval=save, row_exchange__load_interval=load),
        link,
        peers=(1,),
    )
    offer = Offer(0, 1, RIGHT, nan, -1, 0)
    sizes = [
        len(unpack(data, offer, WALK, 1 << 20).rows["action"]) - 1 for data in link.traded if data
    ]
    assert sizes == sent
    assert len(run.agent.replay.lessons) == len(sent)


# ── evaluation ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("every", "points"), [(0, []), (10, [0, 10, 20, 30]), (25, [0, 25])])
def test_evaluation_every_so_many_steps(every: int, points: list[int]) -> None:
    run = _Run(small_job(evaluation__interval=every))
    assert [row["env_steps"] for row in run.sink.rows.get("curve", [])] == points


@pytest.mark.parametrize("episodes", [0, 1, 4])
def test_evaluation_episodes_are_played(episodes: int) -> None:
    run = _Run(small_job(evaluation__episodes=episodes))
    assert len(run.sink.rows.get("evaluation", [])) == episodes


def _evaluated(**settings: Any) -> list[tuple[float, int]]:
    """Scores and lengths of an agent that knows the way."""
    sink = Sink()
    agent = small_agent(small_job(**settings), sink=sink)
    agent.task = RIGHT
    _knows_the_way(agent)
    agent.evaluate_networks()
    return [(row["score"], row["length"]) for row in sink.rows["evaluation"]]


def test_evaluation_epsilon_is_a_probability_of_random_actions() -> None:
    greedy = _evaluated(evaluation__episodes=20, evaluation__epsilon=0.0)
    assert greedy == [(2.0, 4)] * 20
    random = _evaluated(evaluation__episodes=20, evaluation__epsilon=1.0, evaluation__max_steps=500)
    assert np.mean([length for _, length in random]) > 8


@pytest.mark.parametrize("most", [2, 3, 9])
def test_evaluation_max_steps_cut_an_episode(most: int) -> None:
    assert _evaluated(evaluation__max_steps=most) == [(2.0, 4) if most > 4 else (0.0, most)]


def test_the_way_of_the_small_world_is_what_the_tests_believe() -> None:
    assert WAY == {RIGHT: 1, LEFT: 0}
    rows = walked(LEFT, 8)
    assert rows["reward"].tolist() == [0, 0, 0, 2, 0, 0, 0, 2, 0]


def test_all_lessons_of_another_task_are_used() -> None:
    job = small_job(share__policy="all")
    lessons = [parcel(LEFT, rows=played(steps), donor=steps) for steps in (5, 7)]
    agent = small_agent(job, link=Donors(lessons))
    agent.run()
    assert len(agent.replay.others[LEFT].export()["action"]) == (5 + 1) + (7 + 1)
