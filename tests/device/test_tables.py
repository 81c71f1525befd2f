"""Strided boxes as kernel tables: the addresses that a program computes from a row are those of the box, in row-major order."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.device.tables import Box, Tables, pair


def box_bytes(box: Box) -> list[int]:
    """Addresses of a box's bytes in row-major order of its elements."""
    address, itemsize, strides, shape = box
    return [
        address + itemsize * sum(i * s for i, s in zip(index, strides, strict=True)) + byte
        for index in product(*map(range, shape))
        for byte in range(itemsize)
    ]


def table_bytes(tables: Tables, owner: int) -> list[int]:
    """What the kernels do with the rows of one box (weight_sync.device.kernels), in the order of their positions."""
    found: list[tuple[int, int]] = []
    for base, run, inner, outer_stride, inner_stride, total, position in tables.table[tables.owner == owner].tolist():
        for k in range(total):
            r, w = divmod(k, run)
            o, i = divmod(r, inner)
            at = base + o * outer_stride + i * inner_stride + w * tables.word
            found += [(position * tables.word + k * tables.word + b, at + b) for b in range(tables.word)]
    assert [at for at, _ in sorted(found)] == list(range(len(found)))
    return [address for _, address in sorted(found)]


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> Box:
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    strides = [0] * len(shape)
    step = 1
    for d in draw(st.permutations(range(len(shape)))):
        strides[d] = step
        step *= shape[d] * draw(st.sampled_from([1, 1, 2, 3]))
    return 4096 + draw(st.integers(0, 40)) * itemsize, itemsize, strides, shape


@given(st.lists(boxes(), min_size=1, max_size=4))
def test_a_table_reads_the_bytes_of_every_box_in_order(given_boxes: list[Box]) -> None:
    tables = Tables(given_boxes)
    for i, box in enumerate(given_boxes):
        assert table_bytes(tables, i) == box_bytes(box)


@given(st.data())
def test_a_pair_of_tables_moves_each_byte_to_its_place(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    other = (other[0] // other[1] * one[1], one[1], other[2], shape)
    source, target = pair([one], [other])
    assert source.word == target.word
    moves: dict[int, int] = {}
    for i in range(len(source.owner)):
        here, there = (_row_bytes(t, i) for t in (source, target))
        assert len(here) == len(there)
        moves |= dict(zip(there, here, strict=True))
    assert moves == dict(zip(box_bytes(other), box_bytes(one), strict=True))


def _row_bytes(tables: Tables, row: int) -> list[int]:
    single = Tables((), tables.word)
    single.table, single.owner = tables.table[row : row + 1].copy(), np.zeros(1, np.int64)
    single.table[:, 6] = 0
    return table_bytes(single, 0)


@given(st.lists(st.integers(1, 5000), max_size=8), st.sampled_from([1, 7, 64]))
def test_blocks_cover_every_word_once(sizes: list[int], words: int) -> None:
    at = np.arange(len(sizes), dtype=np.int64) * 8192
    tables = Tables.of_ranges(at + 4096, np.asarray(sizes, np.int64), 1)
    row, first = tables.blocks(words)
    covered = [(int(r), int(f) + k) for r, f in zip(row, first, strict=True) for k in range(min(words, sizes[r] - int(f)))]
    assert sorted(covered) == [(i, k) for i, size in enumerate(sizes) for k in range(size)]


@given(st.lists(boxes(), min_size=1, max_size=6), st.sampled_from([1, 7, 64]))
def test_plain_rows_are_runs_of_aligned_16_bytes_and_with_all_others_they_are_all_blocks(
    given_boxes: list[Box], words: int
) -> None:
    tables = Tables(given_boxes)
    for row, plain in enumerate(tables.plain.tolist()):
        at = _row_bytes(tables, row)
        pairs = [at[i : i + 16] for i in range(0, len(at), 16)]
        assert plain == (at == list(range(at[0], at[0] + len(at))) and all(p[0] % 16 == 0 and len(p) == 16 for p in pairs))
    apart = [
        set(zip(*map(np.ndarray.tolist, tables.blocks(words, rows)), strict=True)) for rows in (tables.plain, ~tables.plain)
    ]
    assert not apart[0] & apart[1]
    assert apart[0] | apart[1] == set(zip(*map(np.ndarray.tolist, tables.blocks(words)), strict=True))


def test_a_box_too_large_for_one_launch_is_refused() -> None:
    with pytest.raises(ValueError, match="cut it"):
        Tables([(4096, 1, (1,), (prod((2, 2**33)),))], 1)
    with pytest.raises(ValueError, match="cut it"):
        Tables.of_ranges(np.asarray([4096]), np.asarray([2**40]), 8)
