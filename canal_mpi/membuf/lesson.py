"""A lesson: what an agent experienced in one task, ready to be learnt from by another."""

from dataclasses import dataclass

import numpy as np

from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import KNOWN_FLAGS, LAST, TRUNCATED, Array, Columns, Offer, Spaces
from canal_mpi.membuf.wire import decode, encode

LESSON_VERSION = 1
ROWS = ("state", "action", "reward", "flags")
LARGEST = 1e9  # number in a lesson: larger ones would break the network of who learns from it


@dataclass(frozen=True)
class Lesson:
    """Rows of play with what they came from, and perhaps the donor's network."""

    offer: Offer
    rows: Columns
    network: Columns


def pack(
    donor: int, round_: int, task: str, rows: Columns, network: Columns, packs: bool = True
) -> bytes:
    """The rows of a lesson with what they are, compressed unless told, for the wire."""
    if len(task.encode()) > 64:
        raise ValueError(f"task name '{task}' is over 64 bytes long")
    about: Columns = {
        "version": np.array([LESSON_VERSION], dtype="<u2"),
        "donor": np.array([donor], dtype="<i4"),
        "round": np.array([round_], dtype="<i4"),
        "task": np.array([task.encode()], dtype="S64"),
    }
    brain = {f"network/{name}": column for name, column in network.items()}
    columns = {name: rows[name] for name in ROWS}
    return encode(about | columns | brain, pack=packs)


def unpack(data: bytes, offer: Offer, spaces: Spaces, limit: int) -> Lesson:
    """The checked lesson that was offered, or DamagedData with the reason."""
    columns = decode(data, limit)
    network = {name: column for name, column in columns.items() if name.startswith("network/")}
    expected = {"version", "donor", "round", "task", *ROWS}
    if columns.keys() - network.keys() != expected:
        raise DamagedData(f"lesson has the columns {sorted(columns)}; expected {sorted(expected)}")
    _check_identity(columns, offer)
    _check_rows(columns, offer, spaces)
    for name, column in network.items():
        if column.dtype.str != "<f4" or column.ndim != 1:
            raise DamagedData(f"lesson's {name} is no vector of numbers of 32 bits")
        _check_size(name, column)
    brain = {name.removeprefix("network/"): column for name, column in network.items()}
    return Lesson(offer, {name: columns[name] for name in ROWS}, brain)


def _check_identity(columns: Columns, offer: Offer) -> None:
    expected = {
        "version": ("<u2", LESSON_VERSION),
        "donor": ("<i4", offer.donor),
        "round": ("<i4", offer.round),
        "task": ("|S64", offer.task.encode()),
    }
    for name, (dtype, value) in expected.items():
        column = columns[name]
        if column.shape != (1,) or column.dtype.str != dtype or column[0] != value:
            raise DamagedData(f"lesson's {name} is {column!r}; the offer said {value!r}")


def _check_rows(columns: Columns, offer: Offer, spaces: Spaces) -> None:
    state, action, reward, flags = (columns[name] for name in ROWS)
    wanted = np.dtype(spaces.dtype).newbyteorder("<").str
    _require(state.dtype.str == wanted and state.shape[1:] == spaces.frame_shape, "states", state)
    _require(action.dtype == np.uint8 and action.ndim == 1, "actions", action)
    _require(reward.dtype.str == "<f4" and reward.ndim == 1, "rewards", reward)
    _require(flags.dtype == np.uint8 and flags.ndim == 1, "flags", flags)
    if len({len(column) for column in (state, action, reward, flags)}) != 1:
        raise DamagedData("lesson's columns differ in length")
    if len(action) < 2 or offer.rows not in (-1, len(action)):  # -1: not said before
        raise DamagedData(f"lesson has {len(action)} rows; the offer said {offer.rows}")
    if action.max() >= spaces.actions:
        raise DamagedData(f"lesson holds action {action.max()}; there are {spaces.actions}")
    _check_size("reward", reward)
    if state.dtype.kind == "f":
        _check_size("state", state)
    if (flags & ~np.uint8(KNOWN_FLAGS)).any():
        raise DamagedData("lesson holds unknown flags")
    last = (flags & LAST) != 0
    cut = (flags & TRUNCATED) != 0
    if last[0] or not last[-1] or (last[1:] & last[:-1]).any() or (cut[:-1] & ~last[1:]).any():
        raise DamagedData("lesson's segments of play are not closed properly")


def _check_size(name: str, column: Array) -> None:
    """Refuse what is not finite, too."""
    odd = column[~(np.abs(column) <= LARGEST)]
    if odd.size:
        raise DamagedData(f"lesson's {name} holds {odd.flat[0]}; expected at most {LARGEST:g}")


def _require(fits: bool, what: str, found: Array) -> None:
    if not fits:
        raise DamagedData(f"lesson's {what} are {found.dtype.str} of shape {found.shape}")
