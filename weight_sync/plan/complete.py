"""What a plan of quantised weights must be beyond exact-once, for values and scales are of use only together.

Groups are those over which a scheme takes the largest magnitude; here they are counted as cells of the weight's grid. Shares no
code with the planner.
"""

from __future__ import annotations

import numpy as np

from weight_sync.errors import PlanError, listed
from weight_sync.layout.rowwise import product, some
from weight_sync.layout.table import Bools, Ints
from weight_sync.plan.plan import Plan
from weight_sync.plan.tiling import covered, distinct


def scales_of_all_values(plan: Plan, transfers: Ints | None = None) -> None:
    """Raise PlanError unless every rollout rank gets, with values, all else that is made of their groups, and not of others.

    transfers: all to some ranks, whose likes others get; None: all.
    """
    rows = _made(plan, transfers)
    key = plan.target_rank.take(rows) * len(plan.catalog) + plan.catalog.base.take(plan.tensor.take(rows))
    low, high = _cells(plan, rows)
    values, kinds = _kinds(plan, rows)
    for part, of in kinds.items():
        if part == "values":
            continue
        # Of the values' weights alone: all parts of a weight are in the catalog together.
        lacking = ~_covered_by(key, low, high, values, of)
        if len(bad := rows[values][lacking]):
            said = (
                f"{plan.catalog.name(int(plan.catalog.base[plan.tensor[i]]))} on rollout rank {int(plan.target_rank[i])}"
                for i in bad.tolist()
            )
            raise PlanError(
                f"not exact-once: values would arrive without the {part} of their groups: {listed(dict.fromkeys(said))}"
            )


def know_magnitudes(plan: Plan, transfers: Ints | None = None) -> None:
    """Raise PlanError unless scales come from a parameter that also sends values of each of their groups.

    Only such a rank looks at the group, or hears of what others see of it. transfers: those that read all that is read; None:
    all.
    """
    rows = _made(plan, transfers)
    if not len(rows):
        return
    key = plan.source.take(rows) * len(plan.catalog) + plan.catalog.base.take(plan.tensor.take(rows))
    low, high = _cells(plan, rows)
    values, kinds = _kinds(plan, rows)
    if "scales" not in kinds:
        return
    scales = kinds["scales"]
    unknown = ~_covered_by(key, low, high, scales, values)
    if len(bad := np.sort(rows[scales][unknown])):
        said = (
            f"{plan.catalog.name(int(plan.tensor[i]))} from trainer rank {int(plan.source_rank[i])} to rollout rank "
            f"{int(plan.target_rank[i])}"
            for i in bad.tolist()
        )
        raise PlanError(f"not exact-once: scales would come from a rank that sends no values of their groups: {listed(said)}")


def one_cut(plan: Plan, transfers: Ints | None = None) -> None:
    """Raise PlanError where groups are cut and rollout ranks hold the weight cut in different ways.

    A group's magnitude is the largest of what the ranks say that send a part of it. They see all of it only if their parts are
    of one cut: a rank that gets the group whole from somebody else says nothing of the rest. transfers: those that have all
    boxes that are sent; None: all.
    """
    rows = _made(plan, transfers)
    rows = rows[plan.catalog.leads.take(plan.tensor.take(rows))]
    if not len(rows):
        return
    catalog = plan.catalog
    base, group, low, high = _boxes(plan, rows)
    cut = some((low % group != 0) | ((high % group != 0) & (high != catalog.shapes.take(base, axis=0))))
    if not cut.any():
        return
    boxes, _ = distinct(np.column_stack([base, low, high]))
    each = np.zeros(len(catalog), np.int64)
    np.add.at(each, boxes[:, 0], product(boxes[:, 1 + catalog.ndim :] - boxes[:, 1 : 1 + catalog.ndim]))
    several = np.zeros(len(catalog), np.bool_)
    several[base[cut]] = True
    if bad := np.flatnonzero(several & (each > product(catalog.shapes))).tolist():
        raise PlanError(
            "not exact-once: groups that share one scale are cut, and rollout ranks hold their weights cut in different ways, "
            f"so no rank sees whole groups: {listed(catalog.name(t) for t in bad)}"
        )


def _made(plan: Plan, transfers: Ints | None) -> Ints:
    return np.flatnonzero(plan.made) if transfers is None else transfers[plan.made.take(transfers)]


def _covered_by(key: Ints, low: Ints, high: Ints, mine: Bools, theirs: Bools) -> Bools:
    """For each row marked in `mine`, whether the union of those with the same key in `theirs` covers its cells."""
    a, b = np.flatnonzero(mine), np.flatnonzero(theirs)
    boxes, by = ((key.take(i), low.take(i, axis=0), high.take(i, axis=0)) for i in (a, b))
    return covered(boxes, by)


def _boxes(plan: Plan, rows: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """(weight, its groups, first, one past the last element in each dim) that transfers stand for."""
    catalog, tensor, offset = plan.catalog, plan.tensor.take(rows), plan.offset.take(rows, axis=0)
    base, block = catalog.base.take(tensor), catalog.block.take(tensor, axis=0)
    high = np.minimum((offset + plan.shape.take(rows, axis=0)) * block, catalog.shapes.take(base, axis=0))
    return base, catalog.group.take(tensor, axis=0), offset * block, high


def _cells(plan: Plan, rows: Ints) -> tuple[Ints, Ints]:
    """(first, one past the last) group in each dim that transfers have a share in."""
    _, group, low, high = _boxes(plan, rows)
    return low // group, -(-high // group)


def _kinds(plan: Plan, rows: Ints) -> tuple[Bools, dict[str, Bools]]:
    """(which of these transfers are of values, the same for every part)."""
    names = sorted({p.part for p in plan.target_columns.kinds})
    index = {name: i for i, name in enumerate(names)}
    of = plan.target_columns.of_kind(lambda p: index[p.part]).take(plan.target.take(rows))
    kinds = {name: of == i for i, name in enumerate(names) if name}
    return kinds.get("values", np.zeros(len(rows), np.bool_)), kinds
