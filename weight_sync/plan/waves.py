"""Waves: whole HF tensors for an engine's own loader, as many at a time as fit into a declared number of bytes.

A loader must see some tensors in one call: what it fuses, and values with their scales. Such tensors make a brick: what one
module of a layer holds (a layer's attention, a layer's dense MLP), or one expert. Bricks are put into waves in the order of the
catalog, the same for all ranks, so that no rank holds more than the budget in any wave. Each wave is a part of the plan with a
schedule of its own; a pure function, as all planning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from weight_sync.errors import PlanError, listed
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.table import Ints
from weight_sync.plan.pieces import Pieces
from weight_sync.plan.plan import COLUMNS, Plan
from weight_sync.plan.schedule import Budget, CostModel, Schedule, make_schedule

ALIGN = 256
"""Bytes. Where a tensor may begin in the staging memory."""

_BRICK = re.compile(r"(?P<expert>.*\.experts\.\d+)\.|(?P<layer>.*\.layers\.\d+\.[^.]+)\.|(?P<module>.*)\.[^.]*")


def brick(name: str) -> str:
    """Tensors with the same brick are loaded by one call."""
    found = _BRICK.match(name)
    return name if found is None else next(group for group in found.groups() if group is not None)


@dataclass(frozen=True, eq=False)
class Waves:
    """wave: of every parameter of the plan's target. first: byte of the staging memory where it begins. count: of waves.

    nbytes: staging memory that each rollout rank needs.
    """

    wave: Ints
    first: Ints
    count: int
    nbytes: Ints

    def places(self, plan: Plan, rank: int) -> dict[str, list[int]]:
        """{HF name: [wave, first byte]} of one rollout rank."""
        low, high = np.searchsorted(plan.target_param_rank, [rank, rank + 1]).tolist()
        return {plan.target_params[i].name: [int(self.wave[i]), int(self.first[i])] for i in range(low, high)}


def schedule_in_waves(plan: Plan, costs: CostModel, budget: Budget, nbytes: int) -> Schedule:
    """The schedule of a plan into whole HF tensors of which a rollout rank holds `nbytes` at a time. Deterministic."""
    beside = make_waves(plan, nbytes)
    of = beside.wave[plan.target]
    rows = [np.flatnonzero(of == number) for number in range(beside.count)]
    parts = tuple(
        make_schedule(replace(plan, **{name: getattr(plan, name)[mine] for name in COLUMNS}), costs, budget) for mine in rows
    )
    method = np.zeros(len(plan), np.int64)
    columns: list[tuple[Ints, ...]] = []
    before = 0
    for mine, part in zip(rows, parts, strict=True):
        method[mine] = part.method
        p = part.pieces
        columns.append((mine[p.row], p.method, p.at, p.shape, p.nbytes, p.round + before, p.stage))
        before += part.rounds
    joined = [np.concatenate(each) for each in zip(*columns, strict=True)]
    order = np.argsort(joined[0], kind="stable")
    return Schedule(plan, method, Pieces(*(column[order] for column in joined)), costs, budget, beside, parts)


def make_waves(plan: Plan, budget: int) -> Waves:
    """Spread the parameters of the plan's target, which are whole HF tensors, over waves of at most `budget` bytes a rank.

    Raises PlanError for a brick that is larger, with the budget that would do.
    """
    params = plan.target_params
    nbytes = np.fromiter((-(-p.numel * ITEMSIZE[p.dtype] // ALIGN) * ALIGN for p in params), np.int64, len(params))
    order = {name: i for i, name in enumerate(sorted({p.name for p in params}, key=plan.catalog.ids.__getitem__))}
    bricks: dict[str, int] = {}
    of_name = {name: bricks.setdefault(brick(name), len(bricks)) for name in order}
    number = np.fromiter((of_name[p.name] for p in params), np.int64, len(params))
    rank = plan.target_param_rank
    sizes = np.zeros((len(bricks), plan.target_world), np.int64)
    np.add.at(sizes, (number, rank), nbytes)
    if (large := sizes.max(axis=1, initial=0)).max(initial=0) > budget:
        names = list(bricks)
        raise PlanError(
            f"weight_sync.landing.budget={budget}: tensors that the engine's loader must see together need more: "
            + listed(f"{names[i]} {large[i]} bytes" for i in np.flatnonzero(large > budget).tolist())
            + f"; at least {int(large.max())} is needed"
        )
    wave_of, current, held = np.zeros(len(bricks), np.int64), 0, np.zeros(plan.target_world, np.int64)
    most = np.zeros(plan.target_world, np.int64)
    for i in range(len(bricks)):
        if (held + sizes[i] > budget).any():
            current, held = current + 1, np.zeros_like(held)
        wave_of[i] = current
        held = held + sizes[i]
        most = np.maximum(most, held)
    wave = wave_of[number]
    first = np.zeros(len(params), np.int64)
    position = np.fromiter((order[p.name] for p in params), np.int64, len(params))
    by_place = np.lexsort((position, wave, rank))
    running = np.cumsum(nbytes[by_place]) - nbytes[by_place]
    new = np.append(True, (np.diff(wave[by_place]) != 0) | (np.diff(rank[by_place]) != 0)) if len(params) else np.zeros(0, bool)
    start = np.maximum.accumulate(np.where(new, running, 0)) if len(params) else running
    first[by_place] = running - start
    return Waves(wave, first, current + 1, most)
