"""Runs and schedules hold every element of a transfer once, on both sides, in order."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_cases import elements
from plan_support import scattered

from weight_sync.layout.catalog import Catalog, Pattern
from weight_sync.layout.table import Param, layout_from_shards
from weight_sync.plan.planner import make_plan
from weight_sync.plan.runs import expand_runs, inner_elements, merge_runs
from weight_sync.plan.schedule import Budget, CostModel, Method, make_schedule

relaxed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(scattered())
def test_the_runs_of_a_transfer_are_its_elements_in_row_major_order(case):
    _, source, target = case
    plan = make_plan(source, target)
    transfer, a, b, count = expand_runs(
        plan.shape, plan.source_start, plan.source_strides, plan.target_start, plan.target_strides
    )
    for i in range(len(plan)):
        mine = transfer == i
        for starts, start, strides in (
            (a, plan.source_start, plan.source_strides),
            (b, plan.target_start, plan.target_strides),
        ):
            have = np.concatenate([np.arange(s, s + n) for s, n in zip(starts[mine], count[mine], strict=True)])
            assert have.tolist() == elements(start[i], strides[i], plan.shape[i]).ravel().tolist()


@relaxed
@given(scattered())
def test_runs_are_as_long_as_they_can_be(case):
    _, source, target = case
    plan = make_plan(source, target)
    inner = inner_elements(plan.shape, plan.source_strides, plan.target_strides)
    for i in range(len(plan)):
        a = elements(plan.source_start[i], plan.source_strides[i], plan.shape[i]).ravel()
        b = elements(plan.target_start[i], plan.target_strides[i], plan.shape[i]).ravel()
        breaks = np.flatnonzero((np.diff(a) != 1) | (np.diff(b) != 1))
        if not len(breaks):
            assert inner[i] == len(a)
        assert len(a) % inner[i] == 0
        assert set((breaks + 1) % inner[i]) <= {0}


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=8), st.integers(0, 3))
def test_merging_keeps_every_byte_and_joins_what_follows_on_both_sides(runs, gap):
    target = np.cumsum([0, *(n + gap * (i % 2) for i, (_, n) in enumerate(runs))])[:-1].astype(np.int64)
    source = np.asarray([s for s, _ in runs], np.int64)
    nbytes = np.asarray([n for _, n in runs], np.int64)
    a, b, n, _ = merge_runs(source, target, nbytes)

    def pairs(x, y, z) -> set[tuple[int, int]]:
        return {(s + i, t + i) for s, t, k in zip(x.tolist(), y.tolist(), z.tolist(), strict=True) for i in range(k)}

    assert pairs(a, b, n) == pairs(source, target, nbytes)
    assert not ((a[1:] == a[:-1] + n[:-1]) & (b[1:] == b[:-1] + n[:-1])).any()


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=10))
def test_runs_that_touch_are_not_joined_across_allocations(runs):
    nbytes = np.asarray([n for n, _ in runs], np.int64)
    owner = np.asarray([group for _, group in runs], np.int64)
    at = np.cumsum(nbytes) - nbytes
    a, b, n, first = merge_runs(at + 100, at, nbytes, owner)
    assert (a == b + 100).all()
    ends = np.flatnonzero(np.diff(owner)) + 1
    assert b.tolist() == at[np.append(0, ends)].tolist()
    assert first.tolist() == [0, *ends.tolist()]
    assert int(n.sum()) == int(nbytes.sum())


@relaxed
@given(scattered(), st.sampled_from([0.0, 1e-9, 1e-6, 1.0]), st.integers(16, 200))
def test_pieces_cover_each_staged_transfer_once_and_stay_in_their_budget(case, seconds, budget):
    _, source, target = case
    plan = make_plan(source, target)
    schedule = make_schedule(plan, CostModel(seconds_per_write=seconds), Budget(budget, budget))
    assert schedule.digest == make_schedule(plan, CostModel(seconds_per_write=seconds), Budget(budget, budget)).digest
    staged: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row in range(len(plan)):
        marks = np.zeros(plan.shape[row], np.int64)
        pieces = [p for p in schedule.pieces if p.row == row]
        assert bool(pieces) == (schedule.method[row] != Method.DIRECT)
        for p in pieces:
            marks[tuple(slice(o, o + n) for o, n in zip(p.at, p.shape, strict=True))] += 1
            assert p.nbytes == np.prod(p.shape) * 4 <= budget // 2
            if p.method in (Method.UNPACK, Method.BOTH):
                assert p.stage + p.nbytes <= budget
                staged.setdefault((int(plan.target_rank[row]), p.round), []).append((p.stage, p.stage + p.nbytes))
        assert (marks == bool(pieces)).all()
        assert schedule.reason(row)
    for spans in staged.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for rank in range(target.world):
        mine = [p for p in schedule.pieces if plan.target_rank[p.row] == rank and p.method in (Method.UNPACK, Method.BOTH)]
        assert schedule.unpacked.get(rank, []) == mine
        assert schedule.stage_bytes.get(rank, 0) == max((p.stage + p.nbytes for p in mine), default=0)
    assert sum(part["transfers"] for part in schedule.summary().values()) == len(plan)
    assert sum(part["bytes"] for part in schedule.summary().values()) == plan.nbytes.sum()


@relaxed
@given(scattered())
def test_a_transfer_is_packed_only_where_the_destination_is_whole_and_unpacked_only_where_the_source_is(case):
    _, source, target = case
    plan = make_plan(source, target)
    schedule = make_schedule(plan, CostModel(seconds_per_write=1.0))
    for row in range(len(plan)):
        flat = [
            (np.diff(elements(0, strides[row], plan.shape[row]).ravel()) == 1).all()
            for strides in (plan.source_strides, plan.target_strides)
        ]
        method = Method(int(schedule.method[row]))
        if method is Method.PACK:
            assert flat[1]
        if method is Method.UNPACK:
            assert flat[0]
        if all(flat):
            assert method is Method.DIRECT


@pytest.mark.parametrize(
    ("shape", "strides", "inner"), [([2, 3], [3, 1], 6), ([2, 3], [4, 1], 3), ([2, 3], [1, 2], 1), ([3, 1], [1, 9], 3)]
)
def test_inner_elements_of_known_shapes(shape, strides, inner):
    assert inner_elements(np.asarray([shape]), np.asarray([strides])).tolist() == [inner]


@relaxed
@given(scattered(), st.integers(16, 200))
def test_the_senders_of_a_destination_advance_together_through_its_staging_rounds(case, budget):
    _, source, target = case
    plan = make_plan(source, target)
    schedule = make_schedule(plan, CostModel(seconds_per_write=1.0), Budget(budget, budget))
    unpacked = [p for p in schedule.pieces if p.method in (Method.UNPACK, Method.BOTH)]
    for rank in {int(plan.target_rank[p.row]) for p in unpacked}:
        staged = [p.row for p in unpacked if plan.target_rank[p.row] == rank]
        if any(plan.target_rank[p.row] == rank and p.method == Method.PACK for p in schedule.pieces):
            continue  # these take their turn too, but in no round
        left = {int(s): int(plan.nbytes[[r for r in set(staged) if plan.source_rank[r] == s]].sum())
                for s in plan.source_rank[staged]}  # fmt: skip
        sent = dict.fromkeys(left, 0)
        order = sorted((p for p in unpacked if plan.target_rank[p.row] == rank), key=lambda p: (p.round, p.stage))
        begun: set[int] = set()
        for piece in order:
            sender = int(plan.source_rank[piece.row])
            if piece.row not in begun:
                begun.add(piece.row)
                assert all(sent[sender] <= sent[other] for other in sent if sent[other] < left[other])
            sent[sender] += piece.nbytes
        assert sent == left


def test_destinations_that_hold_different_things_begin_their_staging_rounds_with_different_senders():
    senders, receivers, rows, width = 4, 16, 16, 4
    own = tuple(Pattern(f"own{i}", (4,), "float32") for i in range(receivers))
    catalog = Catalog((Pattern("t", (rows, senders * width), "float32"), *own))

    def shard(tensor, offset, shape, strides):
        return {"tensor": tensor, "offset": offset, "shape": shape, "param": tensor, "start": 0, "strides": strides}

    mine = [shard(p.template, [0], [4], [1]) for p in own]
    source = layout_from_shards(
        "trainer", catalog,
        [
            [Param(r, "t", (rows, width), "float32"), *(Param(r, p.template, (4,), "float32") for p in own)]
            for r in range(senders)
        ],
        [[shard("t", [0, r * width], [rows, width], [width, 1]), *mine] for r in range(senders)],
    )  # fmt: skip
    target = layout_from_shards(
        "rollout", catalog,
        [[Param(r, "t", (rows, senders * width), "float32"), Param(r, f"own{r}", (4,), "float32")] for r in range(receivers)],
        [[shard("t", [0, 0], [rows, senders * width], [senders * width, 1]), mine[r]] for r in range(receivers)],
    )  # fmt: skip
    plan = make_plan(source, target)
    schedule = make_schedule(plan, CostModel(seconds_per_write=1.0), Budget(1 << 20, 1 << 20))
    first: dict[int, int] = {}
    for piece in sorted(schedule.pieces, key=lambda p: (p.round, p.stage)):
        first.setdefault(int(plan.target_rank[piece.row]), int(plan.source_rank[piece.row]))
    assert sorted(first) == list(range(receivers))
    assert sorted(set(first.values())) == list(range(senders))
