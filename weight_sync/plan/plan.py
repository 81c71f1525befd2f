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

from weight_sync.errors import PlanError
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.catalog import Catalog
from weight_sync.layout.table import Ints, Layout, Param, digest_text

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
    def source_rank(self) -> Ints:
        return np.fromiter((p.rank for p in self.source_params), np.int64, len(self.source_params))[self.source]

    @cached_property
    def target_rank(self) -> Ints:
        return np.fromiter((p.rank for p in self.target_params), np.int64, len(self.target_params))[self.target]

    @cached_property
    def itemsize(self) -> Ints:
        """Bytes per element of every transfer."""
        sizes = np.fromiter((ITEMSIZE[p.dtype] for p in self.target_params), np.int64, len(self.target_params))
        return sizes[self.target]

    @cached_property
    def nbytes(self) -> Ints:
        """Bytes of every transfer."""
        return self.shape.prod(axis=1) * self.itemsize

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
        return np.flatnonzero(self.source_rank == rank)

    def rows_to(self, rank: int) -> Ints:
        """Transfers that end on a rollout rank."""
        return np.flatnonzero(self.target_rank == rank)

    def to_json(self) -> dict[str, Any]:
        def params(items: tuple[Param, ...]) -> list[list[Any]]:
            return [[p.rank, p.name, list(p.shape), p.dtype, p.filling] for p in items]

        return {
            "format": "weight_sync.plan/1",
            "digest": self.digest,
            "catalog": self.catalog.to_json(),
            "source": {"world": self.source_world, "hosts": list(self.source_hosts), "params": params(self.source_params)},
            "target": {"world": self.target_world, "hosts": list(self.target_hosts), "params": params(self.target_params)},
            "transfers": {name: getattr(self, name).tolist() for name in COLUMNS},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that to_json wrote. Raises PlanError when something is missing or its digest is not that of the content."""
        if data.get("format") != "weight_sync.plan/1":
            raise PlanError(f"not a saved plan of this version: format is {data.get('format')!r}, want 'weight_sync.plan/1'")
        try:
            catalog = Catalog.from_json(data["catalog"])
            columns = {name: np.asarray(data["transfers"][name], np.int64) for name in COLUMNS}
            for name in ("offset", "shape", "source_strides", "target_strides"):
                columns[name] = columns[name].reshape(-1, catalog.ndim)
            plan = cls(
                catalog,
                _params(data["source"]),
                _params(data["target"]),
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


def _params(side: Mapping[str, Any]) -> tuple[Param, ...]:
    return tuple(Param(r, n, tuple(s), d, f) for r, n, s, d, f in side["params"])


def same_inputs(source: Layout, target: Layout) -> None:
    """Raise PlanError unless both layouts speak of the same HF tensors."""
    if source.catalog.digest != target.catalog.digest:
        names, others = set(source.catalog.ids), set(target.catalog.ids)
        only = sorted(names - others)[:4], sorted(others - names)[:4]
        raise PlanError(
            f"the two sides do not hold the same model: only the trainer has {only[0]}, only the rollout has {only[1]}; "
            "if both are empty, shapes or dtypes differ"
        )
