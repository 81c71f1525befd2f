"""Triton kernels for live parameters on a GPU: digest or copy thousands of strided regions in one launch.

A launch is described by tables of int64 in device memory, one row for each region (`Tables`), and by a list of blocks: which
region a program works on and from which word. So one launch serves regions of any number and size, and nothing is launched for
each tensor. Imported only where there is CUDA (or TRITON_INTERPRET=1 in the tests).
"""

from __future__ import annotations

from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from weight_sync.device.lanes import GOLDEN, MIX_1, MIX_2

BLOCK = 1024
LOOPS = 8
PER_PROGRAM = BLOCK * LOOPS
"""Words of a block, which one program works on at a time."""

COPY_PROGRAMS = 64
"""Enough to fill NVLink between two H200 (32 programs 340 GB/s, 64 371, 132 372; the copy engine's one copy 392), and few
enough to leave half of the multiprocessors to a digest at the same time, which then costs nothing (benchmarks/gpu_notes.md)."""

_WORD: dict[int, Any] = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def _fields(table, region):
    """A row of a table, but for its position."""
    row = table + region * 7
    base = tl.load(row)
    run = tl.load(row + 1)
    inner = tl.load(row + 2)
    outer_stride = tl.load(row + 3)
    inner_stride = tl.load(row + 4)
    total = tl.load(row + 5)
    return base, run, inner, outer_stride, inner_stride, total


@triton.jit
def _offsets(k, run, inner, outer_stride, inner_stride, SIZE: tl.constexpr):
    """Bytes from a region's base to its k-th words: k counts over (outer, inner, run)."""
    # 32-bit division is several times cheaper; the tables refuse regions of 2^31 words or more.
    k32 = k.to(tl.int32)
    run32 = run.to(tl.int32)
    inner32 = inner.to(tl.int32)
    r = k32 // run32
    w = k32 - r * run32
    o = r // inner32
    i = r - o * inner32
    return o.to(tl.int64) * outer_stride + i.to(tl.int64) * inner_stride + w.to(tl.int64) * SIZE


@triton.jit
def _hashed(x, position, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
    """The h_i of words x at these positions of what is digested (weight_sync.device.lanes)."""
    golden = tl.full(x.shape, GOLDEN, tl.uint64)
    h = x.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64, bitcast=True) * golden
    h = h ^ (h >> 33)
    h = h * tl.full(x.shape, MIX_1, tl.uint64)
    h = h ^ (h >> 33)
    h = h * tl.full(x.shape, MIX_2, tl.uint64)
    return h ^ (h >> 33)


@triton.jit
def digest_kernel(
    table, block_region, block_first, sums, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr,
    BLOCK: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """sums[region] += the h_i of its words (weight_sync.device.lanes), one atomic addition for each program."""
    program = tl.program_id(0)
    region = tl.load(block_region + program).to(tl.int64)
    first = tl.load(block_first + program)
    base, run, inner, outer_stride, inner_stride, total = _fields(table, region)
    position = tl.load(table + region * 7 + 6)
    acc = tl.zeros([BLOCK], tl.uint64)
    for step in range(LOOPS):
        k = first + step * BLOCK + tl.arange(0, BLOCK)
        inside = k < total
        if run == total:
            offset = k * 8
        else:
            offset = _offsets(k, run, inner, outer_stride, inner_stride, 8)
        pointer = (base + offset).to(tl.pointer_type(tl.int64))
        h = _hashed(tl.load(pointer, mask=inside, other=0), k + position, GOLDEN, MIX_1, MIX_2)
        acc += tl.where(inside, h, tl.zeros([BLOCK], tl.uint64))
    tl.atomic_add(sums + region, tl.sum(acc.to(tl.int64, bitcast=True), 0))


@triton.jit
def digest_plain_kernel(
    table, block_region, block_first, sums, GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr,
    BLOCK: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """As digest_kernel, of plain regions (Tables.plain), all of whose words are asked for, 16 bytes at a time, before any is
    hashed."""
    program = tl.program_id(0)
    region = tl.load(block_region + program).to(tl.int64)
    first = tl.load(block_first + program)
    row = table + region * 7
    total = tl.multiple_of(tl.load(row + 5), 2)
    k = first + (tl.arange(0, LOOPS) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    k = tl.max_contiguous(tl.multiple_of(k, (1, 16)), (1, 16))
    inside = k < total
    pointer = tl.load(row).to(tl.pointer_type(tl.int64)) + k
    pointer = tl.max_contiguous(tl.multiple_of(pointer, (1, 16)), (1, 16))
    h = _hashed(tl.load(pointer, mask=inside, other=0), k + tl.load(row + 6), GOLDEN, MIX_1, MIX_2)
    h = tl.where(inside, h, tl.zeros([LOOPS, BLOCK], tl.uint64))
    tl.atomic_add(sums + region, tl.sum(tl.sum(h.to(tl.int64, bitcast=True), 1), 0))


# How many there are must not decide which program runs: one would be compiled in the middle of a sync.
@triton.jit(do_not_specialize=["count"])
def copy_kernel(
    source, target, block_region, block_first, count, fence, epoch, missed,
    WORD: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr, FENCED: tl.constexpr,
):  # fmt: skip
    """Word k of each source region becomes word k of the target region of the same row. Programs take turns with the blocks.

    FENCED: before every block the word at address `fence` is read; if it is not `epoch` the block is not copied, and counted in
    `missed`.
    """
    for block in range(tl.program_id(0), count, tl.num_programs(0)):
        region = tl.load(block_region + block).to(tl.int64)
        first = tl.load(block_first + block)
        s_base, s_run, s_inner, s_outer_stride, s_inner_stride, total = _fields(source, region)
        t_base, t_run, t_inner, t_outer_stride, t_inner_stride, _ = _fields(target, region)
        allowed = total
        if FENCED:
            now = tl.load(fence.to(tl.pointer_type(tl.int64)), volatile=True)
            if now != epoch:
                allowed = total * 0
                tl.atomic_add(missed, 1)
        for step in range(LOOPS):
            k = first + step * BLOCK + tl.arange(0, BLOCK)
            inside = k < allowed
            if s_run == total:
                s_offset = k * SIZE
            else:
                s_offset = _offsets(k, s_run, s_inner, s_outer_stride, s_inner_stride, SIZE)
            if t_run == total:
                t_offset = k * SIZE
            else:
                t_offset = _offsets(k, t_run, t_inner, t_outer_stride, t_inner_stride, SIZE)
            value = tl.load((s_base + s_offset).to(tl.pointer_type(WORD)), mask=inside)
            tl.store((t_base + t_offset).to(tl.pointer_type(WORD)), value, mask=inside)


def launch_digest(
    table: torch.Tensor, plain: tuple[torch.Tensor, torch.Tensor], others: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Sum of the h_i of every region: int64 [regions] on the device, not yet finished (lanes.finish).

    plain, others: blocks, as Tables.in_two() has them.
    """
    sums = torch.zeros(len(table), dtype=torch.int64, device=table.device)
    for kernel, blocks in ((digest_plain_kernel, plain), (digest_kernel, others)):
        if len(blocks[0]):
            kernel[(len(blocks[0]),)](  # pyright: ignore[reportIndexIssue]
                table, *blocks, sums, GOLDEN=GOLDEN, MIX_1=MIX_1, MIX_2=MIX_2, BLOCK=BLOCK, LOOPS=LOOPS
            )  # fmt: skip
    return sums


def launch_copy(
    source: torch.Tensor,
    target: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor],
    size: int,
    fence: tuple[int, int, torch.Tensor] | None = None,
    programs: int = COPY_PROGRAMS,
) -> None:
    """Copy each region of `source` to that of `target`; `size`: bytes of a word (8, 4, 2 or 1), the unit of both tables.

    programs: how many run at a time; each keeps one multiprocessor busy.
    fence: (address of a word, the value it must have, int64 [1] that counts the programs which found another one).
    """
    count = len(blocks[0])
    if not count:
        return
    at, epoch, missed = fence or (0, 0, blocks[1])
    copy_kernel[(min(count, programs),)](  # pyright: ignore[reportIndexIssue]
        source, target, *blocks, count, at, epoch, missed,
        WORD=_WORD[size], SIZE=size, BLOCK=2 * BLOCK, LOOPS=LOOPS // 2, FENCED=fence is not None, num_warps=8,
    )  # fmt: skip
