"""Targets that grow with every row are those that all rows together give."""

import numpy as np
import pytest
from helpers import SPACES, Player, observation

from canal_mpi.interfaces import Array, Batch
from canal_mpi.membuf.buffer import Buffer, Recipe
from canal_mpi.membuf.replay import Sampler

RECIPES = [
    Recipe(50, 0.9, 1),
    Recipe(50, 0.9, 3),
    Recipe(50, 0.97, 5, "none", terminal_on_life_loss=False),
    Recipe(50, 0.9, 100, "scale"),
]


def batch_at(buffer: Buffer, recipe: Recipe, rows: Array) -> Batch:
    """A copy of what the sampler makes of 50 rows."""
    found = Sampler(SPACES, recipe).fill(buffer, rows, slice(0, 50))
    return Batch(*(column.copy() for column in found[:5]))  # type: ignore[arg-type]


def assert_both_ways_agree(buffer: Buffer, recipe: Recipe) -> None:
    rows = buffer.draw(np.random.default_rng(0), 50)
    known, targets = batch_at(buffer, recipe, rows), buffer.targets
    plain = batch_at(buffer.track(recipe), recipe, rows)
    buffer.targets = targets
    for name in ("states", "actions", "discounts"):
        assert np.array_equal(getattr(known, name), getattr(plain, name)), name
    going = plain.discounts != 0  # where nothing is bootstrapped the next state is without meaning
    assert np.array_equal(known.next_states[going], plain.next_states[going])
    np.testing.assert_allclose(known.returns, plain.returns, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.n_step}-{recipe.reward}")
def test_known_targets_are_those_of_the_rows_at_every_moment(recipe: Recipe, streams: int) -> None:
    buffer = Buffer(SPACES, 25 * streams, streams).track(recipe)
    player = Player(buffer, streams, seed=3)
    for turn in range(120):  # several times around the ring
        player.play(1, (0.08, 0.1, 0.1))
        if turn % 40 == 30:
            buffer.break_off(np.stack([observation(k) for k in range(9, 9 + streams)]))
        if len(buffer):
            assert_both_ways_agree(buffer, recipe)


def test_a_restored_buffer_knows_the_same_bits_and_goes_on_with_them() -> None:
    for steps in [4, 20, 70]:
        recipe = Recipe(50, 0.9, 4, "none")
        first = Player(Buffer(SPACES, 30).track(recipe), seed=steps)
        first.play(steps, (0.05, 0.05, 0.1))
        second = Player(Buffer(SPACES, 30).track(recipe), seed=steps)
        second.play(7, (0.1, 0.1, 0.1))
        second.buffer.load_state_dict(first.buffer.state_dict())
        second.rng = np.random.default_rng(8)
        first.rng, second.states, second.now = np.random.default_rng(8), first.states, first.now[:]
        for _ in range(12):
            rows = first.buffer.draw(np.random.default_rng(1), 50)
            left, right = (batch_at(player.buffer, recipe, rows) for player in (first, second))
            for name in ("states", "actions", "returns", "next_states", "discounts"):
                assert np.array_equal(getattr(left, name), getattr(right, name))
            for player in (first, second):
                player.play(1, (0.05, 0.05, 0.1))


def test_a_lesson_knows_its_targets_at_once() -> None:
    player = Player(Buffer(SPACES, 60), seed=2)
    player.play(50, (0.05, 0.05, 0.1))
    recipe = RECIPES[1]
    lesson = Buffer.of_lesson(SPACES, player.buffer.export_all()).track(recipe)
    assert_both_ways_agree(lesson, recipe)


def test_targets_of_another_recipe_are_refused_until_they_are_tracked() -> None:
    player = Player(Buffer(SPACES, 60).track(RECIPES[0]), seed=2)
    player.play(50, (0.05, 0.05, 0.1))
    rows, other = player.buffer.draw(np.random.default_rng(0), 50), Recipe(50, 0.9, 5)
    one = batch_at(player.buffer, RECIPES[0], rows)
    with pytest.raises(ValueError, match="does not keep track"):
        batch_at(player.buffer, other, rows)
    five = batch_at(player.buffer.track(other), other, rows)
    assert not np.array_equal(one.discounts, five.discounts)
