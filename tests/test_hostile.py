"""Files that were made to harm, for every command that reads files of others: no traceback, no
hang, little memory, and none is accepted silently."""

import io
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from forks import Done, Forks
from launch import SMOKE, environment, run
from madeup import write_run

from canal_mpi.interfaces import Columns
from canal_mpi.results.files import MAGIC, read_arrays, read_attributes, write_arrays, write_hdf5

MEMORY = 200.0  # MB more than the same command takes for an honest run
REFUSED = {2, 65, 74, 78}
Change = Callable[[Any], None]
Craft = Callable[[Path], Any]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    found = Forks(environment("openmpi"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of one agent that is over and can be resumed all the same."""
    out = tmp_path_factory.mktemp("hostile") / "good"
    settings = ("--set", "checkpoint.keep=true", "--set", "evaluation.episodes=0")
    flags = (*SMOKE, "--frames", "60", "-q", *settings, "--out", str(out))
    assert run(["canal-mpi", "train", *flags]).code == 0
    rewrite(out / "run.h5", lambda file: file.attrs.__setitem__("status", "stopped"))
    return out


def rewrite(path: Path, change: Change) -> None:
    """Change a file of ours and give it a right checksum."""
    with h5py.File(io.BytesIO(path.read_bytes()), "r") as old:

        def fill(new: Any) -> None:
            new.attrs.update(dict(old.attrs))
            for name in old:
                old.copy(name, new)
            change(new)

        write_hdf5(path, fill)


# ── what is wrong with a file ──────────────────────────────────────────────────────────────────


def replaced(name: str, **options: Any) -> Change:
    """A change that puts another dataset in the place of one."""

    def change(file: Any) -> None:
        del file[name]
        file.create_dataset(name, **options)

    return change


def linked(name: str, link: Any) -> Change:
    def change(file: Any) -> None:
        del file[name]
        file[name] = link

    return change


def attribute(name: str, value: Any) -> Change:
    return lambda file: file.attrs.__setitem__(name, value)


def virtual(name: str) -> Change:
    def change(file: Any) -> None:
        shape, kind = file[name].shape, file[name].dtype
        del file[name]
        layout = h5py.VirtualLayout(shape, kind)
        layout[:] = h5py.VirtualSource("/etc/hostname", "x", shape)
        file.create_virtual_dataset(name, layout)

    return change


@cache
def half_a_gigabyte() -> bytes:
    pack, zeros = zlib.compressobj(1), bytes(1 << 20)
    return b"".join([*(pack.compress(zeros) for _ in range(512)), pack.flush()])


def bomb(name: str) -> Change:
    """A chunk that unpacks to far more than it says."""

    def change(file: Any) -> None:
        shape, kind = file[name].shape, file[name].dtype
        del file[name]
        data = file.create_dataset(name, shape, kind, chunks=shape, compression="gzip")
        data.id.write_direct_chunk((0,) * len(shape), half_a_gigabyte())

    return change


@cache
def groups() -> h5py.File:
    """Far too many groups, and far too deep ones, to copy from."""
    file = h5py.File(io.BytesIO(), "w")
    group = file.create_group("nested")
    for _ in range(3000):
        group = group.create_group("a")
    group = file.create_group("crowded")
    for k in range(21_000):
        group.create_group(f"{k}")
    return file


def nested(file: Any) -> None:
    groups().copy("nested", file)


def crowded(file: Any) -> None:
    groups().copy("crowded", file)


def many_attributes(file: Any) -> None:
    for k in range(3000):
        file.attrs[f"a{k}"] = "x" * 9000


def repeated_texts(file: Any) -> None:
    """One attribute of many texts."""
    file.attrs.create("texts", ["y" * 60_000] * 1000, dtype=h5py.string_dtype())


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to(target: str) -> Craft:
    def craft(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return craft


def sock(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def sparse(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 40)


def noise(path: Path) -> None:
    path.write_bytes(np.random.default_rng(1).bytes(100_000))


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def foreign(path: Path) -> None:
    path.unlink()
    with h5py.File(path, "w") as file:
        file["x"] = 1


PLACES: dict[str, Craft] = {  # for every kind of file
    "pipe": pipe,
    "folder": folder,
    "endless device": link_to("/dev/zero"),
    "terminal": link_to("/dev/tty"),
    "link to itself": lambda path: link_to(path.name)(path),
    "socket": sock,
    "terabyte": sparse,
    "empty": lambda path: path.write_bytes(b""),
    "noise": noise,
    "our name and noise": lambda path: path.write_bytes(MAGIC + bytes(5000)),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "flipped bit": flipped,
    "HDF5 of others": foreign,
    "checksum of noise": lambda path: path.write_bytes(path.read_bytes()[:512] + b"x" * 99),
}


def crafted(change: Change) -> Craft:
    return lambda path: rewrite(path, change)


GENERAL: dict[str, Change] = {  # whatever the file is, besides what it holds
    "nested groups": nested,
    "crowded": crowded,
    "many attributes": many_attributes,
    "texts without end": repeated_texts,
    "huge attribute": lambda file: file.attrs.create("x", "z" * (20 << 20)),
}


def copied(good: Path, name: str) -> Path:
    there = good.parent / "cases" / name.replace(" ", "-")
    shutil.rmtree(there, ignore_errors=True)
    shutil.copytree(good, there, symlinks=True)
    return there


def check(done: Done, honest: Done, case: str, codes: set[int], words: str = "") -> None:
    """What holds for every case."""
    assert done.code in codes, f"{case}: {done}"
    assert "Traceback" not in done.out + done.err, f"{case}: {done}"
    assert done.mb < honest.mb + MEMORY, f"{case}: {done.mb:.0f} MB, usually {honest.mb:.0f}"
    if done.code:
        assert len(done.complaints) <= 1, f"{case}: {done}"
        assert words in done.out + done.err, f"{case}: {done}"


# ── results ────────────────────────────────────────────────────────────────────────────────────


def huge(file: Any) -> None:
    for name in list(file["train"]):
        replaced(f"train/{name}", shape=(1 << 40,), dtype="<f8", chunks=(1 << 10,))(file)


def value(name: str, number: float | bytes) -> Change:
    def change(file: Any) -> None:
        file[name][0] = number

    return change


RESULTS: dict[str, Change] = GENERAL | {
    "external file": replaced(
        "tasks/score", shape=(6,), dtype="<f8", external=[("/etc/hostname", 0, 48)]
    ),
    "external link": linked("tasks/score", h5py.ExternalLink("/etc/hostname", "/score")),
    "soft link": linked("tasks/score", h5py.SoftLink("/tasks/seconds")),
    "virtual": virtual("tasks/score"),
    "terabytes": huge,
    "12 GiB in 16 KB": replaced(
        "train/loss", shape=(12 << 27,), dtype="<f8", chunks=(1 << 17,), compression="gzip"
    ),
    "bomb in a chunk": bomb("tasks/score"),
    "huge chunk": replaced(
        "tasks/score", shape=(6,), dtype="<f8", chunks=(1 << 28,), maxshape=(None,)
    ),
    "huge texts": replaced("tasks/task", shape=(6,), dtype="S2000000000"),
    "objects": replaced("tasks/task", data=["x"] * 6, dtype=h5py.string_dtype()),
    "compound": replaced("tasks/score", data=np.zeros(6, dtype=[("x", "<i4"), ("y", "<f8")])),
    "other filter": replaced("tasks/updates", data=np.arange(6), chunks=(6,), scaleoffset=2),
    "other type": replaced("tasks/score", data=np.zeros(6, dtype=">f4")),
    "other length": replaced("tasks/score", data=np.zeros(5)),
    "other shape": replaced("evaluation/score", data=np.zeros((1, 2, 3, 4))),
    "many dimensions": replaced("evaluation/score", data=np.zeros((1,) * 30)),
    "unknown agent": value("tasks/agent", 99),
    "unknown task": value("tasks/task", b"../../etc/passwd"),
    "unknown receiver": value("exchange/to", 7),
    "low round": value("tasks/round", -5),
    "high round": value("curve/round", 9),
    "negative steps": value("tasks/env_steps", -1),
    "no column": lambda file: file.__delitem__("tasks/save_seconds"),
    "no topology": lambda file: file.__delitem__("topology"),
    "odd version": attribute("schema_version", "two"),
    "another version": attribute("schema_version", 99),
    "no agents": replaced("agents/order", shape=(0, 3), dtype="S64"),
}
ODD: dict[str, Change] = {  # such a file may be shown: it is as canal-mpi writes it
    "no job": attribute("job", "this is = not [toml"),
    "deep job": attribute("job", "a = " + "[" * 20_000),
    "job of other types": attribute("job", 'train = 3\n[evaluation]\nmax_steps = "many"'),
    "deep keys": attribute("job", "a." * 20_000 + "a = 1\nemulate = 3"),
    "deep versions": attribute("versions", "[" * 50_000),
    "status that commands": attribute("status", "\x1b[2J" * 50),
    "infinite scores": lambda file: file["evaluation/score"].write_direct(
        np.full(file["evaluation/score"].shape, np.inf)
    ),
    "vast returns": lambda file: file["episodes/return"].write_direct(
        np.full(file["episodes/return"].shape, 1.7e308)
    ),
    "unknown columns": lambda file: file.create_dataset(
        "tasks/colour", (1 << 31,), "u1", chunks=(1 << 20,), compression="gzip"
    ),
}


def refused_results(forks: Forks, good: Path, every: bool) -> None:
    """Every third case with one command in turn, or each with every one."""
    shown, told = {0, *REFUSED}, {1}
    commands: list[tuple[set[int], tuple[object, ...]]] = [
        (shown, ("inspect",)),
        (told, ("inspect", "--verify")),
        (REFUSED, ("inspect", "--same-as", good)),
        (REFUSED, ("report",)),
        (REFUSED, ("export", "--to", "csv")),
        (REFUSED, ("evaluate",)),
        (shown, ("watch", "--once")),
    ]
    honest = [forks.run(words[0], good, *words[1:]) for _, words in commands]
    assert [done.code for done in honest] == [0, 0, 0, 0, 0, 2, 0], honest  # it has no network
    crafts = PLACES | {name: crafted(change) for name, change in RESULTS.items()}
    cases = [*crafts.items()]
    for k, (name, craft) in enumerate(cases if every else cases[::3]):
        there = copied(good, name)
        craft(there / "run.h5")
        for n, (codes, words) in enumerate(commands):
            if every or n == k % len(commands):
                done = forks.run(words[0], there, *words[1:], seconds=60)
                named = "run.h5" if codes != shown else ""
                check(done, honest[n], f"{words} of {name}", codes, named)
        shutil.rmtree(there)


@pytest.mark.slow
def test_hostile_results_are_refused(forks: Forks, tmp_path: Path) -> None:
    refused_results(forks, write_run(tmp_path / "good"), every=False)


@pytest.mark.long
def test_hostile_results_are_refused_by_every_command(forks: Forks, tmp_path: Path) -> None:
    refused_results(forks, write_run(tmp_path / "good"), every=True)


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_odd_results_in_a_right_form_are_shown_or_refused(
    every: bool, forks: Forks, tmp_path: Path
) -> None:
    """Each by another command, or by every one."""
    good = write_run(tmp_path / "good")
    commands = [("inspect",), ("report",), ("export", "--to", "csv"), ("evaluate",), ("ls",)]
    honest = [forks.run(words[0], good, *words[1:]) for words in commands]
    for k, (name, change) in enumerate(ODD.items()):
        there = copied(good, name)
        rewrite(there / "run.h5", change)
        for n, (words, usual) in enumerate(zip(commands, honest, strict=True)):
            if every or n == k % len(commands):
                done = forks.run(words[0], there, *words[1:])
                check(done, usual, f"{words} of {name}", {0, *REFUSED})
                assert "\x1b" not in done.out + done.err
        shutil.rmtree(there)


# ── networks ───────────────────────────────────────────────────────────────────────────────────


def first(columns: Columns, prefix: str) -> str:
    return next(name for name in columns if name.startswith(prefix))


@pytest.mark.slow
def test_hostile_networks_are_refused_by_evaluate(forks: Forks, trained: Path) -> None:
    flags = ("--episodes", "1", "--max-steps", "5", "--task", "CartPole-v1")
    honest = forks.run("evaluate", trained, *flags)
    assert honest.code == 0, honest
    name = Path("checkpoints/agent-0/learner.h5")
    good = read_arrays(trained / name)
    block = first(good, "blocks/")
    lies: dict[str, Columns] = {
        "nothing": {},
        "short": good | {block: np.zeros(3, dtype=np.float32)},
        "not finite": good | {block: np.full_like(good[block], np.nan)},
        "texts": good | {block: np.array([b"x"] * len(good[block]))},
    }
    crafts: dict[str, Craft] = PLACES | {
        what: lambda path, arrays=arrays: write_arrays(path, arrays, {})
        for what, arrays in lies.items()
    }
    crafts |= {"nested": crafted(nested), "crowded": crafted(crowded)}  # attributes are not read
    crafts |= {"bomb": crafted(bomb(block)), "virtual": crafted(virtual(block))}
    for what, craft in crafts.items():
        there = copied(trained, what)
        craft(there / name)
        done = forks.run("evaluate", there, *flags, seconds=30)
        check(done, honest, f"evaluate with {what}", REFUSED, "learner.h5")
        shutil.rmtree(there)


# ── checkpoints ────────────────────────────────────────────────────────────────────────────────


def newest(run_: Path) -> Path:
    return sorted(run_.glob("checkpoints/agent-0/round-*"))[-1]


def stated(**facts: Any) -> Craft:
    """A checkpoint that says something else of itself."""

    def craft(path: Path) -> None:
        write_arrays(path, read_arrays(path), read_attributes(path) | facts, pack=False)

    return craft


def state(change: Callable[[Columns], Columns]) -> Craft:
    """A checkpoint with other arrays."""
    return lambda path: write_arrays(path, change(read_arrays(path)), read_attributes(path), False)


def without(prefix: str) -> Craft:
    return state(lambda old: {k: v for k, v in old.items() if not k.startswith(prefix)})


def all_like(prefix: str, make: Callable[[Any], Any]) -> Craft:
    return state(lambda old: {k: make(v) if k.startswith(prefix) else v for k, v in old.items()})


CHECKPOINTS: dict[str, Craft] = {
    "another agent": stated(agent=1),
    "another round": stated(round=99),
    "another save": stated(save=1),
    "another version": stated(version=77),
    "a thousand million agents": stated(agents=10**9),
    "no agents": stated(agents=0),
    "negative agent": stated(first_agent=-5),
    "text for a number": stated(agents="five"),
    "no job": stated(job="this is = not [toml"),
    "deep job": stated(job="a = " + "[" * 20_000),
    "bomb": crafted(bomb("round")),
}
STATES: dict[str, Craft] = {  # found only when the agent takes them up
    "no learner": without("learner/"),
    "no progress": without("round"),
    "short weights": all_like("learner/blocks/", lambda v: v[:3]),
    "weights that are not finite": all_like("learner/blocks/", lambda v: np.full_like(v, np.nan)),
    "texts": all_like("own/", lambda v: np.full(v.shape, b"x")),
    "rows that are no rows": all_like("sink/", lambda v: v[::-1].copy()),
    "half a random stream": all_like("streams/", lambda v: v[:1]),
}


def told_by_resume(forks: Forks, trained: Path, crafts: dict[str, Craft]) -> None:
    honest = forks.run("train", "--resume", copied(trained, "honest"), "-q")
    assert honest.code == 0 and not honest.err, honest
    for what, craft in crafts.items():
        there = copied(trained, what)
        path = newest(there)
        craft(path)
        done = forks.run("train", "--resume", there, "-q")
        codes = REFUSED if what in STATES else {0, *REFUSED}
        check(done, honest, f"resume with {what}", codes, path.name)
        assert path.name in done.err, f"{what}: {done}"
        shutil.rmtree(there)


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_hostile_checkpoints_are_told_by_resume(every: bool, forks: Forks, trained: Path) -> None:
    cases = CHECKPOINTS | STATES | {"pipe": pipe, "noise": noise}
    told_by_resume(forks, trained, cases if every else dict([*cases.items()][::2]))


@pytest.mark.long
def test_checkpoints_that_are_no_files_are_told_by_resume(forks: Forks, trained: Path) -> None:
    general = {name: crafted(change) for name, change in GENERAL.items()}
    told_by_resume(forks, trained, PLACES | general)


def test_resume_tells_of_files_that_are_not_those_of_its_manifest(
    forks: Forks, trained: Path, tmp_path: Path
) -> None:
    there = copied(trained, "exchanged")
    a, b, c = sorted(there.glob("membuf/agent-0/*.h5"))
    arrays = read_arrays(b)
    write_arrays(a, arrays, read_attributes(b))  # whole, but not this one
    b.unlink()
    flipped(c)
    done = forks.run("train", "--resume", there, "-q")
    assert done.code == 0, done
    for path, why in ((a, "not the one that"), (b, "is missing"), (c, "is damaged")):
        assert any(path.name in line and why in line for line in done.complaints), done
    odd = forks.run("inspect", there, "--verify")  # c was of the round that was repeated
    assert odd.code == 1 and all(path.name in odd.out for path in (a, b)), odd
    elsewhere: Change = lambda file: file["files/path"].__setitem__(..., "../../../etc/passwd")  # noqa: E731
    rewrite(there / "run.h5", elsewhere)
    done = forks.run("inspect", there, "--same-as", there)
    assert done.code == 65 and "lists '../../../etc/passwd'" in done.err, done


def test_a_hostile_folder_is_no_run_to_resume(forks: Forks, trained: Path) -> None:
    """Other files of a run: each is replaced, or told."""
    for name in ("run.h5", "status.json", "events.jsonl", "job.toml"):
        for what in ("pipe", "folder", "noise"):
            there = copied(trained, f"{name} as {what}")
            PLACES[what](there / name)
            done = forks.run("train", "--resume", there, "-q", seconds=30)
            assert done.code in {0, *REFUSED} and "Traceback" not in done.out + done.err, done
            if name == "run.h5":
                assert "run.h5" in done.err, done
            shutil.rmtree(there)


# ── lessons ────────────────────────────────────────────────────────────────────────────────────


def lesson(change: Callable[[Columns], Columns]) -> Craft:
    return lambda path: write_arrays(path, change(read_arrays(path)), {})


def with_(name: str, make: Callable[[Any], Any]) -> Craft:
    return lesson(lambda old: old | {name: make(old[name])})


LESSONS: dict[str, Craft] = {
    "no donor": lesson(lambda old: {k: v for k, v in old.items() if k != "donor"}),
    "no rows": lesson(lambda old: old | {k: old[k][:0] for k in ("state", "action")}),
    "flat states": with_("state", lambda v: v.reshape(-1)),
    "states of texts": with_("state", lambda v: np.full(v.shape, b"x")),
    "states that are not finite": with_("state", lambda v: np.full_like(v, np.nan)),
    "vast states": with_("state", lambda v: np.full_like(v, 3e38)),
    "wide states": with_("state", lambda v: np.zeros((len(v), 9999), dtype=v.dtype)),
    "actions out of range": with_("action", lambda v: np.full_like(v, 200)),
    "rewards without end": with_("reward", lambda v: np.full_like(v, np.inf)),
    "unknown flags": with_("flags", lambda v: np.full_like(v, 64)),
    "open end": with_("flags", lambda v: np.zeros_like(v)),
    "text for a score": with_("score", lambda v: np.array([b"high"])),
    "far donor": with_("donor", lambda v: np.array([1 << 40])),
    "round that is no number": with_("round", lambda v: np.array([np.nan])),
    "long task": with_("task", lambda v: np.array([b"\xff" * 5000])),
    "shorter columns": with_("reward", lambda v: v[:2]),
    "network that is not finite": lesson(
        lambda old: old | {first(old, "network/"): np.full(10, np.nan, dtype=np.float32)}
    ),
    "vast network": lesson(
        lambda old: {
            k: np.full_like(v, 3e38) if k.startswith("network/") and v.dtype.kind == "f" else v
            for k, v in old.items()
        }
    ),
    "bomb": crafted(bomb("reward")),
    "virtual": crafted(virtual("reward")),
    "over the limit": with_("state", lambda v: np.zeros((3 << 20, *v.shape[1:]), dtype=v.dtype)),
}


@pytest.mark.slow
def test_hostile_lessons_are_left_out_by_name(forks: Forks, trained: Path, tmp_path: Path) -> None:
    """All in one folder beside a good one: a job that is given them is not harmed."""
    flags = (*SMOKE, "--frames", "40", "-q", "--set", "share.max_message_mb=1")
    honest = forks.run("train", *flags, "--lessons", trained, "--out", tmp_path / "honest")
    assert honest.code == 0, honest
    there, good = copied(trained, "lessons"), sorted(trained.glob("membuf/agent-0/*.h5"))[0]
    crafts = PLACES | LESSONS | {name: crafted(change) for name, change in GENERAL.items()}
    for k, craft in enumerate(crafts.values()):
        path = there / "membuf" / "agent-0" / f"case-{k}.h5"
        path.write_bytes(good.read_bytes())
        craft(path)
    out = tmp_path / "run"
    done = forks.run("train", *flags, "--lessons", there, "--out", out, seconds=60)
    check(done, honest, "train --lessons", {0})
    log = (out / "logs" / "agent-0.log").read_text()
    accepted = [name for k, name in enumerate(crafts) if f"case-{k}.h5 is not offered" not in log]
    assert accepted == []
