"""Evaluating checkpoints again, alone and spread over ranks."""

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from launch import Result, mpirun, run

from canal_mpi.envs.gym import GymGame
from canal_mpi.errors import DamagedData, UsageError
from canal_mpi.evaluation import job_of, load_policy, spread
from canal_mpi.interfaces import Columns
from canal_mpi.results.files import read_arrays, write_arrays
from canal_mpi.results.reader import load
from canal_mpi.settings import TaskConfig


def alone(*arguments: str) -> Result:
    return run(["canal-mpi", "evaluate", *arguments], timeout=300)


def episodes(folder: Path) -> Columns:
    (path,) = folder.glob("*[0-9][0-9].h5")
    with h5py.File(path) as file:
        assert file["episodes/return"].attrs["unit"] == "game points"
        return {name: column[()] for name, column in file["episodes"].items()}


@pytest.mark.mpi
def test_the_scores_are_the_same_on_any_number_of_ranks(trained: Path, tmp_path: Path) -> None:
    flags = (str(trained), "--episodes", "2", "--max-steps", "30")
    one = alone(*flags, "--out", str(tmp_path / "one"))
    assert one.code == 0, one.err
    assert one.out.count("CartPole-v1") == 2
    two = mpirun(2, "evaluate", *flags, "--out", str(tmp_path / "two"), timeout=300)
    assert two.code == 0, two.err
    a, b = episodes(tmp_path / "one"), episodes(tmp_path / "two")
    assert len(a["agent"]) == 2 * 3 * 2
    for name in a:
        assert np.array_equal(a[name], b[name]), name


@pytest.mark.mpi
def test_one_pair_can_be_chosen_and_its_steps_saved(trained: Path, tmp_path: Path) -> None:
    flags = ("--agent", "1", "--task", "Acrobot-v1", "--episodes", "2", "--max-steps", "20")
    found = alone(str(trained), *flags, "--save-steps", "--out", str(tmp_path))
    assert found.code == 0, found.err
    assert set(episodes(tmp_path)["agent"]) == {1}
    (steps,) = tmp_path.glob("*Acrobot*.h5")
    kept = read_arrays(steps)
    assert len(kept["action"]) == int(episodes(tmp_path)["length"].sum()) == 40
    assert kept["episode"].tolist() == [0] * 20 + [1] * 20


@pytest.mark.mpi
def test_a_wrong_wish_is_one_line_and_code_2(trained: Path) -> None:
    for flags, words in (
        (("--agent", "7"), f"unknown agent of {trained} '7'; known: 0, 1."),
        (("--task", "CartPole"), "'CartPole'; did you mean 'CartPole-v1'? known: Acrobot-v1, Cart"),
    ):
        found = alone(str(trained), *flags)
        assert found.code == 2
        assert len(found.complaints) == 1
        assert words in found.complaints[0]


@pytest.mark.mpi
def test_a_policy_acts_and_refuses_what_it_does_not_know(trained: Path, tmp_path: Path) -> None:
    run_ = load(trained)
    policy = run_.policy(agent=1)
    assert policy.act("CartPole-v1", np.zeros(4)) in range(policy.spaces.actions)
    with pytest.raises(UsageError, match="unknown task of the run 'Krull'; known: "):
        policy.act("Krull", np.zeros(4))
    with pytest.raises(UsageError, match=r"unknown agent of .* '5'; known: 0, 1\."):
        load_policy(run_, 5)
    run_.attributes["job"] = run_.attributes["job"].replace("CartPole-v1", "evil:CartPole-v1")
    with pytest.raises(UsageError, match="wants to import evil:CartPole-v1"):
        job_of(run_, trust=False)
    assert job_of(run_, trust=True).tasks[0] == "evil:CartPole-v1"


@pytest.mark.mpi
def test_a_checkpoint_that_does_not_fit_is_refused(trained: Path, out: Path) -> None:
    shutil.copytree(trained, out)
    path = out / "checkpoints" / "agent-0" / "learner.h5"
    arrays = read_arrays(path)
    odd = next(name for name in arrays if name.startswith("blocks/"))
    write_arrays(path, arrays | {odd: np.zeros(3, dtype=np.float32)}, {})
    with pytest.raises(DamagedData, match=r"fit|shape"):
        load_policy(load(out), 0)
    write_arrays(path.with_name("best.h5"), {"x": np.array([np.nan])}, {})
    with pytest.raises(DamagedData, match=r"best\.h5: x holds a number that is not finite"):
        load_policy(load(out), 0, tag="best")
    path.unlink()
    with pytest.raises(UsageError, match="is missing"):
        load_policy(load(out), 0)


@pytest.mark.mpi
@pytest.mark.atari
def test_a_game_is_filmed(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg", reason="imageio-ffmpeg is not installed (extra: video)")
    flags = ("--tasks", "Krull", "--frames", "150", "-q", "--set", "evaluation.max_steps=20")
    out = str(tmp_path / "run")
    assert run(["canal-mpi", "train", *flags, "--out", out], timeout=300).code == 0
    found = alone(out, "--episodes", "1", "--video")
    assert found.code == 0, found.err
    (film,) = (tmp_path / "run" / "evaluations").glob("*.mp4")
    assert film.read_bytes()[4:8] == b"ftyp"
    assert film.stat().st_size > 2000


@pytest.mark.mpi
def test_any_environment_that_renders_is_filmed(trained: Path, tmp_path: Path) -> None:
    for library in ("imageio_ffmpeg", "pygame"):
        pytest.importorskip(library, reason=f"{library} is not installed (extra: video)")
    flags = ("--agent", "0", "--task", "CartPole-v1", "--episodes", "1", "--max-steps", "30")
    plain = alone(str(trained), *flags, "--out", str(tmp_path / "plain"))
    found = alone(str(trained), *flags, "--video", "--out", str(tmp_path))
    assert found.code == 0, found.err
    (film,) = tmp_path.glob("*CartPole*.mp4")
    assert film.read_bytes()[4:8] == b"ftyp" and film.stat().st_size > 2000
    assert plain.out.splitlines()[:2] == found.out.splitlines()[:2], "a camera changes no score"


def test_what_does_not_render_is_not_filmed() -> None:
    game = GymGame("CartPole-v1", TaskConfig(), np.random.SeedSequence(1))
    game.env.metadata = {"render_modes": []}
    with pytest.raises(UsageError, match="'CartPole-v1' can't be filmed: it does not render"):
        game.film()


def test_pairs_go_to_ranks_that_have_the_checkpoint() -> None:
    pairs = [(agent, task) for agent in (0, 1) for task in "abcd"]
    everywhere = spread(pairs, [[0, 1], [0, 1]])
    assert [len(share) for share in everywhere] == [4, 4]
    apart = spread(pairs, [[0], [1]])
    assert apart == [pairs[:4], pairs[4:]]
    with pytest.raises(UsageError, match=r"no rank finds checkpoints/agent-1/learner\.h5"):
        spread(pairs, [[0], [0]])
