"""Rows of the results: counted, timed and of the schema's columns."""

import time
from math import isnan, nan

import numpy as np
import pytest
from small import Sink

from canal_mpi.agent.recorder import PHASES, Recorder
from canal_mpi.interfaces import (
    LIFE,
    TERMINATED,
    TRUNCATED,
    FetchResult,
    Offer,
    Progress,
    Step,
    TransferEvent,
)
from canal_mpi.membuf.lesson import Lesson
from canal_mpi.results.store import TABLES, Rows


def recorder() -> tuple[Recorder, Sink, list[str]]:
    sink, phases = Sink(), list[str]()

    def beat(progress: Progress) -> None:
        phases.append(progress.phase)

    made = Recorder(sink, beat, 3, 134)
    made.begin("Krull", 2)
    return made, sink, phases


def step(rewards: list[float], flags: list[int]) -> Step:
    nothing = np.zeros((len(rewards), 1))
    return Step(nothing, np.array(rewards), np.array(flags, dtype=np.uint8), nothing)


def test_an_episode_becomes_a_row_when_it_ends_or_is_cut() -> None:
    record, sink, _ = recorder()
    for flags in (0, LIFE, TERMINATED, 0, TRUNCATED, 0):
        record.step(step([2.0], [flags]))
    rows = sink.rows["episodes"]
    assert [(r["episode"], r["step"], r["return"], r["length"]) for r in rows] == [
        (1, 3, 6.0, 3),
        (2, 5, 4.0, 2),
    ]
    assert {(r["agent"], r["round"], r["task"]) for r in rows} == {(3, 2, "Krull")}
    assert record.env_steps == 6


def test_a_lost_life_together_with_a_cut_is_one_row() -> None:
    record, sink, _ = recorder()
    record.step(step([1.0], [LIFE | TRUNCATED]))
    assert len(sink.rows["episodes"]) == 1


def test_environments_of_a_batch_have_episodes_of_their_own() -> None:
    record, sink, _ = recorder()
    record.step(step([1.0, 10.0], [0, 0]))
    record.step(step([1.0, 10.0], [0, TERMINATED]))
    record.step(step([1.0, 10.0], [TERMINATED, 0]))
    found = [(r["step"], r["return"], r["length"]) for r in sink.rows["episodes"]]
    assert found == [(4, 20.0, 2), (6, 3.0, 3)]


def test_a_row_of_train_means_the_losses_since_the_row_before() -> None:
    record, sink, _ = recorder()
    record.update(1.0)
    record.update(np.float32(3.0))  # type: ignore[arg-type]  # learners of others may say it so
    assert type(record.progress.loss) is float  # JSON knows no other
    record.clock.spent |= {"environment": 0.5, "learning": 0.25, "pretraining": 0.5}
    record.step(step([7.0], [TERMINATED]))
    assert not record.turn(499, 500)
    assert record.turn(1, 500)
    record.training(0.3)
    assert record.turn(500, 500)
    record.training(0.2)
    first, second = sink.rows["train"]
    assert (first["step"], second["step"]) == (500, 1000)
    assert (first["loss"], first["return_mean"], first["epsilon"]) == (2.0, 7.0, 0.3)
    assert (first["env_seconds"], first["learn_seconds"]) == (0.5, 0.75)
    assert isnan(second["loss"])
    assert (second["env_seconds"], second["learn_seconds"]) == (0.0, 0.0)
    assert second["return_mean"] == 7.0


def test_the_mean_return_is_that_of_the_last_hundred_episodes() -> None:
    record, sink, _ = recorder()
    for number in range(150):
        record.step(step([float(number)], [TERMINATED]))
    record.training(0.0)
    assert sink.rows["train"][0]["return_mean"] == np.mean(range(50, 150))


def test_a_new_task_starts_all_counts_again() -> None:
    record, sink, _ = recorder()
    record.update(1.0)
    record.step(step([5.0], [0]))
    record.begin("Alien", 3)
    assert record.env_steps == record.updates == 0
    assert isnan(record.progress.loss)
    record.step(step([1.0], [TERMINATED]))
    row = sink.rows["episodes"][0]
    assert (row["task"], row["round"], row["episode"], row["return"]) == ("Alien", 3, 1, 1.0)


def test_every_phase_is_a_beat() -> None:
    record, _, phases = recorder()
    record.phase("training", "learning")
    record.beat()
    record.phase("evaluating")
    assert phases == ["training", "training", "evaluating"]


def test_waiting_is_counted_and_shown_as_a_share() -> None:
    record, sink, _ = recorder()
    record.clock.switch("learning")
    record.clock.waited(1.5)
    record.clock.waited(2.0)  # so far
    record.phase("training", "environment")
    record.training(0.0)
    row = sink.rows["train"][0]
    assert 2.0 < row["wait_seconds"] < 2.5 and -2.0 < row["learn_seconds"] < -1.5
    assert record.progress.wait_share > 0


def test_the_ledger_notes_offers_lessons_and_refusals() -> None:
    record, sink, _ = recorder()
    mine, theirs = Offer(3, 2, "Krull", 9.0, 50, 700), Offer(1, 1, "Krull", 8.0, 40, 600)
    record.moved(TransferEvent("offer", mine, 3, 4, 2, 700))
    lesson = Lesson(theirs, {}, {}, sender=0, seconds=0.5)
    record.used(lesson, 0.25, 0.75)
    record.used(lesson)
    record.refused(FetchResult(theirs, b"", 0.5, sender=1), "checksum")
    odd = Offer(2, 7, "", nan, 0, 0)
    record.moved(TransferEvent("refusal", odd, 2, 3, 7, reason="empty"))
    record.moved(TransferEvent("transfer", theirs, 0, 3, 1, 600, 0.125))
    found = [
        tuple(row[n] for n in ("kind", "donor", "from", "to", "rows", "bytes", "score", "reason"))
        for row in sink.rows["exchange"]
    ]
    assert found == [
        ("offer", 3, 3, 4, 50, 700, 9.0, ""),
        ("lesson", 1, 0, 3, 40, 600, 8.0, ""),
        ("lesson", 1, 0, 3, 40, 600, 8.0, ""),
        ("refusal", 1, 1, 3, 40, 0, 8.0, "checksum"),
        ("refusal", 2, 2, 3, 0, 0, nan, "empty"),
        ("transfer", 1, 0, 3, 40, 600, 8.0, ""),
    ]
    assert [row["round"] for row in sink.rows["exchange"]] == [2, 2, 2, 2, 7, 1]
    assert sink.rows["exchange"][5]["seconds"] == 0.125
    for row in sink.rows["exchange"][1:3]:
        assert (row["raw_bytes"], row["seconds"]) == (5360, 0.5)
    taught = sink.rows["exchange"][1]
    assert (taught["kl"], taught["agreement"]) == (0.25, 0.75)
    for row in (sink.rows["exchange"][0], *sink.rows["exchange"][2:]):
        assert isnan(row["kl"]) and isnan(row["agreement"])


def test_late_returns_are_those_of_the_last_quarter_of_the_steps() -> None:
    record, _, _ = recorder()
    for k in range(12):
        record.step(step([float(k)], [TERMINATED if k not in (3, 4) else 0]))
    assert list(record.late_returns()) == pytest.approx([10.0, 1 / 3**0.5, 3])
    for _ in range(6):
        record.step(step([5.0], [0]))
    assert list(record.late_returns()) == pytest.approx([10.0, 1 / 3**0.5, 3]), "of the second half"
    for _ in range(2):
        record.step(step([5.0], [0]))
    mean, std_error, episodes = record.late_returns()
    assert isnan(mean) and (std_error, episodes) == (0.0, 2), "too few to know"


def test_the_source_of_a_task_is_where_it_was_learnt_from() -> None:
    for donors, source in [([], "env"), (["4"], "lesson"), (["4", "0"], "lesson")]:
        record, sink, _ = recorder()
        record.update(1.0)
        record.learnt(donors)
        row = sink.rows["tasks"][0]
        assert (row["source"], row["donors"]) == (source, ",".join(donors))
        assert (row["updates"], row["probe_steps"], row["evaluation_steps"]) == (1, 0, 0)


def test_every_second_of_a_task_has_a_name() -> None:
    record, sink, _ = recorder()
    for phase in PHASES:
        record.phase(phase)
        time.sleep(0.01)
    record.learnt([])
    time.sleep(0.02)
    record.begin("Alien", 3)
    record.learnt([])
    first, second = sink.rows["tasks"]
    for row in (first, second):
        assert row["seconds"] == pytest.approx(sum(row[name] for name in PHASES.values()))
    assert all(first[name] >= 0.01 for name in PHASES.values())
    assert second["wait_seconds"] >= 0.02, "what passes between two tasks is waiting for others"
    assert 0 <= second["cpu_seconds"] <= first["cpu_seconds"] + 0.1


def test_turns_are_counted_into_the_progress() -> None:
    record, _, _ = recorder()
    record.plan(30)
    due = [record.turn(4, 10) for _ in range(7)]
    assert due == [False, False, True, False, True, False, False]
    progress = record.progress
    assert (progress.step, progress.steps, progress.total_steps) == (28, 30, 28)
    record.plan(5)
    assert record.turn(2, 10)
    assert (progress.step, progress.steps, progress.total_steps) == (2, 5, 30)
    record.begin("Alien", 3)
    assert (progress.step, progress.steps, progress.total_steps) == (0, 0, 30)
    assert not record.turn(9, 10)


def test_evaluations_inside_a_task_are_its_curve() -> None:
    record, sink, _ = recorder()
    record.curve([(5.0, 9), (2.0, 3)])
    record.step(step([1.0], [0]))
    record.curve([(7.0, 4), (8.0, 6)])
    times = [row.pop("seconds") for row in sink.rows["curve"]]
    assert 0 <= times[0] <= times[1]
    assert sink.rows["curve"] == [
        {"agent": 3, "round": 2, "task": "Krull", "env_steps": 0, "score": 3.5},
        {"agent": 3, "round": 2, "task": "Krull", "env_steps": 1, "score": 7.5},
    ]
    record.learnt([])
    assert sink.rows["tasks"][0]["evaluation_steps"] == 9 + 3 + 4 + 6
    record.evaluated("Alien", 1, [(7.0, 4), (8.0, 6)], 3.0)
    assert [tuple(row.values()) for row in sink.rows["evaluation"]] == [
        (3, 1, "Alien", 0, 7.0, 4, 1.5),
        (3, 1, "Alien", 1, 8.0, 6, 1.5),
    ]


# Rows in memory


def test_rows_become_columns_of_the_schemas_types() -> None:
    record, sink, _ = recorder()
    record.step(step([1.0], [TERMINATED]))
    record.training(0.1)
    record.curve([(5.0, 9)])
    record.evaluated("Krull", 2, [(5.0, 9)], 1.0)
    record.swapped(Offer(1, 2, "Krull", nan, 9, 700))
    record.learnt([])
    taken = sink.take()
    tables = {"episodes", "train", "curve", "evaluation", "exchange", "tasks"}
    assert set(taken) == {f"{table}/{name}" for table in tables for name in TABLES[table]}
    for name, column in taken.items():
        table, _, short = name.partition("/")
        assert column.dtype == np.dtype(TABLES[table][short].dtype)
        assert column.shape == (1,)
    assert sink.take() == {}


def test_a_row_with_other_columns_is_refused() -> None:
    with pytest.raises(KeyError, match=r"differs from its schema in \['agent', 'colour'"):
        Rows().add(
            "evaluation",
            after_round=1,
            task="",
            episode=0,
            score=0,
            length=1,
            seconds=0,
            colour="red",
        )


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Krull", "Krull"),
        ("x" * 80, "x" * 64),
        ("é" * 40, "é" * 32),
        ("x" + "é" * 40, "x" + "é" * 31),
    ],
)
def test_long_texts_are_clipped_between_characters(text: str, kept: str) -> None:
    rows = Rows()
    rows.add(
        "evaluation", agent=0, after_round=1, task=text, episode=0, score=0.0, length=1, seconds=0.0
    )
    assert rows.take()["evaluation/task"][0].decode() == kept
