"""Exact-once: every destination element is written once, every HF tensor is used or dropped with a reason.

The proof shares no code with the planner. Of the plan alone it shows that the transfers tile every destination parameter, stay
inside every source parameter, keep dtypes or are casts that a rule declares or parts of a quantised weight (of which nobody
gets some without the others), and use every element of every HF tensor. Given
the layouts as well, it also shows that each transfer reads and writes what the layouts say lies there: that the right elements
arrive, not just some elements. It runs on every plan, in tests and before every binding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from weight_sync.errors import PlanError, listed
from weight_sync.ids import Side
from weight_sync.layout.table import Ints, Layout, Param
from weight_sync.layout.values import CASTS, legal_casts
from weight_sync.plan.complete import know_magnitudes, one_cut, scales_of_all_values
from weight_sync.plan.plan import Plan
from weight_sync.plan.tiling import disjoint, fills, inside


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
    _tiled(plan)
    _used(plan, dropped)
    _whole_sets(plan)
    if source is not None:
        _as_laid_out(plan, Side.TRAINER, source)
    if target is not None:
        _as_laid_out(plan, Side.ROLLOUT, target)


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
        _refuse(f"{side} rank {p.rank}, {p.name}: the world has {world}" for p in params if not 0 <= p.rank < world)
    end = plan.offset + plan.shape
    out = ((plan.shape < 1) | (plan.offset < 0) | (end > plan.catalog.shapes[plan.tensor])).any(axis=1)
    _refuse(
        f"{_where(plan, i)}: box at {plan.offset[i].tolist()} of shape {plan.shape[i].tolist()} "
        f"is empty or outside the tensor, shape {plan.catalog.shapes[plan.tensor[i]].tolist()}"
        for i in np.flatnonzero(out).tolist()
    )
    stray = ~inside(_numel(plan.source_params)[plan.source], plan.source_start, plan.source_strides, plan.shape)
    _refuse(f"{_where(plan, i)}: reads outside the source parameter" for i in np.flatnonzero(stray).tolist())


def _dtypes(plan: Plan) -> None:
    """Bytes keep their dtype, but for casts that one side declares from the HF tensor's dtype, which the other side holds."""
    names = sorted({p.dtype for params in (plan.source_params, plan.target_params) for p in params})
    index = {name: i for i, name in enumerate(names)}
    a, b = (
        np.fromiter((index[p.dtype] for p in params), np.int64, len(params))[column]
        for params, column in ((plan.source_params, plan.source), (plan.target_params, plan.target))
    )
    problems: list[str] = []
    catalog = plan.catalog
    made = catalog.is_made[plan.tensor]
    rows = np.flatnonzero(plan.made)
    if len(rows):  # rows of one pattern and one kind of parameter are alike
        kinds = {kind: n for n, kind in enumerate(sorted({(p.dtype, p.part) for p in plan.target_params}))}
        kind = np.fromiter((kinds[p.dtype, p.part] for p in plan.target_params), np.int64)[plan.target[rows]]
        pattern = np.searchsorted(np.asarray(catalog.first, np.int64), plan.tensor[rows], "right") - 1
        _, first, group = np.unique(pattern * len(kinds) + kind, return_index=True, return_inverse=True)
        wrong = ~made[rows]
        for n, i in enumerate(rows[first].tolist()):
            want, recipe = plan.target_params[int(plan.target[i])], catalog.pattern_of(int(plan.tensor[i])).made
            if recipe is None or (want.dtype, want.part) != (recipe.dtype, recipe.part):
                wrong |= group == n
        for i in rows[wrong].tolist():
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


def _tiled(plan: Plan) -> None:
    """The transfers of every destination parameter are disjoint, inside it, and as many elements as it needs."""
    written = np.bincount(plan.target, weights=plan.shape.prod(axis=1), minlength=len(plan.target_params)).astype(np.int64)
    filling = np.fromiter((p.filling for p in plan.target_params), np.int64, len(plan.target_params))
    want = _numel(plan.target_params) - filling
    problems: list[str] = []
    wrong: list[int] = np.flatnonzero(written != want).tolist()
    for i in wrong:
        p = plan.target_params[i]
        problems.append(f"rollout rank {p.rank}, {p.name}: {int(written[i])} elements are written, {int(want[i])} are needed")
    _refuse(problems)
    order = np.lexsort((plan.target_start, plan.target))
    first = np.searchsorted(plan.target[order], np.arange(len(plan.target_params) + 1))
    columns = (plan.target_start[order], plan.target_strides[order], plan.shape[order])
    for i in _unlike(plan.target_params, first, columns):
        rows = slice(int(first[i]), int(first[i + 1]))
        p = plan.target_params[i]
        if not disjoint(p.shape, *(column[rows] for column in columns)):
            names = sorted({plan.catalog.name(t) for t in plan.tensor[order[rows]].tolist()})
            problems.append(f"rollout rank {p.rank}, {p.name}: transfers of {listed(names)} overlap or leave the parameter")
    _refuse(problems)


def _unlike(params: Sequence[Param], first: Ints, columns: tuple[Ints, Ints, Ints]) -> Iterator[int]:
    """Parameters whose tilings are to be proved: of those that are exactly alike (layers, replicas) only one."""
    count = first[1:] - first[:-1]
    shapes: dict[tuple[int, ...], int] = {}
    shape_of = np.fromiter((shapes.setdefault(p.shape, len(shapes)) for p in params), np.int64, len(params))
    # A cheap fingerprint finds likely equals; whether they are equal is then checked entry by entry.
    start, strides, shape = columns
    weights = 2 * np.arange(strides.shape[1], dtype=np.int64) + 3
    mixed: Ints = start * 31 + strides @ weights + shape @ weights * 17
    sums = np.append(0, np.cumsum(mixed))
    key = np.stack([shape_of, count, sums[first[1:]] - sums[first[:-1]]], axis=1)
    _, model, group = np.unique(key, axis=0, return_index=True, return_inverse=True)
    model_of = model[group.ravel()]
    at = np.repeat(np.arange(len(params)), count)
    twin = first[model_of][at] + np.arange(len(at)) - first[at]
    alike = (start == start[twin]) & (strides == strides[twin]).all(axis=1) & (shape == shape[twin]).all(axis=1)
    differs = np.bincount(at[~alike], minlength=len(params)) > 0
    yield from np.flatnonzero((differs | (model_of == np.arange(len(params)))) & (count > 0)).tolist()


def _used(plan: Plan, dropped: Iterable[str]) -> None:
    """Every element of every HF tensor goes somewhere, except of tensors that the rollout drops."""
    whole: Ints = plan.catalog.shapes.prod(axis=1)
    used = np.zeros(len(plan.catalog), np.int64)
    order = np.argsort(plan.tensor, kind="stable")
    tensor = plan.tensor[order]
    volume = plan.shape[order].prod(axis=1)
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


def _whole_sets(plan: Plan) -> None:
    """Whoever gets some of what a weight becomes, gets all of it: values for all its scales, scales for all its values."""
    rows = np.flatnonzero(plan.made)
    if not len(rows):
        return
    catalog = plan.catalog
    tensor, block = plan.tensor[rows], catalog.block[plan.tensor[rows]]
    base = catalog.base[tensor]
    end = np.minimum((plan.offset[rows] + plan.shape[rows]) * block, catalog.shapes[base])
    covered = (end - plan.offset[rows] * block).prod(axis=1)
    keys, group = np.unique(plan.target_rank[rows] * len(catalog) + base, return_inverse=True)
    parts = sorted({p.part for p in plan.target_params if p.part})
    part_of = np.fromiter((parts.index(p.part) if p.part else -1 for p in plan.target_params), np.int64)[plan.target[rows]]
    total = np.zeros((len(keys), len(parts)), np.int64)
    np.add.at(total, (group, part_of), covered)
    values = total[:, parts.index("values")] if "values" in parts else np.zeros(len(keys), np.int64)
    # Scales over a whole dim speak for elements that other ranks hold, so they may cover more than the values here.
    for i in np.flatnonzero((values == 0) | (total < values[:, None]).any(axis=1)).tolist():
        rank, weight = divmod(int(keys[i]), len(catalog))
        said = ", ".join(f"{part} for {int(n)}" for part, n in zip(parts, total[i], strict=True))
        raise PlanError(f"not exact-once: rollout rank {rank} would get an incomplete {catalog.name(weight)}: {said} elements")
    scales_of_all_values(plan)
    know_magnitudes(plan)
    one_cut(plan)


def _as_laid_out(plan: Plan, side: Side, layout: Layout) -> None:
    """Each transfer's map into one side's parameter is that of a shard of the layout, which holds the transfer's box."""
    trainer = side is Side.TRAINER
    params, world = (plan.source_params, plan.source_world) if trainer else (plan.target_params, plan.target_world)
    if (params is not layout.params and params != layout.params) or world != layout.world:
        raise PlanError(f"the plan was not made for this {side} layout: their parameters differ")
    if plan.catalog.digest != layout.catalog.digest:
        raise PlanError(f"the plan was not made for this {side} layout: it is of another model")
    param, start, strides = (
        (plan.source, plan.source_start, plan.source_strides)
        if trainer
        else (plan.target, plan.target_start, plan.target_strides)
    )
    size = len(plan.catalog)
    tensor, offset, scale = plan.tensor, plan.offset, np.ones_like(plan.offset)
    shape = plan.shape
    if trainer:  # which holds weights, not what they become
        scale = plan.catalog.block[tensor]
        tensor, offset = plan.catalog.base[tensor], offset * scale
        # Of values every element is read, of all else the first one of the last block: its magnitude may be of other ranks too.
        values = (plan.made & plan.catalog.leads[plan.tensor])[:, None]
        whole = np.minimum(offset + shape * scale, plan.catalog.shapes[tensor]) - offset
        shape = np.where(values, whole, (shape - 1) * scale + 1)
    key = layout.param * size + layout.tensor
    order = np.argsort(key, kind="stable")
    wanted = param * size + tensor
    at = np.searchsorted(key[order], wanted)
    end = np.searchsorted(key[order], wanted, "right")
    rows = np.arange(len(plan))
    while len(rows := rows[at[rows] < end[rows]]):  # a parameter may hold several boxes of one tensor: try each
        shard = order[at[rows]]
        within = offset[rows] - layout.offset[shard]
        fits = (within >= 0).all(axis=1) & (within + shape[rows] <= layout.shape[shard]).all(axis=1)
        fits &= start[rows] == layout.start[shard] + (within * layout.strides[shard]).sum(axis=1)
        fits &= ((strides[rows] == layout.strides[shard] * scale[rows]) | (plan.shape[rows] == 1)).all(axis=1)
        end[rows[fits]] = -1  # found
        at[rows] += 1
    verb = "reads" if trainer else "writes"
    lost = np.flatnonzero(end >= 0).tolist()
    _refuse(f"{_where(plan, i)}: {verb} elements that the {side} layout does not have there" for i in lost)


def _numel(params: Sequence[Param]) -> Ints:
    return np.fromiter((p.numel for p in params), np.int64, len(params))


def _where(plan: Plan, row: int) -> str:
    a, b = plan.source_params[int(plan.source[row])], plan.target_params[int(plan.target[row])]
    name = plan.catalog.name(int(plan.tensor[row]))
    return f"{name}, trainer rank {a.rank} {a.name} -> rollout rank {b.rank} {b.name}"
