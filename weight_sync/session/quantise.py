"""What one trainer rank makes of its live weights: the magnitudes that scales are made of, and jobs for the kernels.

Each sync has two passes over the weights that are quantised. `scan` comes before anything is paused: it finds the largest
magnitude of every group and counts NaN and infinities. Where groups lie on several ranks, the controller takes the largest
of what the ranks say and `settle` puts it in (plan/straddle.py). Then, while pieces are packed, the kernels make values and
scales of those magnitudes, piece by piece, in the staging buffer.

Magnitudes of large groups are kept between both passes (four bytes each); those of small ones are found again in each piece,
which then holds whole groups, except where a group lies on several ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import BindError, VerifyError, WeightsError, listed
from weight_sync.layout.table import Ints
from weight_sync.plan.plan import Plan
from weight_sync.plan.straddle import KEPT_FROM, cells_of_rank, regions_of
from weight_sync.quant.emission import scheme_of
from weight_sync.quant.kernel import Job, Kernel, Prepared, Stats, kernel_for
from weight_sync.session.memory import Memory

Floats = NDArray[np.float32]
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Table:
    """Magnitudes of some groups of a weight, `first` to one past `last`, that lie in the pool from `at`."""

    first: Pair
    last: Pair
    at: int

    @property
    def shape(self) -> Pair:
        return self.last[0] - self.first[0], self.last[1] - self.first[1]

    def of(self, pool: Any) -> Any:
        return pool[self.at : self.at + prod(self.shape)].reshape(self.shape)

    def whole_rows(self, first: Pair, last: Pair) -> bool:
        """Whether these groups are here, and next to each other in memory."""
        inside = all(a <= b and c <= d for a, b, c, d in zip(self.first, first, last, self.last, strict=True))
        return inside and (last[0] - first[0] == 1 or (first[1], last[1]) == (self.first[1], self.last[1]))


@dataclass(frozen=True, slots=True)
class Both:
    """Kernels that are run together; counted is what the first one counts."""

    values: Prepared
    others: Prepared

    def run(self) -> None:
        self.values.run()
        self.others.run()

    def stats(self) -> Stats:
        return self.values.stats()

    def outgrown(self) -> int:
        return self.values.outgrown()


class Quantiser:
    """A rank's part of a quantised plan, bound to its live weights. See the module docstring."""

    def __init__(self, plan: Plan, rank: int, memory: Memory, report: bool = True) -> None:
        self._plan, self._memory, self._rank, self._report = plan, memory, rank, report
        self.scheme = scheme_of(plan.catalog.scheme)
        self.kernel: Kernel = kernel_for(self.scheme, memory.device)
        self._regions = regions_of(plan, plan.rows_from(rank))
        self.cells = cells_of_rank(plan, rank, self.needs_whole)
        self._jobs = [self._scanned(i) for i in range(len(self._regions))]
        self._tables = self._lay_out()
        self._by_base: dict[int, list[_Table]] = {}
        for (_, base), tables in self._tables.items():
            self._by_base.setdefault(base, []).extend(tables.values())
        kept = {i for tables in self._tables.values() for i in tables}
        self._scan = self.kernel.prepare_scan(self._jobs, [i in kept for i in range(len(self._jobs))])
        self._pool: Floats = self._scan.amax  # laid out as the tables are
        # Groups that kernels want next to each other and that do not lie so in the pool: few, each with an array of its own.
        self._extra: dict[tuple[int, int, Pair, Pair], tuple[Floats, Any]] = {}
        # Whose whole magnitude is whose: that of a weight, or of one that it is fused with.
        self._sharer = plan.catalog.sharer
        self._totals = {base: n for n, base in enumerate(sorted(set(self._sharer[self._regions.base].tolist())))}
        self._total_of = np.asarray([self._totals[int(self._sharer[base])] for base in self._regions.base.tolist()], np.int64)
        self._whole = np.zeros(len(self._totals), np.float32)
        self._device_pool, self._device_whole = memory.beside(self._pool), memory.beside(self._whole)
        self._nothing = memory.beside(np.zeros((1, 1), np.float32))
        self._made: list[Prepared] = []
        self._said: list[float] = []  # what the last scan found of `cells`, before other ranks were heard

    @property
    def needs_whole(self) -> bool:
        return self.scheme.scale == "two_level"

    # -- before anything is paused ------------------------------------------------------------------------------------

    def scan(self, finite: bool) -> list[float]:
        """Look at every weight. Returns the magnitudes of this rank's share of `cells`.

        finite: raise WeightsError, naming tensor and rank, for NaN and infinities; their groups would have no meaning.
        """
        scan, regions = self._scan, self._regions
        self._look()
        if finite and (bad := np.flatnonzero(scan.nonfinite).tolist()):
            said = (f"{self._jobs[i].label} [{_span(regions, i)}]: {int(scan.nonfinite[i])}" for i in bad)
            raise WeightsError(
                f"trainer rank {self._rank}: {len(bad)} weights to be quantised hold NaN or infinities: {listed(said)}. "
                "Nothing was sent. To send them all the same: weight_sync.quant.check_finite=false"
            )
        self._said = [self._magnitude(cell) for cell in self.cells.tolist()]
        return self._said

    def _look(self) -> None:
        """The magnitudes of this rank's own elements, as they are now."""
        self._scan.run()
        if self.needs_whole:
            self._whole[:] = 0
            np.maximum.at(self._whole, self._total_of, self._scan.most)

    def unchanged(self) -> None:
        """Look at every weight again. Raises VerifyError where magnitudes are no longer those that scales were made of.

        Those that are kept alone: all others were found in the very words that were quantised.
        """
        used, whole = self._pool.copy(), self._whole.copy()
        self._look()
        own = np.asarray([self._magnitude(cell) for cell in self.cells.tolist()], np.float32)
        changed = _bits(self._pool) != _bits(used)
        for base, i, j in self.cells.tolist():  # of all ranks in `used`: what this one saw itself is compared instead
            for table, place in self._holding(base, i, j):
                table.of(changed)[place] = False
        self._pool[:], self._whole[:] = used, whole  # for whoever still reads what was sent
        names = [
            self._plan.catalog.name(base)
            for (_, base), tables in self._tables.items()
            if any(table.of(changed).any() for table in tables.values())
        ]
        cells = _bits(own) != _bits(np.asarray(self._said, np.float32))
        names += [self._plan.catalog.name(base) for base in self.cells[cells, 0].tolist()]
        if names:
            raise VerifyError(
                f"trainer rank {self._rank}: weights changed during the sync: {int(changed.sum() + cells.sum())} magnitudes "
                f"that scales were made of are others now: {listed(dict.fromkeys(names))}"
            )

    def settle(self, magnitudes: Sequence[float]) -> None:
        """Take the magnitudes of `cells` over all ranks; without any cells, there are none to take."""
        if len(magnitudes) != len(self.cells):
            raise BindError(f"trainer rank {self._rank}: {len(magnitudes)} magnitudes for {len(self.cells)} groups")
        for (base, i, j), value in zip(self.cells.tolist(), magnitudes, strict=True):
            if i < 0:
                self._whole[self._totals[base]] = value
                continue
            for table, place in self._holding(base, i, j):
                table.of(self._pool)[place] = value
        for (source, base, first, last), (here, _) in self._extra.items():
            here[...] = self._gathered(source, base, first, last)
        pools = [(self._device_pool, self._pool), (self._device_whole, self._whole)]
        for there, here in [*pools, *((there, here) for here, there in self._extra.values())]:
            if there is not here:
                self._memory.beside(here, there)

    # -- while pieces are packed --------------------------------------------------------------------------------------

    def prepare(self, pieces: Sequence[tuple[int, Sequence[int], Sequence[int], Any]]) -> Prepared:
        """Kernels for pieces (row, first element, shape, bytes to fill) of made transfers; run() fills them, each sync."""
        jobs = _joined([self._job(*piece) for piece in pieces])
        # Counted once, with the values; scales of the same groups would be counted again.
        values = self.kernel.prepare([job for job in jobs if "values" in job.outs], stats=self._report)
        self._made.append(values)
        others = [job for job in jobs if "values" not in job.outs]
        return Both(values, self.kernel.prepare(others, stats=False)) if others else values

    def fill(self, row: int, at: Sequence[int], shape: Sequence[int], out: Any) -> None:
        """What a part of a made transfer must arrive as, into `out`; uncounted."""
        self.kernel.prepare([self._job(row, at, shape, out, once=True)], stats=False).run()

    def fetch(self) -> None:
        """Once everything was asked for: wait until it is made, and bring to the host what was counted."""
        self.kernel.fetch(self._made)

    def check_outgrown(self) -> None:
        """After fetch(): raise VerifyError where weights had grown beyond the magnitudes their scales are made of."""
        if count := sum(made.outgrown() for made in self._made):
            raise VerifyError(
                f"trainer rank {self._rank}: weights changed during the sync: in {count} groups an element is larger than the "
                "largest magnitude that was found before the write, so values were cut off"
            )

    def stats(self) -> Stats | None:
        """After fetch(): of everything that was made in this sync; None where no report is wanted."""
        if not self._report:
            return None
        total = Stats()
        for made in self._made:
            total = total.merged(made.stats())
        return total

    # ------------------------------------------------------------------------------------------------------------------

    def _job(self, row: int, at: Sequence[int], shape: Sequence[int], out: Any, *, once: bool = False) -> Job:
        """once: it is run now and never again, so magnitudes may be those of now."""
        plan, catalog = self._plan, self._plan.catalog
        tensor = int(plan.tensor[row])
        base = int(catalog.base[tensor])
        source = int(plan.source[row])
        made = catalog.pattern_of(tensor).made
        assert made is not None
        whole = _pair(catalog.shapes[base])
        block, group = _pair(made.block), _pair(made.group)
        first = _pair(plan.offset[row] + np.asarray(at))
        low = (first[0] * block[0], first[1] * block[1])
        high = (min((first[0] + shape[0]) * block[0], whole[0]), min((first[1] + shape[1]) * block[1], whole[1]))
        strides = (int(plan.source_strides[row, 0]) // block[0], int(plan.source_strides[row, 1]) // block[1])
        start = int(plan.source_start[row]) + sum(a * int(s) for a, s in zip(at, plan.source_strides[row], strict=False))
        name, dtype = plan.source_params[source].name, plan.source_params[source].dtype
        cells = (low[0] // group[0], low[1] // group[1]), (-(-high[0] // group[0]), -(-high[1] // group[1]))
        amax = self._known(source, base, *cells, once) if made.part != "global" else self._nothing
        if made.part == "global":
            high = low[0] + 1, low[1] + min(group[1], whole[1])  # made of the whole weight's magnitude alone
        if amax is not None and made.part != "values":
            # Nothing but magnitudes is read, and the groups may be cut here: a view of their size over one element.
            view = self._memory.view(name, start, (0, 0), (high[0] - low[0], high[1] - low[1]))
        else:
            if amax is None:
                amax = self._looked_up(name, dtype, start, strides, low, high, group, whole, cells)
                if amax is not None and not once:
                    raise BindError(
                        f"trainer rank {self._rank}: a piece of {catalog.name(tensor)} ends inside a group of {list(group)}, "
                        "whose magnitude would be that of now in every later sync; this is a fault of the schedule"
                    )
            view = self._memory.view(name, start, strides, (high[0] - low[0], high[1] - low[1]))
        n = self._totals[int(self._sharer[base])]
        total = self._device_whole[n : n + 1] if self.needs_whole else None
        return Job(view, dtype, low, whole, {made.part: out}, amax, total, catalog.name(base))

    def _looked_up(
        self, name: str, dtype: str, start: int, strides: Pair, low: Pair, high: Pair, group: Pair, whole: Pair, cells: Any
    ) -> Any:
        """Magnitudes of groups that a box cuts, though this rank holds them whole; None where it cuts none."""
        first, last = cells
        wide = [(a * g, min(b * g, n)) for a, b, g, n in zip(first, last, group, whole, strict=True)]
        if [(a, b) for a, b in zip(low, high, strict=True)] == wide:
            return None
        start -= sum((a - w[0]) * s for a, w, s in zip(low, wide, strides, strict=True))
        view = self._memory.view(name, start, strides, tuple(b - a for a, b in wide))
        (scan,) = self.kernel.scan([Job(view, dtype, (wide[0][0], wide[1][0]), whole, label=name)])
        return self._memory.beside(scan.amax)

    def _known(self, source: int, base: int, first: Pair, last: Pair, once: bool) -> Any:
        tables = self._tables.get((source, base))
        if tables is None:
            return None
        for table in tables.values():
            if table.whole_rows(first, last):
                return table.of(self._device_pool)[_cut(first, last, table.first)]
        key = source, base, first, last
        if key in self._extra:
            return self._extra[key][1]
        here = self._gathered(source, base, first, last)
        there = self._memory.beside(here)
        if not once:
            self._extra[key] = here, there
        return there

    def _gathered(self, source: int, base: int, first: Pair, last: Pair) -> Floats:
        """The magnitudes of these groups out of several tables; of a group in two of them, the larger.

        Raises BindError for a group in none, whose scale would be that of zeros.
        """
        into = np.zeros((last[0] - first[0], last[1] - first[1]), np.float32)
        seen = np.zeros(into.shape, np.bool_)
        for table in self._tables[source, base].values():
            low = max(first[0], table.first[0]), max(first[1], table.first[1])
            high = min(last[0], table.last[0]), min(last[1], table.last[1])
            if low[0] < high[0] and low[1] < high[1]:
                part = into[_cut(low, high, first)]
                np.maximum(part, table.of(self._pool)[_cut(low, high, table.first)], out=part)
                seen[_cut(low, high, first)] = True
        if not seen.all():
            raise BindError(
                f"trainer rank {self._rank}: is to send scales of {self._plan.catalog.name(base)}, groups {list(first)} to "
                f"{list(last)}, of {int((~seen).sum())} of which it sends no values and so knows no magnitude"
            )
        return into

    def _scanned(self, i: int) -> Job:
        regions, plan = self._regions, self._plan
        row, param = int(regions.row[i]), plan.source_params[int(regions.source[i])]
        block = plan.catalog.block[plan.tensor[row]][:2]
        size = tuple((regions.high[i] - regions.low[i]).tolist())
        view = self._memory.view(
            param.name, int(plan.source_start[row]), (plan.source_strides[row][:2] // block).tolist(), size
        )
        name = plan.catalog.name(int(regions.base[i]))
        return Job(view, param.dtype, _pair(regions.low[i]), _pair(regions.shape[i]), label=name)

    def _lay_out(self) -> dict[tuple[int, int], dict[int, _Table]]:
        """(source parameter, weight) -> region -> where its magnitudes are kept.

        Those of large groups are, and all of weights of which some group lies on several ranks.
        """
        regions = self._regions
        members: dict[tuple[int, int], list[int]] = {}
        for i in range(len(regions)):
            members.setdefault((int(regions.source[i]), int(regions.base[i])), []).append(i)
        kept = {
            key
            for key, mine in members.items()
            if any(prod(_pair(regions.group[i])) >= KEPT_FROM or regions.open(i).any() for i in mine)
        }
        tables: dict[tuple[int, int], dict[int, _Table]] = {}
        at = 0
        for i in range(len(regions)):  # in the order of the scan, which fills them
            key = int(regions.source[i]), int(regions.base[i])
            if key in kept:
                low, high = regions.cells(i)
                table = tables.setdefault(key, {})[i] = _Table(_pair(low), _pair(high), at)
                at += prod(table.shape)
        return tables

    def _magnitude(self, cell: Sequence[int]) -> float:
        base, i, j = cell
        if i < 0:
            return float(self._whole[self._totals[base]])
        return float(np.max([table.of(self._pool)[place] for table, place in self._holding(base, i, j)]))  # NaN is the largest

    def _holding(self, base: int, i: int, j: int) -> list[tuple[_Table, Pair]]:
        """The tables with a group of a weight, and its place in each."""
        return [
            (t, (i - t.first[0], j - t.first[1]))
            for t in self._by_base.get(base, ())
            if t.first[0] <= i < t.last[0] and t.first[1] <= j < t.last[1]
        ]


def _joined(jobs: Sequence[Job]) -> list[Job]:
    """The same jobs, with scales of exactly the groups that a job makes values of left to that job."""
    by_place: dict[object, Job] = {}
    result: list[Job] = []
    for job in jobs:
        # Of one weight in one sync: regions that begin and end at the same elements.
        place = job.label, job.origin, job.size, job.shape
        values = by_place.get(place)
        (part,) = job.outs
        if part == "scales" and values is not None and "scales" not in values.outs:
            values.outs = {**values.outs, **job.outs}
            continue
        if part == "values":
            by_place[place] = job
        result.append(job)
    return result


def magnitudes(said: Mapping[int, Sequence[float]], of_rank: Sequence[Ints], cells: int) -> dict[int, list[float]]:
    """The controller's part: what each rank is told about its cells, the largest of what all ranks said.

    said: what scan() returned, by rank. of_rank, cells: those of plan.straddle.Straddles. Raises BindError for a rank that
    spoke of other cells.
    """
    most = np.zeros(cells, np.float32)
    for rank, mine in enumerate(of_rank):
        if len(said[rank]) != len(mine):
            raise BindError(f"trainer rank {rank} spoke of {len(said[rank])} groups; the plan has {len(mine)} there")
        np.maximum.at(most, mine, np.asarray(said[rank], np.float32))
    return {rank: most[mine].tolist() for rank, mine in enumerate(of_rank)}


def _bits(values: Floats) -> NDArray[np.uint32]:
    return values.view(np.uint32)  # NaN, where it is let through, equals itself so


def _pair(values: Any) -> Pair:
    return int(values[0]), int(values[1])


def _cut(first: Any, last: Any, origin: Pair) -> tuple[slice, slice]:
    a, b = (slice(int(low) - o, int(high) - o) for low, high, o in zip(first, last, origin, strict=True))
    return a, b


def _span(regions: Any, i: int) -> str:
    return ", ".join(f"{a}:{b}" for a, b in zip(regions.low[i].tolist(), regions.high[i].tolist(), strict=True))
