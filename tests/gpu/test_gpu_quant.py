"""Quantisation kernels on a GPU: the bytes that numpy makes on the host. Needs CUDA, torch and triton: run by hand, not in CI.

python -m pytest tests/gpu/test_gpu_quant.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tests/gpu needs torch with CUDA")
if not torch.cuda.is_available():
    pytest.skip("tests/gpu needs a CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "quant"))
from quant_support import KINDS, NAMES, empty_parts, job_of, quantised, shipped, weights, words  # noqa: E402

from weight_sync.quant.host import HostKernel  # noqa: E402
from weight_sync.quant.kernel import Job, kernel_for  # noqa: E402
from weight_sync.quant.scheme import Pair, Scheme  # noqa: E402

SHAPES = [(256, 512), (130, 96), (257, 160), (16, 32), (40, 2048), (3, 4096), (768, 768)]


def on_gpu(values: np.ndarray[Any, Any]) -> Any:
    """The words of numpy values as a CUDA tensor."""
    return torch.from_numpy(words(values).view({2: np.int16, 4: np.int32}[values.itemsize]).copy()).cuda()


def gpu_job(scheme: Scheme, values: Any, view: Any, origin: Pair, shape: Pair, **known: Any) -> Job:
    size = (int(view.shape[0]), int(view.shape[1]))
    dtype = "float32" if values.itemsize == 4 else "bfloat16"
    outs = {name: torch.from_numpy(out).cuda() for name, out in empty_parts(scheme, origin, size, shape).items()}
    return Job(view, dtype, origin, shape, outs, **known)


def assert_same(job: Job, want: dict[str, np.ndarray[Any, Any]], what: object) -> None:
    for name, out in job.outs.items():
        different = int((out.cpu().numpy() != want[name]).sum())
        assert different == 0, f"{what}: {different} of {len(want[name])} bytes of {name} differ"


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_many_weights_in_one_launch_have_the_bytes_and_the_report_of_the_host(name: str, backend: str) -> None:
    scheme = shipped(name)
    jobs, wanted, reports = [], [], []
    shapes = SHAPES if backend == "triton" else SHAPES[:3]
    for i, kind in enumerate(KINDS):
        for shape in shapes:
            values = weights(kind, shape, i, "float32" if i % 3 == 2 else "bfloat16")
            want, report = quantised(scheme, values)
            wanted.append(want)
            reports.append(report)
            jobs.append(gpu_job(scheme, values, on_gpu(values), (0, 0), shape))
    prepared = kernel_for(scheme, "cuda", backend).prepare(jobs)
    for _ in range(2):  # what a first run left behind must not matter
        prepared.run()
        for job, want in zip(jobs, wanted, strict=True):
            assert_same(job, want, (name, job.source_dtype, job.shape))
        found = prepared.stats()
        assert found.saturated == sum(r.saturated for r in reports)
        assert found.zero_blocks == sum(r.zero_blocks for r in reports)
        assert found.elements == sum(r.elements for r in reports)
        assert found.max_relative_error == pytest.approx(max(r.max_relative_error for r in reports), abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_cut_across_its_groups_and_strided_joins_up_when_absmax_is_given(name: str) -> None:
    scheme, shape = shipped(name), (300, 416)
    whole = weights("wide", shape, 3)
    want, _ = quantised(scheme, whole)
    wide = np.zeros((shape[0], 2 * shape[1]), whole.dtype)
    wide[:, : shape[1]] = whole
    there = on_gpu(wide)[:, : shape[1]]
    transposed = on_gpu(np.ascontiguousarray(whole.T)).T
    packed, kernel = scheme.packed, kernel_for(scheme, "cuda")
    cuts = [(0, 0, 100, 200), (0, 200, 100, 216), (100, 0, 200, 416)]
    regions = [
        gpu_job(scheme, whole, v[r : r + h, c : c + w], (r, c), shape) for v in (there, transposed) for r, c, h, w in cuts
    ]
    grid = scheme.part("scales").grid(shape)
    amax = np.zeros(grid, np.float32)
    for job, scan in zip(regions, kernel.scan(regions), strict=True):
        (r, c), (h, w) = scheme.part("scales").touched(job.origin, job.size, shape)
        at = amax[r : r + h, c : c + w]
        np.maximum(at, scan.amax, out=at)
        host = HostKernel(scheme).scan(
            [job_of(scheme, whole[job.origin[0] :, job.origin[1] :][: job.size[0], : job.size[1]], job.origin, shape)]
        )[0]
        assert np.array_equal(host.amax, scan.amax)
        assert scan.nonfinite == 0
    for job in regions:
        (r, c), (h, w) = scheme.part("scales").touched(job.origin, job.size, shape)
        job.amax = torch.from_numpy(amax[r : r + h, c : c + w].copy()).cuda()
        job.total = torch.tensor([amax.max()], device="cuda")
    kernel.prepare(regions).run()
    values = want["values"].reshape(shape[0], -1)
    scales = want["scales"].reshape(*grid, -1)
    unit = values.shape[1] * packed // shape[1]
    for job in regions:
        (r, c), (h, w) = job.origin, job.size
        got = job.outs["values"].cpu().numpy().reshape(h, -1)
        assert np.array_equal(got, values[r : r + h, c * unit // packed : (c + w) * unit // packed])
        (r, c), (h, w) = scheme.part("scales").touched(job.origin, job.size, shape)
        assert np.array_equal(job.outs["scales"].cpu().numpy().reshape(h, w, -1), scales[r : r + h, c : c + w])


def test_nan_and_infinities_are_counted_on_the_gpu() -> None:
    for name in ("fp8_block", "int4_group", "fp8_tensor"):
        scheme = shipped(name)
        values = weights("normal", (130, 256), 1)
        values[0, 0], values[129, 255], values[5, 7] = np.nan, np.inf, -np.inf
        job = gpu_job(scheme, values, on_gpu(values), (0, 0), (130, 256))
        kernel = kernel_for(scheme, "cuda")
        assert kernel.scan([job])[0].nonfinite == 3
        prepared = kernel.prepare([job])
        prepared.run()
        assert prepared.stats().nonfinite == 3


def test_what_torch_computes_on_cuda_is_what_the_schemes_say() -> None:
    """Facts of torch that the schemes' files state: they hold on this GPU, or the files are wrong."""
    w = torch.from_numpy(weights("wide", (512, 512), 2).view(np.int16)).view(torch.bfloat16).cuda()
    one = w.abs().max().to(torch.float32) / 448.0
    # a matrix by a scalar tensor: the scalar is rounded to the matrix's dtype first
    assert torch.equal(w / one, (w.float() / one.to(torch.bfloat16).float()).to(torch.bfloat16))
    # a tensor by a number: a multiplication by its float32 reciprocal (`inverse`)
    a = w.abs().amax(1)
    seventh = torch.tensor(1.0, device="cuda") / 7.5
    assert torch.equal(a / 7.5, (a.float() * seventh).to(torch.bfloat16))
    # a number by a tensor: the reciprocal, times the number
    f = a.float()
    assert torch.equal(448.0 / f, torch.reciprocal(f) * 448.0)
