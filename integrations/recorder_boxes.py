"""Geometry of recorded copies: strided views as axis-aligned boxes. Pure integers, no torch.

Offsets, strides and sizes are in elements. A view of a contiguous base tensor is a list of Dim; the boxes it is made of
carry, for every axis of the base, how far one step along it moves in the destination.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Ints = tuple[int, ...]

MAX_BOXES = 65536
"""A copy that falls apart into more boxes than this is reported as inexpressible instead of filling memory."""


class NotBoxes(Exception):
    """A view that cannot be written as a reasonable number of boxes. The message says which."""


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a copy: `size` steps that move `source` elements in the base and `target` in the destination."""

    size: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Box:
    """A box (offset, shape) of the base. Element i of it goes to start + sum(i[d] * strides[d]) in the destination."""

    offset: Ints
    shape: Ints
    start: int
    strides: Ints


def contiguous_strides(shape: Sequence[int]) -> Ints:
    """Row-major strides in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def boxes_of_view(base: Ints, offset: int, dims: Sequence[Dim], start: int) -> list[Box]:
    """The boxes of the contiguous tensor of shape `base` that the view (offset, dims) reads, in order of the view.

    Raises: NotBoxes when there would be more than MAX_BOXES.
    """
    boxes: list[Box] = []
    for box in _split(base, contiguous_strides(base), offset, list(dims), start):
        if len(boxes) == MAX_BOXES:
            raise NotBoxes(f"more than {MAX_BOXES} boxes of a tensor of shape {base}")
        boxes.append(box)
    return boxes


def _split(base: Ints, strides: Ints, offset: int, dims: list[Dim], start: int) -> Iterator[Box]:
    if any(dim.size == 0 for dim in dims):
        return
    dims = _merged([dim for dim in dims if dim.size != 1], strides)
    origin = _unravel(offset, strides)
    axis_of = {stride: axis for axis, stride in enumerate(strides) if base[axis] > 1}
    chosen: dict[int, Dim] = {}
    for index, dim in enumerate(dims):
        rest = dims[:index] + dims[index + 1 :]
        axis = axis_of.get(dim.source)
        if axis is not None and axis not in chosen and origin[axis] + dim.size <= base[axis]:
            chosen[axis] = dim
            continue
        if axis is not None and axis not in chosen and origin[axis] == 0 and dim.size % base[axis] == 0:
            # The view runs over several base axes at once, as after flatten(): take it apart again.
            inner = base[axis]
            parts = [Dim(dim.size // inner, dim.source * inner, dim.target * inner), Dim(inner, dim.source, dim.target)]
            yield from _split(base, strides, offset, rest + parts, start)
            return
        # A step of more than one, a broadcast, or two view dimensions along one axis: one slice at a time.
        for i in range(dim.size):
            yield from _split(base, strides, offset + i * dim.source, rest, start + i * dim.target)
        return
    yield Box(
        offset=origin,
        shape=tuple(chosen[axis].size if axis in chosen else 1 for axis in range(len(base))),
        start=start,
        strides=tuple(chosen[axis].target if axis in chosen else 0 for axis in range(len(base))),
    )


def _merged(dims: list[Dim], strides: Ints) -> list[Dim]:
    """Join view dimensions that were split from one axis (unflatten), where source and destination both allow it."""
    dims = sorted(dims, key=lambda dim: -dim.source)
    known = set(strides)
    index = 0
    while index + 1 < len(dims):
        outer, inner = dims[index], dims[index + 1]
        joined = outer.source == inner.source * inner.size and outer.target == inner.target * inner.size
        if outer.source not in known and joined:
            dims[index : index + 2] = [Dim(outer.size * inner.size, inner.source, inner.target)]
            index = max(0, index - 1)
        else:
            index += 1
    return dims


def _unravel(offset: int, strides: Ints) -> Ints:
    origin = []
    for stride in strides:
        origin.append(offset // stride)
        offset %= stride
    return tuple(origin)


def intersect(a_offset: Ints, a_shape: Ints, b_offset: Ints, b_shape: Ints) -> tuple[Ints, Ints] | None:
    """The common box of two boxes of one tensor as (offset, shape), or None."""
    offset = tuple(max(a, b) for a, b in zip(a_offset, b_offset, strict=True))
    end = tuple(min(a + n, b + m) for a, n, b, m in zip(a_offset, a_shape, b_offset, b_shape, strict=True))
    shape = tuple(stop - begin for begin, stop in zip(offset, end, strict=True))
    return None if any(size <= 0 for size in shape) else (offset, shape)


def volume(shape: Sequence[int]) -> int:
    """Elements of a box."""
    return math.prod(shape)
