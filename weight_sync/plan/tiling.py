"""Geometry for the proof: do affine regions share elements, do boxes fill a tensor. Shares no code with the planner."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from weight_sync.layout.box import row_major
from weight_sync.layout.rowwise import every, total
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
    first = start + total(np.minimum(reach, 0))
    last = start + total(np.maximum(reach, 0))
    # In floating point nothing wraps around, however absurd the numbers of a damaged plan are.
    small = every(np.abs((shape - 1) * strides.astype(np.float64)) <= numel[:, None])
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


def distinct(rows: Ints) -> tuple[Ints, Ints]:
    """(different rows, in any order, and for each row given which of them it is): by a hash, which is then checked."""
    keys = _hashes(rows)
    order = np.argsort(keys)
    new = np.append(np.ones(min(len(keys), 1), np.bool_), np.diff(keys.take(order)) != 0)
    first, which = order[new], np.empty_like(order)  # of rows with one hash, any
    which[order] = np.cumsum(new) - 1
    if not np.array_equal(rows.take(first, axis=0).take(which, axis=0), rows):
        _, first, which = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return rows[first], which.ravel()


def _hashes(rows: Ints) -> NDArray[np.uint64]:
    keys = np.zeros(len(rows), np.uint64)
    for column in rows.T.astype(np.uint64):
        keys = (keys ^ column) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    return keys


def _among(rows: Ints, others: Ints) -> NDArray[np.bool_]:
    """Which rows certainly stand among `others`; one that does may be missed where two hashes are equal."""
    if not len(others):
        return np.zeros(len(rows), np.bool_)
    keys = _hashes(others)
    order = np.argsort(keys)
    wanted = _hashes(rows)
    by_hash = np.argsort(wanted)  # a search in ascending order finds what it needs in the cache
    place = np.empty_like(by_hash)
    place[by_hash] = np.searchsorted(keys.take(order), wanted.take(by_hash))
    at = order.take(np.minimum(place, len(order) - 1))
    return every(others.take(at, axis=0) == rows)


Keyed = tuple[Ints, Ints, Ints]
"""(key [n], low [n, dims], high [n, dims]): boxes, of which those with one key belong together."""


def covered(boxes: Keyed, by: Keyed) -> NDArray[np.bool_]:
    """[n]: which boxes are covered by the union of those in `by` with the same key."""
    d = boxes[1].shape[1]
    whole, parts = np.column_stack(boxes), np.column_stack(by)
    answer = _among(whole, parts)  # nearly all are: only what is cut otherwise has to be put together
    rest = np.flatnonzero(~answer)
    if not len(rest):
        return answer
    mine, place = distinct(whole.take(rest, axis=0))
    theirs, _ = distinct(parts)
    order = np.argsort(theirs[:, 0])
    if (np.diff(theirs[order, 0]) == 0).any():
        order = np.lexsort(theirs.T[::-1])
    theirs = theirs.take(order, axis=0)
    result = np.zeros(len(mine), np.bool_)
    if len(theirs):
        keys, first = np.unique(theirs[:, 0], return_index=True)
        of = np.minimum(np.searchsorted(keys, mine[:, 0]), len(keys) - 1)
        known = keys[of] == mine[:, 0]
        low, high = theirs[:, 1 : 1 + d], theirs[:, 1 + d :]
        least, most = np.minimum.reduceat(low, first), np.maximum.reduceat(high, first)
        inside_all = known & ((least[of] <= mine[:, 1 : 1 + d]) & (mine[:, 1 + d :] <= most[of])).all(axis=1)
        result = inside_all & _chains(low, high, first, least, most)[of]
        for i in np.flatnonzero(inside_all & ~result).tolist():
            rows = slice(int(first[of[i]]), int(first[of[i] + 1]) if of[i] + 1 < len(first) else len(theirs))
            a, b = mine[i, 1 : 1 + d], mine[i, 1 + d :]
            begin, end = np.maximum(low[rows], a), np.minimum(high[rows], b)
            hit = (end > begin).all(axis=1)
            result[i] = fills(tuple((b - a).tolist()), begin[hit] - a, (end - begin)[hit])
    answer[rest] = result[place]
    return answer


def _chains(low: Ints, high: Ints, first: Ints, least: Ints, most: Ints) -> NDArray[np.bool_]:
    """For each key whether its boxes, sorted, are one beside the other along one dim: their union is then one box, without
    looking further. first: of each key. least, most: the box around each."""
    count = np.diff(np.append(first, len(low)))
    of = np.repeat(np.arange(len(first)), count)
    full = np.logical_and.reduceat((low == least.take(of, axis=0)) & (high == most.take(of, axis=0)), first, axis=0)
    along = np.argmin(full, axis=1)  # the dim in which boxes differ, if one alone does
    at, d = np.arange(len(low)), along[of]
    joined = low[at, d][1:] <= high[at, d][:-1]
    joined[first[1:] - 1] = True  # of another key
    return (full.sum(axis=1) >= full.shape[1] - 1) & np.logical_and.reduceat(np.append(True, joined), first)


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
