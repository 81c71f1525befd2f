"""Scheme files, the geometry of parts, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from quant_support import NAMES, load, shipped

from weight_sync.errors import ConfigError, PlanError
from weight_sync.quant.packed import pack_ue8m0, packed_shape, unpack_ue8m0
from weight_sync.quant.scheme import Part, Scheme, load_scheme, scheme_from


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_scheme_is_named_like_its_file_and_survives_json(name: str) -> None:
    scheme = shipped(name)
    assert scheme.name == name
    adapter = TypeAdapter(Scheme)
    assert adapter.validate_json(adapter.dump_json(scheme)) == scheme


def test_a_weight_becomes_the_tensors_that_checkpoints_hold() -> None:
    name, shape = "model.layers.0.mlp.up_proj.weight", (300, 512)
    base = name.removesuffix(".weight")
    made = {
        scheme: {part.hf_name(name): (part.shape(shape), part.dtype) for part in shipped(scheme).parts}
        for scheme in ("fp8_block", "fp8_channel", "fp8_tensor", "mxfp8", "mxfp4", "int4_group", "nvfp4")
    }
    e4m3 = "float8_e4m3fn"
    assert made == {
        "fp8_block": {name: (shape, e4m3), f"{base}.weight_scale_inv": ((3, 4), "float32")},
        "fp8_channel": {name: (shape, e4m3), f"{base}.weight_scale": ((300, 1), "bfloat16")},
        "fp8_tensor": {name: (shape, e4m3), f"{base}.weight_scale": ((1,), "float32")},
        "mxfp8": {name: (shape, e4m3), f"{base}.weight_scale_inv": ((300, 16), "uint8")},
        "mxfp4": {f"{base}.weight_packed": ((300, 256), "uint8"), f"{base}.weight_scale": ((300, 16), "uint8")},
        "int4_group": {
            f"{base}.weight_packed": ((300, 64), "int32"),
            f"{base}.weight_scale": ((300, 16), "bfloat16"),
            f"{base}.weight_shape": ((2,), "int64"),
        },
        "nvfp4": {
            f"{base}.weight_packed": ((300, 256), "uint8"),
            f"{base}.weight_scale": ((300, 32), e4m3),
            f"{base}.weight_global_scale": ((1,), "float32"),
        },
    }
    with pytest.raises(ConfigError, match="does not end with"):
        shipped("fp8_block").parts[0].hf_name("model.norm.bias")


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9), st.integers(0, 9), st.data())
@settings(max_examples=60, deadline=None)
def test_the_elements_that_a_region_touches_are_those_whose_blocks_it_meets(
    rows: int, cols: int, high: int, wide: int, data: st.DataObject
) -> None:
    part = Part("scales", ".weight", ".scale", "float32", (high, wide))
    r = data.draw(st.integers(0, rows - 1))
    c = data.draw(st.integers(0, cols - 1))
    h = data.draw(st.integers(1, rows - r))
    w = data.draw(st.integers(1, cols - c))
    (first_row, first_col), (count_rows, count_cols) = part.touched((r, c), (h, w), (rows, cols))
    met = {(i // (high or rows), j // (wide or cols)) for i in range(r, r + h) for j in range(c, c + w)}
    listed = {(i, j) for i in range(first_row, first_row + count_rows) for j in range(first_col, first_col + count_cols)}
    assert listed == met
    assert part.nbytes((r, c), (h, w), (rows, cols)) == 4 * len(met)
    assert part.grid((rows, cols)) == part.touched((0, 0), (rows, cols), (rows, cols))[1]


@pytest.mark.parametrize(
    ("over", "text"),
    [
        ({"group": [1, 30]}, "multiple of 8, packed together"),
        ({"kind": "int5"}, "kind"),
        ({"scale": "power_of_two"}, "power is for scale"),
        ({"apply": "multiply", "scale": "two_level"}, "apply: multiply needs scale: real"),
        ({"divisor": 0.0}, "divisor 0.0"),
        ({"zero": 0.0}, "zero 0.0"),
        ({"limits": [-9.0, 7.0]}, "must lie within"),
        ({"colour": "red"}, "colour"),
        (
            {"parts": {"values": {"suffix": ".weight", "becomes": ".w", "dtype": "int32", "block": [1, 8]}}},
            "needs scales, values",
        ),
    ],
)
def test_a_scheme_that_cannot_be_is_refused_with_what_is_wrong(over: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=f"scheme int4_group: .*{text}"):
        load_scheme("int4_group", load, over)


def test_shapes_that_a_scheme_cannot_take_are_named() -> None:
    assert shipped("fp8_block").problem((130, 70)) is None
    assert "32 divides" in str(shipped("mxfp8").problem((4, 40)))
    assert "quantises matrices" in str(shipped("fp8_block").problem((2, 3, 4)))
    with pytest.raises(ConfigError, match="parts must be a mapping"):
        scheme_from({"name": "x", "parts": []})


def test_a_part_is_held_in_another_dtype_only_where_nothing_is_lost() -> None:
    assert shipped("fp8_channel").stored_as("scales", "float32").part("scales").dtype == "float32"
    assert shipped("mxfp8").stored_as("scales", "float8_e8m0fnu").part("scales").dtype == "float8_e8m0fnu"
    for name, part, dtype in [
        ("fp8_block", "scales", "bfloat16"),
        ("nvfp4", "scales", "float32"),
        ("mxfp4", "values", "int32"),
    ]:
        with pytest.raises((ConfigError, ValueError)):
            shipped(name).stored_as(part, dtype)


@given(st.integers(1, 300), st.integers(1, 9), st.sampled_from([1, 32, 128]), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_packed_scales_come_back_and_lie_as_their_strides_say(rows: int, cols: int, block: int, seed: int) -> None:
    exponents = np.random.default_rng(seed).integers(1, 255, (-(-rows // block), cols)).astype(np.uint32)
    scales = (exponents << np.uint32(23)).view(np.float32)
    live = pack_ue8m0(scales, rows, block)
    assert np.array_equal(unpack_ue8m0(live, rows, cols, block), scales)
    shape, stride = packed_shape(rows, cols)
    assert stride[1] % 4 == 0, "columns begin on 16 bytes"
    strided = np.lib.stride_tricks.as_strided(live, shape, tuple(4 * s for s in stride))
    for row, col in {(0, 0), (rows - 1, cols - 1), (rows // 2, cols // 2)}:
        assert (int(strided[row, col // 4]) >> (8 * (col % 4))) & 255 == exponents[row // block, col]


def test_scales_that_packing_would_change_are_refused() -> None:
    with pytest.raises(PlanError, match="no positive powers of two"):
        pack_ue8m0(np.full((1, 4), 3.0, np.float32), 4, 128)
    with pytest.raises(PlanError, match="2 rows of scales for 4 rows"):
        pack_ue8m0(np.ones((2, 4), np.float32), 4, 128)
    live = pack_ue8m0(np.ones((1, 4), np.float32), 4, 128)
    live[1] ^= 1
    with pytest.raises(PlanError, match="differ within a block"):
        unpack_ue8m0(live, 4, 4, 128)
