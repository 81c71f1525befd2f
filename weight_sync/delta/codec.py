"""How a record of a delta tells which elements changed, and the messages of such records. Pure numpy.

    DENSE   no index: every element of the span has a value
    BITMAP  one bit for each element of the span, lowest bit of the first byte first
    GAPS8   one byte for each value: unchanged elements since the one before; 255 stands for 255 elements without a value
    GAPS16  the same in two bytes, with 65535
    TILES   the span in tiles of 256 elements: one byte for each tile, how many of its elements have a value, 255 for all of
            them; then one byte for each value, its element of the tile. What a GPU writes and reads: every tile by itself

encode() takes the smallest of the first four. Per changed bf16 element GAPS8 costs about 3 bytes when 1% change, GAPS16 4 when
0.1% do, BITMAP 2 and an eighth of the rest when many do, TILES 3 and 1/256 of the rest. decode() refuses whatever is not
exactly this, before anything is applied. What stands around the records is in weight_sync.delta.message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_sync.delta.message import (
    HEADER_BYTES,
    RECORD,
    RECORD_BYTES,
    XXH3,
    Bytes,
    Kind,
    Label,
    body_digest,
    directory_end,
    head,
    opened,
    padded,
    where_of,
)
from weight_sync.errors import DeltaError
from weight_sync.layout.table import Ints

WORDS: dict[int, Any] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
TILE = 256
ALL = 255
"""A tile's byte that says that all of its elements have a value."""


_GAPS: dict[int, Any] = {Kind.GAPS8: np.dtype("u1"), Kind.GAPS16: np.dtype("<u2")}


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

    def entry(self, transfer: int) -> tuple[int, ...]:
        """Its row of the directory."""
        return (transfer, self.kind, self.itemsize, 0, self.first, self.span, self.changed, len(self.index), 0)

    def write(self, out: Bytes) -> None:
        """Its body into `out`, which has nbytes - RECORD_BYTES bytes."""
        values = padded(len(self.index))
        out[: len(self.index)] = self.index
        out[len(self.index) : values] = 0
        out[values : values + len(self.values)] = self.values
        out[values + len(self.values) :] = 0


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Decoded: the new words at `positions` (elements of the transfer, ascending), or, where None, at all from `first` on."""

    transfer: int
    first: int
    positions: Ints | None
    values: NDArray[Any]


def record_bytes(index: int, values: int) -> int:
    return RECORD_BYTES + padded(index) + padded(values)


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
    dense, values = padded(span * size), padded(count * size)
    costs, gaps = {Kind.DENSE: dense}, positions
    if values < dense:
        gaps = np.diff(positions, prepend=-1) - 1
        costs[Kind.BITMAP] = padded(-(-span // 8)) + values
        for kind, dtype in _GAPS.items():
            most = int(np.iinfo(dtype).max)
            skips = int((gaps[gaps >= most] // most).sum())
            costs[Kind(kind)] = padded((count + skips) * dtype.itemsize) + values
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


def write_message(out: Bytes, label: Label, records: Sequence[tuple[int, Record]], kind: str = XXH3) -> int:
    """Lay a message down at the beginning of `out`; returns its bytes. records: (transfer, record), in order."""
    directory = np.asarray([record.entry(transfer) for transfer, record in records], RECORD)
    begin = at = directory_end(len(directory))
    for _, record in records:
        end = at + record.nbytes - RECORD_BYTES
        record.write(out[at:end])
        at = end
    out[:begin] = head(label, directory, at - begin, kind, body_digest(kind, out[begin:at]))
    return at


def decode(raw: Bytes, label: Label, transfers: Sequence[tuple[int, int]] | Ints, kind: str = XXH3) -> list[Change]:
    """Everything a message changes. raw: exactly its bytes. transfers: (elements, bytes of one) of each that it may speak of.
    kind: of the digest over the bodies.

    Raises DeltaError for anything that is not as this and message.py say: nothing was applied then.
    """
    raw = np.ascontiguousarray(raw)
    found = opened(raw, len(raw), label, np.asarray(transfers, np.int64).reshape(-1, 2), kind)
    if body_digest(kind, raw[found.begin :]) != found.digest:
        raise DeltaError(f"{where_of(label)}: {len(raw) - found.begin} bytes of records are not those that were sent (digest)")
    return list(changes(raw[found.begin :], found.directory, found.at, where_of(label)))


def changes(bodies: Bytes, directory: NDArray[Any], at: Ints, where: str, numbers: Ints | None = None) -> Iterator[Change]:
    """What records of a message change. at: where each one's body begins in `bodies`. numbers: which they are, if not all."""
    for number in range(len(directory)) if numbers is None else numbers.tolist():
        entry, here = directory[number], f"{where}, record {number}"
        _, kind, size, _, first, span, changed, index_bytes, _ = (int(value) for value in entry)
        index_end = int(at[number]) + index_bytes
        values_at = int(at[number]) + padded(index_bytes)
        end = values_at + changed * size
        room = values_at + padded(changed * size)
        if bodies[index_end:values_at].any() or bodies[end:room].any():
            raise DeltaError(f"{here}: bytes between its parts are not zero")
        positions = _positions(Kind(kind), bodies[int(at[number]) : index_end], span, changed, here)
        values = bodies[values_at:end].view(WORDS[size])
        yield Change(int(entry["transfer"]), first, None if positions is None else first + positions, values)


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
    if kind is Kind.TILES:
        return _tile_positions(index, span, changed, here)
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


def _tile_positions(index: Bytes, span: int, changed: int, here: str) -> Ints:
    tiles = -(-span // TILE)
    if len(index) != tiles + changed:
        raise DeltaError(f"{here}: {len(index)} bytes for {tiles} tiles and {changed} values")
    held = index[:tiles].astype(np.int64)
    room = np.minimum(TILE, span - TILE * np.arange(tiles))
    count = np.where(held == ALL, room, held)
    if (count > room).any() or int(count.sum()) != changed:
        raise DeltaError(f"{here}: tiles of {int(count.sum())} elements, not {changed}, or of more than they have")
    tile = np.repeat(np.arange(tiles), count)
    place = index[tiles:].astype(np.int64)
    positions = tile * TILE + place
    if (place >= room[tile]).any() or (np.diff(positions) <= 0).any():
        raise DeltaError(f"{here}: elements of a tile that it does not have, or not in order")
    return positions
