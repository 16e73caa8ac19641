"""A lesson: what an agent experienced in one task, ready to be learnt from by another."""

from dataclasses import dataclass

import numpy as np

from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import KNOWN_FLAGS, LAST, TRUNCATED, Array, Columns, Offer, Spaces
from canal_mpi.membuf.wire import decode, encode
from canal_mpi.state import record_from_columns, record_to_columns, strip_prefix, with_prefix

LESSON_VERSION = 1
ROWS = ("state", "action", "reward", "flags")
LARGEST = 1e9  # number in a lesson: larger ones would break the network of who learns from it


@dataclass(frozen=True)
class Lesson:
    """Rows of play with what they came from, and perhaps the donor's network."""

    offer: Offer
    rows: Columns
    network: Columns
    sender: int = -1  # the neighbour that it came from
    seconds: float = 0.0  # that it took

    def state_dict(self) -> Columns:
        """Everything of it, for a checkpoint."""
        held = {"came": np.array([self.sender, self.seconds])}
        held |= with_prefix("offer", record_to_columns(self.offer))
        return held | with_prefix("rows", self.rows) | with_prefix("network", self.network)

    @classmethod
    def restored(cls, state: Columns) -> "Lesson":
        """The lesson that `state` told of."""
        offer = record_from_columns(Offer, strip_prefix("offer", state))
        rows, network = (strip_prefix(name, state) for name in ("rows", "network"))
        sender, seconds = state["came"].tolist()
        return cls(offer, rows, network, int(sender), seconds)


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
    columns = {name: rows[name] for name in ROWS}
    return encode(about | columns | with_prefix("network", network), pack=packs)


def unpack(data: bytes, offer: Offer, spaces: Spaces, limit: int) -> Lesson:
    """The checked lesson that was offered, or DamagedData with the reason."""
    columns = decode(data, limit)
    network = strip_prefix("network", columns)
    expected = {"version", "donor", "round", "task", *ROWS}
    if columns.keys() - with_prefix("network", network).keys() != expected:
        raise DamagedData(f"lesson has the columns {sorted(columns)}; expected {sorted(expected)}")
    _check_identity(columns, offer)
    _check_rows(columns, offer, spaces)
    for name, column in network.items():
        if column.dtype.str != "<f4" or column.ndim != 1:
            raise DamagedData(f"lesson's network/{name} is no vector of numbers of 32 bits")
        _check_size(f"network/{name}", column)
    return Lesson(offer, {name: columns[name] for name in ROWS}, network)


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
    kinds = [(wanted, spaces.frame_shape), ("|u1", ()), ("<f4", ()), ("|u1", ())]
    for name, kind in zip(ROWS, kinds, strict=True):
        column = columns[name]
        if column.ndim == 0 or (column.dtype.str, column.shape[1:]) != kind:
            raise DamagedData(f"lesson's {name} is {column.dtype.str} of shape {column.shape}")
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
