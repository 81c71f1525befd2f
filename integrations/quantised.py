"""A quantised Hugging Face checkpoint, made of an unquantised one: what an engine serves, and what a sync must leave behind.

Every value is computed by weight_sync.quant.reference, in float64 and one rounding at a time, not by the kernels of a sync: so
an engine that loads such a checkpoint from disk is an oracle for a sync. Slow; for the small models of tests and of the
stand-alone job.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weight_sync.config import quant_yaml
from weight_sync.errors import ConfigError
from weight_sync.quant.published import from_hf
from weight_sync.quant.reference import reference, weights
from weight_sync.quant.scheme import Scheme

if TYPE_CHECKING:
    import torch


def quantise_checkpoint(
    source: str | Path, folder: str | Path, quantization: Mapping[str, Any], *, scale_dtype: str | None = None
) -> Path:
    """Write the folder `folder`: the checkpoint `source` with the weights that `quantization` speaks of quantised.

    source: a folder with config.json and *.safetensors. quantization: a quantization_config as config.json holds it; written
    into the new config.json. scale_dtype: as of weight_sync.quant.published.from_hf.
    Returns `folder`. Raises ConfigError for a quantization_config that no scheme carries out, or that leaves all as it is.
    """
    from safetensors.torch import load_file, save_file

    source, folder = Path(source), Path(folder)
    scheme, excludes = from_hf(quantization, quant_yaml, scale_dtype)
    config = json.loads((source / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    chosen = {name for name, tensor in tensors.items() if excludes.quantises(name, tuple(tensor.shape))}
    if not chosen:
        raise ConfigError(f"quantization_config {dict(quantization)} leaves every tensor of {source} as it is")
    result = {name: tensor for name, tensor in tensors.items() if name not in chosen}
    for name in sorted(chosen):
        result |= quantised_parts(scheme, name, tensors[name], _total(scheme, name, tensors, chosen))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(result, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(quantization)}, indent=2) + "\n")
    if (source / "generation_config.json").exists():
        shutil.copy(source / "generation_config.json", folder)
    return folder


def fp8_config(config: Mapping[str, Any], block: Sequence[int] = (128, 128), *, ue8m0: bool = False) -> dict[str, Any]:
    """A quantization_config as published fp8 checkpoints of this kind of model have it. config: config.json of the model.

    DeepSeek-V3 and V3.1 list nothing that stays as it is, and need not: their router is never quantised. Qwen3's lists the
    head and every router (Qwen3-30B-A3B-FP8), and must: vLLM builds Qwen3's router with a scheme unless it is listed.
    """
    made = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    if ue8m0:
        made["scale_fmt"] = "ue8m0"
    if config["model_type"] not in ("deepseek_v3", "kimi_k2"):
        gates = [f"model.layers.{layer}.mlp.gate" for layer in range(config["num_hidden_layers"])]
        made["modules_to_not_convert"] = ["lm_head", *gates]
    return made


def quantised_parts(scheme: Scheme, name: str, weight: torch.Tensor, total: float | None = None) -> dict[str, torch.Tensor]:
    """What the HF tensor `name` becomes, by HF name. total: largest magnitude of all that share its global scale."""
    import torch

    rows, columns = int(weight.shape[0]), int(weight.shape[1])
    if problem := scheme.problem((rows, columns)):
        raise ConfigError(f"{name} {problem}")
    made = reference(scheme, _numbers(weight), total=total)
    return {
        part.hf_name(name): torch.from_numpy(made[part.name].copy())
        .view(getattr(torch, part.dtype))
        .reshape(part.shape((rows, columns)))
        for part in scheme.parts
    }


def _total(scheme: Scheme, name: str, tensors: Mapping[str, torch.Tensor], chosen: set[str]) -> float | None:
    """Largest magnitude of a weight and of those that an engine fuses with it, for schemes that have a scale of the tensor."""
    if scheme.scale != "two_level":
        return None
    module = name.removesuffix(scheme.part("values").suffix)
    path, _, leaf = module.rpartition(".")
    group = next((names for names in scheme.fused if leaf in names), (leaf,))
    found = [item for item in (f"{path}.{other}{name[len(module) :]}" for other in group) if item in chosen]
    return max(float(np.abs(weights(scheme, _numbers(tensors[item]))).max()) for item in found)


def _numbers(weight: torch.Tensor) -> Any:
    import torch

    return weight.to(torch.float32).numpy()  # exact for bfloat16, which numpy lacks
