"""The planner: intersect the trainer's boxes with the rollout's boxes, then choose who sends.

Both sides' shards are reduced to distinct boxes first (replicas share them), distinct boxes are joined tensor by tensor in
numpy, and the result is spread over all destination shards again. Equal inputs give equal plans on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

import numpy as np

from weight_sync.errors import PlanError, listed
from weight_sync.ids import ITEMSIZE
from weight_sync.layout.rowwise import every, product, some, total
from weight_sync.layout.table import Bools, Ints, Layout
from weight_sync.layout.values import CASTS, QUANTISED_FROM, legal_casts
from weight_sync.plan.boxes import Boxes, Holders, distinct_boxes, holders
from weight_sync.plan.plan import Plan, same_inputs


def make_plan(
    source: Layout,
    target: Layout,
    source_hosts: Sequence[str] = (),
    target_hosts: Sequence[str] = (),
    avoid: Sequence[int] = (),
) -> Plan:
    """Plan the transfers from `source` (trainer) to `target` (rollout).

    *_hosts: the host of every rank, or empty when unknown. Of the ranks that hold a box, one on the destination's host is
    preferred, then the one with the fewest bytes to send so far, then the lowest rank. avoid: trainer ranks that send only what
    no other rank holds. Raises PlanError when a destination
    element has no source, or when dtypes differ and no rule declares the cast.
    """
    same_inputs(source, target)
    _legal_dtypes(source, target)
    wanted = weights_of(target)
    held, dst = holders(source, distinct_boxes(source)), distinct_boxes(wanted)
    pair_dst, pair_src, low, size = join(held.boxes, dst)
    _covered(wanted, dst, pair_dst, size)

    # Spread pairs (sorted by distinct destination box) over every destination shard that has that box.
    first = np.searchsorted(pair_dst, np.arange(len(dst.tensor) + 1))
    count = (first[1:] - first[:-1]).take(dst.group)
    shard = np.repeat(np.arange(len(target.tensor)), count)
    pair = np.arange(len(shard)) + np.repeat(first.take(dst.group) - (np.cumsum(count) - count), count)
    # An element of a made tensor goes with the source that holds the first element of its block.
    tensor = target.tensor.take(shard)
    begin, end, block = low.take(pair, axis=0), (low + size).take(pair, axis=0), source.catalog.block.take(tensor, axis=0)
    offset = -(-begin // block)
    shape = -(-end // block) - offset
    box = pair_src.take(pair)
    _packed_whole(source, target, shard, box, held, begin, end, block)
    if not (full := every(shape > 0)).all():
        keep = np.flatnonzero(full)
        shard, pair, tensor, box = (column[keep] for column in (shard, pair, tensor, box))
        begin, end, block, offset, shape = (column.take(keep, axis=0) for column in (begin, end, block, offset, shape))

    hosts = _hosts(source_hosts, source.world, "trainer"), _hosts(target_hosts, target.world, "rollout")
    param = target.param.take(shard)
    nbytes = product(shape) * target.columns.of_kind(lambda p: ITEMSIZE[p.dtype]).take(param)
    leads = source.catalog.leads.take(tensor)
    cells = Cells(begin, end, offset, offset + shape, block)
    rank = target.param_rank.take(param)
    row = choose_together(source, rank, box, pair, leads, cells, held, nbytes, *hosts, avoid=avoid)
    del wanted, dst, full, pair, box, begin, end, nbytes, leads, cells, rank  # a fifth of the peak, and no longer needed

    order = by_rank(source.rank.take(row), param, target.start.take(shard), source.world)
    shard, row, tensor, param = (column.take(order) for column in (shard, row, tensor, param))
    block, offset, shape = (column.take(order, axis=0) for column in (block, offset, shape))
    from_strides, to_strides = source.strides.take(row, axis=0), target.strides.take(shard, axis=0)
    return Plan(
        catalog=source.catalog,
        source_params=source.params,
        target_params=target.params,
        source_world=source.world,
        target_world=target.world,
        source_hosts=tuple(hosts[0]),
        target_hosts=tuple(hosts[1]),
        tensor=tensor,
        offset=offset,
        shape=shape,
        source=source.param.take(row),
        source_start=source.start.take(row) + total((offset * block - source.offset.take(row, axis=0)) * from_strides),
        source_strides=from_strides * block,
        target=param,
        target_start=target.start.take(shard) + total((offset - target.offset.take(shard, axis=0)) * to_strides),
        target_strides=to_strides,
    )


def by_rank(rank: Ints, param: Ints, start: Ints, world: int) -> Ints:
    """np.lexsort((start, param, rank)). Resolved layouts come sorted by (param, start); what is left are few, small numbers."""
    same = param[1:] == param[:-1]
    if ((param[1:] > param[:-1]) | (same & (start[1:] >= start[:-1]))).all():
        small = rank.astype(np.uint16) if world <= 1 << 16 else rank  # numpy has a radix sort of 16 bits
        return np.argsort(small, kind="stable")
    return np.lexsort((start, param, rank))


def _packed_whole(
    source: Layout, target: Layout, shard: Ints, box: Ints, held: Holders, low: Ints, high: Ints, block: Ints
) -> None:
    """Raise PlanError where the trainer's cut runs through values that are packed in one element, which one rank makes."""
    catalog, tensor = source.catalog, target.tensor.take(shard)
    packed = np.flatnonzero(some(block > 1) & catalog.leads.take(tensor))
    step, a, b = (column.take(packed, axis=0) for column in (block, low, high))
    end = catalog.shapes.take(catalog.base.take(tensor.take(packed)), axis=0)
    wrong = packed[some((a % step != 0) | ((b % step != 0) & (b != end)))].tolist()
    said = dict.fromkeys(
        f"{catalog.name(int(tensor[i]))}: rank {int(source.rank[held.rows[held.first[box[i]]]])} holds {low[i].tolist()} to "
        f"{high[i].tolist()} of {catalog.name(int(catalog.base[tensor[i]]))}, of which {block[i].tolist()} are one element"
        for i in wrong
    )
    if said:
        raise PlanError(
            f"the trainer's cut runs through values that are packed into one element: {listed(said)}; cut the trainer at "
            "multiples of that"
        )


def weights_of(target: Layout) -> Layout:
    """The rollout's shards as boxes of the weights that their tensors are made of (layout/emitted.py)."""
    catalog = target.catalog
    if not catalog.scheme:
        return target
    block, tensor = catalog.block.take(target.tensor, axis=0), catalog.base.take(target.tensor)
    offset = target.offset * block
    shape = np.minimum(target.shape * block, catalog.shapes.take(tensor, axis=0) - offset)
    return replace(target, tensor=tensor, offset=offset, shape=shape)


@dataclass(frozen=True, slots=True)
class Cells:
    """Of transfers: low, high: the box of the weight that one is of. first, last: its own elements, last exclusive; block: what
    one of them stands for. All [transfers, dims]."""

    low: Ints
    high: Ints
    first: Ints
    last: Ints
    block: Ints

    def speak_of(self, scales: Ints, values: Ints) -> Bools:
        """Whether a transfer of values (one for each of scales) has a share in every block that the scales are of."""
        block = self.block.take(scales, axis=0)
        begins: Bools = self.low.take(values, axis=0) // block <= self.first.take(scales, axis=0)
        ends: Bools = -(-self.high.take(values, axis=0) // block) >= self.last.take(scales, axis=0)
        return every(begins & ends)


def choose_together(
    source: Layout,
    target_rank: Ints,
    box: Ints,
    pair: Ints,
    leads: Bools,
    cells: Cells,
    held: Holders,
    nbytes: Ints,
    *hosts: list[str],
    avoid: Sequence[int],
    load: Sequence[int] = (),
) -> Ints:
    """As choose(), but scales come from the rank that sends the values of the same overlap to the same destination.

    pair: the overlap that each transfer is of, box: the source's side of it.
    """
    if leads.all():
        return choose(source, target_rank, box, held, nbytes, *hosts, avoid=avoid, load=load)
    row = np.empty_like(box)
    first, rest = np.flatnonzero(leads), np.flatnonzero(~leads)
    row[first] = choose(source, target_rank[first], box[first], held, nbytes[first], *hosts, avoid=avoid, load=load)
    key = target_rank * (int(pair.max(initial=0)) + 1) + pair
    order = first[np.argsort(key[first], kind="stable")]
    at = np.minimum(np.searchsorted(key[order], key[rest]), len(order) - 1)
    found = key[order[at]] == key[rest]
    row[rest[found]] = row[order[at[found]]]
    # A scale over a whole dim of which this destination gets no values from here: from whoever sends them to another one. Only
    # who sends values of a block knows its magnitude. Where nobody sends some of all blocks, the proof refuses the plan.
    alone = rest[~found]
    order = first[np.lexsort((target_rank[first], box[first]))]
    low, high = (np.searchsorted(box[order], box[alone], side) for side in ("left", "right"))
    row[alone] = row[order[np.minimum(low, len(order) - 1)]]
    # Of the ranks below first: the first elements go to an engine's first workers, and another engine may leave.
    world = int(target_rank.max(initial=0)) + 1
    begin = np.searchsorted(box[order] * world + target_rank[order], box[alone] * world + target_rank[alone], "right")
    left = np.arange(len(alone))
    for at, step in ((begin - 1, -1), (begin, 1)):
        at = at.copy()
        while len(left := left[(low[left] <= at[left]) & (at[left] < high[left])]):
            values = order[at[left]]
            fits = cells.speak_of(alone[left], values)
            row[alone[left[fits]]] = row[values[fits]]
            low[left[fits]] = high[left[fits]]  # found
            at[left] += step
        left = np.flatnonzero(low < high)
    return row


def _hosts(hosts: Sequence[str], world: int, side: str) -> list[str]:
    if hosts and len(hosts) != world:
        raise PlanError(f"{side} hosts: {len(hosts)} given for {world} ranks")
    return list(hosts) or [""] * world


def _legal_dtypes(source: Layout, target: Layout) -> None:
    """A tensor has one dtype on the trainer, and on the rollout that one or another that a rule declares as a cast.

    What is made of a weight has the dtype of its scheme, and the weight must have one that schemes take. Declared is a cast
    from the HF tensor's dtype: by the rollout's rule, where the trainer holds the HF dtype, or by the trainer's, where the
    rollout does. Nothing is guessed, and no value goes through two casts.
    """
    kinds = sorted({(p.dtype, p.cast_from) for layout in (source, target) for p in layout.columns.kinds if not p.part})
    _legal_weights(source)
    if len({dtype for dtype, _ in kinds}) < 2:
        return
    index = {kind: i for i, kind in enumerate(kinds)}
    held = np.zeros((2, len(kinds), len(source.catalog)), np.bool_)
    for side, layout in enumerate((source, target)):
        kind = layout.columns.of_kind(lambda p: index.get((p.dtype, p.cast_from), -1)).take(layout.param)
        plain = np.flatnonzero(kind >= 0)
        held[side, kind.take(plain), layout.tensor.take(plain)] = True
    legal = np.asarray([[_legal(a, b) for b in kinds] for a in kinds], np.bool_)
    here, there = held
    dtypes = sorted({dtype for dtype, _ in kinds})
    of = np.asarray([[kind[0] == dtype for kind in kinds] for dtype in dtypes], np.bool_)
    several = (of @ here).astype(np.int64).sum(axis=0) > 1
    # Every kind held by the trainer must reach every kind held by the rollout: which replica sends is not settled yet.
    wrong: list[int] = np.flatnonzero(there.any(axis=0) & (several | (there & (~legal.T @ here)).any(axis=0))).tolist()

    def said(side: int, tensor: int) -> str:
        present: list[int] = np.flatnonzero(held[side, :, tensor]).tolist()
        words = dict.fromkeys(kinds[i][0] + (f" (cast from {kinds[i][1]})" if kinds[i][1] else "") for i in present)
        return " and ".join(words) or "absent"

    if wrong:
        served = {target.catalog.pattern_of(t).dtype for t in wrong}
        present: list[int] = np.flatnonzero(here[:, wrong].any(axis=1)).tolist()
        masters = sorted({kinds[i][0] for i in present} - served)
        masters = [dtype for dtype in masters if any((dtype, other) in CASTS for other in served)]
        whole = f". For a trainer that holds a whole model so (float32 masters): trainer.casts=[{','.join(masters)}]"
        raise PlanError(
            "dtypes differ: "
            + listed(f"{source.catalog.name(t)} is {said(0, t)} on the trainer, {said(1, t)} on the rollout" for t in wrong)
            + "; give both sides one dtype, or declare the cast from the HF tensor's dtype in the rule that places the tensor: "
            f"`dtype: float32` and `value: cast`, for example (legal: {legal_casts()})" + whole
        )


def _legal_weights(source: Layout) -> None:
    catalog = source.catalog
    if not catalog.scheme:
        return
    weights = np.isin(source.tensor, np.unique(catalog.base[catalog.is_made]))
    taken: list[int] = np.unique(source.param[weights]).tolist()
    wrong = [source.params[i] for i in taken if source.params[i].dtype not in QUANTISED_FROM]
    if wrong:
        raise PlanError(
            "weights to be quantised must be one of " + ", ".join(QUANTISED_FROM) + " on the trainer: "
            + listed(f"trainer rank {p.rank} {p.name} is {p.dtype}" for p in wrong)
        )  # fmt: skip


def _legal(source: tuple[str, str], target: tuple[str, str]) -> bool:
    """Whether a parameter of one (dtype, cast from) may be sent to one of another."""
    (a, a_from), (b, b_from) = source, target
    return a == b or ((a, b) in CASTS and (b_from == a or a_from == b))


def join(src: Boxes, dst: Boxes) -> tuple[Ints, Ints, Ints, Ints]:
    """(dst box, src box, overlap offset, overlap shape) of every overlap, sorted by dst box, then by src box."""
    low = np.searchsorted(src.tensor, dst.tensor, "left")
    count = np.searchsorted(src.tensor, dst.tensor, "right") - low
    pair_dst = np.repeat(np.arange(len(dst.tensor)), count)
    pair_src = np.arange(len(pair_dst)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)
    begin = np.maximum(src.offset.take(pair_src, axis=0), dst.offset.take(pair_dst, axis=0))
    end = np.minimum(
        (src.offset + src.shape).take(pair_src, axis=0),
        (dst.offset + dst.shape).take(pair_dst, axis=0),
    )
    keep = np.flatnonzero(every(end > begin))
    return pair_dst[keep], pair_src[keep], begin.take(keep, axis=0), (end - begin).take(keep, axis=0)


def _covered(target: Layout, dst: Boxes, pair_dst: Ints, size: Ints) -> None:
    """Every destination box must be filled exactly by its overlaps (source boxes are disjoint by now)."""
    have = np.bincount(pair_dst, weights=product(size), minlength=len(dst.tensor)).astype(np.int64)
    want = product(dst.shape)
    wrong = np.flatnonzero(have != want)
    if not len(wrong):
        return
    shards = np.flatnonzero(np.isin(dst.group, wrong))
    ranks = dict(zip(dst.group[shards][::-1].tolist(), target.rank[shards][::-1].tolist(), strict=True))
    raise PlanError(
        "destination elements without a source: "
        + listed(
            f"{target.catalog.name(int(dst.tensor[i]))} {dst.box(i)} on rollout rank {ranks[i]}: "
            f"{int(have[i])} of {int(want[i])} elements are held by some trainer rank"
            for i in wrong.tolist()
        )
    )


def choose(
    source: Layout,
    target_rank: Ints,
    box: Ints,
    held: Holders,
    nbytes: Ints,
    source_hosts: list[str],
    target_hosts: list[str],
    *,
    avoid: Sequence[int] = (),
    load: Sequence[int] = (),
) -> Ints:
    """The source shard of every transfer. Boxes with one holder first, then the rest from the largest to the smallest.

    load: bytes that each rank sends already (of a plan that is extended). avoid: see make_plan.

    Transfers whose box has the same holders (and, where hosts are known, the same destination host) share a heap of (bytes so
    far, rank, place among the holders). Loads only grow, so an entry that is out of date is corrected when it comes up.
    """
    begin = held.first.take(box)
    row = held.rows.take(begin)
    alone = np.diff(held.first).take(box) == 1
    source_rank = source.rank
    fixed: list[float] = np.bincount(source_rank[row[alone]], weights=nbytes[alone], minlength=source.world).tolist()
    load = [int(n) + before for n, before in zip(fixed, load or [0] * source.world, strict=True)]
    open_ = np.flatnonzero(~alone)
    open_ = open_[np.argsort(-nbytes[open_], kind="stable")]
    ranks: list[int] = source_rank[held.rows].tolist()
    firsts: list[int] = held.first.tolist()
    # Hosts that no trainer rank is on are all alike: nobody is near.
    near = sorted(set(source_hosts) & set(target_hosts) - {""})
    host = np.asarray([near.index(name) + 1 if name in near else 0 for name in target_hosts], np.int64)[target_rank[open_]]
    pairs, which = np.unique(box[open_] * (len(near) + 1) + host, return_inverse=True)
    heaps: dict[tuple[tuple[int, ...], int], list[tuple[int, int, int]]] = {}
    heap_of: list[list[tuple[int, int, int]]] = []  # of every pair; as loads only grow, it matters not when one is made
    for b, h in zip(*(column.tolist() for column in np.divmod(pairs, len(near) + 1)), strict=True):
        who = tuple(ranks[firsts[b] : firsts[b + 1]])
        heap = heaps.get((who, h))
        if heap is None:
            options = [(load[r], r, i) for i, r in enumerate(who)]
            options = [option for option in options if option[1] not in avoid] or options
            heap = heaps[who, h] = [o for o in options if h and source_hosts[o[1]] == near[h - 1]] or options
            heapify(heap)
        heap_of.append(heap)
    chosen: list[int] = []
    sizes: list[int] = nbytes[open_].tolist()
    for heap, n in zip(map(heap_of.__getitem__, which.tolist()), sizes, strict=True):
        had, rank, place = heap[0]
        while had != load[rank]:
            heapreplace(heap, (load[rank], rank, place))
            had, rank, place = heap[0]
        load[rank] = had + n
        heapreplace(heap, (had + n, rank, place))
        chosen.append(place)
    row[open_] = held.rows.take(begin.take(open_) + np.asarray(chosen, np.int64))
    return row
