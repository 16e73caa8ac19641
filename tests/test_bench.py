"""`canal-mpi bench`, and that benchmarks/ runs."""

import json
import pickle  # only here: lessons are compared with what it makes of their rows
import re
import sys

import numpy as np
import pytest
from helpers import learning
from launch import ROOT, run

from canal_mpi import config, envs
from canal_mpi.bench import figure, lines
from canal_mpi.interfaces import LAST, TERMINATED, Array, Spaces
from canal_mpi.membuf.lesson import pack
from canal_mpi.membuf.replay import Replay
from canal_mpi.settings import LearnConfig

sys.path.insert(0, str(ROOT / "benchmarks"))

from measuring import Figure, played, products, ratios

RAM = Spaces((128,), "|u1", 18)


def test_a_figure_is_a_median_with_the_middle_half() -> None:
    found = figure(np.array([5.0, 1.0, 2.0, 4.0, 3.0]), "µs")
    assert found == {"median": 3.0, "low": 2.0, "high": 4.0, "unit": "µs"}
    assert Figure.of([7.0], "MB").low == 7.0
    assert ratios([4.0, 9.0], [2.0, 3.0], "×").median == 2.5


@pytest.mark.slow
@pytest.mark.atari
@pytest.mark.mpi
def test_the_command_measures_this_machine(mpi: str) -> None:
    words = ["canal-mpi", "bench", "--task", "Krull", "--blocks", "4"]
    result = run([*words, "--json"], mpi)
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["task"] == "Krull"
    assert {"cpu", "cores", "load", "canal-mpi"} == found["machine"].keys()
    medians = {name: row["median"] for name, row in found["figures"].items()}
    assert 0 < medians["training"] < medians["environment"]
    assert medians["update"] > 0


def test_figures_are_lines_for_people() -> None:
    figures = {"update": figure(np.array([1.0, 2.0, 3.0]), "µs")}
    about, line = lines({"task": "Krull", "machine": {"cores": "2"}, "figures": figures})
    assert about.startswith("Krull · cores 2 · median")
    assert line.split() == ["update", "2", "µs", "(1.5", "–", "2.5)"]


def test_the_products_are_those_that_the_loss_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, dot = list[tuple[int, ...]](), np.dot

    def counted(a: Array, b: Array) -> Array:
        shapes.append((*a.shape, b.shape[1]))
        found: Array = dot(a, b)
        return found

    monkeypatch.setattr(np, "dot", counted)
    configs = (
        (LearnConfig(batch_size=128), 3),
        (LearnConfig(batch_size=128, double=False), 2),
        (LearnConfig(batch_size=128, target_update_interval=0), 2),
    )
    for learn, passes in configs:
        shapes.clear()
        products(RAM, learn)()
        assert len(shapes) == 3 * passes + 5
        assert shapes.count((128, 128, 18)) == passes + 1  # and the gradient of the last layer
        assert shapes[-1] == (128, 128, 128)


@pytest.mark.atari
def test_a_lesson_is_at_most_a_twentieth_of_pickled_tuples() -> None:
    job = envs.named(config.resolve({"tasks": ["Krull"]}))
    rows = played(job, 3000).own.export()
    state, action, reward, flags = (rows[n] for n in ("state", "action", "reward", "flags"))
    tuples = [
        (state[k].copy(), np.int64(action[k]), float(reward[k]), state[k + 1].copy(), bool(ended))
        for k, ended in enumerate(flags & TERMINATED)
        if not flags[k] & LAST
    ]
    pickled = len(pickle.dumps(tuples, pickle.HIGHEST_PROTOCOL))
    assert len(pack(0, 1, "Krull", rows, {})) <= pickled / 20


def test_a_full_replay_of_ram_fits_into_its_memory() -> None:
    assert Replay(RAM, 1_000_000, learning(128, 0.99, 3)).nbytes < 150e6


def script(name: str, *words: str, ranks: int = 1) -> str:
    """What a script in benchmarks/ prints."""
    launcher = ["mpirun", "-np", str(ranks)] if ranks > 1 else []
    result = run([*launcher, sys.executable, str(ROOT / "benchmarks" / name), *words])
    assert result.code == 0, result.err
    return result.out


@pytest.mark.atari
def test_the_benchmarks_of_developers_run() -> None:
    floors = script("floors.py", "--game", "Krull", "--steps", "20", "--repeats", "3")
    found = re.search(r"that / floor +([0-9.]+) of act", floors)
    assert found and 0.05 < float(found[1]) < 1.5
    assert "of pickled tuples" in script("lesson.py", "--game", "Krull", "--steps", "500")
    found = re.search(r"a step, with HDF5 +([0-9.]+) µs", script("costs.py", "logging"))
    assert found and float(found[1]) < 50


@pytest.mark.mpi
def test_the_benchmarks_among_ranks_run() -> None:
    words = ("--task", "CartPole-v1", "--steps", "20", "--repeats", "3")
    env = script("env_server.py", *words, ranks=2)
    found = re.findall(r"(\d) environments? per agent: .* server/local (\d+\.\d\d)", env)
    assert [count for count, _ in found] == ["1", "4"]
    assert env.count("learning while the server plays") == 2
    exchange = script("exchange.py", ranks=3)
    rates = re.findall(r"(\w+), 1000 kB: +([0-9.e+]+) MB/s", exchange)
    assert [name for name, _ in rates] == ["full", "ring", "star", "line"]
    assert all(float(rate) > 0 for _, rate in rates)
