"""Numbers of a schedule: what moves, what each rank sends, receives and holds. Everything `plan` prints that needs no cluster.

Bytes are bytes on the wire, once for every replica. Ranks that send or receive nothing count in a mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weight_sync.ids import ITEMSIZE
from weight_sync.layout.rowwise import product
from weight_sync.layout.table import Ints, ParamColumns
from weight_sync.plan.plan import Plan
from weight_sync.plan.runs import inner_elements
from weight_sync.plan.schedule import Method, Schedule

EDGES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
"""Upper ends (bytes, exclusive) of the classes of run sizes; the last class is open."""


def figures(schedule: Schedule) -> dict[str, Any]:
    """Plain numbers, ready for JSON. extra_bytes_*: staging beside the weights on the rank that needs most.

    runs, run_sizes: of the contiguous ranges that are written, before writes that follow each other are joined.
    straddling_groups, straddle_bytes: of quantised weights that lie on several trainer ranks, and what these ranks tell of them
    before each sync.
    """
    plan = schedule.plan
    sent = per_rank(plan.nbytes, plan.source_rank, plan.source_world)
    received = per_rank(plan.nbytes, plan.target_rank, plan.target_world)
    runs, sizes = written_runs(schedule)
    return {
        "digest": schedule.digest,
        "trainer_ranks": plan.source_world,
        "rollout_ranks": plan.target_world,
        "transfers": len(plan),
        "bytes_total": int(plan.nbytes.sum()),
        **_spread("source", sent),
        **_spread("destination", received),
        "extra_bytes_source": max(source_staging(schedule).values(), default=0),
        "extra_bytes_destination": max(schedule.stage_bytes.values(), default=0)
        + (0 if schedule.beside is None else int(schedule.beside.nbytes.max(initial=0))),
        "weight_bytes_max_source": int(held(plan.source_columns, plan.source_world).max(initial=0)),
        "weight_bytes_max_destination": int(held(plan.target_columns, plan.target_world).max(initial=0)),
        "same_host_bytes": same_host_bytes(plan),
        "runs": int(runs.sum()),
        "run_sizes": run_classes(runs, sizes),
        "methods": schedule.summary(),
        "rounds": schedule.rounds,
        "quantised_transfers": int(plan.made.sum()),
        "straddling_groups": len(schedule.straddles),
        "straddle_bytes": schedule.straddles.nbytes,
    }


def per_rank(nbytes: Ints, rank: Ints, world: int) -> Ints:
    """Sum of bytes for every rank of a world, exact (no floating point)."""
    total = np.zeros(world, np.int64)
    np.add.at(total, rank, nbytes)
    return total


def held(params: ParamColumns, world: int) -> Ints:
    """Bytes of parameters on every rank."""
    return per_rank(params.of_kind(lambda p: p.numel * ITEMSIZE[p.dtype]), params.rank, world)


def source_staging(schedule: Schedule) -> dict[int, int]:
    """Bytes of staging on each trainer rank that packs, in two halves.

    Each half is as large as the rank's largest piece. A rank that quantises has thousands of pieces, which travel many
    together: it takes what the budget allows, or what it has to send.
    """
    plan, pieces = schedule.plan, schedule.pieces
    rank = plan.source_rank[pieces.row]
    largest, total = (np.zeros(plan.source_world, np.int64) for _ in range(2))
    np.maximum.at(largest, rank, pieces.nbytes)
    np.add.at(total, rank, -(-pieces.nbytes // 8) * 8)
    made = np.zeros(plan.source_world, np.bool_)
    made[plan.source_rank[plan.made]] = True
    half = np.where(made, np.maximum(largest, np.minimum(total, schedule.budget.source // 2)), largest)
    packing: list[int] = np.flatnonzero(half).tolist()
    return {rank: 2 * (-(-int(half[rank]) // 64) * 64) for rank in packing}


def transfer_runs(plan: Plan, rows: Ints | None = None) -> tuple[Ints, Ints]:
    """(runs, bytes of one run) of transfers: all, or those of `rows`."""
    at = slice(None) if rows is None else rows
    inner = inner_elements(plan.shape[at], plan.source_strides[at], plan.target_strides[at])
    return product(plan.shape[at]) // np.maximum(inner, 1), inner * plan.itemsize[at]


def written_runs(schedule: Schedule) -> tuple[Ints, Ints]:
    """(how many, bytes of each) of the contiguous ranges that are written: runs of direct transfers, pieces of packed ones."""
    plan = schedule.plan
    runs, sizes = transfer_runs(plan, np.flatnonzero(schedule.method == Method.DIRECT))
    pieces = schedule.pieces.nbytes
    return np.concatenate([runs, np.ones_like(pieces)]), np.concatenate([sizes, pieces])


def run_classes(runs: Ints, sizes: Ints) -> list[dict[str, Any]]:
    """Runs by size: [{"below": bytes or null, "runs": ..., "bytes": ...}], classes without a run left out."""
    which = np.searchsorted(np.asarray(EDGES), sizes, "right")
    count, nbytes = per_rank(runs, which, len(EDGES) + 1), per_rank(runs * sizes, which, len(EDGES) + 1)
    return [
        {"below": EDGES[i] if i < len(EDGES) else None, "runs": int(count[i]), "bytes": int(nbytes[i])}
        for i in range(len(EDGES) + 1)
        if count[i]
    ]


def same_host_bytes(plan: Plan) -> int:
    """Bytes whose both ends are on one host, where both hosts are known."""
    names = {host: i for i, host in enumerate(sorted({*plan.source_hosts, *plan.target_hosts} - {""}))}
    a = np.asarray([names.get(host, -1) for host in plan.source_hosts], np.int64)[plan.source_rank]
    b = np.asarray([names.get(host, -2) for host in plan.target_hosts], np.int64)[plan.target_rank]
    return int(plan.nbytes[a == b].sum())


def _spread(side: str, nbytes: Ints) -> dict[str, Any]:
    """Largest, mean and skew (largest over mean; 1.0 is perfect balance)."""
    mean = float(nbytes.mean()) if len(nbytes) else 0.0
    most = int(nbytes.max(initial=0))
    return {f"bytes_max_{side}": most, f"bytes_mean_{side}": mean, f"skew_{side}": most / mean if mean else 1.0}
