"""Every shipped family against Megatron-Bridge's own load mappings, element for element, on live models.

The layouts are a pairwise choice out of tp{1,2,4} x pp{1,2} x vpp{1,2} x ep{1,2,4} x etp{1,2}; WEIGHT_SYNC_ALL_LAYOUTS=1 runs
the whole product (half an hour on two cores).
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from families_support import MODELS, model_of, record_result, trainer_layout

from weight_sync.errors import FamilyError
from weight_sync.layout.parallel import TrainerDims

ALL = os.environ.get("WEIGHT_SYNC_ALL_LAYOUTS") == "1"
DENSE = [(tp, pp, vpp, 1, 1) for tp, (pp, vpp) in itertools.product((1, 2, 4), ((1, 1), (2, 1), (2, 2)))]
SPARSE = [(tp, pp, vpp, ep, etp) for (tp, pp, vpp, _, _), ep, etp in itertools.product(DENSE, (1, 2, 4), (1, 2))]
# Every pair of values of two axes is in some row; worlds of more than 8 ranks are left to the whole product.
PAIRWISE_DENSE = [(1, 1, 1, 1, 1), (2, 2, 1, 1, 1), (4, 2, 2, 1, 1)]
PAIRWISE_SPARSE = [
    (1, 1, 1, 1, 1),
    (2, 1, 1, 4, 2),
    (4, 1, 1, 2, 1),
    (1, 2, 1, 2, 2),
    (2, 2, 2, 2, 1),
    (4, 2, 1, 4, 1),
    (1, 2, 2, 4, 1),
    (4, 2, 2, 1, 2),
]
DENSE_MODELS = ("llama", "qwen2", "qwen2 tied", "qwen3")
VARIANTS = ("glm45 air", "glm47_flash")  # one layout is enough: as another model but for a few parameters
NO_LATENT = "deepseek_v3 without q_lora"


def cases() -> list[Any]:
    found = []
    for model in MODELS:
        if model == NO_LATENT:
            continue
        if model in DENSE_MODELS:
            layouts = DENSE if ALL else PAIRWISE_DENSE
        else:
            layouts = SPARSE if ALL else PAIRWISE_SPARSE[4:5] if model in VARIANTS else PAIRWISE_SPARSE
        for sizes in layouts:
            name = " ".join(f"{axis}{size}" for axis, size in zip(("tp", "pp", "vpp", "ep", "etp"), sizes, strict=True))
            found.append(
                pytest.param(model, dict(zip(("tp", "pp", "vpp", "ep", "etp"), sizes, strict=True)), id=f"{model} {name}")
            )
    return found


def oracle_of(rank: int, source: Path, parallel: dict[str, int]) -> dict[str, Any]:
    """Oracle ids and dtype of every parameter of this rank; the live values must be the checkpoint's at those ids."""
    import torch
    from safetensors.torch import load_file

    from weight_sync_integrations.megatron.model import build, checkpoint_shapes
    from weight_sync_integrations.megatron.oracle import element_ids, oracle_ids
    from weight_sync_integrations.megatron.source import MegatronSource

    trainer = build(source, parallel, optimizer="replicated")
    ids = oracle_ids(trainer.chunks, trainer.bridge, element_ids(checkpoint_shapes(source)))
    live = MegatronSource(trainer.chunks, trainer.optimizer).tensors()
    checkpoint = load_file(source / "model.safetensors")
    flat = torch.cat([torch.zeros(1), *(checkpoint[name].flatten().float() for name in sorted(checkpoint))])
    wrong = [
        name
        for name, tensor in live.items()
        if not torch.equal(flat[torch.from_numpy(ids[name]).flatten()].view(tensor.shape), tensor.float())
    ]
    assert {name: tuple(tensor.shape) for name, tensor in live.items()} == {name: array.shape for name, array in ids.items()}
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in live.items()}
    return {"ids": ids, "wrong": wrong, "dtypes": dtypes}


@pytest.mark.parametrize(("model", "parallel"), cases())
def test_the_declared_layout_puts_every_element_where_megatron_bridge_loads_it(
    model: str, parallel: dict[str, int], checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]
) -> None:
    import numpy as np

    from weight_sync_integrations.megatron.model import checkpoint_shapes
    from weight_sync_integrations.megatron.oracle import element_ids, ids_of_shards

    kind, sizes = MODELS[model]
    source = checkpoint(kind, **sizes)
    dims = TrainerDims(ranks=parallel["pp"] * max(parallel["tp"], parallel["ep"] * parallel["etp"]), **parallel)
    declared = model_of(source)
    layout = trainer_layout(declared, dims)
    shapes = checkpoint_shapes(source)
    assert {name: declared.catalog.pattern_of(i).shape for name, i in declared.catalog.ids.items()} == shapes
    table, count = element_ids(shapes), 0
    for rank, result in enumerate(ranks(dims.world, oracle_of, source, parallel)):
        assert result["wrong"] == [], f"the oracle itself is wrong on rank {rank}"
        mine = {param.name: param.shape for param in layout.rank_params(rank)}
        assert mine == {name: ids.shape for name, ids in result["ids"].items()}
        assert {param.name: param.dtype for param in layout.rank_params(rank)} == result["dtypes"]
        ours = ids_of_shards(layout.rank_to_json(rank), mine, table)
        assert [name for name in ours if not np.array_equal(ours[name], result["ids"][name])] == []
        count += len(mine)
    record_result("trainer", model, " ".join(f"{axis}{size}" for axis, size in parallel.items()), "bridge agrees", count)


def test_a_trainer_without_the_mtp_layer_drops_it_by_name(checkpoint: Callable[..., Path]) -> None:
    model = model_of(checkpoint("deepseek_v3"))

    names = {param.name for param in trainer_layout(model, TrainerDims(ranks=2, pp=2), trained_mtp=0).params}

    assert not any(name.startswith("mtp.") for name in names)
    assert any(p.name.startswith("mtp.") and p.rank == 1 for p in trainer_layout(model, TrainerDims(ranks=2, pp=2)).params)


def test_queries_without_a_latent_are_refused_by_name_on_the_trainer_side(checkpoint: Callable[..., Path]) -> None:
    kind, sizes = MODELS[NO_LATENT]

    with pytest.raises(FamilyError, match=r"family deepseek_v3, mcore is refused .*q_rank == 0"):
        trainer_layout(model_of(checkpoint(kind, **sizes)), TrainerDims(ranks=1))


def test_kimi_k2_with_an_mtp_layer_is_refused_by_name(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(FamilyError, match=r"family kimi_k2 is refused .*mtp_layers > 0"):
        model_of(checkpoint("kimi_k2", num_nextn_predict_layers=1))
