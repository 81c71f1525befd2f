"""The difference of two schedules: what another cut, another strategy or other costs change.

Transfers are compared by what they bring: the same box of the same tensor, in elements of the same size, to the same rollout
rank. Where both plans have it, the sender or the way it travels may differ; otherwise it is in one plan only. Plans of one
model may differ in what is quantised: scales are then in one of them only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import PlanError, listed
from weight_sync.layout.catalog import Catalog
from weight_sync.layout.table import Ints
from weight_sync.plan.figures import figures, per_rank
from weight_sync.plan.plan import Plan
from weight_sync.plan.schedule import Method, Schedule

NUMBERS = (
    "trainer_ranks", "rollout_ranks", "transfers", "bytes_total", "bytes_max_source", "bytes_max_destination", "skew_source",
    "skew_destination", "extra_bytes_source", "extra_bytes_destination", "weight_bytes_max_source",
    "weight_bytes_max_destination", "same_host_bytes", "runs", "rounds",
)  # fmt: skip
"""The figures that are compared."""


@dataclass(frozen=True, slots=True)
class Difference:
    """a, b: the two digests. numbers: figure -> (in a, in b), only those that differ.

    common: bytes of transfers in both plans. moved: of those, bytes with another sender. recut: template -> bytes that both
    plans bring, in other boxes, to other places or in another dtype. only_a, only_b: template -> bytes, where one plan brings
    more of it. remethod: template -> (method -> bytes in a, method -> bytes in b), of tensors that travel another way.
    trainer, rollout: rank -> change in bytes, only those that differ; a rank that one world lacks counts as 0 there.
    """

    a: str
    b: str
    numbers: dict[str, tuple[float, float]]
    common: int
    moved: int
    recut: dict[str, int]
    remethod: dict[str, tuple[dict[str, int], dict[str, int]]]
    only_a: dict[str, int]
    only_b: dict[str, int]
    trainer: dict[int, int]
    rollout: dict[int, int]

    @property
    def same(self) -> bool:
        return self.a == self.b

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"same": self.same}


def difference(a: Schedule, b: Schedule) -> Difference:
    """Compare two schedules of one model. Raises PlanError when they speak of different weights."""
    if unlike := sorted(_weights(a.plan.catalog) ^ _weights(b.plan.catalog)):
        named = listed(f"{template} {list(shape)} x {count}" for template, shape, count in unlike)
        raise PlanError(f"the two plans are of different models: only one of them has {named}")
    first, second = figures(a), figures(b)
    numbers = {name: (first[name], second[name]) for name in NUMBERS if first[name] != second[name]}
    rows_a, rows_b = _matched(_keys(a.plan, a.plan.tensor), _keys(b.plan, _renumbered(b.plan, a.plan.catalog)))
    moved = a.plan.source_rank[rows_a] != b.plan.source_rank[rows_b]
    nbytes = a.plan.nbytes[rows_a]
    rest_a, rest_b = _rest(a.plan, rows_a), _rest(b.plan, rows_b)
    recut = {template: min(n, rest_b[template]) for template, n in rest_a.items() if template in rest_b}
    return Difference(
        a.digest,
        b.digest,
        numbers,
        int(nbytes.sum()),
        int(nbytes[moved].sum()),
        recut,
        _remethod(a, b),
        {template: more for template, n in rest_a.items() if (more := n - recut.get(template, 0))},
        {template: more for template, n in rest_b.items() if (more := n - recut.get(template, 0))},
        _change(a.plan, b.plan, source=True),
        _change(a.plan, b.plan, source=False),
    )


def _weights(catalog: Catalog) -> set[tuple[str, tuple[int, ...], int]]:
    """(template, shape, how many) of the weights of a model, without what quantisation makes of them."""
    return {(p.template, p.shape, p.count) for p in catalog.patterns if p.made is None or p.made.base == p.template}


def _renumbered(plan: Plan, catalog: Catalog) -> Ints:
    """The tensor of every transfer by its number in another catalog, or beyond all of its numbers where it has none."""
    mine = plan.catalog
    number = np.arange(len(mine), dtype=np.int64) + len(catalog)
    for first, pattern in zip(mine.first, mine.patterns, strict=True):
        at = catalog.by_template.get(pattern.template)
        if at is not None and (other := catalog.patterns[at]).shape == pattern.shape and other.count == pattern.count:
            number[first : first + pattern.count] = catalog.first[at] + np.arange(pattern.count)
    return number.take(plan.tensor)


def _keys(plan: Plan, tensor: Ints) -> Ints:
    """[transfers, columns]: tensor, box, bytes of an element, rollout rank, start in its parameter."""
    single = [column[:, None] for column in (tensor, plan.itemsize, plan.target_rank, plan.target_start)]
    return np.ascontiguousarray(np.concatenate([*single, plan.offset, plan.shape], axis=1))


def _matched(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    """Rows of both tables that are equal. Within a plan every row is another one (it writes each element once)."""
    kind = np.dtype((np.void, a.dtype.itemsize * a.shape[1]))
    first: NDArray[np.void] = a.view(kind).ravel()
    second: NDArray[np.void] = b.view(kind).ravel()
    # Bytes compare cheaply as one number; equal numbers are then compared row by row.
    mixed = _mixed(a), _mixed(b)
    order = np.argsort(mixed[1], kind="stable")
    at = np.searchsorted(mixed[1][order], mixed[0])
    at = np.minimum(at, len(order) - 1) if len(order) else at
    hit = np.flatnonzero(mixed[1][order][at] == mixed[0]) if len(order) else np.zeros(0, np.int64)
    rows_a, rows_b = hit, order[at[hit]] if len(order) else hit
    if np.array_equal(first[rows_a], second[rows_b]) and len(np.unique(mixed[1])) == len(b):
        return rows_a, rows_b
    index = {key.tobytes(): i for i, key in enumerate(second)}  # two rows share a number: the slow way
    pairs = [(i, index[key.tobytes()]) for i, key in enumerate(first) if key.tobytes() in index]
    return np.asarray([i for i, _ in pairs], np.int64), np.asarray([j for _, j in pairs], np.int64)


def _mixed(rows: Ints) -> NDArray[np.uint64]:
    """One 64-bit number for each row."""
    keys = np.zeros(len(rows), np.uint64)
    with np.errstate(over="ignore"):
        for d in range(rows.shape[1]):
            keys += rows[:, d].astype(np.uint64) * np.uint64((0x9E3779B97F4A7C15 * (2 * d + 1)) % 2**64)
            keys ^= keys >> np.uint64(29)
            keys *= np.uint64(0xBF58476D1CE4E5B9)
    return keys


def _templates(plan: Plan, tensor: Ints, nbytes: Ints) -> dict[str, int]:
    """Template -> bytes, heaviest first."""
    patterns = plan.catalog.patterns
    which = np.searchsorted(np.asarray(plan.catalog.first), tensor, "right") - 1
    total = per_rank(nbytes, which, len(patterns))
    order: list[int] = np.argsort(-total, kind="stable").tolist()
    return {patterns[i].template: int(total[i]) for i in order if total[i]}


def _rest(plan: Plan, rows: Ints) -> dict[str, int]:
    """Template -> bytes of the transfers that are not among `rows`."""
    rest = np.ones(len(plan), np.bool_)
    rest[rows] = False
    return _templates(plan, plan.tensor[rest], plan.nbytes[rest])


def _remethod(a: Schedule, b: Schedule) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Templates whose bytes travel another way: by other methods, or (of equal bytes) other amounts by a method."""
    old, new = _methods(a), _methods(b)
    found: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
    for template in old.keys() & new.keys():
        first, second = old[template], new[template]
        comparable = sum(first.values()) == sum(second.values())
        if first.keys() != second.keys() or (comparable and first != second):
            found[template] = first, second
    return dict(sorted(found.items(), key=lambda item: (-sum(item[1][0].values()), item[0])))


def _methods(schedule: Schedule) -> dict[str, dict[str, int]]:
    """Template -> method -> bytes."""
    plan, found = schedule.plan, dict[str, dict[str, int]]()
    for method in Method:
        rows = np.flatnonzero(schedule.method == method)
        for template, nbytes in _templates(plan, plan.tensor[rows], plan.nbytes[rows]).items():
            found.setdefault(template, {})[method.name.lower()] = nbytes
    return found


def _change(a: Plan, b: Plan, *, source: bool) -> dict[int, int]:
    world = max(a.source_world, b.source_world) if source else max(a.target_world, b.target_world)
    old, new = (per_rank(p.nbytes, p.source_rank if source else p.target_rank, world) for p in (a, b))
    return {rank: int(new[rank] - old[rank]) for rank in np.flatnonzero(new != old).tolist()}
