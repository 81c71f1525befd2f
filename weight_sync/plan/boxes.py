"""Distinct boxes of one side: what the planner joins instead of shards, and who holds them.

Replicas share boxes, so there are far fewer distinct boxes than shards. Where boxes of one tensor overlap without being equal
(one rank holds the whole, others halves), they are cut into disjoint ones first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weight_sync.layout.box import Box, atoms
from weight_sync.layout.table import Ints, Layout

# Odd 64-bit constants (multiples of the golden ratio), fixed here because numpy's generators may differ between versions.
_MULTIPLIERS = [(0x9E3779B97F4A7C15 * (2 * i + 1)) % 2**64 for i in range(64)]


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Distinct (tensor, box) of one side, sorted by tensor, offset, shape. group: the distinct box of every shard."""

    tensor: Ints
    offset: Ints
    shape: Ints
    group: Ints

    def box(self, i: int) -> Box:
        return Box(tuple(self.offset[i].tolist()), tuple(self.shape[i].tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """Disjoint boxes of one side and, for box i, the shards rows[first[i]:first[i + 1]] that contain it, by rank."""

    boxes: Boxes
    rows: Ints
    first: Ints


def distinct_boxes(layout: Layout) -> Boxes:
    """Reduce shards to distinct boxes. Hash first, then check that the hash did not merge two different boxes."""
    columns = [layout.tensor, *layout.offset.T, *layout.shape.T]
    keys = np.zeros(len(layout.tensor), np.uint64)
    with np.errstate(over="ignore"):
        for column, multiplier in zip(columns, _MULTIPLIERS, strict=False):
            keys += column.view(np.uint64) * np.uint64(multiplier)
            keys ^= keys >> np.uint64(29)
            keys *= np.uint64(_MULTIPLIERS[-1])
    order = np.argsort(keys)
    new = np.append(np.ones(min(len(keys), 1), np.bool_), np.diff(keys.take(order)) != 0)
    first, group = order[new], np.empty_like(order)  # shards of one group have one box: any of them speaks for it
    group[order] = np.cumsum(new) - 1
    if not all(np.array_equal(column.take(first).take(group), column) for column in columns):  # two boxes have one hash
        rows = np.column_stack(columns)
        _, first, group = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        group = group.ravel()
    order = np.lexsort((*layout.shape[first].T[::-1], *layout.offset[first].T[::-1], layout.tensor[first]))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    first = first[order]
    return Boxes(layout.tensor[first], layout.offset[first], layout.shape[first], place[group])


def holders(layout: Layout, boxes: Boxes) -> Holders:
    """Who holds what. Shards come in layout order, that is by rank."""
    overlapping = overlapping_tensors(boxes)
    by_group = np.argsort(boxes.group, kind="stable")
    bounds = np.searchsorted(boxes.group[by_group], np.arange(len(boxes.tensor) + 1))
    if not overlapping:
        return Holders(boxes, by_group, bounds)
    first: list[int] = bounds.tolist()
    tensors, low = np.unique(boxes.tensor, return_index=True)
    ends = [*low.tolist()[1:], len(boxes.tensor)]
    cut: list[tuple[int, Box]] = []
    rows: list[Ints] = []
    for tensor, a, b in zip(tensors.tolist(), low.tolist(), ends, strict=True):
        groups = {g: boxes.box(g) for g in range(a, b)}
        if tensor not in overlapping:
            cut += ((tensor, box) for box in groups.values())
            rows += (by_group[first[g] : first[g + 1]] for g in groups)
            continue
        for atom in atoms(box for box in groups.values() if box.volume):
            cut.append((tensor, atom))
            rows.append(
                np.sort(np.concatenate([by_group[first[g] : first[g + 1]] for g, x in groups.items() if x.contains(atom)]))
            )
    d = boxes.offset.shape[1]
    disjoint = Boxes(
        np.asarray([tensor for tensor, _ in cut], np.int64),
        np.asarray([box.offset for _, box in cut], np.int64).reshape(-1, d),
        np.asarray([box.shape for _, box in cut], np.int64).reshape(-1, d),
        boxes.group,
    )
    return Holders(disjoint, np.concatenate(rows), np.append(0, np.cumsum([len(r) for r in rows])).astype(np.int64))


def overlapping_tensors(boxes: Boxes) -> set[int]:
    """Tensors among whose distinct boxes two share an element.

    Boxes are sorted by tensor and offset, so along a dim that alone is cut neighbours suffice; otherwise all pairs are tried.
    """
    same = boxes.tensor[1:] == boxes.tensor[:-1]
    if not same.any():
        return set()
    differs = (boxes.offset[1:] != boxes.offset[:-1]) | (boxes.shape[1:] != boxes.shape[:-1])
    tensors, first, which = np.unique(boxes.tensor, return_index=True, return_inverse=True)
    last = np.append(first[1:], len(boxes.tensor))
    dims: NDArray[np.bool_] = np.zeros((len(tensors), boxes.offset.shape[1]), np.bool_)
    np.logical_or.at(dims, which[1:][same], differs[same])
    one_dim = dims.sum(axis=1) <= 1
    d = dims.argmax(axis=1)[which]
    at = np.arange(len(boxes.tensor))
    low = boxes.offset[at, d]
    touching = same & (low[:-1] + boxes.shape[at, d][:-1] > low[1:]) & one_dim[which[1:]]
    result: set[int] = set(boxes.tensor[1:][touching].tolist())
    for t in np.flatnonzero(~one_dim).tolist():
        rows = slice(int(first[t]), int(last[t]))
        begin, end = boxes.offset[rows], boxes.offset[rows] + boxes.shape[rows]
        # In blocks, so that thousands of boxes of one tensor do not need a square of memory.
        for i in range(0, len(begin), 512):
            low_, high_ = begin[i : i + 512, None], end[i : i + 512, None]
            common = (np.minimum(high_, end[None]) > np.maximum(low_, begin[None])).all(axis=2)
            if common.sum() > (boxes.shape[rows][i : i + 512] > 0).all(axis=1).sum():
                result.add(int(tensors[t]))
                break
    return result
