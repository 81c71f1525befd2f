"""What every kernel must give, bit for bit: the arithmetic of weight_sync.quant.scheme in float64, one rounding at a time.

Products and quotients of float32 numbers have, in float64, an error too small to change which float32 or bfloat16 they round
to, so a step is computed in float64 and then rounded. Slow and plain: for tests, and for looking at what was sent. Also the way
back (`dequantised`), and the codes of each format as values.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from weight_sync.quant.scheme import EXPONENT, Pair, Scheme

Doubles = NDArray[np.float64]

_STORED: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


@lru_cache(maxsize=4)
def decode_table(kind: str) -> NDArray[np.float32]:
    """Code -> value: 256 of fp8, 16 of fp4 and int4."""
    if kind == "fp8":
        return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if kind == "int4":
        return np.arange(-8, 8, dtype=np.float32)
    positive = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.concatenate([positive, -positive])


def codes_of(kind: str, scaled: Doubles, limits: tuple[float, float], negative_zero: bool = True) -> NDArray[np.uint8]:
    """The code of the nearest value of a format, of two equally near ones that with an even code, after clamping to `limits`.

    negative_zero: whether -0.0 keeps its sign in fp8, as what merely rounds to it does anyway.
    """
    y = np.clip(scaled, *limits)
    if kind == "int4":
        return (np.rint(y) + 8).astype(np.uint8)
    count = 127 if kind == "fp8" else 8  # e4m3fn's 127th code is NaN
    values = decode_table(kind)[:count].astype(np.float64)
    size = np.abs(y)
    above = np.clip(np.searchsorted(values, size), 1, count - 1)
    below = above - 1
    middle = (values[above] + values[below]) / 2
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    code = np.where(up, above, below)
    sign = np.signbit(y) if kind == "fp8" and negative_zero else y < 0
    return (code | np.where(sign, 128 if kind == "fp8" else 8, 0)).astype(np.uint8)


def f32(x: Any) -> Doubles:
    """Rounded to float32."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def bf16(x: Any) -> Doubles:
    """Rounded to float32 and then to bfloat16, as an operation of torch on bfloat16 does."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def spread(groups: NDArray[Any], origin: Pair, size: Pair, group: Pair) -> NDArray[Any]:
    """Values of groups at each element of a region."""
    rows = (origin[0] + np.arange(size[0])) // group[0] - origin[0] // group[0]
    cols = (origin[1] + np.arange(size[1])) // group[1] - origin[1] // group[1]
    return groups[rows[:, None], cols[None, :]]


def reference_amax(scheme: Scheme, w: Doubles, origin: Pair, shape: Pair) -> Doubles:
    """Absmax of a region's share of each group."""
    group = scheme.groups(shape)
    count = scheme.part("scales").touched(origin, (w.shape[0], w.shape[1]), shape)[1]
    amax = np.zeros(count)
    rows = (origin[0] + np.arange(w.shape[0])) // group[0] - origin[0] // group[0]
    cols = (origin[1] + np.arange(w.shape[1])) // group[1] - origin[1] // group[1]
    np.maximum.at(amax, (rows[:, None], cols[None, :]), np.abs(w))
    return amax


def weights(scheme: Scheme, values: NDArray[Any]) -> Doubles:
    """bfloat16 or float32 values as the scheme sees them."""
    w = np.asarray(values).astype(np.float64)
    return bf16(w) if scheme.weight == "bfloat16" else w


def reference(
    scheme: Scheme,
    values: NDArray[Any],
    origin: Pair = (0, 0),
    shape: Pair | None = None,
    amax: NDArray[Any] | None = None,
    total: float | None = None,
) -> dict[str, NDArray[np.uint8]]:
    """The bytes of every part of a region with these float values [rows, cols], row-major.

    shape: of the whole weight, the region's if None. amax, total: as in Job.
    """
    size = (int(values.shape[0]), int(values.shape[1]))
    shape = shape or size
    w = weights(scheme, values)
    group = scheme.groups(shape)
    a = reference_amax(scheme, w, origin, shape) if amax is None else np.asarray(amax, np.float64)
    scale, stored, whole = _scales(scheme, a, float(np.max(a)) if total is None else float(total))
    at = spread(scale, origin, size, group)
    if scheme.apply == "multiply":
        a = np.maximum(a, f32(scheme.floor))
        factor = np.where(a > 0, f32(f32(1 / np.where(a > 0, a, 1)) * scheme.divisor), f32(1 / f32(scheme.zero)))
        stored = f32(1 / factor)
        scaled = f32(w * spread(factor, origin, size, group))
    else:
        if scheme.arithmetic == "bfloat16":
            at = bf16(at)
        scaled = f32(w / at) if scheme.apply == "divide" else f32(w * f32(1 / at))
    if scheme.arithmetic == "bfloat16":
        scaled = bf16(scaled)
    codes = codes_of(scheme.kind, scaled, scheme.bounds, scheme.negative_zero)
    if scheme.kind != "fp8":
        codes = (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
    parts = {"values": codes.reshape(-1), "scales": _bytes(scheme.part("scales").dtype, stored)}
    if scheme.scale == "two_level":
        parts["global"] = np.asarray([whole], np.float32).view(np.uint8)
    if any(part.name == "shape" for part in scheme.parts):
        parts["shape"] = np.asarray(shape, scheme.part("shape").dtype).view(np.uint8)
    return parts


def _scales(scheme: Scheme, a: Doubles, total: float) -> tuple[Doubles, Doubles, float]:
    """(what w is divided by, what is stored, the global scale) for each group."""
    a = np.maximum(a, f32(scheme.floor))
    s = f32(a * f32(1 / scheme.divisor)) if scheme.inverse else f32(a / scheme.divisor)
    if scheme.scale == "power_of_two":
        with np.errstate(divide="ignore"):
            if scheme.power == "ceil":
                exponent = np.ceil(np.log2(s))
                exponent = np.where(
                    s > np.exp2(exponent), exponent + 1, np.where(s <= np.exp2(exponent - 1), exponent - 1, exponent)
                )
                exponent = np.where((s > 0) & (s < 2.0**-126), -126, exponent)  # a denormal has no exponent of its own
            else:
                exponent = np.frexp(a)[1] - 1.0
                if scheme.power == "round":
                    exponent += np.frexp(a)[0] * 2 >= 1.75
                    exponent = np.where(a < 2.0**-126, np.where(a >= 0.75 * 2.0**-126, -126.0, -127.0), exponent)
                exponent = np.where(a == 0, -127.0, np.maximum(exponent, -127.0)) - EXPONENT[scheme.kind]
        s = np.exp2(np.clip(exponent, -127, 127))
        return s, s, 1.0
    if scheme.scale == "two_level":
        step = bf16 if scheme.scale_arithmetic == "bfloat16" else f32
        whole = step(step(1 / np.maximum(total, 2.0**-126)) * 448 * scheme.divisor)
        whole = whole if np.isfinite(whole) else np.float64(1)
        s = f32(whole * (bf16(s) if scheme.scale_arithmetic == "bfloat16" else s))
        codes = codes_of("fp8", s, (-448.0, 448.0))
        stored = decode_table("fp8")[codes].astype(np.float64)
        stored = np.where(stored == 0, scheme.zero, stored)
        return f32(stored / whole), stored, float(whole)
    s = np.maximum(s, f32(scheme.least))
    s = bf16(s) if scheme.scale_arithmetic == "bfloat16" else s
    s = np.where(s == 0, f32(scheme.zero), s)
    return s, s, 1.0


def _bytes(dtype: str, values: Doubles) -> NDArray[np.uint8]:
    if dtype in ("uint8", "float8_e8m0fnu"):
        return (np.log2(values) + 127).astype(np.uint8).reshape(-1)
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(_STORED[dtype]).reshape(-1).view(np.uint8)


def scale_values(scheme: Scheme, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """A scales part's bytes as float32."""
    dtype = scheme.part("scales").dtype
    if dtype in ("uint8", "float8_e8m0fnu"):
        return np.exp2(raw.astype(np.float64) - 127).astype(np.float32)
    return raw.view(_STORED[dtype]).astype(np.float32)


def dequantised(
    scheme: Scheme, parts: Mapping[str, NDArray[np.uint8]], origin: Pair, size: Pair, shape: Pair
) -> NDArray[np.float32]:
    """The weights [rows, cols] that a region's parts stand for: values times scales, in float32."""
    raw = np.ascontiguousarray(parts["values"]).reshape(-1).view(np.uint8)
    codes = raw if scheme.kind == "fp8" else np.stack([raw & 15, raw >> 4], axis=1).reshape(-1)
    count = scheme.part("scales").touched(origin, size, shape)[1]
    scales = scale_values(scheme, np.ascontiguousarray(parts["scales"]).reshape(-1).view(np.uint8)).reshape(count)
    if scheme.scale == "two_level":
        scales = scales / np.ascontiguousarray(parts["global"]).reshape(-1).view(np.uint8).view(np.float32)[0]
    with np.errstate(over="ignore", invalid="ignore"):
        return decode_table(scheme.kind)[codes].reshape(size) * spread(scales, origin, size, scheme.groups(shape))
