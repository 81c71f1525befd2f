"""Fixtures of the simulator's tests: tiny schedules and clusters with round numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weight_sync.simulate import Cluster
from weight_sync.simulate.cluster import parse_cluster
from weight_sync.simulate.work import Round, Work

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1024, "vocab_size": 4096, "num_experts": 8,
    "moe_intermediate_size": 256, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    "dtype": "bfloat16",
}  # fmt: skip
"""Of the model that plans are made for."""
PLAIN: dict[str, Any] = {
    "name": "plain", "description": "round numbers", "gpus_per_node": 2, "gpu_memory": 1e9,
    "local": {"rate": 100.0, "domain": 2}, "nic": {"per_node": 2, "rate": 10.0},
    "writes": {"seconds": 0.0}, "copy_rate": 1e9, "digest_source": 1e9, "digest_target": 1e9, "detect": {"dead_peer": 5.0},
}  # fmt: skip


@pytest.fixture
def plain() -> dict[str, Any]:
    """A cluster as plain data: two GPUs and two cards a node, 100 B/s inside, 10 B/s between nodes."""
    return {**PLAIN, "local": dict(PLAIN["local"]), "nic": dict(PLAIN["nic"]), "writes": dict(PLAIN["writes"])}


@pytest.fixture
def cluster(plain: dict[str, Any]) -> Cluster:
    return parse_cluster(plain, "test")


def work_from(matrix: list[list[float]], writes: float = 1.0) -> Work:
    """matrix[trainer rank][rollout rank]: bytes."""
    table = np.asarray(matrix, np.float64)
    source, target = np.nonzero(table)
    nbytes = table[source, target]
    none = np.zeros(table.shape[0]), np.zeros(table.shape[1])
    round_ = Round(source, target, nbytes, np.full(len(nbytes), writes), *none)
    return Work(*table.shape, (round_,), table.sum(axis=1), table.sum(axis=0), len(nbytes))
