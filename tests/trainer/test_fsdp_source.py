"""FsdpSource: the shards it reports rebuild every tensor of the checkpoint, and only real boxes are reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weight_sync.errors import BindError, ParallelError, SessionError


def shard_values(live: Any) -> list[tuple[str, list[int], Any]]:
    """(checkpoint tensor, box offset, values) of every shard, read through param, start and strides alone."""
    import torch

    tensors = live.tensors()
    return [
        (
            shard["tensor"],
            shard["offset"],
            torch.as_strided(tensors[shard["param"]].reshape(-1), shard["shape"], shard["strides"], shard["start"])
            .view(torch.int16 if tensors[shard["param"]].itemsize == 2 else torch.int32)
            .numpy()
            .copy(),
        )
        for shard in live.describe().shards
    ]


def sharded(rank: int, source: Path, parallel: dict[str, int], options: dict[str, Any], out: Path) -> dict[str, Any]:
    from weight_sync_integrations.fsdp.model import build
    from weight_sync_integrations.fsdp.source import FsdpSource

    trainer = build(source, parallel, **options)
    live = FsdpSource(trainer.model, trainer.optimizer)
    epoch = live.describe().epoch
    losses = [trainer.train_step() for _ in range(2)]
    live.quiesce()
    try:
        seen = live.describe()
        values = shard_values(live)
    finally:
        live.release()
    trainer.export_hf(out)
    return {
        "seen": seen,
        "values": values,
        "losses": losses,
        "moved": seen.epoch != epoch,
        "sizes": live.parallel_sizes(),
        "elements": {name: tensor.numel() for name, tensor in live.tensors().items()},
    }


CASES = [
    pytest.param("qwen3", {}, 2, {}, {}, 1, id="even"),
    pytest.param("qwen3", {"vocab_size": 200, "hidden_size": 96}, 5, {}, {}, 1, id="uneven, empty shards"),
    pytest.param(
        "qwen3",
        {"tie_word_embeddings": True},
        2,
        {},
        {"dtype": "float32", "compute_dtype": "bfloat16"},
        1,
        id="tied, float32 masters",
    ),
    pytest.param("qwen3_moe", {}, 4, {"dp_replicate": 2}, {}, 2, id="HSDP, experts"),
    pytest.param("qwen3_moe", {}, 3, {}, {}, 1, id="experts cut unevenly"),
]


@pytest.mark.parametrize(("kind", "sizes", "world", "parallel", "options", "copies"), CASES)
def test_shards_rebuild_every_checkpoint_tensor_exactly(
    kind: str,
    sizes: dict[str, Any],
    world: int,
    parallel: dict[str, int],
    options: dict[str, Any],
    copies: int,
    checkpoint: Callable[..., Path],
    ranks: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:
    import numpy as np
    import torch
    from safetensors.torch import load_file

    source = checkpoint(kind, **sizes)
    results = ranks(world, sharded, source, parallel, options, tmp_path)
    original, trained = load_file(source / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert trained.keys() == original.keys(), "the oracle itself is another checkpoint"
    assert not any(torch.equal(trained[name], original[name]) for name in trained if "norm" not in name)

    words = {n: t.view(torch.int16 if t.itemsize == 2 else torch.int32).numpy() for n, t in trained.items()}
    covered = {name: np.zeros(array.shape, int) for name, array in words.items()}
    for result in results:
        for name, offset, values in result["values"]:
            box = tuple(slice(low, low + size) for low, size in zip(offset, values.shape, strict=True))
            assert np.array_equal(words[name][box], values), name
            covered[name][box] += 1
    assert [name for name, count in covered.items() if (count != copies).any()] == []

    for rank, result in enumerate(results):
        seen = result["seen"]
        assert not result["moved"]
        assert seen.rank == rank
        held = {param.name for param in seen.params}
        assert held == result["elements"].keys(), "the agent compares what is described with the tensors themselves"
        assert {shard["param"] for shard in seen.shards} == held
        assert {param.dtype for param in seen.params} == {options.get("dtype", "bfloat16")}
        assert result["sizes"]["dp_shard"] * result["sizes"].get("dp_replicate", 1) == world
    assert len({tuple(sorted(result["seen"].coords.items())) for result in results}) == world
    assert len({tuple(result["losses"]) for result in results}) == 1


def with_tensor_parallel(rank: int, source: Path) -> dict[str, Any]:
    """FSDP2 over a tensor-parallel MLP: torch's order (TP first), whose shards are strided but boxes."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import AutoModelForCausalLM

    from weight_sync_integrations.fsdp.source import FsdpSource

    model = AutoModelForCausalLM.from_pretrained(source)
    reference = {name: param.detach().clone() for name, param in model.named_parameters()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    live = FsdpSource(model, None)
    gate = model.model.layers[0].mlp.gate_proj.weight
    values = shard_values(live)
    words = {name: tensor.view(torch.int16).numpy() for name, tensor in reference.items()}
    wrong = []
    for name, offset, array in values:
        box = tuple(slice(low, low + size) for low, size in zip(offset, array.shape, strict=True))
        if not (words[name][box] == array).all():
            wrong.append(name)
    boxes = [(name, tuple(offset), array.shape) for name, offset, array in values]
    return {"placements": str(gate.placements), "wrong": wrong, "boxes": boxes, "coords": live.coords()}


def test_fsdp_over_tensor_parallel_reports_the_strided_shards_at_their_real_offsets(
    checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]
) -> None:
    results = ranks(4, with_tensor_parallel, checkpoint("qwen3"))
    assert all("_StridedShard" in result["placements"] for result in results), "torch changed: no strided shard to test"
    assert [result["wrong"] for result in results] == [[]] * 4
    gate = "model.layers.0.mlp.gate_proj.weight"
    rows = [offset[0] for result in results for name, offset, _ in result["boxes"] if name == gate]
    # dp is the slower mesh dim, but torch cuts over tp first: ranks (dp, tp) = (0, 0) (0, 1) (1, 0) (1, 1).
    assert rows == [0, 128, 64, 192]
    assert [result["coords"] for result in results] == [{"dp": d, "tp": t} for d in (0, 1) for t in (0, 1)]


def scattered(rank: int) -> str:
    """A strided shard with nothing that cuts it into one piece."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    from weight_sync_integrations.fsdp.source import local_box

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    tensor = DTensor.from_local(torch.zeros(4, 3), mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    with pytest.raises(BindError) as caught:
        local_box("some.weight", tensor)
    return str(caught.value)


def test_a_shard_that_is_not_one_box_is_refused_by_name(ranks: Callable[..., list[Any]]) -> None:
    assert all("some.weight" in text and "separate pieces of dim 0" in text for text in ranks(2, scattered))


def guarded(rank: int, source: Path) -> list[str]:
    import torch

    from weight_sync_integrations.fsdp.model import build
    from weight_sync_integrations.fsdp.source import FsdpSource

    trainer = build(source)
    live = FsdpSource(trainer.model, trainer.optimizer)
    with torch.no_grad():  # leaves the root's parameters gathered
        trainer.model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    errors = []
    for act in (live.release, live.quiesce, live.quiesce, trainer.train_step, live.release, trainer.train_step):
        before = {name: tensor.clone() for name, tensor in live.tensors().items()}
        try:
            act()
            errors.append("")
        except SessionError as error:
            errors.append(str(error))
            assert all(tensor.equal(before[name]) for name, tensor in live.tensors().items())
    return errors


def test_an_fsdp_step_during_a_sync_is_refused_and_changes_nothing(
    checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]
) -> None:
    for early, quiet, twice, step, done, later in ranks(2, guarded, checkpoint("qwen3")):
        assert "release() without quiesce()" in early
        assert quiet == done == later == ""
        assert "quiesce() during a sync" in twice
        assert "step() during a sync" in step


def test_lora_adapters_are_refused_by_name(checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]) -> None:
    (text,) = ranks(1, with_adapter, checkpoint("qwen3"))
    assert "lora_A" in text


def with_adapter(rank: int, source: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM

    from weight_sync_integrations.fsdp.source import FsdpSource

    model = AutoModelForCausalLM.from_pretrained(source)
    model.model.layers[0].mlp.up_proj.lora_A = torch.nn.Linear(2, 2)
    with pytest.raises(BindError) as caught:
        FsdpSource(model, None)
    return str(caught.value)


def test_sizes_that_do_not_multiply_to_the_world_are_refused(
    checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]
) -> None:
    assert all("dp_replicate x dp_shard = 1 x 3" in text for text in ranks(2, wrong_sizes, checkpoint("qwen3")))


def wrong_sizes(rank: int, source: Path) -> str:
    from weight_sync_integrations.fsdp.model import build

    with pytest.raises(ParallelError) as caught:
        build(source, {"dp_shard": 3})
    return str(caught.value)
