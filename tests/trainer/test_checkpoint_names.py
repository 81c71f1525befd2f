"""Checkpoint names of transformers parameters, for families far beyond those with a YAML; and the checkpoint maker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weight_sync.errors import BindError, ConfigError

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
MOE: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
GROUPS: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3MoeConfig": {**COMMON, **MOE, "num_experts": 4},
    "MixtralConfig": {**COMMON, "num_local_experts": 4},
    "DeepseekV3Config": {**COMMON, **MOE, **MLA, **GROUPS},
    "Glm4MoeConfig": {**COMMON, **MOE, **GROUPS},
    "GptOssConfig": {**COMMON, "num_local_experts": 4},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_saved_tensor_is_found_in_the_live_parameters(name: str, stack: None, tmp_path: Path) -> None:
    import torch
    import transformers
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from weight_sync_integrations.fsdp.names import hf_views
    from weight_sync_integrations.fsdp.source import shard_of

    sizes = {key: value for key, value in FAMILIES[name].items() if not (name.startswith("Deepseek") and key == "head_dim")}
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**sizes))
    live = {key: value.detach() for key, value in model.state_dict().items()}
    for tensor in live.values():
        tensor.copy_(torch.randn(tensor.shape))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")

    shapes = {key: tuple(tensor.shape) for key, tensor in live.items()}
    views = hf_views(model, shapes, {key: tensor.dtype for key, tensor in live.items()})
    assert sorted(view.tensor for view in views) == sorted(saved)
    for view in views:
        shard = shard_of(view, (0,) * len(shapes[view.param]), shapes[view.param])
        assert shard is not None
        flat = live[view.param].reshape(-1)
        assert torch.equal(torch.as_strided(flat, shard["shape"], shard["strides"], shard["start"]), saved[view.tensor])


def test_a_tensor_that_is_computed_when_it_is_saved_is_refused_by_name(stack: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import core_model_loading

    from weight_sync_integrations.fsdp.names import hf_views

    monkeypatch.setattr(
        core_model_loading, "revert_weight_conversion", lambda model, state: {"a.weight": state["a.weight"] * 2}
    )
    with pytest.raises(BindError, match=r"a\.weight"):
        hf_views(torch.nn.Linear(1, 1), {"a.weight": (4, 2)}, {"a.weight": torch.float32})


def test_checkpoints_depend_on_the_seed_and_on_nothing_else(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from weight_sync_integrations.checkpoints import make_checkpoint

    first = load_file(checkpoint("qwen3_moe") / "model.safetensors")
    again = load_file(make_checkpoint(tmp_path / "again", "qwen3_moe") / "model.safetensors")
    deeper = load_file(make_checkpoint(tmp_path / "deeper", "qwen3_moe", num_hidden_layers=5) / "model.safetensors")
    other = load_file(make_checkpoint(tmp_path / "other", "qwen3_moe", seed=1) / "model.safetensors")
    assert first.keys() == again.keys() == other.keys()
    assert first.keys() < deeper.keys()
    assert all(torch.equal(first[name], again[name]) and torch.equal(first[name], deeper[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}


def test_a_checkpoint_of_another_seed_generates_other_tokens(checkpoint: Callable[..., Path]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    prompt = torch.tensor([[5, 6, 7, 8]])
    said = [
        AutoModelForCausalLM.from_pretrained(checkpoint("qwen3", seed=seed, dtype="float32"))
        .generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=None)[0, 4:]
        .tolist()
        for seed in (0, 1)
    ]
    assert said[0] != said[1]
    assert all(len(set(tokens)) > 4 for tokens in said), "a model that repeats itself cannot tell two versions apart"


def test_an_unknown_kind_or_size_is_refused(stack: None, tmp_path: Path) -> None:
    from weight_sync_integrations.checkpoints import make_checkpoint

    with pytest.raises(ConfigError, match="qwen3, qwen3_moe"):
        make_checkpoint(tmp_path, "mamba")
    with pytest.raises(ConfigError, match="hiden_size"):
        make_checkpoint(tmp_path, "qwen3", hiden_size=64)
