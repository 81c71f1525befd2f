"""The kernel on the host against the float64 reference: every scheme, ragged shapes, cuts, strides, special values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_support import KINDS, NAMES, empty_parts, job_of, quantised, shipped, weights, words

from weight_sync.errors import PlanError
from weight_sync.quant.kernel import Job, Stats, kernel_for
from weight_sync.quant.reference import codes_of, decode_table, dequantised, reference, scale_values
from weight_sync.quant.scheme import Pair, Scheme

BLOCKS = {"fp8_block", "fp8_block_ue8m0", "fp8_block_ct"}
ROWS = {"mxfp8", "mxfp8_ct", "mxfp4", "int4_group", "int4_group_qat", "nvfp4"}

few = settings(max_examples=60, deadline=None)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Scheme, np.ndarray[Any, Any]]:
    """A scheme, with another group where that is legal, and a weight that it can quantise."""
    name = draw(st.sampled_from(NAMES))
    if name in BLOCKS:
        scheme = shipped(name, group=draw(st.sampled_from([[128, 128], [64, 128], [16, 32], [3, 5], [1, 7]])))
    elif name in ROWS:
        scheme = shipped(name, group=[1, draw(st.sampled_from([16, 32, 128, 48]))])
    else:
        scheme = shipped(name)
    rows = draw(st.integers(1, 140))
    unit = scheme.group[1] if scheme.group[0] == 1 and scheme.group[1] else 1
    cols = unit * draw(st.integers(1, max(1, 300 // unit)))
    kind, dtype = draw(st.sampled_from(KINDS)), draw(st.sampled_from(["bfloat16", "float32"]))
    return scheme, weights(kind, (rows, cols), draw(st.integers(0, 99)), dtype)


@given(cases())
@few
def test_a_weight_has_the_bytes_of_the_reference(case: tuple[Scheme, np.ndarray[Any, Any]]) -> None:
    scheme, values = case
    ours, report = quantised(scheme, values)
    for name, want in reference(scheme, values).items():
        assert np.array_equal(ours[name], want), (scheme.name, name)
    shape = (int(values.shape[0]), int(values.shape[1]))
    scales = scale_values(scheme, ours["scales"])
    assert np.isfinite(scales).all()
    assert (scales > 0).all(), "a scale of zero would make infinities of the next use"
    assert report.elements == values.size
    assert report.nonfinite == 0
    back = dequantised(scheme, ours, (0, 0), shape, shape)
    assert np.isfinite(back).all()


@given(cases(), st.data())
@few
def test_regions_cut_anywhere_join_up_to_the_whole_when_absmax_is_given(
    case: tuple[Scheme, np.ndarray[Any, Any]], data: st.DataObject
) -> None:
    scheme, values = case
    shape: Pair = (int(values.shape[0]), int(values.shape[1]))
    want = reference(scheme, values)
    packed = scheme.packed
    across = data.draw(st.integers(0, shape[0]), "row of the cut")
    down = packed * data.draw(st.integers(0, shape[1] // packed), "column of the cut")
    regions = [
        (r, c, h - r, w - c)
        for r, h in ((0, across), (across, shape[0]))
        for c, w in ((0, down), (down, shape[1]))
        if h > r and w > c
    ]
    if data.draw(st.booleans(), "strided"):
        wide = np.zeros((shape[0], 3, shape[1]), values.dtype)
        wide[:, 1] = values
        values = wide[:, 1]
    elif data.draw(st.booleans(), "transposed"):
        values = np.ascontiguousarray(values.T).T
    kernel = kernel_for(scheme, "cpu")
    jobs = [job_of(scheme, values[r : r + h, c : c + w], (r, c), shape) for r, c, h, w in regions]
    amax = np.zeros(scheme.part("scales").grid(shape), np.float32)
    touched = [scheme.part("scales").touched(job.origin, job.size, shape) for job in jobs]
    for scan, ((r, c), (h, w)) in zip(kernel.scan(jobs), touched, strict=True):
        at = amax[r : r + h, c : c + w]
        np.maximum(at, scan.amax, out=at)
    for job, ((r, c), (h, w)) in zip(jobs, touched, strict=True):
        job.amax, job.total = amax[r : r + h, c : c + w], amax.max(keepdims=True).reshape(1)
    prepared = kernel.prepare(jobs)
    prepared.run()
    for name in ("values", "scales"):
        part = scheme.part(name)
        joined = np.zeros((*part.grid(shape), len(want[name]) // int(np.prod(part.grid(shape)))), np.uint8)
        for job in jobs:
            (r, c), (h, w) = part.touched(job.origin, job.size, shape)
            joined[r : r + h, c : c + w] = np.asarray(job.outs[name]).reshape(h, w, -1)
        assert np.array_equal(joined.reshape(-1), want[name]), (scheme.name, name)
    assert prepared.stats().elements == values.size


def test_a_run_reads_the_weights_as_they_are_now_and_leaves_nothing_of_the_last() -> None:
    for name in NAMES:
        scheme = shipped(name)
        live = weights("normal", (40, 192), 1)
        job = job_of(scheme, live)
        prepared = kernel_for(scheme, "cpu").prepare([job])
        assert prepared.stats() == Stats()
        for seed in (2, 3):
            live[...] = weights("wide", (40, 192), seed)
            prepared.run()
            for part, want in reference(scheme, live).items():
                assert np.array_equal(job.outs[part], want), (name, part)


def test_a_tensor_larger_than_a_band_is_quantised_as_one() -> None:
    for name in ("fp8_tensor", "fp8_channel", "fp8_block", "nvfp4"):
        scheme = shipped(name)
        values = weights("wide", (700, 2080), 4)
        ours, _ = quantised(scheme, values)
        for part, want in reference(scheme, values).items():
            assert np.array_equal(ours[part], want), (name, part)


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinities_are_counted_before_anything_is_written(name: str) -> None:
    scheme = shipped(name)
    values = weights("normal", (33, 192), 6)
    values[0, 1], values[32, 191], values[5, 5] = np.nan, np.inf, -np.inf
    job = job_of(scheme, values)
    before = {part: out.copy() for part, out in job.outs.items()}
    kernel = kernel_for(scheme, "cpu")
    assert kernel.scan([job])[0].nonfinite == 3
    assert all(np.array_equal(job.outs[part], out) for part, out in before.items())
    prepared = kernel.prepare([job])
    prepared.run()
    assert prepared.stats().nonfinite == 3
    huge = np.full((1, 32 * 8), 3.4e38, np.float32)  # rounds to infinity in bfloat16
    assert kernel.scan([job_of(scheme, huge)])[0].nonfinite == (huge.size if scheme.weight == "bfloat16" else 0)


def test_the_report_says_what_quantising_cost() -> None:
    scheme = shipped("fp8_block", group=[2, 4])
    values = np.zeros((4, 8), np.float32)
    values[0, :4] = [448, 1, 17, -100]  # 17 lies between 16 and 18
    _, report = quantised(scheme, values)
    assert report.zero_blocks == 3
    assert report.max_relative_error == pytest.approx(max(1, 4) / 448)  # 100 lies between 96 and 104
    job = job_of(scheme, values, amax=np.full((2, 2), 44.8, np.float32))
    prepared = kernel_for(scheme, "cpu").prepare([job])
    prepared.run()
    assert prepared.stats().saturated == 2, "448 and -100 lie beyond a scale of 0.1"
    assert prepared.stats().zero_blocks == 0
    one, other = Stats(0.5, 1, 2, 3, 4), Stats(0.25, 10, 20, 30, 40)
    assert one.merged(other) == Stats(0.5, 11, 22, 33, 44)
    assert Stats.from_json(one.to_json()) == one


def test_jobs_that_cannot_be_carried_out_are_refused_by_name() -> None:
    block, packed, nvfp4 = shipped("fp8_block", group=[4, 4]), shipped("int4_group"), shipped("nvfp4")
    whole = weights("normal", (8, 64), 0)

    def refused(scheme: Scheme, text: str, view: np.ndarray[Any, Any], **fields: Any) -> None:
        job = Job(words(view), fields.pop("source_dtype", "bfloat16"), label="layer.weight", **fields)
        with pytest.raises(PlanError, match=r"1 of 1 jobs .*layer\.weight: .*" + text):
            kernel_for(scheme, "cpu").prepare([job])

    refused(block, "cut a group of 4", whole[:3], origin=(0, 0), shape=(8, 64))
    refused(block, "cut a group of 4", whole[:, 2:], origin=(0, 2), shape=(8, 64))
    refused(block, "leave W of shape", whole, origin=(4, 0), shape=(8, 64))
    refused(block, "absmax of", whole, origin=(0, 0), shape=(8, 64), amax=np.ones((1, 1), np.float32))
    refused(block, "part values needs 512 bytes", whole, origin=(0, 0), shape=(8, 64), outs={"values": np.zeros(9, np.uint8)})
    refused(block, "source dtype float16", whole, origin=(0, 0), shape=(8, 64), source_dtype="float16")
    refused(block, "no matrix of float32", whole, origin=(0, 0), shape=(8, 64), source_dtype="float32")
    refused(packed, "32 divides", weights("normal", (2, 40), 0), origin=(0, 0), shape=(2, 40))
    known = np.ones((8, 2), np.float32)
    outs = {"values": np.zeros(8 * 28, np.uint8)}
    refused(packed, "packed together", whole[:, 4:60], origin=(0, 4), shape=(8, 64), amax=known, outs=outs)
    refused(nvfp4, "whole weight must be given", whole[:4], origin=(0, 0), shape=(8, 64))
    with pytest.raises(PlanError, match="no quantisation kernel numpy on device cuda"):
        kernel_for(block, "cuda", "numpy")


@given(st.sampled_from(["fp8", "fp4", "int4"]), st.floats(-600, 600, width=32))
@few
def test_a_code_stands_for_the_nearest_value_of_its_format(kind: str, x: float) -> None:
    table = decode_table(kind)
    values = table[np.isfinite(table)]
    low, high = float(values.min()), float(values.max())
    code = int(codes_of(kind, np.asarray([x]), (low, high))[0])
    assert abs(float(table[code]) - min(max(x, low), high)) == np.abs(values - np.clip(x, low, high)).min()


def test_parts_that_are_left_out_are_not_written_and_others_are_the_same() -> None:
    scheme = shipped("int4_group")
    values = weights("normal", (8, 64), 2)
    want, _ = quantised(scheme, values)
    outs = empty_parts(scheme, (0, 0), (8, 64), (8, 64))
    job = Job(words(values), "bfloat16", (0, 0), (8, 64), {"scales": outs["scales"]})
    kernel_for(scheme, "cpu").prepare([job]).run()
    assert np.array_equal(outs["scales"], want["scales"])
    assert (outs["values"] == 0xA5).all()
