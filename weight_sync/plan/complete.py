"""What a plan of quantised weights must be beyond exact-once, for values and scales are of use only together.

Groups are those over which a scheme takes the largest magnitude; here they are counted as cells of the weight's grid. Shares no
code with the planner.
"""

from __future__ import annotations

import numpy as np

from weight_sync.errors import PlanError, listed
from weight_sync.layout.table import Bools, Ints
from weight_sync.plan.plan import Plan
from weight_sync.plan.tiling import covered, distinct


def scales_of_all_values(plan: Plan) -> None:
    """Raise PlanError unless every rollout rank gets, with values, all else that is made of their groups, and not of others."""
    rows = np.flatnonzero(plan.made)
    key = plan.target_rank * len(plan.catalog) + plan.catalog.base[plan.tensor]
    low, high = _cells(plan, rows)
    values, kinds = _kinds(plan, rows)
    for part, of in kinds.items():
        if part == "values":
            continue
        # Of the values' weights alone: all parts of a weight are in the catalog together.
        lacking = values & ~covered((key[rows], low, high), (key[rows][of], low[of], high[of]))
        if len(bad := rows[lacking]):
            said = (
                f"{plan.catalog.name(int(plan.catalog.base[plan.tensor[i]]))} on rollout rank {int(plan.target_rank[i])}"
                for i in bad.tolist()
            )
            raise PlanError(
                f"not exact-once: values would arrive without the {part} of their groups: {listed(dict.fromkeys(said))}"
            )


def know_magnitudes(plan: Plan) -> None:
    """Raise PlanError unless scales come from a parameter that also sends values of each of their groups.

    Only such a rank looks at the group, or hears of what others see of it.
    """
    rows = np.flatnonzero(plan.made)
    if not len(rows):
        return
    key = plan.source * len(plan.catalog) + plan.catalog.base[plan.tensor]
    low, high = _cells(plan, rows)
    values, kinds = _kinds(plan, rows)
    if "scales" not in kinds:
        return
    unknown = kinds["scales"] & ~covered((key[rows], low, high), (key[rows][values], low[values], high[values]))
    if len(bad := rows[unknown]):
        said = (
            f"{plan.catalog.name(int(plan.tensor[i]))} from trainer rank {int(plan.source_rank[i])} to rollout rank "
            f"{int(plan.target_rank[i])}"
            for i in bad.tolist()
        )
        raise PlanError(f"not exact-once: scales would come from a rank that sends no values of their groups: {listed(said)}")


def one_cut(plan: Plan) -> None:
    """Raise PlanError where groups are cut and rollout ranks hold the weight cut in different ways.

    A group's magnitude is the largest of what the ranks say that send a part of it. They see all of it only if their parts are
    of one cut: a rank that gets the group whole from somebody else says nothing of the rest.
    """
    rows = np.flatnonzero(plan.made & plan.catalog.leads[plan.tensor])
    if not len(rows):
        return
    catalog = plan.catalog
    base, block = catalog.base[plan.tensor[rows]], catalog.block[plan.tensor[rows]]
    low = plan.offset[rows] * block
    high = np.minimum((plan.offset[rows] + plan.shape[rows]) * block, catalog.shapes[base])
    boxes, _ = distinct(np.column_stack([base, low, high, catalog.group[plan.tensor[rows]]]))
    base, (low, high, group) = boxes[:, 0], np.split(boxes[:, 1:], 3, axis=1)
    cut = ((low % group != 0) | ((high % group != 0) & (high != catalog.shapes[base]))).any(axis=1)
    volume, several = np.zeros(len(catalog), np.int64), np.zeros(len(catalog), np.bool_)
    np.add.at(volume, base, (high - low).prod(axis=1))
    several[base[cut]] = True
    if bad := np.flatnonzero(several & (volume > catalog.shapes.prod(axis=1))).tolist():
        raise PlanError(
            "not exact-once: groups that share one scale are cut, and rollout ranks hold their weights cut in different ways, "
            f"so no rank sees whole groups: {listed(catalog.name(t) for t in bad)}"
        )


def _cells(plan: Plan, rows: Ints) -> tuple[Ints, Ints]:
    """(first, one past the last) group in each dim that transfers have a share in."""
    catalog, group = plan.catalog, plan.catalog.group[plan.tensor[rows]]
    base, block = catalog.base[plan.tensor[rows]], catalog.block[plan.tensor[rows]]
    low = plan.offset[rows] * block
    high = np.minimum((plan.offset[rows] + plan.shape[rows]) * block, catalog.shapes[base])
    return low // group, -(-high // group)


def _kinds(plan: Plan, rows: Ints) -> tuple[Bools, dict[str, Bools]]:
    """(which of these transfers are of values, the same for every part)."""
    names = sorted({p.part for p in plan.target_params})
    index = {name: i for i, name in enumerate(names)}
    of = np.fromiter((index[p.part] for p in plan.target_params), np.int64, len(plan.target_params))[plan.target[rows]]
    kinds = {name: of == i for i, name in enumerate(names) if name}
    return kinds.get("values", np.zeros(len(rows), np.bool_)), kinds
