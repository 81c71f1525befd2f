"""No wrong plan passes the proof: plans are damaged in every way we can think of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layout_cases import elements, jobs, rollout_layout, trainer_layout
from layout_naive import Engine, Mcore, Sizes, engine_params, hf_model, mcore_params
from plan_support import execute, scattered

from weight_sync.errors import PlanError
from weight_sync.layout.catalog import Catalog, Pattern
from weight_sync.layout.table import Layout, Param
from weight_sync.plan.plan import COLUMNS, Plan
from weight_sync.plan.planner import make_plan
from weight_sync.plan.proof import prove_exact_once
from weight_sync.plan.tiling import disjoint, fills

relaxed = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])

SIZES = Sizes(layers=2, hidden=4, heads=4, kv_heads=2, head_dim=2, ffn=4, vocab=70, experts=4, expert_ffn=4, mlp_only=(0,))
TRAINER, ROLLOUT = Mcore(4, tp=2, pp=2, ep=2), Engine(tp=2, moe_ep=2, engines=2)


@pytest.fixture(scope="module")
def sides() -> tuple[Layout, Layout]:
    return trainer_layout(SIZES, TRAINER, 36), rollout_layout(SIZES, ROLLOUT)


@pytest.fixture(scope="module")
def plan(sides: tuple[Layout, Layout]) -> Plan:
    return make_plan(*sides)


def rows(plan: Plan, keep: Any) -> Plan:
    """A plan of some of the rows, or of rows twice."""
    return replace(plan, **{name: getattr(plan, name)[keep] for name in COLUMNS})


def edit(plan: Plan, row: int, **values: Any) -> Plan:
    """A plan with one row's values changed."""
    columns = {name: getattr(plan, name).copy() for name in values}
    for name, value in values.items():
        columns[name][row] = value
    return replace(plan, **columns)


def find(plan: Plan, tensor: str, count: int = 0) -> int:
    """A transfer of a tensor."""
    return int(np.flatnonzero(plan.tensor == plan.catalog.ids[tensor])[count])


def refused(plan: Plan, *words: str, **layouts: Any) -> None:
    with pytest.raises(PlanError) as caught:
        prove_exact_once(plan, **layouts)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def test_the_plan_that_the_other_tests_damage_is_itself_sound(plan, sides):
    prove_exact_once(plan)
    prove_exact_once(plan, source=sides[0], target=sides[1])


# ---- damage that the plan alone shows


def test_a_missing_transfer_is_seen_wherever_it_was(plan):
    for row in range(0, len(plan), 7):
        p = plan.target_params[plan.target[row]]
        refused(rows(plan, np.arange(len(plan)) != row), f"rollout rank {p.rank}", p.name, "are needed")


def test_a_transfer_sent_twice_is_seen(plan):
    for row in range(0, len(plan), 7):
        refused(rows(plan, np.append(np.arange(len(plan)), row)), plan.target_params[plan.target[row]].name)


def test_a_transfer_sent_twice_in_place_of_another_is_seen(plan):
    target = plan.target[find(plan, "model.layers.0.self_attn.q_proj.weight")]
    a, b = np.flatnonzero((plan.target == target) & (plan.shape[:, 0] == plan.shape[plan.target == target, 0].min()))[:2]
    keep = np.arange(len(plan))
    keep[b] = a
    refused(rows(plan, keep), plan.target_params[target].name, "overlap")


def test_a_shifted_destination_is_seen(plan):
    row = find(plan, "model.layers.0.mlp.down_proj.weight")
    for shift in (1, -1, 4):
        refused(edit(plan, row, target_start=plan.target_start[row] + shift), "mlp.down_proj.weight")


def test_a_source_outside_its_parameter_is_seen(plan):
    row = find(plan, "model.norm.weight")
    for start in (1, -1, 10**18):
        refused(edit(plan, row, source_start=start), "model.norm.weight", "reads outside", "trainer rank 2")
    refused(edit(plan, row, source_strides=[2**62, 0]), "reads outside")


def test_numbers_out_of_range_are_seen(plan):
    row = find(plan, "model.norm.weight")
    refused(edit(plan, row, tensor=len(plan.catalog)), "tensor of transfer", "must be 0 to")
    refused(edit(plan, row, source=-1), "source of transfer")
    refused(edit(plan, row, target=10**6), "target of transfer")
    refused(edit(plan, row, offset=[1, 0]), "model.norm.weight", "outside the tensor")
    refused(edit(plan, row, offset=[-1, 0]), "outside the tensor")
    refused(edit(plan, row, shape=[0, 1]), "is empty")
    refused(edit(plan, row, shape=[-4, -1]), "is empty")
    refused(replace(plan, offset=plan.offset[:-1]), "column offset")
    refused(replace(plan, target_world=1), "the world has 1")


def test_a_tensor_that_is_left_out_is_seen_and_a_dropped_one_is_excused(plan):
    tensor = plan.catalog.ids["model.norm.weight"]
    gone = plan.tensor == tensor
    without = rows(plan, ~gone)
    refused(without, "model.norm.weight")
    targets = tuple(replace(p, filling=p.numel) if p.name == "model.norm.weight" else p for p in plan.target_params)
    without = replace(without, target_params=targets)
    refused(without, "no transfer uses", "model.norm.weight")
    prove_exact_once(without, dropped=["model.norm.weight"])


def test_dropped_names_must_exist_and_must_not_be_sent(plan):
    refused(plan, "no tensor of this model", "model.nrom.weight", dropped=["model.nrom.weight"])
    refused(plan, "are sent", "model.norm.weight", dropped=["model.norm.weight"])


def test_part_of_a_tensor_that_goes_nowhere_is_seen(plan):
    # Rank 1 of both engines is told to hold the first half of gate_proj again instead of the second one.
    tensor = plan.catalog.ids["model.layers.0.mlp.gate_proj.weight"]
    columns = {"offset": plan.offset.copy()}
    columns["offset"][plan.tensor == tensor, 0] = 0
    refused(replace(plan, **columns), "some elements go nowhere", "mlp.gate_proj")


def test_bytes_of_another_dtype_are_never_sent(plan):
    row = find(plan, "model.norm.weight")
    params = list(plan.source_params)
    params[plan.source[row]] = replace(params[plan.source[row]], dtype="float16")
    refused(replace(plan, source_params=tuple(params)), "model.norm.weight", "float16 would be written as bfloat16")


# ---- damage that only the layouts show

SUBTLE: dict[str, Callable[[Plan], Plan]] = {
    "rows of q, k and v exchanged": lambda p: edit(
        p,
        find(p, "model.layers.0.self_attn.k_proj.weight"),
        target_start=p.target_start[find(p, "model.layers.0.self_attn.v_proj.weight")],
    ),
    "another expert of the same shape is read": lambda p: edit(
        p,
        find(p, "model.layers.1.mlp.experts.0.down_proj.weight"),
        source=p.source[find(p, "model.layers.1.mlp.experts.1.down_proj.weight")],
    ),
    "the up half is read where the gate half is meant": lambda p: edit(
        p,
        find(p, "model.layers.0.mlp.gate_proj.weight"),
        source_start=p.source_start[find(p, "model.layers.0.mlp.up_proj.weight")],
    ),
    "a square block is read transposed": lambda p: edit(
        p, find(p, "model.layers.1.mlp.experts.0.down_proj.weight"), source_strides=[1, 4]
    ),
    "a square block is written transposed": lambda p: edit(
        p, find(p, "model.layers.1.mlp.experts.0.down_proj.weight"), target_strides=[1, 4]
    ),
    "a padded parameter is written one row too low": lambda p: edit(
        p, (row := find(p, "lm_head.weight", -1)), target_start=p.target_start[row] + SIZES.hidden
    ),
    "the box is another one of the same shape": lambda p: edit(
        p, (row := find(p, "model.layers.0.mlp.down_proj.weight")), offset=[0, 2 - p.offset[row, 1]]
    ),
}


@pytest.mark.parametrize("name", SUBTLE)
def test_elements_in_the_wrong_order_are_seen_with_the_layouts(name, plan, sides):
    damaged = SUBTLE[name](plan)
    assert damaged.digest != plan.digest
    refused(damaged, source=sides[0], target=sides[1])


def test_every_single_number_of_every_transfer_matters(plan, sides):
    """Any column of any row, changed by any small amount, is either refused or does not change what arrives."""
    hf = hf_model(SIZES)
    held, wanted = mcore_params(SIZES, TRAINER, hf, 36), engine_params(SIZES, ROLLOUT, hf)
    rng = np.random.default_rng(0)
    harmless = 0
    for row in rng.choice(len(plan), 40, replace=False).tolist():
        for name in COLUMNS:
            values = np.array(getattr(plan, name)[row])
            values.flat[rng.integers(values.size)] += rng.choice([-2, -1, 1, 2])
            damaged = edit(plan, row, **{name: values})
            try:
                prove_exact_once(damaged, source=sides[0], target=sides[1])
            except PlanError:
                continue
            harmless += 1  # a stride along a dim of size 1
            assert name.endswith("strides")
            for rank, params in enumerate(execute(damaged, held)):
                assert all(np.array_equal(array, wanted[rank][key]) for key, array in params.items())
    assert harmless < 40


def test_a_plan_for_other_layouts_is_refused(plan, sides):
    other = trainer_layout(SIZES, Mcore(4, tp=2, ep=2), 36)
    refused(plan, "not made for this trainer layout", source=other)
    refused(plan, "not made for this rollout layout", target=rollout_layout(SIZES, Engine(tp=2, engines=2)))
    refused(plan, "of another model", source=replace(sides[0], catalog=Catalog((Pattern("x", (1,), "float32"),))))


@relaxed
@given(jobs(), st.data())
def test_random_damage_to_random_plans_never_passes_unless_the_same_elements_arrive(job, data):
    sizes, trainer, rollout, multiple = job
    hf = hf_model(sizes)
    source, target = trainer_layout(sizes, trainer, multiple), rollout_layout(sizes, rollout)
    plan = make_plan(source, target)
    a, b = (data.draw(st.integers(0, len(plan) - 1)) for _ in "ab")
    name = data.draw(st.sampled_from(COLUMNS))
    how = data.draw(st.sampled_from(["swap", "copy", "drop", "twice", "shift"]))
    column = getattr(plan, name)
    if how == "drop":
        damaged = rows(plan, np.arange(len(plan)) != a)
    elif how == "twice":
        damaged = rows(plan, np.append(np.arange(len(plan)), a))
    elif how == "swap":
        damaged = edit(edit(plan, a, **{name: column[b]}), b, **{name: column[a]})
    elif how == "copy":
        damaged = edit(plan, a, **{name: column[b]})
    else:
        damaged = edit(plan, a, **{name: column[a] + data.draw(st.sampled_from([-1, 1]))})
    assume(damaged.digest != plan.digest)
    try:
        prove_exact_once(damaged, source=source, target=target)
    except PlanError:
        return
    held = mcore_params(sizes, trainer, hf, multiple)
    for have, want in zip(execute(damaged, held), engine_params(sizes, rollout, hf), strict=True):
        assert all((have[key] == want[key]).all() for key in want)


@relaxed
@given(scattered())
def test_plans_between_random_layouts_are_proved_without_and_with_the_layouts(case):
    _, source, target = case
    plan = make_plan(source, target)
    prove_exact_once(plan)
    prove_exact_once(plan, source=source)
    prove_exact_once(plan, target=target)


def test_an_empty_plan_of_an_empty_model_is_fine_and_of_any_other_is_not():
    none, wide = np.zeros(0, np.int64), np.zeros((0, 1), np.int64)
    empty = Plan(Catalog(()), (), (), 1, 1, ("",), ("",), none, wide, wide, none, none, wide, none, none, wide)
    prove_exact_once(empty)
    refused(replace(empty, catalog=Catalog((Pattern("x", (1,), "float32"),))), "no transfer uses", "x")
    refused(replace(empty, target_params=(Param(0, "p", (2,), "float32"),)), "p: 0 elements are written, 2 are needed")


def test_a_tiling_is_not_taken_for_another_one_that_merely_adds_up_alike():
    """Equal parameters are proved once; these two agree in every sum (starts 0 1 2 3 and 0 0 3 3), not in their elements."""
    catalog = Catalog((Pattern("x", (4,), "float32"),))
    element = np.asarray([0, 1, 2, 3, 0, 0, 3, 3], np.int64)
    one, target = np.ones((8, 1), np.int64), np.repeat(np.arange(2), 4)
    params = (Param(0, "a", (4,), "float32"), Param(0, "b", (4,), "float32"))
    for last in ([0, 1, 2, 3], [0, 0, 3, 3]):
        start = np.asarray([0, 1, 2, 3, *last], np.int64)
        none = np.zeros(8, np.int64)
        plan = Plan(
            catalog, params[:1], params, 1, 1, ("",), ("",),
            none, element[:, None], one, none, element, one, target, start, one,
        )  # fmt: skip
        if last == [0, 1, 2, 3]:
            prove_exact_once(plan)
        else:
            refused(plan, "rollout rank 0, b", "overlap")


# ---- geometry


@relaxed
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.lists(
        st.tuples(st.integers(-2, 20), st.tuples(*[st.integers(-2, 8)] * 2), st.tuples(*[st.integers(1, 4)] * 2)),
        max_size=4,
    ),
)
def test_disjoint_agrees_with_counting_elements(param, regions):
    numel = int(np.prod(param))
    hits = [e for start, strides, shape in regions for e in elements(start, strides, shape).ravel().tolist()]
    want = all(0 <= e < numel for e in hits) and len(set(hits)) == len(hits)
    start = np.asarray([r[0] for r in regions], np.int64)
    strides = np.asarray([r[1] for r in regions], np.int64).reshape(-1, 2)
    shape = np.asarray([r[2] for r in regions], np.int64).reshape(-1, 2)
    assert disjoint(tuple(param), start, strides, shape) == want


@relaxed
@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_boxes_of_a_parameter_are_disjoint_exactly_when_no_element_is_hit_twice(data, param):
    steps = [int(np.prod(param[d + 1 :])) for d in range(len(param))]
    boxes = []
    for _ in range(data.draw(st.integers(1, 5))):
        low = [data.draw(st.integers(0, n - 1)) for n in param]
        boxes.append((low, [data.draw(st.integers(1, n - a)) for a, n in zip(low, param, strict=True)]))
    start = np.asarray([np.dot(low, steps) for low, _ in boxes], np.int64)
    shape = np.asarray([size for _, size in boxes], np.int64)
    strides = np.asarray([steps for _ in boxes], np.int64)
    hits = [e for a, s in zip(start, shape, strict=True) for e in elements(a, steps, s).ravel().tolist()]
    assert disjoint(tuple(param), start, strides, shape) == (len(set(hits)) == len(hits))


def test_many_boxes_of_one_parameter_are_checked_in_blocks():
    start = np.arange(0, 3000, dtype=np.int64)
    strides, shape = np.ones((3000, 1), np.int64), np.ones((3000, 1), np.int64)
    assert disjoint((3000,), start, strides, shape)
    start[2999] = 1234
    assert not disjoint((3000,), start, strides, shape)
    shape[0] = 600  # reaches over the next block
    assert not disjoint((3000,), np.arange(0, 3000, dtype=np.int64), strides, shape)


@relaxed
@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_fills_agrees_with_marking_elements(data, tensor):
    offset, shape = [], []
    marks = np.zeros(tensor, np.bool_)
    for _ in range(data.draw(st.integers(0, 5))):
        low = [data.draw(st.integers(0, n - 1)) for n in tensor]
        size = [data.draw(st.integers(1, n - a)) for a, n in zip(low, tensor, strict=True)]
        marks[tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))] = True
        offset.append(low)
        shape.append(size)
    n = len(tensor)
    have = fills(tuple(tensor), np.asarray(offset, np.int64).reshape(-1, n), np.asarray(shape, np.int64).reshape(-1, n))
    assert have == bool(marks.all())
