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
    count = (first[1:] - first[:-1])[dst.group]
    shard = np.repeat(np.arange(len(target.tensor)), count)
    pair = np.arange(len(shard)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first[:-1][dst.group], count)
    # An element of a made tensor goes with the source that holds the first element of its block.
    block = source.catalog.block[target.tensor[shard]]
    offset = -(-low[pair] // block)
    shape = -(-(low[pair] + size[pair]) // block) - offset
    _packed_whole(source, target, shard, pair_src[pair], held, low[pair], low[pair] + size[pair], block)
    if len(empty := np.flatnonzero((shape < 1).any(axis=1))):
        keep = np.setdiff1d(np.arange(len(shard)), empty)
        shard, pair, block, offset, shape = shard[keep], pair[keep], block[keep], offset[keep], shape[keep]

    hosts = _hosts(source_hosts, source.world, "trainer"), _hosts(target_hosts, target.world, "rollout")
    nbytes = shape.prod(axis=1) * _itemsizes(target)[target.param[shard]]
    leads = source.catalog.leads[target.tensor[shard]]
    cells = Cells(low[pair], low[pair] + size[pair], offset, offset + shape, block)
    row = choose_together(source, target.rank[shard], pair_src[pair], pair, leads, cells, held, nbytes, *hosts, avoid=avoid)

    order = np.lexsort((target.start[shard], target.param[shard], source.rank[row]))
    shard, row, block, offset, shape = shard[order], row[order], block[order], offset[order], shape[order]
    return Plan(
        catalog=source.catalog,
        source_params=source.params,
        target_params=target.params,
        source_world=source.world,
        target_world=target.world,
        source_hosts=tuple(hosts[0]),
        target_hosts=tuple(hosts[1]),
        tensor=target.tensor[shard],
        offset=offset,
        shape=shape,
        source=source.param[row],
        source_start=source.start[row] + ((offset * block - source.offset[row]) * source.strides[row]).sum(axis=1),
        source_strides=source.strides[row] * block,
        target=target.param[shard],
        target_start=target.start[shard] + ((offset - target.offset[shard]) * target.strides[shard]).sum(axis=1),
        target_strides=target.strides[shard],
    )


def _packed_whole(
    source: Layout, target: Layout, shard: Ints, box: Ints, held: Holders, low: Ints, high: Ints, block: Ints
) -> None:
    """Raise PlanError where the trainer's cut runs through values that are packed in one element, which one rank makes."""
    catalog, tensor = source.catalog, target.tensor[shard]
    end = catalog.shapes[catalog.base[tensor]]
    cut = ((low % block != 0) | ((high % block != 0) & (high != end))).any(axis=1) & catalog.leads[tensor]
    said = dict.fromkeys(
        f"{catalog.name(int(tensor[i]))}: rank {int(source.rank[held.rows[held.first[box[i]]]])} holds {low[i].tolist()} to "
        f"{high[i].tolist()} of {catalog.name(int(catalog.base[tensor[i]]))}, of which {block[i].tolist()} are one element"
        for i in np.flatnonzero(cut).tolist()
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
    block, tensor = catalog.block[target.tensor], catalog.base[target.tensor]
    offset = target.offset * block
    return replace(
        target, tensor=tensor, offset=offset, shape=np.minimum(target.shape * block, catalog.shapes[tensor] - offset)
    )


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
        block = self.block[scales]
        begins: Bools = self.low[values] // block <= self.first[scales]
        ends: Bools = -(-self.high[values] // block) >= self.last[scales]
        return np.logical_and.reduce(begins & ends, axis=1)


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


def _itemsizes(layout: Layout) -> Ints:
    return np.fromiter((ITEMSIZE[p.dtype] for p in layout.params), np.int64, len(layout.params))


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
    kinds = sorted({(p.dtype, p.cast_from) for layout in (source, target) for p in layout.params if not p.part})
    _legal_weights(source)
    if len({dtype for dtype, _ in kinds}) < 2:
        return
    index = {kind: i for i, kind in enumerate(kinds)}
    held = np.zeros((2, len(kinds), len(source.catalog)), np.bool_)
    for side, layout in enumerate((source, target)):
        kind = np.fromiter((index.get((p.dtype, p.cast_from), -1) for p in layout.params), np.int64, len(layout.params))
        plain = np.flatnonzero(kind[layout.param] >= 0)
        held[side, kind[layout.param[plain]], layout.tensor[plain]] = True
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
    begin = np.maximum(src.offset[pair_src], dst.offset[pair_dst])
    end = np.minimum(
        src.offset[pair_src] + src.shape[pair_src],
        dst.offset[pair_dst] + dst.shape[pair_dst],
    )
    keep = (end > begin).all(axis=1)
    return pair_dst[keep], pair_src[keep], begin[keep], (end - begin)[keep]


def _covered(target: Layout, dst: Boxes, pair_dst: Ints, size: Ints) -> None:
    """Every destination box must be filled exactly by its overlaps (source boxes are disjoint by now)."""
    have = np.bincount(pair_dst, weights=size.prod(axis=1), minlength=len(dst.tensor)).astype(np.int64)
    want = dst.shape.prod(axis=1)
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
    row = held.rows[held.first[box]]
    count = held.first[box + 1] - held.first[box]
    source_rank = source.rank
    alone = count == 1
    fixed: list[float] = np.bincount(source_rank[row][alone], weights=nbytes[alone], minlength=source.world).tolist()
    load = [int(n) + before for n, before in zip(fixed, load or [0] * source.world, strict=True)]
    open_ = np.flatnonzero(~alone)
    open_ = open_[np.lexsort((open_, -nbytes[open_]))]
    ranks: list[int] = source_rank[held.rows].tolist()
    rows: list[int] = held.rows.tolist()
    firsts: list[int] = held.first.tolist()
    heaps: dict[tuple[tuple[int, ...], str], list[tuple[int, int, int]]] = {}
    heap_of: dict[tuple[int, str], list[tuple[int, int, int]]] = {}
    chosen: list[int] = []
    boxes_: list[int] = box[open_].tolist()
    sizes: list[int] = nbytes[open_].tolist()
    hosts: list[str] = [target_hosts[t] for t in target_rank[open_].tolist()]
    for b, n, host in zip(boxes_, sizes, hosts, strict=True):
        heap = heap_of.get((b, host))
        if heap is None:
            who = tuple(ranks[firsts[b] : firsts[b + 1]])
            heap = heaps.get((who, host))
            if heap is None:
                options = [(load[r], r, i) for i, r in enumerate(who)]
                options = [option for option in options if option[1] not in avoid] or options
                near = [option for option in options if host and source_hosts[option[1]] == host]
                heap = heaps[who, host] = near or options
                heapify(heap)
            heap_of[b, host] = heap
        while heap[0][0] != load[heap[0][1]]:
            _, rank, place = heap[0]
            heapreplace(heap, (load[rank], rank, place))
        _, rank, place = heap[0]
        load[rank] += n
        heapreplace(heap, (load[rank], rank, place))
        chosen.append(rows[firsts[b] + place])
    row[open_] = chosen
    return row
