"""Tiny random Hugging Face checkpoints, made on the spot: for the stand-alone job, tests and benchmarks.

The weights are not trained. They are scaled so that a model built on them behaves like a model: logits differ from
token to token and from step to step, so two weight versions do not generate the same greedy tokens by accident.
"""

from __future__ import annotations

import contextlib
import hashlib
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


def _qwen3(sizes: dict[str, Any]) -> PretrainedConfig:
    from transformers import Qwen3Config

    return Qwen3Config(**{**_COMMON, **sizes})


def _qwen3_moe(sizes: dict[str, Any]) -> PretrainedConfig:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**{**_COMMON, **_MOE, **sizes})


KINDS: dict[str, Callable[[dict[str, Any]], PretrainedConfig]] = {"qwen3": _qwen3, "qwen3_moe": _qwen3_moe}
"""What make_checkpoint() can build, by transformers' model_type."""


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
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    if kind not in KINDS:
        raise ConfigError(f"no checkpoint kind {kind!r}; there are: {', '.join(sorted(KINDS))}")
    unknown = sorted(set(sizes) - set(KINDS[kind]({}).to_dict()))
    if unknown:
        raise ConfigError(f"the {kind} config has no {', '.join(unknown)}")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)

    config = KINDS[kind]({**sizes, "dtype": dtype})
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    # One file whatever the size: tests and readers then need no index. transformers writes the on-disk names (one tensor
    # for each expert) although it holds stacked experts in memory.
    with _no_progress_bar():
        model.save_pretrained(path, max_shard_size="1TB")
    file = path / "model.safetensors"
    tensors = {name: _random_like(name, tensor, seed) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return path


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
    return values.to(tensor.dtype)
