import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from canal_mpi.errors import UsageError
from canal_mpi.pick import check, load, pick, suggestion

TABLE = {"full": max, "ring": min, "lazy": "math:pi"}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "module_that_needs_another"
    (tmp_path / f"{name}.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("RoadRuner", "RoadRunner"),
        ("roadrunner", "RoadRunner"),
        ("ROADRUNNER", "RoadRunner"),
        ("allien", "Alien"),
    ],
)
def test_the_closest_name_is_suggested_in_its_own_spelling(word: str, meant: str) -> None:
    assert suggestion(word, ["Alien", "RoadRunner"]) == f"; did you mean '{meant}'?"


def test_nothing_is_suggested_where_no_name_is_close() -> None:
    assert suggestion("xyz", ["Alien", "RoadRunner"]) == ""
    assert suggestion("", ["Alien"]) == ""
    assert suggestion("Alien", []) == ""


def test_a_name_of_the_table_is_picked() -> None:
    assert pick("topology", "full", TABLE) is max


def test_a_text_in_the_table_is_imported() -> None:
    assert pick("topology", "lazy", TABLE) == pytest.approx(3.14159, abs=1e-5)


def test_a_name_from_outside_is_imported() -> None:
    assert pick("topology", "os.path:join", TABLE)("a", "b") == "a/b"


def test_an_unknown_name_is_refused_with_the_closest_and_all_known() -> None:
    with pytest.raises(UsageError) as caught:
        pick("topology", "rnig", TABLE)
    assert str(caught.value) == (
        "unknown topology 'rnig'; did you mean 'ring'? known: full, lazy, ring."
    )


def test_a_name_like_no_other_is_refused_with_all_known() -> None:
    with pytest.raises(UsageError) as caught:
        check("topology", "hypercube", TABLE)
    assert str(caught.value) == "unknown topology 'hypercube'; known: full, lazy, ring."


def test_checking_imports_nothing() -> None:
    check("topology", "no_such_module_anywhere:thing", TABLE)
    check("topology", "lazy", TABLE)


def test_a_module_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        UsageError, match="topology 'no_such_mod:x': can't import 'no_such_mod': No module"
    ):
        pick("topology", "no_such_mod:x", TABLE)


def test_a_module_whose_imports_fail_is_refused_with_the_reason(broken: str) -> None:
    with pytest.raises(UsageError, match=r"can't import .*no_such_module_anywhere"):
        load("order", f"{broken}:x")


@pytest.mark.parametrize("name", ["", "pie", "pi.real"])
def test_a_name_that_a_module_lacks_is_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        load("order", f"math:{name}")
    assert str(caught.value) == f"order 'math:{name}': module 'math' has no '{name}'."


@pytest.mark.parametrize("path", [":x", ".math:x", ":"])
def test_a_path_without_a_proper_module_is_refused(path: str) -> None:
    with pytest.raises(UsageError):
        load("order", path)
