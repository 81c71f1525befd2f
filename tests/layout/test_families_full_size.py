"""Published models at full size: layouts of both sides, the plan between them and its proof. No weights, no framework."""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from families_support import record_result, rollout_layout, trainer_layout

from weight_sync.config import engine_yaml, family_for, family_yaml
from weight_sync.layout.family import Model, apply, engine_convention, parse_convention, parse_family
from weight_sync.layout.parallel import EngineDims, TrainerDims
from weight_sync.layout.resolve import dropped_names
from weight_sync.plan.planner import make_plan
from weight_sync.plan.proof import prove_exact_once
from weight_sync.plan.schedule import Method, make_schedule

CASES: dict[str, tuple[float, dict[str, Any], dict[str, int]]] = {
    # billions of parameters (an MTP layer included), trainer, rollout
    "qwen3_235b_a22b": (235.1, {"ranks": 64, "tp": 4, "pp": 2, "ep": 16}, {"tp": 16, "moe_ep": 16}),
    "deepseek_v3_671b": (
        682.6,
        {"ranks": 128, "tp": 8, "pp": 4, "ep": 32, "pipeline": (16, 15, 15, 15)},
        {"tp": 32, "moe_ep": 32},
    ),
    "kimi_k2": (
        1026.4,
        {"ranks": 256, "tp": 8, "pp": 8, "ep": 32, "pipeline": (8, 8, 8, 8, 8, 7, 7, 7)},
        {"tp": 16, "moe_ep": 16},
    ),
    "glm_4_5": (356.8, {"ranks": 64, "tp": 8, "pp": 4, "ep": 16}, {"tp": 8, "moe_ep": 8}),
    "glm_5": (753.9, {"ranks": 64, "tp": 8, "pp": 2, "ep": 32}, {"tp": 16, "moe_ep": 16}),
}


def published(name: str) -> Model:
    config = json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text())
    return apply(parse_family(family_yaml(family_for(config))), config)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("name", CASES)
def test_a_published_model_is_planned_and_every_rollout_byte_proven_to_be_written_once(name: str, engine: str) -> None:
    billions, trainer, rollout = CASES[name]
    model = published(name)
    assert round(sum(prod(p.shape) * p.count for p in model.catalog.patterns) / 1e9, 1) == billions
    source = trainer_layout(model, TrainerDims(**trainer))
    target, computed = rollout_layout(model, engine, rollout)
    data = engine_yaml(engine)
    dims = EngineDims(remainder=data["remainder"], **rollout)
    dropped = dropped_names(model, engine_convention(parse_convention(data)), dims, "rollout")
    assert {int(tensor.split(".")[2]) for tensor in dropped} <= {model.layers}, "only the layer behind the decoder is dropped"

    plan = make_plan(source, target)

    prove_exact_once(plan, dropped, source=source, target=target)
    cast = {plan.catalog.name(t) for t in set(plan.tensor[plan.casts].tolist())}
    assert cast == computed.keys() - set(dropped)
    methods = make_schedule(plan).method
    assert set(methods[plan.casts].tolist()) <= {Method.PACK, Method.BOTH}
    sizes = " ".join(f"{axis}{size}" for axis, size in rollout.items())
    axes = " ".join(f"{axis}{size}" for axis, size in trainer.items() if isinstance(size, int))
    result = "proven" if not computed else f"proven, {len(computed)} tensors cast"
    record_result("full size", name, f"{axes} -> {engine} {sizes}", result, len(model.catalog))
