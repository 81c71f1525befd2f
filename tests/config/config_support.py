"""A tiny checkpoint written by hand, jobs without Hydra's half second each, and a stand-in for Ray not to be called."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from weight_sync.config import compose_job
from weight_sync.schema import JobConf

HF_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 250,
    "num_experts": 8,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


GROUPS = ("+weight_sync", "trainer", "rollout")


@lru_cache
def _composed(*choices: str) -> JobConf:
    return compose_job(list(choices))


def job_with(*overrides: str) -> JobConf:
    """What compose_job makes of these, unchecked: groups are composed (once), values are set. Types are not converted."""
    choices = [item for item in overrides if item.partition("=")[0] in GROUPS]
    job = copy.deepcopy(_composed(*choices))
    for item in overrides:
        key, _, text = item.partition("=")
        if item not in choices:
            *path, last = key.split(".")
            owner: Any = job
            for step in path:
                owner = getattr(owner, step)
            assert hasattr(owner, last), key
            setattr(owner, last, yaml.safe_load(text))
    return job


def safetensors(tensors: dict[str, np.ndarray[Any, Any]]) -> bytes:
    """A file of the safetensors format: length of the header (8 bytes), JSON header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        header[name] = {
            "dtype": "F32", "shape": list(array.shape), "data_offsets": [len(data), len(data) + array.nbytes]
        }  # fmt: skip
        data += array.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def checkpoint(folder: Path, **changes: Any) -> Path:
    """config.json (changes: over HF_CONFIG) and one whole safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**HF_CONFIG, **changes}))
    weights = {"model.norm.weight": np.ones(128, np.float32), "lm_head.weight": np.zeros((250, 128), np.float32)}
    (folder / "model.safetensors").write_bytes(safetensors(weights))
    return folder


def fake_ray(folder: Path, marker: Path) -> Path:
    """A package `ray` whose init() writes `marker` and ends the process with code 77: a folder for PYTHONPATH."""
    (folder / "ray").mkdir(parents=True)
    (folder / "ray" / "__init__.py").write_text(
        f"def init(*args, **named):\n    open({str(marker)!r}, 'w').close()\n    raise SystemExit(77)\n"
        "def shutdown():\n    pass\n"
    )
    return folder
