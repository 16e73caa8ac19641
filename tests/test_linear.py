"""The linear learner: its gradients, its Adam, its state, and that it needs no torch."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small import RIGHT, WALK, Sink, random_batch, small_agent, small_job

from canal_mpi.errors import DamagedData, UsageError
from canal_mpi.learn.linear import Linear
from canal_mpi.types import Array, Spaces

CARTPOLE = "CartPole-v1"
BYTES = Spaces((4,), "|u1", 3)


def learner_of(spaces: Spaces = WALK, task: str = RIGHT, **settings: Any) -> Linear:
    made = Linear(spaces, small_job(**settings), lambda name: 1 + len(name))
    made.begin(task)
    return made


def weights(learner: Linear) -> Array:
    return learner.network()["matrix"]


def numeric(loss: Callable[[Array], float], at: Array) -> Array:
    """The gradient of a loss, by differences."""
    found = np.zeros_like(at, dtype=np.float64)
    for place in np.ndindex(at.shape):
        for sign in (1, -1):
            moved = at.astype(np.float64)
            moved[place] += sign * 1e-4
            found[place] += sign * loss(moved) / 2e-4
    return found


@pytest.mark.parametrize("kind", ["huber", "mse"])
@pytest.mark.parametrize("double", [True, False])
def test_the_step_is_that_of_torch(kind: str, double: bool) -> None:
    settings: dict[str, Any] = {"learn__loss": kind, "learn__double": double, "learn__lr": 0.01}
    learner = learner_of(learn__target_every=2, **settings)
    online = torch.from_numpy(weights(learner).reshape(-1, WALK.actions).copy()).requires_grad_()
    target, adam = online.detach().clone(), torch.optim.Adam([online], lr=0.01)
    for seed in range(5):
        batch = random_batch(seed, scale=3.0)
        obs, following = (
            torch.from_numpy(learner._input(states)) for states in (batch.states, batch.next_states)
        )
        with torch.no_grad():
            later = following @ target
            best = (following @ online if double else later).argmax(1, keepdim=True)
            bootstrap = torch.from_numpy(batch.discounts) * later.gather(1, best)[:, 0]
            goals = torch.from_numpy(batch.returns) + bootstrap
        taken = (obs @ online).gather(1, torch.from_numpy(batch.actions)[:, None])[:, 0]
        wanted = torch.nn.functional
        loss = (wanted.huber_loss if kind == "huber" else wanted.mse_loss)(taken, goals)
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        assert learner.errors(batch) == pytest.approx((taken - goals).abs().detach().numpy(), 1e-4)
        assert learner.learn(batch) == pytest.approx(float(loss.detach()), rel=1e-4)
        if seed % 2:
            target = online.detach().clone()
        assert weights(learner) == pytest.approx(online.detach().numpy().reshape(-1), abs=1e-5)


def test_stored_values_and_a_teacher_are_played_like() -> None:
    batch = random_batch(0)
    learner = learner_of(learn__lr=0.02)
    stored = np.eye(WALK.actions, dtype=np.float32)[np.arange(8) % 2]
    for _ in range(400):
        learner.learn(batch._replace(stored=stored))
    assert (learner.act(batch.states) == stored.argmax(axis=1)).all()
    student, teacher = learner_of(learn__lr=0.02), learner_of()
    teacher.matrices[f"matrix/{RIGHT}"].weights[:, 0] += 1
    student.teach(teacher.network())
    for _ in range(400):
        student.learn(batch._replace(imitate=50.0))
    assert (student.act(batch.states) == teacher.act(batch.states)).mean() > 0.8


def test_bytes_are_scaled_and_squared() -> None:
    learner = learner_of(BYTES)
    rows = learner._input(np.array([[0, 51, 255, 102]], dtype=np.uint8))
    assert rows[0] == pytest.approx([0, 0.2, 1, 0.4, 0, 0.04, 1, 0.16, 1])


@pytest.mark.parametrize(("identity", "shared"), [("single", True), ("heads", False)])
def test_tasks_share_a_matrix_only_with_one_identity(identity: str, shared: bool) -> None:
    learner = learner_of(learn__identity=identity)
    before = weights(learner)
    learner.begin("other")
    learner.learn(random_batch(0, task="other"))
    learner.begin(RIGHT)
    assert (weights(learner) != before).any() == shared


def test_a_network_is_adopted_and_another_make_is_refused() -> None:
    donor, student = learner_of(), Linear(WALK, small_job(), lambda name: 99)
    student.begin(RIGHT)
    assert (weights(donor) != weights(student)).any()
    student.adopt(donor.network())
    assert (weights(donor) == weights(student)).all()
    for network in ({"matrix": np.zeros(3, "<f4")}, {"trunk": np.zeros(3, "<f4")}, {}):
        for take in (student.adopt, student.teach):
            with pytest.raises(DamagedData, match="the donor's"):
                take(network)
    assert (weights(donor) == weights(student)).all()


def test_elastic_weights_stay_where_they_mattered() -> None:
    def moved(strength: float) -> float:
        learner = learner_of(memory__ewc=strength, memory__ewc_batches=5, learn__identity="single")
        learner.consolidate(lambda: random_batch(0))
        before = weights(learner)
        for seed in range(30):
            learner.learn(random_batch(seed, scale=3.0))
        return float(np.abs(weights(learner) - before).sum())

    assert moved(1e5) < 0.5 * moved(0.0)


def test_a_restored_learner_goes_on_with_the_same_bits() -> None:
    first = learner_of(memory__ewc=0.1, memory__ewc_batches=2, learn__target_every=3)
    for seed in range(4):
        first.learn(random_batch(seed))
    first.consolidate(lambda: random_batch(0))
    second = Linear(WALK, first_job(), lambda name: 7)
    second.begin(RIGHT)
    second.restore(first.state())
    for seed in range(4, 12):
        assert first.learn(random_batch(seed)) == second.learn(random_batch(seed))
    for name, column in first.state().items():
        assert (second.state()[name] == column).all(), name


def first_job() -> Any:
    return small_job(memory__ewc=0.1, memory__ewc_batches=2, learn__target_every=3)


def test_a_state_of_another_shape_is_refused() -> None:
    with pytest.raises(DamagedData, match="have the shape"):
        learner_of().restore(learner_of(BYTES).state())


def test_the_gradient_is_clipped() -> None:
    free, held = learner_of(), learner_of(learn__grad_clip=1e-9)
    for learner in (free, held):
        learner.learn(random_batch(0, scale=9.0))
    assert np.abs(free.matrices[f"matrix/{RIGHT}"].mean).sum() > 1e-3
    assert np.abs(held.matrices[f"matrix/{RIGHT}"].mean).sum() < 1e-8


def test_it_runs_on_the_cpu_only() -> None:
    with pytest.raises(UsageError, match=r"learn\.device = cuda"):
        learner_of(learn__device="cuda")


def test_it_balances_a_pole_much_longer_than_chance() -> None:
    job = small_job(
        tasks=[CARTPOLE],
        learn__algorithm="linear",
        learn__lr=0.02,
        learn__gamma=0.95,
        learn__n_step=5,
        learn__batch=32,
        learn__starts=100,
        learn__target_every=100,
        train__frames=3000,
        replay__capacity=5000,
        explore__decay=500.0,
        explore__end=0.1,
        evaluation__episodes=10,
        evaluation__max_steps=500,
    )
    sink = Sink()
    small_agent(job, [CARTPOLE], sink=sink).run()
    assert sink.rows["tasks"][0]["score"] > 2 * 22  # at random a pole stands for 22 steps


WITHOUT_TORCH = """
import sys
from canal_mpi.cli import run
sys.argv = ["canal-mpi", "train", "--job", "smoke", "--out", sys.argv[1], "-q", "--frames", "60",
            "--set", "learn.algorithm=linear", "--set", "share.policy=exact"]
code = run()
assert "torch" not in sys.modules, "torch was imported"
sys.exit(code)
"""


def test_a_process_that_uses_it_never_imports_torch(tmp_path: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
