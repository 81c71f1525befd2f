"""The one interface of all quantisation kernels: what is given, what is written where, what is reported.

    prepared = kernel_for(scheme, "cuda").prepare(jobs)     once for a plan: tables, checks, memory
    prepared.run()                                          each sync: reads the live weights, fills the staging bytes
    prepared.stats()                                        of that run

A job is a region of one weight. A region may begin or end inside a group of the scheme only where the group's absmax over all
trainer ranks is given; `scan` is the pass that finds each rank's share of it, and counts NaN and infinities, before anything is
sent. Results are the same bits with every backend; a group that holds a NaN or an infinity has no defined result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import prod
from typing import Any, Protocol

import numpy as np

from weight_sync.errors import PlanError, listed
from weight_sync.ids import ITEMSIZE
from weight_sync.quant.scheme import Pair, Scheme

SOURCES = ("bfloat16", "float32")
BACKENDS = ("auto", "numpy", "torch", "triton")


@dataclass(slots=True)
class Job:
    """A region of a weight W to quantise.

    view: its live words [rows, cols], strided as it may be: numpy uint16 or uint32 on the host, torch int16 or int32 on a GPU,
        as Memory.view() returns them.
    origin: (row, column) in W of view[0, 0]. shape: of W.
    outs: part name -> bytes (uint8 host array or CUDA tensor) that the part's elements are written to, row-major over the
        elements whose blocks the region has a share in (Part.touched). A part that is left out is not written.
    amax: float32 [group rows, group columns] of the groups that the region has a share in, over all ranks; read by every run().
        None: computed here. total: float32 [1], absmax of W and what shares its global scale; read by every run().
    label: for errors.
    """

    view: Any
    source_dtype: str
    origin: Pair
    shape: Pair
    outs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    amax: Any | None = None
    total: Any | None = None
    label: str = ""

    @property
    def size(self) -> Pair:
        return (int(self.view.shape[0]), int(self.view.shape[1]))


@dataclass(frozen=True, slots=True)
class Scan:
    """absmax of a job's share of each group, float32 [group rows, group columns] in host memory, and its NaN and infinities."""

    amax: Any
    nonfinite: int


@dataclass(frozen=True, slots=True)
class Stats:
    """What quantising cost, over one run; a sum of several with merged().

    max_relative_error: largest |w - dequantised| as a share of its group's absmax. saturated: values further outside the format
    than rounding explains. zero_blocks: groups of zeros, counted by each job with a share in one.
    """

    max_relative_error: float = 0.0
    saturated: int = 0
    zero_blocks: int = 0
    nonfinite: int = 0
    elements: int = 0

    def merged(self, other: Stats) -> Stats:
        return Stats(
            max(self.max_relative_error, other.max_relative_error),
            self.saturated + other.saturated,
            self.zero_blocks + other.zero_blocks,
            self.nonfinite + other.nonfinite,
            self.elements + other.elements,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Stats:
        return cls(**{item.name: data[item.name] for item in fields(cls)})


class Prepared(Protocol):
    def run(self) -> None:
        """Quantise every job from its live words as they are now. On a GPU the work is queued on the current stream."""
        ...

    def stats(self) -> Stats:
        """Of the last run; waits for it. All zero before the first."""
        ...

    def outgrown(self) -> int:
        """Groups with an element larger than the absmax that was given for them, in jobs that make values; of the last run.

        Then weights changed after their absmax was found, and these values were cut off. Counted whether stats are wanted or
        not. Not counted where the absmax given is no number.
        """
        ...


class Kernel(Protocol):
    scheme: Scheme

    def prepare(self, jobs: Sequence[Job], stats: bool = True) -> Prepared:
        """Check jobs and take what memory run() needs. stats: False saves the second pass that the error costs.

        Raises PlanError for a job that the scheme cannot carry out.
        """
        ...

    def scan(self, jobs: Sequence[Job]) -> list[Scan]:
        """absmax and count of NaN and infinities of every job; reads view, source_dtype, origin and shape alone."""
        ...

    def prepare_scan(self, jobs: Sequence[Job], kept: Sequence[bool]) -> PreparedScan:
        """scan() for jobs that come again with every sync. kept: of which jobs the groups' absmax is wanted."""
        ...

    def fetch(self, made: Sequence[Prepared]) -> None:
        """Before stats() and outgrown() of many: bring what their last runs counted to the host at once, if it is elsewhere."""
        ...


class PreparedScan(Protocol):
    """What the last run() found, in host memory.

    amax: float32 of the kept jobs' groups, job after job, each in row-major order; at: where each kept job's begin, and where
    the last ones end. most, nonfinite [jobs]: absmax of a job, and its NaN and infinities.
    """

    amax: Any
    at: Any
    most: Any
    nonfinite: Any

    def run(self) -> None: ...


class ScanEach:
    """PreparedScan by scan() of one job after another."""

    def __init__(self, kernel: Kernel, jobs: Sequence[Job], kept: Sequence[bool]) -> None:
        self._kernel, self._jobs, self._kept = kernel, list(jobs), list(kept)
        parts = [kernel.scheme.part("scales").touched(job.origin, job.size, job.shape)[1] for job in jobs]
        sizes = [prod(part) for part, keep in zip(parts, kept, strict=True) if keep]
        self.at: Any = np.cumsum([0, *sizes])
        self.amax: Any = np.zeros(int(self.at[-1]), np.float32)
        self.most: Any = np.zeros(len(jobs), np.float32)
        self.nonfinite: Any = np.zeros(len(jobs), np.int64)

    def run(self) -> None:
        place = 0
        for i, (job, keep) in enumerate(zip(self._jobs, self._kept, strict=True)):
            (found,) = self._kernel.scan([job])
            self.most[i], self.nonfinite[i] = found.amax.max(initial=0), found.nonfinite
            if keep:
                self.amax[self.at[place] : self.at[place + 1]] = found.amax.reshape(-1)
                place += 1


def kernel_for(scheme: Scheme, device: str, backend: str = "auto") -> Kernel:
    """The kernel for live words on `device`: "cpu" or "cuda".

    backend: auto is numpy on the host (torch there took twice as long with one thread) and triton on a GPU; or one by name
    (numpy and torch on the host, torch and triton on a GPU). Raises PlanError for another.
    """
    legal = {"cpu": ("numpy", "torch"), "cuda": ("triton", "torch")}
    if device not in legal or backend not in ("auto", *legal[device]):
        raise PlanError(
            f"no quantisation kernel {backend} on device {device}; legal: cpu with numpy or torch, cuda with triton or torch"
        )
    if backend == "auto":
        backend = "triton" if device == "cuda" else "numpy"
    if backend == "numpy":
        from weight_sync.quant.host import HostKernel

        return HostKernel(scheme)
    if backend == "torch":
        from weight_sync.quant.torch_ops import TorchKernel

        return TorchKernel(scheme, device)
    from weight_sync.quant.triton_launch import TritonKernel

    return TritonKernel(scheme)


def check(scheme: Scheme, jobs: Sequence[Job]) -> None:
    """Raise PlanError for jobs that the scheme cannot carry out, naming the first few and what is wrong with each."""
    problems = [f"{job.label or f'job {i}'}: {text}" for i, job in enumerate(jobs) for text in [problem(scheme, job)] if text]
    if problems:
        raise PlanError(f"scheme {scheme.name}: {len(problems)} of {len(jobs)} jobs cannot be quantised: {listed(problems, 4)}")


def check_view(job: Job) -> str | None:
    """Why a job's region is no region of its weight, or None."""
    if job.source_dtype not in SOURCES:
        return f"source dtype {job.source_dtype}; legal: {', '.join(SOURCES)}"
    itemsize = getattr(job.view, "itemsize", 0)
    if len(job.view.shape) != 2 or itemsize != ITEMSIZE[job.source_dtype]:
        return f"a view of shape {list(job.view.shape)} and {itemsize}-byte words is no matrix of {job.source_dtype}"
    if min(job.size) < 1 or any(o < 0 or o + n > whole for o, n, whole in zip(job.origin, job.size, job.shape, strict=True)):
        return f"rows and columns {list(job.size)} from {list(job.origin)} leave W of shape {list(job.shape)}"
    return None


def problem(scheme: Scheme, job: Job) -> str | None:
    """Why a job cannot be carried out, or None."""
    if text := check_view(job) or scheme.problem(job.shape):
        return text
    if text := _straddles(scheme, job):
        return text
    for name, out in job.outs.items():
        part = scheme.part(name)
        if name == "values" and (job.origin[1] % part.block[1] or job.size[1] % part.block[1]):
            return f"columns {job.size[1]} from {job.origin[1]}: {part.block[1]} values are packed together"
        need = part.nbytes(job.origin, job.size, job.shape)
        if int(prod(out.shape)) != need or getattr(out, "itemsize", 0) != 1:
            return f"part {name} needs {need} bytes, got {int(prod(out.shape))} elements of {getattr(out, 'itemsize', 0)} bytes"
    return None


def _straddles(scheme: Scheme, job: Job) -> str | None:
    sizes = scheme.groups(job.shape)
    grid = scheme.part("scales").touched(job.origin, job.size, job.shape)[1]
    if job.amax is None:
        for axis, word in enumerate(("rows", "columns")):
            first, end = job.origin[axis], job.origin[axis] + job.size[axis]
            if first % sizes[axis] or (end % sizes[axis] and end != job.shape[axis]):
                what = f"{word} [{first}, {end}) of {job.shape[axis]}"
                return f"{what} cut a group of {sizes[axis]}, whose absmax must then be given"
    elif tuple(job.amax.shape) != grid:
        return f"absmax of {list(job.amax.shape)} groups given, the region has a share in {list(grid)}"
    if scheme.scale == "two_level" and job.total is None and job.size != tuple(job.shape):
        return "the absmax of the whole weight must be given for a region of it"
    return None
