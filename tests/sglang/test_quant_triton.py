"""The Triton kernels of quantisation, interpreted on the CPU: the bytes that numpy makes, in one launch for many jobs.

In a process of its own, for TRITON_INTERPRET must stand before triton is imported (see also interpreted.py). On a GPU the same
is compared by tests/gpu/test_gpu_quant.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import interpreted, numpy as np, torch
from quant_support import empty_parts, quantised, shipped, weights, words
from weight_sync.quant.kernel import Job
from weight_sync.quant.torch_ops import TorchKernel
from weight_sync.quant.triton_launch import TritonKernel

interpreted.rounding()
torch.set_num_threads(1)

def tensor(values):
    return torch.from_numpy(words(values).view({2: np.int16, 4: np.int32}[values.itemsize]))

def job(scheme, values, view, origin, shape, **known):
    size = tuple(view.shape)
    outs = {name: torch.from_numpy(out) for name, out in empty_parts(scheme, origin, size, shape).items()}
    return Job(view, "float32" if values.itemsize == 4 else "bfloat16", origin, shape, outs, **known)

CASES = [("wide", (130, 128), "bfloat16"), ("denormal", (33, 96), "float32"), ("zeros", (20, 160), "bfloat16")]
for name in ("fp8_block", "fp8_block_ue8m0", "fp8_channel", "fp8_tensor", "mxfp8", "int4_group", "nvfp4"):
    scheme = shipped(name)
    jobs, wanted, reports = [], [], []
    for i, (kind, shape, dtype) in enumerate(CASES):
        values = weights(kind, shape, i, dtype)
        want, report = quantised(scheme, values)
        jobs.append(job(scheme, values, tensor(values), (0, 0), shape))
        wanted.append(want)
        reports.append(report)
    prepared = TritonKernel(scheme).prepare(jobs)
    prepared.run()
    for made, want in zip(jobs, wanted):
        for part, out in made.outs.items():
            assert np.array_equal(out.numpy(), want[part]), (name, made.shape, part)
    found = prepared.stats()
    for key in ("saturated", "zero_blocks", "nonfinite", "elements"):
        assert getattr(found, key) == sum(getattr(r, key) for r in reports), (name, key)
    assert abs(found.max_relative_error - max(r.max_relative_error for r in reports)) < 1e-5

    # cut across groups, of a transposed weight, absmax given
    shape = (50, 96)
    whole = weights("wide", shape, 3)
    whole[40, 90] = 0
    want, _ = quantised(scheme, whole)
    whole[40, 90] = np.nan
    view = tensor(np.ascontiguousarray(whole.T)).T
    cuts = [(0, 0, 20, 40), (0, 40, 20, 56), (20, 0, 30, 96)]
    regions = [job(scheme, whole, view[r:r+h, c:c+w], (r, c), shape) for r, c, h, w in cuts]
    assert [scan.nonfinite for scan in TritonKernel(scheme).scan(regions)] == [0, 0, 1]
    view[40, 90] = 0
    amax = np.zeros(scheme.part("scales").grid(shape), np.float32)
    for region, scan in zip(regions, TritonKernel(scheme).scan(regions)):
        (r, c), (h, w) = scheme.part("scales").touched(region.origin, region.size, shape)
        np.maximum(amax[r:r+h, c:c+w], scan.amax, out=amax[r:r+h, c:c+w])
    for region in regions:
        (r, c), (h, w) = scheme.part("scales").touched(region.origin, region.size, shape)
        region.amax, region.total = torch.from_numpy(amax[r:r+h, c:c+w].copy()), torch.tensor([amax.max()])
    prepared = TritonKernel(scheme).prepare(regions, stats=False)
    prepared.run()
    assert prepared.outgrown() == 0, name
    for part in ("values", "scales"):
        rows, cols = scheme.part(part).grid(shape)
        all_of = want[part].reshape(rows, cols, -1)
        for region in regions:
            (r, c), (h, w) = scheme.part(part).touched(region.origin, region.size, shape)
            assert np.array_equal(region.outs[part].numpy().reshape(h, w, -1), all_of[r:r+h, c:c+w]), (name, part)
    view[3, 50] = 0x7F00  # 2^127, larger than all that absmax was found of
    for kernel in (TritonKernel(scheme), TorchKernel(scheme, "cpu")):
        prepared = kernel.prepare(regions, stats=False)
        prepared.run()
        assert prepared.outgrown() == 1, (name, kernel)
print("ok")
"""


def test_quantisation_by_triton_is_that_of_numpy() -> None:
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parent / "quant")))
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "ok"
