"""Which weights an engine fuses under one NVFP4 scale, seen in where its own loader puts their global scales."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weight_sync.config import quant_yaml
from weight_sync.quant.published import from_hf

NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor_group",
                "group_size": 16,
            },
            "input_activations": None,
        }
    },
}  # fmt: skip

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 128, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2,
    "num_experts_per_tok": 2, "vocab_size": 256, "max_position_embeddings": 512, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Of a kind that has no family here: its experts' projections are called w1, w2 and w3."""

_MIXTRAL = [f"model.layers.0.self_attn.{leaf}_proj.weight" for leaf in "qkvo"]
_MIXTRAL += [f"model.layers.0.block_sparse_moe.experts.{e}.{leaf}.weight" for e in range(2) for leaf in ("w1", "w2", "w3")]


def mixtral(folder: Path) -> tuple[Path, list[str]]:
    """(folder with a config.json, HF names of weights that are quantised)."""
    return _served(folder, MIXTRAL), _MIXTRAL


def quantised(checkpoint: Path, folder: Path) -> tuple[Path, list[str]]:
    """The same of a checkpoint that is not quantised."""
    from safetensors import safe_open

    excludes = from_hf(NVFP4, quant_yaml)[1]
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a mapping
    served = _served(folder, json.loads((checkpoint / "config.json").read_text()))
    return served, [name for name, shape in shapes.items() if excludes.quantises(name, shape)]


def _served(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": NVFP4}))
    return folder


def global_scales(names: Iterable[str]) -> list[str]:
    return [f"{name}_global_scale" for name in names]


def fused(shards: Iterable[Mapping[str, Any]]) -> set[frozenset[str]]:
    """Last components of modules of one parent whose global scales went into one parameter. shards: of a Recording."""
    together: dict[tuple[str, str], set[str]] = {}
    for shard in shards:
        parent, _, leaf = shard["tensor"].removesuffix(".weight_global_scale").rpartition(".")
        together.setdefault((shard["param"], parent), set()).add(leaf)
    return {frozenset(leaves) for leaves in together.values() if len(leaves) > 1}
