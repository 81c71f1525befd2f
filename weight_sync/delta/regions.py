"""What a trainer rank has to remember: each distinct region it sends, once, however many replicas it goes to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weight_sync.layout.table import Ints
from weight_sync.plan.plan import Plan

_ALIGN = 64


@dataclass(frozen=True, eq=False)
class Regions:
    """Distinct regions of the transfers `rows` of one rank.

    first: for each region, the first transfer that sends it. of: for each of `rows`, its region. start, nbytes: where each lies
    in the snapshot, and how large it is as it is sent. total: bytes of the snapshot.
    """

    rows: Ints
    first: Ints
    of: Ints
    start: Ints
    nbytes: Ints
    total: int


def regions_of(plan: Plan, rows: Ints) -> Regions:
    """Transfers are the same region when they send the same box of the same tensor from the same place as the same dtype."""
    if not len(rows):
        none = np.zeros(0, np.int64)
        return Regions(rows, none, none, none, none, 0)
    dtypes = {name: i for i, name in enumerate({p.dtype: None for p in plan.target_params})}
    becomes = np.asarray([dtypes[p.dtype] for p in plan.target_params], np.int64)[plan.target[rows]]
    columns = [plan.source[rows], plan.source_start[rows], plan.tensor[rows], becomes]
    key = np.concatenate(
        [np.stack(columns, axis=1), plan.offset[rows], plan.shape[rows], plan.source_strides[rows]], axis=1
    )  # fmt: skip
    _, first, of = np.unique(key, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)  # in the order of the plan
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    first = rows[first[order]]
    nbytes = plan.nbytes[first]
    room = -(-nbytes // _ALIGN) * _ALIGN
    return Regions(rows, first, place[of.reshape(-1)], np.cumsum(room) - room, nbytes, int(room.sum()))


def snapshot_bytes(plan: Plan) -> Ints:
    """Bytes that each trainer rank keeps for deltas."""
    return np.asarray([regions_of(plan, plan.rows_from(rank)).total for rank in range(plan.source_world)], np.int64)
