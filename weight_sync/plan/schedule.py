"""Schedule: how each transfer of a plan travels, under a byte budget.

A transfer whose runs are long is written run by run, straight into its final place. Where runs are short, one-sided writes
cost more in messages than in bytes, and the transfer is packed at the source (if it is contiguous at the destination), unpacked
at the destination (if contiguous at the source), or both. Unpacking goes through a bounded staging buffer in rounds. The choice
is made by the cost model, is part of the digest that all ranks compare, and is reported with its reason.

A transfer that is cast or made of a weight (quantised) is always packed at the source: its values are computed on the way into
the source's staging buffer. What is staged, written, digested and counted are the computed bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from weight_sync.layout.rowwise import product, total
from weight_sync.layout.table import Ints
from weight_sync.layout.values import cast_text
from weight_sync.plan.pieces import Piece, Pieces, cut, staged
from weight_sync.plan.plan import Plan
from weight_sync.plan.runs import inner_elements
from weight_sync.plan.straddle import KEPT_FROM, Straddles, straddles_of

if TYPE_CHECKING:
    from weight_sync.plan.waves import Waves

Floats = NDArray[np.float64]


class Method(IntEnum):
    """How a transfer travels."""

    DIRECT = 0
    PACK = 1
    UNPACK = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a message and a byte cost. seconds_per_write: of one message beyond its bytes. Rates in bytes/s.

    The defaults are Mooncake tcp on loopback (31 us a write, 2 GB/s) and a strided copy on one core. `bench` measures others.
    """

    seconds_per_write: float = 31e-6
    wire: float = 2.0e9
    copy: float = 3.0e9


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of staging on each side (registered memory beyond the weights), and the largest single staged piece."""

    source: int = 64 << 20
    target: int = 64 << 20

    @property
    def piece(self) -> int:
        # Two pieces fit each buffer, so that one is filled while the other is on the wire.
        return min(self.source, self.target) // 2


@dataclass(frozen=True, eq=False)
class Schedule:
    """method: of every transfer of the plan. pieces: of all that are not DIRECT.

    beside, parts: where engines' own loaders take HF tensors (plan/waves.py), when each travels, and each wave's own schedule;
    rounds of pieces are then counted through all waves.
    """

    plan: Plan
    method: Ints
    pieces: Pieces
    costs: CostModel
    budget: Budget
    beside: Waves | None = None
    parts: tuple[Schedule, ...] = ()

    @property
    def waves(self) -> tuple[Schedule, ...]:
        """What is written one after the other: all at once, or wave by wave."""
        return self.parts or (self,)

    @property
    def rounds(self) -> int:
        """Staging rounds; round 0 (of each wave) also carries everything that is not staged."""
        return sum(part.rounds for part in self.parts) if self.parts else 1 + int(self.pieces.round.max(initial=0))

    @cached_property
    def unpacked(self) -> dict[int, list[Piece]]:
        """Pieces that each rollout rank unpacks, in the order of the plan."""
        found: dict[int, list[Piece]] = {}
        ranks: list[int] = self.plan.target_rank.tolist()
        for p in self.pieces.of(np.flatnonzero(np.isin(self.method, (Method.UNPACK, Method.BOTH)))):
            found.setdefault(ranks[p.row], []).append(p)
        return found

    @cached_property
    def stage_bytes(self) -> dict[int, int]:
        """Staging bytes needed by each rollout rank that unpacks."""
        late = np.flatnonzero(np.isin(self.pieces.method, (Method.UNPACK, Method.BOTH)))
        rank = self.plan.target_rank.take(self.pieces.row.take(late))
        most = np.zeros(self.plan.target_world, np.int64)
        np.maximum.at(most, rank, (self.pieces.stage + self.pieces.nbytes).take(late))
        return {rank: int(most[rank]) for rank in dict.fromkeys(rank.tolist())}

    @cached_property
    def straddles(self) -> Straddles:
        """Groups of quantised weights that lie on several trainer ranks."""
        whole = any(p.made is not None and p.made.part == "global" for p in self.plan.catalog.patterns)
        return straddles_of(self.plan, whole)

    @cached_property
    def digest(self) -> str:
        hasher = xxhash.xxh3_128(f"{self.plan.digest} {self.costs} {self.budget}".encode())
        hasher.update(np.ascontiguousarray(self.method, "<i8").data)
        pieces = self.pieces
        for column in (pieces.row, pieces.method, pieces.at, pieces.shape, pieces.round, pieces.stage):
            hasher.update(np.ascontiguousarray(column, "<i8").data)
        for column in () if self.beside is None else (self.beside.wave, self.beside.first):
            hasher.update(np.ascontiguousarray(column, "<i8").data)
        return hasher.hexdigest()

    def summary(self) -> dict[str, dict[str, int]]:
        """For each method: transfers and bytes."""
        nbytes = self.plan.nbytes
        return {
            m.name.lower(): {"transfers": int((self.method == m).sum()), "bytes": int(nbytes[self.method == m].sum())}
            for m in Method
        }

    def reason(self, row: int) -> str:
        """Why a transfer travels as it does, with the numbers."""
        direct, packed, runs, run_bytes = (int(x) if i > 1 else float(x) for i, x in enumerate(_costs(self, row)))
        method = Method(int(self.method[row]))
        if self.plan.computed[row]:
            also = "" if method is Method.PACK else ", unpacked at the destination"
            part = self.plan.target_params[int(self.plan.target[row])].part
            what = f"{part} made" if part else cast_text(*self.plan.dtypes(row))
            return f"{what} while it is packed at the source{also}"
        if method is Method.DIRECT:
            return f"direct: {runs} run(s) of {run_bytes} bytes, {direct * 1e6:.0f} us against {packed * 1e6:.0f} us packed"
        where = {Method.PACK: "packed at the source", Method.UNPACK: "unpacked at the destination"}
        return (
            f"{where.get(method, 'packed at the source and unpacked at the destination')}: {runs} runs of {run_bytes} bytes "
            f"would take {direct * 1e6:.0f} us, packed {packed * 1e6:.0f} us"
        )


def make_schedule(plan: Plan, costs: CostModel | None = None, budget: Budget | None = None) -> Schedule:
    """Choose a method for every transfer and lay out the staging rounds. Deterministic."""
    costs, budget = costs or CostModel(), budget or Budget()
    method = np.zeros(len(plan), np.int64)
    for first in range(0, len(plan), _AT_ONCE):
        few = slice(first, first + _AT_ONCE)
        method[few] = _methods(plan, few, costs)
    rows = _turns(plan, np.flatnonzero(method != Method.DIRECT))
    sizes, itemsize = plan.shape.take(rows, axis=0), plan.itemsize.take(rows)
    index, at, shape = cut(rows, sizes, itemsize, budget.piece, _steps(plan, rows, budget.piece))
    row = rows.take(index)
    nbytes = product(shape) * itemsize.take(index)
    round_, stage = np.zeros_like(row), np.zeros_like(row)
    late = np.flatnonzero(method.take(row) != Method.PACK)
    round_[late], stage[late] = staged(plan.target_rank.take(row.take(late)), nbytes.take(late), budget.target)
    order = np.argsort(row, kind="stable")  # the pieces of a row stay in row-major order
    columns = (row, method.take(row), at, shape, nbytes, round_, stage)
    pieces = Pieces(*(column.take(order, axis=0) for column in columns))
    return Schedule(plan, method, pieces, costs, budget)


_AT_ONCE = 1 << 17
"""Transfers whose methods are chosen at once: few enough that what is computed on the way stays in the cache."""


def _methods(plan: Plan, rows: slice, costs: CostModel) -> Ints:
    shape, source, target = plan.shape[rows], plan.source_strides[rows], plan.target_strides[rows]
    inner, volume = inner_elements(shape, source, target), product(shape)
    source_whole, target_whole = inner_elements(shape, source) == volume, inner_elements(shape, target) == volume
    direct, packed = _seconds(plan.nbytes[rows], volume // np.maximum(inner, 1), source_whole, target_whole, costs)
    method = np.select(
        [direct <= packed, target_whole, source_whole],
        [np.int64(Method.DIRECT), np.int64(Method.PACK), np.int64(Method.UNPACK)],
        np.int64(Method.BOTH),
    )
    return np.where(plan.computed[rows], np.where(target_whole, np.int64(Method.PACK), np.int64(Method.BOTH)), method)


def _turns(plan: Plan, rows: Ints) -> Ints:
    """Staged transfers in the order in which staging rounds are filled.

    All senders of a destination advance by bytes together. In the order of the plan, which is sorted by sender, a round would
    be filled by one or two of them while the others wait for it.
    """
    if not len(rows):
        return rows
    source, target, nbytes = plan.source_rank.take(rows), plan.target_rank.take(rows), plan.nbytes.take(rows)
    pair = source * plan.target_world + target
    order = np.argsort(pair, kind="stable")
    before = np.cumsum(nbytes.take(order)) - nbytes.take(order)
    first = np.flatnonzero(np.append(True, np.diff(pair.take(order)) != 0))
    sent = np.empty_like(before)
    sent[order] = before - np.repeat(before[first], np.diff(np.append(first, len(rows))))
    # Destinations begin with different senders, or all would wait for the same few. Which one follows from the boxes that a
    # destination receives, not from its rank: an engine that stays must not unpack in another order when another one leaves.
    weights = np.arange(31, 31 + plan.offset.shape[1], dtype=np.int64)
    box: Ints = (plan.tensor + 1) * 1_000_003 + total(plan.offset * weights)
    first_sender = np.zeros(plan.target_world, np.int64)
    np.add.at(first_sender, plan.target_rank, box)
    turn: Ints = np.lexsort(((source - first_sender.take(target)) % plan.source_world, sent))
    return rows.take(turn)


def _seconds(nbytes: Ints, runs: Ints, source_whole: Ints, target_whole: Ints, costs: CostModel) -> tuple[Floats, Floats]:
    copies = (~source_whole).astype(np.int64) + (~target_whole)
    direct = runs * costs.seconds_per_write + nbytes / costs.wire
    packed = costs.seconds_per_write + nbytes / costs.wire + copies * nbytes / costs.copy
    return direct, packed


def _costs(schedule: Schedule, row: int) -> tuple[float, float, int, int]:
    plan, one = schedule.plan, slice(row, row + 1)
    shape = plan.shape[one]
    inner = inner_elements(shape, plan.source_strides[one], plan.target_strides[one])
    volume = shape.prod(axis=1)
    runs = volume // np.maximum(inner, 1)
    source = inner_elements(shape, plan.source_strides[one]) == volume
    target = inner_elements(shape, plan.target_strides[one]) == volume
    direct, packed = _seconds(plan.nbytes[one], runs, source, target, schedule.costs)
    return float(direct[0]), float(packed[0]), int(runs[0]), int(inner[0] * plan.itemsize[row])


def _steps(plan: Plan, rows: Ints, limit: int) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Row -> (step, phase) of transfers that must be cut so that every group of their weight is in one piece.

    Groups of which the source keeps the magnitudes may be cut anywhere.
    """
    result: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    large = rows[plan.made[rows] & (plan.nbytes[rows] > limit)]
    for row in large.tolist():
        made = plan.catalog.pattern_of(int(plan.tensor[row])).made
        if made is not None and prod(made.group) < KEPT_FROM:
            step = [max(1, g // b) for g, b in zip(made.group, made.block, strict=True)]
            step += [1] * (plan.catalog.ndim - len(step))
            offset: list[int] = plan.offset[row].tolist()
            result[row] = tuple(step), tuple(o % s for o, s in zip(offset, step, strict=True))
    return result
