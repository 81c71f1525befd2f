"""Weights quantised by the libraries that make checkpoints, and by us: the same bytes. And torch's kernels against numpy's.

compressed-tensors quantises with its own functions for scales, rounding and packing; transformers' FP8 quantiser, SGLang's
copy of DeepGEMM's block cast and of its packing are called as they are. What miles and slime compute in CUDA or Triton is
written here in torch, step by step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "quant"))
from quant_support import KINDS, NAMES, quantised, shipped, weights

from weight_sync.quant.packed import pack_ue8m0, packed_shape, unpack_ue8m0
from weight_sync.quant.published import from_hf
from weight_sync.quant.scheme import Scheme

SHAPES = [(8, 64), (130, 256), (257, 384)]


def tensor(values: np.ndarray[Any, Any]) -> torch.Tensor:
    if values.itemsize == 4:
        return torch.from_numpy(values.copy())
    return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)


def raw(t: torch.Tensor) -> np.ndarray[Any, Any]:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy()


def assert_same(scheme: Scheme, ours: dict[str, np.ndarray[Any, Any]], theirs: dict[str, torch.Tensor]) -> None:
    for name, want in theirs.items():
        part = scheme.part(name)
        assert str(want.dtype) == f"torch.{part.dtype}", name
        different = int((ours[name] != raw(want)).sum())
        assert different == 0, f"{scheme.name}: {different} of {len(ours[name])} bytes of {name} differ"


MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
NV = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
CT = {
    "fp8_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8_tensor_ct": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8_block_ct": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}),
    "mxfp8_ct": ("mxfp8-quantized", {"num_bits": 8, "type": "float", **MX}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", **MX}),
    "int4_group": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", **NV}),
}  # fmt: skip


def compressed(name: str, w: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts that compressed-tensors makes of a weight, observed as llm-compressor's minmax observer does."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    format_, fields = CT[name]
    args = QuantizationArgs(symmetric=True, dynamic=False, **fields)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    rows, cols = w.shape
    if args.strategy == "block":
        padded = torch.nn.functional.pad(w, (0, -cols % 128, 0, -rows % 128))
        view = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
        low, high = view.amin(dim=(1, 3)), view.amax(dim=(1, 3))
    elif args.strategy == "tensor":
        low, high = torch.aminmax(w)
    elif args.strategy == "channel":
        low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    else:
        view = w.unflatten(1, (-1, args.group_size))
        low, high = view.amin(2), view.amax(2)
    state = {"weight": w}
    global_scale = None
    if args.strategy == "tensor_group":
        global_scale = state["weight_global_scale"] = generate_gparam(w.min(), w.max())
    scale, zero = calculate_qparams(low, high, args, global_scale=global_scale)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    made = BaseCompressor.get_value_from_registry(format_).compress(state, scheme)
    packed = made.get("weight_packed", made.get("weight"))
    parts = {"values": packed, "scales": made["weight_scale"]}
    if global_scale is not None:
        parts["global"] = made["weight_global_scale"]
    if "weight_shape" in made:
        parts["shape"] = made["weight_shape"]
    return parts


@pytest.mark.parametrize("name", CT)
def test_a_checkpoint_by_compressed_tensors_has_our_bytes(name: str) -> None:
    scheme = shipped(name)
    for kind in KINDS:
        for shape in SHAPES:
            w = weights(kind, shape, 7)
            ours, _ = quantised(scheme, w)
            assert_same(scheme, ours, compressed(name, tensor(w)))


@pytest.mark.parametrize("name", CT)
def test_the_config_that_compressed_tensors_writes_gives_the_scheme(name: str) -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from quant_support import load

    format_, fields = CT[name]
    args = QuantizationArgs(symmetric=True, dynamic=False, **fields)
    group = QuantizationScheme(targets=["Linear"], weights=args, format=format_)
    config = QuantizationConfig(
        config_groups={"group_0": group}, format=format_, ignore=["lm_head"], quantization_status="compressed"
    )
    scheme, excludes = from_hf(config.to_dict(), load)
    assert scheme == shipped(name)
    assert excludes.excluded("lm_head")
    assert excludes.quantises("model.layers.0.self_attn.q_proj.weight", (8, 64))


def test_dequantising_gives_what_compressed_tensors_reads_back() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    from weight_sync.quant.reference import dequantised

    for name in ("fp8_channel", "int4_group"):
        w = weights("normal", (64, 128), 3)
        parts = compressed(name, tensor(w))
        format_, fields = CT[name]
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(symmetric=True, dynamic=False, **fields))
        names = {
            "values": "weight_packed" if name == "int4_group" else "weight",
            "scales": "weight_scale",
            "shape": "weight_shape",
        }
        state = {names[key]: value for key, value in parts.items()}
        theirs = BaseCompressor.get_value_from_registry(format_).decompress(state, scheme)["weight"]
        ours = dequantised(shipped(name), {k: raw(v) for k, v in parts.items()}, (0, 0), (64, 128), (64, 128))
        assert torch.equal(theirs, torch.from_numpy(ours).to(torch.bfloat16))


def test_fp8_blocks_by_transformers_have_our_bytes() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = SimpleNamespace(weight_block_size=[64, 128], scale_fmt=None)
    scheme = shipped("fp8_block", group=[64, 128], apply="multiply", floor=0.0, zero=1.0)
    for kind in KINDS:
        w = weights(kind, (128, 384), 5)
        made = Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("a.weight", tensor(w))
        ours, _ = quantised(scheme, w)
        assert_same(scheme, ours, {"values": made["a.weight"], "scales": made["a.weight_scale_inv"]})


def test_power_of_two_blocks_by_sglang_have_our_bytes() -> None:
    from sglang.srt.layers.quantization.fp8_utils import quant_weight_ue8m0

    scheme = shipped("fp8_block_ue8m0")
    for kind in KINDS:
        for shape in SHAPES:
            w = weights(kind, shape, 9)
            values, scales = quant_weight_ue8m0(tensor(w), [128, 128])
            ours, _ = quantised(scheme, w)
            assert_same(scheme, ours, {"values": values, "scales": scales})


def test_packed_ue8m0_scales_are_what_sglang_keeps_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """deep_gemm has no CPU build; SGLang's torch implementation needs two of its functions for sizes, given here."""
    package, utils, layout = ModuleType("deep_gemm"), ModuleType("deep_gemm.utils"), ModuleType("deep_gemm.utils.layout")
    utils.align = lambda x, y: -(-x // y) * y
    utils.get_tma_aligned_size = lambda x, itemsize: -(-x // (16 // itemsize)) * (16 // itemsize)
    utils.layout, package.utils = layout, utils
    for module in (package, utils, layout):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    from sglang.srt.layers.quantization.fp8_utils import transform_scale_ue8m0

    for rows, cols in [(256, 8), (130, 5), (1, 1), (640, 3)]:
        exponents = torch.randint(1, 255, (-(-rows // 128), cols), generator=torch.Generator().manual_seed(rows))
        scales = (exponents.to(torch.int32) << 23).view(torch.float32)
        live = transform_scale_ue8m0(scales, mn=rows, use_torch_impl=True)
        ours = pack_ue8m0(scales.numpy(), rows, 128)
        shape, stride = packed_shape(rows, cols)
        assert (tuple(live.shape), live.stride()) == (shape, stride)
        assert np.array_equal(np.lib.stride_tricks.as_strided(ours, shape, tuple(4 * s for s in stride)), live.numpy())
        assert np.array_equal(unpack_ue8m0(ours, rows, cols, 128), scales.numpy())


def test_what_miles_and_slime_compute_is_what_we_send() -> None:
    for kind in KINDS:
        w = weights(kind, (256, 384), 11)
        t = tensor(w)
        view = t.float().view(2, 128, 3, 128)
        amax = view.abs().amax(dim=(1, 3)).clamp(min=1e-10)
        scale = amax / torch.tensor(448.0)
        cast = (view * (1.0 / scale)[:, None, :, None]).clamp(-448, 448).view(256, 384).to(torch.float8_e4m3fn)
        scheme = shipped("fp8_block")
        assert_same(scheme, quantised(scheme, w)[0], {"values": cast, "scales": scale})

        one = t.abs().max().clamp(min=1e-12).to(torch.float32) / 448.0
        # On CUDA, where miles runs, torch rounds the scalar tensor to the matrix's dtype first; on the CPU it does not.
        cast = (t / one.to(torch.bfloat16)).clamp(min=-448.0, max=448.0).to(torch.float8_e4m3fn)
        scheme = shipped("fp8_tensor")
        assert_same(scheme, quantised(scheme, w)[0], {"values": cast, "scales": one.view(1)})

        groups = t.float().view(256, 12, 32)
        scale = (groups.abs().amax(2) * (torch.tensor(1.0) / 7.0)).clamp(min=1e-5)
        codes = torch.round(groups / scale[..., None]).to(torch.int32).view(256, -1, 8) + 8
        packed = (codes << (4 * torch.arange(8))).sum(2).to(torch.int64)
        packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
        scheme = shipped("int4_group_qat")
        ours = quantised(scheme, w)[0]
        assert_same(scheme, ours, {"values": packed, "scales": scale.to(torch.bfloat16)})


def test_torch_on_the_host_gives_the_bytes_and_the_report_of_numpy() -> None:
    for name in NAMES:
        for i, kind in enumerate(KINDS):
            for dtype in ("bfloat16", "float32"):
                w = weights(kind, [(130, 96), (257, 160), (16, 32)][i % 3], i, dtype)
                ours, report = quantised(shipped(name), w, "torch")
                numpy, other = quantised(shipped(name), w)
                for part in numpy:
                    assert np.array_equal(ours[part], numpy[part]), (name, kind, dtype, part)
                assert report.max_relative_error == pytest.approx(other.max_relative_error, abs=1e-6)
                assert report.to_json() | {"max_relative_error": 0} == other.to_json() | {"max_relative_error": 0}
