"""Exact-once: every destination element is written once, every HF tensor is used or dropped with a reason.

The proof shares no code with the planner. Of the plan alone it shows that the transfers tile every destination parameter, stay
inside every source parameter, keep dtypes or are casts that a rule declares or parts of a quantised weight (of which nobody
gets some without the others), and use every element of every HF tensor. Given
the layouts as well, it also shows that each transfer reads and writes what the layouts say lies there: that the right elements
arrive, not just some elements. It runs on every plan, in tests and before every binding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from weight_sync.errors import PlanError, listed
from weight_sync.ids import Side
from weight_sync.layout.rowwise import every, product, some, total
from weight_sync.layout.table import Ints, Layout
from weight_sync.layout.values import CASTS, legal_casts
from weight_sync.plan.complete import know_magnitudes, one_cut, scales_of_all_values
from weight_sync.plan.plan import Plan
from weight_sync.plan.tiling import disjoint, fills, inside
from weight_sync.plan.twins import Twins, twins


def prove_exact_once(
    plan: Plan, dropped: Iterable[str] = (), *, source: Layout | None = None, target: Layout | None = None
) -> None:
    """Raise PlanError unless `plan` writes every destination element exactly once and uses every HF tensor.

    dropped: HF names that the rollout declares it does not hold. source, target: the layouts the plan was made from; each one
    given is proved against. Declared filling (vocab padding) is the only part of a parameter that may stay unwritten; which
    part that is, only the target layout knows.
    """
    _well_formed(plan)
    _dtypes(plan)
    alike = twins(plan)
    _tiled(plan, alike)
    _used(plan, dropped, alike.models)
    _whole_sets(plan, alike)
    if source is not None:
        _of_layout(plan, Side.TRAINER, source)
        _as_laid_out(plan, Side.TRAINER, source, alike.reads)
    if target is not None:
        _of_layout(plan, Side.ROLLOUT, target)
        _as_laid_out(plan, Side.ROLLOUT, target, alike.laid_out_apart(target))


def _refuse(problems: Iterable[str]) -> None:
    found = list(problems)
    if found:
        raise PlanError(f"not exact-once: {listed(found)}")


def _well_formed(plan: Plan) -> None:
    """Every number of the plan is in range; later steps rely on it."""
    n, d = len(plan.tensor), plan.catalog.ndim
    wide = ("offset", "shape", "source_strides", "target_strides")
    for name in ("source", "source_start", "target", "target_start", *wide):
        have, want = getattr(plan, name).shape, (n, d) if name in wide else (n,)
        if have != want:
            raise PlanError(f"not a plan: column {name} has shape {have}, want {want}")
    for name, limit in (
        ("tensor", len(plan.catalog)),
        ("source", len(plan.source_params)),
        ("target", len(plan.target_params)),
    ):
        column: Ints = getattr(plan, name)
        if len(bad := np.flatnonzero((column < 0) | (column >= limit))):
            raise PlanError(f"not a plan: {name} of transfer {bad[0]} is {column[bad[0]]}, must be 0 to {limit - 1}")
    for side, world, params in (
        (Side.TRAINER, plan.source_world, plan.source_params),
        (Side.ROLLOUT, plan.target_world, plan.target_params),
    ):
        rank = (plan.source_columns if side is Side.TRAINER else plan.target_columns).rank
        strays: list[int] = np.flatnonzero((rank < 0) | (rank >= world)).tolist()
        _refuse(f"{side} rank {params[i].rank}, {params[i].name}: the world has {world}" for i in strays)
    end = plan.offset + plan.shape
    out = some((plan.shape < 1) | (plan.offset < 0) | (end > plan.catalog.shapes.take(plan.tensor, axis=0)))
    _refuse(
        f"{_where(plan, i)}: box at {plan.offset[i].tolist()} of shape {plan.shape[i].tolist()} "
        f"is empty or outside the tensor, shape {plan.catalog.shapes[plan.tensor[i]].tolist()}"
        for i in np.flatnonzero(out).tolist()
    )
    numel = plan.source_columns.of_kind(lambda p: p.numel)
    stray = ~inside(numel.take(plan.source), plan.source_start, plan.source_strides, plan.shape)
    _refuse(f"{_where(plan, i)}: reads outside the source parameter" for i in np.flatnonzero(stray).tolist())


def _dtypes(plan: Plan) -> None:
    """Bytes keep their dtype, but for casts that one side declares from the HF tensor's dtype, which the other side holds."""
    here, there = plan.source_columns, plan.target_columns
    names = sorted({p.dtype for p in (*here.kinds, *there.kinds)})
    index = {name: i for i, name in enumerate(names)}
    a, b = (side.of_kind(lambda p: index[p.dtype]).take(column) for side, column in ((here, plan.source), (there, plan.target)))
    problems: list[str] = []
    catalog = plan.catalog
    made = catalog.is_made.take(plan.tensor)
    rows = np.flatnonzero(plan.made)
    if len(rows):  # rows of one pattern and one kind of parameter are alike
        pattern = np.repeat(np.arange(len(catalog.patterns)), [p.count for p in catalog.patterns])
        which = pattern.take(plan.tensor.take(rows)) * len(there.kinds) + there.kind.take(plan.target.take(rows))
        wrong_kind = np.zeros(len(catalog.patterns) * len(there.kinds), np.bool_)
        present: list[int] = np.flatnonzero(np.bincount(which, minlength=len(wrong_kind))).tolist()
        for n in present:
            recipe, want = catalog.patterns[n // len(there.kinds)].made, there.kinds[n % len(there.kinds)]
            wrong_kind[n] = recipe is None or (want.dtype, want.part) != (recipe.dtype, recipe.part)
        for i in rows[wrong_kind.take(which) | ~made.take(rows)].tolist():
            want = plan.target_params[int(plan.target[i])]
            problems.append(f"{_where(plan, i)}: would be written as {want.part} of {want.dtype}, which it does not become")
    problems += [
        f"{_where(plan, i)}: a quantised tensor in a plain parameter" for i in np.flatnonzero(made & ~plan.made).tolist()
    ]
    for i in np.flatnonzero((a != b) & ~plan.made).tolist():
        have, want = plan.source_params[int(plan.source[i])], plan.target_params[int(plan.target[i])]
        stored = plan.catalog.pattern_of(int(plan.tensor[i])).dtype
        by_rollout = have.dtype == stored == want.cast_from
        by_trainer = want.dtype == stored == have.cast_from
        if not by_rollout and not by_trainer:
            problems.append(f"{_where(plan, i)}: {have.dtype} would be written as {want.dtype}, and no rule declares the cast")
        elif (have.dtype, want.dtype) not in CASTS:
            problems.append(f"{_where(plan, i)}: no cast from {have.dtype} to {want.dtype}; legal: {legal_casts()}")
    _refuse(problems)


def _tiled(plan: Plan, alike: Twins) -> None:
    """The transfers of every destination parameter are disjoint, inside it, and as many elements as it needs."""
    # Counted for every parameter of every rank; whether they are disjoint, for one of twins.
    written = np.bincount(plan.target, weights=product(plan.shape), minlength=len(plan.target_params)).astype(np.int64)
    want = plan.target_columns.of_kind(lambda p: p.numel - p.filling)
    problems: list[str] = []
    wrong: list[int] = np.flatnonzero(written != want).tolist()
    for i in wrong:
        p = plan.target_params[i]
        problems.append(f"rollout rank {p.rank}, {p.name}: {int(written[i])} elements are written, {int(want[i])} are needed")
    _refuse(problems)
    order = alike.models  # by parameter and start
    params = np.flatnonzero(alike.params_of_models())
    ends = np.append(params, len(plan.target_params))
    first = np.searchsorted(plan.target.take(order), ends)
    shapes: dict[tuple[int, ...], int] = {}
    shape_of = plan.target_columns.of_kind(lambda p: shapes.setdefault(p.shape, len(shapes))).take(params)
    columns = (plan.target_start.take(order), plan.target_strides.take(order, axis=0), plan.shape.take(order, axis=0))
    for i in _unlike(shape_of, first, columns):
        rows = slice(int(first[i]), int(first[i + 1]))
        p = plan.target_params[int(params[i])]
        if not disjoint(p.shape, *(column[rows] for column in columns)):
            names = sorted({plan.catalog.name(t) for t in plan.tensor[order[rows]].tolist()})
            problems.append(f"rollout rank {p.rank}, {p.name}: transfers of {listed(names)} overlap or leave the parameter")
    _refuse(problems)


def _unlike(shape_of: Ints, first: Ints, columns: tuple[Ints, Ints, Ints]) -> Iterator[int]:
    """Parameters whose tilings are to be proved: of those that are exactly alike (layers, experts) only one.

    shape_of: a number for the shape of each. first: where the transfers of each begin in `columns`.
    """
    count = first[1:] - first[:-1]
    # A cheap fingerprint finds likely equals; whether they are equal is then checked entry by entry.
    start, strides, shape = columns
    weights = 2 * np.arange(strides.shape[1], dtype=np.int64) + 3
    mixed = start * 31 + total(strides * weights) + total(shape * weights) * 17
    sums = np.append(0, np.cumsum(mixed))
    key = np.stack([shape_of, count, sums[first[1:]] - sums[first[:-1]]], axis=1)
    _, model, group = np.unique(key, axis=0, return_index=True, return_inverse=True)
    model_of = model[group.ravel()]
    at = np.repeat(np.arange(len(shape_of)), count)
    twin = first[model_of].take(at) + np.arange(len(at)) - first.take(at)
    same = [column == column.take(twin, axis=0) for column in columns]
    alike = same[0] & every(same[1]) & every(same[2])
    differs = np.bincount(at[~alike], minlength=len(shape_of)) > 0
    yield from np.flatnonzero((differs | (model_of == np.arange(len(shape_of)))) & (count > 0)).tolist()


def _used(plan: Plan, dropped: Iterable[str], sent: Ints) -> None:
    """Every element of every HF tensor goes somewhere, except of tensors that the rollout drops.

    sent: transfers that all others repeat.
    """
    whole = product(plan.catalog.shapes)
    used = np.zeros(len(plan.catalog), np.int64)
    order = sent.take(np.argsort(plan.tensor.take(sent), kind="stable"))
    tensor = plan.tensor.take(order)
    volume = product(plan.shape.take(order, axis=0))
    first = np.searchsorted(tensor, np.arange(len(plan.catalog) + 1))
    present = np.flatnonzero(first[1:] > first[:-1])
    if len(present):
        used[present] = np.maximum.reduceat(volume, first[present])
    seen: set[bytes] = set()
    partly: list[str] = []
    for t in np.flatnonzero((used > 0) & (used < whole)).tolist():  # no single transfer takes the whole tensor
        rows = order[first[t] : first[t + 1]]
        shape = plan.catalog.pattern_of(t).shape
        key = repr(shape).encode() + plan.offset[rows].tobytes() + plan.shape[rows].tobytes()
        if key not in seen and not fills(shape, plan.offset[rows], plan.shape[rows]):
            partly.append(plan.catalog.name(t))
        seen.add(key)
    if partly:
        raise PlanError(f"HF tensors of which some elements go nowhere: {listed(partly)}")
    # A weight that other tensors are made of is used as they are; each of them is looked at by itself.
    made: Ints = np.flatnonzero(plan.catalog.is_made)
    np.maximum.at(used, plan.catalog.base[made], used[made])
    excused: set[int] = set()
    for name in dropped:
        if name not in plan.catalog.ids:
            raise PlanError(f"said to be dropped, but no tensor of this model: {name}")
        excused.add(plan.catalog.ids[name])
    excused |= set(plan.catalog.base[made[np.isin(made, sorted(excused))]].tolist())
    if both := [plan.catalog.name(t) for t in sorted(excused) if used[t]]:
        raise PlanError(f"HF tensors that are said to be dropped, but are sent: {listed(both)}")
    unused = [t for t in np.flatnonzero(used == 0).tolist() if t not in excused]
    if unused:
        raise PlanError(f"HF tensors that no transfer uses and no rule drops: {listed(map(plan.catalog.name, unused))}")


def _whole_sets(plan: Plan, alike: Twins) -> None:
    """Whoever gets some of what a weight becomes, gets all of it: values for all its scales, scales for all its values."""
    rows = alike.models[plan.made.take(alike.models)]
    if not len(rows):
        return
    catalog = plan.catalog
    tensor, offset, shape = plan.tensor.take(rows), plan.offset.take(rows, axis=0), plan.shape.take(rows, axis=0)
    block, base = catalog.block.take(tensor, axis=0), catalog.base.take(tensor)
    end = np.minimum((offset + shape) * block, catalog.shapes.take(base, axis=0))
    covered = product(end - offset * block)
    keys, group = np.unique(plan.target_rank.take(rows) * len(catalog) + base, return_inverse=True)
    parts = sorted({p.part for p in plan.target_columns.kinds if p.part})
    part_of = plan.target_columns.of_kind(lambda p: parts.index(p.part) if p.part else -1).take(plan.target.take(rows))
    counted = np.zeros((len(keys), len(parts)), np.int64)
    np.add.at(counted, (group, part_of), covered)
    values = counted[:, parts.index("values")] if "values" in parts else np.zeros(len(keys), np.int64)
    # Scales over a whole dim speak for elements that other ranks hold, so they may cover more than the values here.
    for i in np.flatnonzero((values == 0) | (counted < values[:, None]).any(axis=1)).tolist():
        rank, weight = divmod(int(keys[i]), len(catalog))
        said = ", ".join(f"{part} for {int(n)}" for part, n in zip(parts, counted[i], strict=True))
        raise PlanError(f"not exact-once: rollout rank {rank} would get an incomplete {catalog.name(weight)}: {said} elements")
    scales_of_all_values(plan, alike.models)
    know_magnitudes(plan, alike.reads)
    one_cut(plan, alike.models)


def _of_layout(plan: Plan, side: Side, layout: Layout) -> None:
    """The plan was made for a layout with these parameters, world and tensors."""
    trainer = side is Side.TRAINER
    params, world = (plan.source_params, plan.source_world) if trainer else (plan.target_params, plan.target_world)
    if (params is not layout.params and params != layout.params) or world != layout.world:
        raise PlanError(f"the plan was not made for this {side} layout: their parameters differ")
    if plan.catalog.digest != layout.catalog.digest:
        raise PlanError(f"the plan was not made for this {side} layout: it is of another model")


def _as_laid_out(plan: Plan, side: Side, layout: Layout, transfers: Ints) -> None:
    """Each transfer's map into one side's parameter is that of a shard of the layout, which holds the transfer's box."""
    trainer, catalog = side is Side.TRAINER, plan.catalog
    param, start, strides = (
        (plan.source, plan.source_start, plan.source_strides)
        if trainer
        else (plan.target, plan.target_start, plan.target_strides)
    )
    param, start, strides = param.take(transfers), start.take(transfers), strides.take(transfers, axis=0)
    tensor, offset, shape = (column.take(transfers, axis=0) for column in (plan.tensor, plan.offset, plan.shape))
    scale, single = np.ones_like(offset), shape == 1
    if trainer:  # which holds weights, not what they become
        values = plan.made.take(transfers) & catalog.leads.take(tensor)
        scale, tensor = catalog.block.take(tensor, axis=0), catalog.base.take(tensor)
        offset = offset * scale
        # Of values every element is read, of all else the first one of the last block: its magnitude may be of other ranks too.
        whole = np.minimum(offset + shape * scale, catalog.shapes.take(tensor, axis=0)) - offset
        shape = np.where(values[:, None], whole, (shape - 1) * scale + 1)
    key = layout.param * len(catalog) + layout.tensor
    order = np.argsort(key, kind="stable")
    keys = key.take(order)
    wanted = param * len(catalog) + tensor
    at = np.searchsorted(keys, wanted)
    end = np.searchsorted(keys, wanted, "right")
    rows = np.arange(len(transfers))
    while len(rows := rows[at.take(rows) < end.take(rows)]):  # a parameter may hold several boxes of one tensor: try each
        shard = order.take(at.take(rows))
        steps = layout.strides.take(shard, axis=0)
        within = offset.take(rows, axis=0) - layout.offset.take(shard, axis=0)
        fits = every((within >= 0) & (within + shape.take(rows, axis=0) <= layout.shape.take(shard, axis=0)))
        fits &= start.take(rows) == layout.start.take(shard) + total(within * steps)
        fits &= every((strides.take(rows, axis=0) == steps * scale.take(rows, axis=0)) | single.take(rows, axis=0))
        end[rows[fits]] = -1  # found
        at[rows] += 1
    verb = "reads" if trainer else "writes"
    lost = np.sort(transfers[end >= 0]).tolist()
    _refuse(f"{_where(plan, i)}: {verb} elements that the {side} layout does not have there" for i in lost)


def _where(plan: Plan, row: int) -> str:
    a, b = plan.source_params[int(plan.source[row])], plan.target_params[int(plan.target[row])]
    name = plan.catalog.name(int(plan.tensor[row]))
    return f"{name}, trainer rank {a.rank} {a.name} -> rollout rank {b.rank} {b.name}"
