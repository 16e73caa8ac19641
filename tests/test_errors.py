"""Exit codes, and names that are looked up or imported."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from launch import SMOKE
from launch import run as run_command
from madeup import write_run

from canal_mpi import errors
from canal_mpi.cli import cli
from canal_mpi.errors import (
    CanalError,
    UsageError,
    check_name,
    import_extra,
    import_name,
    lookup,
    suggestion,
)

CODES = {
    "UsageError": 2,
    "DamagedData": 65,
    "RankFailed": 70,
    "DirectoryInUse": 73,
    "StorageError": 74,
    "Stopped": 75,
    "ProtocolError": 76,
    "RanksDiffer": 78,
}
TABLE = {"full": max, "ring": min, "lazy": "math:sqrt"}


def test_each_kind_of_trouble_has_its_exit_code() -> None:
    for name, code in CODES.items():
        kind = getattr(errors, name)
        assert issubclass(kind, CanalError)
        assert kind.code == code
        assert str(kind("what happened")) == "what happened"
    assert CanalError("it").code == 70, "unnamed trouble ends as a failed rank"


def test_a_log_on_a_full_disk_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    errors.log_to_file(Path("/dev/full"), verbose=False)
    errors.logger.info("nobody will read this")
    errors.close_log()
    assert capsys.readouterr() == ("", "")


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(UsageError, match=r"this needs no_such_module: .*'canal-mpi\[some\]'"):
        import_extra("no_such_module", "some")


def test_a_library_that_a_small_install_leaves_out_is_named_in_one_line(tmp_path: Path) -> None:
    """Files of their names stand in for an install without them."""
    for library in ("jinja2", "matplotlib", "torch"):
        (tmp_path / f"{library}.py").write_text("raise ModuleNotFoundError(name=__name__)")
    run = tmp_path / "run"
    write_run(run)
    train = ("train", *SMOKE, "--tasks", "CartPole-v1", "--out", str(tmp_path / "new"), "--set")
    for words, line in [
        (("report", str(run)), "a report needs jinja2: pip install jinja2."),
        ((*train, "learn.network=cnn"), "learn.network=cnn needs torch: pip install torch."),
    ]:
        done = run_command(["canal-mpi", *words], PYTHONPATH=str(tmp_path))
        assert (done.code, done.err) == (2, f"canal-mpi: {line}\n")


def test_many_runs_are_not_started_where_nothing_can_draw_their_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for library in ("matplotlib", "jinja2"):
        monkeypatch.setitem(sys.modules, library, None)
        for kind in ("compare", "sweep", "study"):
            said = str(CliRunner().invoke(cli, [kind]).exception)
            assert said == f"the page of a {kind} needs {library}: pip install {library}."
    assert not list(tmp_path.iterdir())


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "module_that_needs_another"
    (tmp_path / f"{name}.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_the_closest_name_is_suggested_in_its_own_spelling() -> None:
    for word in ("RoadRuner", "roadrunner", "ROADRUNNER"):
        assert suggestion(word, ["Alien", "RoadRunner"]) == "; did you mean 'RoadRunner'?"
    assert suggestion("allien", ["Alien", "RoadRunner"]) == "; did you mean 'Alien'?"


def test_nothing_is_suggested_where_no_name_is_close() -> None:
    assert suggestion("xyz", ["Alien", "RoadRunner"]) == ""
    assert suggestion("", ["Alien"]) == ""
    assert suggestion("Alien", []) == ""


def test_names_are_looked_up_in_the_table_and_outside_of_it() -> None:
    assert lookup("topology", "full", TABLE) is max
    assert lookup("topology", "lazy", TABLE)(9) == 3
    assert lookup("topology", "os.path:join", TABLE)("a", "b") == "a/b"


def test_an_unknown_name_is_refused_with_the_closest_and_all_known() -> None:
    with pytest.raises(UsageError) as caught:
        lookup("topology", "rnig", TABLE)
    assert str(caught.value) == (
        "unknown topology 'rnig'; did you mean 'ring'? known: full, lazy, ring, or module:name."
    )


def test_a_name_like_no_other_is_refused_with_all_known() -> None:
    with pytest.raises(UsageError) as caught:
        check_name("topology", "hypercube", TABLE)
    assert str(caught.value).endswith("'hypercube'; known: full, lazy, ring, or module:name.")


def test_checking_imports_nothing() -> None:
    check_name("topology", "no_such_module_anywhere:thing", TABLE)
    check_name("topology", "lazy", TABLE)


def test_a_module_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        UsageError, match="topology 'no_such_mod:x': can't import 'no_such_mod': there is no such"
    ):
        lookup("topology", "no_such_mod:x", TABLE)


def test_a_module_whose_imports_fail_is_refused_with_the_reason(broken: str) -> None:
    with pytest.raises(UsageError, match=r"can't import .*no_such_module_anywhere"):
        import_name("order", f"{broken}:x")


def test_a_name_that_a_module_lacks_is_refused() -> None:
    for name, hint in {"": ".", "pie": "; did you mean 'pi'?", "nothing like it": "."}.items():
        with pytest.raises(UsageError) as caught:
            import_name("order", f"math:{name}")
        assert str(caught.value) == f"order 'math:{name}': module 'math' has no '{name}'{hint}"


def test_a_path_without_a_proper_module_is_refused() -> None:
    for path in (":x", ".math:x", ":"):
        with pytest.raises(UsageError):
            import_name("order", path)
