"""Runs: the contiguous byte ranges a transfer consists of, on one side or on both."""

from __future__ import annotations

import numpy as np

from weight_sync.layout.table import Ints


def inner_elements(shape: Ints, *strides: Ints) -> Ints:
    """Elements, for each transfer, that lie contiguously on every side given, in the transfer's row-major order.

    shape, strides: [transfers, dims]. The product of the trailing dims whose strides are row-major.
    """
    inner = np.ones(len(shape), np.int64)
    alive = np.ones(len(shape), np.bool_)
    for d in range(shape.shape[1] - 1, -1, -1):
        whole = shape[:, d] == 1
        for side in strides:
            alive &= whole | (side[:, d] == inner)
        inner = np.where(alive, inner * shape[:, d], inner)
    return inner


def expand_runs(
    shape: Ints, source_start: Ints, source_strides: Ints, target_start: Ints, target_strides: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """(transfer, source element, target element, elements) of every run of the transfers, in row-major order of each."""
    inner = inner_elements(shape, source_strides, target_strides)
    volume = shape.prod(axis=1)
    count = volume // np.maximum(inner, 1)
    transfer = np.repeat(np.arange(len(shape)), count)
    source, target = np.repeat(source_start, count), np.repeat(target_start, count)
    # The index of a run within its transfer, decoded over the outer dims: last outer dim fastest.
    rest = np.arange(len(transfer)) - np.repeat(np.cumsum(count) - count, count)
    outer = _outer_sizes(shape, inner)
    for d in range(shape.shape[1] - 1, -1, -1):
        size = np.maximum(outer[:, d], 1)[transfer]
        index = rest % size
        rest = rest // size
        source = source + index * source_strides[transfer, d]
        target = target + index * target_strides[transfer, d]
    return transfer, source, target, inner[transfer]


def _outer_sizes(shape: Ints, inner: Ints) -> Ints:
    """shape with the dims inside a run set to 1."""
    outer = shape.copy()
    left = inner.copy()
    for d in range(shape.shape[1] - 1, -1, -1):
        swallowed = left > 1
        outer[:, d] = np.where(swallowed, 1, shape[:, d])
        left = np.where(swallowed, left // np.maximum(shape[:, d], 1), left)
    return outer


def merge_runs(source: Ints, target: Ints, nbytes: Ints, *groups: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Join runs that follow each other on both sides: (source, target, nbytes, index of the first run of each).

    groups: for each run, numbers that must be equal for two to be joined: of the allocations they lie in, for two that happen
    to touch are registered separately, and no single write may cross from one into the other.
    """
    order = np.argsort(target, kind="stable")
    source, target, nbytes = source[order], target[order], nbytes[order]
    if len(source) < 2:
        return source, target, nbytes, order
    joins = (source[1:] == source[:-1] + nbytes[:-1]) & (target[1:] == target[:-1] + nbytes[:-1])
    for group in groups:
        joins &= group[order][1:] == group[order][:-1]
    first = np.flatnonzero(np.append(True, ~joins))
    return source[first], target[first], np.add.reduceat(nbytes, first), order[first]
