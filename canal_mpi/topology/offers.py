"""Offers on the wire: a few hundred bytes that say what a lesson is before its rows move."""

from collections.abc import Sequence

import numpy as np

from canal_mpi.columns import decode, encode
from canal_mpi.errors import DamagedData
from canal_mpi.types import Columns, Offer

SMALL = 1 << 24  # the largest message of offers; embeddings of pixels are large
COLUMNS = {
    "donor": "<i4",
    "round": "<i4",
    "score": "<f8",
    "rows": "<i8",
    "bytes": "<i8",
    "task": "|S64",
    "width": "<i4",  # numbers of its embedding
    "embedding": "<f4",  # of all offers, one after the other
}


def pack_offers(offers: Sequence[Offer]) -> bytes:
    """Offers as a message."""
    return encode(offers_to_columns(offers))


def unpack_offers(data: bytes) -> list[Offer]:
    """Checked offers from a message, or DamagedData."""
    return columns_to_offers(decode(data, SMALL))


def offers_to_columns(offers: Sequence[Offer]) -> Columns:
    """Offers as typed columns."""
    values = {
        "donor": [offer.donor for offer in offers],
        "round": [offer.round for offer in offers],
        "score": [offer.score for offer in offers],
        "rows": [offer.rows for offer in offers],
        "bytes": [offer.bytes for offer in offers],
        "task": [offer.task.encode() for offer in offers],
        "width": [len(offer.embedding) for offer in offers],
    }
    columns = {name: np.array(column, dtype=COLUMNS[name]) for name, column in values.items()}
    embeddings = [np.zeros(0), *(offer.embedding for offer in offers)]
    return columns | {"embedding": np.concatenate(embeddings).astype("<f4")}


def columns_to_offers(columns: Columns) -> list[Offer]:
    """Checked offers from typed columns."""
    if {name: column.dtype.str for name, column in columns.items()} != COLUMNS:
        raise DamagedData(f"offer has the columns {sorted(columns)}")
    embedding, width = columns["embedding"], columns["width"]
    shapes = {column.shape for name, column in columns.items() if name != "embedding"}
    if len(shapes) != 1 or width.ndim != 1 or embedding.ndim != 1:
        raise DamagedData("offer's columns differ in length")
    if (width < 0).any() or int(width.sum(dtype=np.int64)) != len(embedding):
        raise DamagedData("offer's embeddings differ from their widths")
    if not np.isfinite(embedding).all():
        raise DamagedData("offer's embedding is no vector of finite numbers")
    if (columns["rows"] < 2).any() or (columns["bytes"] < 1).any() or (columns["round"] == 0).any():
        raise DamagedData("offer of an empty lesson")
    try:
        tasks = [task.decode() for task in columns["task"].tolist()]
    except UnicodeDecodeError as error:
        raise DamagedData("offer's task is not UTF-8") from error
    ends = np.cumsum(width, dtype=np.int64)
    names = ("donor", "round", "score", "rows", "bytes")
    numbers = zip(*(columns[name].tolist() for name in names), strict=True)
    return [
        Offer(donor, round_, task, score, rows, size, embedding[end - wide : end])
        for (donor, round_, score, rows, size), task, end, wide in zip(
            numbers, tasks, ends.tolist(), width.tolist(), strict=True
        )
    ]
