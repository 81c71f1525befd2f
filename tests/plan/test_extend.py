"""A plan that grows and shrinks engine by engine is, but for who sends, the plan that would be made from scratch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_cases import jobs, rollout_layout, trainer_layout
from layout_naive import Engine, Mcore, Sizes
from plan_support import execute, scattered, values

from weight_sync.errors import PlanError
from weight_sync.layout.table import Layout
from weight_sync.plan import extend
from weight_sync.plan.extend import add_engine, drop_engine, engine_part
from weight_sync.plan.plan import Plan
from weight_sync.plan.planner import make_plan
from weight_sync.plan.proof import prove_exact_once

relaxed = settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
SIZES = Sizes(layers=4, heads=4, kv_heads=2, ffn=8, vocab=100, experts=4, expert_ffn=4, step=2)


def copies(layout: Layout, engines: int) -> Layout:
    """The layout of so many engines, each like this one."""
    n, world = len(layout.params), layout.world
    columns = {c: np.concatenate([getattr(layout, c)] * engines) for c in ("tensor", "offset", "shape", "start", "strides")}
    return replace(
        layout,
        world=world * engines,
        params=tuple(replace(p, rank=e * world + p.rank) for e in range(engines) for p in layout.params),
        param=np.concatenate([layout.param + e * n for e in range(engines)]),
        **columns,
    )


def content(plan: Plan) -> list[tuple[object, ...]]:
    """Every transfer but for its source, in an order of its own."""
    rows = zip(
        plan.target_rank.tolist(),
        [plan.target_params[i].name for i in plan.target.tolist()],
        plan.target_start.tolist(),
        plan.tensor.tolist(),
        *(map(tuple, getattr(plan, c).tolist()) for c in ("offset", "shape", "target_strides")),
        strict=True,
    )
    return sorted(rows)


def load(plan: Plan) -> np.ndarray:
    return np.bincount(plan.source_rank, weights=plan.nbytes, minlength=plan.source_world)


@relaxed
@given(scattered(), st.integers(1, 3))
def test_a_plan_that_grew_is_the_plan_from_scratch_up_to_who_sends(case, more):
    ids, source, one = case
    grown = make_plan(source, one)
    for _ in range(more):
        grown = add_engine(grown, source, [""] * one.world)
    target = copies(one, 1 + more)
    scratch = make_plan(source, target)
    assert content(grown) == content(scratch)
    assert (grown.target_params, grown.target_world) == (scratch.target_params, scratch.target_world)
    prove_exact_once(grown, source=source, target=target)
    order = np.lexsort((grown.target, grown.source_rank))
    assert np.array_equal(order, np.arange(len(grown))), "not in the order that a plan has"
    arrived = execute(grown, values(source, ids.tensors))
    for engine in range(1, 1 + more):
        for local in range(one.world):
            for name, array in arrived[local].items():
                assert np.array_equal(arrived[engine * one.world + local][name], array)


@relaxed
@given(jobs(), st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_engines_come_and_go_in_any_order_and_every_part_stays_what_it_was(case, moves):
    sizes, mcore, engine, multiple = case
    source, one = trainer_layout(sizes, mcore, multiple), rollout_layout(sizes, replace(engine, engines=1))
    width = one.world
    plan = make_plan(source, one)
    parts = [engine_part(plan, 0, width).digest]
    for move in moves:
        if move % 2 or len(parts) == 1:
            plan = add_engine(plan, source, ["somewhere"] * width)
            parts.append(engine_part(plan, len(parts), width).digest)
        else:
            plan = drop_engine(plan, move % len(parts), width)
            del parts[move % len(parts)]
        assert [engine_part(plan, i, width).digest for i in range(len(parts))] == parts
        assert [p.rank for p in plan.target_params] == sorted(p.rank for p in plan.target_params)
        assert len(plan.target_hosts) == plan.target_world == width * len(parts)
    prove_exact_once(plan, source=source, target=copies(one, len(parts)))


def test_dropping_what_was_added_gives_the_same_plan_again():
    source, one = trainer_layout(SIZES, Mcore(8, tp=2, pp=2, ep=2), 8), rollout_layout(SIZES, Engine(tp=2))
    plan = make_plan(source, one, [f"h{r}" for r in range(8)], ["a", "b"])
    assert drop_engine(add_engine(plan, source, ["c", "d"]), 1, 2).digest == plan.digest


def test_equal_inputs_extend_to_equal_plans_and_sources_stay_balanced():
    source, one = trainer_layout(SIZES, Mcore(8, tp=2, pp=1, ep=2), 8), rollout_layout(SIZES, Engine(tp=2))
    a = b = make_plan(source, one)
    for _ in range(6):
        a, b = add_engine(a, source, ["", ""]), add_engine(b, source, ["", ""])
        assert a.digest == b.digest
    scratch = make_plan(source, copies(one, 7))
    assert load(a).sum() == load(scratch).sum()
    assert load(a).max() <= load(scratch).max() * 1.05
    assert load(a).max() <= load(a).min() * 1.2, "every rank holds what another one holds too"


def test_a_new_engine_is_served_from_its_own_host_where_a_copy_is_there():
    source, one = trainer_layout(SIZES, Mcore(8, tp=2, pp=1, ep=2), 8), rollout_layout(SIZES, Engine(tp=2))
    hosts = ["far"] * 4 + ["near"] * 4
    plan = add_engine(make_plan(source, one, hosts, ["far", "far"]), source, ["near", "near"])
    assert set(engine_part(plan, 0, 2).source_rank.tolist()) <= {0, 1, 2, 3}
    assert set(engine_part(plan, 1, 2).source_rank.tolist()) <= {4, 5, 6, 7}


def test_an_avoided_rank_sends_only_what_it_alone_holds():
    source, one = trainer_layout(SIZES, Mcore(8, tp=2, pp=1, ep=2), 8), rollout_layout(SIZES, Engine(tp=2))
    plan = make_plan(source, one, avoid=[0, 5])
    assert not {0, 5} & set(plan.source_rank.tolist())
    assert not {0, 5} & set(add_engine(plan, source, ["", ""], avoid=[0, 5]).source_rank.tolist())
    assert content(plan) == content(make_plan(source, one))
    alone = trainer_layout(SIZES, Mcore(2, tp=2), 8)
    spared, usual = make_plan(alone, one, avoid=[0]), make_plan(alone, one)
    assert 0 < load(spared)[0] < load(usual)[0], "its half of every tensor that is cut, and of no other"


def test_what_cannot_be_extended_is_refused():
    source, one = trainer_layout(SIZES, Mcore(8, tp=2, pp=1, ep=2), 8), rollout_layout(SIZES, Engine(tp=2))
    plan = make_plan(source, one)
    with pytest.raises(PlanError, match="2 rollout ranks, which are no engines of 3 workers each"):
        add_engine(plan, source, [""] * 3)
    other = trainer_layout(SIZES, Mcore(8, tp=4, pp=1, ep=2), 8)
    with pytest.raises(PlanError, match="was not made for this trainer layout"):
        add_engine(plan, other, ["", ""])
    with pytest.raises(PlanError, match="cannot drop engine 0 of 1: a plan keeps at least one"):
        drop_engine(plan, 0, 2)
    two = add_engine(plan, source, ["", ""])
    for place in (-1, 2):
        with pytest.raises(PlanError, match=f"cannot drop engine {place} of 2"):
            drop_engine(two, place, 2)


@pytest.mark.parametrize("wrong", ["source", "box"])
def test_new_transfers_that_are_wrong_are_found_by_the_proof(wrong, monkeypatch):
    source, one = trainer_layout(SIZES, Mcore(8, tp=2, pp=1, ep=2), 8), rollout_layout(SIZES, Engine(tp=2))
    plan = make_plan(source, one)
    if wrong == "source":
        choose = extend.choose_together
        monkeypatch.setattr(extend, "choose_together", lambda *a, **k: np.roll(choose(*a, **k), 1))
    else:
        part = extend.engine_part

        def shifted(plan: Plan, place: int, width: int) -> Plan:
            found = part(plan, place, width)
            if place == 0 and plan.target_world == width:
                start = found.target_start.copy()
                start[0] += 1
                found = replace(found, target_start=start)
            return found

        monkeypatch.setattr(extend, "engine_part", shifted)
    with pytest.raises(PlanError):
        add_engine(plan, source, ["", ""])
