"""Named typed arrays as bytes and back: the one format that crosses processes.

Little-endian, versioned, with length and SHA-256; nothing is used or allocated before it is
checked. Columns may be packed: byte k of all rows together (a plane), of rows of bytes only where
it changes, then zstd.
"""

import json
import re
import struct
from collections.abc import Sequence
from hashlib import sha256
from math import prod
from typing import NamedTuple

import numpy as np
import zstandard

from canal_mpi.errors import DamagedData
from canal_mpi.interfaces import Array, Columns

WIRE_VERSION = 5
MAGIC = b"CANALCOL"
HEADER = struct.Struct("<8sHIQ32s")  # magic, version, bytes of heads and body, SHA-256 of the body
HEADS_LIMIT = 1 << 23  # bytes
DTYPE = re.compile(r"(\|u1|\|i1|\|b1|<u2|<u4|<u8|<i2|<i4|<i8|<f2|<f4|<f8|\|S[1-9][0-9]{0,3})")
NAME = re.compile(r"[A-Za-z0-9_./-]{1,120}")
RAW, ZSTD, BYTE_DELTA = 0, 1, 2
MOST_DIMENSIONS = 8
LEVEL = 5  # of zstd, for rows of bytes


class _Head(NamedTuple):
    """What a message says about one column; all of them stand before the columns, as JSON."""

    name: str
    dtype: str
    shape: Sequence[int]
    codec: int
    stored: int  # bytes

    @property
    def raw(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def is_proper(self) -> bool:
        """Whether such a column can be; TypeError where a part is of another kind."""
        fits = NAME.fullmatch(self.name) and DTYPE.fullmatch(self.dtype)
        numbers = (self.codec, self.stored, *self.shape)
        whole = all(type(number) is int and number >= 0 for number in numbers)
        sides = len(self.shape) <= MOST_DIMENSIONS and whole
        return bool(fits and sides) and prod(max(side, 1) for side in self.shape) < 1 << 48


def encode(columns: Columns, pack: bool = False) -> bytes:
    """The columns as one self-describing message; pack them where the wire is slow."""
    parts = [_encode_column(name, array, pack) for name, array in columns.items()]
    heads = json.dumps([head for head, _ in parts]).encode()
    body = b"".join([heads, *(data for _, data in parts)])
    return HEADER.pack(MAGIC, WIRE_VERSION, len(heads), len(body), sha256(body).digest()) + body


def decode(data: bytes | bytearray | memoryview, limit: int) -> Columns:
    """The columns of a message whose arrays take at most `limit` bytes, or DamagedData."""
    body, start = _checked_body(memoryview(data))
    columns: Columns = {}
    heads = _heads(body[:start])
    total = sum(head.raw for head in heads)
    if total > limit:
        raise DamagedData(f"message announces {total} bytes of arrays; the limit is {limit}")
    for head in heads:
        if head.name in columns:
            raise DamagedData(f"column '{head.name}' occurs twice")
        columns[head.name] = _decode_column(head, body[start : start + head.stored])
        start += head.stored
    if start != len(body):
        raise DamagedData(f"message has {len(body) - start} bytes after its last column")
    return columns


def check(data: bytes) -> None:
    """DamagedData where a message is not whole: header, length, checksum."""
    _checked_body(memoryview(data))


def _encode_column(name: str, array: Array, pack: bool) -> tuple[_Head, bytes]:
    array = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    codec, data = RAW, array.tobytes()
    if pack and array.dtype == np.uint8 and array.ndim > 1 and array.nbytes:
        packed = pack_bytedelta(array.reshape(len(array), -1))
        codec, data = (BYTE_DELTA, packed) if len(packed) < array.nbytes else (RAW, data)
    elif pack and array.ndim and array.nbytes:
        by_place = array.reshape(-1).view(np.uint8).reshape(len(array), -1).T
        packed = zstandard.ZstdCompressor(level=1).compress(by_place.tobytes())
        codec, data = (ZSTD, packed) if len(packed) < array.nbytes else (RAW, data)
    head = _Head(name, array.dtype.str, array.shape, codec, len(data))
    if not head.is_proper():
        raise ValueError(f"column '{name}' of type {head.dtype} has no wire form")
    return head, data


def _checked_body(view: memoryview) -> tuple[memoryview, int]:
    if len(view) < HEADER.size:
        raise DamagedData(f"message of {len(view)} bytes is shorter than its header")
    magic, version, heads, length, digest = HEADER.unpack(view[: HEADER.size])
    if magic != MAGIC:
        raise DamagedData("message does not begin with CANALCOL")
    if version != WIRE_VERSION:
        raise DamagedData(f"message has wire format {version}; this code reads {WIRE_VERSION}")
    body = view[HEADER.size :]
    if length != len(body):
        raise DamagedData(f"message announces {length} bytes and has {len(body)}")
    if sha256(body).digest() != digest:
        raise DamagedData("message fails its checksum")
    if heads > min(length, HEADS_LIMIT):
        raise DamagedData(f"message announces {heads} bytes that describe its columns")
    return body, heads


def _heads(text: memoryview) -> list[_Head]:
    try:
        heads = [_Head(*parts) for parts in json.loads(bytes(text))]
        odd = [head for head in heads if not head.is_proper()]
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedData("message does not describe its columns properly") from error
    if odd:
        raise DamagedData(f"column {odd[0].name!r} of type {odd[0].dtype!r}, shape {odd[0].shape}")
    return heads


def _decode_column(head: _Head, data: memoryview) -> Array:
    if len(data) != head.stored:
        raise DamagedData(f"column '{head.name}' ends after {len(data)} of {head.stored} bytes")
    dtype = np.dtype(head.dtype)
    if head.codec == ZSTD and head.raw and head.shape:
        plain = np.frombuffer(_plain(data, head.raw, head.raw), dtype=np.uint8)
        rows = np.ascontiguousarray(plain.reshape(-1, head.shape[0]).T)
        return rows.reshape(-1).view(dtype).reshape(head.shape)
    if head.codec == BYTE_DELTA and head.raw and len(head.shape) > 1 and dtype == np.uint8:
        size = (head.shape[0], head.raw // head.shape[0])
        return unpack_bytedelta(data, size).reshape(head.shape)
    if head.codec != RAW or head.stored != head.raw:
        raise DamagedData(f"column '{head.name}' has {head.stored} bytes for {head.raw}")
    return np.frombuffer(data, dtype=dtype).reshape(head.shape).copy()


def _plain(data: bytes | memoryview, least: int, most: int) -> bytes:
    """What zstd packed, if it announces a size that can be."""
    try:
        size = zstandard.frame_content_size(data)
        if not least <= size <= most:
            raise DamagedData(f"a column would unpack to {size} bytes; {least} to {most} can be")
        plain: bytes = zstandard.ZstdDecompressor().decompress(
            data, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise DamagedData(f"a column can't be unpacked: {error}") from error
    if len(plain) != size:
        raise DamagedData(f"a column unpacks to {len(plain)} bytes, not to {size}")
    return plain


def pack_bytedelta(rows: Array) -> bytes:
    """Rows of bytes [rows, planes], packed: where each plane changes, and by how much."""
    changes = rows.T.copy()
    changes[:, 1:] -= changes[:, :-1].copy()
    masks, kept = [], []
    for plane in changes:
        mask = plane != 0
        masks.append(np.packbits(mask))
        kept.append(plane[np.flatnonzero(mask)])  # faster than plane[mask]
    plain = b"".join(part.tobytes() for part in [*masks, *kept])
    return zstandard.ZstdCompressor(level=LEVEL).compress(plain)


def unpack_bytedelta(data: bytes | memoryview, size: tuple[int, int]) -> Array:
    """The rows [rows, planes] that `pack_bytedelta` packed, or DamagedData."""
    number, planes = size
    width = -(-number // 8)
    least = planes * width
    plain = np.frombuffer(_plain(data, least, least + number * planes), dtype=np.uint8)
    masks, kept, at = plain[:least].reshape(planes, width), plain[least:], 0
    found = np.zeros((planes, number), dtype=np.uint8)
    for plane, bits in zip(found, masks, strict=True):
        places = np.flatnonzero(np.unpackbits(bits, count=number).view(bool))
        if at + len(places) > len(kept):
            raise DamagedData("rows change more often than changes are given")
        plane[places] = kept[at : at + len(places)]
        at += len(places)
        np.cumsum(plane, dtype=np.uint8, out=plane)
    if at != len(kept):
        raise DamagedData(f"rows come with {len(kept) - at} changes too many")
    return found.T.copy()
