"""Finding and encoding what changed on a GPU: thousands of regions in one launch, bodies stay in its memory.

Regions are compared where they lie with the snapshot, in chunks; what changed is told tile by tile (Kind.TILES of
weight_sync.delta.codec). The host sees of each record how many elements changed, and lays out its body. Besides the encoded
changes themselves it takes an eighth of a chunk of memory, for flags.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_sync.delta.codec import ALL, TILE
from weight_sync.delta.message import HEADER_BYTES, RECORD, RECORD_BYTES, Kind, body_bytes
from weight_sync.device.lanes import finish
from weight_sync.device.tables import Box, Tables
from weight_sync.layout.table import Ints

CHUNK = {"device": 2 << 30, "host": 256 << 20}
"""Bytes of the snapshot that are compared at a time, by where it is kept."""
COPYING = 512
"""Programs of copies inside one GPU's memory, beside nothing else."""
_SPAN = 2 << 20
"""Most bytes of one record's elements."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What changed in some regions. directory: its records, `transfer` being the number of the region; at: byte of `bodies`
    at which each one's body begins. bodies: uint8, on the GPU; None where it would take more than is left."""

    directory: NDArray[Any]
    at: Ints
    bodies: Any

    def nbytes(self, copies: Ints) -> int:
        """Of all its records, each copies[region] times."""
        return int(((body_bytes(self.directory) + RECORD_BYTES) * copies[self.directory["transfer"]]).sum())


class DeviceChanges:
    """The regions of a rank that a GPU compares by itself.

    numbers, boxes, start: of each region its number, where it lies, and at which byte of the snapshot. message: most bytes of a
    message.
    """

    def __init__(self, device: Any, numbers: Sequence[int], boxes: Sequence[Box], start: Sequence[int], message: int) -> None:
        from weight_sync.device import kernels

        self._device = device
        words = min(_SPAN, message - HEADER_BYTES - RECORD_BYTES) // 8 // kernels.PER_PROGRAM * kernels.PER_PROGRAM
        self._groups: list[_Group] = []
        self.numbers: list[int] = []
        for size in sorted({box[1] for box in boxes}):
            mine = [i for i, box in enumerate(boxes) if box[1] == size and words > 0 and Tables([box]).word == 8]
            if mine:
                group = _Group(
                    size, [numbers[i] for i in mine], Tables([boxes[i] for i in mine], 8), [start[i] for i in mine], words
                )
                self._groups.append(group)
                self.numbers += group.numbers

    def find(self, snapshot: Any, left: int, copies: Ints) -> Iterator[Found]:
        """What differs from the snapshot (uint8, in host memory or on the GPU), which is brought up to date.

        left: bytes that all records may take, each counted copies[region] times. Ends with bodies of None where they take more.
        """
        import torch  # pyright: ignore[reportMissingImports] - what is on a GPU is a torch tensor

        chunk = CHUNK["device" if isinstance(snapshot, torch.Tensor) else "host"]
        with self.current():
            for group in self._groups:
                group.begin(self._device)
            parts = ((group, part) for group in self._groups for part in group.parts(chunk))
            # The GPU compares the next chunk while this one's records are laid out here. Not where chunks of the snapshot are
            # brought there and taken back: those of different item sizes may overlap.
            begun: deque[_Comparison] = deque()
            most = 2 if isinstance(snapshot, torch.Tensor) else 1
            while True:
                begun += (_Comparison(group, part, snapshot, self._device) for group, part in islice(parts, most - len(begun)))
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

        from weight_sync.device import kernels

        chunk = CHUNK["device" if isinstance(snapshot, torch.Tensor) else "host"]
        with self.current():
            for group in self._groups:
                group.begin(self._device)
                for part in group.parts(chunk):
                    known = torch.as_tensor(snapshot[part.low : part.high])
                    there = known if isinstance(snapshot, torch.Tensor) else known.to(self._device, copy=True)
                    target = group.copies.clone()
                    target[:, 0] += int(there.data_ptr()) - part.low
                    for blocks in part.blocks:
                        kernels.launch_copy(group.table, target, blocks, 8, programs=COPYING)
                    if there is not known:
                        known.copy_(there)

    def digests(self) -> dict[int, str]:
        """By number of the region, of the words that find() compared to its end: 16 hex digits."""
        return {number: digest for group in self._groups for number, digest in group.digests().items()}

    def current(self) -> AbstractContextManager[Any]:
        """The tensors' device, for launches."""
        import torch  # pyright: ignore[reportMissingImports]

        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


class _Comparison:
    """One chunk, as the GPU looks at it. A snapshot in host memory is brought there for it, and taken back."""

    def __init__(self, group: _Group, part: _Part, snapshot: Any, device: Any) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        from weight_sync.device import changes, kernels

        self._part, self._size, self._device = part, group.size, device
        self._host: Any = None
        known = snapshot[part.low : part.high]
        if not isinstance(snapshot, torch.Tensor):
            self._host = torch.from_numpy(known)
            known = self._host.to(device, copy=True)
        self._known, self._base = known, int(known.data_ptr()) - part.low
        flags = torch.empty(len(part.record) * kernels.PER_PROGRAM // group.size, dtype=torch.uint8, device=device)
        changes.launch_compare(group.table, *part.blocks, group.known, self._base, group.sums, flags, self._size)
        self._flagged = changes.Flagged(flags, part.record, part.first_unit, part.span, self._size, TILE, ALL)
        counts = self._flagged.count(part.last_unit)
        self._counts = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=device.type == "cuda")
        self._counts.copy_(counts, non_blocking=True)
        self._counted = torch.cuda.Event() if device.type == "cuda" else None
        if self._counted is not None:
            self._counted.record()

    def found(self, left: int, copies: Ints) -> Found:
        import torch  # pyright: ignore[reportMissingImports]

        if self._counted is not None:
            self._counted.synchronize()
        changed = self._counts.numpy()
        directory, at, layout = self._part.laid_out(changed, self._size)
        if Found(directory, at, None).nbytes(copies) > left:
            return Found(directory, at, None)
        bodies = torch.zeros(int(body_bytes(directory).sum()), dtype=torch.uint8, device=self._device)
        to = int(bodies.data_ptr())
        layout[0] += self._base
        layout[1] = np.where(layout[1] < 0, 0, layout[1] + to)
        layout[2] += to
        if (layout[1] > 0).any():
            self._flagged.emit(*_soon(layout, self._device))
        dense = directory["kind"] == Kind.DENSE
        if dense.any():
            self._copy(self._base + self._part.known_at[changed > 0][dense], to + at[dense], directory["span"][dense])
        if self._host is not None:
            self._host.copy_(self._known)
        return Found(directory, at, bodies)

    def _copy(self, source: Ints, target: Ints, span: NDArray[Any]) -> None:
        """All elements of dense records, out of the snapshot, which has the new ones by now."""
        import torch  # pyright: ignore[reportMissingImports]

        from weight_sync.device import kernels

        nbytes = span.astype(np.int64) * self._size
        word = next(word for word in (8, 4, 2, 1) if not ((source | nbytes) % word).any())
        table, blocks = Tables.of_ranges(source, nbytes, word).on(self._device, kernels.PER_PROGRAM)
        other = torch.from_numpy(Tables.of_ranges(target, nbytes, word).table).to(self._device)
        kernels.launch_copy(table, other, blocks, word)


class _Group:
    """Regions whose elements have one size."""

    def __init__(self, size: int, numbers: list[int], tables: Tables, start: list[int], words: int) -> None:
        self.size, self.numbers, self._tables, self._words = size, numbers, tables, words
        self._start = np.asarray(start, np.int64)[tables.owner] + tables.table[:, 6] * 8
        """Byte of the snapshot at which each row of the table begins."""
        self._nbytes = np.zeros(len(numbers), np.int64)
        np.add.at(self._nbytes, tables.owner, tables.table[:, 5] * 8)
        self._parts: dict[int, list[_Part]] = {}
        self.table: Any = None
        self.copies: Any = None
        """The same rows, contiguous, by byte of the snapshot."""
        self.known: Any = None
        self.sums: Any = None

    def begin(self, device: Any) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        if self.table is None:
            self.table = torch.from_numpy(self._tables.table).to(device)
            self.known = torch.from_numpy(self._start).to(device)
            copies = Tables.of_ranges(self._start, self._tables.table[:, 5] * 8, 8).table
            self.copies = torch.from_numpy(copies).to(device)
        self.sums = torch.zeros(len(self._tables.table), dtype=torch.int64, device=device)

    def parts(self, chunk: int) -> list[_Part]:
        """Rows whose snapshot lies within `chunk` bytes. Made once."""
        if chunk not in self._parts:
            ends = self._start + self._tables.table[:, 5] * 8
            cuts, low = [0], 0
            for row, (start, end) in enumerate(zip(self._start.tolist(), ends.tolist(), strict=True)):
                if row > cuts[-1] and end - low > chunk:
                    cuts.append(row)
                if row == cuts[-1]:
                    low = start
            bounds = zip(cuts, [*cuts[1:], len(ends)], strict=True)
            numbers = np.asarray(self.numbers, np.int64)[self._tables.owner]
            self._parts[chunk] = [
                _Part(self._tables, self._start, numbers, self.size, self._words, a, b, self.table.device) for a, b in bounds
            ]
        return self._parts[chunk]

    def digests(self) -> dict[int, str]:
        totals = np.zeros(len(self.numbers), np.uint64)
        np.add.at(totals, self._tables.owner, self.sums.cpu().numpy().view(np.uint64))
        found = finish(totals, self._nbytes.astype(np.uint64))
        return {number: f"{value:016x}" for number, value in zip(self.numbers, found.tolist(), strict=True)}


class _Part:
    """Rows [first, end) of a group: which programs compare them, and the records that they are cut into."""

    def __init__(
        self, tables: Tables, start: Ints, numbers: Ints, size: int, words: int, first: int, end: int, device: Any
    ) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        from weight_sync.device import kernels

        rows = np.zeros(len(start), np.bool_)
        rows[first:end] = True
        self.low, self.high = int(start[first]), int((start + tables.table[:, 5] * 8)[first:end].max())
        self.blocks = tuple(tables.blocks_on(device, kernels.PER_PROGRAM, rows & kind) for kind in (tables.plain, ~tables.plain))
        total = tables.table[first:end, 5]
        units = -(-total // kernels.PER_PROGRAM)
        # Flags, and so units, are in the order of the blocks: of all plain rows, then of the others.
        order = np.argsort(~tables.plain[first:end], kind="stable")
        unit = np.empty_like(units)  # the first of each row
        unit[order] = np.cumsum(units[order]) - units[order]
        count = -(-total // words)  # records of each row
        row = np.repeat(np.arange(len(total)), count)
        word = (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)) * words
        of_record = np.minimum(total[row] - word, words)
        each = 8 // size
        self._number = numbers[first:end][row]
        self._first = (tables.table[first:end, 6][row] + word) * each
        self._span = of_record * each
        self.known_at = start[first:end][row] + word * 8
        begin, units = unit[row] + word // kernels.PER_PROGRAM, -(-of_record // kernels.PER_PROGRAM)
        record = np.empty(int(units.sum()), np.int32)
        record[np.arange(len(record)) + np.repeat(begin - (np.cumsum(units) - units), units)] = np.repeat(
            np.arange(len(row)), units
        )
        there = [torch.from_numpy(column).to(device) for column in (record, self._span, begin, begin + units - 1)]
        self.record, self.span, self.first_unit, self.last_unit = there

    def laid_out(self, changed: Ints, size: int) -> tuple[NDArray[Any], Ints, Ints]:
        """From the elements told of each record: the directory of those with any; where their bodies lie; and [3, records]
        byte of the snapshot, byte of the index (-1: none) and of the values."""
        tiles = -(-self._span // TILE)
        index, values = tiles + changed, changed * size
        tiled = -(-index // 8) * 8 + -(-values // 8) * 8
        dense = tiled >= -(-self._span * size // 8) * 8
        directory = np.zeros(len(changed), RECORD)
        directory["transfer"], directory["itemsize"] = self._number, size
        directory["kind"] = np.where(dense, Kind.DENSE, Kind.TILES)
        directory["first"], directory["span"] = self._first, self._span
        directory["changed"] = np.where(dense, self._span, changed)
        directory["index"] = np.where(dense, 0, index)
        some = changed > 0
        sizes = np.where(some, body_bytes(directory), 0)
        at = np.cumsum(sizes) - sizes
        layout = np.stack([self.known_at, np.where(some & ~dense, at, -1), at + -(-index // 8) * 8])
        return directory[some], at[some], layout


def _soon(array: NDArray[Any], device: Any) -> Any:
    """On the device before whatever is asked of it next; the host does not wait."""
    import torch  # pyright: ignore[reportMissingImports]

    here = torch.from_numpy(array)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
