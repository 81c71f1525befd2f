"""Quantisation with torch operations: on the host where torch is there, and on any GPU where Triton is not.

The same bands and the same arithmetic as weight_sync.quant.host, so the same bits. Divisions are by tensors: torch on CUDA
turns a division by a Python number into a multiplication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports] - imported only where there is torch

from weight_sync.errors import PlanError
from weight_sync.quant.host import BAND, bands
from weight_sync.quant.kernel import Job, Prepared, Scan, ScanEach, Stats, check, check_view
from weight_sync.quant.scheme import EXPONENT, KINDS, Scheme

_INFINITE = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_BETWEEN: tuple[tuple[float, bool], ...] = (
    (0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False),
)  # fmt: skip
"""Middles of neighbouring e2m1 values, and whether the middle itself goes up (to the even code)."""


class TorchKernel:
    """See weight_sync.quant.kernel.Kernel."""

    def __init__(self, scheme: Scheme, device: str) -> None:
        self.scheme, self.device = scheme, device

    def prepare(self, jobs: Sequence[Job], stats: bool = True) -> TorchPrepared:
        check(self.scheme, jobs)
        return TorchPrepared(self.scheme, jobs, stats)

    def prepare_scan(self, jobs: Sequence[Job], kept: Sequence[bool]) -> ScanEach:
        return ScanEach(self, jobs, kept)

    def fetch(self, made: Sequence[Prepared]) -> None:
        return

    def scan(self, jobs: Sequence[Job]) -> list[Scan]:
        found = []
        for job in jobs:
            if text := check_view(job):
                raise PlanError(f"{job.label or 'a job'}: {text}")
            found.append(_scanned(self.scheme, job, _words(job.view)))
        return [Scan(amax.cpu().numpy(), int(nonfinite)) for amax, nonfinite in found]


def _words(view: Any) -> Any:
    """A job's words, or bytes of ours, as a tensor over the same memory."""
    if not isinstance(view, np.ndarray):
        return view
    return torch.from_numpy(view.view({1: np.uint8, 2: np.int16, 4: np.int32}[view.itemsize]))


def _floats(array: Any) -> Any:
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def _load(scheme: Scheme, words: Any, source: str) -> Any:
    if source == "bfloat16":
        return words.view(torch.bfloat16).to(torch.float32)
    values = words.view(torch.float32)
    return _rounded(values) if scheme.weight == "bfloat16" else values


def _rounded(x: Any) -> Any:
    return x.to(torch.bfloat16).to(torch.float32)


def _number(value: float, like: Any) -> Any:
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _grouped(scheme: Scheme, job: Job, x: Any) -> tuple[Any, int, int]:
    """(x [rows, columns] with its columns filled up with zeros to whole groups, columns in front, columns of a group)."""
    size = scheme.groups(job.shape)[1]
    front = job.origin[1] % size
    if front + job.size[1] <= size:
        return x, 0, job.size[1]  # one group
    back = -(front + job.size[1]) % size
    return (torch.nn.functional.pad(x, (front, back)) if front or back else x), front, size


def _amax_of(scheme: Scheme, job: Job, magnitude: Any) -> Any:
    """Largest bits of each group of a band [group rows, group columns]."""
    if scheme.groups(job.shape)[0] != 1:
        magnitude = magnitude.amax(0, keepdim=True)
    padded, _, size = _grouped(scheme, job, magnitude)
    return padded.view(len(padded), -1, size).amax(2)


def _spread(scheme: Scheme, job: Job, groups: Any) -> Any:
    """Values of a band's groups, to be broadcast with its elements."""
    if groups.shape[1] == 1:
        return groups
    size = scheme.groups(job.shape)[1]
    front = job.origin[1] % size
    return groups.repeat_interleave(size, 1)[:, front : front + job.size[1]]


def _scanned(scheme: Scheme, job: Job, words: Any) -> tuple[Any, Any]:
    grid = scheme.part("scales").touched(job.origin, job.size, job.shape)[1]
    amax = torch.zeros(grid, dtype=torch.int32, device=words.device)
    nonfinite = torch.zeros((), dtype=torch.int64, device=words.device)
    for low, high, g, end in bands(scheme, job):
        magnitude = _load(scheme, words[low:high], job.source_dtype).contiguous().view(torch.int32) & _MAGNITUDE
        nonfinite += (magnitude >= _INFINITE).sum()
        amax[g:end] = torch.maximum(amax[g:end], _amax_of(scheme, job, magnitude))
    return amax.view(torch.float32), nonfinite


def scales_of(scheme: Scheme, amax: Any, total: Any | None) -> tuple[Any, Any, Any]:
    """As weight_sync.quant.host.scales_of."""
    one, divisor = _number(1, amax), _number(scheme.divisor, amax)
    a = torch.maximum(amax, _number(scheme.floor, amax)) if scheme.floor else amax
    whole = one.view(1)
    if scheme.apply == "multiply":
        factor = torch.where(a > 0, (one / a) * divisor, one / _number(scheme.zero, amax))
        return one / factor, factor, whole
    s = a * (one / divisor) if scheme.inverse else a / divisor
    if scheme.scale == "power_of_two":
        s = _powers(scheme, a, s)
    elif scheme.scale == "two_level":
        assert total is not None
        bfloat16 = scheme.scale_arithmetic == "bfloat16"
        g = one / torch.maximum(total.view(1), _number(2.0**-126, amax))
        g = (_rounded(g) if bfloat16 else g) * _number(448 * scheme.divisor, amax)
        g = _rounded(g) if bfloat16 else g
        whole = torch.where(torch.isfinite(g), g, one)
        s = whole * (_rounded(s) if scheme.scale_arithmetic == "bfloat16" else s)
        s = s.clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32)
        stored = torch.where(s == 0, _number(scheme.zero, amax), s)
        return stored, stored / whole, whole
    else:
        s = torch.maximum(s, _number(scheme.least, amax)) if scheme.least else s
        s = _rounded(s) if scheme.scale_arithmetic == "bfloat16" else s
        s = torch.where(s == 0, _number(scheme.zero, amax), s)
    used = _rounded(s) if scheme.arithmetic == "bfloat16" else s
    return s, (one / used if scheme.apply == "reciprocal" else used), whole


def _powers(scheme: Scheme, a: Any, s: Any) -> Any:
    if scheme.power == "ceil":
        bits = s.contiguous().view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    else:
        bits = a.contiguous().view(torch.int32) + (0x200000 if scheme.power == "round" else 0)
        exponent = (bits >> 23) - EXPONENT[scheme.kind]
    exponent = exponent.clamp(0, 254)
    return torch.where(exponent == 0, 0x400000, exponent << 23).to(torch.int32).view(torch.float32)


def _codes(scheme: Scheme, y: Any) -> tuple[Any, Any]:
    """(codes uint8, the values they stand for)."""
    low, high = scheme.bounds
    if scheme.kind == "fp8":
        y = y if scheme.negative_zero else torch.where(y == 0, 0.0, y)
        codes = y.clamp(low, high).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), codes.to(torch.float32)
    if scheme.kind == "int4":
        values = torch.round(torch.nan_to_num(y, nan=0.0).clamp(low, high))
        return (values + 8).to(torch.uint8), values
    size = torch.nan_to_num(y, nan=0.0).abs()
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for middle, up in _BETWEEN:
        codes += size >= middle if up else size > middle
    half = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.float32, device=y.device) / 2
    values = half[codes.to(torch.int64)].copysign(y)
    return codes | ((y < 0).to(torch.uint8) << 3), values


class TorchPrepared:
    """See weight_sync.quant.kernel.Prepared. Memory of a band is taken from torch's allocator, which keeps it between runs."""

    def __init__(self, scheme: Scheme, jobs: Sequence[Job], stats: bool) -> None:
        self.scheme, self.jobs, self.wanted = scheme, list(jobs), stats
        self._outs = [{name: _words(out) for name, out in job.outs.items()} for job in jobs]
        self._words = [_words(job.view) for job in jobs]
        # (error, saturated, zero blocks, nonfinite) of each job that ran, left on the device until somebody asks
        self._found: list[tuple[Any, Any, Any, Any]] = []
        self._outgrown: list[Any] = []

    def outgrown(self) -> int:
        return sum(int(n) for n in self._outgrown)

    def run(self) -> None:
        self._outgrown = []
        self._found = [self._job(job, words, outs) for job, words, outs in zip(self.jobs, self._words, self._outs, strict=True)]

    def stats(self) -> Stats:
        total = Stats()
        for job, (error, *counts) in zip(self.jobs, self._found, strict=False):
            total = total.merged(Stats(float(error), *(int(n) for n in counts), elements=job.size[0] * job.size[1]))
        return total

    def _job(self, job: Job, words: Any, outs: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
        scheme = self.scheme
        grid = scheme.part("scales").touched(job.origin, job.size, job.shape)[1]
        amax, total = _floats(job.amax), _floats(job.total)
        split = scheme.groups(job.shape)[0] * job.size[1] > 8 * BAND  # several bands share a row of groups
        if amax is None and (split or (scheme.scale == "two_level" and total is None)):
            amax = _scanned(scheme, job, words)[0]
            if scheme.scale == "two_level" and total is None:
                total = amax.max().view(1)
        if scheme.scale == "two_level" and total is None:
            total = _floats(job.amax).max().view(1)
        used_amax = torch.zeros(grid, dtype=torch.float32, device=words.device)
        error = torch.zeros((), dtype=torch.float32, device=words.device)
        counts = torch.zeros(2, dtype=torch.int64, device=words.device)  # saturated, nonfinite
        for low, high, g, end in bands(scheme, job):
            w = _load(scheme, words[low:high], job.source_dtype).contiguous()
            magnitude = w.view(torch.int32) & _MAGNITUDE
            counts[1] += (magnitude >= _INFINITE).sum()
            own = _amax_of(scheme, job, magnitude)
            band = own.view(torch.float32) if amax is None else amax[g:end]
            if amax is not None and "values" in outs:
                limit = band.contiguous().view(torch.int32)
                self._outgrown.append(((own > limit) & (limit < _INFINITE)).sum())
            used_amax[g:end] = band
            scales, used, _ = scales_of(scheme, band, total)
            wide = _spread(scheme, job, used)
            y = w / wide if scheme.apply == "divide" else w * wide
            y = _rounded(y) if scheme.arithmetic == "bfloat16" else y
            codes, values = _codes(scheme, y)
            self._store(job, outs.get("values"), low, high, codes)
            if self.wanted:
                lowest, highest = scheme.bounds
                beyond = KINDS[scheme.kind][2]
                counts[0] += ((y > highest + beyond) | (y < lowest - beyond)).sum()
                values = values * _spread(scheme, job, used if scheme.scale == "two_level" else scales)
                relative = (values - w).abs() / _spread(scheme, job, torch.where(band > 0, band, 1.0))
                error = torch.maximum(error, torch.nan_to_num(relative, nan=0.0, posinf=0.0).max())
        self._finish(job, outs, used_amax, total)
        return error, counts[0], (used_amax == 0).sum(), counts[1]

    def _store(self, job: Job, out: Any, low: int, high: int, codes: Any) -> None:
        if out is None:
            return
        if self.scheme.kind == "fp8":
            out.view(job.size)[low:high] = codes
        else:
            out.view(job.size[0], job.size[1] // 2)[low:high] = codes[:, 0::2] | (codes[:, 1::2] << 4)

    def _finish(self, job: Job, outs: dict[str, Any], amax: Any, total: Any) -> None:
        scales, _, whole = scales_of(self.scheme, amax, total)
        if (out := outs.get("scales")) is not None:
            dtype = self.scheme.part("scales").dtype
            if dtype in ("uint8", "float8_e8m0fnu"):
                out.view(scales.shape).copy_(scales.view(torch.int32) >> 23)
            else:
                out.view(getattr(torch, dtype)).view(scales.shape).copy_(scales)
        if (out := outs.get("global")) is not None:
            out.view(torch.float32).copy_(whole)
        if (out := outs.get("shape")) is not None:
            out.view(getattr(torch, self.scheme.part("shape").dtype)).copy_(torch.tensor(job.shape))
