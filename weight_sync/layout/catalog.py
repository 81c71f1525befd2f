"""The HF tensors of one model: names, shapes, dtypes, and a dense integer id for each.

Tensors come as templates (`model.layers.{l}.mlp.experts.{e}.up_proj.weight`) so that a trillion-parameter model is a few
dozen rows: the id of an instance is first + layer position * experts + expert.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from weight_sync.errors import FamilyError, listed

_PLACEHOLDER = re.compile(r"\{(.*?)\}")


@dataclass(frozen=True, slots=True)
class Pattern:
    """Tensors that differ only in layer and expert. layers: global indices; None: no {l}. experts: count; 0: no {e}."""

    template: str
    shape: tuple[int, ...]
    dtype: str
    layers: tuple[int, ...] | None = None
    experts: int = 0

    @property
    def count(self) -> int:
        return (1 if self.layers is None else len(self.layers)) * max(self.experts, 1)

    def names(self) -> Iterator[str]:
        for layer in self.layers if self.layers is not None else (0,):
            for expert in range(max(self.experts, 1)):
                yield fill(self.template, l=layer, e=expert)


def fill(template: str, **indices: int) -> str:
    """Put indices into a template; unused ones are ignored."""
    for key, value in indices.items():
        template = template.replace("{" + key + "}", str(value))
    return template


def placeholders(template: str) -> set[str]:
    """The words in braces."""
    return set(_PLACEHOLDER.findall(template))


@dataclass(frozen=True)
class Catalog:
    """All HF tensors of a model, in declaration order. Shapes are global, in elements."""

    patterns: tuple[Pattern, ...]
    first: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        firsts: list[int] = []
        total = 0
        for pattern in self.patterns:
            firsts.append(total)
            total += pattern.count
        object.__setattr__(self, "first", tuple(firsts))
        templates = [pattern.template for pattern in self.patterns]
        if twice := sorted(template for template, count in Counter(templates).items() if count > 1):
            raise FamilyError(f"HF tensors declared twice: {listed(twice)}")

    def __len__(self) -> int:
        return self.first[-1] + self.patterns[-1].count if self.patterns else 0

    @cached_property
    def ndim(self) -> int:
        return max((len(pattern.shape) for pattern in self.patterns), default=1) or 1

    @cached_property
    def by_template(self) -> dict[str, int]:
        return {pattern.template: index for index, pattern in enumerate(self.patterns)}

    def pattern_of(self, tensor: int) -> Pattern:
        return self.patterns[bisect_right(self.first, tensor) - 1]

    def name(self, tensor: int) -> str:
        """The HF name of a tensor id."""
        index = bisect_right(self.first, tensor) - 1
        pattern = self.patterns[index]
        position, expert = divmod(tensor - self.first[index], max(pattern.experts, 1))
        layer = pattern.layers[position] if pattern.layers is not None else 0
        return fill(pattern.template, l=layer, e=expert)

    @cached_property
    def ids(self) -> dict[str, int]:
        """HF name -> id. Built on first use: a trillion-parameter model has about 70,000."""
        return {name: i for i, name in enumerate(name for pattern in self.patterns for name in pattern.names())}

    def doubled(self) -> list[str]:
        """HF names that two templates give."""
        seen: set[str] = set()
        names = [name for pattern in self.patterns for name in pattern.names()]
        return sorted({name for name in names if name in seen or seen.add(name)})

    @cached_property
    def shapes(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[tensors, ndim] int64; missing dims are 1."""
        rows = [list(p.shape) + [1] * (self.ndim - len(p.shape)) for p in self.patterns]
        table = np.asarray(rows, np.int64).reshape(len(self.patterns), self.ndim)
        return np.repeat(table, [p.count for p in self.patterns], axis=0)

    @cached_property
    def digest(self) -> str:
        """Of names and shapes. Dtypes are left out: they belong to a side's parameters, and the planner compares those."""
        hasher = xxhash.xxh3_128()
        for p in self.patterns:
            hasher.update(repr((p.template, p.shape, p.layers, p.experts)).encode())
        return hasher.hexdigest()

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "template": p.template,
                "shape": list(p.shape),
                "dtype": p.dtype,
                "layers": None if p.layers is None else list(p.layers),
                "experts": p.experts,
            }
            for p in self.patterns
        ]

    @classmethod
    def from_json(cls, data: Sequence[dict[str, Any]]) -> Catalog:
        return cls(
            tuple(
                Pattern(
                    d["template"],
                    tuple(d["shape"]),
                    d["dtype"],
                    None if d["layers"] is None else tuple(d["layers"]),
                    d["experts"],
                )
                for d in data
            )
        )
