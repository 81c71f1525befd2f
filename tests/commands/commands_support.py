"""A small model's config, and the commands as a user types them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from weight_sync.cli import main

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
JOB = (
    "trainer.ranks=8",
    "trainer.tp=2",
    "trainer.pp=2",
    "trainer.ep=2",
    "rollout.tp=4",
    "rollout.moe_ep=2",
    "rollout.engines=2",
)


@dataclass(frozen=True, slots=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


def config_file(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**HF_CONFIG, **changes}))
    return path


def caller(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """call("plan", ...) -> Said."""

    def call(*words: str) -> Said:
        capsys.readouterr()
        code = main(list(words))
        out, err = capsys.readouterr()
        return Said(code, out, err)

    return call
