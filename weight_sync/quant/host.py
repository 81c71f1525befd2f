"""Quantisation on the host with numpy: always there, no torch needed.

Works through a region in bands of whole groups that fit a cache. A scaled value becomes its code by a table over the upper 16
bits of its float32, the lowest of which is set if any lower bit was: rounding to odd first, and then to the few bits of the
format, gives what one rounding would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import PlanError
from weight_sync.quant.kernel import Job, Prepared, Scan, ScanEach, Stats, check, check_view
from weight_sync.quant.reference import codes_of, decode_table
from weight_sync.quant.scheme import EXPONENT, KINDS, Pair, Scheme

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

BAND = 1 << 18
"""Elements worked on at a time: a megabyte of float32."""

_INFINITE = np.uint32(0x7F800000)
_NUMPY: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


class HostKernel:
    """See weight_sync.quant.kernel.Kernel."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def prepare(self, jobs: Sequence[Job], stats: bool = True) -> HostPrepared:
        check(self.scheme, jobs)
        return HostPrepared(self.scheme, jobs, stats)

    def prepare_scan(self, jobs: Sequence[Job], kept: Sequence[bool]) -> ScanEach:
        return ScanEach(self, jobs, kept)

    def fetch(self, made: Sequence[Prepared]) -> None:
        return

    def scan(self, jobs: Sequence[Job]) -> list[Scan]:
        for job in jobs:
            if text := check_view(job):
                raise PlanError(f"{job.label or 'a job'}: {text}")
        space = Workspace(band_elements(self.scheme, jobs))
        return [_scanned(self.scheme, job, space) for job in jobs]


class Workspace:
    """Memory for one band at a time."""

    def __init__(self, elements: int) -> None:
        self.w = np.empty(elements, np.float32)
        self.y = np.empty(elements, np.float32)
        self.bits = np.empty(elements, np.uint32)
        self.index = np.empty(elements, np.uint16)
        self.codes = np.empty(elements, np.uint8)


def band_elements(scheme: Scheme, jobs: Sequence[Job]) -> int:
    return max((rows * cols for job in jobs for rows, cols in [_band_shape(scheme, job)]), default=0)


def _band_shape(scheme: Scheme, job: Job) -> Pair:
    """Rows and columns of the largest band of a job: one row of groups, or as many single rows as fit."""
    rows, cols = job.size
    group = scheme.groups(job.shape)[0]
    return (min(rows, group if 1 < group < rows and group * cols <= 8 * BAND else max(1, BAND // cols)), cols)


def bands(scheme: Scheme, job: Job) -> Iterator[tuple[int, int, int, int]]:
    """(first row, one past the last, first group row, one past the last) of each band, counted within the region."""
    group, most = scheme.groups(job.shape)[0], _band_shape(scheme, job)[0]
    top, rows = job.origin[0], job.size[0]
    low = 0
    while low < rows:
        edge = rows if group == 1 else (top + low) // group * group + group - top
        high = min(low + most, edge, rows)
        yield low, high, (top + low) // group - top // group, (top + high - 1) // group - top // group + 1
        low = high


def column_groups(scheme: Scheme, job: Job) -> NDArray[np.int64]:
    """The region's columns at which groups begin, the first one cut off at the region's edge."""
    size = scheme.groups(job.shape)[1]
    first, end = job.origin[1], job.origin[1] + job.size[1]
    return np.maximum(np.arange(first // size * size, end, size) - first, 0)


def load(scheme: Scheme, view: Any, source: str, out: Floats) -> Floats:
    """The values of live words as float32, rounded to bfloat16 first where the scheme wants it."""
    if source == "bfloat16":
        np.left_shift(view, 16, out=out.view(np.uint32), dtype=np.uint32)
    elif scheme.weight == "bfloat16":
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(out, view.view(np.float32).astype(ml_dtypes.bfloat16))
    else:
        np.copyto(out, view.view(np.float32))
    return out


def _f32(x: Any) -> Floats:
    """What is float32 already: numpy's stubs lose it in arithmetic with scalars."""
    return np.asarray(x, np.float32)


def rounded(x: Floats) -> Floats:
    """To bfloat16 and back."""
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def scales_of(scheme: Scheme, amax: Floats, total: Floats | None) -> tuple[Floats, Floats, Floats]:
    """(scales as stored, in float32; what `apply` works with; the global scale [1]) of groups with these absmax.

    The second is a divisor, or a factor where scheme.apply is reciprocal or multiply. Scales of power_of_two are the powers.
    """
    one, divisor = np.float32(1), np.float32(scheme.divisor)
    whole = np.ones(1, np.float32)
    with np.errstate(all="ignore"):
        a = np.maximum(amax, np.float32(scheme.floor)) if scheme.floor else amax
        if scheme.apply == "multiply":
            factor = np.where(a > 0, (one / a) * divisor, one / np.float32(scheme.zero))
            return _f32(one / factor), _f32(factor), whole
        s = a * (one / divisor) if scheme.inverse else a / divisor
        if scheme.scale == "power_of_two":
            s = powers(scheme, a, s)
        elif scheme.scale == "two_level":
            assert total is not None
            whole = global_scale(scheme, total)
            s = whole * (rounded(s) if scheme.scale_arithmetic == "bfloat16" else s)
            s = np.clip(s, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            stored = np.where(s == 0, np.float32(scheme.zero), s)
            return _f32(stored), _f32(stored / whole), whole
        else:
            s = np.maximum(s, np.float32(scheme.least)) if scheme.least else s
            s = rounded(s) if scheme.scale_arithmetic == "bfloat16" else s
            s = np.where(s == 0, np.float32(scheme.zero), s)
        used = rounded(s) if scheme.arithmetic == "bfloat16" else s
        return _f32(s), (one / used if scheme.apply == "reciprocal" else used), whole


def powers(scheme: Scheme, a: Floats, s: Floats) -> Floats:
    """Powers of two for absmax `a` and absmax / divisor `s`. 2^-127, a denormal, is the least: the exponent 0 of e8m0."""
    if scheme.power == "ceil":
        bits = np.ascontiguousarray(s).view(np.uint32)
        exponent = (bits >> np.uint32(23)).astype(np.int32) + ((bits & np.uint32(0x7FFFFF)) != 0)
    else:
        bits = np.ascontiguousarray(a).view(np.uint32) + np.uint32(0x200000 if scheme.power == "round" else 0)
        exponent = (bits >> np.uint32(23)).astype(np.int32) - EXPONENT[scheme.kind]
    exponent = np.clip(exponent, 0, 254).astype(np.uint32)
    return np.where(exponent == 0, np.uint32(0x400000), exponent << np.uint32(23)).astype(np.uint32).view(np.float32)


def global_scale(scheme: Scheme, total: Floats) -> Floats:
    """The float32 [1] by which NVFP4 multiplies block scales before they are rounded to e4m3: 448 * 6 / total."""
    with np.errstate(all="ignore"):
        tiny = np.float32(2.0**-126)  # the least normal number of float32 and of bfloat16
        step = rounded if scheme.scale_arithmetic == "bfloat16" else _f32
        g = step(_f32(step(_f32(np.float32(1) / np.maximum(total.reshape(1), tiny))) * np.float32(448 * scheme.divisor)))
    return np.where(np.isfinite(g), g, np.float32(1))


def store_scales(scheme: Scheme, s: Floats, out: Any) -> None:
    """Scales in the dtype of their part into bytes, in order."""
    dtype = scheme.part("scales").dtype
    if dtype in ("uint8", "float8_e8m0fnu"):
        # 2^-127 has exponent field 0, as e8m0 has it
        np.copyto(out.reshape(s.shape), (s.view(np.uint32) >> np.uint32(23)).astype(np.uint8))
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(out.view(_NUMPY[dtype]).reshape(s.shape), s, casting="unsafe")


@lru_cache(maxsize=16)
def encode_table(kind: str, low: float, high: float, negative_zero: bool) -> NDArray[np.uint8]:
    """Upper 16 bits of a float32, the last one sticky -> code of the value clamped to [low, high]."""
    values = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    plain = np.nan_to_num(values, nan=0.0, posinf=high, neginf=low).astype(np.float64)
    return codes_of(kind, plain, (low, high), negative_zero)


def _amax_of(scheme: Scheme, job: Job, w: Floats, starts: NDArray[np.int64], bits: Words) -> Words:
    """absmax of a band by groups [group rows, group columns], as the bits of float32, which order as their values do."""
    magnitude = np.bitwise_and(w.view(np.uint32), np.uint32(0x7FFFFFFF), out=bits)
    if scheme.groups(job.shape)[0] != 1:
        magnitude = magnitude.max(axis=0, keepdims=True)
    return np.maximum.reduceat(magnitude, starts, axis=1)


def _scanned(scheme: Scheme, job: Job, space: Workspace) -> Scan:
    grid = scheme.part("scales").touched(job.origin, job.size, job.shape)[1]
    amax = np.zeros(grid, np.uint32)
    starts, nonfinite = column_groups(scheme, job), 0
    for low, high, g, end in bands(scheme, job):
        cut = slice((high - low) * job.size[1])
        shape = (high - low, job.size[1])
        w = load(scheme, job.view[low:high], job.source_dtype, space.w[cut].reshape(shape))
        band = _amax_of(scheme, job, w, starts, space.bits[cut].reshape(shape))
        if int(band.max()) >= _INFINITE:
            nonfinite += int((space.bits[cut] >= _INFINITE).sum())
        np.maximum(amax[g:end], band, out=amax[g:end])
    return Scan(amax.view(np.float32), nonfinite)


class HostPrepared:
    """See weight_sync.quant.kernel.Prepared."""

    def __init__(self, scheme: Scheme, jobs: Sequence[Job], stats: bool) -> None:
        self.scheme, self.jobs, self.wanted = scheme, list(jobs), stats
        self._space = Workspace(band_elements(scheme, jobs))
        self._table = encode_table(scheme.kind, *scheme.bounds, scheme.negative_zero)
        self._decode = decode_table(scheme.kind)
        self._stats = Stats()
        self._outgrown = 0

    def stats(self) -> Stats:
        return self._stats

    def outgrown(self) -> int:
        return self._outgrown

    def run(self) -> None:
        total, self._outgrown = Stats(), 0
        for job in self.jobs:
            total = total.merged(self._job(job))
        self._stats = total

    def _job(self, job: Job) -> Stats:
        scheme = self.scheme
        grid = scheme.part("scales").touched(job.origin, job.size, job.shape)[1]
        whole_first = job.amax is None and (
            _band_shape(scheme, job)[0] < min(job.size[0], scheme.groups(job.shape)[0])
            or (scheme.scale == "two_level" and job.total is None)
        )
        scanned = _scanned(scheme, job, self._space) if whole_first else None
        amax = scanned.amax if scanned is not None else job.amax
        total = job.total
        if scheme.scale == "two_level" and total is None:
            assert amax is not None
            total = amax.max(keepdims=True).reshape(1)
        starts = column_groups(scheme, job)
        stats = Stats(elements=job.size[0] * job.size[1])
        found = np.zeros(grid, np.float32)
        for low, high, g, end in bands(scheme, job):
            known = None if amax is None else amax[g:end]
            stats = stats.merged(self._band(job, low, high, starts, known, total, found[g:end]))
        self._finish(job, found, total)
        return stats.merged(Stats(zero_blocks=int((found == 0).sum())))

    def _band(
        self, job: Job, low: int, high: int, starts: NDArray[np.int64], known: Floats | None, total: Any, found: Floats
    ) -> Stats:
        scheme, space = self.scheme, self._space
        shape = (high - low, job.size[1])
        cut = slice(shape[0] * shape[1])
        w, y = space.w[cut].reshape(shape), space.y[cut].reshape(shape)
        bits, index, codes = space.bits[cut].reshape(shape), space.index[cut].reshape(shape), space.codes[cut].reshape(shape)
        load(scheme, job.view[low:high], job.source_dtype, w)
        own = _amax_of(scheme, job, w, starts, bits)
        nonfinite = int((bits >= _INFINITE).sum()) if int(own.max()) >= _INFINITE else 0
        amax = own.view(np.float32) if known is None else known
        if known is not None and "values" in job.outs:
            limit = known.view(np.uint32)
            self._outgrown += int(((own > limit) & (limit < _INFINITE)).sum())
        found[...] = amax
        scales, used, _ = scales_of(scheme, amax, total)
        wide = (lambda x: x) if scales.shape[1] == 1 else lambda x: np.repeat(x, np.diff([*starts, shape[1]]), axis=1)
        with np.errstate(all="ignore"):
            (np.divide if scheme.apply == "divide" else np.multiply)(w, wide(used), out=y)
        word = y.view(np.uint32)
        if scheme.arithmetic == "bfloat16":
            with np.errstate(all="ignore"):
                np.copyto(index.view(ml_dtypes.bfloat16), y, casting="unsafe")
            np.left_shift(index, 16, out=word, dtype=np.uint32)
        else:
            np.right_shift(word, 16, out=bits)
            index[...] = bits
            np.bitwise_and(word, np.uint32(0xFFFF), out=bits)
            index |= bits != 0
        np.take(self._table, index, out=codes, mode="clip")
        self._store(job, low, high, codes)
        if not self.wanted:
            return Stats(nonfinite=nonfinite)
        lowest, highest = scheme.bounds
        beyond = KINDS[scheme.kind][2]
        saturated = int((y > highest + beyond).sum()) + int((y < lowest - beyond).sum())
        np.take(self._decode, codes, out=y, mode="clip")
        with np.errstate(all="ignore"):
            y *= wide(scales if scheme.scale != "two_level" else used)
            y -= w
            np.abs(y, out=y)
            worst = y.max(axis=0, keepdims=True) if len(scales) == 1 else y
            error = np.maximum.reduceat(worst, starts, axis=1) / np.where(amax > 0, amax, np.float32(1))
        finite = error[np.isfinite(error)]
        return Stats(float(finite.max(initial=0.0)), saturated, 0, nonfinite)

    def _store(self, job: Job, low: int, high: int, codes: NDArray[np.uint8]) -> None:
        out = job.outs.get("values")
        if out is None:
            return
        if self.scheme.kind == "fp8":
            np.copyto(out.reshape(job.size)[low:high], codes)
        else:  # nibbles, the first one lowest: eight in a little-endian int32 are four bytes of two
            rows = out.reshape(job.size[0], job.size[1] // 2)[low:high]
            np.left_shift(codes[:, 1::2], 4, out=rows)
            rows |= codes[:, 0::2]

    def _finish(self, job: Job, amax: Floats, total: Any) -> None:
        """The scales, once for the job, and the constants."""
        scales, _, whole = scales_of(self.scheme, amax, total)
        if (out := job.outs.get("scales")) is not None:
            store_scales(self.scheme, scales, out)
        if (out := job.outs.get("global")) is not None:
            np.copyto(out.view(np.float32), whole)
        if (out := job.outs.get("shape")) is not None:
            np.copyto(out.view(self.scheme.part("shape").dtype), np.asarray(job.shape))
