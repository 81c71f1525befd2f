"""Exact-once: every destination element is written once, every HF tensor is used or dropped with a reason.

The proof looks at destination parameters only and shares no code with the planner: it turns transfers back into boxes of the
physical parameter and shows that they tile it. It runs on every plan, in tests and before every binding.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np

from weight_sync.errors import PlanError, listed
from weight_sync.layout.box import row_major
from weight_sync.layout.table import Ints
from weight_sync.plan.plan import Plan


def prove_exact_once(plan: Plan, dropped: Iterable[str] = ()) -> None:
    """Raise PlanError unless `plan` writes every destination element exactly once and uses every HF tensor.

    dropped: HF names that the rollout declares it does not hold. Declared filling (vocab padding) is the only part of a
    parameter that may stay unwritten.
    """
    order = np.argsort(plan.target, kind="stable")
    bounds = np.searchsorted(plan.target[order], np.arange(len(plan.target_params) + 1))
    volume = plan.shape.prod(axis=1)
    total = np.bincount(plan.target, weights=volume, minlength=len(plan.target_params)).astype(np.int64)
    want = np.fromiter((p.numel - p.filling for p in plan.target_params), np.int64, len(plan.target_params))
    problems: list[str] = []
    for i in np.flatnonzero(total != want).tolist():
        p = plan.target_params[i]
        problems.append(f"rollout rank {p.rank}, {p.name}: {int(total[i])} elements are written, {int(want[i])} are needed")
    if problems:
        raise PlanError(f"not exact-once: {listed(problems)}")
    proven: set[bytes] = set()
    for i, p in enumerate(plan.target_params):
        rows = order[bounds[i] : bounds[i + 1]]
        if len(rows) == 0:
            continue
        start, strides, shape = plan.target_start[rows], plan.target_strides[rows], plan.shape[rows]
        # Parameters of other layers and replicas repeat the same tiling; it is enough to prove it once.
        key = repr(p.shape).encode() + b"".join(np.ascontiguousarray(a).tobytes() for a in (start, strides, shape))
        if key in proven:
            continue
        if not _disjoint(p.shape, start, strides, shape):
            names = sorted({plan.catalog.name(int(t)) for t in plan.tensor[rows].tolist()})
            problems.append(f"rollout rank {p.rank}, {p.name}: transfers of {listed(names)} overlap or leave the parameter")
        proven.add(key)
    if problems:
        raise PlanError(f"not exact-once: {listed(problems)}")
    used = np.zeros(len(plan.catalog), np.bool_)
    used[plan.tensor] = True
    excused = {plan.catalog.ids[name] for name in dropped}
    unused = [t for t in np.flatnonzero(~used).tolist() if t not in excused]
    if unused:
        raise PlanError(f"HF tensors that no transfer uses and no rule drops: {listed(map(plan.catalog.name, unused))}")


def _disjoint(param: tuple[int, ...], start: Ints, strides: Ints, shape: Ints) -> bool:
    """Whether the affine regions lie inside the parameter and share no element."""
    boxes = _param_boxes(param, start, strides, shape)
    if boxes is None:
        return _disjoint_elements(prod(param), start, strides, shape)
    low, high = boxes
    n = len(low)
    if n == 1:
        return True
    for i in range(0, n, 1024):  # all pairs, in blocks that keep memory small
        block = slice(i, i + 1024)
        common = np.minimum(high[block, None], high[None]) > np.maximum(low[block, None], low[None])
        if common.all(axis=2).sum() != len(low[block]):
            return False
    return True


def _param_boxes(param: tuple[int, ...], start: Ints, strides: Ints, shape: Ints) -> tuple[Ints, Ints] | None:
    """The regions as boxes [n, dims of the parameter] (first, one past last), or None if one is not a box of it."""
    if any(size == 0 for size in param):
        return None
    steps = row_major(param)
    low = np.stack([(start // step) % size for step, size in zip(steps, param, strict=True)], axis=1)
    extent = np.ones_like(low)
    matched = (shape == 1).astype(np.int64)
    for j, step in enumerate(steps):
        if param[j] == 1:
            continue
        hit = (strides == step) & (shape > 1)
        extent[:, j] = np.where(hit, shape, 1).prod(axis=1)
        if (hit.sum(axis=1) > 1).any():
            return None
        matched += hit
    high = low + extent
    inside = (start >= 0).all() and (high <= np.asarray(param)).all() and (start < prod(param)).all()
    return (low, high) if inside and (matched == 1).all() else None


def _disjoint_elements(numel: int, start: Ints, strides: Ints, shape: Ints) -> bool:
    """The slow way, for regions that are not boxes of the parameter (merged dims): count every element."""
    hits = np.zeros(numel, np.uint8)
    for s, step, size in zip(start.tolist(), strides.tolist(), shape.tolist(), strict=True):
        index = np.asarray(s, np.int64)
        for count, stride in zip(size, step, strict=True):
            index = index[..., None] + np.arange(count, dtype=np.int64) * stride
        flat = index.ravel()
        if len(flat) and (flat.min() < 0 or flat.max() >= numel):
            return False
        if len(np.unique(flat)) != len(flat) or hits[flat].any():
            return False
        hits[flat] = 1
    return True
