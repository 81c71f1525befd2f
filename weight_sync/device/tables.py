"""Strided regions of device memory as the tables that the Triton kernels read.

A region is an affine box: address of its first element, item size, strides and shape in elements, as in
weight_sync.layout.table. Dims that are contiguous are merged; what is left is (outer, inner, run). Boxes with more loops become
several rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Box = tuple[int, int, Sequence[int], Sequence[int]]
"""(address of the first element, bytes of an element, strides in elements, shape)"""

_MOST_WORDS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class _Row:
    base: int
    dims: tuple[tuple[int, int], ...]
    """(count, byte stride), outermost first, without the run."""
    run: int
    """Bytes of one run."""

    @property
    def word(self) -> int:
        """The largest word, 8 bytes at most, that all addresses and runs of the region are multiples of."""
        unit = gcd(8, self.base, self.run)
        for _, stride in self.dims:
            unit = gcd(unit, stride)
        return unit


def _collapse(address: int, itemsize: int, strides: Sequence[int], shape: Sequence[int]) -> _Row:
    dims = [(n, s * itemsize) for n, s in zip(shape, strides, strict=True) if n != 1]
    run = itemsize
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    merged: list[tuple[int, int]] = []
    for n, stride in dims:
        if merged and merged[-1][1] == n * stride:
            merged[-1] = (merged[-1][0] * n, stride)
        else:
            merged.append((n, stride))
    return _Row(address, tuple(merged), run)


def _rows(row: _Row) -> list[tuple[_Row, int]]:
    """The region as rows of at most two loops, each with the byte of the region at which it begins."""
    if len(row.dims) <= 2:
        return [(row, 0)]
    (count, stride), rest = row.dims[0], row.dims[1:]
    nbytes = row.run * int(np.prod([n for n, _ in rest]))
    return [
        (part, index * nbytes + at)
        for index in range(count)
        for part, at in _rows(_Row(row.base + index * stride, rest, row.run))
    ]


def pair(sources: Sequence[Box], targets: Sequence[Box]) -> tuple[Tables, Tables]:
    """Tables of equal rows for a copy: box i of `sources` has the shape of box i of `targets`, their strides differ."""
    here: list[Box] = []
    there: list[Box] = []
    todo = list(zip(sources, targets, strict=True))[::-1]
    while todo:
        one, other = todo.pop()
        if max(len(_collapse(*one).dims), len(_collapse(*other).dims)) <= 2:
            here.append(one)
            there.append(other)
        else:
            todo += list(zip(_cut(one), _cut(other), strict=True))[::-1]
    word = min(Tables(here).word, Tables(there).word)
    return Tables(here, word), Tables(there, word)


def fits(box: Box) -> bool:
    """Whether one launch can take a region, in words of its own items."""
    if prod(box[3]) <= _MOST_WORDS:
        return True
    try:
        Tables([box], box[1])
    except ValueError:
        return False
    return True


def _cut(box: Box) -> list[Box]:
    """A box along its outermost dim of more than one element."""
    address, itemsize, strides, shape = box
    d = next(i for i, n in enumerate(shape) if n > 1)
    rest = (*shape[:d], 1, *shape[d + 1 :])
    return [(address + i * strides[d] * itemsize, itemsize, strides, rest) for i in range(shape[d])]


class Tables:
    """Boxes ready for a launch: table [rows, 7] int64, owner [rows] (which box a row belongs to), word (bytes).

    A row: base address, words of one run, runs of the inner loop, byte strides of the outer and the inner loop, words in all,
    and (digests only) the position of its first word in what is digested.

    word: 8 if every box allows it, else the largest that all do; given: that one, which every box must allow. Raises ValueError
    for a box of 2^31 words or more.
    """

    def __init__(self, boxes: Sequence[Box], word: int | None = None) -> None:
        rows: list[tuple[_Row, int, int]] = []
        for owner, (address, itemsize, strides, shape) in enumerate(boxes):
            if 0 in shape:
                continue
            rows += [(row, at, owner) for row, at in _rows(_collapse(address, itemsize, strides, shape))]
        self.word = word if word is not None else min((gcd(row.word, at) for row, at, _ in rows), default=8)
        table = np.zeros((len(rows), 7), np.int64)
        for i, (row, at, _) in enumerate(rows):
            loops = [(1, 0), (1, 0), *row.dims][-2:]
            total = row.run * loops[0][0] * loops[1][0] // self.word
            if total > _MOST_WORDS:
                raise ValueError(f"a region of {total * self.word} bytes is more than one launch can take; cut it")
            table[i] = (row.base, row.run // self.word, loops[1][0], loops[0][1], loops[1][1], total, at // self.word)
        self.table = table
        self.owner = np.asarray([owner for _, _, owner in rows], np.int64)

    @classmethod
    def of_ranges(cls, addresses: Ints, nbytes: Ints, word: int) -> Tables:
        """Contiguous byte ranges, vectorised. `word` must divide every address and size."""
        tables = cls((), word)
        total = nbytes // word
        if len(total) and int(total.max()) > _MOST_WORDS:
            raise ValueError(f"a range of {int(nbytes.max())} bytes is more than one launch can take; cut it")
        one, zero = np.ones_like(total), np.zeros_like(total)
        tables.table = np.stack([addresses, total, one, zero, zero, total, zero], axis=1)
        tables.owner = np.arange(len(total))
        return tables

    @property
    def plain(self) -> NDArray[np.bool_]:
        """Which rows are contiguous and made of whole aligned 16 bytes, which a thread can load at once."""
        base, run, total = (self.table[:, i] for i in (0, 1, 5))
        return np.asarray((run == total) & (base % 16 == 0) & (total * self.word % 16 == 0))

    def blocks(self, words: int, rows: NDArray[np.bool_] | None = None) -> tuple[NDArray[np.int32], Ints]:
        """(row, first word) of every program, each of which works on up to `words` words. rows: only of these."""
        total = self.table[:, 5] if rows is None else self.table[:, 5] * rows
        count = -(-total // words)
        row = np.repeat(np.arange(len(total)), count)
        first = (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)) * words
        return row.astype(np.int32), first

    def on(self, device: Any, words: int) -> tuple[Any, tuple[Any, Any]]:
        """The table and its blocks as tensors on a device."""
        return self._there(device), self.blocks_on(device, words)

    def in_two(self, device: Any, words: int) -> tuple[Any, tuple[Any, Any], tuple[Any, Any]]:
        """As on(), with the blocks of plain rows and of all others apart."""
        return self._there(device), self.blocks_on(device, words, self.plain), self.blocks_on(device, words, ~self.plain)

    def blocks_on(self, device: Any, words: int, rows: NDArray[np.bool_] | None = None) -> tuple[Any, Any]:
        import torch  # pyright: ignore[reportMissingImports] - only where there is device memory

        row, first = self.blocks(words, rows)
        return torch.from_numpy(row).to(device), torch.from_numpy(first).to(device)

    def _there(self, device: Any) -> Any:
        import torch  # pyright: ignore[reportMissingImports]

        return torch.from_numpy(self.table).to(device)
