"""Quantisation kernels on a GPU against a plain copy of as many bytes, in one run.

    python benchmarks/quant_kernels.py [--layers 24] [--rounds 7] [--schemes fp8_block ...] [--sweep]

Needs one CUDA device, torch and triton. Weights of Qwen3-30B-A3B's experts in bf16 (gate and up [768, 2048], down [2048,
768], 128 experts, 48 layers), every tensor a job: thousands of jobs, one launch. For each scheme: seconds of one run (median,
CUDA events), bytes read and written per second, that as a share of a device copy's rate in the same run and of the data sheet's
4.8 TB/s, with and without the report of the error. --sweep: other tile sizes and warps. Prints one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from importlib import resources
from typing import Any

import torch
import yaml

from weight_sync.quant import triton_launch
from weight_sync.quant.kernel import Job, kernel_for
from weight_sync.quant.scheme import Scheme, load_scheme

EXPERTS = 128
SHAPES = ((768, 2048), (768, 2048), (2048, 768))
PEAK = 4.8e12  # bytes/s, NVIDIA H200 data sheet
DEFAULT = ["fp8_block", "fp8_block_ue8m0", "fp8_channel", "fp8_tensor", "mxfp8", "mxfp4", "int4_group", "nvfp4"]


def shipped(name: str) -> Scheme:
    folder = resources.files("weight_sync_conf").joinpath("weight_sync", "quant")
    return load_scheme(name, lambda item: yaml.safe_load(folder.joinpath(f"{item}.yaml").read_text()))


def seconds(run: Callable[[], Any], rounds: int) -> float:
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


class Weights:
    """The experts of some layers as views of one buffer, and a staging buffer that every scheme writes into."""

    def __init__(self, layers: int) -> None:
        self.shapes = [shape for _ in range(layers * EXPERTS) for shape in SHAPES]
        self.elements = sum(rows * cols for rows, cols in self.shapes)
        values = torch.empty(self.elements, dtype=torch.bfloat16, device="cuda")
        for part in values.split(1 << 28):
            part.normal_(std=0.02)
        self.words = values.view(torch.int16)
        self.stage = torch.empty(2 * self.elements, dtype=torch.uint8, device="cuda")

    def jobs(self, scheme: Scheme) -> tuple[list[Job], int]:
        """A job for each tensor, and the bytes that they write."""
        jobs, first, at = [], 0, 0
        for shape in self.shapes:
            view = self.words[first : first + shape[0] * shape[1]].view(shape)
            first += shape[0] * shape[1]
            outs = {}
            for part in scheme.parts:
                n = part.nbytes((0, 0), shape, shape)
                outs[part.name] = self.stage[at : at + n]
                at += -(-n // 16) * 16
            jobs.append(Job(view, "bfloat16", (0, 0), shape, outs))
        return jobs, at


def measured(weights: Weights, scheme: Scheme, rounds: int, copy: float) -> dict[str, Any]:
    jobs, written = weights.jobs(scheme)
    total = 2 * weights.elements + written
    row: dict[str, Any] = {"scheme": scheme.name, "jobs": len(jobs), "bytes": total}
    for report in (False, True):
        prepared = kernel_for(scheme, "cuda").prepare(jobs, stats=report)
        took = seconds(prepared.run, rounds)
        key = "report" if report else "plain"
        row[key] = {"seconds": took, "rate": total / took, "of_copy": total / took / copy, "of_peak": total / took / PEAK}
        if report:
            row["stats"] = prepared.stats().to_json()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--schemes", nargs="+", default=DEFAULT)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    weights = Weights(args.layers)
    source, target = weights.words.view(torch.uint8), weights.stage
    copy = 2 * len(source) / seconds(lambda: target[: len(source)].copy_(source), args.rounds)
    print(f"{torch.cuda.get_device_name()}: copy of {len(source) / 1e9:.2f} GB: {copy / 1e12:.2f} TB/s read and written")
    rows = []
    for name in args.schemes:
        row = measured(weights, shipped(name), args.rounds, copy)
        rows.append(row)
        for key in ("plain", "report"):
            r = row[key]
            print(
                f"{name:16} {key:7} {r['seconds'] * 1e3:8.2f} ms {r['rate'] / 1e12:6.2f} TB/s {r['of_copy']:6.2f} of the copy "
                f"{r['of_peak']:6.2f} of the peak  {row['jobs']} jobs",
                flush=True,
            )
    if args.sweep:
        for name in args.schemes:
            scheme = shipped(name)
            jobs, written = weights.jobs(scheme)
            for tile in (1 << 12, 1 << 13, 1 << 14):
                for warps in (4, 8, 16):
                    triton_launch.TILE, triton_launch.ROWS_TILE = (1 << 14) if scheme.group[0] > 1 else tile, tile
                    triton_launch.MOST_WARPS = warps
                    if scheme.group[0] > 1 and tile < 1 << 14:
                        continue
                    took = seconds(kernel_for(scheme, "cuda").prepare(jobs, stats=False).run, 3)
                    share = (2 * weights.elements + written) / took / copy
                    print(f"sweep {name:16} tile {tile} warps {warps}: {share:.2f} of the copy", flush=True)
    print(json.dumps({"copy": copy, "rows": rows}))


if __name__ == "__main__":
    main()
