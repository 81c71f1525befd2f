"""Tiny random Hugging Face checkpoints, made on the spot: for the stand-alone job, tests and benchmarks.

The weights are not trained. They are scaled so that a model built on them behaves like a model: logits differ from
token to token and from step to step, so two weight versions do not generate the same greedy tokens by accident.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weight_sync.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {
    "moe_intermediate_size": 128,  # SGLang on CPU pads smaller ones to its tile, which changes shapes
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
_SHARED: dict[str, Any] = {  # experts beside a shared one, a leading dense layer, one MTP layer
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,  # what transformers computes: the part of a head that is rotated
    "moe_layer_freq": 1,  # the last three are in published configs; transformers has no use for them, engines do
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
_FP32 = "e_score_correction_bias"
"""Stored in float32 whatever the model's dtype."""


def _qwen3(sizes: dict[str, Any]) -> PretrainedConfig:
    from transformers import Qwen3Config

    return Qwen3Config(**{**_COMMON, **sizes})


def _qwen3_moe(sizes: dict[str, Any]) -> PretrainedConfig:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**{**_COMMON, **_MOE, **sizes})


def _llama(sizes: dict[str, Any]) -> PretrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig(**{**_COMMON, **sizes})


def _qwen2(sizes: dict[str, Any]) -> PretrainedConfig:
    from transformers import Qwen2Config

    return Qwen2Config(**{**{key: value for key, value in _COMMON.items() if key != "head_dim"}, **sizes})


def _phi3(sizes: dict[str, Any]) -> PretrainedConfig:
    """Checkpoints hold q, k and v in one tensor, gate and up in another. There is no family for it."""
    from transformers import Phi3Config

    return Phi3Config(**{**{key: value for key, value in _COMMON.items() if key != "head_dim"}, **sizes})


def _deepseek_v3(sizes: dict[str, Any]) -> PretrainedConfig:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(**{**_COMMON, **_SHARED, **_LATENT, "n_group": 2, "topk_group": 1, **sizes})


def _kimi_k2(sizes: dict[str, Any]) -> PretrainedConfig:
    from transformers import DeepseekV3Config

    changes = {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0, "architectures": ["KimiK2ForCausalLM"]}
    return DeepseekV3Config(**{**_COMMON, **_SHARED, **_LATENT, **changes, **sizes})


def _glm4_moe(sizes: dict[str, Any]) -> PretrainedConfig:
    from transformers import Glm4MoeConfig

    changes = {"use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1}
    return Glm4MoeConfig(**{**_COMMON, **_SHARED, **changes, **sizes})


def _glm4_moe_lite(sizes: dict[str, Any]) -> PretrainedConfig:
    from transformers import Glm4MoeLiteConfig

    # first_k_dense_replace is in published configs; transformers says the same with mlp_layer_types.
    changes = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return Glm4MoeLiteConfig(**{**_COMMON, **_SHARED, **_LATENT, **changes, **sizes})


def _glm_moe_dsa(sizes: dict[str, Any]) -> PretrainedConfig:
    from transformers import GlmMoeDsaConfig

    changes = {
        "n_group": 1,
        "topk_group": 1,
        "index_head_dim": 32,
        "index_n_heads": 4,
        "index_topk": 16,
        "indexer_rope_interleave": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return GlmMoeDsaConfig(**{**_COMMON, **_SHARED, **_LATENT, **changes, **sizes})


KINDS: dict[str, Callable[[dict[str, Any]], PretrainedConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "phi3": _phi3,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _kimi_k2,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "glm_moe_dsa": _glm_moe_dsa,
}
"""What make_checkpoint() can build, by the model_type in published configs."""


def make_checkpoint(path: str | Path, kind: str = "qwen3", *, seed: int = 0, dtype: str = "bfloat16", **sizes: Any) -> Path:
    """Write config.json, generation_config.json and model.safetensors of a random model to the folder `path`.

    Args:
        path: folder; made if missing, files in it are overwritten.
        kind: a key of KINDS.
        seed: every tensor depends on this and its own name and shape only, so a tensor stays the same when layers are
            added or transformers changes the order in which it makes them.
        dtype: torch's name without prefix, of every tensor.
        sizes: keys of the transformers config that replace the defaults (hidden_size=..., tie_word_embeddings=True, ...).

    Returns: `path`.
    Raises: ConfigError for an unknown kind or a key the config class does not have.
    """
    if kind not in KINDS:
        raise ConfigError(f"no checkpoint kind {kind!r}; there are: {', '.join(sorted(KINDS))}")
    unknown = sorted(set(sizes) - set(KINDS[kind]({}).to_dict()))
    if unknown:
        raise ConfigError(f"the {kind} config has no {', '.join(unknown)}")
    return write_checkpoint(path, KINDS[kind]({**sizes, "dtype": dtype}), seed=seed, dtype=dtype)


def write_checkpoint(path: str | Path, config: PretrainedConfig, *, seed: int = 0, dtype: str = "bfloat16") -> Path:
    """The same for any config that transformers can build a causal language model from. Arguments as of make_checkpoint."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    named = config.architectures  # building the model replaces it by the name of transformers' class
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    # One file whatever the size: tests and readers then need no index. transformers writes the on-disk names (one tensor
    # for each expert) although it holds stacked experts in memory.
    with _no_progress_bar():
        model.save_pretrained(path, max_shard_size="1TB")
    if named:
        written = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**written, "architectures": named}, indent=2) + "\n")
    file = path / "model.safetensors"
    empty = _with_mtp(load_file(file), config)
    tensors = {name: _random_like(name, tensor, seed) for name, tensor in empty.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def _with_mtp(tensors: dict[str, torch.Tensor], config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Add the MTP layers, which transformers leaves out: built like the last decoder layer, with what joins them to it."""
    result = dict(tensors)
    last, hidden = config.num_hidden_layers - 1, config.hidden_size
    norm = tensors["model.norm.weight"]
    for layer in range(last + 1, last + 1 + (getattr(config, "num_nextn_predict_layers", 0) or 0)):
        prefix = f"model.layers.{layer}."
        for name in tensors:
            if name.startswith(f"model.layers.{last}."):
                result[name.replace(f"model.layers.{last}.", prefix, 1)] = tensors[name]
        for part in ("enorm", "hnorm", "shared_head.norm"):
            result[f"{prefix}{part}.weight"] = norm
        result[f"{prefix}eh_proj.weight"] = norm.new_empty(hidden, 2 * hidden)
    return result


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _random_like(name: str, tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Norm weights near 1, vectors near 0, matrices with std 1.2 / sqrt(columns) so that activations keep their scale."""
    import torch

    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    noise = torch.randn(tensor.shape, generator=generator)
    if tensor.dim() > 1:
        values = noise * (1.2 / math.sqrt(tensor.shape[-1]))
    else:
        values = noise * 0.1 + (1.0 if "norm" in name else 0.0)
    return values.to(torch.float32 if name.endswith(_FP32) else tensor.dtype)
