"""Rollout ranks that get exactly the same, so that the proof looks at one of them only.

Engines are copies of each other: of 256 rollout ranks in 8 engines, 32 differ. That is never taken for granted. Two ranks are
twins only if their parameters are of the same kinds in the same order, and if each transfer to the one has its equal to the
other: the same tensor and box, into the same elements of the same parameter. A hash says which ranks to compare, and then every
number of both is compared. What holds of all that a rank receives then holds of all that its twin receives, whoever sends it.
Shares no code with the planner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from weight_sync.layout.rowwise import every
from weight_sync.layout.table import Bools, Ints, Layout
from weight_sync.plan.plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Twins:
    """order [transfers]: sorted by target parameter and start. rows, params [rollout ranks + 1]: where the transfers (in
    `order`) and the parameters of each rank begin. model [rollout ranks]: the first rank that gets the same; its own, if none
    before it does. models [n]: the transfers to ranks that are their own model. reads [n]: those, and what twins get from other
    places on the trainer than their model does: together, all that is read from anywhere.

    Of a plan whose parameters do not come rank by rank, no rank has a twin, and all transfers and parameters count as rank 0's.
    """

    order: Ints
    rows: Ints
    params: Ints
    model: Ints
    models: Ints
    reads: Ints

    def of_rank(self, rank: int) -> Ints:
        """The transfers to a rollout rank, in `order`."""
        return self.order[self.rows[rank] : self.rows[rank + 1]]

    def params_of_models(self) -> Bools:
        """[parameters]: which belong to a rank that is its own model."""
        own = self.model == np.arange(len(self.model))
        return np.repeat(own, np.diff(self.params))

    def laid_out_apart(self, layout: Layout) -> Ints:
        """The transfers to ranks that are their own model, or whose shards in this layout are not those of their model."""
        if (np.diff(layout.param) < 0).any():
            return self.order
        first = np.searchsorted(layout.param, self.params)
        columns = (layout.tensor, layout.offset, layout.shape, layout.start, layout.strides)

        def same(a: int, b: int) -> bool:
            one, other = slice(first[a], first[a + 1]), slice(first[b], first[b + 1])
            within = layout.param[one] - self.params[a], layout.param[other] - self.params[b]
            return np.array_equal(*within) and all(np.array_equal(c[one], c[other]) for c in columns)

        apart = [self.of_rank(a) for a, b in enumerate(self.model.tolist()) if a != b and not same(a, b)]
        return np.concatenate([self.models, *apart])


def twins(plan: Plan) -> Twins:
    """Compare all rollout ranks of a well-formed plan."""
    world, rank = plan.target_world, plan.target_columns.rank
    order = _by_target(plan)
    if (np.diff(rank) < 0).any():
        rows, params = (np.append(np.zeros(1, np.int64), np.full(world, n)) for n in (len(order), len(rank)))
        return Twins(order, rows, params, np.arange(world), order, order)
    params = np.searchsorted(rank, np.arange(world + 1))
    rows = np.searchsorted(plan.target.take(order), params)
    model = np.arange(world)
    found: dict[tuple[int, int, int], tuple[int, list[Ints]]] = {}
    models: list[Ints] = [order[:0]]
    other_reads: list[Ints] = [order[:0]]
    for r in range(world):
        mine = order[rows[r] : rows[r + 1]]
        kinds = plan.target_columns.kind[params[r] : params[r + 1]]
        received = [kinds, *_received(plan, mine, int(params[r]))]
        hasher = xxhash.xxh3_64()
        for column in received:
            hasher.update(np.ascontiguousarray(column).data)
        m, theirs = found.setdefault((len(kinds), len(mine), hasher.intdigest()), (r, received))
        if m == r or not all(map(np.array_equal, received, theirs)):
            models.append(mine)
            continue
        model[r] = m
        here, there = _read(plan, mine), _read(plan, order[rows[m] : rows[m + 1]])
        alike = np.logical_and.reduce([a == b if a.ndim == 1 else every(a == b) for a, b in zip(here, there, strict=True)])
        other_reads.append(mine[~alike])
    own = np.concatenate(models)
    return Twins(order, rows, params, model, own, np.concatenate([own, *other_reads]))


def _by_target(plan: Plan) -> Ints:
    """Transfers sorted by target parameter, then by start."""
    if not len(plan):
        return np.zeros(0, np.int64)
    low = int(plan.target_start.min())
    span = int(plan.target_start.max()) - low + 1
    if span * len(plan.target_params) < 1 << 63:
        return np.argsort(plan.target * span + (plan.target_start - low), kind="stable")
    return np.lexsort((plan.target_start, plan.target))  # a damaged plan: one number cannot hold both


def _received(plan: Plan, rows: Ints, first: int) -> Iterator[Ints]:
    """What a rank gets and where it goes; the parameter is counted within the rank, whose first one is given."""
    yield plan.target.take(rows) - first
    yield plan.tensor.take(rows)
    yield plan.target_start.take(rows)
    for column in (plan.offset, plan.shape, plan.target_strides):
        yield column.take(rows, axis=0)


def _read(plan: Plan, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Where transfers read."""
    return plan.source.take(rows), plan.source_start.take(rows), plan.source_strides.take(rows, axis=0)
