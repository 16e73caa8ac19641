"""What people and programs are shown while a run goes on and when it ends."""

import json
import re
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

from canal_mpi import config
from canal_mpi.interfaces import Progress
from canal_mpi.rank import display
from canal_mpi.rank.display import Display, summary_lines
from canal_mpi.rank.plan import Device, Plan
from canal_mpi.rank.world import World
from canal_mpi.results.progress import duration
from canal_mpi.results.store import Rows, RunInfo, Store


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "terminal", lambda: None)


def view(folder: Path, agents: int = 2, verbosity: int = 0, cap: int = 3000) -> Display:
    world = World(None)
    world.agents, world.heartbeat.timeout = agents, 300.0
    world.heartbeat.progress = [Progress() for _ in range(agents)]
    world.heartbeat.names = [f"rank {agent} on host-{agent}" for agent in range(agents)]
    world.devices = [Device(f"host-{agent}") for agent in range(agents)]
    flags = {"train.steps": 1000, "evaluation.max_steps": cap, "tasks": ["Krull", "CartPole-v1"]}
    job = config.resolve(flags, environ={})
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
        wait_seconds=0.0,
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


def test_the_ending_lists_agents_and_rounds_in_order(tmp_path: Path) -> None:
    lines = summary_lines(filled(tmp_path).table("tasks"), whole_games=True)
    assert [line.split() for line in lines[2:]] == [
        ["0", "1", "Krull", "played", "2665.5", "100.0%"],
        ["0", "2", "CartPole-v1", "from", "agent", "1", "–"],
        ["1", "1", "CartPole-v1", "played", "200.0"],
        ["1", "2", "Krull", "from", "agent", "0", "1598.0", "0.0%"],
    ]
    assert lines[1].split() == ["agent", "round", "task", "source", "score", "HNS"]


def test_the_ending_of_a_run_without_rows_is_only_its_head(tmp_path: Path) -> None:
    assert len(summary_lines(store(tmp_path).table("tasks"), whole_games=True)) == 2


def test_the_ending_says_what_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    view(tmp_path).summarise()
    out = capsys.readouterr().out
    assert "2,000 environment steps played, 2,000 saved by lessons" in out
    assert "1 lesson, 2.00 MB moved" in out
    assert "No human-normalised scores" not in out
    assert "100.0%" in out
    assert "Time of the agents: environment 25.0%, learning 50.0%, exchange 5.0%" in out
    assert "waiting for others 10.0%" in out


def test_the_ending_gives_no_human_normalised_score_of_short_evaluations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view(tmp_path, cap=300).summarise()
    out = capsys.readouterr().out
    assert "No human-normalised scores: evaluation episodes were cut after 300" in out
    assert "%" not in out.partition("Time of the agents")[0]


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
    quiet.summarise()
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
    assert "round 2/2: 0 played, 1 learnt from lessons (2.00 MB, raw 8.00 MB)" in out
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["event"], event["round"], event["played"], event["lessons"]) == ("round", 2, 0, 1)


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
