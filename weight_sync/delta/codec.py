"""The wire format of a delta: messages of records, each the changed elements of a part of one transfer. Pure numpy.

A message goes from one trainer rank to one engine worker. All numbers are little-endian, everything begins at a multiple of 8
bytes, and the bytes in between are zero.

    header, 128 bytes
        magic       8   b"wsdelta" and a zero byte
        format      u16 1
        zero        u16
        records     u32
        session     16  xxh3-128 of its name; so are the next three
        base        16  session that committed the base
        contents    16  the base's digest of all transfers (what receipts carry)
        plan        16  digest of the plan that the worker was bound with
        version     i64 of the base
        target      u64 epoch of the worker's binding: no other process, and no older binding, takes the message
        source      u32 trainer rank
        zero        u32
        body        u64 bytes behind the header
        digest      16  xxh3-128 of the header with zeros here, and of the body
    records, in the order of (transfer, first), never overlapping, each
        transfer    u32 its place in the table that the worker was bound with
        kind        u8  how positions are told, see below
        itemsize    u8  1, 2, 4 or 8
        zero        u16
        first       u64 element of the transfer, in row-major order, at which the record begins
        span        u32 elements that it speaks of
        changed     u32 values that follow, at least one
        index       u32 bytes of the index
        zero        u32
        the index, then the values: the elements' new words, in the order of their positions

    DENSE   no index: every element of the span has a value
    BITMAP  one bit for each element of the span, lowest bit of the first byte first
    GAPS8   one byte for each value: unchanged elements since the one before; 255 stands for 255 elements without a value
    GAPS16  the same in two bytes, with 65535

encode() takes the smallest. Per changed bf16 element GAPS8 costs about 3 bytes when 1% change, GAPS16 4 when 0.1% do, BITMAP
2 and an eighth of the rest when many do. decode() refuses whatever is not exactly this, before anything is applied.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from weight_sync.delta.spec import Base
from weight_sync.errors import DeltaError
from weight_sync.layout.table import Ints

Bytes = NDArray[np.uint8]

MAGIC = b"wsdelta\0"
FORMAT = 1
_HEADER = struct.Struct("<8sHHI16s16s16s16sqQIIQ16s")
_RECORD = struct.Struct("<IBBHQIIII")
HEADER_BYTES, RECORD_BYTES = _HEADER.size, _RECORD.size
_DIGEST_AT = HEADER_BYTES - 16
WORDS: dict[int, Any] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


class Kind(IntEnum):
    DENSE = 0
    BITMAP = 1
    GAPS8 = 2
    GAPS16 = 3


_GAPS: dict[int, Any] = {Kind.GAPS8: np.dtype("u1"), Kind.GAPS16: np.dtype("<u2")}


@dataclass(frozen=True, slots=True)
class Label:
    """Who sends a message to whom, in which session, on top of what; both ends must say the same."""

    session: str
    base: Base
    plan: str
    source: int
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """The encoded changes of `span` elements from element `first` of a transfer. index, values: bytes."""

    kind: int
    itemsize: int
    first: int
    span: int
    changed: int
    index: Bytes
    values: Bytes

    @property
    def nbytes(self) -> int:
        return record_bytes(len(self.index), len(self.values))


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Decoded: the new words at `positions` (elements of the transfer, ascending), or, where None, at all from `first` on."""

    transfer: int
    first: int
    positions: Ints | None
    values: NDArray[Any]


def record_bytes(index: int, values: int) -> int:
    return RECORD_BYTES + _padded(index) + _padded(values)


def most_elements(nbytes: int, itemsize: int) -> int:
    """Elements of which any record fits a message of `nbytes`; at least one for DeltaSpec.message."""
    return (nbytes - HEADER_BYTES - RECORD_BYTES) // 8 * 8 // itemsize


def encode(first: int, words: NDArray[Any], positions: Ints) -> Record:
    """The changes of a part of a transfer, in whichever form is smallest.

    first: element of the transfer that words[0] is. words: all new words of the part, contiguous. positions: indices into words
    of those that changed, ascending, at least one.
    """
    size, span, count = words.dtype.itemsize, len(words), len(positions)
    if count == 0:
        raise DeltaError("nothing changed: there is no record of it")
    dense, values = _padded(span * size), _padded(count * size)
    costs, gaps = {Kind.DENSE: dense}, positions
    if values < dense:
        gaps = np.diff(positions, prepend=-1) - 1
        costs[Kind.BITMAP] = _padded(-(-span // 8)) + values
        for kind, dtype in _GAPS.items():
            most = int(np.iinfo(dtype).max)
            skips = int((gaps[gaps >= most] // most).sum())
            costs[Kind(kind)] = _padded((count + skips) * dtype.itemsize) + values
    kind = min(costs, key=lambda k: (costs[k], k))
    plain = words.view(WORDS[size])
    if kind is Kind.DENSE:
        return Record(kind, size, first, span, span, np.empty(0, np.uint8), np.array(plain).view(np.uint8))
    if kind is Kind.BITMAP:
        mask = np.zeros(span, np.bool_)
        mask[positions] = True
        index = np.packbits(mask, bitorder="little")
    else:
        index = _gap_index(gaps, _GAPS[kind])
    return Record(kind, size, first, span, count, index, plain.take(positions).view(np.uint8))


def _gap_index(gaps: Ints, dtype: Any) -> Bytes:
    most = int(np.iinfo(dtype).max)
    large = np.flatnonzero(gaps >= most)
    if not len(large):
        return gaps.astype(dtype).view(np.uint8)
    skips, rest = gaps[large] // most, gaps.copy()
    rest[large] -= skips * most
    index = np.insert(rest.astype(dtype), np.repeat(large, skips), most)
    return index.view(np.uint8)


def message_bytes(records: Iterable[Record]) -> int:
    return HEADER_BYTES + sum(record.nbytes for record in records)


def write_message(out: Bytes, label: Label, records: Sequence[tuple[int, Record]]) -> int:
    """Lay a message down at the beginning of `out`; returns its bytes. records: (transfer, record), in order."""
    at = HEADER_BYTES
    for transfer, r in records:
        head = _RECORD.pack(transfer, r.kind, r.itemsize, 0, r.first, r.span, r.changed, len(r.index), 0)
        out[at : at + RECORD_BYTES] = np.frombuffer(head, np.uint8)
        at += RECORD_BYTES
        for part in (r.index, r.values):
            end, room = at + len(part), at + _padded(len(part))
            out[at:end] = part
            out[end:room] = 0
            at = room
    head = _header(label, len(records), at - HEADER_BYTES)
    out[:HEADER_BYTES] = np.frombuffer(head, np.uint8)
    out[_DIGEST_AT:HEADER_BYTES] = np.frombuffer(xxhash.xxh3_128_digest(out[:at].data), np.uint8)
    return at


def _header(label: Label, records: int, body: int, digest: bytes = bytes(16)) -> bytes:
    names = (label.session, label.base.session, label.base.digest, label.plan)
    return _HEADER.pack(
        MAGIC, FORMAT, 0, records, *(xxhash.xxh3_128_digest(name.encode()) for name in names), label.base.version,
        label.target, label.source, 0, body, digest,
    )  # fmt: skip


_FIELDS = (
    "magic", "format", "reserved bytes", "number of records", "session", "base session", "base digest", "plan", "base version",
    "target", "source rank", "reserved bytes", "size",
)  # fmt: skip


def decode(raw: Bytes, label: Label, transfers: Sequence[tuple[int, int]]) -> list[Change]:
    """Everything a message changes. raw: exactly its bytes. transfers: (elements, bytes of one) of each that it may speak of.

    Raises DeltaError for anything that is not as the module docstring says: nothing was applied then.
    """
    where = f"delta from trainer rank {label.source} in session {label.session}"
    if len(raw) < HEADER_BYTES:
        raise DeltaError(f"{where}: {len(raw)} bytes, a header alone has {HEADER_BYTES}")
    raw = np.ascontiguousarray(raw)
    head = raw[:HEADER_BYTES].tobytes()
    found = _HEADER.unpack(head)
    records = int(found[3])
    want = _HEADER.unpack(_header(label, records, len(raw) - HEADER_BYTES))
    if wrong := [name for name, a, b in zip(_FIELDS, found, want, strict=False) if a != b]:
        raise DeltaError(f"{where} on {label.base.text()}: the message's header has another {wrong[0]}; it is not for here")
    hasher = xxhash.xxh3_128(head[:_DIGEST_AT] + bytes(16))
    hasher.update(raw[HEADER_BYTES:].data)
    if hasher.digest() != found[-1]:
        raise DeltaError(f"{where}: the message's {len(raw)} bytes are not those that were sent (digest)")
    return list(_records(raw, records, transfers, where))


def _records(raw: Bytes, count: int, transfers: Sequence[tuple[int, int]], where: str) -> Iterator[Change]:
    at, before = HEADER_BYTES, (-1, 0)
    for number in range(count):
        here = f"{where}, record {number}"
        if at + RECORD_BYTES > len(raw):
            raise DeltaError(f"{here}: the message ends before it")
        head = _RECORD.unpack(raw[at : at + RECORD_BYTES].tobytes())
        transfer, kind, size, zero, first, span, changed, index_bytes, also_zero = head
        at += RECORD_BYTES
        if zero or also_zero or kind not in iter(Kind):
            raise DeltaError(f"{here}: unknown kind {kind} or reserved bytes in use")
        if transfer >= len(transfers) or first + span > transfers[transfer][0]:
            raise DeltaError(f"{here}: elements [{first}, {first + span}) of transfer {transfer} are not in the plan")
        if size != transfers[transfer][1] or not 1 <= changed <= span:
            raise DeltaError(f"{here}: {changed} of {span} elements of {size} bytes; transfer {transfer} has other ones")
        if (transfer, first) < before:
            raise DeltaError(f"{here}: transfer {transfer} from element {first} overlaps what came before, or comes late")
        before = (transfer, first + span)
        values_at = at + _padded(index_bytes)
        end = values_at + changed * size
        room = values_at + _padded(changed * size)
        if room > len(raw):
            raise DeltaError(f"{here}: {index_bytes} bytes of index and {changed} values leave the message")
        if raw[at + index_bytes : values_at].any() or raw[end:room].any():
            raise DeltaError(f"{here}: bytes between its parts are not zero")
        positions = _positions(Kind(kind), raw[at : at + index_bytes], span, changed, here)
        yield Change(transfer, first, None if positions is None else first + positions, raw[values_at:end].view(WORDS[size]))
        at = room
    if at != len(raw):
        raise DeltaError(f"{where}: {len(raw) - at} bytes behind its last record")


def _positions(kind: Kind, index: Bytes, span: int, changed: int, here: str) -> Ints | None:
    if kind is Kind.DENSE:
        if changed != span or len(index):
            raise DeltaError(f"{here}: dense, but {changed} values and {len(index)} bytes of index for {span} elements")
        return None
    if kind is Kind.BITMAP:
        if len(index) != -(-span // 8):
            raise DeltaError(f"{here}: a bitmap of {len(index)} bytes for {span} elements")
        bits = np.unpackbits(index, bitorder="little")
        found = np.flatnonzero(bits)
        if len(found) != changed or found[-1] >= span:
            raise DeltaError(f"{here}: a bitmap of {len(found)} elements up to {found[-1:].tolist()}, not {changed} of {span}")
        return found
    dtype = _GAPS[kind]
    if len(index) % dtype.itemsize:
        raise DeltaError(f"{here}: {len(index)} bytes of gaps of {dtype.itemsize}")
    gaps = index.view(dtype)
    final = gaps != np.iinfo(dtype).max
    if int(final.sum()) != changed or not final[-1]:
        raise DeltaError(f"{here}: gaps lead to {int(final.sum())} elements, not {changed}")
    positions = np.cumsum(gaps, dtype=np.int64)[final] + np.arange(changed)
    if positions[-1] >= span:
        raise DeltaError(f"{here}: gaps lead to element {int(positions[-1])} of {span}")
    return positions


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
