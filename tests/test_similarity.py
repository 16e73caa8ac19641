"""How alike tasks are: distances by hand, embeddings of play, and ten real games."""

import numpy as np
import pytest
from small import WALK, Sink, random_batch, small_job

from canal_mpi.config import resolve
from canal_mpi.games import TEN_GAMES
from canal_mpi.interfaces import Array, Columns
from canal_mpi.learn.simnet import train_simnet
from canal_mpi.membuf.selection import (
    DISTANCES,
    cosine_distance,
    play_embedding,
    sorted_distance,
    weights_distance,
)
from canal_mpi.rank.build import make_agent
from canal_mpi.settings import Job
from canal_mpi.topology.exchange import alone


def _array(*numbers: float) -> Array:
    return np.array(numbers, dtype="<f4")


def test_the_distance_of_weights_is_euclidean() -> None:
    assert weights_distance(_array(1, 2, 3), _array(4, 6, 3)) == 5.0


def test_the_distance_of_outputs_is_that_of_the_sorted_numbers() -> None:
    # sorted (1, 2, 9) and (0, 4, 5): 1 + 2 + 4 over 3
    assert sorted_distance(_array(9, 1, 2), _array(5, 0, 4)) == pytest.approx(7 / 3)
    assert sorted_distance(_array(1, 2, 3), _array(3, 1, 2)) == 0.0


def test_the_cosine_distance_looks_at_the_angle_only() -> None:
    assert cosine_distance(_array(1, 0), _array(0, 2)) == pytest.approx(1.0)
    assert cosine_distance(_array(1, 0), _array(3, 0)) == pytest.approx(0.0)
    assert cosine_distance(_array(1, 0), _array(-3, 0)) == pytest.approx(2.0)
    assert cosine_distance(_array(3, 4), _array(4, 3)) == pytest.approx(0.04, abs=1e-6)
    assert cosine_distance(_array(0, 0), _array(4, 3)) == 1.0


def test_distances_go_by_their_names() -> None:
    a, b = _array(3, 4), _array(4, 3)
    assert DISTANCES["weights"](a, b) == pytest.approx(2**0.5)
    assert DISTANCES["outputs"](a, b) == 0.0
    assert DISTANCES["cosine"](a, b) == pytest.approx(0.04, abs=1e-6)


def _play(seed: int, centre: float = 0.0, action: float = 0.5, reward: float = 0.1) -> Columns:
    rng, rows = np.random.default_rng(seed), 400
    return {
        "state": (centre + 0.2 * rng.normal(size=(rows, 5))).astype("<f4"),
        "action": (rng.random(rows) < action).astype(np.uint8),
        "reward": (rng.random(rows) < reward).astype("<f4"),
        "flags": np.zeros(rows, dtype=np.uint8),
    }


@pytest.mark.parametrize(
    "other",
    [_play(2, centre=0.5), _play(2, action=0.0), _play(2, reward=0.7)],
    ids=["states", "actions", "rewards"],
)
@pytest.mark.parametrize("measure", ["cosine", "weights"])
def test_play_of_the_same_kind_is_nearer_than_play_of_another(measure: str, other: Columns) -> None:
    first, same, different = (play_embedding(rows, 2) for rows in (_play(0), _play(1), other))
    distance = DISTANCES[measure]
    assert distance(first, same) < distance(first, different)


def test_an_embedding_of_play_is_the_same_every_time_and_order_does_not_matter() -> None:
    rows = _play(0)
    shuffled = {name: column[::-1].copy() for name, column in rows.items()}
    embedding = play_embedding(rows, 2)
    assert embedding.dtype.str == "<f4" and embedding.ndim == 1
    np.testing.assert_array_equal(embedding, play_embedding(rows, 2))
    np.testing.assert_allclose(embedding, play_embedding(shuffled, 2), atol=1e-6)


def test_the_distance_of_embeddings_is_the_sliced_wasserstein_distance() -> None:
    # All play in one point, moved by a vector: every projection moves by its cosine times the
    # length of the vector, so the mean square over directions is near length² / dimensions.
    rows = 64
    here: Columns = {
        "state": np.zeros((rows, 5), dtype="<f4"),
        "action": np.zeros(rows, dtype=np.uint8),
        "reward": np.zeros(rows, dtype="<f4"),
        "flags": np.zeros(rows, dtype=np.uint8),
    }
    there = here | {"state": here["state"] + np.array([3, 0, 4, 0, 0], dtype="<f4")}
    found = weights_distance(play_embedding(here, 2), play_embedding(there, 2))
    expected = (5.0**2 / (5 + 2 + 1)) ** 0.5
    assert found == pytest.approx(expected, rel=0.2)


def test_byte_states_are_scaled() -> None:
    rows = _play(0)
    whole = np.random.default_rng(0).integers(0, 256, (400, 5))
    as_bytes = play_embedding(rows | {"state": whole.astype(np.uint8)}, 2)
    as_floats = play_embedding(rows | {"state": (whole / 255).astype("<f4")}, 2)
    np.testing.assert_allclose(as_bytes, as_floats, atol=1e-5)


@pytest.mark.parametrize("kind", ["weights", "outputs"])
def test_a_simnet_is_the_same_for_the_same_batches_whoever_trains_it(kind: str) -> None:
    job = small_job(simnet__updates=20, simnet__distance=kind)

    def embed(start: int) -> Array:
        seeds = iter(range(start, start + 20))
        return train_simnet(WALK, job, lambda: random_batch(next(seeds)))

    np.testing.assert_array_equal(embed(0), embed(0))
    assert weights_distance(embed(0), embed(100)) > 0


def test_simnets_that_learnt_nothing_are_alike() -> None:
    job = small_job(simnet__updates=0)
    one, two = (train_simnet(WALK, job, lambda: random_batch(0)) for _ in range(2))
    np.testing.assert_array_equal(one, two)


def _ten_games(job: Job, agent: int) -> list[Array]:
    """Embeddings of random play on the ten games, as an agent with that number probes them."""
    found = []
    for task in TEN_GAMES:
        made = make_agent(job, agent, [task], alone, Sink(), lambda progress: None)
        made.task = task
        made.sharing.begin(task, 1)
        found.append(made.probe())
    return found


def _same_is_nearest(job: Job, measure: str) -> tuple[int, Array]:
    mine, theirs = _ten_games(job, 0), _ten_games(job, 1)
    matrix = np.array([[DISTANCES[measure](a, b) for b in theirs] for a in mine])
    return int((matrix.argmin(axis=1) == np.arange(10)).sum()), matrix


@pytest.mark.long
@pytest.mark.atari
def test_the_same_game_is_nearest() -> None:
    for policy, kind, measure, least in [
        ("wasserstein", "weights", "cosine", 9),
        ("simnet", "weights", "weights", 9),
    ]:
        job = resolve({"share.policy": policy, "simnet.distance": kind}, environ={})
        right, matrix = _same_is_nearest(job, measure)
        assert right >= least, f"{right} of 10; {matrix.round(4).tolist()}"


def test_embeddings_of_an_agent_come_from_its_probe() -> None:
    job = small_job(share__policy="wasserstein")
    made = make_agent(job, 0, list(job.tasks), alone, Sink(), lambda progress: None)
    made.task = job.tasks[0]
    seen: list[Columns] = []

    def embed(rows: Columns, rng: np.random.Generator) -> Array:
        seen.append(rows)
        return _array(1, 2)

    made.sharing._embed = embed
    assert made.probe().tolist() == [1, 2]
    assert len(seen[0]["action"]) in range(job.share.probe, job.share.probe + 10)
    assert not len(made.replay.own)
