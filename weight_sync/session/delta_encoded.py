"""What changed on a trainer rank, encoded: records of its regions, and the messages of them for each rollout rank.

A region goes to several ranks, so its records are kept once, by region, and laid down in each message under the transfers of
that message's table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_sync.delta.codec import Record
from weight_sync.delta.message import HEADER_BYTES, RECORD, RECORD_BYTES, Label, body_bytes, directory_end, head
from weight_sync.delta.regions import Regions
from weight_sync.device.tables import Tables
from weight_sync.layout.table import Ints
from weight_sync.plan.plan import Plan
from weight_sync.session.arrays import on_host
from weight_sync.session.delta_device import COPYING, Found
from weight_sync.session.digests import digest_of_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """To one rollout rank: which records, the transfer of its table that each is of, and the bytes of it all."""

    target: int
    records: Ints
    transfers: Ints
    nbytes: int


class Encoded:
    """The records of a rank. held: bytes of bodies that may stay in a GPU's memory; further ones go to host memory."""

    def __init__(self, held: int = 0) -> None:
        self._left = held
        self._directories: list[NDArray[Any]] = [np.zeros(0, RECORD)]
        self._buffers: list[Any] = []
        self._places: list[Ints] = [np.zeros((0, 2), np.int64)]  # of each record: its buffer, and the byte of it
        self._sorted: tuple[NDArray[Any], Ints] | None = None

    def add(self, region: int, records: Sequence[Record]) -> None:
        """Of one region, in host memory."""
        if records:
            self._directories.append(np.asarray([record.entry(region) for record in records], RECORD))
            numbers = np.arange(len(self._buffers), len(self._buffers) + len(records))
            self._places.append(np.stack([numbers, np.zeros_like(numbers)], axis=1))
            self._buffers += records

    def add_found(self, found: Found) -> None:
        """Of many regions, in a GPU's memory."""
        if len(found.directory):
            bodies = found.bodies
            self._left -= int(bodies.nbytes)
            self._directories.append(found.directory)
            self._places.append(np.stack([np.full_like(found.at, len(self._buffers)), found.at], axis=1))
            self._buffers.append(bodies if self._left >= 0 else bodies.cpu())

    @property
    def changed(self) -> int:
        """Elements that have a value in the records, each region once."""
        return sum(int(directory["changed"].sum(dtype=np.int64)) for directory in self._directories)

    def _in_order(self) -> tuple[NDArray[Any], Ints]:
        """All records by region and element, and where their bodies are."""
        if self._sorted is None:
            directory, places = np.concatenate(self._directories), np.concatenate(self._places)
            order = np.lexsort((directory["first"], directory["transfer"]))
            self._sorted = directory[order], places[order]
        return self._sorted

    def messages(self, plan: Plan, regions: Regions, limit: int) -> Iterator[Message]:
        """Of at most `limit` bytes: for each destination the records of its transfers, in its table's order."""
        directory, _ = self._in_order()
        region = directory["transfer"].astype(np.int64)
        begin = np.searchsorted(region, np.arange(len(regions.first)))
        count = np.searchsorted(region, np.arange(len(regions.first)), "right") - begin
        nbytes = body_bytes(directory) + RECORD_BYTES
        to = plan.target_rank[regions.rows]
        for target in np.unique(to).tolist():
            mine = np.flatnonzero(to == target)
            table = np.searchsorted(plan.rows_to(target), regions.rows[mine])
            order = np.argsort(table)
            table, of = table[order], regions.of[mine][order]
            transfers = np.repeat(table, count[of])
            ends = np.cumsum(count[of])
            records = np.arange(len(transfers)) + np.repeat(begin[of] - (ends - count[of]), count[of])
            upto = np.cumsum(nbytes[records])
            low = 0
            while low < len(records):
                before = int(upto[low - 1]) if low else 0
                high = max(low + 1, int(np.searchsorted(upto, before + limit - HEADER_BYTES, "right")))
                size = HEADER_BYTES + int(upto[high - 1]) - before
                yield Message(target, records[low:high], transfers[low:high], size)
                low = high

    def lay_down(self, room: Any, message: Message, label: Label, kind: str) -> None:
        """Fill `room`, message.nbytes of a staging buffer. kind: of the digest over the bodies."""
        every, places = self._in_order()
        directory = every[message.records]
        directory["transfer"] = message.transfers
        sizes = body_bytes(directory)
        begin = directory_end(len(directory))
        at = begin + np.cumsum(sizes) - sizes
        self._bodies(room, places[message.records], at, sizes)
        digest = digest_of_bytes(kind, room[begin : message.nbytes])
        _assign(room[:begin], head(label, directory, message.nbytes - begin, kind, digest))

    def _bodies(self, room: Any, places: Ints, at: Ints, sizes: Ints) -> None:
        """places: buffer and byte of it of each body; at: byte of `room` that it belongs to."""
        new = np.ones(len(sizes), np.bool_)  # where one does not lie behind the one before
        new[1:] = (places[1:, 0] != places[:-1, 0]) | (places[1:, 1] != places[:-1, 1] + sizes[:-1])
        first = np.flatnonzero(new)
        nbytes = np.add.reduceat(sizes, first) if len(first) else sizes
        launch: list[tuple[int, int, int]] = []
        records: list[tuple[int, Record]] = []
        for (number, byte), to, size in zip(places[first].tolist(), at[first].tolist(), nbytes.tolist(), strict=True):
            buffer = self._buffers[number]
            if isinstance(buffer, Record):
                records.append((to, buffer))
            elif buffer.device == room.device:
                launch.append((buffer.data_ptr() + byte, room.data_ptr() + to, size))
            else:
                room[to : to + size].copy_(buffer[byte : byte + size])
        _write(records, room)
        if launch:
            from weight_sync.device import kernels

            source, target, sizes = np.asarray(launch, np.int64).T
            table, blocks = Tables.of_ranges(source, sizes, 8).on(room.device, kernels.PER_PROGRAM)
            other, _ = Tables.of_ranges(target, sizes, 8).on(room.device, kernels.PER_PROGRAM)
            kernels.launch_copy(table, other, blocks, 8, programs=COPYING)


def _write(records: Sequence[tuple[int, Record]], room: Any) -> None:
    """Bodies of records in host memory to these bytes of `room`; on a GPU those that follow each other by one copy."""
    if on_host(room):
        for at, record in records:
            record.write(room[at : at + record.nbytes - RECORD_BYTES])
        return
    ends = [at + record.nbytes - RECORD_BYTES for at, record in records]
    low = 0
    for i, end in enumerate(ends):
        if i + 1 == len(ends) or records[i + 1][0] != end:
            begin = records[low][0]
            content = np.empty(end - begin, np.uint8)
            for at, record in records[low : i + 1]:
                record.write(content[at - begin : at - begin + record.nbytes - RECORD_BYTES])
            _assign(room[begin:end], content)
            low = i + 1


def _assign(room: Any, content: NDArray[Any]) -> None:
    if on_host(room):
        room[:] = content
    else:
        import torch  # pyright: ignore[reportMissingImports] - what is not on the host is a torch tensor

        room.copy_(torch.from_numpy(content))
