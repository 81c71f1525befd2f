"""What the controller sends each rank: its part of the plan, as plain data (lists of integers and names)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weight_sync.layout.table import Ints
from weight_sync.plan.plan import Plan
from weight_sync.plan.schedule import Method, Schedule


def target_table(schedule: Schedule, rank: int) -> dict[str, Any]:
    """The transfers that end on a rollout rank, and how its staged pieces unpack.

    transfers: columns; params by name; start, strides, shape in elements. pieces: [transfer, at, shape, stage byte] by round.
    """
    plan = schedule.plan
    rows = plan.rows_to(rank)
    names = [p.name for p in plan.target_params]
    index = {row: i for i, row in enumerate(rows.tolist())}
    rounds: list[list[list[Any]]] = [[] for _ in range(schedule.rounds)]
    for piece in schedule.pieces:
        if piece.row in index and piece.method in (Method.UNPACK, Method.BOTH):
            rounds[piece.round].append([index[piece.row], list(piece.at), list(piece.shape), piece.stage])
    return {
        "plan": schedule.digest,
        "rank": rank,
        "tensors": [plan.catalog.name(t) for t in plan.tensor[rows].tolist()],
        "params": [names[i] for i in plan.target[rows].tolist()],
        "start": plan.target_start[rows].tolist(),
        "strides": plan.target_strides[rows].tolist(),
        "shape": plan.shape[rows].tolist(),
        "expected": expected_params(plan, rank),
        "stage_bytes": schedule.stage_bytes.get(rank, 0),
        "rounds": rounds,
    }


def expected_params(plan: Plan, rank: int) -> dict[str, list[Any]]:
    """Name -> [shape, dtype] of every parameter the plan knows on a rollout rank: compared with the live ones at bind."""
    return {p.name: [list(p.shape), p.dtype] for p in plan.target_params if p.rank == rank}


@dataclass(frozen=True, slots=True, eq=False)
class TargetBinding:
    """Where a rollout rank's parameters live: address of each parameter's first element, staging address, endpoint, epoch."""

    addresses: dict[str, int]
    stage: int
    endpoint: dict[str, Any]
    epoch: int

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TargetBinding:
        return cls(dict(data["addresses"]), int(data["stage"]), dict(data["endpoint"]), int(data["epoch"]))


def merge_digests(plan: Plan, parts: dict[int, list[str]], rows_of: Any) -> Ints:
    """Digests of single ranks put in the order of the plan, as uint64 in int64 bits."""
    import numpy as np

    merged = np.zeros(len(plan), np.uint64)
    seen = np.zeros(len(plan), np.bool_)
    for rank, digests in parts.items():
        rows = rows_of(rank)
        if len(rows) != len(digests):
            raise ValueError(f"rank {rank} reported {len(digests)} digests for {len(rows)} transfers")
        merged[rows] = np.asarray([int(d, 16) for d in digests], np.uint64)
        seen[rows] = True
    if not seen.all():
        raise ValueError(f"{int((~seen).sum())} transfers have no digest")
    return merged.view(np.int64)
