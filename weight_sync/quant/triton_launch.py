"""Jobs on a GPU as tables and launches of weight_sync.quant.triton_kernels: one launch for jobs of one kind, however many.

Jobs share a launch if their words, alignment and size of group call for the same compiled kernel; a plan's jobs nearly always
do. Where a group is larger than a tile, or a total is wanted that nobody gave, a launch that only looks comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports] - imported only where there is torch
import triton.language as tl  # pyright: ignore[reportMissingImports]
from numpy.typing import NDArray

from weight_sync.errors import PlanError
from weight_sync.quant import triton_kernels, triton_look
from weight_sync.quant.kernel import Job, Prepared, Scan, Stats, check, check_view
from weight_sync.quant.scheme import KINDS, Pair, Scheme

TILE = 1 << 14
"""Most elements of a tile: 64 KB of float32 in registers, so that two programs fit a multiprocessor."""
PART_TILE = 1 << 12
"""Most elements of a tile where it need not hold a whole group: when only looking, or when the group's absmax is known. More
programs fit a multiprocessor then, and one loads while another computes: benchmarks/gpu_notes.md."""
LOOK_LOOPS = 4
"""Tiles that a program looks at before it reduces any."""
ROWS_TILE = 1 << 13
"""Elements of a tile of many small groups."""
MOST_WARPS = 8

_COLUMN = {name: i for i, name in enumerate(triton_kernels.FIELDS)}


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the compiled kernel depends on, beside the scheme."""

    rows_kernel: bool
    tile: Pair
    group: int
    source: str
    contiguous: bool
    aligned: bool
    part: bool = False
    loops: int = 1

    @property
    def warps(self) -> int:
        """So many that a thread holds 32 to 64 elements."""
        elements = self.tile[0] * self.tile[1]
        return max(1, min(MOST_WARPS, elements // (2048 if self.rows_kernel or self.part else 1024)))


class TritonKernel:
    """See weight_sync.quant.kernel.Kernel."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def prepare(self, jobs: Sequence[Job], stats: bool = True) -> TritonPrepared:
        check(self.scheme, jobs)
        return TritonPrepared(self.scheme, jobs, stats)

    def prepare_scan(self, jobs: Sequence[Job], kept: Sequence[bool]) -> TritonScan:
        return TritonScan(self.scheme, jobs, kept)

    def fetch(self, made: Sequence[Prepared]) -> None:
        mine = [one for one in made if isinstance(one, TritonPrepared) and one.ran]
        if mine:
            for one, here in zip(mine, _added(torch.stack([one.counts for one in mine])), strict=True):
                one.here = here

    def scan(self, jobs: Sequence[Job]) -> list[Scan]:
        for job in jobs:
            if text := check_view(job):
                raise PlanError(f"{job.label or 'a job'}: {text}")
        if not jobs:
            return []
        device = jobs[0].view.device
        grids = [_grid(self.scheme, job) for job in jobs]
        ends = np.cumsum([rows * cols for rows, cols in grids])
        amax = torch.zeros(int(ends[-1]), dtype=torch.int32, device=device)
        nonfinite = torch.zeros(len(jobs), dtype=torch.int64, device=device)
        table = _table(self.scheme, jobs)
        table[:, _COLUMN["found"]] = amax.data_ptr() + 4 * (ends - [rows * cols for rows, cols in grids])
        table[:, _COLUMN["nonfinite"]] = nonfinite.data_ptr() + 8 * np.arange(len(jobs))
        table[:, _COLUMN["total"]] = 0
        for launch in _launches(self.scheme, jobs, table, look=True):
            launch(nonfinite)
        flat, counts = amax.view(torch.float32).cpu().numpy(), nonfinite.tolist()
        parts = np.split(flat, ends[:-1])
        return [Scan(part.reshape(grid), n) for part, grid, n in zip(parts, grids, counts, strict=True)]


class TritonScan:
    """See weight_sync.quant.kernel.PreparedScan: tables are made once, a run is a launch and three copies."""

    def __init__(self, scheme: Scheme, jobs: Sequence[Job], kept: Sequence[bool]) -> None:
        for job in jobs:
            if text := check_view(job):
                raise PlanError(f"{job.label or 'a job'}: {text}")
        grids = np.asarray([_grid(scheme, job) for job in jobs], np.int64).reshape(-1, 2)
        sizes = grids.prod(axis=1)[np.asarray(kept, np.bool_)]
        self.at: Any = np.append(0, np.cumsum(sizes))
        device = jobs[0].view.device if jobs else torch.device("cpu")
        # Pinned: millions of groups come to the host, and the session brings them back.
        sizes_ = (int(self.at[-1]), torch.int32), (len(jobs), torch.int32), (len(jobs), torch.int64)
        self._host = [torch.zeros(n, dtype=dtype, pin_memory=device.type == "cuda") for n, dtype in sizes_]
        self.amax: Any = self._host[0].view(torch.float32).numpy()
        self.most: Any = self._host[1].view(torch.float32).numpy()
        self.nonfinite: Any = self._host[2].numpy()
        self._jobs = list(jobs)  # keeps their memory alive
        self._launches: list[_Launch] = []
        if not jobs:
            return
        self._found = [torch.zeros_like(here, device=device) for here in self._host]
        amax, most, nonfinite = self._found
        table = _table(scheme, jobs)
        table[:, _COLUMN["found"]] = 0
        table[np.flatnonzero(kept), _COLUMN["found"]] = amax.data_ptr() + 4 * self.at[:-1]
        table[:, _COLUMN["nonfinite"]] = nonfinite.data_ptr() + 8 * np.arange(len(jobs))
        table[:, _COLUMN["total"]] = most.data_ptr() + 4 * np.arange(len(jobs))
        self._launches = _launches(scheme, jobs, table, look=True)
        for launch in self._launches:
            launch.compile(nonfinite)

    def run(self) -> None:
        if not self._launches:
            return
        for there in self._found:
            there.zero_()
        for launch in self._launches:
            launch(self._found[2])
        for here, there in zip(self._host, self._found, strict=True):
            here.copy_(there)


def _grid(scheme: Scheme, job: Job) -> Pair:
    return scheme.part("scales").touched(job.origin, job.size, job.shape)[1]


def _power(n: int) -> int:
    return 1 << max(0, (n - 1).bit_length())


def _kind(scheme: Scheme, job: Job, look: bool = False) -> _Kind:
    rows, cols = scheme.groups(job.shape)
    itemsize = job.view.element_size()
    strides = job.view.stride()
    contiguous = strides[1] == 1 or job.size[1] == 1
    values = job.outs.get("values")
    aligned = (
        contiguous
        and job.view.data_ptr() % 16 == 0
        and strides[0] * itemsize % 16 == 0
        and strides[0] % 8 == 0
        and job.size[1] % 16 == 0
        and job.origin[1] % 16 == 0
        and cols % 16 == 0
        and (values is None or values.data_ptr() % 16 == 0)
    )
    least = 1 if scheme.kind == "fp8" else 2  # two codes are packed into a byte
    if rows == 1 and cols == _power(cols) and least <= cols <= 256:
        width = max(cols, 512 if job.size[1] >= 256 else 128)  # two sizes only: each is compiled once
        return _Kind(True, (max(1, ROWS_TILE // width), width), cols, job.source_dtype, contiguous, aligned)
    part = look or job.amax is not None
    most = PART_TILE if part else TILE
    width = min(max(_power(cols), least), most)
    height = min(_power(rows), max(1, most // width))
    loops = min(LOOK_LOOPS, _power(-(-rows // height))) if look else 1
    return _Kind(False, (height, width), 1, job.source_dtype, contiguous, aligned, part, loops)


def _tiles(scheme: Scheme, job: Job, kind: _Kind) -> int:
    rows, cols = _grid(scheme, job)
    if kind.rows_kernel:
        return -(-job.size[0] // kind.tile[0]) * -(-cols // (kind.tile[1] // kind.group))
    sizes = scheme.groups(job.shape)
    return rows * cols * -(-sizes[0] // (kind.tile[0] * kind.loops)) * -(-sizes[1] // kind.tile[1])


def _split(scheme: Scheme, job: Job, kind: _Kind) -> bool:
    """Whether several tiles share a group."""
    sizes = scheme.groups(job.shape)
    return not kind.rows_kernel and (sizes[0] > kind.tile[0] or sizes[1] > kind.tile[1])


def _table(scheme: Scheme, jobs: Sequence[Job]) -> NDArray[np.int64]:
    table = np.zeros((len(jobs), len(triton_kernels.FIELDS)), np.int64)
    for at, job in zip(table, jobs, strict=True):
        outs = {name: out.data_ptr() for name, out in job.outs.items()}
        at[:] = (
            job.view.data_ptr(), *job.view.stride(), *job.size, *job.origin,
            *scheme.groups(job.shape), _grid(scheme, job)[1],
            outs.get("values", 0), outs.get("scales", 0), 0 if job.amax is None else job.amax.data_ptr(),
            0 if job.total is None else job.total.data_ptr(), outs.get("global", 0), outs.get("shape", 0), *job.shape, 0, 0,
        )  # fmt: skip
    return table


class _Launch:
    """One kernel over the tiles of some jobs."""

    def __init__(self, scheme: Scheme, kind: _Kind, table: Any, tiles: tuple[Any, Any], look: bool, report: bool) -> None:
        self._table, self._tiles = table, tiles
        rounds = kind.source == "float32" and scheme.weight == "bfloat16"
        self._constants: dict[str, Any] = {
            "FIELDS": len(triton_kernels.FIELDS), "SOURCE": getattr(tl, kind.source), "ROUND": rounds,
            "CONTIGUOUS": kind.contiguous, "ALIGNED": kind.aligned, "R": kind.tile[0], "C": kind.tile[1],
            "num_warps": kind.warps,
        }  # fmt: skip
        self._kernel: Any = triton_kernels.rows_kernel if kind.rows_kernel else triton_kernels.tile_kernel
        self._counts = True
        if look and not kind.rows_kernel:
            self._kernel, self._counts = triton_look.look_kernel, False
            self._constants |= {"LOOPS": kind.loops, "HALF": kind.source == "bfloat16"}
            return
        shape = [part.dtype for part in scheme.parts if part.name == "shape"]
        self._constants |= {
            "SLOTS": triton_kernels.SLOTS, "REPORT": report, "G": kind.group, "KIND": scheme.kind, "SCALE": scheme.scale,
            "POWER": scheme.power, "APPLY": scheme.apply, "ARITHMETIC": scheme.arithmetic,
            "SCALE_ARITHMETIC": scheme.scale_arithmetic, "INVERSE": scheme.inverse, "DIVISOR": scheme.divisor,
            "FLOOR": scheme.floor, "LEAST": scheme.least, "ZERO": scheme.zero, "LOW": scheme.bounds[0],
            "HIGH": scheme.bounds[1], "BEYOND": KINDS[scheme.kind][2], "NEGATIVE_ZERO": scheme.negative_zero,
            "PACKED": scheme.packed, "DTYPE": scheme.part("scales").dtype, "SHAPE": getattr(tl, shape[0]) if shape else None,
        }  # fmt: skip
        if kind.rows_kernel:
            self._constants["LOOK"] = look

    def compile(self, stats: Any) -> None:
        """Compile now, which takes seconds, and not while engines are paused."""
        if hasattr(self._kernel, "warmup"):  # Triton's interpreter compiles nothing
            with self._there():
                self._kernel.warmup(*self._arguments(stats), grid=(1,), **self._constants)

    def __call__(self, stats: Any) -> None:
        with self._there():
            self._kernel[(len(self._tiles[0]),)](*self._arguments(stats), **self._constants)

    def _arguments(self, stats: Any) -> tuple[Any, ...]:
        return self._table, *self._tiles, *((stats,) if self._counts else ())

    def _there(self) -> Any:
        """Triton launches on the thread's current device, whose stream orders nothing on the one that the tensors are on."""
        device = self._table.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _launches(scheme: Scheme, jobs: Sequence[Job], table: Any, look: bool, report: bool = False) -> list[_Launch]:
    """The launches over jobs, whose rows are in `table` (on the host; copied here)."""
    by_kind: dict[_Kind, list[int]] = {}
    for i, job in enumerate(jobs):
        by_kind.setdefault(_kind(scheme, job, look), []).append(i)
    device = jobs[0].view.device if jobs else None
    there = torch.from_numpy(table).to(device)
    launches = []
    for kind, members in by_kind.items():
        counts = np.asarray([_tiles(scheme, jobs[i], kind) for i in members], np.int64)
        job = np.repeat(np.asarray(members, np.int32), counts)
        at = np.arange(len(job)) - np.repeat(np.cumsum(counts) - counts, counts)
        tiles = (torch.from_numpy(job).to(device), torch.from_numpy(at.astype(np.int32)).to(device))
        launches.append(_Launch(scheme, kind, there, tiles, look, report))
    return launches


class TritonPrepared:
    """See weight_sync.quant.kernel.Prepared. Views, parts, amax and total must be on one device and stay where they are.

    counts: what the kernels count, on the device; here: the same in host memory, once it was brought. ran: there is something.
    """

    def __init__(self, scheme: Scheme, jobs: Sequence[Job], stats: bool) -> None:
        self.jobs = list(jobs)  # keeps their memory alive
        self._elements = sum(job.size[0] * job.size[1] for job in jobs)
        self._looks: list[_Launch] = []
        self._launches: list[_Launch] = []
        self.ran = False
        self.here: NDArray[np.int64] | None = None
        if not jobs:
            return
        device = jobs[0].view.device
        self.counts = torch.zeros((triton_kernels.SLOTS, triton_kernels.COUNTS), dtype=torch.int64, device=device)
        table = _table(scheme, jobs)
        look = self._looked(scheme, table, device)
        if look:
            self._looks = _launches(scheme, [jobs[i] for i in look], table[look], look=True)
        self._launches = _launches(scheme, jobs, table, look=False, report=stats)
        for launch in (*self._looks, *self._launches):
            launch.compile(self.counts)

    def _looked(self, scheme: Scheme, table: NDArray[np.int64], device: Any) -> list[int]:
        """Jobs whose absmax or total must be found first; the memory for it goes into the table."""
        look: list[int] = []
        words = 0
        for i, job in enumerate(self.jobs):
            rows, cols = _grid(scheme, job)
            split = job.amax is None and _split(scheme, job, _kind(scheme, job))
            total = scheme.scale == "two_level" and job.total is None
            if split or total:
                look.append(i)
                table[i, _COLUMN["found"]] = words if split else -1
                words += rows * cols if split else 0
                table[i, _COLUMN["total"]] = words if total else table[i, _COLUMN["total"]]
                words += int(total)
        self._found = torch.zeros(words, dtype=torch.int32, device=device)
        base = self._found.data_ptr()
        for i in look:
            found = int(table[i, _COLUMN["found"]])
            table[i, _COLUMN["found"]] = 0 if found < 0 else base + 4 * found
            if found >= 0:
                table[i, _COLUMN["amax"]] = base + 4 * found
            if scheme.scale == "two_level" and self.jobs[i].total is None:
                table[i, _COLUMN["total"]] = base + 4 * int(table[i, _COLUMN["total"]])
        return look

    def run(self) -> None:
        if not self._launches:
            return
        self.counts.zero_()
        self.here = None
        if self._looks:
            self._found.zero_()
        for launch in (*self._looks, *self._launches):
            launch(self.counts)
        self.ran = True

    def stats(self) -> Stats:
        if not self.ran:
            return Stats()
        error, saturated, zeros, nonfinite, _ = self._counted().tolist()
        error = float(np.asarray(error, np.int32).view(np.float32))
        return Stats(error, saturated, zeros, nonfinite, elements=self._elements)

    def outgrown(self) -> int:
        return int(self._counted()[4]) if self.ran else 0

    def _counted(self) -> NDArray[np.int64]:
        """The statistics of the last run, brought to the host once."""
        here = self.here
        if here is None:
            here = self.here = _added(self.counts[None])[0]
        return here


def _added(counts: torch.Tensor) -> NDArray[np.int64]:
    """What the slots [n, SLOTS, COUNTS] of n runs come to: the largest error, the sums of the others."""
    both = torch.cat([counts[:, :, :1].amax(1), counts[:, :, 1:].sum(1)], 1)
    return np.asarray(both.cpu().numpy(), np.int64)
