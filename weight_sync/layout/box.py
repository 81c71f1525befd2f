"""Boxes: axis-aligned ranges of a tensor's index space, the only geometry this library knows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements with `offset[d] <= index[d] < offset[d] + shape[d]` for every dim d. Units: elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(f"offset {self.offset} and shape {self.shape} differ in length")
        if any(o < 0 for o in self.offset) or any(s < 0 for s in self.shape):
            raise ValueError(f"a box has no negative numbers: offset {self.offset}, shape {self.shape}")

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements. A box of no dims holds one."""
        return prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common elements, or None when there are none."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    def contains(self, other: Box) -> bool:
        return other.volume == 0 or all(
            a <= b and c >= d for a, b, c, d in zip(self.offset, other.offset, self.end, other.end, strict=True)
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offset, self.shape, strict=True)) + "]"


def atoms(boxes: Iterable[Box]) -> list[Box]:
    """Cut overlapping boxes into disjoint ones such that each given box is a union of them.

    The cut is the grid of all box edges; cells in no box are left out. Order: by offset.
    """
    unique = sorted(set(boxes))
    if not unique:
        return []
    edges = [sorted({e for box in unique for e in (box.offset[d], box.end[d])}) for d in range(len(unique[0].shape))]
    cells = (
        Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in product(*(list(pairwise(marks)) for marks in edges))
    )
    return [cell for cell in cells if any(box.contains(cell) for box in unique)]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous row-major array of that shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
