"""Groups of a weight that no single trainer rank holds whole, though one scale is made of all their elements.

A quantisation scheme takes the largest magnitude of every group of a weight (128 x 128 elements, 32 in a row, a whole row).
Where the trainer's cut runs through a group, each rank that holds some of it finds the largest magnitude of its part, four
bytes, and the largest of those is the group's: exact, and far less than the group's other elements would be. `Straddles` says
for which groups that has to be done, by whom, and how many bytes it is; the session does it before anything is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import PlanError, listed
from weight_sync.layout.rowwise import some
from weight_sync.layout.table import Bools, Ints
from weight_sync.plan.plan import Plan

KEPT_FROM = 128
"""Elements of a group from which on a trainer rank keeps the magnitudes of all its groups during a sync: four bytes for each,
at most 1.6% of bfloat16 weights. Of smaller groups they are taken again whenever a piece is packed."""


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Boxes of weights that a trainer rank quantises: distinct, sorted by source parameter and weight.

    source [n]: rows of plan.source_params. base [n]: tensor ids of the weights. low, high [n, 2]: the box. row [n]: a transfer
    that sends its values. shape, group [n, 2]: of the weight, and of its groups.
    """

    source: Ints
    base: Ints
    low: Ints
    high: Ints
    row: Ints
    shape: Ints
    group: Ints

    def __len__(self) -> int:
        return len(self.base)

    def cells(self, i: int) -> tuple[Ints, Ints]:
        """(first, one past the last) group in each dim that a region touches."""
        return self.low[i] // self.group[i], -(-self.high[i] // self.group[i])

    def open(self, i: int) -> Bools:
        """[groups, groups] of a region: those that it does not hold whole."""
        whole: list[Bools] = []
        first, last = self.cells(i)
        for d in range(2):
            g = np.arange(int(first[d]), int(last[d]), dtype=np.int64)
            end = np.minimum((g + 1) * self.group[i, d], self.shape[i, d])
            whole.append((g * self.group[i, d] >= self.low[i, d]) & (end <= self.high[i, d]))
        return ~(whole[0][:, None] & whole[1][None, :])


def regions_of(plan: Plan, rows: Ints) -> Regions:
    """The regions of these transfers (those of one trainer rank, say)."""
    rows = _values(plan, rows)
    base, shape, group, low, high = _boxes(plan, rows)
    key = np.column_stack([plan.source[rows], base, low, high])
    _, first = np.unique(key, axis=0, return_index=True)
    rows = rows[first]
    return Regions(plan.source[rows], base[first], low[first], high[first], rows, shape[first], group[first])


def _values(plan: Plan, rows: Ints) -> Ints:
    """Those of the transfers that send values."""
    return rows[plan.made.take(rows) & plan.catalog.leads.take(plan.tensor.take(rows))]


def _boxes(plan: Plan, rows: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """(weight, its shape, its groups, first, one past the last element in each of two dims) that transfers of values send."""
    catalog, tensor = plan.catalog, plan.tensor.take(rows)
    base = catalog.base.take(tensor)
    shape, block, group = (
        column.take(of, axis=0)[:, :2] if len(rows) else np.zeros((0, 2), np.int64)
        for column, of in ((catalog.shapes, base), (catalog.block, tensor), (catalog.group, tensor))
    )
    offset, size = (column.take(rows, axis=0)[:, :2] for column in (plan.offset, plan.shape))
    return base, shape, group, offset * block, np.minimum((offset + size) * block, shape)


def _cutting(plan: Plan, rows: Ints) -> Ints:
    """Those of the transfers of values whose box has groups in part only."""
    _, shape, group, low, high = _boxes(plan, rows)
    return rows[some((low % group != 0) | ((high % group != 0) & (high != shape)))]


@dataclass(frozen=True, eq=False)
class Straddles:
    """cells [n, 3]: (weight, group in dim 0, in dim 1), sorted; groups -1, -1: the whole weight and those that share its scale.

    of_rank: for every trainer rank, the cells that it holds some of, as ascending indices into `cells`.
    """

    cells: Ints
    of_rank: tuple[Ints, ...]

    def __len__(self) -> int:
        return len(self.cells)

    @property
    def nbytes(self) -> int:
        """Bytes that all ranks say together: four for each cell that a rank holds some of."""
        return 4 * sum(len(cells) for cells in self.of_rank)


def cells_of_rank(plan: Plan, rank: int, whole: bool = False) -> Ints:
    """[n, 3]: the straddling groups that a trainer rank holds some of, as in Straddles.cells, sorted."""
    values = _values(plan, plan.rows_from(rank))
    return _cells(plan, values, _cutting(plan, values), whole)


def _cells(plan: Plan, values: Ints, cutting: Ints, whole: bool) -> Ints:
    """cells_of_rank of the rank whose transfers of values these are; cutting: those of them that cut groups."""
    regions = regions_of(plan, cutting)
    cells: list[NDArray[np.int64]] = [np.zeros((0, 3), np.int64)]
    for i in range(len(regions)):
        at = np.argwhere(regions.open(i)) + regions.cells(i)[0]
        cells.append(np.column_stack([np.full(len(at), regions.base[i]), at]))
    if whole:
        bases = np.unique(plan.catalog.sharer[plan.catalog.base[plan.tensor[values]]])
        cells.append(np.column_stack([bases, np.full((len(bases), 2), -1)]))
    return np.unique(np.concatenate(cells), axis=0)


def straddles_of(plan: Plan, whole: bool = False) -> Straddles:
    """whole: the scheme also needs the largest magnitude of every weight."""
    values = _values(plan, np.arange(len(plan)))
    values = values.take(np.argsort(plan.source_rank.take(values), kind="stable"))
    cutting = _cutting(plan, values)
    ranks = np.arange(1, plan.source_world)
    by_rank = (np.split(rows, np.searchsorted(plan.source_rank.take(rows), ranks)) for rows in (values, cutting))
    found = [_cells(plan, mine, cut, whole) for mine, cut in zip(*by_rank, strict=True)]
    every = np.unique(np.concatenate(found), axis=0)
    place = {cell: n for n, cell in enumerate(_tuples(every))}
    return Straddles(every, tuple(np.asarray([place[cell] for cell in _tuples(cells)], np.int64) for cells in found))


def _tuples(cells: Ints) -> list[tuple[int, int, int]]:
    rows: list[list[int]] = cells.tolist()
    return [(base, i, j) for base, i, j in rows]


def refuse(plan: Plan, straddles: Straddles) -> None:
    """Raise PlanError when the trainer's cut runs through groups: for those who chose not to have magnitudes exchanged."""
    cut = straddles.cells[straddles.cells[:, 1] >= 0]
    if not len(cut):
        return
    bases, count = np.unique(cut[:, 0], return_counts=True)
    words: list[str] = []
    for base, n in zip(bases.tolist(), count.tolist(), strict=True):
        made = next(p.made for p in plan.catalog.patterns if p.made and p.made.base == plan.catalog.pattern_of(base).template)
        words.append(f"{plan.catalog.name(base)}: {n} groups of {list(made.group)} lie on several trainer ranks")
    raise PlanError(
        "the trainer's cut runs through groups that share one scale, and weight_sync.quant.straddle is refuse: "
        + listed(words)
        + "; cut the trainer at multiples of the group, or set straddle: exchange (the ranks then exchange "
        f"{straddles.nbytes} bytes of magnitudes before each sync)"
    )
