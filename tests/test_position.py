"""An agent that is cut anywhere in its tasks and taken up again ends with the same bits."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from small import (
    LEFT,
    RIGHT,
    WALK,
    Donors,
    Sink,
    Walk,
    expert,
    parcel,
    small_agent,
    small_job,
)

from canal_mpi.agent import loop
from canal_mpi.agent.loop import Agent
from canal_mpi.agent.state import restore
from canal_mpi.errors import DamagedData
from canal_mpi.games import TEN_GAMES
from canal_mpi.interfaces import Array, Columns, FetchResult, Link
from canal_mpi.results.files import read_arrays, write_arrays
from canal_mpi.results.store import TABLES
from canal_mpi.settings import Job

State = Callable[[], Columns]


class Cuts:
    """A saver that keeps the agent's state at every n-th moment, as a file would hold it."""

    def __init__(self, every: int = 1) -> None:
        self.every, self.count = every, 0
        self.kept: list[Columns] = []
        self.empty = 0

    def start(self, state: State) -> None:
        self._keep(state)

    def turn(self, steps: int, state: State | None) -> None:
        self._keep(state)

    def end(self, state: State | None) -> None:
        self._keep(state)

    def _keep(self, state: State | None) -> None:
        self.count += 1
        if state is None:
            self.empty += 1
        elif self.count % self.every == 0:
            self.kept.append({name: column.copy() for name, column in state().items()})


def ended(agent: Agent) -> Columns:
    """Everything that must be the same at the end of two equal runs."""
    sink = agent.record.sink
    assert isinstance(sink, Sink)
    rows = {
        name: column
        for name, column in sink.take().items()
        if not TABLES[name.partition("/")[0]][name.partition("/")[2]].volatile
    }
    saved = {
        f"{k}/{n}/{c}": a for (k, n), columns in sink.saved.items() for c, a in columns.items()
    }
    return rows | {f"end/{n}": c for n, c in agent.learner.state_dict().items()} | saved


def differing(one: Columns, two: Columns) -> list[str]:
    """Names of arrays that are in one only or differ in a bit; old membufs may be in one only."""
    odd = {name for name in one.keys() ^ two.keys() if not name.startswith("membuf")}
    both = one.keys() & two.keys()
    return sorted(odd | {name for name in both if one[name].tobytes() != two[name].tobytes()})


def cut_and_compare(
    job: Job, order: Sequence[str], link: Callable[[], Link | None], every: int = 1
) -> Cuts:
    """Run once whole; then take it up at every kept cut and compare the ends."""

    def agent() -> Agent:
        return small_agent(job, order, link(), Sink())

    whole, cuts = agent(), Cuts(every)
    whole.saver = cuts
    whole.run()
    end = ended(whole)
    for state in cuts.kept:
        other = agent()
        restore(other, state)
        other.run()
        assert differing(end, ended(other)) == []
    return cuts


def test_play_on_walks_can_be_cut_anywhere() -> None:
    job = small_job(evaluation__interval=10, evaluation__tasks="all", task__random_action=0.2)
    cuts = cut_and_compare(job, (RIGHT, LEFT), lambda: None, every=2)
    assert len(cuts.kept) == 1 + 40 + 1


@pytest.mark.parametrize("mode", ["distill", "mix", "replay", "adopt"])
def test_learning_from_a_lesson_can_be_cut_anywhere(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CHECK_INTERVAL", 2)
    job = small_job(
        reuse__mode=mode,
        reuse__steps=0.5,
        reuse__pretrain_updates=0.3,
        rehearsal__ewc_lambda=1.0,
        rehearsal__ewc_batches=3,
    )
    teacher = expert(job)
    parcels = [parcel(score=1.0, network=teacher), parcel(LEFT, donor=2, network=expert(job, LEFT))]
    cut_and_compare(job, (RIGHT, LEFT), lambda: Donors(parcels), every=3)


def test_lessons_of_other_tasks_and_probes_can_be_cut() -> None:
    job = small_job(share__policy="all")
    parcels: list[FetchResult] = [parcel(LEFT), parcel(LEFT, donor=2), parcel(RIGHT, donor=3)]
    cut_and_compare(job, (RIGHT,), lambda: Donors(parcels), every=5)
    job = small_job(share__policy="simnet")
    offers = [parcel(RIGHT, embedding=np.zeros(52, dtype="<f4"))]
    cut_and_compare(job, (RIGHT,), lambda: Donors(offers), every=9)


def test_no_cut_is_made_while_neighbours_swap_rows() -> None:
    job = small_job(row_exchange__save_interval=10, row_exchange__load_interval=10)
    agent, cuts = small_agent(job, link=Donors(), peers=lambda round_, task: [1]), Cuts()
    agent.saver = cuts
    agent.run()
    assert len(cuts.kept) == 1, "the start of the task"
    assert cuts.empty == 40 + 1


def atari_job(**settings: Any) -> Job:
    return small_job(
        **{
            "tasks": ["Krull"],
            "learn__widths": [16],
            "learn__batch_size": 8,
            "train__steps": 60,
            "evaluation__max_steps": 5,
            "replay__buffer_size": 40,  # rows are overwritten
        }
        | settings
    )


@pytest.mark.atari
@pytest.mark.parametrize("sticky", [0.0, 0.25])
def test_atari_on_ram_can_be_cut_anywhere(sticky: float) -> None:
    cut_and_compare(
        atari_job(task__repeat_action_probability=sticky), ("Krull",), lambda: None, every=9
    )


@pytest.mark.atari
def test_atari_on_pixels_can_be_cut_anywhere() -> None:
    job = atari_job(
        task__obs="pixels",
        task__repeat_action_probability=0.25,
        train__steps=24,
        learn__network="mlp",
        learn__widths=[4],
    )
    cut_and_compare(job, ("Krull",), lambda: None, every=9)


def test_a_position_survives_a_file(tmp_path: Path) -> None:
    job = small_job(reuse__steps=0.5, reuse__pretrain_updates=0.3)
    parcels = [parcel(score=1.0, network=expert(job))]
    whole, cuts = small_agent(job, link=Donors(parcels), sink=Sink()), Cuts(10)
    whole.saver = cuts
    whole.run()
    end = ended(whole)
    for k, state in enumerate(cuts.kept):
        write_arrays(tmp_path / f"{k}.h5", state, {})
        other = small_agent(job, link=Donors(parcels), sink=Sink())
        restore(other, read_arrays(tmp_path / f"{k}.h5"))
        other.run()
        assert differing(end, ended(other)) == []


def test_a_position_that_lacks_a_part_is_refused() -> None:
    agent, cuts = small_agent(small_job()), Cuts(20)
    agent.saver = cuts
    agent.run()
    state = cuts.kept[0]
    del state["streams/sample"]
    with pytest.raises(DamagedData, match="does not fit this agent"):
        restore(small_agent(small_job()), state)


class Whim(Walk):
    """A walk that does not repeat itself: what it shows depends on how often it was reset."""

    resets = 0

    def reset(self, **options: object) -> Any:
        Whim.resets += 1
        return super().reset(**options)

    def _look(self) -> Array:
        look: Array = super()._look() + np.float32(Whim.resets * 1e-3)
        return look


gymnasium.register("Whim-v0", lambda **_: Whim(), disable_env_checker=True)


def test_an_episode_that_cannot_be_repeated_starts_anew_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from canal_mpi.errors import logger

    monkeypatch.setattr(logger, "propagate", True)
    job = small_job(tasks=["Whim-v0"], evaluation__episodes=0)
    agent, cuts = small_agent(job, ("Whim-v0",)), Cuts()
    agent.saver = cuts
    agent.run()
    at_rest = next(s for s in cuts.kept if "progress/env/game-0/played" in s)
    assert len(at_rest["progress/env/game-0/played"]) == 1
    other = small_agent(job, ("Whim-v0",), sink=Sink())
    restore(other, at_rest)
    other.run()
    assert "not the same bits from here on" in caplog.text
    assert other.replay.own.spaces == WALK
    assert other.record.env_steps == 40


class Enough(Exception):
    """The agent has come far enough."""


class At:
    """A saver that keeps the agent's state after certain turns, and ends after the last."""

    def __init__(self, turns: set[int]) -> None:
        self.turns, self.count = turns, 0
        self.kept: dict[int, Columns] = {}

    def start(self, state: State) -> None: ...

    def turn(self, steps: int, state: State | None) -> None:
        self.count += 1
        if self.count in self.turns and state is not None:
            self.kept[self.count] = {name: c.copy() for name, c in state().items()}
        if self.count == max(self.turns):
            raise Enough

    def end(self, state: State | None) -> None: ...


@pytest.mark.slow
@pytest.mark.atari
@pytest.mark.parametrize("game", TEN_GAMES)
def test_twenty_random_cuts_of_a_real_game_go_on_the_same(game: str) -> None:
    job = atari_job(
        tasks=[game],
        train__steps=400,
        task__repeat_action_probability=0.25,
        task__random_action=0.1,
        evaluation__episodes=0,
        learn__batch_size=4,
    )
    cuts = [int(c) for c in np.random.default_rng(len(game)).choice(300, 20, replace=False) + 1]
    further = 12

    def play(saver: At, state: Columns | None) -> dict[int, Columns]:
        agent = small_agent(job, (game,), sink=Sink())
        agent.saver = saver
        if state is not None:
            restore(agent, state)
        with pytest.raises(Enough):
            agent.run()
        assert agent.progress.env is not None
        agent.progress.env.close()  # its emulator is used again
        return saver.kept

    whole = play(At({*cuts, *(cut + further for cut in cuts)}), None)
    for cut in cuts:
        again = play(At({further}), whole[cut])[further]
        volatile = {"record/times", "sink/rows"}
        expected = whole[cut + further]
        assert set(differing(expected, again)) <= volatile, cut
