"""The command line: help, the job it makes, and one line for every mistake."""

import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from canal_mpi import __version__, cli
from canal_mpi.entry import main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.cli, list(arguments))


def fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str]:
    """Exit code and what is printed to stderr by the real entry point."""
    monkeypatch.setattr(sys, "argv", ["canal-mpi", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("CANAL_"):
            monkeypatch.delenv(name)


# Help


def test_help_names_the_commands_and_the_exit_codes() -> None:
    for flag in ["-h", "--help"]:
        result = run(flag)
        assert result.exit_code == 0
        for words in ("train", "config", "mpirun -np 5", "Exit codes: 0 done, 1 doctor", "73"):
            assert words in result.output


def test_help_lists_the_commands_in_groups() -> None:
    lines = run("--help").output.splitlines()
    assert lines.index("Run:") < lines.index("Look:")
    assert any(line.startswith("  report ") for line in lines[lines.index("Look:") :])
    assert all(command.get_short_help_str() for command in cli.cli.commands.values())
    listed = [name for names in cli.COMMANDS.values() for name in names]
    assert sorted(listed) == sorted(cli.cli.commands)


def test_every_option_has_a_sentence() -> None:
    for command in ["train", "config"]:
        result = run(command, "--help")
        assert result.exit_code == 0
        for option in cli.cli.commands[command].params:
            assert isinstance(option, click.Option)
            assert option.help
            assert option.help.endswith((".", "…"))
            assert option.opts[-1] in result.output


def test_the_version_is_told() -> None:
    assert run("--version").output == f"canal-mpi, version {__version__}\n"


def test_help_loads_neither_torch_nor_mpi_nor_gymnasium() -> None:
    for arguments in [["--help"], ["train", "--help"], ["config", "--help"]]:
        program = (
            "import sys\nfrom canal_mpi.entry import main\n"
            f"sys.argv = ['canal-mpi', *{arguments!r}]\n"
            "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
            "heavy = {'torch', 'mpi4py', 'gymnasium', 'ale_py', 'h5py', 'numpy'}\n"
            "print('loaded:', sorted(heavy & set(sys.modules)))\n"
        )
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[-1] == "loaded: []", done.stderr


# The job


def test_config_prints_a_job_that_can_be_fed_back(tmp_path: Path) -> None:
    first = run("config", "--seed", "5", "--variant", "orig", "--set", "learn.widths=[64, 32]")
    assert first.exit_code == 0
    (tmp_path / "job.toml").write_text(first.output)
    again = run("config", "--job", str(tmp_path / "job.toml"))
    assert again.output == first.output
    job = tomllib.loads(first.output)
    assert job["seed"] == 5
    assert job["task"]["frame_skip"] == 1
    assert job["learn"]["widths"] == [64, 32]


def test_every_flag_reaches_its_setting() -> None:
    flags = {
        "--seed": ("9", ("seed", 9)),
        "--frames": ("77", ("train.steps", 77)),
        "--tasks": ("Krull,ALE/Alien-v5", ("tasks", ["Krull", "Alien"])),
        "--order": ("rotate", ("order", "rotate")),
        "--share": ("none", ("share.policy", "none")),
        "--topology": ("ring", ("share.topology", "ring")),
        "--obs": ("pixels", ("task.obs", "pixels")),
        "--variant": ("orig", ("task.variant", "orig")),
        "--preset": ("canal", ("preset", "canal")),
    }
    result = run("config", *(word for flag, (value, _) in flags.items() for word in (flag, value)))
    assert result.exit_code == 0, result.output
    job = tomllib.loads(result.output)
    for _, (key, expected) in flags.values():
        section, _, name = key.rpartition(".")
        assert (job[section] if section else job)[name] == expected
    assert job["learn"]["network"] == "cnn"
    assert job["learn"]["loss"] == "mse"


def test_flags_win_over_variables_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my.toml").write_text("seed = 1\n[learn]\nlr = 0.1\nbatch_size = 16\n")
    monkeypatch.setenv("CANAL_SEED", "2")
    monkeypatch.setenv("CANAL_LEARN_LR", "0.2")
    result = run("config", "--job", str(tmp_path / "my.toml"), "--seed", "3")
    job = tomllib.loads(result.output)
    assert (job["seed"], job["learn"]["lr"], job["learn"]["batch_size"]) == (3, 0.2, 16)
    assert job["name"] == "my"


def test_tasks_are_listed() -> None:
    lines = run("config", "--list-tasks").output.splitlines()
    assert {"RoadRunner", "CartPole-v1"} <= set(lines)


# Mistakes


MISTAKES = [
    (["--tasks", "RoadRuner"], "unknown task 'RoadRuner'; did you mean 'RoadRunner'?"),
    (["--set", "learn.lr"], "--set learn.lr: expected section.key=value"),
    (["--set", "learn.lrr=1"], "unknown setting 'learn.lrr'; did you mean 'learn.lr'?"),
    (["--set", "learn.lr=fast"], "learn.lr = 'fast': expected a number"),
    (["--set", "learn.lr=nan"], "expected a finite number"),
    (["--frames", "0"], "train.steps = 0: expected at least 1"),
    (["--job", "quik"], "unknown job 'quik'; did you mean 'quick'?"),
    (["--job", "no/such.toml"], "job file no/such.toml does not exist"),
    (["--obs", "smell"], "unknown value for task.obs 'smell'"),
    (["--preset", "cannal"], "did you mean 'canal'?"),
    (["--topology", "rnig"], "did you mean 'ring'?"),
    (["--order", "canall"], "did you mean 'canal'?"),
    (["--share", "exakt"], "did you mean 'exact'?"),
    (["--tasks", "Krull,Krull"], "and none twice"),
]
MISTAKES_OF_TRAIN = [
    (["--set", "learn.network=plugins:Nothing"], "module 'plugins' has no 'Nothing'"),
    (
        ["--set", "share.policy=sys:maxsize"],
        "expected a function or class, not 9223372036854775807",
    ),
    (["--set", "learn.network=cnn"], "the network 'cnn' needs frames"),
    (["--tasks", "CartPole-v1,Krull", "--order", "same"], "tasks of one job must look alike"),
]


def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases = [("config", *mistake) for mistake in MISTAKES]
    cases += [("train", *mistake) for mistake in MISTAKES + MISTAKES_OF_TRAIN]
    for k, (command, arguments, words) in enumerate(cases):
        out = ["--out", str(tmp_path / str(k))] if command == "train" else []
        code, err = fails(capsys, monkeypatch, command, *arguments, *out)
        assert code == 2, err
        assert err.startswith("canal-mpi: ") and err.count("\n") == 1, err
        assert words in err


def test_a_mistake_in_the_environment_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANAL_SEEED", "1")
    code, err = fails(capsys, monkeypatch, "config")
    assert (code, err.count("\n")) == (2, 1)
    assert "unknown environment variable CANAL_SEEED; did you mean 'CANAL_SEED'?" in err


def test_a_job_that_is_not_toml_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.toml").write_text("seed = = 1")
    code, err = fails(capsys, monkeypatch, "config", "--job", str(tmp_path / "bad.toml"))
    assert (code, err.count("\n")) == (2, 1)
    assert "bad.toml is not TOML" in err


def test_clicks_own_mistakes_have_the_same_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = ["train", "--agent", "99999999999"]
    for arguments in (["--no-such"], ["train", "--agent", "x"], ["no-such"], huge):
        code, err = fails(capsys, monkeypatch, *arguments)
        assert code == 2
        assert "Error" in err


def test_what_a_resumed_run_would_ignore_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored = (["--job", "quick"], ["--out", "x"], ["--name", "x"], ["--agent", "0"])
    for option in (*ignored, ["--emulate", "x"]):
        code, err = fails(capsys, monkeypatch, "train", "--resume", "run", *option)
        assert (code, err.count("\n")) == (2, 1)
        assert f"--resume takes everything from the run: leave out {option[0]}." in err


def test_an_option_of_train_that_is_empty_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for option in ("--resume", "--out", "--name", "--job", "--emulate"):
        code, err = fails(capsys, monkeypatch, "train", option, "")
        assert code == 2 and f"{option} can't be empty." in err


def test_an_output_that_can_not_be_written_is_one_line() -> None:
    for words in ("config", "--help"):
        command = [sys.executable, "-m", "canal_mpi", words]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 74
        assert done.stderr == "canal-mpi: [Errno 28] No space left on device\n"


def test_a_colon_does_not_hide_a_wrong_name() -> None:
    for setting in ["task.obs=x:y", "task.variant=x:y", "learn.loss=x:y", "preset=x:y"]:
        result = run("config", "--set", setting)
        assert result.exit_code != 0


def test_a_mistake_of_ours_is_not_taken_for_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("canal_mpi.launch.doctor.check", breaks)
    code, said = fails(capsys, monkeypatch, "doctor")
    assert code == 70 and "ZeroDivisionError" in said
