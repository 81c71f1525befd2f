"""Plan: which elements of which source parameter become which elements of which destination parameter.

A plan names no address, no process and no framework object. It is a value: hash it, save it, explain it, execute it. Each side
of a transfer is an affine map, as in weight_sync.layout.table: element (i, j, ...) of the transfer's box lives at element
`start + i * strides[0] + j * strides[1] + ...` of the parameter, in the parameter's row-major order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from weight_sync.errors import PlanError, listed
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.catalog import Catalog
from weight_sync.layout.rowwise import product
from weight_sync.layout.table import (
    Bools,
    Ints,
    Layout,
    Param,
    ParamColumns,
    columns_of,
    digest_text,
    params_from_json,
    params_to_json,
)

FORMAT = "weight_sync.plan/3"
COLUMNS = ("tensor", "offset", "shape", "source", "source_start", "source_strides", "target", "target_start", "target_strides")


@dataclass(frozen=True, eq=False)
class Plan:
    """Columns, one entry a transfer, sorted by (source rank, destination rank, destination parameter, start).

    tensor: catalog id. offset, shape [transfers, catalog.ndim]: the box in the HF tensor. source, target: rows in
    source_params and target_params. *_start [transfers], *_strides [transfers, catalog.ndim]: elements.
    source_hosts, target_hosts: host of every rank, as far as it was known when sources were chosen.
    """

    catalog: Catalog
    source_params: tuple[Param, ...]
    target_params: tuple[Param, ...]
    source_world: int
    target_world: int
    source_hosts: tuple[str, ...]
    target_hosts: tuple[str, ...]
    tensor: Ints
    offset: Ints
    shape: Ints
    source: Ints
    source_start: Ints
    source_strides: Ints
    target: Ints
    target_start: Ints
    target_strides: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @cached_property
    def source_columns(self) -> ParamColumns:
        """source_params as columns."""
        return columns_of(self.source_params)

    @cached_property
    def target_columns(self) -> ParamColumns:
        """target_params as columns."""
        return columns_of(self.target_params)

    @cached_property
    def source_rank(self) -> Ints:
        return self.source_columns.rank.take(self.source)

    @property
    def target_param_rank(self) -> Ints:
        return self.target_columns.rank

    @cached_property
    def target_rank(self) -> Ints:
        return self.target_param_rank.take(self.target)

    @cached_property
    def itemsize(self) -> Ints:
        """Bytes per element of every transfer at the destination; they are what travels."""
        return self.target_columns.of_kind(lambda p: ITEMSIZE[p.dtype]).take(self.target)

    @cached_property
    def made(self) -> Bools:
        """Which transfers are made of a weight on their way: quantised values and their scales (layout/emitted.py)."""
        return self.target_columns.of_kind(lambda p: bool(p.part)).astype(np.bool_).take(self.target)

    @cached_property
    def computed(self) -> Bools:
        """Which transfers do not arrive as they lie in the source: cast, or made of a weight."""
        return self.casts | self.made

    @cached_property
    def casts(self) -> Bools:
        """Which transfers are cast on their way, from the source parameter's dtype to the destination parameter's."""
        here, there = self.source_columns, self.target_columns
        index = {name: i for i, name in enumerate({p.dtype for p in (*here.kinds, *there.kinds)})}
        source, target = (side.of_kind(lambda p: index[p.dtype]) for side in (here, there))
        return (source.take(self.source) != target.take(self.target)) & ~self.made

    def dtypes(self, row: int) -> tuple[str, str]:
        """Dtype at the source and at the destination of a transfer."""
        return self.source_params[int(self.source[row])].dtype, self.target_params[int(self.target[row])].dtype

    @cached_property
    def nbytes(self) -> Ints:
        """Bytes of every transfer, as they are written."""
        return product(self.shape) * self.itemsize

    @cached_property
    def digest(self) -> str:
        """128-bit digest of the whole plan. Ranks compare it before a byte moves."""
        hasher = xxhash.xxh3_128(f"{self.catalog.digest} {self.source_world} {self.target_world}".encode())
        hasher.update(repr((self.source_hosts, self.target_hosts)).encode())
        for params in (self.source_params, self.target_params):
            hasher.update(digest_text(params))
        for name in COLUMNS:
            hasher.update(np.ascontiguousarray(getattr(self, name), "<i8").data)
        return hasher.hexdigest()

    def rows_from(self, rank: int) -> Ints:
        """Transfers that start on a trainer rank."""
        rows, first = self._by_source
        return rows[first[rank] : first[rank + 1]]

    def rows_to(self, rank: int) -> Ints:
        """Transfers that end on a rollout rank."""
        rows, first = self._by_target
        return rows[first[rank] : first[rank + 1]]

    @cached_property
    def _by_source(self) -> tuple[Ints, Ints]:
        return _grouped(self.source_rank, self.source_world)

    @cached_property
    def _by_target(self) -> tuple[Ints, Ints]:
        return _grouped(self.target_rank, self.target_world)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "digest": self.digest,
            "catalog": self.catalog.to_json(),
            "source": {
                "world": self.source_world,
                "hosts": list(self.source_hosts),
                "params": params_to_json(self.source_params),
            },
            "target": {
                "world": self.target_world,
                "hosts": list(self.target_hosts),
                "params": params_to_json(self.target_params),
            },
            "transfers": {name: getattr(self, name).tolist() for name in COLUMNS},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that to_json wrote. Raises PlanError when something is missing or its digest is not that of the content."""
        if data.get("format") != FORMAT:
            raise PlanError(f"not a saved plan of this version: format is {data.get('format')!r}, want {FORMAT!r}")
        try:
            catalog = Catalog.from_json(data["catalog"])
            columns = {name: np.asarray(data["transfers"][name], np.int64) for name in COLUMNS}
            for name in ("offset", "shape", "source_strides", "target_strides"):
                columns[name] = columns[name].reshape(-1, catalog.ndim)
            plan = cls(
                catalog,
                params_from_json(data["source"]["params"]),
                params_from_json(data["target"]["params"]),
                data["source"]["world"],
                data["target"]["world"],
                tuple(data["source"]["hosts"]),
                tuple(data["target"]["hosts"]),
                **columns,
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise PlanError(f"saved plan is damaged: {type(error).__name__}: {error}") from None
        if plan.digest != data.get("digest"):
            raise PlanError(f"saved plan is damaged: its content has digest {plan.digest}, it says {data.get('digest')}")
        return plan


def _grouped(ranks: Ints, world: int) -> tuple[Ints, Ints]:
    """Transfers by rank, and where each rank's begin. Every rank asks for its own, so they are sorted once."""
    rows = np.argsort(ranks.astype(np.uint16) if world <= 1 << 16 else ranks, kind="stable")  # a radix sort has 16 bits
    return rows, np.searchsorted(ranks.take(rows), np.arange(world + 1))


def same_inputs(source: Layout, target: Layout) -> None:
    """Raise PlanError unless both layouts speak of the same HF tensors."""
    if source.catalog.digest == target.catalog.digest:
        return
    here, there = source.catalog, target.catalog
    only = sorted(here.ids.keys() - there.ids.keys())[:4], sorted(there.ids.keys() - here.ids.keys())[:4]
    if any(only):
        raise PlanError(
            f"the two sides do not hold the same model: only the trainer has {only[0]}, only the rollout has {only[1]}"
        )
    shapes = ((name, here.pattern_of(id_).shape, there.pattern_of(there.ids[name]).shape) for name, id_ in here.ids.items())
    differ = [f"{name} is {list(a)} on the trainer, {list(b)} on the rollout" for name, a, b in shapes if a != b]
    raise PlanError(f"the two sides do not hold the same model: {listed(differ) or 'their tensors come in another order'}")
