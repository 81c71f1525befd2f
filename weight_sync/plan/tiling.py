"""Geometry for the proof: do affine regions share elements, do boxes fill a tensor. Shares no code with the planner."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from weight_sync.layout.box import row_major
from weight_sync.layout.table import Ints


def disjoint(param: tuple[int, ...], start: Ints, strides: Ints, shape: Ints) -> bool:
    """Whether affine regions [n] with strides and shape [n, dims] lie inside a parameter and share no element."""
    if not len(start):
        return True
    boxes = _param_boxes(param, start, strides, shape)
    if boxes is None:
        return _disjoint_elements(prod(param), start, strides, shape)
    low, high = boxes
    order = np.argsort(low[:, 0], kind="stable")
    low, high = low[order], high[order]
    for i in range(0, len(low), 512):  # in blocks that keep memory small, against what starts before the block ends
        block = slice(i, i + 512)
        reach = int(np.searchsorted(low[:, 0], int(high[block, 0].max())))
        other = slice(i, max(reach, i + 1))
        common = np.minimum(high[block, None], high[None, other]) > np.maximum(low[block, None], low[None, other])
        hits: NDArray[np.bool_] = np.all(common, axis=2)
        n = len(low[block])
        if hits[:, n:].any() or hits[:, :n].sum() != n:
            return False
    return True


def inside(numel: Ints, start: Ints, strides: Ints, shape: Ints) -> NDArray[np.bool_]:
    """For each region, whether it lies in a parameter of so many elements."""
    reach = (shape - 1) * strides
    first = start + np.minimum(reach, 0).sum(axis=1)
    last = start + np.maximum(reach, 0).sum(axis=1)
    # In floating point nothing wraps around, however absurd the numbers of a damaged plan are.
    small = (np.abs((shape - 1) * strides.astype(np.float64)) <= numel[:, None]).all(axis=1)
    return small & (first >= 0) & (last < numel)


def fills(tensor: tuple[int, ...], offset: Ints, shape: Ints) -> bool:
    """Whether boxes [n, dims] together cover every element of a tensor; they may overlap."""
    n = len(tensor)
    marks = [np.unique(np.concatenate([[0, tensor[d]], offset[:, d], offset[:, d] + shape[:, d]])) for d in range(n)]
    cells = np.zeros([len(m) - 1 for m in marks], np.bool_)
    low = [np.searchsorted(marks[d], offset[:, d]).tolist() for d in range(n)]
    high = [np.searchsorted(marks[d], offset[:, d] + shape[:, d]).tolist() for d in range(n)]
    for i in range(len(offset)):
        cells[tuple(slice(low[d][i], high[d][i]) for d in range(n))] = True
    return bool(cells.all())


def _param_boxes(param: tuple[int, ...], start: Ints, strides: Ints, shape: Ints) -> tuple[Ints, Ints] | None:
    """The regions as boxes [n, dims of the parameter] (first, one past last), or None if one is not a box of it."""
    if not param or any(size == 0 for size in param):
        return None
    steps = row_major(param)
    low = np.stack([(start // step) % size for step, size in zip(steps, param, strict=True)], axis=1)
    extent = np.ones_like(low)
    matched = (shape == 1).astype(np.int64)
    for j, step in enumerate(steps):
        if param[j] == 1:
            continue
        hit = (strides == step) & (shape > 1)
        if (hit.sum(axis=1) > 1).any():
            return None
        extent[:, j] = np.where(hit, shape, 1).prod(axis=1)
        matched += hit
    high = low + extent
    fits = (start >= 0).all() and (start < prod(param)).all() and (high <= np.asarray(param)).all()
    return (low, high) if fits and (matched == 1).all() else None


def _disjoint_elements(numel: int, start: Ints, strides: Ints, shape: Ints) -> bool:
    """The slow way, for regions that are not boxes of the parameter (merged dims): one mark for every element."""
    if not inside(np.full(len(start), numel, np.int64), start, strides, shape).all():
        return False
    marks = np.zeros(numel, np.uint8)
    for s, step, size in zip(start.tolist(), strides.tolist(), shape.tolist(), strict=True):
        region = as_strided(marks[s:], size, step)
        if region.any() or not _injective(step, size):
            return False
        region[...] = 1
    return True


def _injective(strides: list[int], shape: list[int]) -> bool:
    """Whether no two indices of a region give the same element."""
    dims = sorted((abs(stride), count) for stride, count in zip(strides, shape, strict=True) if count > 1)
    reach = 0
    for stride, count in dims:
        if stride <= reach:  # not the usual nesting, where each dim steps over all that the smaller ones reach: count
            index = np.zeros(1, np.int64)
            for step, size in dims:
                index = (index[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
            return len(np.unique(index)) == len(index)
        reach += stride * (count - 1)
    return True
