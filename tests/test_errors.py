import pytest

from canal_mpi import errors
from canal_mpi.errors import CanalError


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("UsageError", 2),
        ("DamagedData", 65),
        ("RankFailed", 70),
        ("DirectoryInUse", 73),
        ("StorageError", 74),
        ("ProtocolError", 76),
        ("RanksDiffer", 78),
    ],
)
def test_each_kind_of_trouble_has_its_exit_code(name: str, code: int) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, CanalError)
    assert kind.code == code
    assert str(kind("what happened")) == "what happened"


def test_unnamed_trouble_ends_as_a_failed_rank() -> None:
    assert CanalError("it").code == 70
