"""What a job says of quantised engines, and what that makes of its two sides."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from config_support import HF_CONFIG, job_with

from weight_sync.config import declared_sides, quant_yaml, quantisation_of
from weight_sync.errors import ConfigError, FamilyError, ParallelError, WeightSyncError
from weight_sync.quant.emission import Quantisation
from weight_sync.quant.scheme import load_scheme
from weight_sync.session.inputs import PlanInputs, dropped_names, layout_of

PUBLISHED: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
    "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(4)), "model.layers.2.self_attn.o_proj"],
}  # fmt: skip


def checkpoint(folder: Path, **more: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | more))
    return str(folder)


def test_auto_means_plain_where_the_checkpoint_says_nothing() -> None:
    assert quantisation_of(job_with(), HF_CONFIG) is None


def test_auto_follows_the_engines_checkpoint_with_what_it_excludes(tmp_path: Path) -> None:
    job = job_with(f"rollout.checkpoint={checkpoint(tmp_path, quantization_config=PUBLISHED)}", "rollout.tp=2")
    trainer, rollout = declared_sides(job, HF_CONFIG)
    assert trainer is not None
    catalog = layout_of(rollout, "rollout").catalog
    assert catalog.digest == layout_of(trainer, "trainer").catalog.digest
    made = {catalog.name(t) for t, is_made in enumerate(catalog.is_made) if is_made}
    assert "model.layers.0.self_attn.o_proj.weight_scale_inv" in made
    assert "model.layers.0.mlp.experts.7.down_proj.weight" in made
    assert not {n for n in made if re.search(r"layers\.2\.self_attn\.o_proj|mlp\.gate\.|lm_head|norm|embed", n)}
    inputs = PlanInputs(trainer, rollout, [""] * job.trainer.ranks, [""] * 2, sorted(dropped_names(rollout, "rollout")))
    plan = inputs.schedule().plan
    assert plan.made.any()
    kinds = (
        {p.dtype for p in plan.target_params if p.part == "values"},
        {p.dtype for p in plan.target_params if p.part == "scales"},
    )
    assert kinds == ({"float8_e4m3fn"}, {"float32"})
    assert PlanInputs.from_json(json.loads(json.dumps(inputs.to_json()))).schedule().digest == inputs.schedule().digest


def test_none_leaves_a_quantised_checkpoint_alone(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, quantization_config=PUBLISHED)
    for word in ("none", "bf16"):
        assert quantisation_of(job_with(f"rollout.checkpoint={path}", f"weight_sync.quant.scheme={word}"), HF_CONFIG) is None


def test_a_named_scheme_takes_options_and_excludes() -> None:
    job = job_with(
        "weight_sync.quant.scheme=fp8_block",
        "weight_sync.quant.options={group: [32, 64]}",
        "weight_sync.quant.exclude=[o_proj]",
    )
    found = quantisation_of(job, HF_CONFIG)
    assert found is not None
    assert found.scheme.group == (32, 64)
    assert found.excludes.excluded("model.layers.1.self_attn.o_proj")
    assert not found.excludes.excluded("model.layers.1.self_attn.q_proj")


def shipped() -> list[str]:
    from weight_sync.config import _files

    return sorted(item.name[:-5] for item in _files("weight_sync", "quant"))


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_scheme_loads_and_survives_the_way_to_the_ranks(name: str) -> None:
    scheme = load_scheme(name, quant_yaml)
    assert scheme.name == name
    from weight_sync.quant.published import Excludes

    quant = Quantisation(scheme, Excludes("fp8", ("a.b",)))
    assert Quantisation.from_json(json.loads(json.dumps(quant.to_json()))) == quant


def refused(*overrides: str) -> str:
    with pytest.raises(WeightSyncError) as caught:
        declared_sides(job_with(*overrides), HF_CONFIG)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_what_cannot_be_is_said_with_what_can(tmp_path: Path) -> None:
    assert re.search(r"unknown quant 'fp8_blok'.*did you mean fp8_block", refused("weight_sync.quant.scheme=fp8_blok"))
    text = refused("weight_sync.quant.options={group: [8, 8]}")
    assert "options and exclude belong to a named scheme, not to auto" in text
    path = checkpoint(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    assert re.search(r"quant_method 'awq' is not supported; legal: ", refused(f"rollout.checkpoint={path}"))
    assert "rollout.checkpoint=/nowhere" in refused("rollout.checkpoint=/nowhere")


def test_an_engine_cut_through_blocks_names_the_tensor_and_the_legal_sizes() -> None:
    job = job_with("weight_sync.quant.scheme=fp8_block", "weight_sync.quant.options={group: [64, 64]}", "rollout.tp=4")
    _, rollout = declared_sides(job, HF_CONFIG)
    with pytest.raises(ParallelError, match=r"attn_tp=4.*edges of values' groups of 64.*legal sizes of the axis: 1, 2"):
        layout_of(rollout, "rollout")


def test_gpt_oss_stacks_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="mxfp4_gpt_oss"):
        layout_of(declared_sides(job_with("weight_sync.quant.scheme=mxfp4_gpt_oss"), HF_CONFIG)[1], "rollout")


def test_a_fused_parameter_of_which_one_half_is_excluded_is_refused() -> None:
    job = job_with(
        "weight_sync.quant.scheme=fp8_block",
        "weight_sync.quant.options={group: [32, 32]}",
        "weight_sync.quant.exclude=[up_proj]",
    )
    with pytest.raises(FamilyError, match=r"one parameter holds .*gate_proj.*does not quantise .*up_proj"):
        layout_of(declared_sides(job, HF_CONFIG)[1], "rollout")


def test_a_weight_smaller_than_a_block_can_be_cut_no_more() -> None:
    """Its one scale would belong to two ranks; engines refuse to build that. By rows, one scale is everybody's."""
    job = job_with("weight_sync.quant.scheme=fp8_block", "rollout.tp=2")
    with pytest.raises(ParallelError, match=r"attn_tp=2.*edges of values' groups of 128.*legal sizes of the axis: 1$"):
        layout_of(declared_sides(job, HF_CONFIG)[1], "rollout")
    layout_of(declared_sides(job_with("weight_sync.quant.scheme=fp8_channel", "rollout.tp=2"), HF_CONFIG)[1], "rollout")
