"""Byte comparison by the source: read the live destination bytes back one-sided and compare them with what was to be sent.

Runs on a trainer rank, with its own transport and a bounded buffer. Digests say that something differs; this says where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from weight_sync.errors import VerifyError
from weight_sync.ids import Deadline
from weight_sync.layout.box import row_major
from weight_sync.layout.table import Ints
from weight_sync.plan.plan import Plan
from weight_sync.plan.runs import expand_runs, inner_elements, merge_runs
from weight_sync.session.arrays import equal, to_host
from weight_sync.transport.base import Batch, Endpoint, Transport

BUFFER_BYTES = 32 << 20
_RUNS = 1 << 15
"""Most runs of one read batch."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a transfer: plan row, first index and shape in the transfer's dims, byte in the buffer."""

    row: int
    at: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def compare(
    plan: Plan,
    rows: Ints,
    transport: Transport,
    stage: Any,
    *,
    endpoint: Callable[[int], Endpoint],
    address: Callable[[int], int],
    sent: Callable[[int, tuple[int, ...], tuple[int, ...]], Any],
    deadline: Deadline,
) -> tuple[int, int]:
    """Compare every byte of the transfers `rows`. Returns (bytes, reads).

    stage: registered on `transport`. endpoint: of a rollout rank. address: of element 0 of a transfer's destination parameter.
    sent(row, at, shape): the words that part of a transfer must have arrived as. Raises VerifyError naming tensor, both ranks
    and the first byte that differs; TransportError.
    """
    moved, reads = 0, 0
    for rank in np.unique(plan.target_rank[rows]).tolist():
        for group in _groups(plan, rows[plan.target_rank[rows] == rank], stage.storage.nbytes):
            batch = _batch(plan, group, stage, endpoint(rank), address)
            moved += transport.wait(transport.read(batch), deadline).nbytes
            reads += len(batch.nbytes)
            for tile in group:
                want = sent(tile.row, tile.at, tile.shape)
                found = stage.region(tile.offset, want, tile.shape)
                if not equal(want, found):
                    raise VerifyError(_text(plan, tile, to_host(want), to_host(found)))
    return moved, reads


def _tiles(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(at, shape) of boxes of at most about `limit` elements that fill `shape`, in row-major order."""
    if prod(shape) <= limit or not shape:
        yield (0,) * len(shape), shape
        return
    rest = prod(shape[1:])
    if rest > limit:
        for i in range(shape[0]):
            for at, part in _tiles(shape[1:], limit):
                yield (i, *at), (1, *part)
        return
    each = max(1, limit // rest)
    for low in range(0, shape[0], each):
        yield (low, *(0,) * (len(shape) - 1)), (min(each, shape[0] - low), *shape[1:])


def _groups(plan: Plan, rows: Ints, capacity: int) -> Iterator[list[Tile]]:
    """Tiles to one rank that fit the buffer and one batch together."""
    group: list[Tile] = []
    used = runs = 0
    for row in rows.tolist():
        size = int(plan.itemsize[row])
        shape = tuple(plan.shape[row].tolist())
        inner = int(inner_elements(plan.shape[row : row + 1], plan.target_strides[row : row + 1])[0])
        for at, part in _tiles(shape, max(1, min(capacity // size, _RUNS * inner))):
            nbytes, need = prod(part) * size, -(-prod(part) // inner)
            if group and (used + nbytes > capacity or runs + need > _RUNS):
                yield group
                group, used, runs = [], 0, 0
            group.append(Tile(row, at, part, used, nbytes))
            used += -(-nbytes // 8) * 8
            runs += need
    if group:
        yield group


def _batch(plan: Plan, group: Sequence[Tile], stage: Any, endpoint: Endpoint, address: Callable[[int], int]) -> Batch:
    row = np.asarray([t.row for t in group], np.int64)
    at = np.asarray([t.at for t in group], np.int64)
    shape = np.asarray([t.shape for t in group], np.int64)
    here = np.asarray([row_major(t.shape) for t in group], np.int64)
    there = plan.target_strides[row]
    start = plan.target_start[row] + (at * there).sum(axis=1)
    run, local, remote, count = expand_runs(shape, np.zeros(len(group), np.int64), here, start, there)
    size = plan.itemsize[row][run]
    base = np.asarray([stage.storage.address + t.offset for t in group], np.int64)[run]
    target = np.asarray([address(t.row) for t in group], np.int64)[run]
    local, remote, nbytes, first = merge_runs(base + local * size, target + remote * size, count * size, plan.target[row][run])
    return Batch(endpoint, local, remote, nbytes, [plan.catalog.name(t) for t in plan.tensor[row[run[first]]].tolist()])


def _text(plan: Plan, tile: Tile, want: Any, found: Any) -> str:
    row = tile.row
    s, t = plan.source_params[int(plan.source[row])], plan.target_params[int(plan.target[row])]
    wrong = want.reshape(-1) != found.reshape(-1)
    element = int(np.argmax(wrong))
    index = np.asarray(tile.at) + np.asarray(np.unravel_index(element, tile.shape))
    a, b = (x.reshape(-1)[element : element + 1].tobytes() for x in (want, found))
    byte = next(i for i in range(len(a)) if a[i] != b[i])
    at = (int(plan.target_start[row]) + int((index * plan.target_strides[row]).sum())) * int(plan.itemsize[row]) + byte
    return (
        f"{plan.catalog.name(int(plan.tensor[row]))} from trainer rank {s.rank} ({s.name}) to rollout rank {t.rank} "
        f"({t.name}): first byte that differs is {at} of the parameter, sent {a[byte]:#04x}, found {b[byte]:#04x}; "
        f"{int(wrong.sum())} of {wrong.size} elements compared together differ"
    )
