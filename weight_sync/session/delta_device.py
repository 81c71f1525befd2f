"""Finding and encoding what changed on a GPU: thousands of regions in one launch, bodies stay in its memory.

Regions are compared where they lie with the snapshot, in parts; what changed is told tile by tile (Kind.TILES of
weight_sync.delta.codec). The host sees of each record how many elements changed, and lays out its body. Besides the encoded
changes themselves it takes a bit for each element of two parts, for flags.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_sync.delta.codec import ALL, TILE
from weight_sync.delta.message import HEADER_BYTES, RECORD, RECORD_BYTES, Kind, body_bytes, padded
from weight_sync.device.lanes import finish
from weight_sync.device.tables import Box, Tables
from weight_sync.errors import BindError, listed
from weight_sync.layout.table import Ints
from weight_sync.session.arrays import columns_for, current, soon

CHUNK = {"device": 4 << 30, "host": 256 << 20}
"""Bytes of the snapshot that are compared at a time, by where it is kept."""
COPYING = 512
"""Programs of copies inside one GPU's memory, beside nothing else."""
_SPAN = 16 << 20
"""Most bytes of one record's elements."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What changed in some regions. directory: its records, `transfer` being the number of the region; at: byte of `bodies`
    at which each one's body begins; sizes: bytes of each on the wire. elements: that were compared. bodies: uint8, on the GPU;
    None where all records together would take more than is left."""

    directory: NDArray[Any]
    at: Ints
    sizes: Ints
    elements: int
    bodies: Any = None

    def nbytes(self, copies: Ints) -> int:
        """Of all its records, each copies[region] times."""
        return int((self.sizes * copies[self.directory["transfer"]]).sum())


class DeviceChanges:
    """The regions of a rank that a GPU compares by itself. numbers: which they are.

    message: most bytes of a message; below about 64 KB nothing is compared here. chunk: bytes of the snapshot at a time.
    """

    def __init__(self, device: Any, message: int, chunk: int) -> None:
        from weight_sync.device import kernels

        self._device, self._chunk = device, chunk
        self._words = min(_SPAN, message - HEADER_BYTES - RECORD_BYTES) // 8 // kernels.PER_PROGRAM * kernels.PER_PROGRAM
        self._parts: list[_Part] = []
        self.numbers: set[int] = set()

    def add(self, numbers: Sequence[int], boxes: Sequence[Box], start: Sequence[int]) -> None:
        """Regions that lie in live parameters. start: byte of the snapshot at which each begins."""
        even = [i for i, box in enumerate(boxes) if self._words and 0 not in box[3] and Tables([box]).word == 8]
        for size in sorted({boxes[i][1] for i in even}):
            mine = [i for i in even if boxes[i][1] == size]
            tables = Tables([boxes[i] for i in mine], 8)
            at = np.asarray([start[i] for i in mine], np.int64)[tables.owner] + tables.table[:, 6] * 8
            number = np.asarray([numbers[i] for i in mine], np.int64)[tables.owner]
            for rows in _cuts(at, at + tables.table[:, 5] * 8, self._chunk):
                plain = tables.plain[rows] & (at[rows] % 16 == 0)
                self._parts.append(_Part(self._device, size, self._words, tables.table[rows], plain, at[rows], number[rows]))
        self.numbers |= {numbers[i] for i in even}

    def add_filled(self, fill: Callable[[], Any], pieces: Sequence[tuple[int, int, int, int, int, int]]) -> None:
        """Pieces of regions that lie in a buffer after each fill(): (number of the region, bytes of an element, address, bytes,
        byte of the region at which it begins, byte of the snapshot there). All but the first two are multiples of 8."""
        if not self._words:
            return
        columns = np.asarray(pieces, np.int64).T
        for size in sorted(set(columns[1].tolist())):
            number, _, address, nbytes, first, start = columns[:, columns[1] == size]
            tables = Tables.of_ranges(address, nbytes, 8)
            tables.table[:, 6] = first // 8
            plain = tables.plain & (start % 16 == 0)  # both sides are asked for 16 bytes at a time
            self._parts.append(_Part(self._device, size, self._words, tables.table, plain, start, number, fill))
            fill = _nothing
        self.numbers |= set(columns[0].tolist())

    def check(self, nbytes: Mapping[int, int]) -> None:
        """Raise BindError unless exactly these bytes of each region are compared: what nobody looks at would never be sent."""
        found = dict.fromkeys(nbytes, 0)
        for part in self._parts:
            for number, size in zip(part.numbers.tolist(), part.nbytes.tolist(), strict=True):
                found[number] = found.get(number, 0) + size
        if wrong := [f"region {i}: {found[i]} of {nbytes.get(i, 0)} bytes" for i in found if found[i] != nbytes.get(i, 0)]:
            raise BindError(f"deltas: a GPU would compare other bytes than are sent: {listed(wrong)}")

    def find(self, snapshot: Any, left: int, copies: Ints) -> Iterator[Found]:
        """What differs from the snapshot (uint8, in host memory or on the GPU), which is brought up to date.

        left: bytes that all records may take, each counted copies[region] times. Ends with bodies of None where they take more.
        """
        import torch  # pyright: ignore[reportMissingImports] - what is on a GPU is a torch tensor

        # The GPU compares the next part while this one's records are laid out here. Not where parts of the snapshot are brought
        # there and taken back: those of different item sizes may overlap.
        most = 2 if isinstance(snapshot, torch.Tensor) else 1
        parts, begun = iter(self._parts), deque[_Comparison]()
        with current(self._device):
            while True:
                begun += (_Comparison(part, snapshot, self._device) for part in islice(parts, most - len(begun)))
                if not begun:
                    return
                found = begun.popleft().found(left, copies)
                yield found
                if found.bodies is None:
                    return
                left -= found.nbytes(copies)

    def store(self, snapshot: Any) -> None:
        """Copy all regions into the snapshot."""
        import torch  # pyright: ignore[reportMissingImports]

        with current(self._device):
            for part in self._parts:
                known = torch.as_tensor(snapshot[part.low : part.high])
                there = known if isinstance(snapshot, torch.Tensor) else known.to(self._device, copy=True)
                part.store(there)
                if there is not known:
                    known.copy_(there)

    def digests(self) -> tuple[Ints, NDArray[np.uint64]]:
        """Numbers of the regions and the digest of each, of the words that find() compared to its end."""
        import torch  # pyright: ignore[reportMissingImports]

        if not self._parts:
            return np.zeros(0, np.int64), np.zeros(0, np.uint64)
        sums = torch.cat([part.sums for part in self._parts]).cpu().numpy().view(np.uint64)
        rows = np.concatenate([part.numbers for part in self._parts])
        order = np.argsort(rows, kind="stable")
        numbers, first = np.unique(rows[order], return_index=True)
        nbytes = np.concatenate([part.nbytes for part in self._parts])[order]
        totals = np.add.reduceat(sums[order], first)
        return numbers, finish(totals, np.add.reduceat(nbytes, first).astype(np.uint64))


def _nothing() -> None: ...


def _cuts(start: Ints, end: Ints, chunk: int) -> Iterator[slice]:
    """Rows that lie within `chunk` bytes together, in the order given; at least one."""
    first = 0
    for row in range(1, len(start) + 1):
        if row == len(start) or int(end[row]) - int(start[first]) > chunk:
            yield slice(first, row)
            first = row


class _Comparison:
    """One part, as the GPU looks at it. A snapshot in host memory is brought there for it, and taken back."""

    def __init__(self, part: _Part, snapshot: Any, device: Any) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        from weight_sync.device import changes

        self._part, self._device = part, device
        self._host: Any = None
        self._known = snapshot[part.low : part.high]
        if not isinstance(snapshot, torch.Tensor):
            self._host = torch.from_numpy(self._known)
            self._known = self._host.to(device, copy=True)
        flags = part.compare(self._known)
        self._flagged = changes.Flagged(flags, part.record, part.first_unit, part.span, part.size, TILE, ALL)
        counts = self._flagged.count(part.last_unit)
        on_gpu = device.type == "cuda"
        self._counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=on_gpu)
        self._counts.copy_(counts, non_blocking=True)
        self._counted = torch.cuda.Event() if on_gpu else None
        if self._counted is not None:
            self._counted.record()

    def found(self, left: int, copies: Ints) -> Found:
        import torch  # pyright: ignore[reportMissingImports]

        if self._counted is not None:
            self._counted.synchronize()
        changed, part = self._counts.numpy(), self._part
        directory, at, layout = part.laid_out(changed)
        sizes = body_bytes(directory)
        found = Found(directory, at, sizes + RECORD_BYTES, part.elements)
        if found.nbytes(copies) > left:
            return found
        bodies = torch.zeros(int(sizes.sum()), dtype=torch.uint8, device=self._device)
        known, to = int(self._known.data_ptr()) - part.low, int(bodies.data_ptr())
        layout[0] += known
        layout[1] = np.where(layout[1] < 0, 0, layout[1] + to)
        layout[2] += to
        if layout[1].any():
            self._flagged.emit(*soon(columns_for(layout), self._device))
        dense = directory["kind"] == Kind.DENSE
        if dense.any():
            self._copy(known + part.known_at[changed > 0][dense], to + at[dense], directory["span"][dense])
        if self._host is not None:
            self._host.copy_(self._known)
        return replace(found, bodies=bodies)

    def _copy(self, source: Ints, target: Ints, span: NDArray[Any]) -> None:
        """All elements of dense records, out of the snapshot, which has the new ones by now."""
        from weight_sync.device import kernels

        nbytes = span.astype(np.int64) * self._part.size
        word = next(word for word in (8, 4, 2, 1) if not ((source | nbytes) % word).any())
        table, blocks = Tables.of_ranges(source, nbytes, word).on(self._device, kernels.PER_PROGRAM)
        kernels.launch_copy(table, soon(Tables.of_ranges(target, nbytes, word).table, self._device), blocks, word)


class _Part:
    """Rows of regions that are compared by one launch, and the records that they are cut into.

    table, plain: as in Tables, in words of 8 bytes; start: byte of the snapshot of each row; numbers: region of each.
    size: bytes of an element. words: most of a record, whole programs. fill: brings what is compared to where the rows say.
    """

    def __init__(
        self,
        device: Any,
        size: int,
        words: int,
        table: Ints,
        plain: NDArray[np.bool_],
        start: Ints,
        numbers: Ints,
        fill: Callable[[], Any] = _nothing,
    ) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        from weight_sync.device import kernels

        self.size, self.numbers, self._device, self._fill = size, numbers, device, fill
        total, position = table[:, 5], table[:, 6]
        self.nbytes = total * 8
        # What is plain in the snapshot must be so in a part of it that is brought to the GPU, which begins here.
        self.low, self.high = int(start.min()) // 16 * 16, int((start + self.nbytes).max())
        tables = Tables((), 8)
        tables.table = table
        self._table = torch.from_numpy(table).to(device)
        self._blocks: list[Any] = [tables.blocks_on(device, kernels.PER_PROGRAM, kind) for kind in (plain, ~plain)]
        self._start = torch.from_numpy(np.ascontiguousarray(start)).to(device)  # a column, by its address
        self.sums: Any = torch.zeros(len(table), dtype=torch.int64, device=device)
        units = -(-total // kernels.PER_PROGRAM)
        # Flags, and so units, are in the order of the blocks: of all plain rows, then of the others.
        order = np.argsort(~plain, kind="stable")
        unit = np.empty_like(units)  # the first of each row
        unit[order] = np.cumsum(units[order]) - units[order]
        count = -(-total // words)  # records of each row
        row = np.repeat(np.arange(len(total)), count)
        word = (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)) * words
        of_record = np.minimum(total[row] - word, words)
        self._number = numbers[row]
        self._first = (position[row] + word) * 8 // size
        self._span = of_record * 8 // size
        self.elements = int(self._span.sum())
        self.known_at = start[row] + word * 8
        begin, units = unit[row] + word // kernels.PER_PROGRAM, -(-of_record // kernels.PER_PROGRAM)
        record = np.empty(int(units.sum()), np.int32)
        record[np.arange(len(record)) + np.repeat(begin - (np.cumsum(units) - units), units)] = np.repeat(
            np.arange(len(row)), units
        )
        there = [torch.from_numpy(column).to(device) for column in (record, self._span, begin, begin + units - 1)]
        self.record, self.span, self.first_unit, self.last_unit = there

    def compare(self, known: Any) -> Any:
        """Flags of all elements that differ from `known`, bytes low to high of the snapshot, which gets what they are now."""
        import torch  # pyright: ignore[reportMissingImports]

        from weight_sync.device import changes, kernels

        self._fill()
        self.sums.zero_()
        flags = torch.empty(len(self.record) * kernels.PER_PROGRAM // self.size, dtype=torch.uint8, device=self._device)
        base = int(known.data_ptr()) - self.low
        changes.launch_compare(self._table, self._blocks, self._start, base, self.sums, flags, self.size)
        return flags

    def store(self, known: Any) -> None:
        """Copy the rows into `known`, bytes low to high of the snapshot."""
        import torch  # pyright: ignore[reportMissingImports]

        from weight_sync.device import kernels

        self._fill()
        one, zero, total = torch.ones_like(self._start), torch.zeros_like(self._start), self._table[:, 5]
        start = self._start + (int(known.data_ptr()) - self.low)
        target = torch.stack([start, total, one, zero, zero, total, zero], 1)
        for blocks in self._blocks:
            kernels.launch_copy(self._table, target, blocks, 8, programs=COPYING)

    def laid_out(self, changed: Ints) -> tuple[NDArray[Any], Ints, Ints]:
        """From the elements told of each record: the directory of those with any; where their bodies lie; and [3, records]
        byte of the snapshot, byte of the index (-1: none) and of the values."""
        size = self.size
        index, values = -(-self._span // TILE) + changed, changed * size
        dense = padded(index) + padded(values) >= padded(self._span * size)
        directory = np.zeros(len(changed), RECORD)
        directory["transfer"], directory["itemsize"] = self._number, size
        directory["kind"] = np.where(dense, Kind.DENSE, Kind.TILES)
        directory["first"], directory["span"] = self._first, self._span
        directory["changed"] = np.where(dense, self._span, changed)
        directory["index"] = np.where(dense, 0, index)
        some = changed > 0
        sizes = np.where(some, body_bytes(directory), 0)
        at = np.cumsum(sizes) - sizes
        layout = np.stack([self.known_at, np.where(some & ~dense, at, -1), at + padded(index)])
        return directory[some], at[some], layout
