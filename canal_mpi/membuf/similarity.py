"""How alike two tasks are: distances between embeddings, and an embedding of play itself."""

from collections.abc import Callable, Mapping

import numpy as np

from canal_mpi import pick
from canal_mpi.types import LAST, Array, Columns

DIRECTIONS, QUANTILES = 64, 16


def weights_distance(a: Array, b: Array) -> float:
    """Euclidean distance of two SimNets' weights; layers are vectors of one concatenation."""
    return float(np.linalg.norm(a.astype(np.float64) - b.astype(np.float64)))


def cosine_distance(a: Array, b: Array) -> float:
    """1 minus the cosine of the angle between two embeddings."""
    length = np.linalg.norm(a) * np.linalg.norm(b)
    return float(1 - np.dot(a, b) / length) if length else 1.0


def sorted_distance(a: Array, b: Array) -> float:
    """Wasserstein-1 distance of two equally many numbers, such as outputs on the same states."""
    return float(np.abs(np.sort(a) - np.sort(b)).mean())


DISTANCES: Mapping[str, Callable[[Array, Array], float]] = {
    "weights": weights_distance,
    "outputs": sorted_distance,
    "cosine": cosine_distance,
}


def distance(name: str, a: Array, b: Array) -> float:
    """A distance by its name."""
    found: float = pick.pick("distance", name, DISTANCES)(a, b)
    return found


def play_embedding(rows: Columns, actions: int) -> Array:
    """A sliced Wasserstein embedding of (state, action, reward) samples.

    The samples are projected on fixed random directions; the quantiles of each projection, less
    those of a fixed reference, are the embedding. Euclidean distance between two embeddings is the
    sliced Wasserstein-2 distance of the samples.
    """
    moves = (rows["flags"] & LAST) == 0
    state = rows["state"][moves].reshape(int(moves.sum()), -1).astype(np.float32)
    scale = 255.0 if rows["state"].dtype == np.uint8 else 1.0
    chosen = np.eye(actions, dtype=np.float32)[rows["action"][moves]]
    reward = np.sign(rows["reward"][moves]).astype(np.float32)[:, None]
    points = np.concatenate([state / scale, chosen / actions, reward], axis=1)
    rng = np.random.Generator(np.random.PCG64(7))
    directions = rng.normal(size=(points.shape[1], DIRECTIONS)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=0)
    levels = (np.arange(QUANTILES) + 0.5) / QUANTILES
    reference = 0.5 * directions.sum(axis=0)  # all weight on the middle of the unit cube
    quantiles = np.quantile(points @ directions, levels, axis=0) - reference
    embedding: Array = (quantiles / np.sqrt(quantiles.size)).astype("<f4").reshape(-1)
    return embedding
