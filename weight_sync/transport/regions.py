"""What every transport checks and cuts alike: registered address ranges, batches, and the error of one write of a batch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import BindError, TransportError
from weight_sync.ids import Deadline
from weight_sync.transport.base import Batch, Endpoint, Region

MAX_REGIONS = 4096
"""Regions on one side. Mooncake's registration is quadratic in their number and publishes them in one 1 MB message."""

Array = NDArray[np.int64]


class RegionTable:
    """Disjoint address ranges, kept sorted; answers for many at once whether each lies inside one of them."""

    def __init__(self) -> None:
        self._starts = np.empty(0, np.int64)
        self._ends = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def regions(self) -> list[Region]:
        return [Region(int(a), int(b - a)) for a, b in zip(self._starts, self._ends, strict=True)]

    def add(self, regions: Sequence[Region]) -> None:
        """All or none. BindError for an empty region, one that overlaps another, or more than MAX_REGIONS."""
        starts = np.concatenate([self._starts, np.array([r.address for r in regions], np.int64)])
        ends = np.concatenate([self._ends, np.array([r.address + r.nbytes for r in regions], np.int64)])
        if len(starts) > MAX_REGIONS:
            raise BindError(f"{len(starts)} regions to register, at most {MAX_REGIONS}: register storages, not single tensors")
        if (starts <= 0).any() or (ends <= starts).any():
            bad = next(r for r in regions if r.address <= 0 or r.nbytes <= 0)
            raise BindError(f"cannot register {bad}: a region needs a positive address and at least one byte")
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        clash = np.flatnonzero(starts[1:] < ends[:-1])
        if len(clash):
            i = int(clash[0])
            raise BindError(
                f"regions [{starts[i]:#x}, {ends[i]:#x}) and [{starts[i + 1]:#x}, {ends[i + 1]:#x}) overlap: "
                "every storage is registered once, whole"
            )
        self._starts, self._ends = starts, ends

    @classmethod
    def published(cls, ranges: Iterable[tuple[int, int]], *, in_parts: bool = False) -> RegionTable:
        """(address, bytes) pairs another engine published; those that overlap count as one range.

        in_parts: a region longer than an RDMA device registers at a time is published in parts of that length and a rest. So a
        range also goes on in one that touches it, if it is a whole part: as long as the longest of all.
        """
        listed = sorted(ranges)
        part = max((nbytes for _, nbytes in listed), default=0) if in_parts else None
        merged: list[list[int]] = []
        before = 0
        for start, nbytes in listed:
            if merged and (start < merged[-1][1] or (start == merged[-1][1] and before == part)):
                merged[-1][1] = max(merged[-1][1], start + nbytes)
            else:
                merged.append([start, start + nbytes])
            before = nbytes
        table = cls()
        table._starts = np.array([a for a, _ in merged], np.int64)
        table._ends = np.array([b for _, b in merged], np.int64)
        return table

    def first_outside(self, addresses: Array, nbytes: Array) -> int | None:
        """Index of the first range [address, address + nbytes) that no single region holds; None when all are held."""
        outside = np.flatnonzero(self.outside(addresses, nbytes))
        return int(outside[0]) if len(outside) else None

    def outside(self, addresses: Array, nbytes: Array) -> NDArray[np.bool_]:
        if not len(self._starts):
            return np.ones(len(addresses), bool)
        at = np.searchsorted(self._starts, addresses, side="right") - 1
        return (at < 0) | (addresses + nbytes > self._ends[np.maximum(at, 0)])


def failed_range(batch: Batch, index: int, reason: str, code: int | str) -> TransportError:
    """The error for range number `index` of a batch."""
    first = int(batch.remote[index])
    return TransportError(
        reason,
        endpoint=f"{batch.endpoint.transport}/{batch.endpoint.protocol} {batch.endpoint.address}",
        tensor=batch.tensors[index],
        byte_range=(first, first + int(batch.nbytes[index])),
        code=code,
    )


def failed_peer(endpoint: Endpoint | str, reason: str, code: int | str) -> TransportError:
    """The error for a peer, or a transport, as a whole: no tensor and no range."""
    where = endpoint if isinstance(endpoint, str) else f"{endpoint.transport}/{endpoint.protocol} {endpoint.address}"
    return TransportError(reason, endpoint=where, tensor="(none)", byte_range=(0, 0), code=code)


def check_usable(here: str, unusable: str | None, pid: int | None = None) -> None:
    """What every call but close() asks first. unusable: why not, "closed" after close(). pid: of the process that opened it,
    where a fork cannot use it."""
    if pid is not None and os.getpid() != pid:
        raise failed_peer(here, f"opened in process {pid}, used in its fork {os.getpid()}", "fork")
    if unusable is not None:
        code = "closed" if unusable == "closed" else "poisoned"
        raise failed_peer(here, f"the transport is {code}: {unusable}", code)


def check_deadline(endpoint: Endpoint | str, deadline: Deadline, what: str) -> float:
    """Seconds left; the contract's TransportError, not DeadlineExceeded, when none are."""
    left = deadline.remaining()
    if left <= 0:
        raise failed_peer(endpoint, f"{what}: not done within the deadline of {deadline.seconds:g} s", "deadline")
    return left


def check_local(batch: Batch, registered: RegionTable) -> None:
    """Refuse a batch with an empty range or with local bytes outside this side's registered regions; nothing was moved."""
    if batch.boxes is not None:
        raise ValueError("a strided batch for a transport that moves contiguous ranges only")
    if (batch.nbytes <= 0).any():
        index = int(np.flatnonzero(batch.nbytes <= 0)[0])
        raise ValueError(f"range {index} ({batch.tensors[index]}) has {int(batch.nbytes[index])} bytes")
    index = registered.first_outside(batch.local, batch.nbytes)
    if index is not None:
        first, last = int(batch.local[index]), int(batch.local[index] + batch.nbytes[index])
        raise failed_range(
            batch,
            index,
            f"local bytes [{first:#x}, {last:#x}) lie in none of the {len(registered)} regions registered here",
            "unregistered local",
        )


def check_remote(batch: Batch, published: RegionTable) -> None:
    """Refuse a batch with remote bytes outside what the peer published when it was probed; nothing was moved."""
    index = published.first_outside(batch.remote, batch.nbytes)
    if index is not None:
        raise failed_range(
            batch,
            index,
            f"these bytes lie in none of the {len(published)} regions that the peer had registered when probed",
            "unregistered remote",
        )


def split(local: Array, remote: Array, nbytes: Array, piece: int) -> tuple[Array, Array, Array, Array]:
    """Cut ranges longer than `piece` bytes. Returns local, remote, bytes, and the index of the range each came from."""
    counts = -(-nbytes // piece)
    parent = np.repeat(np.arange(len(nbytes)), counts)
    if len(parent) == len(nbytes):
        return local, remote, nbytes, parent
    first = np.cumsum(counts) - counts
    offset = (np.arange(len(parent)) - first[parent]) * piece
    return local[parent] + offset, remote[parent] + offset, np.minimum(piece, nbytes[parent] - offset), parent
