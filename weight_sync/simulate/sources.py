"""Another choice of source, to see what the planner's is worth: the lowest rank that holds a box always sends it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weight_sync.errors import PlanError
from weight_sync.layout.table import Layout
from weight_sync.plan.plan import Plan


def first_holders(plan: Plan, source: Layout) -> Plan:
    """The plan with every transfer moved to the lowest trainer rank whose shard is the same box of the same tensor.

    Replicas hold a box in equal parameters, so the transfer keeps its place within the box; what is made of a weight (values,
    scales) is sent by who holds the weight. Raises PlanError when `source` is not the layout the plan was made from.
    """
    # The first shard of each distinct (tensor, box), in rank order: shards are sorted by parameter, parameters by rank.
    box = np.column_stack([source.tensor, source.offset, source.shape, source.strides])
    _, first, group = np.unique(box, axis=0, return_index=True, return_inverse=True)
    shard = _shards(plan, source)
    chosen = first[group.reshape(-1)[shard]]
    start = plan.source_start - source.start[shard] + source.start[chosen]
    moved = replace(plan, source=source.param[chosen], source_start=start)
    order = np.lexsort((moved.target_start, moved.target, moved.source_rank))
    columns = (
        "tensor",
        "offset",
        "shape",
        "source",
        "source_start",
        "source_strides",
        "target",
        "target_start",
        "target_strides",
    )
    return replace(moved, **{name: getattr(moved, name)[order] for name in columns})


def _shards(plan: Plan, source: Layout) -> np.ndarray:
    """The shard each transfer starts from: of its parameter and its weight, the one whose box holds its first element."""
    if source.params != plan.source_params:
        raise PlanError("the trainer layout given is not the one this plan was made from")
    weight, block = plan.catalog.base.take(plan.tensor), plan.catalog.block.take(plan.tensor, axis=0)
    low_box, high_box = plan.offset * block, (plan.offset + plan.shape) * block
    order = np.lexsort((source.tensor, source.param))
    key = source.param[order] * len(source.catalog) + source.tensor[order]
    wanted = plan.source * len(source.catalog) + weight
    low, high = np.searchsorted(key, wanted, "left"), np.searchsorted(key, wanted, "right")
    found = np.full(len(plan), -1)
    for step in range(int((high - low).max(initial=0))):
        at = low + step
        open_ = np.flatnonzero((found < 0) & (at < high))
        shard = order[at[open_]]
        begin, end = source.offset[shard], source.offset[shard] + source.shape[shard]
        # A block of a quantised weight may reach into the next rank's share, or past the end.
        inside = ((begin < high_box[open_]) & (low_box[open_] < end)).all(axis=1)
        found[open_[inside]] = shard[inside]
    if (found < 0).any():
        raise PlanError("the trainer layout given is not the one this plan was made from")
    return found
