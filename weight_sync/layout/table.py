"""Layout: all shards of one side, as columns.

A shard maps a box of an HF tensor onto one physical parameter of one rank: element `index` of the HF tensor (inside the box)
lives at element `start + sum((index[d] - offset[d]) * strides[d])` of the parameter, counted in the parameter's own row-major
order. That one form covers QKV interleaving, gate/up fusion, expert stacking, TP cuts, padding and transposes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from weight_sync.errors import FamilyError
from weight_sync.layout.box import Box
from weight_sync.layout.catalog import Catalog

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Param:
    """One physical parameter of one rank.

    filling: elements no HF tensor covers (vocab padding), never written. cast_from: the HF dtype that the parameter's rule
    declares its values to be cast from; "" where HF bytes are simply placed. part: of what weights become, which one it holds
    ("values", "scales"; layout/emitted.py); "" where it holds HF tensors of the trainer.
    """

    rank: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    filling: int = 0
    cast_from: str = ""
    part: str = ""

    @property
    def numel(self) -> int:
        return prod(self.shape)


_KIND = attrgetter("shape", "dtype", "filling", "cast_from", "part")


@dataclass(frozen=True, slots=True, eq=False)
class ParamColumns:
    """Parameters as columns. kinds: parameters that differ in more than rank and name, an example of each. rank, kind [params]:
    kind is an index into `kinds`, of which even the largest model has a few dozen."""

    kinds: tuple[Param, ...]
    rank: Ints
    kind: Ints

    def of_kind(self, value: Callable[[Param], int]) -> Ints:
        """[params]: an integer that follows from a parameter's kind."""
        return self.by_kind(value).take(self.kind)

    def by_kind(self, value: Callable[[Param], int]) -> Ints:
        """[kinds]: an integer that follows from a parameter's kind."""
        return np.fromiter(map(value, self.kinds), np.int64, len(self.kinds))


def columns_of(params: Sequence[Param]) -> ParamColumns:
    index = {key: i for i, key in enumerate(dict.fromkeys(map(_KIND, params)))}
    kind = np.fromiter(map(index.__getitem__, map(_KIND, params)), np.int64, len(params))
    rank = np.fromiter(map(attrgetter("rank"), params), np.int64, len(params))
    return ParamColumns(tuple(Param(0, "", *key) for key in index), rank, kind)


def digest_text(params: Sequence[Param]) -> bytes:
    """What a digest takes of parameters: their number, then everything they hold."""
    texts = {key: " ".join(map(str, key)) for key in dict.fromkeys(map(_KIND, params))}
    lines = [f"{p.rank} {p.name} {texts[key]}" for p, key in zip(params, map(_KIND, params), strict=True)]
    return "\n".join([str(len(lines)), *lines, ""]).encode()


def params_to_json(params: Sequence[Param]) -> list[list[Any]]:
    return [[p.rank, p.name, list(p.shape), p.dtype, p.filling, p.cast_from, p.part] for p in params]


def params_from_json(data: Sequence[Sequence[Any]]) -> tuple[Param, ...]:
    return tuple(Param(r, n, tuple(s), d, f, c, q) for r, n, s, d, f, c, q in data)


@dataclass(frozen=True, slots=True)
class Shard:
    """One box of one HF tensor in one parameter; see the module docstring for start and strides (elements)."""

    tensor: str
    box: Box
    param: str
    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """All shards of one side.

    params: every parameter of every rank, sorted by rank. Columns, one entry a shard, sorted by param: tensor (catalog id),
    param (row in params), offset/shape/strides [shards, catalog.ndim] (missing dims: offset 0, shape 1, stride 0), start.
    """

    side: str
    world: int
    catalog: Catalog
    params: tuple[Param, ...]
    tensor: Ints
    param: Ints
    offset: Ints
    shape: Ints
    start: Ints
    strides: Ints

    @cached_property
    def columns(self) -> ParamColumns:
        """The parameters as columns."""
        return columns_of(self.params)

    @property
    def param_rank(self) -> Ints:
        return self.columns.rank

    @property
    def rank(self) -> Ints:
        """Rank of every shard."""
        return self.param_rank.take(self.param)

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({p.dtype for p in self.params}))

    @cached_property
    def param_dtype(self) -> Ints:
        """Index into `dtypes` of every parameter."""
        index = {name: i for i, name in enumerate(self.dtypes)}
        return np.fromiter((index[p.dtype] for p in self.params), np.int64, len(self.params))

    def rank_params(self, rank: int) -> tuple[Param, ...]:
        low, high = np.searchsorted(self.param_rank, [rank, rank + 1])
        return self.params[low:high]

    def shards(self, rows: Iterable[int]) -> list[Shard]:
        """Shards as records, for messages and tests; not for planning."""
        result: list[Shard] = []
        for row in rows:
            tensor = int(self.tensor[row])
            n = len(self.catalog.pattern_of(tensor).shape)
            result.append(
                Shard(
                    self.catalog.name(tensor),
                    Box(tuple(self.offset[row, :n].tolist()), tuple(self.shape[row, :n].tolist())),
                    self.params[int(self.param[row])].name,
                    int(self.start[row]),
                    tuple(self.strides[row, :n].tolist()),
                )
            )
        return result

    def rank_shards(self, rank: int) -> list[Shard]:
        return self.shards(np.flatnonzero(self.rank == rank).tolist())

    @cached_property
    def digest(self) -> str:
        """128-bit digest of everything in the layout; equal layouts have equal digests on every machine."""
        hasher = xxhash.xxh3_128(f"{self.side} {self.world} {self.catalog.digest}".encode())
        hasher.update(digest_text(self.params))
        for column in (self.tensor, self.param, self.offset, self.shape, self.start, self.strides):
            hasher.update(np.ascontiguousarray(column, "<i8").data)
        return hasher.hexdigest()

    def rank_to_json(self, rank: int) -> list[dict[str, Any]]:
        """One rank's shards as plain data: what RankDescription.shards holds."""
        return [
            {
                "tensor": s.tensor,
                "offset": list(s.box.offset),
                "shape": list(s.box.shape),
                "param": s.param,
                "start": s.start,
                "strides": list(s.strides),
            }
            for s in self.rank_shards(rank)
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "side": self.side,
            "world": self.world,
            "catalog": self.catalog.to_json(),
            "params": params_to_json(self.params),
            "shards": {
                name: getattr(self, name).tolist() for name in ("tensor", "param", "offset", "shape", "start", "strides")
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        catalog = Catalog.from_json(data["catalog"])
        columns = {name: np.asarray(values, np.int64) for name, values in data["shards"].items()}
        for name in ("offset", "shape", "strides"):
            columns[name] = columns[name].reshape(-1, catalog.ndim)
        return cls(data["side"], data["world"], catalog, params_from_json(data["params"]), **columns)


def layout_from_shards(
    side: str,
    catalog: Catalog,
    params: Sequence[Sequence[Param]],
    shards: Sequence[Iterable[Mapping[str, Any]]],
) -> Layout:
    """A layout read from live processes. params[rank], shards[rank] (as Layout.rank_to_json writes them).

    Empty shards (uneven FSDP) are left out. Raises FamilyError for a tensor the catalog does not have, a box outside the
    tensor, a parameter that is not there or named twice, and elements outside the parameter.
    """
    if len(params) != len(shards):
        raise FamilyError(f"{side}: parameters of {len(params)} ranks, but shards of {len(shards)}")
    flat = [param for rank_params in params for param in rank_params]
    row: dict[tuple[int, str], int] = {}
    for i, (rank, p) in enumerate((rank, p) for rank, rank_params in enumerate(params) for p in rank_params):
        if p.rank != rank:
            raise FamilyError(f"{side} rank {rank}: {p.name} says it is of rank {p.rank}")
        if (rank, p.name) in row:
            raise FamilyError(f"{side} rank {rank}: two parameters are named {p.name}")
        row[rank, p.name] = i
    columns: list[tuple[int, int, list[int], list[int], int, list[int]]] = []
    for rank, items in enumerate(shards):
        for item in items:
            tensor = catalog.ids.get(item["tensor"])
            if tensor is None:
                raise FamilyError(f"{side} rank {rank} holds {item['tensor']}, which the model's family does not declare")
            pattern = catalog.pattern_of(tensor)
            box = Box(tuple(item["offset"]), tuple(item["shape"]))
            if len(box.shape) != len(pattern.shape) or not Box.full(pattern.shape).contains(box):
                raise FamilyError(
                    f"{side} rank {rank}: box {box} of {item['tensor']} lies outside its shape {list(pattern.shape)}"
                )
            if (rank, item["param"]) not in row:
                raise FamilyError(f"{side} rank {rank}: {item['tensor']} is said to be in {item['param']}, which is not there")
            if not box.volume:
                continue
            start, strides, numel = int(item["start"]), list(item["strides"]), flat[row[rank, item["param"]]].numel
            if len(strides) != len(box.shape):
                raise FamilyError(f"{side} rank {rank}: {item['tensor']}: {len(strides)} strides for box {box}")
            reach = [(size - 1) * step for size, step in zip(box.shape, strides, strict=True)]
            first, last = start + sum(min(r, 0) for r in reach), start + sum(max(r, 0) for r in reach)
            if first < 0 or last >= numel:
                raise FamilyError(
                    f"{side} rank {rank}: box {box} of {item['tensor']} would take elements {first} to {last} "
                    f"of {item['param']}, which has {numel}"
                )
            pad = catalog.ndim - len(pattern.shape)
            columns.append(
                (
                    tensor,
                    row[rank, item["param"]],
                    [*box.offset, *[0] * pad],
                    [*box.shape, *[1] * pad],
                    start,
                    [*strides, *[0] * pad],
                )
            )
    columns.sort(key=lambda c: (c[1], c[4], c[0], c[2]))

    def column(i: int, *shape: int) -> Ints:
        return np.asarray([c[i] for c in columns], np.int64).reshape(len(columns), *shape)

    d = catalog.ndim
    return Layout(
        side,
        len(params),
        catalog,
        tuple(flat),
        column(0),
        column(1),
        column(2, d),
        column(3, d),
        column(4),
        column(5, d),
    )
