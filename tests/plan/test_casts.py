"""Casts that a rule declares: what is planned, how it travels, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weight_sync.errors import PlanError
from weight_sync.layout.catalog import Catalog, Pattern
from weight_sync.layout.table import Layout, Param, layout_from_shards
from weight_sync.plan.plan import Plan
from weight_sync.plan.planner import make_plan
from weight_sync.plan.proof import prove_exact_once
from weight_sync.plan.schedule import Budget, CostModel, Method, make_schedule

CATALOG = Catalog((Pattern("t", (4, 6), "bfloat16"), Pattern("u", (4,), "bfloat16")))
Kind = tuple[str, str]
PLAIN, CAST = ("bfloat16", ""), ("float32", "bfloat16")


def side(name: str, kind: Kind, *, columns: bool = False, replicas: tuple[Kind, ...] = ()) -> Layout:
    """Tensor t in parameters of (dtype, cast from) on rank 0 and each replica, u in bfloat16. columns: t stored by columns."""
    kinds = (kind, *replicas)
    strides = [1, 4] if columns else [6, 1]
    params = [[Param(r, "p", (4, 6), d, 0, c), Param(r, "q", (4,), "bfloat16")] for r, (d, c) in enumerate(kinds)]
    t = {"tensor": "t", "offset": [0, 0], "shape": [4, 6], "param": "p", "start": 0, "strides": strides}
    u = {"tensor": "u", "offset": [0], "shape": [4], "param": "q", "start": 0, "strides": [1]}
    return layout_from_shards(name, CATALOG, params, [[t, u] for _ in kinds])


@pytest.mark.parametrize(("source", "target"), [(PLAIN, CAST), (CAST, PLAIN)], ids=["by the rollout", "by the trainer"])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("seconds_per_write", [0.0, 1.0])
def test_a_declared_cast_is_planned_proven_and_always_packed_at_the_source(
    source: Kind, target: Kind, columns: bool, seconds_per_write: float
) -> None:
    layouts = side("trainer", source), side("rollout", target, columns=columns)
    plan = make_plan(*layouts)
    prove_exact_once(plan, source=layouts[0], target=layouts[1])

    (row,) = np.flatnonzero(plan.casts).tolist()

    assert plan.catalog.name(int(plan.tensor[row])) == "t"
    assert plan.dtypes(row) == (source[0], target[0])
    size = 4 if target[0] == "float32" else 2
    assert plan.nbytes[row] == 24 * size, "what travels has the destination's size"
    schedule = make_schedule(plan, CostModel(seconds_per_write=seconds_per_write), Budget(source=32, target=32))
    assert schedule.method[row] == (Method.BOTH if columns else Method.PACK)
    pieces = [p for p in schedule.pieces if p.row == row]
    assert sum(p.nbytes for p in pieces) == 24 * size
    assert max(p.nbytes for p in pieces) <= 16, "converted bytes fit the budget"
    assert schedule.reason(row).startswith(f"cast from {source[0]} to {target[0]} while it is packed at the source")


def test_a_plan_with_casts_survives_json_and_the_declaration_is_in_its_digest() -> None:
    plan = make_plan(side("trainer", PLAIN), side("rollout", CAST))
    again = Plan.from_json(plan.to_json())
    assert (again.digest, again.target_params) == (plan.digest, plan.target_params)
    assert replace(plan, target_params=tuple(replace(p, cast_from="") for p in plan.target_params)).digest != plan.digest


def test_equal_dtypes_are_moved_as_they_are_whatever_was_declared() -> None:
    plan = make_plan(side("trainer", CAST), side("rollout", CAST))
    prove_exact_once(plan)
    assert not plan.casts.any()


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (("bfloat16", ""), ("float32", ""), ["t is bfloat16 on the trainer, float32 on the rollout", "`value: cast`"]),
        (("float32", ""), ("bfloat16", ""), ["t is float32 on the trainer, bfloat16 on the rollout", "`value: cast`"]),
        (
            ("bfloat16", ""),
            ("float32", "float16"),
            ["t is bfloat16 on the trainer, float32 (cast from float16) on"],
        ),
        (("float16", ""), ("float32", "float16"), ["t is float16 on", "legal: bfloat16 to float32, float32 to bfloat16"]),
        (("float32", "bfloat16"), ("float16", "bfloat16"), ["t is float32 (cast from bfloat16) on the trainer, float16 (cast"]),
    ],
    ids=["undeclared up", "undeclared down", "declared from another dtype", "not in the closed set", "through two casts"],
)
def test_every_other_difference_of_dtypes_is_one_error_that_says_how_to_declare_it(
    source: Kind, target: Kind, words: list[str]
) -> None:
    with pytest.raises(PlanError, match="dtypes differ: ") as caught:
        make_plan(side("trainer", source), side("rollout", target))
    assert [word for word in words if word not in str(caught.value)] == []
    assert "u is" not in str(caught.value)


def test_replicas_of_one_tensor_in_two_dtypes_are_refused_because_the_choice_of_sender_would_change_the_values() -> None:
    with pytest.raises(PlanError, match=r"t is bfloat16 and float32 \(cast from bfloat16\) on the trainer"):
        make_plan(side("trainer", PLAIN, replicas=(CAST,)), side("rollout", CAST))
    with pytest.raises(PlanError, match=r"t is float32 and float32 \(cast from bfloat16\) on the trainer, bfloat16 on"):
        make_plan(side("trainer", CAST, replicas=(("float32", ""),)), side("rollout", PLAIN))


def test_one_rollout_rank_may_hold_a_tensor_as_it_is_and_another_one_cast() -> None:
    layouts = side("trainer", PLAIN), side("rollout", PLAIN, replicas=(CAST,))
    plan = make_plan(*layouts)
    prove_exact_once(plan, source=layouts[0], target=layouts[1])
    assert {int(plan.target_rank[row]) for row in np.flatnonzero(plan.casts)} == {1}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"cast_from": ""}, "bfloat16 would be written as float32, and no rule declares the cast"),
        ({"cast_from": "float16"}, "no rule declares the cast"),
        ({"dtype": "float64"}, "no cast from bfloat16 to float64"),
    ],
)
def test_the_proof_refuses_a_plan_whose_casts_are_not_declared(change: dict[str, str], word: str) -> None:
    plan = make_plan(side("trainer", PLAIN), side("rollout", CAST))
    params = tuple(replace(p, **change) if p.name == "p" else p for p in plan.target_params)
    with pytest.raises(PlanError, match=word):
        prove_exact_once(replace(plan, target_params=params))


def test_the_proof_refuses_a_cast_from_a_dtype_that_the_hf_tensor_does_not_have() -> None:
    plan = make_plan(side("trainer", PLAIN), side("rollout", CAST))
    other = Catalog((Pattern("t", (4, 6), "float16"), CATALOG.patterns[1]))
    with pytest.raises(PlanError, match="no rule declares the cast"):
        prove_exact_once(replace(plan, catalog=other))
