"""A rollout layout that nobody declared: read from what each live engine's own loader does.

There is only one witness then. What stands in for the second is coverage, which needs no declaration: every element of every
live parameter is written by exactly one HF tensor, or is filling that the loader sets to a constant, or belongs to a parameter
that the config names as untouched; and every HF tensor is used, or named as unserved. What a loader computes instead of copying
(a cast, a dequantisation) has no place in such a layout and is an error that names tensor, parameter and operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np

from weight_sync.errors import BindError, listed
from weight_sync.layout.box import row_major
from weight_sync.layout.catalog import Catalog, Pattern
from weight_sync.layout.table import Layout, Param, layout_from_shards
from weight_sync.plan.tiling import disjoint
from weight_sync.session.contracts import EngineDescription, LiveParam

ONE_WITNESS = (
    "the rollout layout is recorded, not declared: what the engines' own loaders do is its only witness. Checked instead: "
    "every element of every live parameter is written once, and every HF tensor is used"
)


def published_catalog(described: Mapping[int, Mapping[str, Any]], casts: Mapping[str, str] | None = None) -> Catalog:
    """The HF tensors that trainer ranks hold, from the shards they publish (RankDescription as plain data, by rank).

    casts: the HF dtype of tensors that the trainer holds in another, by that other one (float32 masters: {"float32":
    "bfloat16"}). Of all others it is the trainer's own.

    A tensor ends where the last shard of any rank ends. Should ranks hold less than a whole tensor, its shape comes out too
    small; the engine's loader then refuses it, or leaves elements uncovered.

    Raises: BindError for a rank that publishes no shards, and for ranks that disagree on a tensor's dims or dtype.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, tuple[str, int]] = {}
    for rank, description in sorted(described.items()):
        if description.get("shards") is None:
            raise BindError(
                f"trainer rank {rank} publishes no shards, so its HF tensors are unknown; declare a family (weight_sync.family)"
            )
        dtype_of = {param["name"]: param["dtype"] for param in description["params"]}
        for shard in description["shards"]:
            name, live = shard["tensor"], str(dtype_of[shard["param"]])
            dtype = live if casts is None else casts.get(live, live)
            end = tuple(offset + size for offset, size in zip(shard["offset"], shard["shape"], strict=True))
            known, first = shapes.setdefault(name, end), dtypes.setdefault(name, (dtype, rank))
            if len(known) != len(end) or first[0] != dtype:
                raise BindError(
                    f"{name}: trainer rank {first[1]} has {len(known)} dims of {first[0]}, rank {rank} {len(end)} of {dtype}"
                )
            shapes[name] = tuple(max(a, b) for a, b in zip(known, end, strict=True))
    return Catalog(tuple(Pattern(name, shape, dtypes[name][0]) for name, shape in sorted(shapes.items())))


def recorded_layout(
    catalog: Catalog,
    servers: Sequence[EngineDescription],
    recordings: Sequence[Mapping[int, Mapping[str, Any]]],
    untouched: Sequence[str] = (),
) -> Layout:
    """The rollout's layout. recordings: of each engine, by worker rank (RolloutEngine.record).

    untouched: patterns of live parameters that no HF tensor fills and that keep their values.

    Raises: BindError naming engine, worker, tensor, parameter and operation for whatever is not a plain placement.
    """
    params: list[list[Param]] = []
    shards: list[list[Mapping[str, Any]]] = []
    used: set[str] = set()
    for server, by_rank in zip(servers, recordings, strict=True):
        for description in server.ranks:
            where = f"engine {server.name}, worker {description.rank}"
            recording = by_rank[description.rank]
            _expressible(where, recording)
            rank = len(params)
            params.append(_params(where, rank, description.params, recording, untouched, used, catalog))
            shards.append(list(recording["shards"]))
    if idle := [pattern for pattern in untouched if pattern not in used]:
        raise BindError(f"weight_sync.recorded.untouched: no live parameter without HF tensor matches {listed(idle)}")
    return layout_from_shards("rollout", catalog, params, shards)


def unserved_names(layout: Layout, patterns: Sequence[str]) -> list[str]:
    """The HF tensors that no engine takes; each must match a pattern, and each pattern one of them.

    Raises: BindError naming the others: a tensor that a loader skips in silence would go stale for ever.
    """
    placed = set(np.unique(layout.tensor).tolist())
    served = layout.catalog.served
    left = [name for name, tensor in layout.catalog.ids.items() if tensor not in placed and served[tensor]]
    if lost := [name for name in left if not _matches(name, patterns)]:
        raise BindError(
            f"the engines' loaders take nothing of {len(lost)} HF tensors: {listed(lost)}. If they are not served (a draft "
            "layer, say), name them in weight_sync.recorded.unserved"
        )
    if idle := [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in left)]:
        raise BindError(f"weight_sync.recorded.unserved: every tensor that matches is served: {listed(idle)}")
    return left


def _expressible(where: str, recording: Mapping[str, Any]) -> None:
    if recording["unexplained"]:
        lines = [f"{name}: {operation}" for name, operation in sorted(recording["unexplained"].items())]
        raise BindError(
            f"{where}: the loader does more than place the bytes of {len(lines)} tensors, which a recorded layout cannot "
            f"express: {listed(lines)}. Declare the engine side of this model (weight_sync.engine=auto and a family), or serve "
            "it in a form whose loader copies (other dtype, no quantisation)"
        )
    if rewritten := recording.get("rewritten"):
        lines = [f"{name}: {count} elements" for name, count in sorted(rewritten.items())]
        raise BindError(f"{where}: the loader writes these twice, so the order of HF tensors would matter: {listed(lines)}")


def _params(
    where: str,
    rank: int,
    live: Iterable[LiveParam],
    recording: Mapping[str, Any],
    untouched: Sequence[str],
    used: set[str],
    catalog: Catalog,
) -> list[Param]:
    """The live parameters with their filling. Patterns of `untouched` that were needed are added to `used`."""
    written = _regions(recording["shards"])
    constant = _regions(recording["constants"])
    problems: list[str] = []
    result: list[Param] = []
    for param in live:
        if list(param.stride) != list(row_major(param.shape)) and prod(param.shape) > 1:
            problems.append(f"{param.name}: is not contiguous, shape {list(param.shape)} with strides {list(param.stride)}")
            continue
        regions = written.get(param.name, [])
        filled = constant.get(param.name, [])
        filling = _volume(filled)
        missing = prod(param.shape) - _volume(regions) - filling
        matching = [pattern for pattern in untouched if fnmatchcase(param.name, pattern)]
        if matching and not regions:
            used.update(matching)
            filling = prod(param.shape)
        elif filled and not disjoint(param.shape, *_columns([*regions, *filled])):
            problems.append(f"{param.name}: a part is set to a constant and written as well")
        elif missing:
            count, fault = abs(missing), "by no HF tensor" if missing > 0 else "more than once"
            problems.append(f"{param.name}: {count} of {prod(param.shape)} elements are written {fault}")
        parts = {_part(catalog, str(region["tensor"])) for region in regions}
        if len(parts) > 1:
            problems.append(f"{param.name}: holds {listed(sorted(part or 'plain tensors' for part in parts))} together")
        result.append(Param(rank, param.name, param.shape, param.dtype, filling, part=next(iter(parts), "")))
    if problems:
        raise BindError(
            f"{where}: its loader does not cover its live parameters exactly once: {listed(problems)}. A parameter that keeps "
            "its value whatever is trained can be named in weight_sync.recorded.untouched"
        )
    return result


def _part(catalog: Catalog, name: str) -> str:
    """Of what quantised weights become, which one a tensor is."""
    tensor = catalog.ids.get(name)
    made = None if tensor is None or not catalog.is_made[tensor] else catalog.pattern_of(tensor).made
    return "" if made is None else made.part


def _regions(items: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for item in items:
        found.setdefault(item["param"], []).append(item)
    return found


def _volume(regions: Iterable[Mapping[str, Any]]) -> int:
    return sum(prod(region["shape"]) for region in regions)


def _columns(regions: Sequence[Mapping[str, Any]]) -> tuple[Any, Any, Any]:
    """(start [n], strides [n, dims], shape [n, dims]) of regions with different numbers of dims."""
    dims = max(len(region["shape"]) for region in regions)
    strides = [[*region["strides"], *[0] * (dims - len(region["shape"]))] for region in regions]
    shape = [[*region["shape"], *[1] * (dims - len(region["shape"]))] for region in regions]
    start = [region["start"] for region in regions]
    return tuple(np.asarray(column, np.int64) for column in (start, strides, shape))  # type: ignore[return-value]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
