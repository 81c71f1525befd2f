"""A plan in words: where one tensor goes, what one rank sends or receives, and why that rank is the source.

Who else holds a box is not part of a plan. Given the trainer's layout, it is looked up there; without it, only what the plan
itself knows (hosts, bytes) is said.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from weight_sync.errors import PlanError, listed
from weight_sync.ids import Side
from weight_sync.layout.box import Box
from weight_sync.layout.table import Ints, Layout
from weight_sync.plan.picture import bars, numbers_text
from weight_sync.plan.plan import Plan
from weight_sync.plan.runs import inner_elements


def explain_tensor(plan: Plan, name: str, source_layout: Layout | None = None) -> str:
    """Every transfer of one HF tensor: box, from where, to where, in which runs, and why that source.

    Raises PlanError when the model has no such tensor or the layout is not the one of this plan.
    """
    tensor = plan.catalog.ids.get(name)
    if tensor is None:
        raise PlanError(f"no tensor {name} in this plan; close: {listed(_close(name, plan.catalog.ids))}")
    rows = np.flatnonzero(plan.tensor == tensor).tolist()
    pattern = plan.catalog.pattern_of(tensor)
    what = f"{name} {list(pattern.shape)} {_kind(plan, tensor, rows)}"
    head = f"{what}: {_count(len(rows), 'transfer')}, {_bytes(int(plan.nbytes[rows].sum()))}"
    if not rows:
        return f"{head}; the rollout holds nothing of it"
    if source_layout is not None and source_layout.params != plan.source_params:
        raise PlanError(f"{name}: the trainer layout given is not the one this plan was made from")
    why = _Why(plan, tensor, source_layout)
    return "\n".join([head, *(f"  {_transfer(plan, row)}; {why.of(row)}" for row in rows)])


def explain_rank(plan: Plan, side: Side | str, rank: int) -> str:
    """What one rank sends (trainer) or receives (rollout): totals, by peer, and by parameter.

    Raises PlanError when the side has no such rank.
    """
    side = Side(side)
    trainer = side is Side.TRAINER
    world = plan.source_world if trainer else plan.target_world
    if not 0 <= rank < world:
        raise PlanError(f"{side} rank {rank} is outside the world of {world}")
    rows = plan.rows_from(rank) if trainer else plan.rows_to(rank)
    verb, preposition, other = ("sends", "to", Side.ROLLOUT) if trainer else ("receives", "from", Side.TRAINER)
    hosts = plan.source_hosts if trainer else plan.target_hosts
    runs, _ = _runs(plan, rows)
    lines = [
        f"{side} rank {rank}{_at(hosts[rank])} {verb} {_bytes(int(plan.nbytes[rows].sum()))} "
        f"in {_count(len(rows), 'transfer')}, {_count(int(runs.sum()), 'run')}"
    ]
    peers = (plan.target_rank if trainer else plan.source_rank)[rows]
    for peer in np.unique(peers).tolist():
        mine = rows[peers == peer]
        lines.append(
            f"  {preposition} {other} rank {peer}: {_bytes(int(plan.nbytes[mine].sum()))} in {_count(len(mine), 'transfer')}"
        )
    params = (plan.source if trainer else plan.target)[rows]
    table = plan.source_params if trainer else plan.target_params
    present: list[int] = np.unique(params).tolist()
    for i in present:
        names = dict.fromkeys(plan.catalog.name(t) for t in plan.tensor[rows[params == i]].tolist())
        lines.append(f"  {table[i].name} {list(table[i].shape)}: {listed(names, 4)}")
    return "\n".join(lines)


def _kind(plan: Plan, tensor: int, rows: list[int]) -> str:
    """The dtype that arrives, and what it is made of where that is not what the trainer holds."""
    catalog, pattern = plan.catalog, plan.catalog.pattern_of(tensor)
    if pattern.made is not None and catalog.is_made[tensor]:
        base = int(catalog.base[tensor])
        of = "the" if base == tensor else catalog.name(base) + ", the"
        return f"{catalog.dtype_of(tensor)} ({pattern.made.part} made of {of} {catalog.pattern_of(base).dtype} weight)"
    arrives = dict.fromkeys(plan.target_params[int(plan.target[row])].dtype for row in rows)
    cast = [dtype for dtype in arrives if dtype != pattern.dtype]
    return f"{pattern.dtype}, cast to {', '.join(cast)}" if cast else pattern.dtype


def explain_rows(plan: Plan, rows: Ints, title: str, runs: int | None = None) -> str:
    """What some transfers bring together: totals, by pair of ranks, and by kind of tensor, each with a bar.

    runs: how many contiguous ranges are written, where a schedule says so; by default those of transfers that go directly.
    """
    runs = int(_runs(plan, rows)[0].sum()) if runs is None else runs
    total = int(plan.nbytes[rows].sum())
    lines = [f"{title}: {_bytes(total)} in {_count(len(rows), 'transfer')}, {_count(runs, 'run')}"]
    pair = plan.source_rank[rows] * plan.target_world + plan.target_rank[rows]
    pairs = _heaviest(pair, plan.nbytes[rows])
    if len(pairs) > 1:
        named = ((f"trainer {p // plan.target_world} -> rollout {p % plan.target_world}", n) for p, n in pairs)
        lines += ["by ranks:", *bars([(label, n, _bytes(n)) for label, n in named])]
    lines += ["by tensor:", *bars(_templates(plan, rows))]
    return "\n".join(lines)


def _templates(plan: Plan, rows: Ints) -> list[tuple[str, int, str]]:
    """(template, bytes, text) of the kinds of tensors, heaviest first."""
    which = np.searchsorted(np.asarray(plan.catalog.first), plan.tensor[rows], "right") - 1
    return [
        (
            plan.catalog.patterns[i].template,
            n,
            f"{_bytes(n)} of {_count(len(np.unique(plan.tensor[rows[which == i]])), 'tensor')}",
        )
        for i, n in _heaviest(which, plan.nbytes[rows])
    ]


def _heaviest(key: Ints, nbytes: Ints) -> list[tuple[int, int]]:
    """(key, sum of bytes), heaviest first."""
    keys, index = np.unique(key, return_inverse=True)
    total = np.zeros(len(keys), np.int64)
    np.add.at(total, index, nbytes)
    order = np.argsort(-total, kind="stable")
    return list(zip(keys[order].tolist(), total[order].tolist(), strict=True))


def summary(plan: Plan) -> dict[str, Any]:
    """Numbers of a whole plan: transfers, bytes, runs, and bytes by trainer rank (largest, mean over all ranks, skew).

    skew is largest over mean: 1.0 is perfect balance. same_host_bytes counts where both hosts are known.
    """
    runs, _ = _runs(plan, np.arange(len(plan)))
    sent = np.bincount(plan.source_rank, weights=plan.nbytes, minlength=plan.source_world)
    total = int(plan.nbytes.sum())
    mean = total / plan.source_world if plan.source_world else 0.0
    most = int(sent.max()) if len(sent) else 0
    names = {host: i for i, host in enumerate(sorted({*plan.source_hosts, *plan.target_hosts} - {""}))}
    a = np.asarray([names.get(host, -1) for host in plan.source_hosts], np.int64)[plan.source_rank]
    b = np.asarray([names.get(host, -2) for host in plan.target_hosts], np.int64)[plan.target_rank]
    return {
        "transfers": len(plan),
        "bytes": total,
        "runs": int(runs.sum()),
        "source_bytes": {"max": most, "mean": mean, "skew": most / mean if mean else 1.0},
        "sources": int((sent > 0).sum()),
        "same_host_bytes": int(plan.nbytes[a == b].sum()),
    }


_FEW = 8
"""Holders of a box that are named with what each sends; of more their range."""


class _Why:
    """Why a rank was chosen, for the transfers of one tensor."""

    def __init__(self, plan: Plan, tensor: int, layout: Layout | None) -> None:
        self.plan = plan
        self.layout = layout
        self.sent = np.bincount(plan.source_rank, weights=plan.nbytes, minlength=plan.source_world).astype(np.int64)
        # What is made of a weight is sent by a rank that holds the weight.
        weight = int(plan.catalog.base[tensor])
        self.shards = np.zeros(0, np.int64) if layout is None else np.flatnonzero(layout.tensor == weight)
        self.block, self.end = plan.catalog.block[tensor], plan.catalog.shapes[weight]

    def of(self, row: int) -> str:
        plan = self.plan
        rank, target = int(plan.source_rank[row]), int(plan.target_rank[row])
        host = plan.target_hosts[target]
        near = host != "" and plan.source_hosts[rank] == host
        if self.layout is None:
            return f"source on the same host, {host}" if near else "source chosen among the ranks that hold it"
        holders = self._holders(row)
        if rank not in holders and plan.made[row]:
            return "its blocks lie on several trainer ranks, of which this one sends them"
        if rank not in holders:
            raise PlanError(
                f"trainer rank {rank} does not hold {_box(plan, row)} of {plan.catalog.name(int(plan.tensor[row]))}"
            )
        if len(holders) == 1:
            return "the only holder" + (f", on the same host, {host}" if near else "")
        local = [r for r in holders if host and plan.source_hosts[r] == host]
        if local == [rank]:
            return f"of ranks {listed(holders)} the only one on the same host, {host}"
        few = local or holders
        if len(few) <= _FEW:
            ranks, totals = listed(few), listed(f"{r}: {_bytes(int(self.sent[r]))}" for r in few)
        else:
            least, most = (_bytes(int(of(self.sent[r] for r in few))) for of in (min, max))
            ranks, totals = numbers_text(few), f"{least} each" if least == most else f"{least} to {most}"
        among = f"ranks {ranks}" + (f" on the same host, {host}" if local else "")
        return f"fewest bytes when it was chosen, of {among} (in the end {totals})"

    def _holders(self, row: int) -> list[int]:
        """Ranks with a shard that contains the transfer's box, or the weights it is made of."""
        layout, plan = self.layout, self.plan
        assert layout is not None
        first = plan.offset[row] * self.block
        last = np.minimum((plan.offset[row] + plan.shape[row]) * self.block, self.end)
        low, high = layout.offset[self.shards], layout.offset[self.shards] + layout.shape[self.shards]
        inside = (low <= first).all(axis=1) & (high >= last).all(axis=1)
        return np.unique(layout.rank[self.shards[inside]]).tolist()


def _transfer(plan: Plan, row: int) -> str:
    a, b = plan.source_params[int(plan.source[row])], plan.target_params[int(plan.target[row])]
    runs, run_bytes = _runs(plan, np.asarray([row]))
    form = "contiguous" if runs[0] == 1 else f"strided, {runs[0]} runs x {_bytes(int(run_bytes[0]))}"
    return (
        f"{_box(plan, row)}: trainer rank {a.rank}{_at(plan.source_hosts[a.rank])} {a.name} -> "
        f"rollout rank {b.rank}{_at(plan.target_hosts[b.rank])} {b.name}; {_bytes(int(plan.nbytes[row]))}, {form}"
    )


def _box(plan: Plan, row: int) -> Box:
    n = len(plan.catalog.pattern_of(int(plan.tensor[row])).shape)
    return Box(tuple(plan.offset[row, :n].tolist()), tuple(plan.shape[row, :n].tolist()))


def _runs(plan: Plan, rows: Ints) -> tuple[Ints, Ints]:
    """(runs, bytes of each run) of transfers."""
    inner = inner_elements(plan.shape[rows], plan.source_strides[rows], plan.target_strides[rows])
    return plan.shape[rows].prod(axis=1) // np.maximum(inner, 1), inner * plan.itemsize[rows]


def _at(host: str) -> str:
    return f" ({host})" if host else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _bytes(number: int) -> str:
    """As people read it: 96 B, 1.5 KB, 2.0 MB (powers of 1000)."""
    size, unit = float(number), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{number} B" if unit == "B" else f"{size:.1f} {unit}"


def _close(name: str, known: Iterable[str]) -> list[str]:
    """Names that share the last part, or any."""
    last = name.rsplit(".", 2)[-2:]
    names = list(known)
    return [other for other in names if other.rsplit(".", 2)[-2:] == last][:5] or names[:5]
