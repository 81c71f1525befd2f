"""Parts of transfers that are packed or unpacked: how large transfers are cut, and when and where parts are staged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from weight_sync.layout.rowwise import product
from weight_sync.layout.table import Ints


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a transfer that is packed or unpacked: the box `at` (relative to the transfer) of `shape`, in elements.

    method: a weight_sync.plan.schedule.Method. round, stage: for what is unpacked, when it travels and at which byte of the
    destination's staging buffer it lands.
    """

    row: int
    method: int
    at: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int
    round: int = 0
    stage: int = 0


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces as columns, in the order of the plan, those of one transfer in row-major order. at, shape [pieces, dims]."""

    row: Ints
    method: Ints
    at: Ints
    shape: Ints
    nbytes: Ints
    round: Ints
    stage: Ints

    def __len__(self) -> int:
        return len(self.row)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._records)

    def of(self, rows: Ints) -> list[Piece]:
        """The pieces of these transfers, in order."""
        return self._made(np.flatnonzero(np.isin(self.row, rows)))

    @cached_property
    def _records(self) -> list[Piece]:
        return self._made(np.arange(len(self)))

    def _made(self, chosen: Ints) -> list[Piece]:
        def column(values: Ints) -> list[int]:
            return values[chosen].tolist()

        def boxes(values: Ints) -> list[tuple[int, ...]]:
            rows: list[list[int]] = values[chosen].tolist()
            return [tuple(row) for row in rows]

        numbers = (column(values) for values in (self.nbytes, self.round, self.stage))
        return list(map(Piece, column(self.row), column(self.method), boxes(self.at), boxes(self.shape), *numbers))


def cut(
    rows: Ints, shape: Ints, itemsize: Ints, limit: int, steps: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
) -> tuple[Ints, Ints, Ints]:
    """(index into `rows`, at, shape) of the pieces of transfers, each of at most `limit` bytes, in the order of `rows`.

    shape [rows, dims], itemsize [rows]. steps: row -> (step, phase) for transfers that may only be cut at multiples of a step;
    see split().
    """
    most = limit // itemsize
    many = np.flatnonzero(product(shape) > most).tolist()
    if not many:
        return np.arange(len(rows)), np.zeros_like(shape), shape
    found: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for i in many:
        size: list[int] = shape[i].tolist()
        found[i] = split(tuple(size), int(most[i]), *steps.get(int(rows[i]), (None, None)))
    count = np.ones(len(rows), np.int64)
    count[many] = [len(found[i]) for i in many]
    index = np.repeat(np.arange(len(rows)), count)
    at, sizes = np.zeros((len(index), shape.shape[1]), np.int64), shape.take(index, axis=0)
    first = np.cumsum(count) - count
    for i, boxes in found.items():
        place = slice(int(first[i]), int(first[i]) + len(boxes))
        at[place], sizes[place] = [a for a, _ in boxes], [s for _, s in boxes]
    return index, at, sizes


def split(
    shape: tuple[int, ...], limit: int, step: tuple[int, ...] | None = None, phase: tuple[int, ...] | None = None
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a box into (offset, shape) boxes of at most `limit` elements, along the outermost dims.

    step: cuts lie on multiples of it, counted from -phase; a box of one step may be larger than the limit, and so may whole
    rows of such boxes: boxes come in row-major order and each is one run of it, as what is written and digested must be.
    """
    total = prod(shape)
    unit, shift = step or (1,) * len(shape), phase or (0,) * len(shape)
    d = next((i for i, size in enumerate(shape) if size > unit[i] - shift[i]), None)
    if total <= limit or d is None or prod(shape[:d]) > 1:
        return [((0,) * len(shape), shape)]
    row = total // shape[d]
    each = max(unit[d], limit // row // unit[d] * unit[d])
    result: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    low = 0
    while low < shape[d]:
        high = min(shape[d], low + each - (shift[d] + low) % unit[d])
        part = (*shape[:d], high - low, *shape[d + 1 :])
        rest = (*shift[:d], (shift[d] + low) % unit[d], *shift[d + 1 :])
        for at, size in split(part, limit, step, rest):
            result.append(((*at[:d], at[d] + low, *at[d + 1 :]), size))
        low = high
    return result


def staged(rank: Ints, nbytes: Ints, budget: int) -> tuple[Ints, Ints]:
    """(round, byte) at which each piece lands in the staging buffer of its destination rank; filled in the order given."""
    rounds: list[int] = []
    stages: list[int] = []
    cursor: dict[int, tuple[int, int]] = {}
    ranks: list[int] = rank.tolist()
    sizes: list[int] = nbytes.tolist()
    for to, size in zip(ranks, sizes, strict=True):
        now, at = cursor.get(to, (0, 0))
        if at + size > budget:
            now, at = now + 1, 0
        rounds.append(now)
        stages.append(at)
        cursor[to] = (now, -(-(at + size) // 64) * 64)  # pieces start on cache lines
    return np.asarray(rounds, np.int64), np.asarray(stages, np.int64)
