"""`canal-mpi bench train` and `learn`: ratios, with much room for a noisy machine."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from canal_mpi.bench import costs
from canal_mpi.bench.tell import Figure, figure_of_ratios, report
from canal_mpi.bench.train import Size, job_of, learn, timed, train
from canal_mpi.cli import cli
from canal_mpi.errors import UsageError
from canal_mpi.learn.products import bare_products
from canal_mpi.membuf.replay import Replay
from canal_mpi.membuf.targets import Recipe
from canal_mpi.tasks.raw import raw_player
from canal_mpi.types import Spaces

RAM = Spaces((128,), "|u1", 18)


def test_a_figure_is_a_median_with_the_middle_half() -> None:
    figure = Figure.of([5.0, 1.0, 2.0, 4.0, 3.0], "µs")
    assert (figure.median, figure.low, figure.high) == (3.0, 1.5, 4.5)
    assert Figure.of([7.0], "MB").low == 7.0
    assert figure_of_ratios([4.0, 9.0], [2.0, 3.0], "×").median == 2.5


def test_a_report_is_lines_for_people_or_json() -> None:
    figures = {"a step": Figure.of([1.0, 2.0, 3.0], "µs")}
    text = report("title", figures, as_json=False)
    assert text.startswith("title\n  a step") and "numpy" in text
    found = json.loads(report("title", figures, as_json=True))
    assert found["figures"]["a step"]["median"] == 2.0
    assert {"cpu", "cores", "python", "torch"} <= found["machine"].keys()


@pytest.mark.atari
def test_training_is_held_against_the_emulator_and_the_products() -> None:
    found = train("Krull", Size(steps=20, repeats=3))
    assert 0.1 < found["training / floor"].median < 1.1
    assert 0.1 < found["that / emulator"].median < 1.1
    steps, frames = (found[f"emulator alone{end}"].median for end in ("", ", frames"))
    assert frames == pytest.approx(4 * steps)


@pytest.mark.atari
def test_an_update_costs_a_few_times_its_products() -> None:
    found = learn("Krull", Size(steps=20, repeats=5))
    assert 1 < found["an update"].median < 8
    assert found["drawing a batch"].median < found["learning from it"].median


@pytest.mark.atari
def test_the_command_prints_json() -> None:
    words = ["bench", "learn", "--game", "Krull", "--steps", "5", "--repeats", "2", "--json"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["figures"]["an update"]["unit"] == "× its products"


def test_the_floor_needs_an_emulator() -> None:
    with pytest.raises(UsageError, match="--game CartPole-v1: expected an Atari game"):
        job_of("CartPole-v1", 1)


@pytest.mark.parametrize(
    ("changes", "passes"),
    [({}, 3), ({"double": False}, 2), ({"target_every": 0}, 2)],
)
def test_the_products_are_those_that_the_loss_needs(
    changes: dict[str, Any], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from canal_mpi.job import LearnConfig

    shapes = []
    real = torch.mm

    def counted(a: Any, b: Any, out: Any) -> Any:
        shapes.append((*a.shape, b.shape[1]))
        return real(a, b, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    bare_products(RAM, LearnConfig(**changes))()
    assert len(shapes) == 3 * passes + 5
    assert shapes.count((128, 128, 18)) == passes
    assert shapes[-1] == (128, 128, 128)


@pytest.mark.atari
def test_raw_play_is_the_emulator_alone() -> None:
    play = raw_player("Krull", 4)
    assert timed(play, 20) > timed(lambda: None, 20)


def test_a_full_replay_of_ram_fits_into_its_memory() -> None:
    assert Replay(RAM, 1_000_000, Recipe(128, 0.99, 3)).nbytes < 150e6


def test_logging_a_step_is_cheap() -> None:
    assert costs.logging(steps=2000, repeats=3)["logging, HDF5 included"].median < 50


@pytest.mark.atari
def test_growth_tells_of_memory_and_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MANY", 20_000)
    monkeypatch.setattr(costs, "FEW", 1_000)
    found = costs.growth("Krull", repeats=2, steps=5)
    assert 0.2 < found["a step with so many rows"].median < 5
    assert Path("/proc/self/statm").exists() and costs.resident() > 1 << 20
