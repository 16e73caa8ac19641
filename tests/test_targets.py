"""n-step targets, by a walk over the rows in single precision: to the last bit."""

import numpy as np
from helpers import SPACES, Player, learning, number_of, observation

from canal_mpi.interfaces import LAST, LIFE, TERMINATED, TRUNCATED, Array, Batch
from canal_mpi.membuf.buffer import Buffer
from canal_mpi.membuf.replay import Sampler
from canal_mpi.settings import LearnConfig

RULES = [
    learning(50, 0.9, 1),
    learning(50, 0.9, 3),
    learning(50, 0.97, 5, "none", lives=False),
    learning(50, 0.9, 100, "none"),
]


def batch_at(buffer: Buffer, rule: LearnConfig, rows: Array) -> Batch:
    """A copy of what the sampler makes of 50 rows."""
    found = Sampler(SPACES, rule).fill(buffer, rows)
    return Batch(*(column.copy() for column in found[:5]))  # type: ignore[arg-type]


def walk(buffer: Buffer, row: int, rule: LearnConfig) -> tuple[np.float32, np.float32, int]:
    """Return and discount of a row, and the row to bootstrap from."""
    stops = TERMINATED | LIFE if rule.terminal_on_life_loss else TERMINATED
    total, power = np.float32(0), np.float32(1)
    for _ in range(rule.n_step):
        reward, flags = buffer.reward[row], buffer.flags[row]
        total += power * (np.sign(reward) if rule.reward == "clip" else reward)
        power *= np.float32(rule.gamma)
        row = row + 1 if (row + 1) % buffer.region else row + 1 - buffer.region
        if flags & (stops | TRUNCATED) or buffer.flags[row] & LAST:
            break
    return total, np.float32(0) if flags & stops else power, row


def test_targets_are_those_of_the_rows_at_every_moment() -> None:
    for rule in RULES:
        for streams in (1, 3):
            buffer = Buffer(SPACES, 25 * streams, streams)
            player = Player(buffer, streams, seed=3)
            for turn in range(120):  # several times around the ring
                player.play(1, (0.08, 0.1, 0.1))
                buffer.reward[buffer.flags < LAST] *= np.float32(1.1)  # no whole numbers
                if turn % 40 == 30:
                    buffer.start(np.stack([observation(k) for k in range(9, 9 + streams)]))
                if turn % 5:
                    continue
                rows = buffer.draw(np.random.default_rng(0), 50)
                batch = batch_at(buffer, rule, rows)
                for k, row in enumerate(rows.tolist()):
                    total, discount, after = walk(buffer, row, rule)
                    assert (batch.returns[k], batch.discounts[k]) == (total, discount)
                    if discount:
                        seen, wanted = batch.next_states[k], buffer.state_rows[after]
                        assert number_of(seen) == number_of(wanted)


def test_a_restored_buffer_gives_the_same_bits_and_goes_on_with_them() -> None:
    for steps in [4, 20, 70]:
        rule = learning(50, 0.9, 4, "none")
        first = Player(Buffer(SPACES, 30), seed=steps)
        first.play(steps, (0.05, 0.05, 0.1))
        second = Player(Buffer(SPACES, 30), seed=steps)
        second.play(7, (0.1, 0.1, 0.1))
        second.buffer.load_state_dict(first.buffer.state_dict())
        second.rng = np.random.default_rng(8)
        first.rng, second.states, second.now = np.random.default_rng(8), first.states, first.now[:]
        for _ in range(12):
            rows = first.buffer.draw(np.random.default_rng(1), 50)
            left, right = (batch_at(player.buffer, rule, rows) for player in (first, second))
            for name in ("states", "actions", "returns", "next_states", "discounts"):
                assert np.array_equal(getattr(left, name), getattr(right, name))
            for player in (first, second):
                player.play(1, (0.05, 0.05, 0.1))
