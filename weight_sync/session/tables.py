"""What the controller sends each rank: its part of the plan, as plain data (lists of integers and names)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weight_sync.errors import VerifyError, listed
from weight_sync.ids import Side
from weight_sync.layout.table import Ints
from weight_sync.plan.plan import Plan
from weight_sync.plan.schedule import Schedule
from weight_sync.session.digests import DIGITS

_DIGEST = re.compile(f"[0-9a-fA-F]{{{DIGITS}}}")


def target_table(schedule: Schedule, rank: int) -> dict[str, Any]:
    """The transfers that end on a rollout rank, and how its staged pieces unpack.

    transfers: columns; params by name; start, strides, shape in elements. pieces: [transfer, at, shape, stage byte] by round.
    loader: where HF tensors are put for the engine's own loader ({"bytes", "places": {name: [wave, first byte]}}); None where
    parameters are live ones.
    """
    plan = schedule.plan
    rows = plan.rows_to(rank)
    index = {row: i for i, row in enumerate(rows.tolist())}
    rounds: list[list[list[Any]]] = [[] for _ in range(schedule.rounds)]
    for piece in schedule.unpacked.get(rank, ()):
        rounds[piece.round].append([index[piece.row], list(piece.at), list(piece.shape), piece.stage])
    return {
        "plan": schedule.digest,
        "rank": rank,
        "tensors": [plan.catalog.name(t) for t in plan.tensor[rows].tolist()],
        "params": [plan.target_params[i].name for i in plan.target[rows].tolist()],
        "start": plan.target_start[rows].tolist(),
        "strides": plan.target_strides[rows].tolist(),
        "shape": plan.shape[rows].tolist(),
        "expected": expected_params(plan, rank),
        "stage_bytes": schedule.stage_bytes.get(rank, 0),
        "rounds": rounds,
        "loader": None
        if schedule.beside is None
        else {
            "bytes": int(schedule.beside.nbytes[rank]),
            "waves": schedule.beside.count,
            "places": schedule.beside.places(plan, rank),
        },
    }


def expected_params(plan: Plan, rank: int) -> dict[str, list[Any]]:
    """Name -> [shape, dtype] of every parameter the plan knows on a rollout rank: compared with the live ones at bind."""
    low, high = np.searchsorted(plan.target_param_rank, [rank, rank + 1])  # parameters are sorted by rank
    return {p.name: [list(p.shape), p.dtype] for p in plan.target_params[low:high]}


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


def merge_digests(plan: Plan, side: str, parts: Mapping[int, str], rows_of: Callable[[int], Ints]) -> Ints:
    """Digests of single ranks (16 hex digits each, one after another) put in the order of the plan, as uint64 in int64 bits.

    Raises VerifyError naming `side` and rank unless every transfer has exactly one digest.
    """
    merged = np.zeros(len(plan), np.uint64)
    seen = np.zeros(len(plan), np.bool_)
    for rank, text in parts.items():
        rows = rows_of(rank)
        if len(text) != DIGITS * len(rows):
            raise VerifyError(
                f"{side} rank {rank} reported {len(text)} hex digits for its {len(rows)} transfers, which have {DIGITS} each"
            )
        try:
            raw = bytes.fromhex(text)  # at once: there may be a hundred thousand
        except ValueError:
            raw = b""
        if len(raw) * 2 != len(text):  # fromhex() skips spaces
            at = next(at for at in range(0, len(text), DIGITS) if not _DIGEST.fullmatch(text, at, at + DIGITS))
            raise VerifyError(
                f"{side} rank {rank} reported {text[at : at + DIGITS]!r} where a digest of {DIGITS} hex digits is expected"
            )
        merged[rows] = np.frombuffer(raw, ">u8")
        seen[rows] = True
    if not seen.all():
        ranks = plan.source_rank if side == Side.TRAINER else plan.target_rank
        silent = sorted(set(ranks[~seen].tolist()))
        raise VerifyError(
            f"{int((~seen).sum())} of {len(plan)} transfers have no digest: {side} ranks {listed(silent)} sent none"
        )
    return merged.view(np.int64)
