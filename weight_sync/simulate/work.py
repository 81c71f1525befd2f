"""Work: what a schedule asks of every pair of ranks, added up. A million transfers become some ten thousand flows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weight_sync.ids import ITEMSIZE
from weight_sync.plan.plan import Plan
from weight_sync.plan.runs import inner_elements
from weight_sync.plan.schedule import Method, Schedule
from weight_sync.simulate.fluid import Floats, Ints, summed

Bools = NDArray[np.bool_]
LONG = 1 << 18
"""Bytes from which on cuda_ipc leaves a contiguous range to the copy engines (COPY_FROM there; a test compares them)."""


@dataclass(frozen=True, slots=True)
class Round:
    """One staging round. source, target: ranks of a pair; nbytes, writes: of it. packed [trainers]: bytes copied before they
    are sent; placed [rollouts]: bytes copied after they arrived. made [trainers]: bytes that quantisation kernels read and
    write; staged [trainers]: share of what a rank sends in this round that lies in its staging buffer first; long: bytes of a
    pair in contiguous ranges of LONG and more, each transfer for itself; None: none."""

    source: Ints
    target: Ints
    nbytes: Floats
    writes: Floats
    packed: Floats
    placed: Floats
    made: Floats | None = None
    staged: Floats | None = None
    long: Floats | None = None


@dataclass(frozen=True, slots=True)
class Items:
    """What Python goes through one by one. params, sends [trainers]: parameters of a rank, transfers it sends; looked
    [trainers]: bytes of its weights that are quantised; receives [rollouts]: transfers of a worker."""

    params: Floats
    sends: Floats
    looked: Floats
    receives: Floats


@dataclass(frozen=True, slots=True)
class Work:
    """rounds: in order. sent [trainers], received [rollouts]: bytes in all, each hashed once. transfers: of the plan.
    items: None where they are not counted; they cost nothing then."""

    trainers: int
    rollouts: int
    rounds: tuple[Round, ...]
    sent: Floats
    received: Floats
    transfers: int
    items: Items | None = None

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
    runs, inner = _runs(plan)
    writes = _writes(plan, direct, runs, inner, bucket, bytes_ratio)
    # Column by column, pieces are small records in Python; there are few unless a model's cuts fit badly.
    pieces = schedule.pieces
    row, round_, kind = pieces.row, pieces.round, pieces.method
    size = pieces.nbytes.astype(np.float64) * bytes_ratio
    source_rank, target_rank = plan.source_rank, plan.target_rank
    made = plan.made.take(row)
    buffered = np.isin(kind, (int(Method.PACK), int(Method.BOTH)))
    copied = buffered & ~made
    late = np.isin(kind, (int(Method.UNPACK), int(Method.BOTH)))
    kernels = _kernel_bytes(plan, row, size, bytes_ratio) if made.any() else np.zeros(len(row))
    far = float(LONG if bucket >= LONG else np.inf)  # from where on a range is long
    long = np.where((runs == 1) & (nbytes >= far), nbytes, 0.0)
    rounds: list[Round] = []
    for r in range(schedule.rounds):
        here = round_ == r
        rows = np.concatenate([np.flatnonzero(direct) if r == 0 else np.zeros(0, np.int64), row[here]])
        amount = np.concatenate([nbytes[direct] if r == 0 else np.zeros(0), size[here]])
        count = np.concatenate([writes[direct] if r == 0 else np.zeros(0), np.ceil(size[here] / bucket).clip(1)])
        ranges = np.concatenate([long[direct] if r == 0 else np.zeros(0), np.where(size[here] >= far, size[here], 0.0)])
        pair = source_rank[rows] * plan.target_world + target_rank[rows]
        pairs, index = np.unique(pair, return_inverse=True)

        def by_source(mask: Bools, what: Floats, here: Bools = here) -> Floats:
            return summed(source_rank[row[here & mask]], what[here & mask], plan.source_world)

        sent = summed(source_rank[rows], amount, plan.source_world)
        rounds.append(
            Round(
                pairs // plan.target_world,
                pairs % plan.target_world,
                summed(index, amount, len(pairs)),
                summed(index, count, len(pairs)),
                by_source(copied, size),
                summed(target_rank[row[here & late]], size[here & late], plan.target_world),
                by_source(made, kernels),
                by_source(buffered, size) / np.maximum(sent, 1),
                summed(index, ranges, len(pairs)),
            )
        )
    return Work(
        plan.source_world,
        plan.target_world,
        tuple(rounds),
        summed(source_rank, nbytes, plan.source_world),
        summed(target_rank, nbytes, plan.target_world),
        len(plan),
        _items(plan),
    )


def _kernel_bytes(plan: Plan, row: Ints, size: Floats, ratio: float) -> Floats:
    """Bytes that quantisation kernels read and write for each piece; scales are made with their values and read nothing."""
    tensor = plan.tensor.take(row)
    elements = size / ratio / plan.itemsize.take(row) * plan.catalog.block.take(tensor, axis=0).prod(axis=1)
    weight = plan.source_columns.of_kind(lambda p: ITEMSIZE[p.dtype]).take(plan.source.take(row))
    return size + np.where(plan.catalog.leads.take(tensor), elements * weight, 0.0)


def _items(plan: Plan) -> Items:
    columns, world = plan.source_columns, plan.source_world
    looked = np.zeros(world)
    if plan.made.any():
        # Whole parameters: a rank that sends a part of one looks at that part alone, which is less.
        params = np.unique(plan.source[plan.made])
        looked = summed(columns.rank.take(params), columns.of_kind(lambda p: p.numel * ITEMSIZE[p.dtype]).take(params), world)
    return Items(
        np.bincount(columns.rank, minlength=world).astype(np.float64),
        np.bincount(plan.source_rank, minlength=world).astype(np.float64),
        looked,
        np.bincount(plan.target_rank, minlength=plan.target_world).astype(np.float64),
    )


def _runs(plan: Plan) -> tuple[Ints, Ints]:
    """(contiguous runs of each transfer, elements of one)"""
    inner = inner_elements(plan.shape, plan.source_strides, plan.target_strides)
    return plan.shape.prod(axis=1) // np.maximum(inner, 1), inner


def _writes(plan: Plan, direct: Bools, runs: Ints, inner: Ints, bucket: float, ratio: float) -> Floats:
    """Writes of each transfer when it travels directly, adjacent ones joined as the source does (a joined one counts 0)."""
    volume = plan.shape.prod(axis=1)
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
            None if round_.made is None else round_.made * engines,
            round_.staged,
            None if round_.long is None else np.tile(round_.long, engines),
        )

    items = work.items
    if items is not None:
        items = replace(items, sends=items.sends * engines, receives=np.tile(items.receives, engines))

    return Work(
        work.trainers,
        work.rollouts * engines,
        tuple(map(more, work.rounds)),
        work.sent * engines,
        np.tile(work.received, engines),
        work.transfers * engines,
        items,
    )
