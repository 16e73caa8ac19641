"""A lesson: what an agent experienced in one task, ready to be learnt from; and its offer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import KNOWN_FLAGS, LAST, TRUNCATED, Array, Columns, Offer, Spaces
from canal_mpi.membuf.wire import decode, encode
from canal_mpi.state import strip_prefix, with_prefix

LESSON_VERSION = 1
ROWS = ("state", "action", "reward", "flags")
LONGEST_NAME = 64  # bytes of a task
OFFERS_LIMIT = 1 << 24  # bytes of a message of offers; embeddings of pixels are large
OFFER = {  # columns of offers, a value each; `embedding` has those of all in a row
    **{"donor": "<i4", "round": "<i4", "task": f"|S{LONGEST_NAME}", "score": "<f8"},
    **{"rows": "<i8", "bytes": "<i8", "std_error": "<f8", "episodes": "<i8", "width": "<u4"},
}
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
        held["offer"] = np.frombuffer(pack_offers([self.offer]), dtype=np.uint8)
        return held | with_prefix("rows", self.rows) | with_prefix("network", self.network)

    @classmethod
    def restored(cls, state: Columns) -> "Lesson":
        """The lesson that `state` told of."""
        (offer,) = unpack_offers(state["offer"].tobytes())
        rows, network = (strip_prefix(name, state) for name in ("rows", "network"))
        sender, seconds = state["came"].tolist()
        return cls(offer, rows, network, int(sender), seconds)


def pack(
    donor: int, round_: int, task: str, rows: Columns, network: Columns, packs: bool = True
) -> bytes:
    """The rows of a lesson with what they are, compressed unless told, for the wire."""
    if len(task.encode()) > LONGEST_NAME:
        raise ValueError(f"task name '{task}' is over {LONGEST_NAME} bytes long")
    columns = _identity(donor, round_, task) | {name: rows[name] for name in ROWS}
    return encode(columns | with_prefix("network", network), pack=packs)


def _identity(donor: int, round_: int, task: str) -> Columns:
    """What a lesson says of itself."""
    return {
        "version": np.array([LESSON_VERSION], dtype="<u2"),
        "donor": np.array([donor], dtype="<i4"),
        "round": np.array([round_], dtype="<i4"),
        "task": np.array([task.encode()], dtype="S64"),
    }


def unpack(data: bytes, offer: Offer, spaces: Spaces, limit: int) -> Lesson:
    """The checked lesson that was offered, or DamagedData with the reason."""
    columns = decode(data, limit)
    network = strip_prefix("network", columns)
    identity = _identity(offer.donor, offer.round, offer.task)
    expected = {*identity, *ROWS}
    if columns.keys() - with_prefix("network", network).keys() != expected:
        raise DamagedData(f"lesson has the columns {sorted(columns)}; expected {sorted(expected)}")
    for name, wanted in identity.items():
        found = columns[name]
        if found.dtype != wanted.dtype or found.tolist() != wanted.tolist():
            raise DamagedData(f"lesson's {name} is {found!r}; the offer said {wanted!r}")
    _check_rows(columns, offer, spaces)
    for name, column in network.items():
        if column.dtype.str != "<f4" or column.ndim != 1:
            raise DamagedData(f"lesson's network/{name} is no vector of numbers of 32 bits")
        _check_size(f"network/{name}", column)
    return Lesson(offer, {name: columns[name] for name in ROWS}, network)


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


# ── offers ─────────────────────────────────────────────────────────────────────────────────────


def pack_offers(offers: Sequence[Offer]) -> bytes:
    """Offers as a message."""
    told = [vars(one) | {"task": one.task.encode(), "width": len(one.embedding)} for one in offers]
    columns = {name: np.array([one[name] for one in told], kind) for name, kind in OFFER.items()}
    vectors = [np.zeros(0, "<f4"), *(one.embedding.astype("<f4") for one in offers)]
    return encode(columns | {"embedding": np.concatenate(vectors)})


def unpack_offers(data: bytes, limit: int = OFFERS_LIMIT) -> list[Offer]:
    """Checked offers from a message, or DamagedData."""
    columns = decode(data, limit)
    kinds = {name: (column.dtype.str, column.ndim) for name, column in columns.items()}
    if kinds != {name: (kind, 1) for name, kind in (OFFER | {"embedding": "<f4"}).items()}:
        raise DamagedData(f"offers have the columns {kinds}")
    embedding, width = columns.pop("embedding"), columns.pop("width")
    lengths = {len(column) for column in columns.values()}
    if lengths != {len(width)} or len(embedding) != width.sum(dtype=np.int64):
        raise DamagedData("columns of offers differ in length")
    if not np.isfinite(embedding).all():
        raise DamagedData("offer's embedding is no vector of finite numbers")
    if (columns["rows"] < 2).any() or (columns["bytes"] < 1).any() or not columns["round"].all():
        raise DamagedData("offer of an empty lesson")
    try:
        tasks = [task.decode() for task in columns.pop("task").tolist()]
    except UnicodeDecodeError as error:
        raise DamagedData("offer's task is not UTF-8") from error
    vectors = np.split(embedding, np.cumsum(width, dtype=np.int64))[:-1]
    values = {name: column.tolist() for name, column in columns.items()}
    values |= {"task": tasks, "embedding": vectors}
    rows = zip(*values.values(), strict=True)
    return [Offer(**dict(zip(values, row, strict=True))) for row in rows]
