"""Work: what a schedule asks of every pair of ranks, added up. A million transfers become some ten thousand flows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weight_sync.plan.plan import Plan
from weight_sync.plan.runs import inner_elements
from weight_sync.plan.schedule import Method, Schedule
from weight_sync.simulate.fluid import Floats, Ints, summed


@dataclass(frozen=True, slots=True)
class Round:
    """One staging round. source, target: ranks of a pair; nbytes, writes: of it. packed [trainers]: bytes copied before they
    are sent; placed [rollouts]: bytes copied after they arrived."""

    source: Ints
    target: Ints
    nbytes: Floats
    writes: Floats
    packed: Floats
    placed: Floats


@dataclass(frozen=True, slots=True)
class Work:
    """rounds: in order. sent [trainers], received [rollouts]: bytes in all, each hashed once. transfers: of the plan."""

    trainers: int
    rollouts: int
    rounds: tuple[Round, ...]
    sent: Floats
    received: Floats
    transfers: int

    @property
    def nbytes(self) -> float:
        return float(self.sent.sum())

    @property
    def writes(self) -> float:
        return float(sum(r.writes.sum() for r in self.rounds))


def work_of(schedule: Schedule, bucket: float = np.inf, bytes_ratio: float = 1.0) -> Work:
    """Add up a schedule. bucket: longer writes are cut to this many bytes.

    bytes_ratio: bytes on the wire for each byte planned, for a quantisation that the plan does not have yet.
    """
    plan = schedule.plan
    nbytes: Floats = (plan.nbytes * bytes_ratio).astype(np.float64)
    direct = schedule.method == Method.DIRECT
    writes = _writes(plan, direct, bucket, bytes_ratio)
    # Column by column, pieces are small records in Python; there are few unless a model's cuts fit badly.
    pieces = schedule.pieces
    row, round_, kind = pieces.row, pieces.round, pieces.method
    size = pieces.nbytes.astype(np.float64) * bytes_ratio
    copied = np.isin(kind, (int(Method.PACK), int(Method.BOTH)))
    staged = np.isin(kind, (int(Method.UNPACK), int(Method.BOTH)))
    source_rank, target_rank = plan.source_rank, plan.target_rank
    rounds: list[Round] = []
    for r in range(schedule.rounds):
        here = round_ == r
        rows = np.concatenate([np.flatnonzero(direct) if r == 0 else np.zeros(0, np.int64), row[here]])
        amount = np.concatenate([nbytes[direct] if r == 0 else np.zeros(0), size[here]])
        count = np.concatenate([writes[direct] if r == 0 else np.zeros(0), np.ceil(size[here] / bucket).clip(1)])
        pair = source_rank[rows] * plan.target_world + target_rank[rows]
        pairs, index = np.unique(pair, return_inverse=True)
        rounds.append(
            Round(
                pairs // plan.target_world,
                pairs % plan.target_world,
                summed(index, amount, len(pairs)),
                summed(index, count, len(pairs)),
                summed(source_rank[row[here & copied]], size[here & copied], plan.source_world),
                summed(target_rank[row[here & staged]], size[here & staged], plan.target_world),
            )
        )
    return Work(
        plan.source_world,
        plan.target_world,
        tuple(rounds),
        summed(source_rank, nbytes, plan.source_world),
        summed(target_rank, nbytes, plan.target_world),
        len(plan),
    )


def _writes(plan: Plan, direct: np.ndarray, bucket: float, ratio: float) -> Floats:
    """Writes of each transfer when it travels directly, adjacent ones joined as the source does (a joined one counts 0)."""
    inner = inner_elements(plan.shape, plan.source_strides, plan.target_strides)
    volume = plan.shape.prod(axis=1)
    runs = volume // np.maximum(inner, 1)
    follows = np.zeros(len(plan), np.bool_)
    whole = (runs == 1) & direct
    follows[1:] = (
        whole[1:] & whole[:-1]
        & (plan.source[1:] == plan.source[:-1]) & (plan.target[1:] == plan.target[:-1])
        & (plan.source_start[1:] == plan.source_start[:-1] + volume[:-1])
        & (plan.target_start[1:] == plan.target_start[:-1] + volume[:-1])
    )  # fmt: skip
    if not np.isfinite(bucket):
        return np.where(follows, 0, runs).astype(np.float64)
    # Joined transfers are one run of all their bytes.
    first = np.maximum.accumulate(np.where(follows, 0, np.arange(len(plan))))
    joined = np.bincount(first, np.where(whole, plan.nbytes, 0), len(plan)) * ratio
    each = np.where(whole, joined, inner * plan.itemsize * ratio)
    return np.where(follows, 0, runs * np.ceil(each / bucket).clip(1))


def repeated(work: Work, engines: int) -> Work:
    """Work to one engine, repeated for `engines` equal ones: every source sends every engine the same.

    A plan for all engines spreads boxes that several ranks hold over their holders anew for each engine; here the spread for
    one engine is kept, so a real plan is as good or better.
    """
    if engines == 1:
        return work

    def more(round_: Round) -> Round:
        shift = np.repeat(np.arange(engines), len(round_.source)) * work.rollouts
        return Round(
            np.tile(round_.source, engines),
            np.tile(round_.target, engines) + shift,
            np.tile(round_.nbytes, engines),
            np.tile(round_.writes, engines),
            round_.packed * engines,
            np.tile(round_.placed, engines),
        )

    return Work(
        work.trainers,
        work.rollouts * engines,
        tuple(map(more, work.rounds)),
        work.sent * engines,
        np.tile(work.received, engines),
        work.transfers * engines,
    )
