"""Small pictures in plain text: who holds and sends which part of a tensor, and bars of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from weight_sync.layout.table import Ints, Layout
from weight_sync.plan.plan import Plan

_FULL = "█"
Interval = tuple[int, int]


def numbers_text(numbers: Iterable[int]) -> str:
    """Ascending numbers with stretches joined: "0-3, 8"; equal steps as "0, 8, ... 56"."""
    items = sorted(set(numbers))
    if len(items) > 3:
        step = items[1] - items[0]
        if step > 1 and items == list(range(items[0], items[-1] + 1, step)):
            return f"{items[0]}, {items[1]}, ... {items[-1]}"
    parts: list[str] = []
    first = 0
    for i in range(1, len(items) + 1):
        if i == len(items) or items[i] != items[i - 1] + 1:
            parts.append(f"{items[first]}" if i - first == 1 else f"{items[first]}-{items[i - 1]}")
            first = i
    return ", ".join(parts)


def bars(rows: Sequence[tuple[str, int, str]], width: int = 40, limit: int = 16) -> list[str]:
    """One bar for each (label, size, text), in the order given; those past `limit` are counted."""
    shown = rows[:limit]
    if not shown:
        return []
    most = max(size for _, size, _ in rows) or 1
    wide = max(len(label) for label, _, _ in shown)
    lines = [f"  {label:<{wide}}  {_FULL * max(1, round(width * size / most)):<{width}}  {text}" for label, size, text in shown]
    return [*lines, f"  ... and {len(rows) - limit} more"] if len(rows) > limit else lines


def tensor_picture(plan: Plan, tensor: int, source: Layout | None = None, width: int = 72) -> list[str]:
    """Where a tensor is cut on each side, one ruler for each dim that is cut; nothing for one that is whole everywhere.

    source: the trainer's layout; with it the trainer's line shows every rank that holds a part, else those that send.
    """
    rows = np.flatnonzero(plan.tensor == tensor)
    shape = plan.catalog.pattern_of(tensor).shape
    # The trainer holds the weight that a quantised tensor is made of.
    block = plan.catalog.block[tensor]
    held = None if source is None else np.flatnonzero(source.tensor == plan.catalog.base[tensor])
    lines: list[str] = []
    for d, size in enumerate(shape):
        if held is not None and source is not None:
            first = source.offset[held, d] // block[d]
            last = -(-(source.offset[held, d] + source.shape[held, d]) // block[d])
            trainer = _reach(source.rank[held], first, last - first)
        else:
            trainer = _reach(plan.source_rank[rows], plan.offset[rows, d], plan.shape[rows, d])
        rollout = _reach(plan.target_rank[rows], plan.offset[rows, d], plan.shape[rows, d])
        if set(trainer) | set(rollout) == {(0, size)}:
            continue
        lines.append(f"  dim {d}, {size} elements:")
        for side, held_by in (("trainer", trainer), ("rollout", rollout)):
            lanes = _lanes(held_by)
            for i, lane in enumerate(lanes):
                lines.append(f"    {side if i == 0 else '':7} {_lane(lane, size, width)}")
    return lines


def _reach(rank: Ints, offset: Ints, shape: Ints) -> dict[Interval, list[int]]:
    """From where to where each rank's part reaches along a dim -> the ranks for which that is so."""
    low: dict[int, int] = {}
    high: dict[int, int] = {}
    for r, a, n in zip(rank.tolist(), offset.tolist(), shape.tolist(), strict=True):
        low[r], high[r] = min(low.get(r, a), a), max(high.get(r, a + n), a + n)
    found: dict[Interval, list[int]] = {}
    for r in sorted(low):
        found.setdefault((low[r], high[r]), []).append(r)
    return found


def _lanes(held_by: dict[Interval, list[int]]) -> list[list[tuple[Interval, list[int]]]]:
    """Intervals in as few lines as possible, none overlapping within a line."""
    lanes: list[list[tuple[Interval, list[int]]]] = []
    for interval, ranks in sorted(held_by.items()):
        lane = next((lane for lane in lanes if lane[-1][0][1] <= interval[0]), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append((interval, ranks))
    return lanes


def _lane(lane: Sequence[tuple[Interval, list[int]]], size: int, width: int) -> str:
    if len(lane) * 2 > width:
        return f"{len(lane)} parts, from rank {lane[0][1][0]} to rank {lane[-1][1][0]}"
    text = [" "] * (width + 1)
    for (low, high), ranks in lane:
        a, b = round(width * low / size), round(width * high / size)
        text[a] = text[b] = "|"
        label = numbers_text(ranks)
        room = b - a - 1
        if len(label) > room:
            label = label[: room - 1].rstrip(" ,.") + "…" if room > 1 else label[:room]
        text[a + 1 : a + 1 + len(label)] = label
    return "".join(text).rstrip()
