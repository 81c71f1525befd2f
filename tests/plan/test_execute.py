"""Executed in numpy, a plan gives every rollout parameter exactly the elements that an independent oracle says it holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_cases import jobs, rollout_layout, same, trainer_layout
from layout_naive import Engine, Mcore, Sizes, engine_params, hf_model, mcore_params
from plan_support import execute, scattered, values

from weight_sync.layout.box import Box
from weight_sync.plan.boxes import distinct_boxes, holders, overlapping_tensors
from weight_sync.plan.planner import make_plan
from weight_sync.plan.proof import prove_exact_once

relaxed = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(jobs(), st.booleans())
def test_a_plan_turns_what_megatron_holds_into_what_sglang_holds(job, on_hosts):
    sizes, trainer, rollout, multiple = job
    hf = hf_model(sizes)
    source, target = trainer_layout(sizes, trainer, multiple), rollout_layout(sizes, rollout)
    hosts = ([f"h{r // 2}" for r in range(source.world)], [f"h{r // 2}" for r in range(target.world)]) if on_hosts else ()
    plan = make_plan(source, target, *hosts)
    prove_exact_once(plan, source=source, target=target)
    same(execute(plan, mcore_params(sizes, trainer, hf, multiple)), engine_params(sizes, rollout, hf))
    assert plan.nbytes.sum() == 2 * sum((array >= 0).sum() for p in engine_params(sizes, rollout, hf) for array in p.values())


@relaxed
@given(scattered())
def test_boxes_cut_and_laid_at_random_arrive_too_even_where_source_boxes_overlap(case):
    ids, source, target = case
    plan = make_plan(source, target)
    prove_exact_once(plan, source=source, target=target)
    same(execute(plan, values(source, ids.tensors)), values(target, ids.tensors))


@relaxed
@given(scattered())
def test_distinct_boxes_lose_nothing_and_holders_are_disjoint_and_complete(case):
    _, layout, _ = case
    boxes = distinct_boxes(layout)
    for name in ("tensor", "offset", "shape"):
        assert np.array_equal(getattr(boxes, name)[boxes.group], getattr(layout, name))
    assert len({(int(t), boxes.box(i)) for i, t in enumerate(boxes.tensor)}) == len(boxes.tensor)
    by_tensor: dict[int, list[Box]] = {}
    for i, t in enumerate(boxes.tensor.tolist()):
        by_tensor.setdefault(t, []).append(boxes.box(i))
    overlap = {t for t, group in by_tensor.items() if any(a.intersect(b) for i, a in enumerate(group) for b in group[:i])}
    assert overlapping_tensors(boxes) == overlap
    held = holders(layout, boxes)
    assert overlapping_tensors(held.boxes) == set()
    for i, t in enumerate(held.boxes.tensor.tolist()):
        box = held.boxes.box(i)
        want = [r for r in np.flatnonzero(layout.tensor == t).tolist() if _box(layout, r).contains(box)]
        assert held.rows[held.first[i] : held.first[i + 1]].tolist() == want


def _box(layout, row: int) -> Box:
    return Box(tuple(layout.offset[row].tolist()), tuple(layout.shape[row].tolist()))


@pytest.mark.parametrize(
    ("trainer", "rollout"),
    [
        (Mcore(8, tp=2, pp=2, ep=4, etp=1), Engine(tp=2)),
        (Mcore(8, tp=1, pp=2, ep=2, etp=2), Engine(tp=4, moe_ep=2)),
        (Mcore(8, tp=4, pp=2, vpp=2, etp=2), Engine(tp=2, pp=2, attn_dp=2, moe_ep=2)),
        (Mcore(4, tp=2, cp=2, ep=4), Engine(tp=4, pp=3, engines=2)),
        (Mcore(2, pp=2, virtual=(1, 3)), Engine(pp=4)),
    ],
)
def test_mixed_dense_and_sparse_layers_travel_between_unlike_parallelisms(trainer, rollout):
    sizes = Sizes(layers=4, heads=4, kv_heads=2, ffn=8, vocab=100, experts=4, expert_ffn=4, step=2, mlp_only=(1,))
    hf = hf_model(sizes)
    source, target = trainer_layout(sizes, trainer, 8), rollout_layout(sizes, rollout)
    plan = make_plan(source, target)
    prove_exact_once(plan, source=source, target=target)
    same(execute(plan, mcore_params(sizes, trainer, hf, 8)), engine_params(sizes, rollout, hf))


@pytest.mark.parametrize("stages", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_tied_head_is_served_whatever_side_keeps_a_copy_of_it(stages):
    sizes = Sizes(tied=True, vocab=70)
    trainer, rollout = Mcore(2 * stages[0], tp=2, pp=stages[0]), Engine(tp=2, pp=stages[1])
    hf = hf_model(sizes)
    source, target = trainer_layout(sizes, trainer, 40), rollout_layout(sizes, rollout)
    plan = make_plan(source, target)
    prove_exact_once(plan, source=source, target=target)
    same(execute(plan, mcore_params(sizes, trainer, hf, 40)), engine_params(sizes, rollout, hf))
    assert ("lm_head.weight" in {p.name for p in plan.target_params}) == (stages[1] > 1)
