"""Executing plans in numpy, and random layouts that no rule would give."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st
from layout_cases import elements
from layout_naive import Array, Ids, Params

from weight_sync.layout.box import row_major
from weight_sync.layout.catalog import Catalog, Pattern
from weight_sync.layout.table import Layout, Param, layout_from_shards
from weight_sync.plan.plan import Plan


def execute(plan: Plan, source: Params) -> Params:
    """What the rollout ranks hold after every transfer, -1 where nothing was written. Fails if an element is written twice."""
    target = [np.full(p.numel, -1, np.int64) for p in plan.target_params]
    for i in range(len(plan)):
        a = plan.source_params[plan.source[i]]
        data = source[a.rank][a.name].ravel()[elements(plan.source_start[i], plan.source_strides[i], plan.shape[i])]
        at = elements(plan.target_start[i], plan.target_strides[i], plan.shape[i])
        assert (target[plan.target[i]][at] == -1).all(), f"transfer {i} writes what another one wrote"
        target[plan.target[i]][at] = data
    result: Params = [{} for _ in range(plan.target_world)]
    for p, array in zip(plan.target_params, target, strict=True):
        result[p.rank][p.name] = array.reshape(p.shape)
    return result


@st.composite
def scattered(draw: st.DrawFn) -> tuple[Ids, Layout, Layout]:
    """A few tensors, cut and laid out at random on both sides: grids, replicas, overlaps, empty shards, permuted dims."""
    ids = Ids()
    patterns = []
    for i in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        ids.add(f"t{i}", *shape)
        patterns.append(Pattern(f"t{i}", shape, "float32"))
    catalog = Catalog(tuple(patterns))
    return ids, _side(draw, "trainer", catalog), _side(draw, "rollout", catalog)


def _side(draw: st.DrawFn, side: str, catalog: Catalog) -> Layout:
    world = draw(st.integers(1, 4))
    params: list[list[Param]] = [[] for _ in range(world)]
    shards: list[list[dict[str, Any]]] = [[] for _ in range(world)]
    for pattern in catalog.patterns:
        copies = draw(st.integers(1, 2))
        for copy in range(copies):  # each copy is a complete grid of boxes, so that the tensor is all there
            for offset, shape in _grid(draw, pattern.shape):
                rank = draw(st.integers(0, world - 1))
                name = f"{pattern.template}.{copy}.{'_'.join(map(str, offset))}.{len(params[rank])}"
                order = draw(st.permutations(range(len(shape))))
                laid = [shape[d] for d in order]
                steps = row_major(laid)
                strides = [0] * len(shape)
                for d, step in zip(order, steps, strict=True):
                    strides[d] = step
                params[rank].append(Param(rank, name, tuple(laid), pattern.dtype))
                shards[rank].append(
                    {
                        "tensor": pattern.template,
                        "offset": list(offset),
                        "shape": list(shape),
                        "param": name,
                        "start": 0,
                        "strides": strides,
                    }
                )
    return layout_from_shards(side, catalog, params, shards)


def _grid(draw: st.DrawFn, shape: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        # A mark given twice makes an empty box, as uneven FSDP has them.
        marks = sorted([0, *draw(st.lists(st.integers(0, size), max_size=2)), size])
        spans = [(a, b - a) for a, b in pairwise(marks)]
        boxes = [((*o, a), (*s, n)) for o, s in boxes for a, n in spans]
    return boxes


def values(layout: Layout, hf: dict[str, Array]) -> Params:
    """Every rank's parameters of a layout without padding."""
    result: Params = []
    for rank in range(layout.world):
        mine = {p.name: np.full(p.numel, -1, np.int64) for p in layout.rank_params(rank)}
        for s in layout.rank_shards(rank):
            index = tuple(slice(o, o + n) for o, n in zip(s.box.offset, s.box.shape, strict=True))
            mine[s.param][elements(s.start, s.strides, s.box.shape)] = hf[s.tensor][index]
        result.append({p.name: mine[p.name].reshape(p.shape) for p in layout.rank_params(rank)})
    return result
