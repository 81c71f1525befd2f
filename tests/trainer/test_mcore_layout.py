"""The declared mcore layout against Megatron-Bridge's own load mappings, element for element, on live models."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODELS = {
    "qwen3": ("qwen3", {"vocab_size": 200}),
    "qwen3 tied": ("qwen3", {"vocab_size": 200, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {}),
}


def layouts() -> list[Any]:
    cases = []
    for tp, (pp, vpp), ep, etp in itertools.product((1, 2), ((1, 1), (2, 1), (2, 2)), (1, 2), (1, 2)):
        parallel = {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp}
        name = " ".join(f"{axis}{size}" for axis, size in parallel.items())
        for model in MODELS:
            if model == "qwen3_moe" or ep == etp == 1:
                cases.append(pytest.param(model, parallel, id=f"{model} {name}"))
    return cases


def mapped(rank: int, source: Path, parallel: dict[str, int]) -> dict[str, Any]:
    """Oracle ids of every parameter of this rank; the live values must be the checkpoint's at those ids."""
    import torch
    from safetensors.torch import load_file

    from weight_sync_integrations.megatron.model import build, checkpoint_shapes
    from weight_sync_integrations.megatron.oracle import element_ids, oracle_ids
    from weight_sync_integrations.megatron.source import MegatronSource

    trainer = build(source, parallel, optimizer="replicated")
    table = element_ids(checkpoint_shapes(source))
    ids = oracle_ids(trainer.chunks, trainer.bridge, table)
    live = MegatronSource(trainer.chunks, trainer.optimizer).tensors()
    checkpoint = load_file(source / "model.safetensors")
    flat = torch.cat([torch.zeros(1, dtype=torch.bfloat16), *(checkpoint[name].flatten() for name in sorted(checkpoint))])
    wrong = [
        name
        for name, tensor in live.items()
        if not torch.equal(flat[torch.from_numpy(ids[name]).flatten()].view(tensor.shape), tensor)
    ]
    assert {name: tuple(tensor.shape) for name, tensor in live.items()} == {name: array.shape for name, array in ids.items()}
    return {"ids": ids, "wrong": wrong}


@pytest.mark.parametrize(("model", "parallel"), layouts())
def test_the_declared_layout_puts_every_element_where_megatron_bridge_loads_it(
    model: str, parallel: dict[str, int], checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]
) -> None:
    import numpy as np

    from weight_sync.config import family_yaml
    from weight_sync.layout.family import apply, mcore_convention, parse_family
    from weight_sync.layout.parallel import TrainerDims
    from weight_sync.layout.resolve import resolve
    from weight_sync_integrations.megatron.model import checkpoint_shapes
    from weight_sync_integrations.megatron.oracle import element_ids, ids_of_shards

    kind, sizes = MODELS[model]
    source = checkpoint(kind, **sizes)
    world = parallel["pp"] * max(parallel["tp"], parallel["ep"] * parallel["etp"])
    family = parse_family(family_yaml(kind))
    declared = apply(family, json.loads((source / "config.json").read_text()))
    dims = TrainerDims(ranks=world, **parallel)
    layout = resolve(declared, mcore_convention(family), dims, "trainer", vocab_multiple=128 * parallel["tp"])
    table = element_ids(checkpoint_shapes(source))

    for rank, result in enumerate(ranks(world, mapped, source, parallel)):
        assert result["wrong"] == [], f"the oracle itself is wrong on rank {rank}"
        shapes = {param.name: param.shape for param in layout.rank_params(rank)}
        assert shapes == {name: ids.shape for name, ids in result["ids"].items()}
        ours = ids_of_shards(layout.rank_to_json(rank), shapes, table)
        assert [name for name in ours if not np.array_equal(ours[name], result["ids"][name])] == []
