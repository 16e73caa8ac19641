"""Named typed arrays as bytes and back: the one format that crosses processes.

Little-endian, versioned, with length and SHA-256; nothing is used or allocated before it is
checked. Columns may be packed: byte k of all rows together, then zstd; rows of bytes by `lanes`.
"""

import re
import struct
from hashlib import sha256
from math import prod

import numpy as np
import zstandard

from canal_mpi import lanes
from canal_mpi.errors import DamagedData
from canal_mpi.types import Array, Columns

WIRE_VERSION = 2
MAGIC = b"CANALCOL"
HEADER = struct.Struct("<8sHHQ32s")  # magic, version, columns, body bytes, SHA-256 of the body
DTYPE = re.compile(r"(\|u1|\|i1|\|b1|<u2|<u4|<u8|<i2|<i4|<i8|<f2|<f4|<f8|\|S[1-9][0-9]{0,3})")
NAME = re.compile(r"[A-Za-z0-9_./-]{1,120}")
RAW, ZSTD, LANES = 0, 1, 2
MOST_DIMENSIONS = 8
CAUSE = "action"  # rows of bytes that come after it may be grouped by it


def encode(columns: Columns, pack: bool = False) -> bytes:
    """The columns as one self-describing message; pack them where the wire is slow."""
    heads, datas = [], []
    before: Columns = {}
    for name, array in columns.items():
        head, data = _encode_column(name, array, pack, before)
        before[name] = array
        heads.append(head)
        datas.append(data)
    body = b"".join(heads + datas)
    return HEADER.pack(MAGIC, WIRE_VERSION, len(heads), len(body), sha256(body).digest()) + body


def decode(data: bytes | bytearray | memoryview, limit: int) -> Columns:
    """The columns of a message whose arrays take at most `limit` bytes, or DamagedData."""
    body, count = _checked_body(memoryview(data))
    columns: Columns = {}
    heads, start = _heads(body, count)
    if sum(head.raw for head in heads) > limit:
        total = sum(head.raw for head in heads)
        raise DamagedData(f"message announces {total} bytes of arrays; the limit is {limit}")
    for head in heads:
        if head.name in columns:
            raise DamagedData(f"column '{head.name}' occurs twice")
        data = body[start : start + head.stored]
        columns[head.name] = _decode_column(head, data, columns)
        start += head.stored
    if start != len(body):
        raise DamagedData(f"message has {len(body) - start} bytes after its last column")
    return columns


def check(data: bytes) -> None:
    """DamagedData where a message is not whole: header, length, checksum."""
    _checked_body(memoryview(data))


def _proper(name: str, dtype: str, dimensions: int) -> bool:
    fits = NAME.fullmatch(name) and DTYPE.fullmatch(dtype)
    return bool(fits) and dimensions <= MOST_DIMENSIONS


class _Head:
    """What a message says about one column."""

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], codec: int, stored: int):
        self.name, self.dtype, self.shape = name, np.dtype(dtype), shape
        self.codec, self.stored = codec, stored
        self.raw = prod(shape) * self.dtype.itemsize


def _cause(columns: Columns, rows: int) -> Array:
    """The actions of so many rows, if they are among the columns so far; else a constant."""
    found = columns.get(CAUSE)
    fits = found is not None and found.dtype == np.uint8 and found.shape == (rows,)
    return found if fits and found is not None else np.zeros(rows, dtype=np.uint8)


def _encode_column(name: str, array: Array, pack: bool, before: Columns) -> tuple[bytes, bytes]:
    array = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    dtype = array.dtype.str
    if not _proper(name, dtype, array.ndim):
        raise ValueError(f"column '{name}' of type {dtype} has no wire form")
    codec, data = RAW, array.tobytes()
    if pack and array.dtype == np.uint8 and array.ndim > 1 and array.nbytes:
        packed = lanes.pack(array.reshape(len(array), -1), _cause(before, len(array)))
        codec, data = (LANES, packed) if len(packed) < array.nbytes else (RAW, data)
    elif pack and array.ndim and array.nbytes:
        by_place = array.reshape(-1).view(np.uint8).reshape(len(array), -1).T
        packed = zstandard.ZstdCompressor(level=1).compress(by_place.tobytes())
        codec, data = (ZSTD, packed) if len(packed) < array.nbytes else (RAW, data)
    head = struct.pack("<B", len(name)) + name.encode() + struct.pack("<B", len(dtype))
    head += dtype.encode() + struct.pack("<B", array.ndim)
    head += struct.pack(f"<{array.ndim}Q", *array.shape) + struct.pack("<BQ", codec, len(data))
    return head, data


def _checked_body(view: memoryview) -> tuple[memoryview, int]:
    if len(view) < HEADER.size:
        raise DamagedData(f"message of {len(view)} bytes is shorter than its header")
    magic, version, count, length, digest = HEADER.unpack(view[: HEADER.size])
    if magic != MAGIC:
        raise DamagedData("message does not begin with CANALCOL")
    if version != WIRE_VERSION:
        raise DamagedData(f"message has wire format {version}; this code reads {WIRE_VERSION}")
    body = view[HEADER.size :]
    if length != len(body):
        raise DamagedData(f"message announces {length} bytes and has {len(body)}")
    if sha256(body).digest() != digest:
        raise DamagedData("message fails its checksum")
    return body, count


def _heads(body: memoryview, count: int) -> tuple[list[_Head], int]:
    heads, at = [], 0
    try:
        for _ in range(count):
            head, at = _head(body, at)
            heads.append(head)
    except (struct.error, UnicodeDecodeError) as error:
        raise DamagedData("message ends inside the description of its columns") from error
    return heads, at


def _head(body: memoryview, at: int) -> tuple[_Head, int]:
    def take(form: str) -> tuple[int, ...]:
        nonlocal at
        values = struct.unpack_from(form, body, at)
        at += struct.calcsize(form)
        return values

    def text() -> str:
        nonlocal at
        (length,) = take("<B")
        at += length
        return bytes(body[at - length : at]).decode("ascii")

    name, dtype = text(), text()
    (dimensions,) = take("<B")
    if not _proper(name, dtype, dimensions):
        raise DamagedData(f"column {name!r} of type {dtype!r} in {dimensions} dimensions")
    shape = take(f"<{dimensions}Q")
    if prod(max(side, 1) for side in shape) >= 1 << 48:
        raise DamagedData(f"column '{name}' of the shape {shape}")
    codec, stored = take("<BQ")
    return _Head(name, dtype, shape, codec, stored), at


def _decode_column(head: _Head, data: memoryview, before: Columns) -> Array:
    if len(data) != head.stored:
        raise DamagedData(f"column '{head.name}' ends after {len(data)} of {head.stored} bytes")
    if head.codec == ZSTD and head.raw and head.shape:
        return _unpack(head, data)
    if head.codec == LANES and head.raw and len(head.shape) > 1 and head.dtype == np.uint8:
        size = (head.shape[0], head.raw // head.shape[0])
        return lanes.unpack(data, size, _cause(before, size[0])).reshape(head.shape)
    if head.codec != RAW or head.stored != head.raw:
        raise DamagedData(f"column '{head.name}' has {head.stored} bytes for {head.raw}")
    return np.frombuffer(data, dtype=head.dtype).reshape(head.shape).copy()


def _unpack(head: _Head, data: memoryview) -> Array:
    try:
        if zstandard.frame_content_size(data) != head.raw:
            raise DamagedData(f"column '{head.name}' does not unpack to {head.raw} bytes")
        plain = zstandard.ZstdDecompressor().decompress(
            data, max_output_size=head.raw, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise DamagedData(f"column '{head.name}' can't be unpacked: {error}") from error
    if len(plain) != head.raw:
        raise DamagedData(f"column '{head.name}' does not unpack to {head.raw} bytes")
    rows = np.frombuffer(plain, dtype=np.uint8).reshape(-1, head.shape[0]).T
    return np.ascontiguousarray(rows).reshape(-1).view(head.dtype).reshape(head.shape)
