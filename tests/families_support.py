"""What the family tests of every environment share: tiny models by name, declared layouts, and the record of what agreed.

A test that compares a family with an oracle writes one line for each family and layout into the folder named by
WEIGHT_SYNC_FAMILY_RECORDS, if that is set; docs/families.md is made of them (tests/layout/test_families_table.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weight_sync.config import engine_yaml, family_for, family_yaml, quant_yaml
from weight_sync.layout.family import Model, apply, engine_convention, mcore_convention, parse_convention, parse_family
from weight_sync.layout.parallel import EngineDims, TrainerDims
from weight_sync.layout.resolve import computed_names, resolve
from weight_sync.layout.table import Layout
from weight_sync.quant.emission import Quantisation
from weight_sync.quant.published import from_hf
from weight_sync.session.inputs import quantised

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 128,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"vocab_size": 250}),
    "qwen2 tied": ("qwen2", {"vocab_size": 250, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"vocab_size": 250}),
    "qwen3": ("qwen3", {"vocab_size": 250}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {"vocab_size": 250, "rope_parameters": YARN}),
    "deepseek_v3 without q_lora": ("deepseek_v3", {"vocab_size": 250, "rope_parameters": YARN, "q_lora_rank": None}),
    "kimi_k2": ("kimi_k2", {"rope_parameters": YARN}),
    "glm45": ("glm4_moe", {"vocab_size": 250}),
    "glm45 air": ("glm4_moe", {"vocab_size": 250, "use_qk_norm": False}),
    "glm47_flash": ("glm4_moe_lite", {"vocab_size": 250, "rope_parameters": YARN}),
    "glm5": ("glm_moe_dsa", {"vocab_size": 250, "rope_parameters": YARN}),  # SGLang's CPU kernels know no other rope with MLA
}
"""Name -> (kind of checkpoint, its sizes)."""

CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
        }
    },
}
"""The quantization_config of compressed-tensors' fp8 with a scale for each row."""

_ROWS = CHANNEL["config_groups"]["group_0"]
TENSOR = CHANNEL | {
    "config_groups": {
        "group_0": _ROWS | {part: _ROWS[part] | {"strategy": "tensor"} for part in ("weights", "input_activations")}
    }
}
"""The same with one scale for the tensor."""


def model_of(checkpoint: Path) -> Model:
    config = json.loads((checkpoint / "config.json").read_text())
    return apply(parse_family(family_yaml(family_for(config))), config)


def quantisation_of(checkpoint: Path) -> Quantisation:
    """What the checkpoint's quantization_config says."""
    return Quantisation(*from_hf(json.loads((checkpoint / "config.json").read_text())["quantization_config"], quant_yaml))


def quantised_model_of(checkpoint: Path) -> Model:
    """model_of(), with the HF tensors that the checkpoint holds instead of weights."""
    return quantised(model_of(checkpoint), quantisation_of(checkpoint).to_json())


def trainer_layout(model: Model, dims: TrainerDims, **symbols: int) -> Layout:
    multiple = {"vocab_multiple": 128 * dims.tp, **symbols}
    return resolve(model, mcore_convention(model.family), dims, "trainer", **multiple)


def rollout_layout(model: Model, engine: str, sizes: Mapping[str, int], **symbols: int) -> tuple[Layout, dict[str, str]]:
    """The declared layout of an engine and the tensors it declares as computed. sizes: of EngineDims."""
    data = engine_yaml(engine)
    convention = engine_convention(parse_convention(data))
    dims = EngineDims(remainder=data["remainder"], **sizes)
    return (
        resolve(model, convention, dims, "rollout", **symbols),
        computed_names(model, convention, dims, "rollout", **symbols),
    )


def record_result(side: str, model: str, layout: str, result: str, tensors: int) -> None:
    """Remember an agreement for docs/families.md. result: what was equal; tensors: parameters compared over all ranks."""
    folder = os.environ.get("WEIGHT_SYNC_FAMILY_RECORDS")
    if folder:
        line = json.dumps({"side": side, "model": model, "layout": layout, "result": result, "tensors": tensors})
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / f"{side}.jsonl").open("a") as file:
            file.write(line + "\n")
