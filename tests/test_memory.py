"""What an agent keeps of old tasks: bounded, balanced, with the values it gave then."""

from collections import Counter

import numpy as np
import pytest
from helpers import learning
from small import LEFT, RIGHT, WALK, Sink, learner, played, small_agent, small_job

from canal_mpi.interfaces import LAST, TRUNCATED, Array, Batch
from canal_mpi.membuf.rehearsal import Rehearsal
from canal_mpi.membuf.replay import Sampler


def _memory(most: int = 600, batch: int = 8) -> Rehearsal:
    return Rehearsal(WALK, most, Sampler(WALK, learning(batch, 0.9)))


def _rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def _marks(states: Array) -> Array:
    """Values that tell which state they belong to."""
    return np.stack([states[:, 0] * 10, states[:, 0] * 10 + 1], axis=1)


def _filled(tasks: int = 4, most: int = 600) -> Rehearsal:
    memory = _memory(most)
    for k in range(tasks):
        memory.keep(f"task-{k}", played(1000, {300: TRUNCATED}), _marks, _rng(k))
    return memory


def test_all_tasks_together_stay_within_the_bound() -> None:
    memory = _memory(600)
    for k in range(6):
        memory.keep(f"task-{k}", played(1000), _marks, _rng(k))
        assert sum(len(past.export()["flags"]) for past in memory.tasks.values()) <= 600
    assert len(memory.tasks) == 6


def test_every_task_has_the_same_room() -> None:
    memory = _memory(816)
    for k in range(4):
        memory.keep(f"task-{k}", played(1000), _marks, _rng(k))
    assert [len(past.export()["flags"]) for past in memory.tasks.values()] == [204] * 4


def test_a_small_task_is_kept_whole() -> None:
    memory = _memory(600)
    memory.keep("short", played(20), _marks, _rng())
    memory.keep("long", played(1000), _marks, _rng())
    assert len(memory.tasks["short"].export()["flags"]) == 21


def test_a_task_that_comes_again_replaces_its_old_rows() -> None:
    memory = _filled(tasks=2)
    memory.keep("task-0", played(30), _marks, _rng())
    assert len(memory.tasks["task-0"].export()["flags"]) == 31
    assert sorted(memory.tasks) == ["task-0", "task-1"]


def test_old_tasks_are_drawn_equally_often_whatever_their_size() -> None:
    memory = _memory(1000)
    for k, steps in enumerate((20, 1000, 150)):
        memory.keep(f"task-{k}", played(steps), _marks, _rng(k))
    rng = _rng(5)
    drawn = Counter(batch.task for _ in range(3000) if (batch := memory.sample("new", rng)))
    assert sum(drawn.values()) == 3000
    assert all(900 < number < 1100 for number in drawn.values())


def test_the_current_task_is_never_rehearsed() -> None:
    memory, rng = _filled(tasks=3), _rng()
    drawn = {batch.task for _ in range(200) if (batch := memory.sample("task-1", rng))}
    assert drawn == {"task-0", "task-2"}


def test_without_another_task_there_is_nothing_to_rehearse() -> None:
    assert _memory().others("task-0") == []
    assert _filled(tasks=1).others("task-0") == []
    assert _filled(tasks=1).others("new") == ["task-0"]


def test_stored_values_belong_to_the_drawn_states() -> None:
    memory, rng = _filled(), _rng()
    for _ in range(50):
        batch = memory.sample("new", rng)
        assert batch is not None and batch.stored_q is not None
        np.testing.assert_array_equal(batch.stored_q, _marks(batch.states))
        assert (batch.states[:, 0] >= 0).all()  # never a state that only closes a segment


def test_values_stay_those_of_the_time_they_were_stored() -> None:
    memory = _memory()
    memory.keep("old", played(1000), lambda states: np.full((len(states), 2), 1.0), _rng())
    memory.keep("new", played(1000), lambda states: np.full((len(states), 2), 2.0), _rng())
    assert set(memory.tasks["old"].export()["q_values"].reshape(-1).tolist()) == {1.0}
    assert set(memory.tasks["new"].export()["q_values"].reshape(-1).tolist()) == {2.0}


def test_an_agent_stores_what_its_learner_thought_at_the_end_of_the_task() -> None:
    agent, sink = small_agent(small_job(), (RIGHT, LEFT), sink=(sink := Sink())), sink
    dqn, seen = learner(agent), []

    def after_first(kind: str, name: str, columns: dict[str, Array]) -> None:
        if (kind, name) == ("checkpoints", "learner"):
            past = agent.rehearsal.tasks[RIGHT]
            dqn.task, task = RIGHT, dqn.task
            seen.append((dqn.q_values(past.export()["state"]), past.export()["q_values"].copy()))
            dqn.task = task

    sink.save = after_first  # type: ignore[method-assign]
    agent.run()
    (now, stored), (later, kept) = seen
    np.testing.assert_allclose(stored, now, rtol=0, atol=1e-6)
    assert np.abs(later - now[: len(later)]).max() > 1e-6  # the learner moved on
    assert len(kept) <= 100


def test_segments_are_never_joined_over_a_cut() -> None:
    memory, rng = _filled(tasks=2), _rng()
    for past in memory.tasks.values():
        assert past.export()["flags"][-1] == LAST
    for _ in range(50):
        batch = memory.sample("new", rng)
        assert batch is not None
        ahead = batch.next_states[:, 0] - batch.states[:, 0]
        cut = batch.states[:, 0] == 300
        assert (ahead[~cut] == 1).all() and (batch.next_states[cut] == -1).all()


def _draws(memory: Rehearsal) -> list[Batch]:
    rng, found = _rng(9), []
    for _ in range(20):
        batch = memory.sample("new", rng)
        assert batch is not None and batch.stored_q is not None
        found.append(batch._replace(states=batch.states.copy(), returns=batch.returns.copy()))
    return found


def test_a_restored_memory_draws_the_same() -> None:
    one, two = _filled(), _filled(tasks=2)
    two.load_state_dict(one.state_dict())
    for a, b in zip(_draws(one), _draws(two), strict=True):
        assert a.task == b.task and a.stored_q is not None and b.stored_q is not None
        np.testing.assert_array_equal(a.states, b.states)
        np.testing.assert_array_equal(a.stored_q, b.stored_q)
        np.testing.assert_array_equal(a.returns, b.returns)


@pytest.mark.parametrize("name", ["ALE/Pong-v5", "plugins:Walk-v0", "a b"])
def test_a_task_of_any_name_comes_back(name: str) -> None:
    one, two = _memory(), _memory()
    one.keep(name, played(40), _marks, _rng())
    two.load_state_dict(one.state_dict())
    assert list(two.tasks) == [name]


def test_a_bound_of_less_than_a_segment_still_keeps_something() -> None:
    memory = _memory(40)
    memory.keep("old", played(1000), _marks, _rng())
    assert 2 <= len(memory.tasks["old"].export()["flags"]) <= 40


def test_full_reservoirs_take_no_more_memory_than_announced() -> None:
    memory = Rehearsal(WALK, 3000, Sampler(WALK, learning(8, 0.9)))
    for k, task in enumerate(("a", "b", "c")):
        rng = np.random.default_rng(k)
        memory.keep(task, played(1500), lambda obs: np.zeros((len(obs), WALK.actions)), rng)
    held = sum(past.nbytes for past in memory.tasks.values())
    assert 0.8 * memory.nbytes < held <= 1.1 * memory.nbytes
