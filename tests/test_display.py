"""What people and programs are shown while a run goes on and when it ends."""

import json
import os
import re
import time
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from canal_mpi import config
from canal_mpi.errors import StorageError
from canal_mpi.games import TEN_GAMES
from canal_mpi.interfaces import Progress
from canal_mpi.launcher import Launcher
from canal_mpi.rank import display
from canal_mpi.rank.display import Display, greeting, next_steps, round_words
from canal_mpi.rank.plan import Device, Plan, Workload, core_speed
from canal_mpi.rank.world import World
from canal_mpi.results.checkpoint import Mark
from canal_mpi.results.progress import duration, progress_lines
from canal_mpi.results.status import RunStatus, run_lines
from canal_mpi.results.store import Rows, RunInfo, Store
from canal_mpi.results.summary import Took, percentages, ranges, summary, time_line

TOOK = Took(0.25, 2.0, 0.25)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "terminal", lambda: None)


def view(
    folder: Path, agents: int = 2, verbosity: int = 0, cap: int = 3000, exchange: str = "rounds"
) -> Display:
    world = World(None)
    world.agents, world.heartbeat.timeout = agents, 300.0
    world.heartbeat.progress = [Progress() for _ in range(agents)]
    world.heartbeat.names = [f"rank {agent} on host-{agent}" for agent in range(agents)]
    world.devices = [Device(f"host-{agent}") for agent in range(agents)]
    flags = {"train.steps": 1000, "evaluation.max_steps": cap, "tasks": ["Krull", "CartPole-v1"]}
    job = config.resolve(flags | {"share.exchange": exchange}, environ={})
    plan = Plan(job, folder, "x", 0, [list(job.tasks)] * agents, [])
    return Display(world, plan, filled(folder), verbosity)


def store(folder: Path) -> Store:
    order = ["Krull", "CartPole-v1"]
    info = RunInfo(
        run_id="x",
        seed=1,
        job="",
        tasks=order,
        first_agent=0,
        orders=[order, order[::-1]],
        edges=[],
        versions={},
    )
    return Store(folder / "run.h5", info)


def learnt(rows: Rows, agent: int, round_: int, task: str, donors: str, score: float) -> None:
    rows.add(
        "tasks",
        agent=agent,
        round=round_,
        task=task,
        source="lesson" if donors else "env",
        donors=donors,
        env_steps=0 if donors else 1000,
        probe_steps=0,
        evaluation_steps=0,
        updates=10,
        score=score,
        seconds=1.0,
        cpu_seconds=1.0,
        core_seconds=0.0,
        env_seconds=0.25,
        learn_seconds=0.5,
        pretrain_seconds=0.0,
        probe_seconds=0.0,
        remember_seconds=0.0,
        wait_seconds=0.1,
        evaluate_seconds=0.0,
        exchange_seconds=0.05,
        save_seconds=0.0,
    )


def exchanged(rows: Rows, kind: str, reason: str = "") -> None:
    rows.add(
        "exchange",
        kind=kind,
        round=2,
        donor=0,
        to=1,
        task="Krull",
        rows=100,
        bytes=2_000_000,
        raw_bytes=8_000_000,
        seconds=0.1,
        score=nan,
        kl=nan,
        agreement=nan,
        reason=reason,
        **{"from": 0},
    )


def filled(folder: Path) -> Store:
    kept, rows = store(folder), Rows()
    learnt(rows, 1, 2, "Krull", "0", 1598.0)
    learnt(rows, 1, 1, "CartPole-v1", "", 200.0)
    learnt(rows, 0, 1, "Krull", "", 2665.5)
    learnt(rows, 0, 2, "CartPole-v1", "1", nan)
    exchanged(rows, "offer")
    exchanged(rows, "lesson")
    exchanged(rows, "refusal", "message fails its checksum")
    kept.append(rows.take(), 0)
    return kept


def ending(
    folder: Path,
    *rows: tuple[int, int, str, str, float],
    took: Took = TOOK,
    evaluated: tuple[float, ...] = (),
    **settings: Any,
) -> list[str]:
    """The last words about a run with these tasks, by default those of `filled`."""
    kept, found = store(folder) if rows else filled(folder), Rows()
    for row in rows:
        learnt(found, *row)
    kept.append(found.take(), 0)
    for after_round, score in enumerate(evaluated, 1):
        place: dict[str, Any] = {"agent": 0, "after_round": after_round, "task": "Krull"}
        found.add("evaluation", **place, episode=0, score=score, length=9, seconds=0.0)
    kept.append(found.take(), 0)
    flags = {"train.steps": 1000, "tasks": ["Krull", "CartPole-v1"], "order": "same"}
    named = {name.replace("__", "."): value for name, value in settings.items()}
    kept.info.resumes = named.pop("resumes", 0)
    return summary(config.resolve(flags | named, environ={}), kept, took)


def test_the_ending_tells_scores_of_tasks_and_who_learnt_them_from_whom(tmp_path: Path) -> None:
    lines = ending(tmp_path)
    assert [" ".join(line.split()) for line in lines[1:4]] == [
        "task random human mean of 2 agents HNS learnt by taught to",
        "Krull 1598.0 2665.5 2131.8 ± 533.8 50 % 0 1",
        "CartPole-v1 – – 200.0 – 1 0",
    ]
    said = "better than random play on 1 of 1, clearly on 0 ("
    assert lines[5].startswith(f" 2 tasks, 2 agents: {said}")
    assert "Played 2,000 steps; without sharing it would have been 4,000." in lines[5]


def test_the_ending_counts_what_is_clearly_better_than_random_play(tmp_path: Path) -> None:
    good = ending(tmp_path, (0, 1, "Krull", "", 1700.0), (1, 1, "Krull", "", 1720.0))
    assert " 1 game, 2 agents: better than random play on 1 (" in good[-2]
    assert "without sharing" not in good[-2] and "Played 2,000 steps." in good[-2]
    forgot = ending(tmp_path, (0, 1, "Krull", "", 1700.0), evaluated=(1700.0, 1500.0))
    assert "better than random play on 1 right after learning, on 0 at the end" in forgot[-2]
    alone = ending(tmp_path, (3, 1, "Krull", "", 1700.0))
    assert " 1 game, 1 agent: better than random play on 1.\n" in alone[-2]
    assert alone[1].split()[3] == "score" and "±" not in alone[2]
    assert "waiting" not in alone[-1]
    assert alone[1].index("score") + 5 == alone[2].index("1700.0") + 6


def test_the_ending_compares_only_what_can_be_compared(tmp_path: Path) -> None:
    for lines in (
        ending(tmp_path, evaluation__max_steps=300),
        ending(tmp_path, evaluation__episodes=0),
        ending(tmp_path, (0, 1, "CartPole-v1", "", 200.0)),
    ):
        words = "\n".join(lines[:-1])
        assert "random" not in words and "human" not in words and "%" not in words, words
    krull = ending(tmp_path, (0, 1, "Krull", "", 200.0), evaluation__max_steps=300)
    assert "Evaluation episodes were limited to 300 steps" in krull[-2]
    assert "No scores: evaluation.episodes is 0" in ending(tmp_path, evaluation__episodes=0)[-2]


def test_the_time_adds_up(tmp_path: Path) -> None:
    line = ending(tmp_path)[-1]  # two agents of 2 s in tasks each, in 2.5 s
    assert line == (
        " 2 s: environment 20 % · learning 40 % · exchange 4 % · waiting for agents 8 %"
        " · start and files 20 % · other 8 %"  # the rows leave out a tenth of their tasks
    )
    rows = [(0, 1, "Krull", "", 1.0), (0, 2, "CartPole-v1", "", 1.0), (1, 1, "Krull", "", 1.0)]
    uneven = ending(tmp_path, *rows, took=Took(0, 2, 0))[-1]  # agent 1 waits for agent 0 at the end
    assert "waiting for agents 32 %" in uneven
    table = filled(tmp_path).table("tasks")
    table["core_seconds"][:] = 0.45  # of 0.8 s of work in each task
    crowded = time_line(table, [], Took(0, 2, 0))
    assert "environment 11 % · learning 22 %" in crowded and "for a core 45 %" in crowded
    unknown = ending(tmp_path, took=Took(0, 4, 0))[-1]  # less than half of it was measured
    assert "other 55 %" in unknown
    for words in (line, uneven, crowded, unknown):
        assert sum(map(int, re.findall(r"([0-9]+) %", words))) == 100


def test_after_a_resume_the_time_is_that_of_the_whole_run(tmp_path: Path) -> None:
    again = ending(tmp_path, took=Took(1, 8, 1), resumes=1)[-1]
    assert again.startswith(" 10 s: ") and "starts and lost work 62 %" in again


def test_percentages_add_up_whatever_is_rounded() -> None:
    assert percentages({"a": 1.0, "b": 1.0, "c": 1.0}) == {"a": 34, "b": 33, "c": 33}
    assert percentages({"a": 0.994, "b": 0.006}) == {"a": 99, "b": 1}
    assert sum(percentages({str(k): 1.0 + k for k in range(7)}).values()) == 100


def test_a_run_without_rows_ends_without_a_table(tmp_path: Path) -> None:
    assert len(summary(config.resolve({}, environ={}), store(tmp_path), Took(0, 1, 0))) == 1


def test_agents_in_a_row_are_a_range() -> None:
    assert ranges(np.array([4, 0, 1, 2, 7, 8])) == "0–2 4 7 8"


def test_the_workload_tells_what_is_done_and_how_long_it_takes(tmp_path: Path) -> None:
    job = config.resolve({}, "quick", environ={})
    orders = [list(TEN_GAMES[k:] + TEN_GAMES[:k]) for k in range(5)]
    edges = [(a, b) for a in range(5) for b in range(5) if a != b]
    work = Workload(Plan(job, tmp_path, "x", 0, orders, edges))
    alone = Workload(Plan(job, tmp_path, "x", 0, orders, []))
    assert 100 < work.seconds(2, [1.0] * 5) < 240 < alone.seconds(2, [1.0] * 5)
    assert work.done([Progress() for _ in range(5)]) == 0
    half = [Progress("training", 1, "Krull", -1, 500, 1000) for _ in range(5)]
    assert 0 < work.done(half) < work.done([Progress("exchanging", 3)] * 5) < 1
    assert work.done([Progress("evaluating", 10, step=20, steps=20)] * 5) == pytest.approx(1)


def test_a_run_without_a_job_says_at_the_start_how_long_it_will_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, job = World(Launcher("mpirun", 0, 5)), config.resolve({}, environ={})
    world.size = world.agents = 5
    world.devices, world.host_info = [Device("a")] * 5, [{"host": "a", "cores": "2"}] * 5
    orders, edges = [list(TEN_GAMES)] * 5, [(a, b) for a in range(5) for b in range(5) if a != b]
    told = []
    for speed in (1.0, 0.1):
        monkeypatch.setattr(display, "core_speed", lambda speed=speed: speed)
        (line,) = greeting(world, Plan(job, tmp_path, "x", 0, orders, edges), 27 << 20, 0, 0)
        found = re.search(r"estimated time about ([0-9]+) (min|h)", line)
        assert found, line
        told.append(int(found[1]) * {"min": 1, "h": 60}[found[2]])
    assert 2 <= told[0] <= 60 and told[1] > 5 * told[0]
    assert 0.01 < core_speed() < 100
    job = replace(job, tasks=("Krull", "Pong"), train=replace(job.train, win_return=("Pong=18",)))
    _, line = greeting(world, Plan(job, tmp_path, "x", 0, orders, edges), 0, 0, 0)
    assert line == "Tasks end early at a mean return of Pong=18; none is known for Krull"


def test_the_time_from_pixels_is_estimated_too_and_grows_with_its_updates(tmp_path: Path) -> None:
    found = []
    for flags in ({}, {"learn.batch_size": 64}, {"learn.device": "cuda"}):
        job = config.resolve(flags, "pixels", environ={})
        work = Workload(Plan(job, tmp_path, "x", 0, [["Pong"]], []))
        found.append((work.known, work.seconds(1, [1.0]) / 60))
    assert [known for known, _ in found] == [True, True, False]
    assert 9 < found[0][1] < 18 and 1.7 < found[1][1] / found[0][1] < 2


def test_without_a_terminal_there_is_a_line_now_and_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = view(tmp_path)
    shown.refresh()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(display, "LINE_EVERY", 0.0)
    shown.heartbeat.progress[0] = Progress("training", 1, "Krull", -1, 400, 1000, 400)
    shown.refresh()
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "round 0/2 · 0: Krull 400/1000 · 1: starting" in out
    assert "left" in out
    assert "\x1b" not in out


def test_many_agents_still_fit_on_a_line(tmp_path: Path) -> None:
    assert "and 12 more" in view(tmp_path, agents=20)._summary()


def test_quiet_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = view(tmp_path, verbosity=-1)
    quiet.say("hello")
    quiet.summarise(0.0)
    assert capsys.readouterr().out == ""


def test_odd_numbers_can_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = view(tmp_path)
    shown._terminal = "/dev/null"
    for value in (nan, inf, -inf, 0.0, 1e300):
        for phase in ("training", "exchanging"):
            progress = Progress(phase, 1, "Krull", 1, 5, 1000, 5, value, value, 0.5)
            shown.heartbeat.progress[0] = progress
            shown.refresh()
        assert " agent  host" in capsys.readouterr().out


def test_a_table_on_a_terminal_is_drawn_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = view(tmp_path)
    shown._terminal = "/dev/null"
    shown.heartbeat.progress[1] = Progress("training", 1, "Krull", 0, 5, 1000, 5, 12.5, nan, 0.25)
    shown.refresh()
    first = capsys.readouterr().out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", first)
    assert plain != first, "numbers are in colour"
    assert "━" in plain, "a bar"
    assert "host-1" in plain and "agent 0" in plain
    assert max(map(len, plain.splitlines())) < 100
    assert "\x1b" not in plain
    shown.say("a line that stays")
    erased = f"\x1b[{first.count(chr(10))}A\x1b[J"
    assert capsys.readouterr().out == f"{erased}a line that stays\n"


def test_the_status_is_json_without_nan(tmp_path: Path) -> None:
    shown = view(tmp_path)
    shown.write_status("running")
    status = json.loads((tmp_path / "status.json").read_text(), parse_constant=refuse)
    assert status["status"] == "running"
    assert [agent["host"] for agent in status["agents"]] == ["host-0", "host-1"]
    assert status["agents"][0]["loss"] is None


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def test_the_status_is_json_with_an_infinite_loss(tmp_path: Path) -> None:
    shown = view(tmp_path)
    shown.heartbeat.progress[0].loss = inf
    shown.write_status("running")
    json.loads((tmp_path / "status.json").read_text(), parse_constant=refuse)


def test_the_end_of_a_round_tells_of_lessons_and_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = view(tmp_path)
    shown.round_done(0)
    assert capsys.readouterr().out == ""
    shown.round_done(2)
    out = capsys.readouterr().out
    assert "agent 1 refused a lesson of agent 0: message fails its checksum" in out
    assert "round 2/2: 2 agents learnt from 1 lesson, 2.0 MB packed from 8.0 MB" in out
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["event"], event["round"], event["played"], event["lessons"]) == ("round", 2, 0, 1)


def test_a_round_is_told_in_words_that_make_sense() -> None:
    assert round_words(0, 5, 9, 1_100_000, 13_400_000) == (
        "5 agents learnt from 9 lessons, 1.1 MB packed from 13.4 MB"
    )
    assert round_words(1, 1, 1, 2_100_000, 2_000_000) == (
        "1 agent played, 1 agent learnt from 1 lesson, 2.1 MB"
    )
    assert round_words(5, 0, 0, 0, 0) == "5 agents played"
    assert round_words(6, 3, 3, 12_300, 180_000, tasks=True) == (
        "6 played, 3 learnt from 3 lessons, 12 kB packed from 0.2 MB"
    )


def test_with_the_free_clock_all_tasks_that_are_done_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = view(tmp_path, exchange="free")
    shown.round_done(1)
    assert "4 of 4 tasks: 2 played, 2 learnt from 1 lesson, 2.0 MB" in capsys.readouterr().out


def test_scores_that_come_after_the_last_round_are_in_the_status_and_the_list(
    tmp_path: Path,
) -> None:
    for exchange in ("rounds", "free"):
        folder, rows = tmp_path / exchange, Rows()
        folder.mkdir()
        shown = view(folder, exchange=exchange)
        shown.store.clear()
        for agent, task in ((0, "Krull"), (0, "CartPole-v1"), (1, "Krull")):
            learnt(rows, agent, 1, task, "", nan)
        shown.store.append(rows.take(), 0)
        shown.round_done(1)
        assert shown.facts("running")["mean_hns"] is None
        for agent, score in ((0, 2665.5), (1, 1598.0)):  # a human, and random play
            place: dict[str, Any] = {"agent": agent, "after_round": 2, "task": "Krull"}
            rows.add("evaluation", **place, episode=0, score=score, length=9, seconds=0.0)
        shown.store.append(rows.take(), 0)
        shown.end("finished")
        seen = RunStatus(folder)
        assert seen.facts["mean_hns"] == pytest.approx(0.5)
        (folder / "job.toml").write_text("[evaluation]\nmax_steps = 3000\n")
        (folder / "run.h5").touch()
        assert " 50.0%" in run_lines([RunStatus(folder)])[1]


def test_a_finished_run_is_at_its_last_round_whatever_was_heard_last(tmp_path: Path) -> None:
    shown = view(tmp_path, exchange="free")
    shown.heartbeat.progress[1] = Progress("training", 1, "Krull", -1, 400, 1000)
    shown.end("finished")
    shown.folder.joinpath("run.h5").touch()
    seen = RunStatus(tmp_path)
    assert (seen.round, seen.facts["done"], seen.facts["left"]) == (2, 1.0, 0.0)
    assert [agent["phase"] for agent in seen.agents] == ["done", "done"]


def test_the_age_of_the_last_checkpoint_is_that_of_the_file(tmp_path: Path) -> None:
    shown = view(tmp_path)
    shown.round_done(2)
    assert shown.facts("running")["saved"] is None, "run.h5 is no checkpoint"
    for agent, age in ((0, 100.0), (1, 40.0)):
        file = tmp_path / "checkpoints" / f"agent-{agent}" / Mark(1, 1).file
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (time.time() - age,) * 2)
    lines = progress_lines(shown.facts("running"), time.time())
    assert "checkpoint 1 min 40 s ago" in lines[-1], "all of them would go back to the oldest"


def test_what_to_do_next_names_as_many_agents_as_the_run_had(tmp_path: Path) -> None:
    for agents, edges, words, about in (
        (3, [], "mpirun -np 3 canal-mpi train --job", "(the same with sharing)"),
        (3, [(0, 1)], "mpirun -np 3 canal-mpi train --job", "(without sharing; "),
        (1, [], "mpirun -np 5 canal-mpi train --job", "(five that share)"),
    ):
        world = World(Launcher("mpirun", 0, agents) if agents > 1 else None)
        world.size = world.agents = agents
        world.alive = list(range(agents))
        job = config.resolve({}, environ={})
        plan = Plan(job, tmp_path, "x", 0, [list(job.tasks)] * agents, edges)
        said = next_steps(world, plan, report=True)
        assert words in said and about in said


def test_an_event_that_a_full_disk_does_not_take_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"can't write .*events\.jsonl: No space left"):
        view(tmp_path).event("round", round=1)


def test_a_silent_agent_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = view(tmp_path)
    monkeypatch.setattr(shown.heartbeat, "silent", lambda: [(1, 40.0)])
    shown.refresh()
    shown.refresh()
    out = capsys.readouterr().out
    assert out.count("rank 1 on host-1 has been silent for 40 s in starting") == 1
    assert "the job ends in 260 s" in out


def test_durations_are_for_people() -> None:
    for seconds, words in [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3599.9, "1 h 0 min"),
        (90000, "25 h 0 min"),
        (200000, "2 days"),
    ]:
        assert duration(seconds) == words


def test_columns_of_the_ending_are_those_of_the_schema(tmp_path: Path) -> None:
    tasks = filled(tmp_path).table("tasks")
    assert np.array_equal(np.sort(tasks["agent"]), [0, 0, 1, 1])
