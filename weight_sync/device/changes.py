"""Triton kernels that find which elements of live parameters changed, and that put changed elements into others.

Regions are as in weight_sync.device.tables; what is told of a tile of elements is described in weight_sync.delta.codec. One launch
serves any number of regions, and Python sees sums over records of many tiles only. On the side that sends, in this order:

    compare_kernel  one flag for each element, the copy brought up to date, the digest: at the speed of memory
    count_kernel    of the flags, how many elements there are to tell of each tile
    emit_kernel     their places in the tiles and their words, each where the host has laid out its record

On the side that receives: tally_kernel, put_kernel to check, put_kernel to write. Imported only where there is CUDA (or
TRITON_INTERPRET=1 in the tests).
"""

from __future__ import annotations

from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from weight_sync.device.kernels import _WORD, PER_PROGRAM, _fields, _offsets
from weight_sync.device.lanes import GOLDEN, MIX_1, MIX_2

UNIT = 1024
"""Words whose changes one program of emit_kernel lays down; a program that compares has PER_PROGRAM words, as one that copies."""
UNITS = PER_PROGRAM // UNIT
GROUP = 128
"""Tiles that one program of the receiving side works on, each by one thread."""
AHEAD = 8
"""Told elements of a tile that its thread asks for before it writes any."""
COMPARED, ROW = 1, 1024
"""Rows of so many words that a program compares at a time: on an H200 1 x 1024 by 8 warps 3.4 TB/s, 4 x 512 2.2, 8 x 1024 1.2."""
COMPARE_WARPS, EMIT_WARPS = 8, 4
PROGRAMS = 132 * 16
"""Of launches whose programs take turns: enough for every multiprocessor of an H200."""


@triton.jit
def compare_kernel(
    table, block_region, block_first, known, known_base, sums, flags,
    SIZE: tl.constexpr, EACH: tl.constexpr, MASK: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    PLAIN: tl.constexpr, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr,
):  # fmt: skip
    """Compare regions with a copy (word k of a region at known_base + known[region] + 8 k), which gets the words that differ.

    flags: a byte for each word, bit j of it for its j-th element. sums[region] += the h_i of its words, as digest_kernel does.
    """
    program = tl.program_id(0).to(tl.int64)
    region = tl.load(block_region + program).to(tl.int64)
    first = tl.load(block_first + program)
    base, run, inner, outer_stride, inner_stride, total = _fields(table, region)
    position = tl.load(table + region * 7 + 6)
    copy = (known_base + tl.load(known + region)).to(tl.pointer_type(tl.int64))
    if PLAIN:
        total = tl.multiple_of(total, 2)
    within = (tl.arange(0, ROWS) * ROW)[:, None] + tl.arange(0, ROW)[None, :]
    within = tl.max_contiguous(tl.multiple_of(within, (1, 16)), (1, 16))
    acc = tl.zeros([ROWS, ROW], tl.uint64)
    for low in range(0, WORDS, ROWS * ROW):
        at = low + within
        k = first + at
        k = tl.max_contiguous(tl.multiple_of(k, (1, 16)), (1, 16))
        inside = k < total
        if PLAIN:
            pointer = base.to(tl.pointer_type(tl.int64)) + k
            pointer = tl.max_contiguous(tl.multiple_of(pointer, (1, 16)), (1, 16))
            there = tl.max_contiguous(tl.multiple_of(copy + k, (1, 16)), (1, 16))
        else:
            pointer = (base + _offsets(k, run, inner, outer_stride, inner_stride, 8)).to(tl.pointer_type(tl.int64))
            there = copy + k
        x = tl.load(pointer, mask=inside, other=0)
        d = x ^ tl.load(there, mask=inside, other=0)
        tl.store(there, x, mask=inside & (d != 0))
        flag = tl.zeros([ROWS, ROW], tl.int32)
        for j in tl.static_range(EACH):
            flag += (((d >> (8 * SIZE * j)) & MASK) != 0).to(tl.int32) << j
        tl.store(flags + program * WORDS + at, flag.to(tl.uint8))
        h = x.to(tl.uint64, bitcast=True)
        h = h + (k + position + 1).to(tl.uint64, bitcast=True) * tl.full([ROWS, ROW], GOLDEN, tl.uint64)
        h = h ^ (h >> 33)
        h = h * tl.full([ROWS, ROW], MIX_1, tl.uint64)
        h = h ^ (h >> 33)
        h = h * tl.full([ROWS, ROW], MIX_2, tl.uint64)
        h = h ^ (h >> 33)
        acc += tl.where(inside, h, tl.zeros([ROWS, ROW], tl.uint64))
    tl.atomic_add(sums + region, tl.sum(tl.sum(acc.to(tl.int64, bitcast=True), 1), 0))


@triton.jit
def _bits(v):
    """How many bits of each byte of a word are set, byte by byte. v: uint64."""
    v = v - ((v >> 1) & 0x5555555555555555)
    v = (v & 0x3333333333333333) + ((v >> 2) & 0x3333333333333333)
    return (v + (v >> 4)) & 0x0F0F0F0F0F0F0F0F


@triton.jit
def count_kernel(
    flags, record, first_unit, span, held, count, units,
    TILE: tl.constexpr, ALL: tl.constexpr, TILES: tl.constexpr, EIGHTS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """held: what is told of each tile, ALL where nearly all its elements changed. count: elements told of each unit."""
    tile = tl.program_id(0) * (TOGETHER * TILES) + tl.arange(0, TOGETHER * TILES)
    unit = tile // TILES
    inside = unit < units
    r = tl.load(record + unit, mask=inside, other=-1)
    inside = inside & (r >= 0)
    begin = tl.load(first_unit + r, mask=inside, other=0)
    elements = tl.load(span + r, mask=inside, other=0)
    rest = tl.minimum(tl.maximum(elements - (tile - begin * TILES) * TILE, 0), TILE).to(tl.int32)
    eight = tile.to(tl.int64)[:, None] * EIGHTS + tl.arange(0, EIGHTS)[None, :]
    flag = tl.load(flags.to(tl.pointer_type(tl.uint64)) + eight, mask=inside[:, None], other=0)
    # Each byte is at most 8, and so the sum of 16 words' bytes is none that overflows.
    changed = tl.sum(((_bits(flag) * 0x0101010101010101) >> 56).to(tl.int32), 1)
    all_of_it = changed >= ALL
    told = tl.where(all_of_it, rest, changed)
    tl.store(held + tile, tl.where(all_of_it, ALL, changed).to(tl.uint8), mask=unit < units)
    sums = tl.sum(tl.reshape(told, [TOGETHER, TILES]), 1)
    which = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    tl.store(count + which, sums, mask=which < units)


@triton.jit
def emit_kernel(
    flags, record, first_unit, span, held, skip, known, index_at, values_at,
    WORD: tl.constexpr, SIZE: tl.constexpr, EACH: tl.constexpr, TILE: tl.constexpr, ALL: tl.constexpr, TILES: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Lay down what is told of a unit. skip: elements told in its record before it. known: address of each record's first word
    in the copy, which has the new words by now; index_at, values_at: addresses; no index address: nothing of that record."""
    # Whatever can be asked for is asked for before anything is decided: what takes the time is waiting, one load for another.
    unit = tl.program_id(0).to(tl.int64)
    r = tl.load(record + unit)
    to = tl.load(skip + unit)
    word = tl.arange(0, UNIT)
    flag = tl.load(flags + unit * UNIT + word).to(tl.int32)
    of_tile = tl.load(held + unit * TILES + word // (TILE // EACH))
    told = tl.load(held + unit * TILES + tl.arange(0, TILES))
    some = r >= 0
    index = tl.load(index_at + r, mask=some, other=0)
    out = tl.load(values_at + r, mask=some, other=0)
    copy = tl.load(known + r, mask=some, other=0)
    begin = tl.load(first_unit + r, mask=some, other=0)
    elements = tl.load(span + r, mask=some, other=0)
    if index != 0:
        tiles = (elements + TILE - 1) // TILE
        mine = (unit - begin) * TILES + tl.arange(0, TILES)
        tl.store((index + mine).to(tl.pointer_type(tl.uint8)), told, mask=mine < tiles)
        k = (unit - begin) * UNIT + word
        inside = k * EACH < elements
        flag = tl.where(inside & (of_tile == ALL), (1 << EACH) - 1, flag)
        x = tl.load(copy.to(tl.pointer_type(tl.int64)) + k, mask=inside & (flag != 0), other=0)
        each = tl.zeros([UNIT], tl.int32)
        for j in tl.static_range(EACH):
            each += (flag >> j) & 1
        at = tl.cumsum(each, 0) - each
        place_at = (index + tiles + to).to(tl.pointer_type(tl.uint8))
        value_at = out.to(tl.pointer_type(WORD)) + to
        for j in tl.static_range(EACH):
            mask = ((flag >> j) & 1) != 0
            tl.store(place_at + at, ((word * EACH + j) % TILE).to(tl.uint8), mask=mask)
            tl.store(value_at + at, (x >> (8 * SIZE * j)).to(WORD), mask=mask)
            at += mask.to(tl.int32)


@triton.jit
def _of_tiles(body, index, tile, span, TILE: tl.constexpr, ALL: tl.constexpr):
    """Of tiles of a record: elements that are told of each, and how many it has. No index: all of them."""
    rest = tl.minimum(tl.maximum(span - tile.to(tl.int64) * TILE, 0), TILE).to(tl.int32)
    byte = tl.load((body + index + tile).to(tl.pointer_type(tl.uint8)), mask=tl.where(index >= 0, rest, 0) > 0, other=0)
    return tl.where((index < 0) | (byte == ALL), rest, byte.to(tl.int32)), rest


@triton.jit
def tally_kernel(
    body, record, first_group, index_at, span, count, bad, groups,
    TILE: tl.constexpr, ALL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """count: elements that are told in each group of tiles. bad: least record with a tile of more than it has."""
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        r = tl.load(record + group)
        tile = (group - tl.load(first_group + r)) * GROUP + tl.arange(0, GROUP)
        told, rest = _of_tiles(body, tl.load(index_at + r), tile, tl.load(span + r), TILE, ALL)
        tl.store(count + group, tl.sum(told, 0))
        if tl.sum((told > rest).to(tl.int32), 0) > 0:
            tl.atomic_min(bad, r)


@triton.jit
def put_kernel(
    body, record, first_group, index_at, values_at, span, skip, bad, groups, first, row, table,
    WORD: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, ALL: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr,
    WRITE: tl.constexpr,
):  # fmt: skip
    """The told elements of each tile, AHEAD at a time: their order is checked (bad: least record where it is wrong), or, with
    WRITE, each one's word is written where `table` has element first[record] + .. of the region whose first row is row[record].

    skip: elements told in the record before a group.
    """
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        r = tl.load(record + group)
        before = tl.load(skip + group)
        begin = tl.load(first_group + r)
        index = tl.load(index_at + r)
        elements = tl.load(span + r)
        tile = (group - begin) * GROUP + tl.arange(0, GROUP)
        told, rest = _of_tiles(body, index, tile, elements, TILE, ALL)
        start = (before + tl.cumsum(told, 0) - told)[:, None]
        places = (body + index + (elements + TILE - 1) // TILE).to(tl.pointer_type(tl.uint8))
        most = tl.max(told, 0)
        ahead = tl.arange(0, AHEAD)[None, :]
        if WRITE:
            words = (body + tl.load(values_at + r)).to(tl.pointer_type(WORD))
            row_0 = tl.load(row + r)
            total = tl.load(table + row_0 * 7 + 5)
            low = tl.load(first + r)
            row_0 += low // total
            low -= low // total * total
            base, run, inner, outer_stride, inner_stride, _ = _fields(table, row_0)
            low_of_tile = (low + tile.to(tl.int64) * TILE)[:, None]
            plain = (run == total) & (low + elements <= total)
            for j in range(0, most, AHEAD):
                more = j + ahead < told[:, None]
                element = low_of_tile + j + ahead
                if index >= 0:
                    element = low_of_tile + tl.load(places + start + j + ahead, mask=more, other=0).to(tl.int64)
                word = tl.load(words + start + j + ahead, mask=more, other=0)
                if plain:
                    to = base + element * SIZE
                else:
                    which = element // total
                    entry = table + (row_0 + which) * 7
                    to = tl.load(entry, mask=more, other=0) + _offsets(
                        element - which * total, tl.load(entry + 1, mask=more, other=1), tl.load(entry + 2, mask=more, other=1),
                        tl.load(entry + 3, mask=more, other=0), tl.load(entry + 4, mask=more, other=0), SIZE,
                    )  # fmt: skip
                tl.store(to.to(tl.pointer_type(WORD)), word, mask=more)
        elif index >= 0:
            wrong = tl.zeros([GROUP, AHEAD], tl.int32)
            for j in range(0, most, AHEAD):
                more = j + ahead < told[:, None]
                earlier = more & (j + ahead > 0)
                place = tl.load(places + start + j + ahead, mask=more, other=0).to(tl.int32)
                previous = tl.load(places + start + j + ahead - 1, mask=earlier, other=0).to(tl.int32)
                wrong += ((earlier & (place <= previous)) | (more & (place >= rest[:, None]))).to(tl.int32)
            if tl.sum(tl.sum(wrong, 1), 0) > 0:
                tl.atomic_min(bad, r)


def tiles_of(size: int, tile: int) -> int:
    """Tiles of a unit of elements of `size` bytes."""
    return UNIT * 8 // size // tile


def launch_compare(
    table: torch.Tensor, plain: tuple[torch.Tensor, torch.Tensor], others: tuple[torch.Tensor, torch.Tensor],
    known: torch.Tensor, known_base: int, sums: torch.Tensor, flags: torch.Tensor, size: int,
) -> None:  # fmt: skip
    """See compare_kernel. plain, others: blocks, as Tables.in_two() has them; their flags follow each other."""
    at = flags
    for blocks, is_plain in ((plain, True), (others, False)):
        if len(blocks[0]):
            compare_kernel[(len(blocks[0]),)](  # pyright: ignore[reportIndexIssue]
                table, *blocks, known, known_base, sums, at,
                SIZE=size, EACH=8 // size, MASK=(1 << 8 * size) - 1 if size < 8 else -1, ROW=ROW, ROWS=COMPARED,
                WORDS=PER_PROGRAM, PLAIN=is_plain, GOLDEN=GOLDEN, MIX_1=MIX_1, MIX_2=MIX_2, num_warps=COMPARE_WARPS,
            )  # fmt: skip
            at = at[len(blocks[0]) * PER_PROGRAM :]


class Flagged:
    """Units of records and their flags, to be counted and laid down. record: of each unit, -1 for none; first_unit, span
    (elements) of each record; flags as from compare_kernel."""

    def __init__(
        self, flags: torch.Tensor, record: torch.Tensor, first_unit: torch.Tensor, span: torch.Tensor, size: int, tile: int,
        all_of_it: int,
    ) -> None:  # fmt: skip
        self._flags, self._size, self._tile, self._all = flags, size, tile, all_of_it
        self._of = record, first_unit, span
        self._held = torch.empty(len(record) * tiles_of(size, tile), dtype=torch.uint8, device=flags.device)
        self._count = torch.empty(len(record), dtype=torch.int32, device=flags.device)
        self._skip: Any = None

    def count(self, last_unit: torch.Tensor) -> torch.Tensor:
        """int64: elements to be told of each record. last_unit: of each record."""
        units, tiles = len(self._of[0]), tiles_of(self._size, self._tile)
        together = max(1, GROUP // tiles)
        count_kernel[(-(-units // together),)](  # pyright: ignore[reportIndexIssue]
            self._flags, *self._of, self._held, self._count, units,
            TILE=self._tile, ALL=self._all, TILES=tiles, EIGHTS=self._tile * self._size // 64, TOGETHER=together, num_warps=4,
        )  # fmt: skip
        record, first_unit, _ = self._of
        upto = torch.cumsum(self._count, 0, dtype=torch.int64)
        before = upto - self._count
        # -1, of units of no record, takes the last one; nothing is told of them.
        self._skip = before - before[first_unit][record]
        return upto[last_unit] - before[first_unit]

    def emit(self, known: torch.Tensor, index_at: torch.Tensor, values_at: torch.Tensor) -> None:
        """See emit_kernel."""
        emit_kernel[(len(self._of[0]),)](  # pyright: ignore[reportIndexIssue]
            self._flags, *self._of, self._held, self._skip, known, index_at, values_at,
            WORD=_WORD[self._size], SIZE=self._size, EACH=8 // self._size, TILE=self._tile, ALL=self._all,
            TILES=tiles_of(self._size, self._tile), UNIT=UNIT, num_warps=EMIT_WARPS,
        )  # fmt: skip


class Told:
    """Records of one item size whose bodies lie in `body`, ready to be counted, checked and written.

    All but body: int64 arrays, one entry for each record. index_at: byte of the body where tiles are told, -1 where all
    elements have a value; values_at: byte of the values.
    """

    def __init__(
        self, body: torch.Tensor, size: int, tile: int, all_of_it: int, span: Any, index_at: Any, values_at: Any
    ) -> None:
        import numpy as np

        self.size, self._body, self._tile, self._all = size, body, tile, all_of_it
        here = body.device
        groups = -(-span // (tile * GROUP))
        first = np.cumsum(groups) - groups
        self._columns = torch.from_numpy(np.stack([first, index_at, values_at, span])).to(here)
        self._last = torch.from_numpy(first + groups - 1).to(here)
        numbers = torch.arange(len(span), dtype=torch.int32, device=here)
        self._record = torch.repeat_interleave(numbers, torch.from_numpy(groups).to(here), output_size=int(groups.sum()))
        self._bad = torch.full((1,), len(span), dtype=torch.int32, device=here)
        self._skip: Any = None

    def tally(self) -> torch.Tensor:
        """int64: number of the first record that is not as the format says (their number, if all are), then the elements
        told of each."""
        first, index_at, _, span = self._columns
        groups = len(self._record)
        count = torch.empty(groups, dtype=torch.int32, device=self._body.device)
        tally_kernel[(min(groups, PROGRAMS),)](  # pyright: ignore[reportIndexIssue]
            self._body.data_ptr(), self._record, first, index_at, span, count, self._bad, groups,
            TILE=self._tile, ALL=self._all, GROUP=GROUP, num_warps=4,
        )  # fmt: skip
        upto = torch.cumsum(count, 0, dtype=torch.int64)
        before = upto - count
        self._skip = before - before[first][self._record]
        return torch.cat([self._bad.long(), upto[self._last] - before[first]])

    def check(self) -> torch.Tensor:
        """int32 [1]: as the first of tally(), of what is told of each tile. Only when tally() is what the directory says."""
        self._put(None, None, None)
        return self._bad

    def write(self, first: torch.Tensor, row: torch.Tensor, table: torch.Tensor) -> None:
        """first: element of its region that each record begins with; row: of `table` (words of `size`), the region's first."""
        self._put(first, row, table)

    def _put(self, first: Any, row: Any, table: Any) -> None:
        begin, index_at, values_at, span = self._columns
        groups = len(self._record)
        put_kernel[(min(groups, PROGRAMS),)](  # pyright: ignore[reportIndexIssue]
            self._body.data_ptr(), self._record, begin, index_at, values_at, span, self._skip, self._bad, groups,
            *((begin, begin, begin) if table is None else (first, row, table)),
            WORD=_WORD[self.size], SIZE=self.size, TILE=self._tile, ALL=self._all, GROUP=GROUP, AHEAD=AHEAD,
            WRITE=table is not None, num_warps=4,
        )  # fmt: skip
