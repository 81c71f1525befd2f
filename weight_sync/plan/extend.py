"""A plan grows or shrinks by one engine without being made anew.

Engines are alike: what one of them needs, the first one needs too. So an engine that joins gets the boxes of engine 0, and only
who sends them is chosen, from the load that every trainer rank has already. Nothing changes for the engines that were there:
their transfers stay as they are, and so do their bindings. A pure function of its arguments, as planning is: every rank that
holds the same plan gets the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weight_sync.errors import PlanError
from weight_sync.layout.table import Bools, Ints, Layout
from weight_sync.plan.boxes import Boxes, distinct_boxes, holders
from weight_sync.plan.complete import know_magnitudes
from weight_sync.plan.plan import COLUMNS, Plan
from weight_sync.plan.planner import Cells, choose_together, join
from weight_sync.plan.proof import prove_exact_once

_DESTINATION = ("tensor", "offset", "shape", "target", "target_start", "target_strides")


def add_engine(
    plan: Plan, source: Layout, hosts: Sequence[str], *, dropped: Sequence[str] = (), avoid: Sequence[int] = ()
) -> Plan:
    """The plan with one more engine, the last one.

    source: the trainer layout that `plan` was made for. hosts: of the engine's workers, "" where unknown; as many as every
    engine of the plan has. dropped, avoid: as for the plan. The new transfers are proved exact-once, those that were there to
    be unchanged. Raises PlanError otherwise.
    """
    width = len(hosts)
    place = _engines(plan, width)
    if plan.source_params != source.params or plan.catalog.digest != source.catalog.digest:
        raise PlanError("the plan was not made for this trainer layout, and cannot be extended by it")
    first = engine_part(plan, 0, width)
    row = _sources(plan, first, source, hosts, avoid)
    block = plan.catalog.block[first.tensor]
    moved = first.offset * block - source.offset[row]
    new = {name: getattr(first, name) for name in COLUMNS} | {
        "source": source.param[row],
        "source_start": source.start[row] + (moved * source.strides[row]).sum(axis=1),
        "source_strides": source.strides[row] * block,
        "target": first.target + len(plan.target_params),
    }
    columns = {name: np.concatenate([getattr(plan, name), new[name]]) for name in COLUMNS}
    # Transfers from one rank to one parameter are all old or all new: the old ones stay in the order they have.
    within = np.concatenate([np.arange(len(plan)), new["target_start"]])
    order = np.lexsort((within, columns["target"], source.param_rank[columns["source"]]))
    extended = replace(
        plan,
        target_params=(*plan.target_params, *(replace(p, rank=place * width + p.rank) for p in first.target_params)),
        target_world=plan.target_world + width,
        target_hosts=(*plan.target_hosts, *hosts),
        **{name: column[order] for name, column in columns.items()},
    )
    old = np.flatnonzero(extended.target_rank < plan.target_world)
    if not all(np.array_equal(getattr(extended, name)[old], getattr(plan, name)) for name in COLUMNS):
        raise PlanError("extending the plan changed transfers of engines that were there before")
    added = engine_part(extended, place, width)
    prove_exact_once(added, dropped, source=source)
    by_place, by_place_first = (np.lexsort((part.target_start, part.target)) for part in (added, first))
    if not all(np.array_equal(getattr(added, n)[by_place], getattr(first, n)[by_place_first]) for n in _DESTINATION):
        raise PlanError("the engine that was added gets other boxes than engine 0")
    return extended


def drop_engine(plan: Plan, place: int, width: int) -> Plan:
    """The plan without the engine at `place`; those behind it move up by one. width: workers of an engine."""
    engines = _engines(plan, width)
    if not 0 <= place < engines or engines == 1:
        raise PlanError(f"cannot drop engine {place} of {engines}: a plan keeps at least one")
    low, high = place * width, (place + 1) * width
    first, last = np.searchsorted(plan.target_param_rank, [low, high]).tolist()
    rows = np.flatnonzero((plan.target_rank < low) | (plan.target_rank >= high))
    columns: dict[str, Ints] = {name: getattr(plan, name)[rows] for name in COLUMNS}
    columns["target"] = columns["target"] - (last - first) * (columns["target"] >= last)
    shrunk = replace(
        plan,
        target_params=plan.target_params[:first] + tuple(replace(p, rank=p.rank - width) for p in plan.target_params[last:]),
        target_world=plan.target_world - width,
        target_hosts=plan.target_hosts[:low] + plan.target_hosts[high:],
        **columns,
    )
    for now, before in enumerate(e for e in range(engines) if e != place):
        if engine_part(shrunk, now, width).digest != engine_part(plan, before, width).digest:
            raise PlanError(f"dropping engine {place} changed the transfers of engine {before}")
    know_magnitudes(shrunk)  # scales may come from a rank that sent values of their groups to the engine that left alone
    return shrunk


def engine_part(plan: Plan, place: int, width: int) -> Plan:
    """The plan of one engine alone, as engine 0. width: workers of an engine."""
    low, high = place * width, (place + 1) * width
    first, last = np.searchsorted(plan.target_param_rank, [low, high]).tolist()
    rows = np.sort(np.concatenate([plan.rows_to(rank) for rank in range(low, high)]))
    columns: dict[str, Ints] = {name: getattr(plan, name)[rows] for name in COLUMNS}
    columns["target"] = columns["target"] - first
    return replace(
        plan,
        target_params=tuple(replace(p, rank=p.rank - low) for p in plan.target_params[first:last]),
        target_world=width,
        target_hosts=plan.target_hosts[low:high],
        **columns,
    )


def _engines(plan: Plan, width: int) -> int:
    if width < 1 or plan.target_world % width:
        raise PlanError(f"the plan has {plan.target_world} rollout ranks, which are no engines of {width} workers each")
    return plan.target_world // width


def _sources(plan: Plan, first: Plan, source: Layout, hosts: Sequence[str], avoid: Sequence[int]) -> Ints:
    """The source shard of each transfer that the new engine gets, which has the box of one that engine 0 gets."""
    held = holders(source, distinct_boxes(source))
    catalog = plan.catalog
    block, base, leads = catalog.block[first.tensor], catalog.base[first.tensor], catalog.leads[first.tensor]
    low = first.offset * block
    # Of scales only the first block's first element is looked for: whoever holds that sends them.
    high = np.where(leads[:, None], np.minimum(low + first.shape * block, catalog.shapes[base]), low + 1)
    order = np.lexsort((np.arange(len(first)), base))
    wanted, box, _, size = join(held.boxes, Boxes(base[order], low[order], (high - low)[order], np.arange(len(first))))
    if not (np.array_equal(wanted, np.arange(len(first))) and np.array_equal(size, (high - low)[order])):
        raise PlanError("the plan was not made for this trainer layout: its transfers are cut in other places")
    box = box[np.argsort(order)]
    load = np.bincount(plan.source_rank, weights=plan.nbytes, minlength=source.world).astype(np.int64).tolist()
    names = list(plan.source_hosts), list(hosts)
    pair = _pairs(first, base, box, low, high, leads)
    cells = Cells(low, high, first.offset, first.offset + first.shape, block)
    return choose_together(
        source, first.target_rank, box, pair, leads, cells, held, first.nbytes, *names, avoid=avoid, load=load
    )


def _pairs(first: Plan, base: Ints, box: Ints, low: Ints, high: Ints, leads: Bools) -> Ints:
    """For each transfer its own number; for scales, that of the values to the same rank which their first block begins in.

    Scales whose values go to other ranks alone have a number of their own.
    """
    pair = np.arange(len(first), dtype=np.int64)
    if leads.all():
        return pair
    ranks: list[int] = first.target_rank.tolist()
    bases: list[int] = base.tolist()
    boxes: list[int] = box.tolist()
    keys = list(zip(ranks, bases, boxes, strict=True))
    values: dict[tuple[int, int, int], list[int]] = {}
    leading: list[int] = np.flatnonzero(leads & first.made).tolist()
    following: list[int] = np.flatnonzero(~leads).tolist()
    for row in leading:
        values.setdefault(keys[row], []).append(row)
    for row in following:
        for other in values.get(keys[row], ()):
            if (low[other] <= low[row]).all() and (low[row] < high[other]).all():
                pair[row] = other
    return pair
