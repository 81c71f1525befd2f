"""Triton kernels that find which elements of live parameters changed, and that put changed elements into others.

Regions are as in weight_sync.device.tables. They are worked on in units of UNIT words of 8 bytes, a unit in tiles of TILE elements
(weight_sync.delta.codec describes what is told of a tile). One launch serves any number of regions; Python sees sums over
records of many units only. Imported only where there is CUDA (or TRITON_INTERPRET=1 in the tests).
"""

from __future__ import annotations

from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from weight_sync.device.kernels import _WORD, PER_PROGRAM, _fields, _offsets
from weight_sync.device.lanes import GOLDEN, MIX_1, MIX_2

UNIT = 1024
"""Words that are compared at a time."""
LOOPS = PER_PROGRAM // UNIT
"""Units of a program that compares: its words are those of a program that copies, so that one list of blocks does for both."""
FIND_WARPS = 8
PROGRAMS = 132 * 16
"""Of launches whose programs take turns with units: enough for every multiprocessor of an H200."""
TO_DO, DONE = -1, 1 << 62
"""In place of where a unit's elements lie: nobody has looked yet; they were taken from there."""
WIDTH = 128


@triton.jit
def find_kernel(
    table, block_region, block_first, known, known_base, sums, held, count, place_of, cursor, places, values, room,
    WORD: tl.constexpr, SIZE: tl.constexpr, EACH: tl.constexpr, MASK: tl.constexpr, UNIT: tl.constexpr, LOOPS: tl.constexpr,
    TILE: tl.constexpr, ALL: tl.constexpr, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr,
):  # fmt: skip
    """Compare units of regions with what is known of them (a copy: word k of a region at known_base + known[region] + 8 k).

    For each unit that is to do: count, its elements that are told; held, what is told of each tile. If there is room for them
    behind `cursor`: their places in their tiles and their new words go there, the copy gets the new words, and the region's
    digest what the unit adds to it. Otherwise the unit stays to do.
    """
    TILES: tl.constexpr = UNIT * EACH // TILE
    program = tl.program_id(0).to(tl.int64)
    region = tl.load(block_region + program).to(tl.int64)
    first = tl.load(block_first + program)
    base, run, inner, outer_stride, inner_stride, total = _fields(table, region)
    position = tl.load(table + region * 7 + 6)
    copy = known_base + tl.load(known + region)
    golden = tl.full([UNIT], GOLDEN, tl.uint64)
    mix_1 = tl.full([UNIT], MIX_1, tl.uint64)
    mix_2 = tl.full([UNIT], MIX_2, tl.uint64)
    shift = tl.arange(0, EACH).to(tl.int64) * (8 * SIZE)
    element = tl.arange(0, UNIT * EACH)
    acc = tl.zeros([UNIT], tl.uint64)
    for step in range(LOOPS):
        unit = program * LOOPS + step
        begin = first + step * UNIT
        if (begin < total) & (tl.load(place_of + unit) == -1):
            k = begin + tl.arange(0, UNIT)
            inside = k < total
            if run == total:
                offset = k * 8
            else:
                offset = _offsets(k, run, inner, outer_stride, inner_stride, 8)
            x = tl.load((base + offset).to(tl.pointer_type(tl.int64)), mask=inside, other=0)
            known_at = (copy + k * 8).to(tl.pointer_type(tl.int64))
            d = x ^ tl.load(known_at, mask=inside, other=0)
            left = (total - begin) * EACH
            differs = ((d[:, None] >> shift[None, :]) & MASK) != 0
            tiles = tl.reshape(differs.to(tl.int32), [TILES, TILE])
            changed = tl.sum(tiles, 1)
            rest = tl.minimum(tl.maximum(left - tl.arange(0, TILES) * TILE, 0), TILE).to(tl.int32)
            all_of_it = changed >= ALL
            told = tl.where(all_of_it, rest, changed)
            tl.store(held + unit * TILES + tl.arange(0, TILES), tl.where(all_of_it, ALL, changed).to(tl.uint8))
            n = tl.sum(told, 0)
            tl.store(count + unit, n)
            at = tl.atomic_add(cursor, n.to(tl.int64))
            if at + n <= room:
                tl.store(place_of + unit, at)
                inner_of_tile = tl.arange(0, TILE)[None, :]
                told_2d = tl.where(all_of_it[:, None], (inner_of_tile < rest[:, None]).to(tl.int32), tiles)
                flags = tl.reshape(told_2d, [UNIT * EACH])
                to = at + tl.cumsum(flags, 0) - flags
                word = tl.reshape((x[:, None] >> shift[None, :]), [UNIT * EACH])
                tl.store(places + to, (element % TILE).to(tl.uint8), mask=flags != 0)
                tl.store(values + to, word.to(WORD), mask=flags != 0)
                tl.store(known_at, x, mask=inside & (d != 0))
                h = x.to(tl.uint64, bitcast=True) + (k + position + 1).to(tl.uint64, bitcast=True) * golden
                h = h ^ (h >> 33)
                h = h * mix_1
                h = h ^ (h >> 33)
                h = h * mix_2
                h = h ^ (h >> 33)
                acc += tl.where(inside, h, tl.zeros([UNIT], tl.uint64))
    tl.atomic_add(sums + region, tl.sum(acc.to(tl.int64, bitcast=True), 0))


@triton.jit
def gather_kernel(
    record, count, place_of, before, held, places, values, first_unit, tiles, index_at, values_at, units,
    WORD: tl.constexpr, SIZE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr, DONE: tl.constexpr,
):  # fmt: skip
    """What find_kernel told of units, laid down in their records' order. index_at, values_at: addresses, for each record; no
    index address: nothing of that record."""
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        at = tl.load(place_of + unit)
        r = tl.load(record + unit)
        if (at >= 0) & (at < DONE) & (r >= 0):
            index = tl.load(index_at + r)
            if index != 0:
                n = tl.load(count + unit)
                begin = tl.load(first_unit + r)
                skip = tl.load(before + unit) - tl.load(before + begin)
                told = tl.load(tiles + r)
                tile = (unit - begin) * TILES + tl.arange(0, TILES)
                mine = tl.load(held + unit * TILES + tl.arange(0, TILES))
                tl.store((index + tile).to(tl.pointer_type(tl.uint8)), mine, mask=tile < told)
                out = tl.load(values_at + r)
                for low in range(0, n, WIDTH):
                    v = low + tl.arange(0, WIDTH)
                    place = tl.load(places + at + v, mask=v < n)
                    tl.store((index + told + skip + v).to(tl.pointer_type(tl.uint8)), place, mask=v < n)
                    value = tl.load(values + at + v, mask=v < n)
                    tl.store((out + (skip + v) * SIZE).to(tl.pointer_type(WORD)), value, mask=v < n)
            tl.store(place_of + unit, DONE)


@triton.jit
def _of_tiles(body, index, begin, unit, span, inside, TILE: tl.constexpr, ALL: tl.constexpr, TILES: tl.constexpr):
    """Of a unit's tiles: what is told of each, and how many elements it has. No index: all of them."""
    tile = (unit - begin) * TILES + tl.arange(0, TILES)
    rest = tl.minimum(tl.maximum(span - tile.to(tl.int64) * TILE, 0), TILE).to(tl.int32)
    byte = tl.load((body + index + tile).to(tl.pointer_type(tl.uint8)), mask=inside & (index >= 0) & (rest > 0), other=0)
    told = tl.where((index < 0) | (byte == ALL), rest, byte.to(tl.int32))
    return told, rest


@triton.jit
def tally_kernel(
    body, record, first_unit, index_at, span, count, bad, units,
    TILE: tl.constexpr, ALL: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """count: elements that are told of each unit of the records. bad: least record with a tile of more than it has."""
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        r = tl.load(record + unit)
        told, rest = _of_tiles(
            body, tl.load(index_at + r), tl.load(first_unit + r), unit, tl.load(span + r), True, TILE, ALL, TILES
        )
        tl.store(count + unit, tl.sum(told, 0))
        if tl.sum((told > rest).to(tl.int32), 0) > 0:
            tl.atomic_min(bad, r)


@triton.jit
def put_kernel(
    body, record, first_unit, index_at, values_at, tiles, span, count, before, bad, units, first, row, table,
    WORD: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, ALL: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
    WRITE: tl.constexpr,
):  # fmt: skip
    """The told elements of each unit: their order in it is checked (bad: least record where it is wrong), or, with WRITE, each
    one's word is written where `table` has element first[record] + .. of the region whose first row is row[record]."""
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        r = tl.load(record + unit)
        begin = tl.load(first_unit + r)
        index = tl.load(index_at + r)
        told, rest = _of_tiles(body, index, begin, unit, tl.load(span + r), True, TILE, ALL, TILES)
        ends = tl.cumsum(told, 0)
        n = tl.load(count + unit)
        skip = tl.load(before + unit) - tl.load(before + begin)
        listed = body + index + tl.load(tiles + r) + skip
        if WRITE:
            low_row = tl.load(row + r)
            total = tl.load(table + low_row * 7 + 5)
            low_element = tl.load(first + r) + (unit - begin).to(tl.int64) * (TILES * TILE)
            words = body + tl.load(values_at + r) + skip * SIZE
        for low in range(0, n, WIDTH):
            v = low + tl.arange(0, WIDTH)
            inside = v < n
            tile = tl.sum((v[:, None] >= ends[None, :]).to(tl.int32), 1)
            if index < 0:
                place = v % TILE
            else:
                place = tl.load((listed + v).to(tl.pointer_type(tl.uint8)), mask=inside, other=0).to(tl.int32)
            if WRITE:
                element = low_element + tile * TILE + place
                which = element // total
                k = element - which * total
                entry = table + (low_row + which) * 7
                to = tl.load(entry, mask=inside, other=0) + _offsets(
                    k, tl.load(entry + 1, mask=inside, other=1), tl.load(entry + 2, mask=inside, other=1),
                    tl.load(entry + 3, mask=inside, other=0), tl.load(entry + 4, mask=inside, other=0), SIZE,
                )  # fmt: skip
                word = tl.load((words + v * SIZE).to(tl.pointer_type(WORD)), mask=inside, other=0)
                tl.store(to.to(tl.pointer_type(WORD)), word, mask=inside)
            else:
                has = tl.sum(tl.where(tile[:, None] == tl.arange(0, TILES)[None, :], rest[None, :], 0), 1)
                wrong = inside & (place >= has)
                if index >= 0:
                    earlier = inside & (v > 0)
                    same = tl.sum(((v - 1)[:, None] >= ends[None, :]).to(tl.int32), 1) == tile
                    previous = tl.load((listed + v - 1).to(tl.pointer_type(tl.uint8)), mask=earlier, other=0).to(tl.int32)
                    wrong = wrong | (earlier & same & (place <= previous))
                if tl.sum(wrong.to(tl.int32), 0) > 0:
                    tl.atomic_min(bad, r)


def tiles_of(size: int, tile: int) -> int:
    """Tiles of a unit of elements of `size` bytes."""
    return UNIT * 8 // size // tile


def launch_find(
    table: torch.Tensor, blocks: tuple[torch.Tensor, torch.Tensor], known: torch.Tensor, known_base: int, sums: torch.Tensor,
    held: torch.Tensor, count: torch.Tensor, place_of: torch.Tensor, cursor: torch.Tensor, places: torch.Tensor,
    values: torch.Tensor, size: int, tile: int, all_of_it: int,
) -> None:  # fmt: skip
    """See find_kernel. places (uint8), values (words of `size` bytes): as long as there is room."""
    find_kernel[(len(blocks[0]),)](  # pyright: ignore[reportIndexIssue]
        table, *blocks, known, known_base, sums, held, count, place_of, cursor, places, values, len(places),
        WORD=_WORD[size], SIZE=size, EACH=8 // size, MASK=(1 << 8 * size) - 1 if size < 8 else -1, UNIT=UNIT, LOOPS=LOOPS,
        TILE=tile, ALL=all_of_it, GOLDEN=GOLDEN, MIX_1=MIX_1, MIX_2=MIX_2, num_warps=FIND_WARPS,
    )  # fmt: skip


def launch_gather(
    record: torch.Tensor, count: torch.Tensor, place_of: torch.Tensor, before: torch.Tensor, held: torch.Tensor,
    places: torch.Tensor, values: torch.Tensor, first_unit: torch.Tensor, tiles: torch.Tensor, index_at: torch.Tensor,
    values_at: torch.Tensor, size: int, tile: int,
) -> None:  # fmt: skip
    """See gather_kernel; afterwards there is room again for what is still to do."""
    units = len(record)
    gather_kernel[(min(units, PROGRAMS),)](  # pyright: ignore[reportIndexIssue]
        record, count, place_of, before, held, places, values, first_unit, tiles, index_at, values_at, units,
        WORD=_WORD[size], SIZE=size, TILES=tiles_of(size, tile), WIDTH=WIDTH, DONE=DONE, num_warps=1,
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
        tiles = -(-span // tile)
        units = -(-tiles // tiles_of(size, tile))
        first = np.cumsum(units) - units
        columns = np.stack([first, index_at, values_at, tiles, span])
        self._columns = torch.from_numpy(columns).to(here)
        self._last = torch.from_numpy(first + units - 1).to(here)
        numbers = torch.arange(len(span), dtype=torch.int32, device=here)
        self._record = torch.repeat_interleave(numbers, torch.from_numpy(units).to(here), output_size=int(units.sum()))
        self._count = torch.empty(len(self._record), dtype=torch.int32, device=here)
        self._bad = torch.full((1,), len(span), dtype=torch.int32, device=here)
        self._before: Any = None

    def tally(self) -> torch.Tensor:
        """int64: number of the first record that is not as the format says (their number, if all are), then the elements
        told of each."""
        first, index_at, _, _, span = self._columns
        units = len(self._record)
        tally_kernel[(min(units, PROGRAMS),)](  # pyright: ignore[reportIndexIssue]
            self._body.data_ptr(), self._record, first, index_at, span, self._count, self._bad, units,
            TILE=self._tile, ALL=self._all, TILES=tiles_of(self.size, self._tile), num_warps=1,
        )  # fmt: skip
        upto = torch.cumsum(self._count, 0, dtype=torch.int64)
        self._before = upto - self._count
        return torch.cat([self._bad.long(), upto[self._last] - self._before[first]])

    def check(self) -> torch.Tensor:
        """int32 [1]: as the first of tally(), of what is told of each tile. Only when tally() is what the directory says."""
        self._put(None, None, None)
        return self._bad

    def write(self, first: torch.Tensor, row: torch.Tensor, table: torch.Tensor) -> None:
        """first: element of its region that each record begins with; row: of `table` (words of `size`), the region's first."""
        self._put(first, row, table)

    def _put(self, first: Any, row: Any, table: Any) -> None:
        begin, index_at, values_at, tiles, span = self._columns
        units = len(self._record)
        put_kernel[(min(units, PROGRAMS),)](  # pyright: ignore[reportIndexIssue]
            self._body.data_ptr(), self._record, begin, index_at, values_at, tiles, span, self._count, self._before, self._bad,
            units, *((begin, begin, begin) if table is None else (first, row, table)),
            WORD=_WORD[self.size], SIZE=self.size, TILE=self._tile, ALL=self._all, TILES=tiles_of(self.size, self._tile),
            WIDTH=WIDTH, WRITE=table is not None, num_warps=4,
        )  # fmt: skip
