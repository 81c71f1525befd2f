"""Triton kernels that quantise thousands of regions in one launch: absmax, scale, cast and packing, one read of the weights.

A launch is described by a table of int64 in device memory, one row for each job (FIELDS), and by lists that say which job and
which tile of it a program works on. `tile_kernel` works on a tile inside one group (blocks, rows, tensors); `rows_kernel` on
a tile that holds many groups of one row each, and it has a mode that only looks: absmax into memory, NaN and infinities
counted. For the former triton_look has a kernel for that.

Every division is the correctly rounded one: Triton's own operator is two units in the last place off. Imported only where
there is CUDA (or TRITON_INTERPRET=1 in the tests).
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

FIELDS = (
    "base", "row_stride", "col_stride", "rows", "cols", "row", "col", "group_rows", "group_cols", "grid_cols",
    "values", "scales", "amax", "total", "global", "shape", "w_rows", "w_cols", "found", "nonfinite",
)  # fmt: skip
"""Columns of a job's row: addresses of its words and parts (0: not there), sizes and strides in elements, where its region
begins in W, the group's size, columns of groups; amax and total: known; found, nonfinite and total: written when only looking.
Kernels load them by number."""

SLOTS = 256
"""Programs add to that many rows of COUNTS statistics, so that few wait for each other: error bits, saturated, zero blocks,
nonfinite, outgrown (which is counted always)."""
COUNTS = 5


@triton.jit
def rounded(x):
    """To bfloat16 and back."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _near(scale):
    """Whether a scale is far enough from float32's ends for _divided's short way (2^-60 to 2^60)."""
    size = tl.abs(scale)
    return (size > 8.673617379884035e-19) & (size < 1.152921504606847e18)


@triton.jit
def _divided(x, by, short, POWER: tl.constexpr, SIGNED_ZERO: tl.constexpr):
    """x / by, correctly rounded; by: a group's scale, for a tile or broadcast over one; short: all of them are _near.

    POWER: they are powers of two from 2^-127 to 2^127, whose reciprocals are exact. Else Markstein: with the rounded
    reciprocal r and q = x * r, fma(fma(-q, by, x), r, q) is the correctly rounded quotient where nothing on the way is too
    small or too large for float32.
    """
    if POWER:
        y = x * tl.div_rn(1.0, by)
    elif short:
        r = tl.div_rn(1.0, by)
        q = x * r
        y = tl.fma(tl.fma(-q, by, x), r, q)
        if SIGNED_ZERO:
            y = tl.where(q == 0, q, y)  # adding zeros has made -0.0 positive
    else:
        y = tl.div_rn(x, by)
    return y


@triton.jit
def _scale(
    a, total, KIND: tl.constexpr, SCALE: tl.constexpr, POWER: tl.constexpr, APPLY: tl.constexpr, ARITHMETIC: tl.constexpr,
    SCALE_ARITHMETIC: tl.constexpr, INVERSE: tl.constexpr, DIVISOR: tl.constexpr, FLOOR: tl.constexpr, LEAST: tl.constexpr,
    ZERO: tl.constexpr,
):  # fmt: skip
    """(stored, used, global): as weight_sync.quant.host.scales_of."""
    one = a * 0.0 + 1.0
    whole = total * 0.0 + 1.0
    if FLOOR > 0:
        a = tl.maximum(a, FLOOR)
    if APPLY == "multiply":
        safe = tl.where(a > 0, a, 1.0)
        used = tl.where(a > 0, tl.div_rn(one, safe) * DIVISOR, tl.div_rn(one, one * ZERO))
        stored = tl.div_rn(one, used)
    else:
        if INVERSE:
            s = a * tl.div_rn(one, one * DIVISOR)
        else:
            s = tl.div_rn(a, one * DIVISOR)
        if SCALE == "power_of_two":
            if POWER == "ceil":
                bits = s.to(tl.int32, bitcast=True)
                exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
            else:
                bits = a.to(tl.int32, bitcast=True)
                if POWER == "round":
                    bits += 0x200000
                exponent = (bits >> 23) - (8 if KIND == "fp8" else 2)
            exponent = tl.minimum(tl.maximum(exponent, 0), 254)
            stored = tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
            used = stored
            if APPLY == "reciprocal":
                used = tl.div_rn(1.0, used)
        elif SCALE == "two_level":
            g = tl.div_rn(whole, tl.maximum(total, 1.1754943508222875e-38))
            if SCALE_ARITHMETIC == "bfloat16":
                g = rounded(rounded(g) * (448.0 * DIVISOR))
                s = rounded(s)
            else:
                g = g * (448.0 * DIVISOR)
            whole = tl.where((g.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000, 1.0, g)
            s = tl.minimum(whole * s, 448.0).to(tl.float8e4nv).to(tl.float32)
            stored = tl.where(s == 0, ZERO, s)
            used = tl.div_rn(stored, whole)
        else:
            if LEAST > 0:
                s = tl.maximum(s, LEAST)
            if SCALE_ARITHMETIC == "bfloat16":
                s = rounded(s)
            stored = tl.where(s == 0, ZERO, s)
            used = stored
            if ARITHMETIC == "bfloat16":
                used = rounded(used)
            if APPLY == "reciprocal":
                used = tl.div_rn(1.0, used)
    return stored, used, whole


@triton.jit
def _code(y, KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, NEGATIVE_ZERO: tl.constexpr):
    """(codes as int8 or int32, the values they stand for)."""
    if KIND == "fp8" and HIGH == 448.0 and LOW == -448.0:
        clamped = y  # the hardware's conversion saturates
    else:
        clamped = tl.minimum(tl.maximum(y, LOW), HIGH)
    if KIND == "fp8":
        if not NEGATIVE_ZERO:
            clamped = tl.where(y == 0, 0.0, clamped)
        cast = clamped.to(tl.float8e4nv)
        code = cast.to(tl.int8, bitcast=True)
        value = cast.to(tl.float32)
    elif KIND == "int4":
        value = (clamped + 12582912.0) - 12582912.0  # 1.5 * 2^23: what is added has no room for a fraction
        code = value.to(tl.int32) + 8
    else:
        size = tl.abs(clamped)
        m = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
        m += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
        code = m | tl.where(y < 0, 8, 0)
        normal = (((m >> 1) + 126) << 23) | ((m & 1) << 22)
        value = tl.where(m < 2, m.to(tl.float32) * 0.5, normal.to(tl.float32, bitcast=True))
        value = tl.where(y < 0, -value, value)
    return code, value


@triton.jit
def _store_scales(at, offset, stored, inside, DTYPE: tl.constexpr):
    if DTYPE == "float32":
        tl.store(at.to(tl.pointer_type(tl.float32)) + offset, stored, mask=inside)
    elif DTYPE == "bfloat16":
        tl.store(at.to(tl.pointer_type(tl.bfloat16)) + offset, stored.to(tl.bfloat16), mask=inside)
    elif DTYPE == "float8_e4m3fn":
        tl.store(at.to(tl.pointer_type(tl.int8)) + offset, stored.to(tl.float8e4nv).to(tl.int8, bitcast=True), mask=inside)
    else:
        exponent = stored.to(tl.int32, bitcast=True) >> 23
        tl.store(at.to(tl.pointer_type(tl.int8)) + offset, exponent.to(tl.int8), mask=inside)


@triton.jit
def _store_rest(row, whole, SHAPE: tl.constexpr):
    """The parts that do not depend on a region: global scale and W's shape."""
    at = tl.load(row + 14)
    if at != 0:
        tl.store(at.to(tl.pointer_type(tl.float32)), whole)
    if SHAPE is not None:
        at = tl.load(row + 15)
        if at != 0:
            pointer = at.to(tl.pointer_type(SHAPE))
            tl.store(pointer, tl.load(row + 16).to(SHAPE))
            tl.store(pointer + 1, tl.load(row + 17).to(SHAPE))


@triton.jit
def _count(stats, program, error, saturated, zeros, nonfinite, SLOTS: tl.constexpr):
    at = stats + (program % SLOTS) * 5
    error = tl.where(error < float("inf"), error, 0.0)  # NaN is not less either
    tl.atomic_max(at, error.to(tl.int32, bitcast=True).to(tl.int64))
    if saturated != 0:
        tl.atomic_add(at + 1, saturated.to(tl.int64))
    if zeros != 0:
        tl.atomic_add(at + 2, zeros.to(tl.int64))
    if nonfinite != 0:
        tl.atomic_add(at + 3, nonfinite.to(tl.int64))


@triton.jit
def _store_values(
    at, r, r_inside, c_low, c_end, cols, code, PACKED: tl.constexpr, ALIGNED: tl.constexpr, C: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Codes [R, C] at rows r and columns from c_low of a region that has `cols` columns, of which those in [0, c_end) are
    meant."""
    start = at.to(tl.pointer_type(tl.int8)) + (r.to(tl.int64) * (cols // (1 if PACKED == 1 else 2)))[:, None]
    if PACKED == 1:
        c = c_low + tl.arange(0, C)
        inside = r_inside[:, None] & ((c >= 0) & (c < c_end))[None, :]
        pointer = start + c[None, :]
        if ALIGNED:
            pointer = tl.max_contiguous(tl.multiple_of(pointer, (1, 16)), (1, 16))
        tl.store(pointer, code, mask=inside)
    else:  # two codes in a byte, the first one lowest; eight in an int32 are four such bytes
        low, high = tl.split(tl.reshape(code, [R, C // 2, 2]))
        if ALIGNED:
            c_low = tl.multiple_of(c_low // 2, 8)
            c_end = tl.multiple_of(c_end // 2, 8)
        else:
            c_low = c_low // 2
            c_end = c_end // 2
        c = c_low + tl.arange(0, C // 2)
        inside = r_inside[:, None] & ((c >= 0) & (c < c_end))[None, :]
        pointer = start + c[None, :]
        if ALIGNED:
            pointer = tl.max_contiguous(tl.multiple_of(pointer, (1, 8)), (1, 8))
        tl.store(pointer, (low | (high << 4)).to(tl.int8), mask=inside)


@triton.jit
def pointers(row, r, c, WORD: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr):
    """To the words at rows r and columns c of a job's view."""
    base = tl.load(row)
    row_stride = tl.load(row + 1)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
        row_stride = tl.multiple_of(row_stride, 8)
    pointer = base.to(tl.pointer_type(WORD)) + (r.to(tl.int64) * row_stride)[:, None]
    if CONTIGUOUS:
        pointer = pointer + c[None, :]
        if ALIGNED:
            pointer = tl.max_contiguous(tl.multiple_of(pointer, (1, 16)), (1, 16))
    else:
        pointer = pointer + (c.to(tl.int64) * tl.load(row + 2))[None, :]
    return pointer


@triton.jit
def _load(row, r, c, inside, SOURCE: tl.constexpr, ROUND: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr):
    """float32 values at rows r and columns c of a job's view."""
    w = tl.load(pointers(row, r, c, SOURCE, CONTIGUOUS, ALIGNED), mask=inside, other=0.0).to(tl.float32)
    if ROUND:
        w = rounded(w)
    return w


@triton.jit
def place(row, at, ALIGNED: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Where tile `at` of a job lies, tiles [R, C] being counted over (group row, group column, tile row, tile column).

    (its group, its row and column of tiles in it, its first row, its first column, ends of the group's rows and columns), rows
    and columns as the view counts them: they may begin below 0.
    """
    rows = tl.load(row + 3).to(tl.int32)
    cols = tl.load(row + 4).to(tl.int32)
    top = tl.load(row + 5).to(tl.int32)
    left = tl.load(row + 6).to(tl.int32)
    group_rows = tl.load(row + 7).to(tl.int32)
    group_cols = tl.load(row + 8).to(tl.int32)
    grid_cols = tl.load(row + 9).to(tl.int32)
    if ALIGNED:
        cols = tl.multiple_of(cols, 16)
        left = tl.multiple_of(left, 16)
        group_cols = tl.multiple_of(group_cols, 16)
    across = tl.cdiv(group_cols, C)
    down = tl.cdiv(group_rows, R)
    b = at % across
    a = (at // across) % down
    group = at // (across * down)
    row_low = (top // group_rows + group // grid_cols) * group_rows - top
    col_low = (left // group_cols + group % grid_cols) * group_cols - left
    row_end = tl.minimum(row_low + group_rows, rows)
    col_end = tl.minimum(col_low + group_cols, cols)
    c_low = col_low + b * C
    if ALIGNED:
        c_low = tl.multiple_of(c_low, 16)
        col_end = tl.multiple_of(col_end, 16)
    return group, a, b, row_low + a * R, c_low, row_end, col_end


@triton.jit
def tile_kernel(
    table, tile_job, tile_at, stats, FIELDS: tl.constexpr, SLOTS: tl.constexpr, REPORT: tl.constexpr,
    SOURCE: tl.constexpr, ROUND: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, G: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr, POWER: tl.constexpr, APPLY: tl.constexpr,
    ARITHMETIC: tl.constexpr, SCALE_ARITHMETIC: tl.constexpr, INVERSE: tl.constexpr, DIVISOR: tl.constexpr, FLOOR: tl.constexpr,
    LEAST: tl.constexpr, ZERO: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BEYOND: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """One program: a tile [R, C] within one group of one job."""
    program = tl.program_id(0)
    row = table + tl.load(tile_job + program).to(tl.int64) * FIELDS
    at = tl.load(tile_at + program)
    cols = tl.load(row + 4).to(tl.int32)
    if ALIGNED:
        cols = tl.multiple_of(cols, 16)
    group, a, b, r_low, c_low, row_end, col_end = place(row, at, ALIGNED, R, C)
    r = r_low + tl.arange(0, R)
    c = c_low + tl.arange(0, C)
    r_inside = (r >= 0) & (r < row_end)
    inside = r_inside[:, None] & ((c >= 0) & (c < col_end))[None, :]
    w = _load(row, r, c, inside, SOURCE, ROUND, CONTIGUOUS, ALIGNED)
    magnitude = w.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    own = tl.max(magnitude)
    nonfinite = own * 0
    if REPORT:  # noqa: SIM102 - one is known when compiling, the other when running
        if own >= 0x7F800000:
            nonfinite = tl.sum((magnitude >= 0x7F800000).to(tl.int32))
    known = tl.load(row + 12)
    amax = own.to(tl.float32, bitcast=True)
    if known != 0:
        amax = tl.load(known.to(tl.pointer_type(tl.float32)) + group)
        limit = amax.to(tl.int32, bitcast=True)
        if (own > limit) & (limit < 0x7F800000) & (tl.load(row + 10) != 0):
            tl.atomic_add(stats + (program % SLOTS) * 5 + 4, 1)
    total = amax
    if SCALE == "two_level":
        total = tl.load(tl.load(row + 13).to(tl.pointer_type(tl.float32)))
    stored, used, whole = _scale(
        amax, total, KIND, SCALE, POWER, APPLY, ARITHMETIC, SCALE_ARITHMETIC, INVERSE, DIVISOR, FLOOR, LEAST, ZERO
    )
    if APPLY == "divide":
        y = _divided(w, used, _near(used), SCALE == "power_of_two", KIND == "fp8" and NEGATIVE_ZERO)
    else:
        y = w * used
    if ARITHMETIC == "bfloat16":
        y = rounded(y)
    code, value = _code(y, KIND, LOW, HIGH, NEGATIVE_ZERO)
    values = tl.load(row + 10)
    if values != 0:
        if ALIGNED:
            values = tl.multiple_of(values, 16)
        _store_values(values, r, r_inside, c_low, col_end, cols, code, PACKED, ALIGNED, C, R)
    first = (a == 0) & (b == 0)
    scales = tl.load(row + 11)
    _store_scales(scales, group, stored, first & (scales != 0), DTYPE)
    if at == 0:
        _store_rest(row, whole, SHAPE)
    if REPORT:
        # what is outside is 0, and so is its code's value
        by = used if SCALE == "two_level" else stored
        error = tl.max(tl.abs(value * by - w))
        error = tl.div_rn(error, tl.where(amax > 0, amax, 1.0))
        saturated = own * 0
        largest = own.to(tl.float32, bitcast=True)
        largest = tl.div_rn(largest, used) if APPLY == "divide" else largest * used
        if largest > HIGH + BEYOND:  # else none is; |LOW| is not less than HIGH
            out = (y > HIGH + BEYOND) | (y < LOW - BEYOND)
            saturated = tl.sum(out.to(tl.int32))
        zeros = ((amax == 0) & first).to(tl.int32)
        _count(stats, program, error, saturated, zeros, nonfinite, SLOTS)


@triton.jit
def rows_kernel(
    table, tile_job, tile_at, stats, FIELDS: tl.constexpr, SLOTS: tl.constexpr, LOOK: tl.constexpr, REPORT: tl.constexpr,
    SOURCE: tl.constexpr, ROUND: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGNED: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, G: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr, POWER: tl.constexpr, APPLY: tl.constexpr,
    ARITHMETIC: tl.constexpr, SCALE_ARITHMETIC: tl.constexpr, INVERSE: tl.constexpr, DIVISOR: tl.constexpr, FLOOR: tl.constexpr,
    LEAST: tl.constexpr, ZERO: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BEYOND: tl.constexpr,
    NEGATIVE_ZERO: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """One program: a tile [R, C] of one job that holds R * C / G groups, each of G columns of one row."""
    program = tl.program_id(0)
    row = table + tl.load(tile_job + program).to(tl.int64) * FIELDS
    at = tl.load(tile_at + program)
    rows = tl.load(row + 3).to(tl.int32)
    cols = tl.load(row + 4).to(tl.int32)
    left = tl.load(row + 6).to(tl.int32)
    grid_cols = tl.load(row + 9).to(tl.int32)
    if ALIGNED:
        cols = tl.multiple_of(cols, 16)
    across = tl.cdiv(grid_cols, C // G)
    j = (at % across) * (C // G)
    r = (at // across) * R + tl.arange(0, R)
    c_low = j * G - left % G
    if ALIGNED:
        c_low = tl.multiple_of(c_low, 16)
    c = c_low + tl.arange(0, C)
    inside = (r < rows)[:, None] & ((c >= 0) & (c < cols))[None, :]
    w = _load(row, r, c, inside, SOURCE, ROUND, CONTIGUOUS, ALIGNED)
    w3 = tl.reshape(w, [R, C // G, G])
    magnitude = w3.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    own = tl.max(magnitude, 2)
    most = tl.max(own)
    nonfinite = most * 0
    if LOOK or REPORT:  # noqa: SIM102 - one is known when compiling, the other when running
        if most >= 0x7F800000:
            bad = (w.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000
            nonfinite = tl.sum(bad.to(tl.int32))
    g = j + tl.arange(0, C // G)
    group = r[:, None] * grid_cols + g[None, :]
    there = (r < rows)[:, None] & (g < grid_cols)[None, :]
    if LOOK:
        where = tl.load(row + 18)
        if where != 0:
            tl.store(where.to(tl.pointer_type(tl.int32)) + group, own, mask=there)
        found = tl.load(row + 19)
        if (nonfinite != 0) & (found != 0):
            tl.atomic_add(found.to(tl.pointer_type(tl.int64)), nonfinite.to(tl.int64))
        total_at = tl.load(row + 13)
        if total_at != 0:
            tl.atomic_max(total_at.to(tl.pointer_type(tl.int32)), most)
    else:
        known = tl.load(row + 12)
        amax = own.to(tl.float32, bitcast=True)
        if known != 0:
            amax = tl.load(known.to(tl.pointer_type(tl.float32)) + group, mask=there, other=0.0)
            limit = amax.to(tl.int32, bitcast=True)
            grown = tl.sum((there & (own > limit) & (limit < 0x7F800000)).to(tl.int32))
            if (grown != 0) & (tl.load(row + 10) != 0):
                tl.atomic_add(stats + (program % SLOTS) * 5 + 4, grown.to(tl.int64))
        total = tl.max(amax)
        if SCALE == "two_level":
            total = tl.load(tl.load(row + 13).to(tl.pointer_type(tl.float32)))
        stored, used, whole = _scale(
            amax, total, KIND, SCALE, POWER, APPLY, ARITHMETIC, SCALE_ARITHMETIC, INVERSE, DIVISOR, FLOOR, LEAST, ZERO
        )
        used3 = tl.reshape(used, [R, C // G, 1])
        if APPLY == "divide":
            y = _divided(
                w3,
                used3,
                tl.min(_near(used).to(tl.int32)) == 1,
                SCALE == "power_of_two",
                KIND == "fp8" and NEGATIVE_ZERO,
            )
        else:
            y = w3 * used3
        if ARITHMETIC == "bfloat16":
            y = rounded(y)
        code, value = _code(y, KIND, LOW, HIGH, NEGATIVE_ZERO)
        values = tl.load(row + 10)
        if values != 0:
            if ALIGNED:
                values = tl.multiple_of(values, 16)
            _store_values(values, r, r < rows, c_low, cols, cols, tl.reshape(code, [R, C]), PACKED, ALIGNED, C, R)
        scales = tl.load(row + 11)
        if scales != 0:
            _store_scales(scales, group, stored, there, DTYPE)
        if at == 0:
            _store_rest(row, whole, SHAPE)
        if REPORT:
            by = used3 if SCALE == "two_level" else tl.reshape(stored, [R, C // G, 1])
            # what is outside is 0, and so is its code's value
            error = tl.div_rn(tl.max(tl.abs(value * by - w3), 2), tl.where(amax > 0, amax, 1.0))
            error = tl.max(tl.where(error < float("inf"), error, 0.0))
            saturated = most * 0
            largest = own.to(tl.float32, bitcast=True)
            largest = tl.div_rn(largest, used) if APPLY == "divide" else largest * used
            if tl.max(tl.where(there, largest, 0.0)) > HIGH + BEYOND:  # else none is
                out = tl.reshape(((y > HIGH + BEYOND) | (y < LOW - BEYOND)).to(tl.int32), [R, C])
                saturated = tl.sum(out)
            zeros = tl.sum(((amax == 0) & there).to(tl.int32))
            _count(stats, program, error, saturated, zeros, nonfinite, SLOTS)
