"""Faults that mapping tables of other projects have had, one test each. They are faults of layout, so tiny models show them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from families_support import rollout_layout, trainer_layout
from layout_cases import assemble, elements

from weight_sync.config import engine_yaml, family_for, family_yaml
from weight_sync.errors import BindError, FamilyError, PlanError
from weight_sync.layout.family import Model, apply, engine_convention, parse_convention, parse_family
from weight_sync.layout.parallel import EngineDims, TrainerDims
from weight_sync.layout.resolve import dropped_names, resolve
from weight_sync.layout.table import Layout, Shard
from weight_sync.layout.witness import agree, agree_on_tensors
from weight_sync.plan.planner import make_plan
from weight_sync.plan.schedule import Budget, CostModel, make_schedule

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 16, "moe_intermediate_size": 8, "num_experts": 8,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 64,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
    "v_head_dim": 4, "intermediate_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "vocab_size": 64,
}  # fmt: skip
BIAS = "mlp.gate.e_score_correction_bias"


def built(config: dict[str, Any]) -> Model:
    return apply(parse_family(family_yaml(family_for(config))), config)


def held(layout: Layout, rank: int, param: str) -> list[Shard]:
    return [shard for shard in layout.rank_shards(rank) if shard.param == param]


def test_a_fused_parameter_is_cut_part_by_part_and_the_same_shape_cut_as_a_whole_is_told_apart() -> None:
    layout, _ = rollout_layout(built(QWEN), "sglang", {"tp": 2})
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert [(s.tensor.split(".")[-2], s.box.offset[0], s.box.shape[0]) for s in held(layout, 1, name)] == [
        ("q_proj", 16, 16),
        ("k_proj", 4, 4),
        ("v_proj", 4, 4),
    ]

    # [q_all; k_all; v_all] cut in two has the same shape: rank 1 would then start within q and hold all of k and v.
    wrong = [s for s in layout.rank_to_json(1) if s["param"] != name]
    start = 0
    for part, offset, rows in (("q_proj", 24, 8), ("k_proj", 0, 8), ("v_proj", 0, 8)):
        tensor = f"model.layers.0.self_attn.{part}.weight"
        wrong.append(
            {"tensor": tensor, "offset": [offset, 0], "shape": [rows, 8], "param": name, "start": start, "strides": [8, 1]}
        )
        start += rows * 8
    with pytest.raises(BindError, match=r"rollout rank 1: .*k_proj\.weight -> model\.layers\.0\.self_attn\.qkv_proj"):
        agree(layout, 1, wrong, {})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bytes_at_once", [64, 1 << 20])
def test_halves_of_a_fused_pair_may_arrive_in_any_order_and_in_buckets_of_any_size(seed: int, bytes_at_once: int) -> None:
    """One transfer after another in a random order; big ones in pieces as small as the staging budget makes them."""
    model = built(DEEPSEEK)
    hf = {
        name: np.arange(i * 4096, i * 4096 + int(np.prod(shape))).reshape(shape)
        for i, (name, shape) in enumerate(_shapes(model))
    }
    source = trainer_layout(model, TrainerDims(ranks=4, tp=2, ep=2, pp=2))
    target, _ = rollout_layout(model, "sglang", {"tp": 2, "moe_ep": 2})
    plan = make_plan(source, target)
    schedule = make_schedule(plan, CostModel(seconds_per_write=1.0), Budget(bytes_at_once, bytes_at_once))
    staged = {piece.row for piece in schedule.pieces}
    parts = [(p.row, p.at, p.shape) for p in schedule.pieces]
    parts += [(row, (0,) * plan.catalog.ndim, tuple(plan.shape[row])) for row in range(len(plan)) if row not in staged]
    np.random.default_rng(seed).shuffle(parts)
    have, got = assemble(source, hf), [np.full(p.numel, -1, np.int64) for p in plan.target_params]

    for row, at, shape in parts:
        a = plan.source_params[plan.source[row]]
        first = int(plan.source_start[row]) + int(np.dot(at, plan.source_strides[row]))
        into = elements(
            int(plan.target_start[row]) + int(np.dot(at, plan.target_strides[row])), plan.target_strides[row], shape
        )
        assert (got[plan.target[row]][into] == -1).all()
        got[plan.target[row]][into] = have[a.rank][a.name].ravel()[elements(first, plan.source_strides[row], shape)]

    want = assemble(target, hf)
    for p, array in zip(plan.target_params, got, strict=True):
        assert np.array_equal(array.reshape(p.shape), want[p.rank][p.name]), p.name


def _shapes(model: Model) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, model.catalog.pattern_of(i).shape) for name, i in model.catalog.ids.items()]


def test_the_local_number_of_an_expert_is_not_its_global_number() -> None:
    layout = trainer_layout(built(QWEN), TrainerDims(ranks=4, ep=4))

    shards = held(layout, 3, "decoder.layers.0.mlp.experts.linear_fc2.weight1")

    assert [s.tensor for s in shards] == ["model.layers.0.mlp.experts.7.down_proj.weight"]
    engine, _ = rollout_layout(built(QWEN), "sglang", {"tp": 4, "moe_ep": 4})
    shards = held(engine, 3, "model.layers.0.mlp.experts.w2_weight")
    assert [(s.tensor, s.start) for s in sorted(shards, key=lambda s: s.start)] == [
        ("model.layers.0.mlp.experts.6.down_proj.weight", 0),
        ("model.layers.0.mlp.experts.7.down_proj.weight", 64),
    ]


def test_experts_are_cut_by_expert_tensor_parallelism_and_everything_else_by_tensor_parallelism() -> None:
    layout = trainer_layout(built(QWEN), TrainerDims(ranks=4, tp=4, ep=2, etp=2))

    (expert,) = held(layout, 3, "decoder.layers.0.mlp.experts.linear_fc2.weight0")
    (dense,) = held(layout, 3, "decoder.layers.0.self_attention.linear_proj.weight")

    assert (expert.box.offset, expert.box.shape) == ((0, 4), (8, 4))
    assert (dense.box.offset, dense.box.shape) == ((0, 24), (8, 8))


def test_a_norm_of_one_head_stays_whole_where_there_are_more_ranks_than_kv_heads() -> None:
    model = built(QWEN)
    trainer = trainer_layout(model, TrainerDims(ranks=8, tp=8))
    rollout, _ = rollout_layout(model, "sglang", {"tp": 8})
    for layout, name in (
        (trainer, "decoder.layers.0.self_attention.k_layernorm.weight"),
        (rollout, "model.layers.0.self_attn.k_norm.weight"),
    ):
        assert [p.shape for p in layout.params if p.name == name] == [(4,)] * 8


def test_a_tensor_that_no_engine_rule_takes_is_an_error_and_not_skipped() -> None:
    data = engine_yaml("sglang")
    rules = {label: rule for label, rule in data["rules"].items() if label != "latent_qkv_down"}
    convention = engine_convention(parse_convention({**data, "rules": rules}))

    with pytest.raises(FamilyError, match=r"no rule for .*q_a_proj\.weight.*kv_a_proj_with_mqa\.weight"):
        resolve(built(DEEPSEEK), convention, EngineDims(), "rollout")


def test_a_tensor_that_the_loader_skips_because_its_fused_target_is_absent_is_named() -> None:
    layout, _ = rollout_layout(built(DEEPSEEK), "sglang", {})
    recorded = [s for s in layout.rank_to_json(0) if "fused_qkv_a_proj" not in s["param"]]

    with pytest.raises(BindError, match=r"kv_a_proj_with_mqa\.weight -> .*fused_qkv_a_proj_with_mqa\.weight: only declared"):
        agree(layout, 0, recorded, {})


def test_a_trailing_mtp_layer_is_no_decoder_layer_on_either_side() -> None:
    model = built(DEEPSEEK)
    for vpp, last in ((1, ""), (2, "vp1.")):
        layout = trainer_layout(model, TrainerDims(ranks=2, pp=2, vpp=vpp))
        trailing = {s.param for s in layout.shards(range(len(layout.tensor))) if s.tensor.startswith("model.layers.4.")}
        assert trailing
        assert all(param.startswith(f"{last}mtp.layers.0.") for param in trailing)
        assert not any(p.name.startswith(f"{last}mtp.") for p in layout.rank_params(0))
    data = engine_yaml("sglang")
    dropped = dropped_names(model, engine_convention(parse_convention(data)), EngineDims(), "rollout")
    assert sorted(dropped) == sorted(name for name in model.catalog.ids if name.startswith("model.layers.4."))
    rollout, _ = rollout_layout(model, "sglang", {})
    assert not any(".layers.4." in p.name for p in rollout.params)


def test_a_family_whose_engine_rules_forget_the_mtp_layer_is_an_error() -> None:
    data = engine_yaml("sglang")
    rules = {label: rule for label, rule in data["rules"].items() if label != "mtp"}

    with pytest.raises(FamilyError, match=r"no rule for .*in layers 4"):
        resolve(built(DEEPSEEK), engine_convention(parse_convention({**data, "rules": rules})), EngineDims(), "rollout")


def test_a_router_bias_that_is_a_buffer_of_the_trainer_reaches_the_engines_parameter_in_fp32() -> None:
    model = built(DEEPSEEK)
    source = trainer_layout(model, TrainerDims(ranks=2, pp=2))
    target, _ = rollout_layout(model, "sglang", {"tp": 2})

    plan = make_plan(source, target)

    for layer in (1, 2, 3):
        rows = np.flatnonzero(plan.tensor == model.catalog.ids[f"model.layers.{layer}.{BIAS}"])
        assert {plan.target_params[i].rank for i in plan.target[rows].tolist()} == {0, 1}
        assert {plan.source_params[i].name.split(".", 3)[3] for i in plan.source[rows].tolist()} == {"mlp.router.expert_bias"}
        assert {p.dtype for i in rows for p in (plan.source_params[plan.source[i]], plan.target_params[plan.target[i]])} == {
            "float32"
        }


def test_a_dtype_that_differs_between_the_sides_is_an_error_that_names_the_tensor() -> None:
    model = built(DEEPSEEK)
    data = engine_yaml("sglang")
    rules = {**data["rules"], "router_bias": {**data["rules"]["router_bias"], "dtype": "bfloat16"}}
    target = resolve(model, engine_convention(parse_convention({**data, "rules": rules})), EngineDims(), "rollout")

    with pytest.raises(PlanError, match=r"e_score_correction_bias.*(float32|bfloat16).*(float32|bfloat16)"):
        make_plan(trainer_layout(model, TrainerDims(ranks=1)), target)


def test_context_parallel_ranks_are_sources_like_all_others() -> None:
    model = built(QWEN)
    source = trainer_layout(model, TrainerDims(ranks=4, tp=2, cp=2))
    target, _ = rollout_layout(model, "sglang", {"tp": 4})

    assert len({tuple((p.name, p.shape) for p in source.rank_params(rank)) for rank in (0, 2)}) == 1
    plan = make_plan(source, target)
    assert {plan.source_params[i].rank for i in plan.source.tolist()} == {0, 1, 2, 3}


@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "GptOssForCausalLM"])
def test_a_family_that_cannot_be_expressed_is_refused_by_name_with_the_reason(architecture: str) -> None:
    with pytest.raises(FamilyError, match=r"is refused for this HF config .*no strategy here moves such a model yet"):
        built({"architectures": [architecture]})


GLM5 = json.loads((Path(__file__).parent / "configs" / "glm_5.json").read_text())


def test_a_glm5_config_that_says_that_every_layer_has_its_own_indexer_is_the_same_model() -> None:
    every = {"indexer_types": ["full"] * GLM5["num_hidden_layers"], "index_topk_freq": 1, "index_topk_pattern": None}
    assert built(GLM5 | every).catalog.digest == built(GLM5).catalog.digest


@pytest.mark.parametrize(
    "key",
    [
        {"indexer_types": ["full", "full", "shared", "full"]},
        {"indexer_types": "shared"},
        {"index_topk_pattern": "FFSF"},
        {"index_topk_freq": 2},
    ],
    ids=str,
)
def test_layers_that_share_an_indexer_are_refused_by_name_and_not_looked_for(key: dict[str, Any]) -> None:
    with pytest.raises(FamilyError, match=r"family glm5 is refused .*(index\w+).* share their neighbour's indexer"):
        built(GLM5 | key)


def test_adding_a_family_takes_one_yaml_file_that_extends_another(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(
        "name: mine\nextends: [qwen2]\narchitectures: [MineForCausalLM]\n"
        "tensors:\n  model.layers.{l}.self_attn.gate.weight: {shape: [heads, hidden]}\n"
        "mcore:\n  gate:\n    rule: rename\n    hf: model.layers.{l}.self_attn.gate.weight\n"
        "    param: decoder.layers.{n}.self_attention.gate.weight\n    place: {tp: split 0}\n"
    )
    config = {**QWEN, "architectures": ["MineForCausalLM"]}

    layout = trainer_layout(apply(parse_family(family_yaml(str(own))), config), TrainerDims(ranks=2, tp=2))

    assert [p.shape for p in layout.rank_params(1) if p.name == "decoder.layers.1.self_attention.gate.weight"] == [(4, 8)]


def test_a_loader_that_takes_whole_tensors_may_place_them_as_it_likes_but_must_read_those_that_are_declared() -> None:
    layout, _ = rollout_layout(built(DEEPSEEK), "sglang", {})
    name = "model.layers.0.self_attn.o_proj.weight"
    own = layout.rank_to_json(0)
    turned = [{**s, "strides": s["strides"][::-1]} if s["tensor"] == name else s for s in own]

    with pytest.raises(BindError, match=r"declared .* recorded"):
        agree(layout, 0, turned, {})
    agree_on_tensors(layout, 0, turned, {})
    agree_on_tensors(layout, 0, [s for s in own if s["tensor"] != name], {name: "aten.mul.Tensor"})
    with pytest.raises(
        BindError, match=r"rollout rank 0: .*o_proj\.weight: a part is declared to be here, but the loader reads"
    ):
        agree_on_tensors(layout, 0, [s for s in own if s["tensor"] != name], {})
    with pytest.raises(BindError, match=r"other: the loader reads it, but no part of it is declared to be here"):
        agree_on_tensors(layout, 0, [*own, {**own[0], "tensor": "other"}], {})
    with pytest.raises(BindError, match=r"parameter x: the loader applies aten\.fill_, which is no move of elements"):
        agree_on_tensors(layout, 0, own, {"parameter x": "aten.fill_"})
