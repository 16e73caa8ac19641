import json
import tomllib
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, asdict, fields
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from canal_mpi.commands import parse_assignment
from canal_mpi.config import (
    build,
    checked,
    find_job,
    from_toml,
    get,
    keys,
    named_jobs,
    parse_value,
    read_toml,
    resolve,
    to_toml,
    with_tasks,
)
from canal_mpi.errors import UsageError
from canal_mpi.games import TEN_GAMES
from canal_mpi.settings import EXPANSIONS, PRESETS, Job, LearnConfig

SHIPPED = sorted(path.stem for path in (Path(__file__).parent.parent / "jobs").glob("*.toml"))
SOURCES = ("default", "preset", "job", "environment", "flag")  # each wins over those before it


def made(flags: Mapping[str, Any] | None = None, **environ: str) -> Job:
    return resolve(dict(flags or {}), environ=environ)


def job_file(folder: Path, text: str, name: str = "mine.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def refusal(flags: Mapping[str, Any] | None = None, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        made(flags, **environ)
    return str(caught.value)


def from_sources(used: tuple[str, ...], folder: Path) -> Job:
    flags: dict[str, Any] = {"preset": "canal"} if "preset" in used else {}
    flags |= {"learn.lr": 0.004} if "flag" in used else {}
    environ = {"CANAL_LEARN_LR": "0.003"} if "environment" in used else {}
    path = job_file(folder, "[learn]\nlr = 0.002\n") if "job" in used else None
    return resolve(flags, path, environ)


@pytest.mark.parametrize("used", [*combinations(SOURCES, 1), *combinations(SOURCES, 2), SOURCES])
def test_a_flag_wins_over_environment_job_file_preset_and_default(
    used: tuple[str, ...], tmp_path: Path
) -> None:
    values = dict(zip(SOURCES, (5e-4, 1e-5, 0.002, 0.003, 0.004), strict=True))
    assert from_sources(used, tmp_path).learn.lr == values[used[-1]]


def test_sources_add_up_key_by_key(tmp_path: Path) -> None:
    path = job_file(tmp_path, 'preset = "canal"\n[learn]\nbatch_size = 16\nn_step = 2\n')
    job = resolve({"seed": 9}, path, {"CANAL_LEARN_BATCH_SIZE": "32"})
    assert (job.seed, job.learn.batch_size, job.learn.n_step, job.learn.loss) == (9, 32, 2, "mse")
    assert job.train == Job().train


def test_the_preset_follows_the_same_precedence(tmp_path: Path) -> None:
    path = job_file(tmp_path, 'preset = "canal"\n')
    assert resolve({}, path, {}).learn.loss == "mse"
    assert resolve({"preset": ""}, path, {}).learn.loss == "huber"
    assert made({}, CANAL_PRESET="canal").learn.loss == "mse"
    assert resolve({"preset": "canal"}, None, {"CANAL_PRESET": ""}).preset == "canal"


def test_without_any_source_the_job_is_the_default() -> None:
    assert made() == Job()


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANAL_SEED", "77")
    assert resolve().seed == 77
    assert resolve(environ={}).seed == 1


def test_other_environment_variables_are_left_alone() -> None:
    assert made({}, PATH="/bin", CANALX="1", canal_seed="5", MY_CANAL_SEED="5") == Job()


def test_every_setting_has_an_environment_variable_of_its_own() -> None:
    names = {key.replace(".", "_").upper() for key in keys()}
    assert len(names) == len(keys())
    for key in keys():
        text = json.dumps(get(Job(), key))
        assert made({}, **{f"CANAL_{key.replace('.', '_').upper()}": text}) == Job()


def test_environment_variables_are_read_as_what_the_setting_is() -> None:
    cases: list[tuple[str, str, str, Any]] = [
        ("CANAL_SEED", "12", "seed", 12),
        ("CANAL_TIMEOUT", "60", "timeout", 60.0),
        ("CANAL_LEARN_LR", "1e-3", "learn.lr", 1e-3),
        ("CANAL_LEARN_DOUBLE", "false", "learn.double", False),
        ("CANAL_LEARN_LOSS", "mse", "learn.loss", "mse"),
        ("CANAL_LEARN_WIDTHS", "64,32", "learn.widths", (64, 32)),
        ("CANAL_LEARN_WIDTHS", "[64, 32]", "learn.widths", (64, 32)),
        ("CANAL_LEARN_WIDTHS", "64", "learn.widths", (64,)),
        ("CANAL_TASKS", "Krull, Alien", "tasks", ("Krull", "Alien")),
        ("CANAL_TASKS", '["Krull"]', "tasks", ("Krull",)),
    ]
    for variable, text, key, value in cases:
        found = get(made({}, **{variable: text}), key)
        assert found == value
        assert type(found) is type(value)


def test_an_unknown_environment_variable_suggests_the_closest() -> None:
    assert refusal({}, CANAL_LERN_LR="1") == (
        "unknown environment variable CANAL_LERN_LR; did you mean 'CANAL_LEARN_LR'?"
    )
    assert refusal({}, CANAL_="1").startswith("unknown environment variable CANAL_")


def test_a_wrong_value_in_the_environment_is_refused() -> None:
    assert refusal({}, CANAL_SEED="many") == "seed = 'many': expected a whole number."


def test_the_variant_stands_for_frame_skip_and_no_ops() -> None:
    orig, fs4 = made({"task.variant": "orig"}).task, made({"task.variant": "fs4"}).task
    assert (orig.frame_skip, orig.noop_max) == (1, 0)
    assert (fs4.frame_skip, fs4.noop_max) == (4, 30)
    assert fs4 == Job().task


def test_a_setting_beside_the_variant_wins_whatever_comes_first() -> None:
    for flags in (
        {"task.variant": "orig", "task.frame_skip": 2},
        {"task.frame_skip": 2, "task.variant": "orig"},
    ):
        task = made(flags).task
        assert (task.frame_skip, task.noop_max) == (2, 0)


def test_a_variant_counts_where_it_is_written(tmp_path: Path) -> None:
    path = job_file(tmp_path, '[task]\nvariant = "orig"\nframe_skip = 2\n')
    assert resolve({}, path, {}).task.frame_skip == 2
    assert resolve({}, path, {"CANAL_TASK_FRAME_SKIP": "3"}).task.frame_skip == 3
    assert resolve({"task.variant": "fs4"}, path, {}).task.frame_skip == 4
    assert resolve({}, path, {"CANAL_TASK_VARIANT": "orig"}).task.frame_skip == 1


def test_pixels_bring_their_network_and_a_smaller_replay() -> None:
    job = made({"task.obs": "pixels"})
    assert (job.learn.network, job.replay.buffer_size) == ("cnn", 10_000)
    assert made({"task.obs": "pixels", "learn.network": "mlp"}).learn.network == "mlp"


def test_presets_and_expansions_hold_known_settings_only() -> None:
    for layer in (*PRESETS.values(), *EXPANSIONS.values()):
        assert {key: checked(key, value) for key, value in layer.items()} == layer
    for key, value in EXPANSIONS:
        assert checked(key, value) == value


def test_the_preset_canal_has_exactly_the_learner_of_the_original() -> None:
    job = made({"preset": "canal"})
    assert asdict(job.learn) == {
        "algorithm": "dqn",
        "network": "mlp",
        "widths": (128, 128),
        "lr": 1e-5,
        "lr_decay_fraction": 0.0,
        "gamma": 0.99,
        "batch_size": 128,
        "updates_per_step": 1.0,
        "learning_starts": 128,
        "layer_norm": False,
        "heads": "shared",
        "double": False,
        "target_update_interval": 0,
        "loss": "mse",
        "n_step": 1,
        "reward": "none",
        "max_grad_norm": 0.0,
        "terminal_on_life_loss": False,
        "input": "raw",
        "device": "cpu",
        "threads": 1,
    }
    assert asdict(job.explore) == {"eps_start": 1.0, "eps_end": 0.01, "eps_decay": 30000.0}
    assert job.evaluation.episodes == 20
    assert (job.rehearsal.ratio, job.rehearsal.distill_coef, job.rehearsal.ewc_lambda) == (
        0.0,
        0.0,
        0.0,
    )
    assert (job.reuse.mode, job.reuse.network) == ("replay", False)
    assert job.row_exchange.save_interval == 0
    assert (job.task.obs, job.tasks, job.order) == ("ram", TEN_GAMES, "canal")
    assert (job.share.policy, job.share.topology) == ("exact", "full")


def test_the_preset_canal_does_not_hang_on_the_defaults() -> None:
    named = {f"learn.{part.name}" for part in fields(LearnConfig)}
    left = named - set(PRESETS["canal"])
    assert left == {
        f"learn.{name}" for name in ("algorithm", "network", "widths", "device", "threads")
    }


def test_assignments_are_split_at_the_first_equals_sign() -> None:
    cases: list[tuple[str, str, Any]] = [
        ("learn.lr=0.001", "learn.lr", 0.001),
        (" learn.lr = 1e-3 ", "learn.lr", 1e-3),
        ("seed=7", "seed", 7),
        ("learn.double=true", "learn.double", True),
        ("learn.loss=mse", "learn.loss", "mse"),
        ('learn.loss="mse"', "learn.loss", "mse"),
        ("learn.widths=[1, 2]", "learn.widths", [1, 2]),
        ("tasks=Krull,Alien", "tasks", "Krull,Alien"),
        ("name=a=b", "name", "a=b"),
        ("name=", "name", ""),
        ("learn.lr=nan", "learn.lr", pytest.approx(float("nan"), nan_ok=True)),
    ]
    for text, key, value in cases:
        assert parse_assignment(text) == (key, value)


def test_an_assignment_without_an_equals_sign_is_refused() -> None:
    for text in ["learn.lr", "", "learn.lr:1"]:
        with pytest.raises(UsageError) as caught:
            parse_assignment(text)
        assert str(caught.value) == (
            f"--set {text}: expected section.key=value, as in learn.lr=0.001."
        )


def test_an_assignment_without_a_key_is_an_unknown_setting() -> None:
    assert refusal(dict([parse_assignment("=1")])).startswith("unknown setting ''")


def test_an_unknown_setting_suggests_the_closest() -> None:
    cases: list[tuple[str, str]] = [
        ("lern.lr", "unknown setting 'lern.lr'; did you mean 'learn.lr'?"),
        ("learn.LR", "unknown setting 'learn.LR'; did you mean 'learn.lr'?"),
        ("sed", "unknown setting 'sed'; did you mean 'seed'?"),
        ("xyzzy", "unknown setting 'xyzzy'; `canal-mpi config` lists them."),
    ]
    for key, message in cases:
        assert refusal({key: 1}) == message


def test_an_unknown_setting_in_a_job_file_is_refused(tmp_path: Path) -> None:
    for text in ("[learn]\nlrr = 1\n", "[lern]\nlr = 1\n", "learn = 1\n", "[seed]\nx = 1\n"):
        with pytest.raises(UsageError, match="unknown setting"):
            resolve({}, job_file(tmp_path, text), {})


def test_a_section_where_a_value_belongs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"learn\.lr = .*: expected a number"):
        resolve({}, job_file(tmp_path, "[learn.lr]\nx = 1\n"), {})


def test_a_value_of_the_wrong_type_is_refused() -> None:
    cases: list[tuple[str, Any, str]] = [
        ("seed", 1.5, "seed = 1.5: expected a whole number."),
        ("seed", True, "seed = True: expected a whole number."),
        ("seed", "1.0", "seed = '1.0': expected a whole number."),
        ("seed", [1], "seed = [1]: expected a whole number."),
        ("learn.lr", "fast", "learn.lr = 'fast': expected a number."),
        ("learn.lr", False, "learn.lr = False: expected a number."),
        ("learn.double", 1, "learn.double = 1: expected true or false."),
        ("learn.double", "yes", "learn.double = 'yes': expected true or false."),
        ("learn.loss", 3, "learn.loss = 3: expected a text."),
        ("name", 3, "name = 3: expected a text."),
        ("tasks", 5, "tasks = 5: expected a text."),
        ("tasks", ["Krull", 5], "tasks = 5: expected a text."),
        ("learn.widths", [64, 0.5], "learn.widths = 0.5: expected a whole number."),
        ("learn.widths", "64,many", "learn.widths = 'many': expected a whole number."),
        ("learn.widths", [True], "learn.widths = True: expected a whole number."),
    ]
    for key, value, message in cases:
        assert refusal({key: value}) == message


def test_whole_numbers_are_taken_for_numbers_and_digits_for_whole_numbers() -> None:
    job = made({"learn.gamma": 1, "seed": "12", "learn.widths": ["8", 9]})
    assert (job.learn.gamma, job.seed, job.learn.widths) == (1.0, 12, (8, 9))
    assert isinstance(job.learn.gamma, float)


def test_a_value_out_of_range_is_refused() -> None:
    cases: list[tuple[str, Any, str]] = [
        ("seed", -1, "seed = -1: expected at least 0."),
        ("seed", "-1", "seed = -1: expected at least 0."),
        ("seed", 2**63, f"seed = {2**63}: expected at most {2**63 - 1}."),
        ("train.steps", 0, "train.steps = 0: expected at least 1."),
        ("learn.gamma", 1.01, "learn.gamma = 1.01: expected at most 1."),
        ("learn.gamma", -0.1, "learn.gamma = -0.1: expected at least 0."),
        ("learn.widths", [64, 0], "learn.widths = 0: expected at least 1."),
        ("learn.widths", [64, 16385], "learn.widths = 16385: expected at most 16384."),
        ("share.rows", 2, "share.rows = 2: expected at least 3."),
        ("share.nearest", 0, "share.nearest = 0: expected at least 1."),
        ("rehearsal.ratio", 1.5, "rehearsal.ratio = 1.5: expected at most 0.99."),
        ("rehearsal.rows", -1, "rehearsal.rows = -1: expected at least 0."),
        ("reuse.lesson_fraction", 1.5, "reuse.lesson_fraction = 1.5: expected at most 1."),
        ("row_exchange.load_interval", 0, "row_exchange.load_interval = 0: expected at least 1."),
        ("timeout", 0, "timeout = 0.0: expected at least 1."),
        ("learn.lr", float("nan"), "learn.lr = nan: expected a finite number."),
        ("learn.lr", float("inf"), "learn.lr = inf: expected a finite number."),
        ("explore.eps_decay", float("inf"), "explore.eps_decay = inf: expected a finite number."),
        ("timeout", float("-inf"), "timeout = -inf: expected a finite number."),
    ]
    for key, value, message in cases:
        assert refusal({key: value}) == message


def test_the_ends_of_every_range_are_inside() -> None:
    for key, (part, _) in keys().items():
        for end in (part.metadata["low"], part.metadata["high"]):
            if end is not None:
                checked(key, [end] if key == "learn.widths" else end)


def test_nan_and_infinity_are_refused_from_the_environment() -> None:
    for text in ["nan", "inf", "-inf", "+nan"]:
        assert "expected a finite number" in refusal({}, CANAL_LEARN_LR=text)


def test_an_unknown_name_suggests_the_closest() -> None:
    cases: list[tuple[str, str, str]] = [
        ("preset", "cannal", "canal"),
        ("task.obs", "pixel", "pixels"),
        ("task.variant", "origin", "orig"),
        ("learn.loss", "hubber", "huber"),
        ("learn.algorithm", "dqnn", "dqn"),
        ("learn.network", "mpl", "mlp"),
        ("learn.device", "cud", "cuda"),
        ("learn.heads", "per_tsk", "per_task"),
        ("learn.reward", "clipp", "clip"),
        ("reuse.mode", "distil", "distill"),
        ("simnet.distance", "weight", "weights"),
        ("evaluation.tasks", "finl", "final"),
        ("share.policy", "exct", "exact"),
        ("share.topology", "rign", "ring"),
        ("order", "rotat", "rotate"),
    ]
    for key, value, meant in cases:
        message = refusal({key: value})
        assert message.startswith("unknown ")
        assert f"'{value}'; did you mean '{meant}'? known: " in message


def test_names_from_outside_are_accepted_where_the_settings_say_so() -> None:
    for key in ("order", "learn.algorithm", "learn.network", "share.policy", "share.topology"):
        assert get(made({key: "my.module:thing"}), key) == "my.module:thing"


def test_names_from_outside_are_refused_elsewhere() -> None:
    cases: list[str] = [
        *("preset", "task.obs", "task.variant", "learn.loss", "learn.heads", "learn.reward"),
        *("reuse.mode", "simnet.distance", "evaluation.tasks"),
    ]
    for key in cases:
        assert refusal({key: "my.module:thing"}).startswith("unknown ")


def test_a_topology_may_be_a_file() -> None:
    for name in ("my/edges.txt", "random:3", "hosts", "torus", "my_module:graph"):
        assert made({"share.topology": name}).share.topology == name
    for name in ("random", "random:x", "random:0"):
        with pytest.raises(UsageError, match=f"topology '{name}': expected .* as in random:3"):
            made({"share.topology": name})


def test_settings_that_contradict_each_other_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tasks": []}, "tasks = []: expected at least one name, and none twice"),
        ({"tasks": "Krull,Krull"}, "tasks = ['Krull', 'Krull']: expected at least one name"),
        (
            {"tasks": "Krull,Alien", "train.rounds": 3},
            "train.rounds = 3, but the job has 2 tasks.",
        ),
        (
            {"replay.buffer_size": 31},
            "replay.buffer_size = 31: expected at least 32, a batch and learn.n_step steps of "
            "each environment.",
        ),
        ({"learn.lr": 0}, "learn.lr = 0.0: expected at least 1e-300."),
    ]
    for flags, message in cases:
        assert refusal(flags).startswith(message)


def test_a_task_without_a_name_is_refused() -> None:
    for tasks in ["", " ", "Krull,", ",Krull", [""]]:
        assert "task" in refusal({"tasks": tasks})


def test_as_many_rounds_as_tasks_are_possible() -> None:
    assert made({"tasks": "Krull,Alien", "train.rounds": 2}).train.rounds == 2


def test_other_tasks_are_checked_like_the_first() -> None:
    assert with_tasks(made(), ["Krull"]).tasks == ("Krull",)
    with pytest.raises(UsageError, match="none twice"):
        with_tasks(made(), ["Krull", "Krull"])


def test_a_whole_number_with_two_signs_is_refused() -> None:
    for text in ["--5", "---1"]:
        assert "expected a whole number" in refusal({"train.steps": text})


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_with_too_many_digits_is_refused(digits: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        made(dict([parse_assignment("learn.lr=" + "9" * digits)]))
    with pytest.raises(UsageError):
        resolve({}, job_file(tmp_path, "seed = " + "9" * digits), {})


def test_what_is_no_toml_value_is_plain_text() -> None:
    for text, value in [
        ("1", 1),
        ("1.5", 1.5),
        ("true", True),
        ('"a"', "a"),
        ("a b", "a b"),
        ("[1", "[1"),
        ("", ""),
    ]:
        assert parse_value(text) == value


def test_nothing_of_a_value_is_dropped() -> None:
    assert parse_value("1\nother = 2") != 1


def test_shipped_jobs_are_found_by_name() -> None:
    assert sorted(named_jobs()) == SHIPPED
    assert {"canal", "quick", "smoke"} <= set(SHIPPED)
    assert find_job("quick").name == "quick.toml"


def test_a_job_bears_the_name_of_its_file_unless_it_says_otherwise(tmp_path: Path) -> None:
    assert resolve({}, "quick", {}).name == "quick"
    assert resolve({}, job_file(tmp_path, ""), {}).name == "mine"
    assert resolve({}, job_file(tmp_path, 'name = "other"'), {}).name == "other"
    assert resolve({"name": "third"}, job_file(tmp_path, 'name = "other"'), {}).name == "third"


def test_an_unknown_job_suggests_the_closest() -> None:
    with pytest.raises(UsageError) as caught:
        find_job("quik")
    assert str(caught.value).startswith("unknown job 'quik'; did you mean 'quick'? known: canal, ")
    assert str(caught.value).endswith(", or path/to/my.toml.")


def test_a_job_like_no_other_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown job 'xyzzy'; known: canal, "):
        resolve({}, "xyzzy", {})


def test_a_job_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path / "missing.toml"), str(tmp_path / "missing"), "missing.toml"):
        with pytest.raises(UsageError) as caught:
            resolve({}, name, {})
        assert str(caught.value) == f"job file {name} does not exist."


def test_a_file_that_is_not_toml_is_refused_by_name_and_line(tmp_path: Path) -> None:
    path = job_file(tmp_path, "seed = 1\nlearn lr 3\n")
    with pytest.raises(UsageError, match=rf"{path} is not TOML: .*line 2"):
        resolve({}, path, {})


def test_a_job_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "noise.toml"
    path.write_bytes(b"seed = 1\xff")
    with pytest.raises(UsageError, match="is not TOML"):
        resolve({}, str(path), {})


def test_a_setting_written_twice_in_a_file_is_not_toml() -> None:
    with pytest.raises(UsageError, match="it is not TOML"):
        read_toml(b"seed = 1\nseed = 2\n", "it")


def test_dotted_keys_and_sections_are_the_same() -> None:
    assert read_toml(b"learn.lr = 1\nseed = 2", "it") == {"learn.lr": 1, "seed": 2}
    assert read_toml(b"seed = 2\n[learn]\nlr = 1", "it") == {"learn.lr": 1, "seed": 2}


def jobs() -> list[Job]:
    odd = {
        "name": 'quoted "name" \\ with\ttab, Straße 🎮',
        "seed": 2**63 - 1,
        "learn.lr": 1e-300,
        "learn.widths": [],
        "timeout": 1e6,
        "explore.eps_decay": 1e16,
        "tasks": ["CartPole-v1"],
    }
    return [Job(), made({"preset": "canal"}), made(odd), made({"task.obs": "pixels"})] + [
        resolve({}, name, {}) for name in SHIPPED
    ]


def test_a_job_written_as_toml_is_the_same_job_again() -> None:
    for explain in [False, True]:
        for job in jobs():
            text = to_toml(job, explain)
            assert from_toml(text) == job
            assert to_toml(from_toml(text)) == to_toml(job)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_job_written_to_a_file_resolves_to_itself(name: str, tmp_path: Path) -> None:
    job = resolve({}, name, {})
    assert resolve({}, job_file(tmp_path, to_toml(job)), {}) == job


def test_a_name_with_a_delete_character_survives_toml() -> None:
    job = made({"name": "a\x7fb"})
    assert from_toml(to_toml(job)) == job


def test_written_jobs_hold_every_setting_and_can_explain_them() -> None:
    layer = read_toml(to_toml(Job()).encode(), "it")
    assert list(layer) == list(keys())
    explained = to_toml(Job(), explain=True)
    assert "# discount of the next step" in explained
    assert tomllib.loads(explained) == tomllib.loads(to_toml(Job()))


def test_a_written_job_is_checked_when_it_is_read() -> None:
    with pytest.raises(UsageError, match="unknown setting"):
        from_toml("sed = 1")
    with pytest.raises(UsageError, match="expected at most 1"):
        from_toml("[learn]\ngamma = 2")
    with pytest.raises(UsageError, match="job is not TOML"):
        from_toml("[")


def test_every_setting_is_documented_and_its_default_is_valid() -> None:
    for key, (part, _) in keys().items():
        assert part.metadata["about"]
        assert checked(key, part.default) == part.default


def test_a_job_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Job().seed = 2  # type: ignore[misc]


def test_a_job_is_built_from_dotted_keys() -> None:
    job = build({"seed": 3, "learn.lr": 0.1, "train.steps": 5})
    assert (job.seed, job.learn.lr, job.train.steps) == (3, 0.1, 5)
    assert job.explore == Job().explore
