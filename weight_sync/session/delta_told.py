"""A delta's messages on an engine's GPU: read, checked and written there; the host sees header, directory and sums.

What a trainer's GPU encodes (Kind.TILES and DENSE) is worked on in place, thousands of records in one launch. Other kinds,
which a trainer on the host sends, are decoded on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weight_sync.delta.codec import ALL, TILE, Change, changes
from weight_sync.delta.message import HEADER_BYTES, Kind, Label, directory_end, opened, padded, records_in, where_of
from weight_sync.device.tables import Box, Tables, fits
from weight_sync.errors import DeltaError
from weight_sync.layout.table import Ints
from weight_sync.session.arrays import columns_for, current, to_host
from weight_sync.session.digests import digest_of_bytes


class DevicePlaces:
    """Where the transfers of a binding end: tables for launches, one for each item size.

    row: each transfer's first row in the table of its size, -1 for one that is larger than a launch can address. Tables and
    kernels are made here, for engines stand still when the first delta comes.
    """

    def __init__(self, boxes: Sequence[Box], device: Any) -> None:
        import torch  # pyright: ignore[reportMissingImports] - what is on a GPU is a torch tensor

        from weight_sync.device.changes import warm

        self.row = np.full(len(boxes), -1, np.int64)
        self.tables: dict[int, Any] = {}
        for size in sorted({box[1] for box in boxes}):
            mine = [i for i, box in enumerate(boxes) if box[1] == size and fits(box)]
            tables = Tables([boxes[i] for i in mine], size)
            self.tables[size] = torch.from_numpy(tables.table).to(device)
            with current(device):
                warm(size, TILE, ALL, device)
            some, first = np.unique(tables.owner, return_index=True)
            self.row[np.asarray(mine, np.int64)[some]] = first


class DeviceMessage:
    """One message, copied and checked. raw: its bytes in the staging buffer; transfers: [n, 2] elements, bytes of one.

    Raises DeltaError for anything that is not as the format says; nothing is written before write().
    """

    def __init__(self, raw: Any, label: Label, transfers: Ints, kind: str, places: DevicePlaces) -> None:
        self._where, self._places, self._device = where_of(label), places, raw.device
        nbytes = len(raw)
        records = records_in(to_host(raw[:HEADER_BYTES]), label)
        front = to_host(raw[: min(directory_end(records), nbytes)])
        found = opened(front, nbytes, label, transfers, kind)
        # Copied: what is checked is what is used, whatever still arrives in the buffer.
        self._body = raw[found.begin :].clone()
        if digest_of_bytes(kind, self._body) != found.digest:
            raise DeltaError(f"{self._where}: {len(self._body)} bytes of records are not those that were sent (digest)")
        self._directory, self._at = found.directory, found.at
        here = np.isin(self._directory["kind"], (Kind.TILES, Kind.DENSE)) & (places.row[self._directory["transfer"]] >= 0)
        self._others = np.flatnonzero(~here)
        self._told: list[tuple[Any, Any]] = []  # (records of one item size, which they are)
        self.words = int(self._directory["changed"][here].sum(dtype=np.int64))
        self._check(np.flatnonzero(here))

    def others(self) -> list[Change]:
        """What the records say that are not written by write()."""
        if not len(self._others):
            return []
        return list(changes(to_host(self._body), self._directory, self._at, self._where, self._others))

    def write(self) -> None:
        """Put the words where they belong, on the current stream."""
        with current(self._device):
            for told, mine in self._told:
                first = self._directory["first"][mine].astype(np.int64)
                row = self._places.row[self._directory["transfer"][mine]]
                told.write(*self._there(columns_for(np.stack([first, row]))), self._places.tables[told.size])

    def _check(self, records: Ints) -> None:
        directory = self._directory[records]
        span, changed, index, size = (directory[key].astype(np.int64) for key in ("span", "changed", "index", "itemsize"))
        dense = directory["kind"] == Kind.DENSE
        tiles = np.where(dense, 0, -(-span // TILE) + changed)
        for i in np.flatnonzero((index != tiles) | (dense & (changed != span)))[:1].tolist():
            raise DeltaError(
                f"{self._at_record(records[i])}: {index[i]} bytes for {changed[i]} values of {span[i]} elements "
                f"({Kind(directory['kind'][i]).name})"
            )
        self._zeros(records, index, changed * size)
        with current(self._device):
            for each in np.unique(size).tolist():
                self._check_size(each, records[size == each])

    def _check_size(self, size: int, mine: Ints) -> None:
        from weight_sync.device.changes import GROUP, Told

        directory, at = self._directory[mine], self._at[mine]
        index, span = directory["index"].astype(np.int64), directory["span"].astype(np.int64)
        groups = -(-span // (TILE * GROUP))
        columns = np.stack([groups, np.where(directory["kind"] == Kind.DENSE, -1, at), at + padded(index), span])
        there = self._there(columns_for(columns))[:, : len(mine)]
        told = Told(self._body, size, TILE, ALL, int(groups.sum()), there)
        bad, *counts = told.tally().cpu().tolist()
        for i in np.flatnonzero(np.asarray(counts, np.int64) != directory["changed"])[:1].tolist():
            bad = min(bad, i)
        if bad < len(mine):
            raise DeltaError(
                f"{self._at_record(mine[bad])}: tiles of {counts[bad]} elements, not {directory['changed'][bad]}, "
                "or of more than they have"
            )
        if (bad := int(told.check().cpu())) < len(mine):
            raise DeltaError(f"{self._at_record(mine[bad])}: elements of a tile that it does not have, or not in order")
        self._told.append((told, mine))

    def _zeros(self, records: Ints, index: Ints, values: Ints) -> None:
        """The bytes between the parts of records."""
        at = self._at[records]
        low = np.concatenate([at + index, at + padded(index) + values])
        gap = np.concatenate([padded(index) - index, padded(values) - values])
        between = np.arange(int(gap.sum())) + np.repeat(low - (np.cumsum(gap) - gap), gap)
        if len(between) and bool((found := self._body[self._there(between)]).any()):
            number = np.repeat(np.tile(records, 2), gap)[np.flatnonzero(to_host(found))].min()
            raise DeltaError(f"{self._at_record(number)}: bytes between its parts are not zero")

    def _there(self, array: Ints) -> Any:
        import torch  # pyright: ignore[reportMissingImports]

        return torch.from_numpy(array).to(self._device)

    def _at_record(self, number: Any) -> str:
        return f"{self._where}, record {number}"
