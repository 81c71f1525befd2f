"""The wire format of a delta: one message from one trainer rank to one engine worker. Pure numpy.

All numbers are little-endian, everything begins at a multiple of 8 bytes, and the bytes in between are zero.

    header, 144 bytes
        magic       8   b"wsdelta" and a zero byte
        format      u16 2
        kind        u16 of the digest over the bodies: 0 xxh3-128; 1 lanes, which a GPU computes, and 8 zero bytes
        records     u32
        session     16  xxh3-128 of its name; so are the next three
        base        16  session that committed the base
        contents    16  the base's digest of all transfers (what receipts carry)
        plan        16  digest of the plan that the worker was bound with
        version     i64 of the base
        target      u64 epoch of the worker's binding: no other process, and no older binding, takes the message
        source      u32 trainer rank
        zero        u32
        size        u64 bytes behind the header
        bodies      16  digest of the bodies
        digest      16  xxh3-128 of the header with zeros here, and of the directory
    directory: the records in the order of (transfer, first), never overlapping, 32 bytes each
        transfer    u32 its place in the table that the worker was bound with
        kind        u8  how positions are told, see weight_sync.delta.codec
        itemsize    u8  1, 2, 4 or 8
        zero        u16
        first       u64 element of the transfer, in row-major order, at which the record begins
        span        u32 elements that it speaks of
        changed     u32 values that follow, at least one
        index       u32 bytes of the index
        zero        u32
    bodies, in the same order, each
        the index, then the values: the elements' new words, in the order of their positions

Header and directory are small and always read on the host; bodies may stay in a GPU's memory.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from weight_sync.delta.spec import Base
from weight_sync.device.lanes import Lanes
from weight_sync.errors import DeltaError
from weight_sync.layout.table import Ints

Bytes = NDArray[np.uint8]
N = TypeVar("N", int, Ints)

MAGIC = b"wsdelta\0"
FORMAT = 2
XXH3, LANES = "xxh3", "lanes"
"""Kinds of the digest over the bodies: those of transfers (weight_sync.session.digests), one for a plan."""
_DIGESTS = {XXH3: 0, LANES: 1}
_HEADER = struct.Struct("<8sHHI16s16s16s16sqQIIQ16s16s")
HEADER_BYTES = _HEADER.size
RECORD = np.dtype(
    [
        ("transfer", "<u4"),
        ("kind", "u1"),
        ("itemsize", "u1"),
        ("zero", "<u2"),
        ("first", "<u8"),
        ("span", "<u4"),
        ("changed", "<u4"),
        ("index", "<u4"),
        ("also_zero", "<u4"),
    ]
)
RECORD_BYTES = RECORD.itemsize
_FIELDS = (
    "magic", "format", "kind of digest", "number of records", "session", "base session", "base digest", "plan", "base version",
    "target", "source rank", "reserved bytes", "size",
)  # fmt: skip


class Kind(IntEnum):
    """How a record tells positions; see weight_sync.delta.codec."""

    DENSE = 0
    BITMAP = 1
    GAPS8 = 2
    GAPS16 = 3
    TILES = 4


@dataclass(frozen=True, slots=True)
class Label:
    """Who sends a message to whom, in which session, on top of what; both ends must say the same."""

    session: str
    base: Base
    plan: str
    source: int
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """Header and directory of a message, checked. begin: byte at which its bodies begin; at: byte of each of them from there.

    digest: of the bodies, as the sender says; body_digest() of those that are here must be the same.
    """

    directory: NDArray[Any]
    begin: int
    at: Ints
    digest: bytes


def padded(nbytes: N) -> N:
    """Up to the next multiple of 8."""
    return -(-nbytes // 8) * 8


def body_bytes(directory: NDArray[Any]) -> Ints:
    """Of each record."""
    index, values = directory["index"].astype(np.int64), directory["changed"].astype(np.int64) * directory["itemsize"]
    return padded(index) + padded(values)


def directory_end(records: int) -> int:
    """Byte of a message at which its bodies begin."""
    return HEADER_BYTES + records * RECORD_BYTES


def body_digest(kind: str, bodies: Bytes) -> bytes:
    """Of all bodies of a message, 16 bytes. kind: XXH3 or LANES."""
    if kind == XXH3:
        return xxhash.xxh3_128_digest(bodies.data)
    lanes = Lanes()
    lanes.update(bodies.data)
    return lanes_digest(lanes.intdigest())


def lanes_digest(value: int) -> bytes:
    """As a header carries it."""
    return value.to_bytes(8, "little") + bytes(8)


def head(label: Label, directory: NDArray[Any], body: int, kind: str, digest: bytes) -> Bytes:
    """Header and directory of a message. body: bytes of its bodies; kind, digest: of these."""
    end = directory_end(len(directory))
    out = np.empty(end, np.uint8)
    out[:HEADER_BYTES] = np.frombuffer(_header(label, len(directory), end - HEADER_BYTES + body, kind, digest), np.uint8)
    out[HEADER_BYTES:] = np.ascontiguousarray(directory).view(np.uint8)
    out[HEADER_BYTES - 16 : HEADER_BYTES] = np.frombuffer(xxhash.xxh3_128_digest(out.data), np.uint8)
    return out


def _header(label: Label, records: int, size: int, kind: str, digest: bytes = bytes(16)) -> bytes:
    names = (label.session, label.base.session, label.base.digest, label.plan)
    return _HEADER.pack(
        MAGIC, FORMAT, _DIGESTS[kind], records, *(xxhash.xxh3_128_digest(name.encode()) for name in names), label.base.version,
        label.target, label.source, 0, size, digest, bytes(16),
    )  # fmt: skip


def where_of(label: Label) -> str:
    """For errors."""
    return f"delta from trainer rank {label.source} in session {label.session}"


def records_in(header: Bytes, label: Label) -> int:
    """How many records a message says that it has, so that its directory can be read. opened() checks it."""
    if len(header) < HEADER_BYTES:
        raise DeltaError(f"{where_of(label)}: {len(header)} bytes, a header alone has {HEADER_BYTES}")
    return int(_HEADER.unpack(header[:HEADER_BYTES].tobytes())[3])


def opened(raw: Bytes, nbytes: int, label: Label, transfers: Ints, kind: str) -> Opened:
    """Check header and directory. raw: these, and whatever follows; nbytes: of the whole message. transfers: [n, 2], elements
    and bytes of one of each transfer that it may speak of. kind: of the digest over the bodies.

    Raises DeltaError for anything that is not as the module docstring says, or leaves the message or a transfer.
    """
    where = where_of(label)
    records = records_in(raw, label)
    found = _HEADER.unpack(raw[:HEADER_BYTES].tobytes())
    want = _HEADER.unpack(_header(label, records, nbytes - HEADER_BYTES, kind))
    if wrong := [name for name, a, b in zip(_FIELDS, found, want, strict=False) if a != b]:
        raise DeltaError(f"{where} on {label.base.text()}: the message's header has another {wrong[0]}; it is not for here")
    end = directory_end(records)
    if end > min(nbytes, len(raw)):
        raise DeltaError(f"{where}: the message ends before its {records} records")
    front = raw[:end].copy()
    front[HEADER_BYTES - 16 : HEADER_BYTES] = 0
    if xxhash.xxh3_128_digest(front.data) != found[-1]:
        raise DeltaError(f"{where}: the {end} bytes of its header and directory are not those that were sent (digest)")
    directory = front[HEADER_BYTES:].view(RECORD)
    sizes = body_bytes(directory)
    at = np.cumsum(sizes) - sizes
    _check(directory, at + sizes, nbytes - end, transfers, where)
    return Opened(directory, end, at, bytes(found[-2]))


def _check(directory: NDArray[Any], ends: Ints, body: int, transfers: Ints, where: str) -> None:
    """Every field of every record, against the plan and the message."""
    transfer, first, span, changed, size = (
        directory[key].astype(np.int64) for key in ("transfer", "first", "span", "changed", "itemsize")
    )
    last = first + span
    known = transfer < len(transfers)
    elements, itemsize = np.zeros_like(first), np.zeros_like(first)
    elements[known], itemsize[known] = transfers[transfer[known]].T
    late = np.zeros(len(directory), np.bool_)
    late[1:] = (transfer[1:] < transfer[:-1]) | ((transfer[1:] == transfer[:-1]) & (first[1:] < last[:-1]))
    reserved = (directory["zero"] != 0) | (directory["also_zero"] != 0) | (directory["kind"] >= len(Kind))
    # Signed: a first of 2^63 or more is negative here, and so may be what is added to one.
    outside = ~known | (first < 0) | (first > elements) | (last > elements)
    strange = (size != itemsize) | (changed < 1) | (changed > span)
    for number in np.flatnonzero(reserved | outside | strange | late | (ends > body))[:1].tolist():
        here, t, low = f"{where}, record {number}", transfer[number], first[number]
        if reserved[number]:
            raise DeltaError(f"{here}: unknown kind {directory['kind'][number]} or reserved bytes in use")
        if outside[number]:
            raise DeltaError(f"{here}: elements [{low}, {last[number]}) of transfer {t} are not in the plan")
        if strange[number]:
            raise DeltaError(
                f"{here}: {changed[number]} of {span[number]} elements of {size[number]} bytes; transfer {t} has other ones"
            )
        if late[number]:
            raise DeltaError(f"{here}: transfer {t} from element {low} overlaps what came before, or comes late")
        raise DeltaError(f"{here}: {directory['index'][number]} bytes of index and {changed[number]} values leave the message")
    if (behind := body - int(ends[-1] if len(ends) else 0)) > 0:
        raise DeltaError(f"{where}: {behind} bytes behind its last record")
