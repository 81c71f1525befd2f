"""quantization_config of published checkpoints: the scheme, and what stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
from quant_support import load, shipped

from weight_sync.errors import ConfigError
from weight_sync.quant.published import Excludes, from_hf

DEEPSEEK_V3 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
QWEN3_MOE = DEEPSEEK_V3 | {
    "modules_to_not_convert": [
        "lm_head",
        *(f"model.layers.0.{m}" for m in ("input_layernorm", "mlp.gate", "post_attention_layernorm")),
    ]
}
GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}


def compressed(weights: dict[str, Any], format_: str, ignore: list[str], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    } | more


CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
GLM_45 = compressed(CHANNEL, "float-quantized", ["lm_head", "model.layers.1.mlp.gate"])
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": None}
KIMI_K2 = compressed(
    INT4,
    "pack-quantized",
    ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
)
MATRICES = {
    "model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.kv_a_proj_with_mqa",
    "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.experts.7.down_proj",
    "model.layers.1.mlp.shared_experts.up_proj", "model.layers.1.mlp.shared_expert_gate", "model.layers.2.eh_proj",
    "model.layers.2.shared_head.head", "model.layers.0.self_attn.indexer.weights_proj", "model.layers.0.self_attn.indexer.wq_b",
}  # fmt: skip
PLAIN = {
    "model.embed_tokens", "lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.shared_expert_gate",
    "model.layers.2.eh_proj", "model.layers.2.shared_head.head", "model.layers.0.self_attn.indexer.weights_proj",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "scheme", "plain"),
    [
        (DEEPSEEK_V3, "fp8_block", PLAIN),
        (DEEPSEEK_V3 | {"scale_fmt": "ue8m0"}, "fp8_block_ue8m0", PLAIN),
        (QWEN3_MOE, "fp8_block", PLAIN),
        (GLM_45, "fp8_channel", PLAIN),
        (KIMI_K2, "int4_group", MATRICES - {"model.layers.1.mlp.experts.7.down_proj"}),
        ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, "mxfp8", PLAIN),
        ({"quant_method": "fp8"}, "fp8_tensor", PLAIN),
    ],
)
def test_a_published_config_gives_its_scheme_and_leaves_what_the_checkpoint_leaves(
    config: dict[str, Any], scheme: str, plain: set[str]
) -> None:
    found, excludes = from_hf(config, load)
    assert found == shipped(scheme)
    assert {name for name in MATRICES if not excludes.quantises(f"{name}.weight", (256, 256))} == plain
    assert not excludes.quantises("model.layers.0.input_layernorm.weight", (256,))
    assert not excludes.quantises("model.layers.0.self_attn.q_proj.bias", (256,))
    assert not excludes.quantises("model.layers.0.mlp.gate.e_score_correction_bias", (256,))


def test_gpt_oss_holds_only_its_stacked_experts_as_blocks() -> None:
    scheme, excludes = from_hf(GPT_OSS, load)
    assert scheme == shipped("mxfp4_gpt_oss")
    experts = "model.layers.3.mlp.experts.gate_up_proj"
    assert excludes.quantises(experts, (32, 2880, 5760))
    assert [part.hf_name(experts) for part in scheme.parts] == [f"{experts}_blocks", f"{experts}_scales"]
    assert not excludes.quantises(f"{experts}_bias", (32, 5760))
    assert not excludes.quantises("model.layers.3.self_attn.q_proj.weight", (4096, 2880))
    assert excludes.excluded("model.layers.3.self_attn.q_proj")


def test_names_exclude_whole_components_and_patterns_match_from_the_beginning() -> None:
    fp8 = from_hf(DEEPSEEK_V3 | {"modules_to_not_convert": ["mlp.down_proj", "model.layers.5"]}, load)[1]
    assert fp8.excluded("model.layers.0.mlp.down_proj")
    assert fp8.excluded("model.layers.5.self_attn.q_proj")
    assert not fp8.excluded("model.layers.51.self_attn.q_proj")
    assert not fp8.excluded("model.layers.0.mlp.down_proj_2")
    ct = from_hf(compressed(CHANNEL, "float-quantized", ["self_attn.o_proj", "model.layers.0", r"re:layers\.1\."]), load)[1]
    assert ct.excluded("model.layers.3.self_attn.o_proj")
    assert not ct.excluded("model.layers.0.mlp.up_proj"), "a parent's name excludes no child"
    assert not ct.excluded("model.layers.1.mlp.up_proj"), "the pattern does not begin with the name"
    named = compressed(CHANNEL, "float-quantized", [])
    named["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*", "lm_head"]
    only = from_hf(named, load)[1]
    assert not only.excluded("lm_head")
    assert not only.excluded("model.layers.0.mlp.up_proj")
    assert only.excluded("model.layers.0.self_attn.q_proj")


def test_modules_that_are_kept_are_so_by_what_stands_behind_any_dot_and_by_nothing_else() -> None:
    everything = Excludes("fp8")
    for name in ("embed_tokens", "a.q_norm", "norm", "mlp.gate", "a.router", "x.shared_head.y.z", "shared_head", "a.b.conv1d"):
        assert everything.excluded(name), name
    for name in (
        "gate_proj",
        "a.gate.b",
        "embed_tokens.x",
        "a.Qnorm",
        "norms",
        "my_shared_head",
        "xconv1d",
        "a.norm.b",
        "q_gate",
    ):
        assert not everything.excluded(name), name


def test_float32_scales_in_a_checkpoint_mean_float32_arithmetic() -> None:
    scheme, _ = from_hf(GLM_45, load, scale_dtype="float32")
    assert scheme.part("scales").dtype == "float32"
    assert (scheme.arithmetic, scheme.scale_arithmetic, scheme.zero) == ("float32", "float32", 2.0**-23)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "awq"}, "'awq' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "calibrated on activations"),
        ({}, "None is not supported"),
        (DEEPSEEK_V3 | {"activation_scheme": "static"}, "calibrated on activations"),
        (DEEPSEEK_V3 | {"fmt": "e5m2"}, "e5m2"),
        (DEEPSEEK_V3 | {"weight_block_size": [128]}, "two positive sizes"),
        (DEEPSEEK_V3 | {"surprise": 1}, "surprise"),
        (DEEPSEEK_V3 | {"modules_to_not_convert": "lm_head"}, "must be a list"),
        (compressed(CHANNEL | {"symmetric": False}, "float-quantized", []), "asymmetric"),
        (compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized", []), "int 8 bits"),
        (compressed(INT4 | {"actorder": "group"}, "pack-quantized", []), "reordered"),
        (compressed(CHANNEL, "float-quantized", [], transform_config={"a": 1}), "rotated"),
        (compressed(CHANNEL, "float-quantized", []) | {"config_groups": {}}, "0 config_groups"),
    ],
)  # fmt: skip
def test_a_config_that_no_scheme_carries_out_is_refused_with_what_is_legal(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{text}.*legal: quant_method fp8"):
        from_hf(config, load)
