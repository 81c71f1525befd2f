"""Every shipped family as vLLM's own loaders place it, against the layout that the YAML declares."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from families_support import MODELS, model_of, record_result, rollout_layout
from replica_support import vllm_rank

from weight_sync.layout.witness import agree

SIZES = {
    "tp1": {"tp": 1},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "tp2ep2": {"tp": 2, "moe_ep": 2},
    "pp2": {"pp": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
}
DENSE = ("llama", "qwen2", "qwen3")
FEW = {"glm47_flash": ("tp2ep2", "tp2pp2")}
"""Models of which CI compares a few layouts only: built like another one. The rest was compared once, during development."""
CASES = [
    pytest.param(model, name, id=f"{model} {name}")
    for model in MODELS
    for name in SIZES
    # vLLM knows Kimi-K2 by the architecture its published config names, DeepSeek-V3's. It refuses EP without experts.
    if model != "kimi_k2" and not (name == "tp2ep2" and model.split()[0] in DENSE) and name in FEW.get(model, SIZES)
]


@pytest.fixture(scope="module", autouse=True)
def plain_cpu(vllm_imported: None) -> None:
    from weight_sync_integrations.vllm import cpu

    cpu.apply()


def distinct(model: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every piece of memory, by its first name."""
    from weight_sync_integrations.vllm.live import weights

    found: dict[int, tuple[str, tuple[int, ...], str]] = {}
    for name, tensor in weights(model):
        found.setdefault(tensor.data_ptr(), (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
    return {name: (shape, dtype) for name, shape, dtype in found.values()}


@pytest.mark.parametrize(("model", "name"), CASES)
def test_the_declared_layout_is_what_vllms_own_loader_does(checkpoints: Callable[..., Path], model: str, name: str) -> None:
    from safetensors.torch import load_file

    from weight_sync_integrations.recorder import record

    kind, sizes = MODELS[model]
    path = checkpoints(kind, dtype="bfloat16", num_hidden_layers=3, **sizes)
    tensors, parallel, count = load_file(path / "model.safetensors"), SIZES[name], 0
    layout, computed = rollout_layout(model_of(path), "vllm", parallel)
    for rank in range(layout.world):
        tp, pp = parallel.get("tp", 1), parallel.get("pp", 1)
        with vllm_rank(path, tp, pp, ep="moe_ep" in parallel, rank=rank) as replica:
            seen = record(replica, tensors, replica.load_weights)
            live = distinct(replica)
        assert {p.name: (p.shape, p.dtype) for p in layout.rank_params(rank)} == live
        unexplained = {entry["tensor"] or entry["param"]: entry["operation"] for entry in seen.inexpressible}
        agree(layout, rank, seen.shards, unexplained, computed)
        assert not seen.rewritten
        assert not set(seen.uncovered) & set(live)
        count += len(live)
    record_result("vllm", model, name, "recorder agrees", count)
