"""The Triton kernel of the first pass over weights: largest magnitude of every group, and how many NaN and infinities.

It only reads, so memory is what it should wait for: magnitudes are compared as bits, which need no conversion, and a program
asks for several tiles before it reduces any. Groups of one row that a tile holds many of: `rows_kernel`, in triton_kernels.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from weight_sync.quant.triton_kernels import place, pointers, rounded


@triton.jit
def _magnitudes(
    row, r, c, inside, SOURCE: tl.constexpr, ROUND: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """Magnitudes as bits, whose order is theirs: float32's, or (HALF) the upper 16, which are all that bfloat16 has."""
    if HALF:
        # not as bfloat16: a comparison of those would be one of float32
        words = tl.load(pointers(row, r, c, tl.int16, CONTIGUOUS, ALIGNED), mask=inside, other=0)
        bits = words & 0x7FFF
    else:
        w = tl.load(pointers(row, r, c, SOURCE, CONTIGUOUS, ALIGNED), mask=inside, other=0.0).to(tl.float32)
        if ROUND:
            w = rounded(w)
        bits = w.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit
def look_kernel(
    table, tile_job, tile_at, FIELDS: tl.constexpr, SOURCE: tl.constexpr, ROUND: tl.constexpr, CONTIGUOUS: tl.constexpr,
    ALIGNED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, LOOPS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One program: LOOPS tiles [R, C] below each other, within one group of one job."""
    program = tl.program_id(0)
    row = table + tl.load(tile_job + program).to(tl.int64) * FIELDS
    at = tl.load(tile_at + program)
    group, _, _, row_low, c_low, row_end, col_end = place(row, at, ALIGNED, R * LOOPS, C)
    c = c_low + tl.arange(0, C)
    c_inside = ((c >= 0) & (c < col_end))[None, :]
    most = tl.zeros([R, C], tl.int16 if HALF else tl.int32)
    for step in tl.static_range(LOOPS):
        r = row_low + step * R + tl.arange(0, R)
        inside = ((r >= 0) & (r < row_end))[:, None] & c_inside
        most = tl.maximum(most, _magnitudes(row, r, c, inside, SOURCE, ROUND, CONTIGUOUS, ALIGNED, HALF))
    own = tl.max(most).to(tl.int32)
    if HALF:
        own = own << 16
    where = tl.load(row + 18)
    if where != 0:
        tl.atomic_max(where.to(tl.pointer_type(tl.int32)) + group, own)
    total_at = tl.load(row + 13)
    if total_at != 0:
        tl.atomic_max(total_at.to(tl.pointer_type(tl.int32)), own)
    found = tl.load(row + 19)
    if (own >= 0x7F800000) & (found != 0):
        for again in range(LOOPS):
            r = row_low + again * R + tl.arange(0, R)
            inside = ((r >= 0) & (r < row_end))[:, None] & c_inside
            bits = _magnitudes(row, r, c, inside, SOURCE, ROUND, CONTIGUOUS, ALIGNED, HALF).to(tl.int32)
            bad = tl.sum((bits >= (0x7F80 if HALF else 0x7F800000)).to(tl.int32))
            tl.atomic_add(found.to(tl.pointer_type(tl.int64)), bad.to(tl.int64))
