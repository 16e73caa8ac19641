"""Packs rows of bytes that change little from row to row, such as a console's RAM.

Lane k holds byte k of all rows, less the row before (modulo 256). Of each lane a mask says where it
changes, and only the changes follow; zstd packs both. What a lane does often depends on the action
taken in the row before, so a lane's changes are grouped by that where a sample packs better so.
"""

import numpy as np
import zstandard

from canal_mpi.errors import DamagedData
from canal_mpi.types import Array

LEVEL = 5
SAMPLE = 4096  # rows on which both orders of a lane are tried
QUIET = 0.02  # lanes that change less often than this are not tried
SPARSE = 10  # one change in so many rows is written faster as runs
BLOCK = 1024  # rows that are turned into lanes at a time: they fit into a core's cache


def pack(rows: Array, cause: Array) -> bytes:
    """Rows of bytes [rows, lanes], packed; `cause` is a byte a row, whose effect is a row later."""
    values = _to_lanes(rows)
    changes = values.copy()
    np.subtract(values[:, 1:], values[:, :-1], out=changes[:, 1:])
    order = _grouped(cause)
    grouped = _better_grouped(changes, cause)
    masks, kept = [], []
    for lane, by_cause in zip(changes, grouped, strict=True):
        ordered = lane[order] if by_cause else lane
        mask = ordered != 0
        masks.append(np.packbits(mask))
        kept.append(ordered[np.flatnonzero(mask)])  # faster than ordered[mask]
    plain = b"".join(part.tobytes() for part in [np.packbits(grouped), *masks, *kept])
    return zstandard.ZstdCompressor(level=LEVEL).compress(plain)


def unpack(data: bytes | memoryview, size: tuple[int, int], cause: Array) -> Array:
    """The rows [rows, lanes] that `pack` packed, or DamagedData; takes about 3 bytes a byte."""
    number, lanes = size
    width, front = -(-number // 8), -(-lanes // 8)
    least = front + lanes * width
    plain = np.frombuffer(_plain(data, least, least + number * lanes), dtype=np.uint8)
    grouped = np.unpackbits(plain[:front], count=lanes).astype(bool)
    order = _grouped(cause)
    masks, kept, at = plain[front:least].reshape(lanes, width), plain[least:], 0
    found = np.empty((lanes, number), dtype=np.uint8)
    for lane, bits, by_cause in zip(found, masks, grouped, strict=True):
        places = np.flatnonzero(np.unpackbits(bits, count=number).view(bool))
        if at + len(places) > len(kept):
            raise DamagedData("rows change more often than changes are given")
        changes, at = kept[at : at + len(places)], at + len(places)
        if not by_cause and len(places) * SPARSE < number:
            values = np.cumsum(np.append(np.uint8(0), changes), dtype=np.uint8)
            lane[:] = np.repeat(values, np.diff(places, prepend=0, append=number))
            continue
        lane[:] = 0
        lane[order[places] if by_cause else places] = changes
        np.cumsum(lane, dtype=np.uint8, out=lane)
    if at != len(kept):
        raise DamagedData(f"rows come with {len(kept) - at} changes too many")
    return _to_lanes(found)


def _plain(data: bytes | memoryview, least: int, most: int) -> bytes:
    """What zstd packed, if it announces a size that can be."""
    try:
        size = zstandard.frame_content_size(data)
        if not least <= size <= most:
            raise DamagedData(f"rows would unpack to {size} bytes; {least} to {most} can be")
        plain: bytes = zstandard.ZstdDecompressor().decompress(
            data, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise DamagedData(f"rows can't be unpacked: {error}") from error
    if len(plain) != size:
        raise DamagedData(f"rows unpack to {len(plain)} bytes, not to {size}")
    return plain


def _to_lanes(rows: Array) -> Array:
    """The transposed array, in memory too."""
    lanes = np.empty(rows.shape[::-1], dtype=np.uint8)
    tall = len(rows) >= len(lanes)
    for start in range(0, max(rows.shape), BLOCK):
        some = slice(start, start + BLOCK)
        if tall:
            lanes[:, some] = rows[some].T
        else:
            lanes[some] = rows[:, some].T
    return lanes


def _grouped(cause: Array) -> Array:
    """The order of rows in which those with the same cause in the row before stand together."""
    before = np.concatenate([cause[:1], cause[:-1]])
    return np.argsort(before, kind="stable")


def _better_grouped(changes: Array, cause: Array) -> Array:
    """Which lanes pack better grouped, tried on rows from the middle."""
    start = max((changes.shape[1] - SAMPLE) // 2, 0)
    some = changes[:, start : start + SAMPLE]
    order, busy = _grouped(cause[start : start + SAMPLE]), (some != 0).mean(axis=1) > QUIET
    zstd = zstandard.ZstdCompressor(level=1)

    def size(lane: Array) -> int:
        mask = lane != 0
        return len(zstd.compress(lane[mask].tobytes())) + len(
            zstd.compress(np.packbits(mask).tobytes())
        )

    pairs = zip(some, busy, strict=True)
    tried = [on and size(lane[order]) < 0.97 * size(lane) for lane, on in pairs]
    return np.array(tried, dtype=bool)
