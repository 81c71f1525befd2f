"""Triton kernels that find which elements of live parameters changed, and that put changed elements into others.

Regions are as in weight_sync.device.tables, what is told of a tile of elements in weight_sync.delta.codec. One launch serves
any number of regions; Python sees sums over records of many tiles. On the side that sends, in this order:

    compare_kernel  one flag for each element, the copy brought up to date, the digest: at the speed of memory
    count_kernel    of the flags, how many elements there are to tell of each tile
    emit_kernel     their places in the tiles and their words, each where the host has laid out its record

On the side that receives: tally_kernel, put_kernel to check, put_kernel to write. Imported only where there is CUDA (or
TRITON_INTERPRET=1 in the tests).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from weight_sync.device.kernels import _WORD, PER_PROGRAM, _fields, _hashed, _offsets
from weight_sync.device.lanes import GOLDEN, MIX_1, MIX_2

GROUP = 128
"""Tiles that one program of the receiving side works on, each by one thread."""
AHEAD = 4
"""Told elements of a tile that its thread asks for before it writes any."""
ROW = 512
COMPARE_WARPS = 8
"""Words that a program compares at a time, and by how many warps: two for each thread, 3.5 TB/s on an H200; eight, 2.2 TB/s."""


@triton.jit
def compare_kernel(
    table, block_region, block_first, known, known_base, sums, flags,
    SIZE: tl.constexpr, EACH: tl.constexpr, MASK: tl.constexpr, ROW: tl.constexpr, WORDS: tl.constexpr, PLAIN: tl.constexpr,
    GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr,
):  # fmt: skip
    """Compare regions with a copy, which gets their words: word k of one at known_base + known[region] + 8 k.

    flags: a bit for each element, lowest bit of the first byte first. sums[region] += the h_i of its words (digest_kernel).
    """
    program = tl.program_id(0).to(tl.int64)
    region = tl.load(block_region + program).to(tl.int64)
    first = tl.load(block_first + program)
    base, run, inner, outer_stride, inner_stride, total = _fields(table, region)
    position = tl.load(table + region * 7 + 6)
    copy = (known_base + tl.load(known + region)).to(tl.pointer_type(tl.int64))
    if PLAIN:
        total = tl.multiple_of(total, 2)
    word = tl.arange(0, ROW)
    byte = tl.arange(0, ROW // SIZE)
    acc = tl.zeros([ROW], tl.uint64)
    for low in range(0, WORDS, ROW):
        k = first + low + word
        k = tl.max_contiguous(tl.multiple_of(k, 16), 16)
        inside = k < total
        if PLAIN:
            pointer = base.to(tl.pointer_type(tl.int64)) + k
            pointer = tl.max_contiguous(tl.multiple_of(pointer, 16), 16)
            there = tl.max_contiguous(tl.multiple_of(copy + k, 16), 16)
        else:
            pointer = (base + _offsets(k, run, inner, outer_stride, inner_stride, 8)).to(tl.pointer_type(tl.int64))
            there = copy + k
        x = tl.load(pointer, mask=inside, other=0)
        d = x ^ tl.load(there, mask=inside, other=0)
        tl.store(there, x, mask=inside & (d != 0))
        flag = tl.zeros([ROW], tl.int32)
        for j in tl.static_range(EACH):
            flag += (((d >> (8 * SIZE * j)) & MASK) != 0).to(tl.int32) << j
        flag = flag << (word % SIZE * EACH)
        flag = tl.sum(tl.reshape(flag, [ROW // SIZE, SIZE]), 1)
        tl.store(flags + (program * WORDS + low) // SIZE + byte, flag.to(tl.uint8))
        h = _hashed(x, k + position, GOLDEN, MIX_1, MIX_2)
        acc += tl.where(inside, h, tl.zeros([ROW], tl.uint64))
    tl.atomic_add(sums + region, tl.sum(acc.to(tl.int64, bitcast=True), 0))


@triton.jit
def _bits(v):
    """How many bits of each word are set. v: uint64."""
    v = v - ((v >> 1) & 0x5555555555555555)
    v = (v & 0x3333333333333333) + ((v >> 2) & 0x3333333333333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((v * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit(do_not_specialize=["units"])
def count_kernel(
    flags, record, first_unit, span, held, count, units,
    TILE: tl.constexpr, ALL: tl.constexpr, TILES: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """held: what is told of each tile, ALL where nearly all its elements changed. count: elements told of each unit."""
    tile = tl.program_id(0) * (TOGETHER * TILES) + tl.arange(0, TOGETHER * TILES)
    unit = tile // TILES
    inside = unit < units
    r = tl.load(record + unit, mask=inside, other=0)
    begin = tl.load(first_unit + r, mask=inside, other=0)
    elements = tl.load(span + r, mask=inside, other=0)
    rest = tl.minimum(tl.maximum(elements - (tile - begin * TILES) * TILE, 0), TILE).to(tl.int32)
    word = tile.to(tl.int64)[:, None] * (TILE // 64) + tl.arange(0, TILE // 64)[None, :]
    changed = tl.sum(_bits(tl.load(flags.to(tl.pointer_type(tl.uint64)) + word, mask=inside[:, None], other=0)), 1)
    all_of_it = changed >= ALL
    told = tl.where(all_of_it, rest, changed)
    tl.store(held + tile, tl.where(all_of_it, ALL, changed).to(tl.uint8), mask=inside)
    which = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    tl.store(count + which, tl.sum(tl.reshape(told, [TOGETHER, TILES]), 1), mask=which < units)


@triton.jit
def emit_kernel(
    flags, record, first_unit, span, held, skip, known, index_at, values_at,
    WORD: tl.constexpr, TILE: tl.constexpr, ALL: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Lay down what is told of a unit, each tile by one thread. skip: elements told in its record before it. known: address of
    each record's first word in the copy, which has the new words by now; index_at, values_at: addresses; no index address:
    nothing of that record."""
    unit = tl.program_id(0).to(tl.int64)
    r = tl.load(record + unit)
    index = tl.load(index_at + r)
    if index != 0:
        tile = tl.arange(0, TILES)
        elements = tl.load(span + r)
        mine = (unit - tl.load(first_unit + r)) * TILES + tile
        tiles = (elements + TILE - 1) // TILE
        byte = tl.load(held + unit * TILES + tile).to(tl.int32)
        tl.store((index + mine).to(tl.pointer_type(tl.uint8)), byte.to(tl.uint8), mask=mine < tiles)
        rest = tl.minimum(tl.maximum(elements - mine * TILE, 0), TILE)
        all_of_it = byte == ALL
        told = tl.where(all_of_it, rest, byte.to(tl.int64))
        at = tl.load(skip + unit) + tl.cumsum(told, 0) - told
        place_at = (index + tiles).to(tl.pointer_type(tl.uint8))
        value_at = tl.load(values_at + r).to(tl.pointer_type(WORD))
        source = tl.load(known + r).to(tl.pointer_type(WORD)) + mine * TILE
        of_tile = flags.to(tl.pointer_type(tl.uint64)) + (unit * TILES + tile) * (TILE // 64)
        for part in tl.static_range(TILE // 64):
            left = tl.load(of_tile + part)
            here = tl.minimum(tl.maximum(rest - 64 * part, 0), 64).to(tl.uint64)
            ones = tl.where(here == 0, here, tl.full([TILES], 0xFFFFFFFFFFFFFFFF, tl.uint64) >> ((64 - here) % 64))
            left = tl.where(all_of_it, ones, left)
            for _ in range(tl.max(_bits(left), 0)):
                some = left != 0
                lowest = left & (~left + 1)
                # The exponent of a power of two is its bit's number.
                bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
                place = 64 * part + tl.where(some, bit, 0)
                word = tl.load(source + place, mask=some, other=0)
                tl.store(place_at + at, place.to(tl.uint8), mask=some)
                tl.store(value_at + at, word, mask=some)
                at += some.to(tl.int64)
                left = left ^ lowest


@triton.jit
def _of_tiles(body, index, tile, span, TILE: tl.constexpr, ALL: tl.constexpr):
    """Of tiles of a record: elements that are told of each, and how many it has. No index: all of them."""
    rest = tl.minimum(tl.maximum(span - tile.to(tl.int64) * TILE, 0), TILE).to(tl.int32)
    byte = tl.load((body + index + tile).to(tl.pointer_type(tl.uint8)), mask=tl.where(index >= 0, rest, 0) > 0, other=0)
    return tl.where((index < 0) | (byte == ALL), rest, byte.to(tl.int32)), rest


@triton.jit
def tally_kernel(
    body, record, first_group, index_at, span, count, bad,
    TILE: tl.constexpr, ALL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """count: elements that are told in each group of tiles. bad: least record with a tile of more than it has."""
    group = tl.program_id(0)
    r = tl.load(record + group)
    tile = (group - tl.load(first_group + r)) * GROUP + tl.arange(0, GROUP)
    told, rest = _of_tiles(body, tl.load(index_at + r), tile, tl.load(span + r), TILE, ALL)
    tl.store(count + group, tl.sum(told, 0))
    if tl.sum((told > rest).to(tl.int32), 0) > 0:
        tl.atomic_min(bad, r)


@triton.jit
def put_kernel(
    body, record, first_group, index_at, values_at, span, skip, bad, first, row, table,
    WORD: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, ALL: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr,
    WRITE: tl.constexpr,
):  # fmt: skip
    """The told elements of each tile, AHEAD at a time: their order is checked (bad: least record where it is wrong), or, with
    WRITE, each one's word is written where `table` has element first[record] + .. of the region whose first row is row[record].

    skip: elements told in the record before a group.
    """
    group = tl.program_id(0)
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
        base, run, _, _, _, _ = _fields(table, row_0)
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
    return PER_PROGRAM * 8 // size // tile


def launch_compare(
    table: torch.Tensor, of_both: Sequence[tuple[torch.Tensor, torch.Tensor]], known: torch.Tensor, known_base: int,
    sums: torch.Tensor, flags: torch.Tensor, size: int,
) -> None:  # fmt: skip
    """See compare_kernel. of_both: blocks of plain rows, then of others, as Tables.in_two() has them; so are their flags."""
    at = flags
    for blocks, is_plain in zip(of_both, (True, False), strict=True):
        if len(blocks[0]):
            compare_kernel[(len(blocks[0]),)](  # pyright: ignore[reportIndexIssue]
                table, *blocks, known, known_base, sums, at,
                SIZE=size, EACH=8 // size, MASK=(1 << 8 * size) - 1 if size < 8 else -1, ROW=ROW, WORDS=PER_PROGRAM,
                PLAIN=is_plain, GOLDEN=GOLDEN, MIX_1=MIX_1, MIX_2=MIX_2, num_warps=COMPARE_WARPS,
            )  # fmt: skip
            at = at[len(blocks[0]) * PER_PROGRAM // size :]


class Flagged:
    """Units of records and their flags, to be counted and laid down. A unit is what one program compares, PER_PROGRAM words.

    record: of each unit; first_unit, span (elements) of each record; flags as from compare_kernel.
    """

    def __init__(
        self, flags: torch.Tensor, record: torch.Tensor, first_unit: torch.Tensor, span: torch.Tensor, size: int, tile: int,
        all_of_it: int,
    ) -> None:  # fmt: skip
        self._flags, self._size, self._tile, self._all = flags, size, tile, all_of_it
        self._of = record, first_unit, span
        self._held = torch.empty(len(record) * tiles_of(size, tile), dtype=torch.uint8, device=flags.device)
        self._skip: Any = None

    def count(self, last_unit: torch.Tensor) -> torch.Tensor:
        """int64: elements to be told of each record. last_unit: of each record."""
        record, first_unit, span = self._of
        units, tiles = len(record), tiles_of(self._size, self._tile)
        together = max(1, GROUP // tiles)
        count = torch.empty(units, dtype=torch.int32, device=self._flags.device)
        count_kernel[(-(-units // together),)](  # pyright: ignore[reportIndexIssue]
            self._flags, record, first_unit, span, self._held, count, units,
            TILE=self._tile, ALL=self._all, TILES=tiles, TOGETHER=together, num_warps=4,
        )  # fmt: skip
        upto = torch.cumsum(count, 0, dtype=torch.int64)
        before = upto - count
        self._skip = before - before[first_unit][record]
        return upto[last_unit] - before[first_unit]

    def emit(self, known: torch.Tensor, index_at: torch.Tensor, values_at: torch.Tensor) -> None:
        """See emit_kernel."""
        tiles = tiles_of(self._size, self._tile)
        emit_kernel[(len(self._of[0]),)](  # pyright: ignore[reportIndexIssue]
            self._flags, *self._of, self._held, self._skip, known, index_at, values_at,
            WORD=_WORD[self._size], TILE=self._tile, ALL=self._all, TILES=tiles, num_warps=max(1, tiles // 32),
        )  # fmt: skip


class Told:
    """Records of one item size whose bodies lie in `body`, ready to be counted, checked and written.

    groups: of GROUP tiles, in all records. columns: int64 [4, records] in the same memory: groups of each record; the byte of
    the body where its tiles are told, -1 where all elements have a value; the byte of its values; its elements.
    """

    def __init__(self, body: torch.Tensor, size: int, tile: int, all_of_it: int, groups: int, columns: torch.Tensor) -> None:
        self.size, self._body, self._tile, self._all = size, body, tile, all_of_it
        each, *rest = columns
        upto = torch.cumsum(each, 0)
        self._columns = (upto - each, *rest)
        self._last = upto - 1
        numbers = torch.arange(len(each), dtype=torch.int32, device=body.device)
        self._record = torch.repeat_interleave(numbers, each, output_size=groups)
        self._bad = torch.full((1,), len(each), dtype=torch.int32, device=body.device)
        self._skip: Any = None

    def tally(self) -> torch.Tensor:
        """int64: number of the first record that is not as the format says (their number, if all are), then the elements
        told of each."""
        first, index_at, _, span = self._columns
        groups = len(self._record)
        count = torch.empty(groups, dtype=torch.int32, device=self._body.device)
        tally_kernel[(groups,)](  # pyright: ignore[reportIndexIssue]
            self._body.data_ptr(), self._record, first, index_at, span, count, self._bad,
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
        put_kernel[(len(self._record),)](  # pyright: ignore[reportIndexIssue]
            self._body.data_ptr(), self._record, begin, index_at, values_at, span, self._skip, self._bad,
            *((begin, begin, begin) if table is None else (first, row, table)),
            WORD=_WORD[self.size], SIZE=self.size, TILE=self._tile, ALL=self._all, GROUP=GROUP, AHEAD=AHEAD,
            WRITE=table is not None, num_warps=4,
        )  # fmt: skip


def warm(size: int, tile: int, all_of_it: int, device: Any) -> None:
    """Compile what a first delta would compile while an engine stands still, by a record that tells nothing."""
    table = torch.tensor([[0, 1, 1, 0, 0, 1, 0]], dtype=torch.int64, device=device)
    columns = torch.tensor([[1, 0], [0, 0], [8, 0], [1, 0]], dtype=torch.int64, device=device)
    body = torch.zeros(16, dtype=torch.uint8, device=device)
    told = Told(body, size, tile, all_of_it, 1, columns[:, :1])
    told.tally()
    told.check()
    told.write(columns[1], columns[1], table)
