"""The HF tensors of one model: names, shapes, dtypes, and a dense integer id for each.

Tensors come as templates (`model.layers.{l}.mlp.experts.{e}.up_proj.weight`) so that a trillion-parameter model is a few
dozen rows: the id of an instance is first + layer position * experts + expert.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from weight_sync.errors import FamilyError, listed

_PLACEHOLDER = re.compile(r"\{(.*?)\}")


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that is made of a weight: element i stands for block i of it, and its first element for the block's first.

    base: the weight's template. part: what a quantisation scheme calls it ("values", "scales"). block: elements of the weight
    in each dim. group: those over which the largest magnitude is taken. dtype: the tensor's own. layers: where it is made,
    None: without {l}; in other layers a pattern that is its own base holds the weight as it is. shares: template of the weight
    with which it shares a scale of the whole tensor, where a scheme has such scales and engines fuse the two.
    spans: dims of which a group is the whole by its scheme, so that every shard of the weight holds its scale.
    """

    base: str
    part: str
    block: tuple[int, ...]
    group: tuple[int, ...]
    dtype: str
    layers: tuple[int, ...] | None
    shares: str = ""
    spans: tuple[bool, ...] = (False, False)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Tensors that differ only in layer and expert. layers: global indices; None: no {l}. experts: count; 0: no {e}.

    made: of what, where a tensor is not held by the trainer but made on the way (layout/emitted.py).
    """

    template: str
    shape: tuple[int, ...]
    dtype: str
    layers: tuple[int, ...] | None = None
    experts: int = 0
    made: Made | None = None

    @property
    def count(self) -> int:
        return (1 if self.layers is None else len(self.layers)) * max(self.experts, 1)

    def names(self) -> Iterator[str]:
        for layer in self.layers if self.layers is not None else (0,):
            yield from self.names_in(layer)

    def names_in(self, layer: int) -> Iterator[str]:
        """The names of one layer's tensors, by expert. The layer is put in once: a large model has 70,000 names."""
        parts = fill(self.template, l=layer).split("{e}")
        return (str(expert).join(parts) for expert in range(max(self.experts, 1)))


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
    """All HF tensors of a model, in declaration order. Shapes are global, in elements.

    scheme: how `made` tensors are made, as JSON (weight_sync.quant.scheme); "" where there are none.
    """

    patterns: tuple[Pattern, ...]
    scheme: str = ""
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
    def shapes(self) -> NDArray[np.int64]:
        """[tensors, ndim] int64; missing dims are 1."""
        rows = [list(p.shape) + [1] * (self.ndim - len(p.shape)) for p in self.patterns]
        table = np.asarray(rows, np.int64).reshape(len(self.patterns), self.ndim)
        return np.repeat(table, [p.count for p in self.patterns], axis=0)

    def dtype_of(self, tensor: int) -> str:
        """The tensor's dtype in the checkpoint that an engine loads; `pattern.dtype` is the trainer's."""
        pattern = self.pattern_of(tensor)
        return pattern.made.dtype if pattern.made is not None and self.is_made[tensor] else pattern.dtype

    @cached_property
    def is_made(self) -> NDArray[np.bool_]:
        """[tensors]: which are made of a weight."""
        return self._made[0]

    @cached_property
    def base(self) -> NDArray[np.int64]:
        """[tensors]: id of the weight that a tensor is made of; its own id where it is not made, or takes its place."""
        return self._made[1]

    @cached_property
    def block(self) -> NDArray[np.int64]:
        """[tensors, ndim]: elements of the weight that one element stands for; 1 where it is not made."""
        return self._made[2]

    @cached_property
    def group(self) -> NDArray[np.int64]:
        """[tensors, ndim]: elements of the weight over which the largest magnitude is taken; 1 where it is not made."""
        return self._made[4]

    @cached_property
    def served(self) -> NDArray[np.bool_]:
        """[tensors]: which are in the engines' checkpoint: all but weights whose values go by another name there."""
        made, base = self.is_made, self.base
        result = np.ones(len(self), np.bool_)
        result[base[made]] = False
        result[made] = True
        return result

    @cached_property
    def leads(self) -> NDArray[np.bool_]:
        """[tensors]: all but those that go with the values of the same weight (scales): a sender is chosen for the values."""
        return self._made[3]

    @cached_property
    def sharer(self) -> NDArray[np.int64]:
        """[tensors]: id of the weight that speaks for a weight's whole magnitude: its own, or of one that it is fused with."""
        result = np.arange(len(self), dtype=np.int64)
        for p in self.patterns:
            if p.made is None or not p.made.shares:
                continue
            mine, other = (self.by_template[t] for t in (p.made.base, p.made.shares))
            count = self.patterns[mine].count
            result[self.first[mine] : self.first[mine] + count] = self.first[other] + np.arange(count)
        return result

    @cached_property
    def _made(self) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
        made = np.zeros(len(self), np.bool_)
        base = np.arange(len(self), dtype=np.int64)
        block = np.ones((len(self), self.ndim), np.int64)
        leads = np.ones(len(self), np.bool_)
        group = np.ones((len(self), self.ndim), np.int64)
        for first, p in zip(self.first, self.patterns, strict=True):
            if p.made is None:
                continue
            each = max(p.experts, 1)
            of = self.by_template[p.made.base]
            home = self.patterns[of]
            layers: tuple[int | None, ...] = p.layers if p.layers is not None else (None,)
            for i, layer in enumerate(layers):
                if layer is not None and p.made.layers is not None and layer not in p.made.layers:
                    continue
                at = 0 if layer is None or home.layers is None else home.layers.index(layer)
                rows = slice(first + i * each, first + (i + 1) * each)
                made[rows] = True
                base[rows] = self.first[of] + at * each + np.arange(each)
                block[rows, : len(p.made.block)] = p.made.block
                leads[rows] = p.made.part == "values"
                group[rows, : len(p.made.group)] = p.made.group
        return made, base, block, leads, group

    @cached_property
    def digest(self) -> str:
        """Of names and shapes. Dtypes are left out: they belong to a side's parameters, and the planner compares those."""
        hasher = xxhash.xxh3_128()
        for p in self.patterns:
            hasher.update(repr((p.template, p.shape, p.layers, p.experts)).encode())
            if p.made is not None:
                hasher.update(repr(p.made).encode())
        hasher.update(self.scheme.encode())
        return hasher.hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"scheme": self.scheme, "patterns": [asdict(p) for p in self.patterns]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Catalog:
        return cls(tuple(_pattern(item) for item in data["patterns"]), data["scheme"])


def _pattern(data: Mapping[str, Any]) -> Pattern:
    made = data["made"]
    return Pattern(
        data["template"],
        tuple(data["shape"]),
        data["dtype"],
        _layers(data["layers"]),
        data["experts"],
        None
        if made is None
        else Made(
            made["base"],
            made["part"],
            tuple(made["block"]),
            tuple(made["group"]),
            made["dtype"],
            _layers(made["layers"]),
            made["shares"],
            tuple(made["spans"]),
        ),
    )


def _layers(value: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)
