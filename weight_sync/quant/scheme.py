"""Quantisation schemes: which tensors an HF weight becomes in an engine's checkpoint, and by which arithmetic. Pure.

An HF weight W [N, K] becomes several *parts*: values, scales, now and then a scale of the whole tensor and its shape. Each
element of a part stands for a block of W, so a part's geometry is W's divided by that block. A scheme is a YAML file in
conf/weight_sync/quant; nothing here reads a file. What the arithmetic of a file follows is said in the file.

The arithmetic, for a group of W with largest magnitude `absmax` (all in float32, each step rounded to nearest even):

    absmax   at least `floor`
    scale    `real`: absmax / divisor, at least `least`, rounded to `scale_arithmetic`; 0 becomes `zero`
             `power_of_two`: 2^e; e by `power`: `ceil` the least with 2^e >= absmax / divisor; `floor` the exponent of absmax
             less the exponent of the format's largest value (OCP MX); `round` the same after a quarter is added to the mantissa
             `two_level`: G = (1 / total) * (divisor * 448), each step rounded to `scale_arithmetic`, a part of its own; then
             e4m3(G * (absmax / divisor)), 0 becoming `zero`, and w is scaled by that / G
    scaled   `divide`: w / scale; `reciprocal`: w * (1 / scale); `multiply`: w * ((1 / absmax) * divisor), the scale being the
             reciprocal of that factor (torch computes number / tensor so). `arithmetic` bfloat16: scale and result are rounded
             to it, as torch does between tensors of that dtype
    value    scaled, clamped to `limits`, rounded to the format, ties to even; a scaled -0.0 keeps its sign in fp8 with
             `negative_zero` alone (compressed-tensors adds a zero point of 0, which takes it away)
    parts    the scale, or its exponent, rounded to the part's dtype, which does not touch `scaled`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, Literal, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from weight_sync.errors import ConfigError, listed
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.family import merged

Pair = tuple[int, int]
LoadYaml = Callable[[str], Mapping[str, Any]]

KINDS: dict[str, tuple[float, float, float]] = {
    "fp8": (-448.0, 448.0, 16.0),
    "fp4": (-6.0, 6.0, 1.0),
    "int4": (-8.0, 7.0, 0.5625),
}
"""Format of the values -> lowest and highest value, and how far beyond them a value may lie that is not saturated: e4m3fn, e2m1
(OCP), two's complement. It is what rounding takes back; for int4 also what dividing by bfloat16(absmax / 7.5) adds to 7.5."""

EXPONENT: dict[str, int] = {"fp8": 8, "fp4": 2}
"""Exponent of the largest value of a format: floor(log2(448)), floor(log2(6)) (OCP MX: emax of the element format)."""

PACKED: dict[str, dict[str, int]] = {
    "fp8": {"float8_e4m3fn": 1},
    "fp4": {"uint8": 2},
    "int4": {"int32": 8},
}
"""Format -> dtype of the values part -> values of one row in one element, the first in the lowest bits."""

SCALES: dict[str, tuple[str, ...]] = {
    "real": ("float32", "bfloat16"),
    "power_of_two": ("float32", "float8_e8m0fnu", "uint8"),
    "two_level": ("float8_e4m3fn",),
}
"""Scale rule -> dtypes that its scales part may have. uint8 and float8_e8m0fnu hold the biased exponent."""

_FROZEN = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, config=_FROZEN)
class Part:
    """One tensor that W becomes.

    name: values, scales, global (the scale of the whole tensor) or shape (the two sizes of W, a constant).
    suffix, becomes: W's HF name ends with `suffix`; with that replaced by `becomes` it is the part's name.
    block: of W, that one element stands for; 0 is the whole dim.
    dims: how many dims the checkpoint's tensor has: 2, 1 (trailing dim dropped: [N] or [1]) or 0 (a scalar).
    """

    name: Literal["values", "scales", "global", "shape"]
    suffix: str
    becomes: str
    dtype: str
    block: Pair = (1, 1)
    dims: Literal[0, 1, 2] = 2

    def hf_name(self, name: str) -> str:
        """The part's HF name. Raises ConfigError for a name that does not end as the scheme wants it."""
        if not name.endswith(self.suffix):
            raise ConfigError(f"{name} does not end with {self.suffix!r}, so it has no part {self.name}")
        return name[: len(name) - len(self.suffix)] + self.becomes

    def sizes(self, shape: Pair) -> Pair:
        """The block for a W of this shape: a dim of 0 is the whole dim."""
        return (self.block[0] or max(shape[0], 1), self.block[1] or max(shape[1], 1))

    def grid(self, shape: Pair) -> Pair:
        """Elements of the part as rows and columns; the last ones may stand for less than a block."""
        rows, cols = self.sizes(shape)
        return (-(-shape[0] // rows), -(-shape[1] // cols))

    def shape(self, shape: Pair) -> tuple[int, ...]:
        """Shape of the part's tensor in the checkpoint."""
        if self.name == "shape":
            return (2,)
        return self.grid(shape)[: self.dims]

    def touched(self, origin: Pair, size: Pair, shape: Pair) -> tuple[Pair, Pair]:
        """First element and count, by rows and columns, of the elements whose blocks a region of W has a share in."""
        if self.name == "shape":
            return (0, 0), (1, 2)
        rows, cols = self.sizes(shape)
        first = (origin[0] // rows, origin[1] // cols)
        end = (-(-(origin[0] + size[0]) // rows), -(-(origin[1] + size[1]) // cols))
        return first, (end[0] - first[0], end[1] - first[1])

    def nbytes(self, origin: Pair, size: Pair, shape: Pair) -> int:
        """Bytes of the elements that a region of W has a share in."""
        return prod(self.touched(origin, size, shape)[1]) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True, config=_FROZEN)
class Scheme:
    """See the module's text for the arithmetic. Lists of tensors that stay as they are belong to a checkpoint, not to a scheme.

    group: the block of W over which absmax is taken; 0 is the whole dim.
    weight: bfloat16: a float32 source is rounded to bfloat16 first, as the HF checkpoint would hold it; source: as it is.
    inverse: absmax is multiplied by float32(1 / divisor) instead of divided, as torch does on CUDA for a division by a number.
    fused: last components of modules whose tensors share one `total` (engines fuse them and keep one scale).
    """

    name: str
    kind: Literal["fp8", "fp4", "int4"]
    group: Pair
    parts: tuple[Part, ...]
    scale: Literal["real", "power_of_two", "two_level"]
    apply: Literal["divide", "reciprocal", "multiply"]
    divisor: float
    weight: Literal["bfloat16", "source"] = "bfloat16"
    arithmetic: Literal["float32", "bfloat16"] = "float32"
    scale_arithmetic: Literal["float32", "bfloat16"] = "float32"
    power: Literal["floor", "round", "ceil"] | None = None
    inverse: bool = False
    floor: float = 0.0
    least: float = 0.0
    zero: float = 1.0
    limits: tuple[float, float] | None = None
    negative_zero: bool = True
    fused: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if problems := [text for wrong, text in self._checks() if wrong]:
            raise ValueError("; ".join(problems))

    def _checks(self) -> list[tuple[bool, str]]:
        names = [part.name for part in self.parts]
        by_name = {part.name: part for part in self.parts}
        wanted = {"values", "scales", *(["global"] if self.scale == "two_level" else [])}
        checks = [
            (len(set(names)) != len(names), f"parts {listed(names)}: one of each at most"),
            (
                set(names) - {"shape"} != wanted,
                f"parts {listed(names)}: scale {self.scale} needs {listed(sorted(wanted))} (and may have shape)",
            ),
            (min(self.group) < 0, f"group {list(self.group)}: sizes are positive, or 0 for the whole dim"),
            ((self.scale == "power_of_two") != (self.power is not None), "power is for scale: power_of_two, which needs it"),
            (
                self.scale == "power_of_two" and self.kind not in EXPONENT and self.power != "ceil",
                f"power: {self.power} needs a float format, not {self.kind}",
            ),
            (self.apply == "multiply" and self.scale != "real", "apply: multiply needs scale: real"),
            (
                self.scale == "two_level" and self.apply != "divide",
                "scale: two_level needs apply: divide",
            ),
            (not self.divisor > 0, f"divisor {self.divisor}: must be positive"),
            (min(self.floor, self.least) < 0, f"floor {self.floor}, least {self.least}: must not be negative"),
            (self.least > 0 and (self.scale, self.apply) == ("real", "multiply"), "least needs apply: divide or reciprocal"),
            (self.least > 0 and self.scale != "real", "least needs scale: real"),
            (not self.zero > 0, f"zero {self.zero}: must be positive, it is the scale of a group of zeros"),
        ]
        low, high, _ = KINDS[self.kind]
        if self.limits is not None:
            inside = low <= self.limits[0] < self.limits[1] <= high
            checks.append((not inside, f"limits {list(self.limits)}: must lie within [{low:g}, {high:g}]"))
        if values := by_name.get("values"):
            packed = PACKED[self.kind]
            checks.append((values.dtype not in packed, f"values of {self.kind} are {listed(packed)}, not {values.dtype}"))
            count = packed.get(values.dtype, 0)
            checks.append((values.block != (1, count), f"values of dtype {values.dtype} need block [1, {count}]"))
            whole = self.group[1] == 0 or count == 0 or self.group[1] % count == 0
            checks.append((not whole, f"group {list(self.group)}: its columns must be a multiple of {count}, packed together"))
        if scales := by_name.get("scales"):
            legal = SCALES[self.scale]
            checks.append((scales.dtype not in legal, f"scales of rule {self.scale} are {listed(legal)}, not {scales.dtype}"))
            checks.append((scales.block != self.group, f"scales need the block of the group, {list(self.group)}"))
        if whole_scale := by_name.get("global"):
            fine = whole_scale.dtype == "float32" and whole_scale.block == (0, 0)
            checks.append((not fine, "global is float32 of block [0, 0]"))
        if shape := by_name.get("shape"):
            checks.append((shape.dtype not in ("int32", "int64"), f"shape is int32 or int64, not {shape.dtype}"))
        return checks

    @property
    def bounds(self) -> tuple[float, float]:
        """What scaled values are clamped to."""
        return self.limits or KINDS[self.kind][:2]

    @property
    def packed(self) -> int:
        """Values in one element of the values part."""
        return self.part("values").block[1]

    def part(self, name: str) -> Part:
        for part in self.parts:
            if part.name == name:
                return part
        raise ConfigError(f"scheme {self.name} has no part {name}; it has {listed(p.name for p in self.parts)}")

    def groups(self, shape: Pair) -> Pair:
        """The group's size for a W of this shape."""
        return self.part("scales").sizes(shape)

    def problem(self, shape: tuple[int, ...]) -> str | None:
        """Why a weight of this shape cannot be quantised, or None. Ragged last blocks are legal where blocks have rows too."""
        if len(shape) != 2:
            return f"has shape {list(shape)}; scheme {self.name} quantises matrices"
        cols = self.group[1] if self.group[0] == 1 and self.group[1] else self.packed
        if shape[1] % cols:
            return f"has shape {list(shape)}; scheme {self.name} needs a last dim that {cols} divides"
        return None

    def stored_as(self, part: str, dtype: str) -> Scheme:
        """The same scheme with a part held in another dtype, as an engine may keep it. Raises ConfigError unless exact."""
        old = self.part(part)
        exact = {("bfloat16", "float32"), ("float8_e8m0fnu", "float32"), ("uint8", "float32"), ("int32", "int64")}
        names = {("uint8", "float8_e8m0fnu"), ("float8_e8m0fnu", "uint8"), ("int64", "int32")}
        if part == "values" or (old.dtype != dtype and (old.dtype, dtype) not in exact | names):
            raise ConfigError(f"scheme {self.name}: part {part} is {old.dtype}; it cannot be held exactly as {dtype}")
        return replace(self, parts=tuple(replace(p, dtype=dtype) if p is old else p for p in self.parts))


def load_scheme(name: str, load: LoadYaml, overrides: Mapping[str, Any] | None = None) -> Scheme:
    """A scheme from its YAML and what it extends, with fields replaced by `overrides` (group: [64, 64], apply: divide).

    In the YAML a part's block may be the word `group`; parts are given by name. Raises ConfigError.
    """
    return scheme_from({**merged(name, load), **(overrides or {})})


def scheme_from(data: Mapping[str, Any]) -> Scheme:
    """A scheme from the merged mapping of its YAML."""
    where = f"scheme {data.get('name')}"
    fields = dict(data)
    parts = fields.get("parts")
    if not isinstance(parts, Mapping):
        raise ConfigError(f"{where}: parts must be a mapping of part names, got {parts!r}")
    fields["parts"] = [_part(str(key), value, fields.get("group"), where) for key, value in parts.items()]
    try:
        return TypeAdapter(Scheme).validate_python(_tuples(fields))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'scheme'}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{where}: {listed(problems)}") from None


def _part(name: str, value: object, group: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: part {name} must be a mapping, got {value!r}")
    part = {"name": name, **cast("Mapping[str, Any]", value)}
    if part.get("block") == "group":
        part["block"] = group
    return part


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
