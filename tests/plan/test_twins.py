"""The proof looks at one of several rollout ranks that get the same. What is wrong with another one is found all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_cases import rollout_layout, trainer_layout
from layout_naive import Engine, Mcore, Sizes

from weight_sync.errors import PlanError
from weight_sync.layout.catalog import Catalog, Pattern
from weight_sync.layout.emitted import Emission, Part, quantised
from weight_sync.layout.table import Layout, Param, layout_from_shards
from weight_sync.plan import proof
from weight_sync.plan.plan import COLUMNS, Plan
from weight_sync.plan.planner import make_plan
from weight_sync.plan.proof import prove_exact_once
from weight_sync.plan.twins import Twins, twins

ENGINES, WIDTH = 3, 2
SIZES = Sizes(layers=2, hidden=4, heads=4, kv_heads=2, head_dim=2, ffn=4, vocab=70, experts=4, expert_ffn=4, mlp_only=(0,))
relaxed = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])


def plain() -> tuple[Layout, Layout]:
    """A small model on three engines of two workers; dense weights have two holders, so that engines read different places."""
    return trainer_layout(SIZES, Mcore(4, tp=2, ep=2), 36), rollout_layout(SIZES, Engine(tp=2, moe_ep=2, engines=ENGINES))


def made() -> tuple[Layout, Layout]:
    """Two weights that are quantised, each cut in two on every engine, and held by two pairs of trainer ranks."""
    parts = (Part("values", "", "float8_e4m3fn", (1, 1)), Part("scales", "_scale", "float32", (2, 4)))
    sizes = {"a": 4, "b": 12}  # not alike, or every engine would be sent the same one by the same rank
    catalog = Catalog(tuple(Pattern(f"{name}.weight", (rows, 16), "bfloat16") for name, rows in sizes.items()))
    catalog = quantised(catalog, Emission(parts, (2, 4), '{"scheme": "test"}'), lambda name: True)

    def held(side: str, ranks: int, suffixes: dict[str, tuple[str, int, int]]) -> Layout:
        """suffixes: of parameters -> (dtype, elements of the weight's rows for one row, columns)."""
        params: list[list[Param]] = [[] for _ in range(ranks)]
        shards: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
        for rank in range(ranks):
            for name, size in sizes.items():
                for suffix, (dtype, each, columns) in suffixes.items():
                    rows = size // each
                    part = {"values": "values", "_scale": "scales"}.get(suffix, "")
                    params[rank].append(Param(rank, name + suffix, (rows, columns), dtype, part=part))
                    tensor, at = f"{name}.weight{suffix if suffix == '_scale' else ''}", [0, rank % 2 * columns]
                    shards[rank].append(
                        {"tensor": tensor, "offset": at, "shape": [rows, columns], "param": name + suffix, "start": 0,
                         "strides": [columns, 1]}
                    )  # fmt: skip
        return layout_from_shards(side, catalog, params, shards)

    engine = {"values": ("float8_e4m3fn", 1, 8), "_scale": ("float32", 2, 2)}
    return held("trainer", 4, {"": ("bfloat16", 1, 8)}), held("rollout", ENGINES * WIDTH, engine)


SIDES = {"plain": plain(), "quantised": made()}
PLANS = {name: make_plan(*sides) for name, sides in SIDES.items()}
kinds = pytest.mark.parametrize("kind", SIDES)


def edit(plan: Plan, row: int, name: str, value: Any) -> Plan:
    column = getattr(plan, name).copy()
    column[row] = value
    return replace(plan, **{name: column})


def apart(plan: Plan) -> Twins:
    """As twins(), but nothing has a twin."""
    found = twins(plan)
    return replace(found, model=np.arange(plan.target_world), models=found.order, reads=found.order)


def refused(plan: Plan, source: Layout, target: Layout) -> bool:
    """What the proof says, which must be what it says when it looks at every rank."""
    verdicts: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for how in (twins, apart):
            patch.setattr(proof, "twins", how)
            try:
                prove_exact_once(plan, source=source, target=target)
                verdicts.append("")
            except PlanError as error:
                verdicts.append(str(error))
    assert bool(verdicts[0]) == bool(verdicts[1]), verdicts
    return bool(verdicts[0])


@kinds
def test_engines_are_found_to_be_twins_and_dense_weights_read_in_other_places_are_looked_at(kind):
    plan, (source, target) = PLANS[kind], SIDES[kind]
    found = twins(plan)
    assert found.model.tolist() == [0, 1] * ENGINES
    assert sorted(found.models.tolist()) == np.flatnonzero(plan.target_rank < WIDTH).tolist()
    assert found.laid_out_apart(target).tolist() == found.models.tolist()
    read = np.column_stack([plan.source, plan.source_start, plan.source_strides, plan.tensor, plan.offset, plan.shape])
    assert {tuple(x) for x in read.tolist()} == {tuple(x) for x in read[found.reads].tolist()}
    assert len(found.models) < len(found.reads) < len(plan), "some twins read elsewhere, others do not"
    assert not refused(plan, source, target)


@kinds
def test_a_plan_that_is_wrong_in_the_last_engine_alone_is_refused(kind):
    """Each column of each transfer to the last engine, set to what the transfer after it has, or moved by one."""
    plan, (source, target) = PLANS[kind], SIDES[kind]
    last = np.flatnonzero(plan.target_rank >= (ENGINES - 1) * WIDTH)
    seen: dict[str, int] = {}
    step = max(1, len(last) // 8)
    for row, other in zip(last[::step].tolist(), np.roll(last, 1)[::step].tolist(), strict=True):
        for name in COLUMNS:
            value = getattr(plan, name)[row]
            for wrong in (getattr(plan, name)[other], value + 1):
                damaged = edit(plan, row, name, wrong)
                # A stride along a dim of one element says nothing, and the source may be another holder of the same box.
                if damaged.digest != plan.digest and refused(damaged, source, target):
                    seen[name] = seen.get(name, 0) + 1
    assert seen.keys() == set(COLUMNS)


@kinds
def test_a_transfer_that_the_last_engine_lacks_or_gets_twice_is_found(kind):
    plan, (source, target) = PLANS[kind], SIDES[kind]
    last = np.flatnonzero(plan.target_rank == ENGINES * WIDTH - 1)
    for row in last[:: max(1, len(last) // 8)].tolist():
        for keep in (np.delete(np.arange(len(plan)), row), np.append(np.arange(len(plan)), row)):
            assert refused(replace(plan, **{name: getattr(plan, name)[keep] for name in COLUMNS}), source, target)


def test_a_box_of_another_shape_and_as_many_elements_is_found_in_the_last_engine():
    plan, (source, target) = PLANS["quantised"], SIDES["quantised"]
    last = np.flatnonzero(plan.target_rank == (ENGINES - 1) * WIDTH)
    row = next(i for i in last.tolist() if plan.shape[i].tolist() == [12, 8])
    assert refused(edit(plan, row, "shape", [8, 12]), source, target)


def test_a_parameter_of_the_last_engine_that_is_too_short_is_found():
    """It has no filling, where others have some, so that as many elements are written as in other engines, but past its end."""
    plan, _ = PLANS["plain"], SIDES["plain"]
    padded = [i for i, p in enumerate(plan.target_params) if p.filling and p.name.startswith("lm_head")]
    filling = plan.target_params[padded[-1]].filling
    start = plan.target_start + filling * np.isin(plan.target, [i for i in padded if plan.target_params[i].filling == filling])
    moved = replace(plan, target_start=start)
    prove_exact_once(moved)
    short = replace(p := plan.target_params[padded[-1]], shape=(p.numel - filling,), filling=0)
    params = tuple(short if i == padded[-1] else p for i, p in enumerate(plan.target_params))
    with pytest.raises(PlanError, match=f"rollout rank {short.rank}.*overlap or leave the parameter"):
        prove_exact_once(replace(moved, target_params=params))


PARAMS: dict[str, Callable[[Param], Param]] = {
    "dtype": lambda p: replace(p, dtype="float16"),
    "filling": lambda p: replace(p, filling=1),
    "shape": lambda p: replace(p, shape=(*p.shape, 2)),
    "part": lambda p: replace(p, part="" if p.part else "values"),
}


@kinds
@pytest.mark.parametrize("name", PARAMS)
def test_a_parameter_of_the_last_engine_that_is_of_another_kind_is_found(kind, name):
    plan, (source, target) = PLANS[kind], SIDES[kind]
    params = (*plan.target_params[:-1], PARAMS[name](plan.target_params[-1]))
    assert refused(replace(plan, target_params=params), source, replace(target, params=params))


@kinds
def test_a_layout_whose_last_engine_is_laid_out_in_another_way_refuses_the_plan(kind):
    plan, (source, target) = PLANS[kind], SIDES[kind]
    shard = len(target.tensor) - 1
    for name in ("offset", "start", "strides", "tensor", "param"):
        column = getattr(target, name).copy()
        column[shard] += -1 if name == "param" else 1
        assert refused(plan, source, replace(target, **{name: column})), name


def test_ranks_whose_parameters_do_not_come_rank_by_rank_are_all_looked_at():
    plan, source = PLANS["plain"], SIDES["plain"][0]
    order = np.arange(len(plan.target_params))[::-1]
    params = tuple(plan.target_params[i] for i in order.tolist())
    turned = replace(plan, target_params=params, target=len(order) - 1 - plan.target)
    assert len(twins(turned).models) == len(plan)
    prove_exact_once(turned, source=source)
    row = int(np.flatnonzero(plan.target_rank == 0)[0])
    with pytest.raises(PlanError):
        prove_exact_once(edit(turned, row, "target_start", turned.target_start[row] + 1), source=source)


@relaxed
@given(st.sampled_from(sorted(SIDES)), st.data())
def test_random_damage_to_one_or_all_engines_is_judged_as_if_every_rank_were_looked_at(kind, data):
    plan, (source, target) = PLANS[kind], SIDES[kind]
    rows = [data.draw(st.integers(0, len(plan) - 1)) for _ in range(data.draw(st.integers(1, 2)))]
    if data.draw(st.booleans()):  # the same to every engine
        like = plan.target_rank % WIDTH * len(plan.catalog) + plan.tensor
        rows = np.flatnonzero(np.isin(like, like[rows])).tolist()
    damaged = plan
    for name in data.draw(st.sets(st.sampled_from(COLUMNS), min_size=1, max_size=2)):
        other, shift = data.draw(st.integers(0, len(plan) - 1)), data.draw(st.sampled_from([-1, 0, 0, 1]))
        for row in rows:
            damaged = edit(damaged, row, name, (getattr(plan, name)[other if not shift else row]) + shift)
    refused(damaged, source, target)


def test_ranks_with_one_hash_are_twins_only_if_every_number_is_the_same(monkeypatch):
    class Same:
        def update(self, data: Any) -> None: ...

        def intdigest(self) -> int:
            return 0

    plan, (source, target) = PLANS["quantised"], SIDES["quantised"]
    monkeypatch.setattr("weight_sync.plan.twins.xxhash.xxh3_64", Same)
    assert twins(plan).model.tolist() == [0, 1, 0, 3, 0, 5], "the second worker is not the first one's twin"
    prove_exact_once(plan, source=source, target=target)
    row = int(np.flatnonzero(plan.target_rank == 4)[0])
    assert refused(edit(plan, row, "target_start", plan.target_start[row] + 1), source, target)
