"""MegatronSource: what it says about live parameters, and that they are the finished step's during a sync."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weight_sync.errors import BindError, SessionError

DEMO = {"tp": 2, "pp": 2, "ep": 2}


def described(rank: int, source: Path, parallel: dict[str, int], optimizer: str) -> dict[str, Any]:
    """Describe, and read every parameter's bytes back through address, offset and shape alone."""
    import torch
    from megatron.core.utils import unwrap_model

    from weight_sync_integrations.megatron.model import build
    from weight_sync_integrations.megatron.source import MegatronSource

    trainer = build(source, parallel, optimizer=optimizer)
    live = MegatronSource(trainer.chunks, trainer.optimizer)
    seen = live.describe()
    tensors = live.tensors()
    wrong = []
    for param in seen.params:
        storage = seen.storages[param.storage]
        tensor = tensors[param.name]
        nbytes = tensor.numel() * tensor.element_size()
        assert param.offset + nbytes <= storage.nbytes
        raw = ctypes.string_at(storage.address + param.offset, nbytes)
        if raw != tensor.contiguous().view(torch.uint8).numpy().tobytes() or param.shape != tuple(tensor.shape):
            wrong.append(param.name)
    modules = unwrap_model(trainer.chunks)
    own = [name for module in modules for name, _ in module.named_parameters()]
    epoch = seen.epoch
    trainer.train_step()
    return {
        "seen": seen,
        "wrong": wrong,
        "own": own,
        "same_epoch": live.describe().epoch == epoch,
        "sizes": live.parallel_sizes(),
        "layers": live.layers(),
        "chunks": len(modules),
        "pid": os.getpid(),
    }


@pytest.mark.parametrize("parallel", [DEMO, {"pp": 2, "vpp": 2, "tp": 2}, {"ep": 2, "etp": 2}], ids=str)
@pytest.mark.parametrize("optimizer", ["distributed", "replicated"])
def test_describe_lists_every_parameter_once_at_its_true_address(
    parallel: dict[str, int], optimizer: str, checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]
) -> None:
    from weight_sync.layout.parallel import TrainerDims

    results = ranks(4, described, checkpoint("qwen3_moe"), parallel, optimizer)
    dims = TrainerDims(ranks=4, **parallel)
    for rank, result in enumerate(results):
        seen = result["seen"]
        assert result["wrong"] == []
        names = [param.name for param in seen.params]
        assert len(set(names)) == len(names)
        many = result["chunks"] > 1
        bare = [name.split(".", 1)[1] if many else name for name in names]
        assert sorted(bare) == sorted(result["own"])
        assert many == names[0].startswith("vp0.")
        if optimizer == "distributed":
            assert len(seen.storages) <= 2 * result["chunks"], "mcore's contiguous buffers, not single tensors"
        assert seen.rank == rank
        assert seen.coords == dict(dims.coords(rank))
        assert {axis: size for axis, size in result["sizes"].items() if axis in dims.sizes} == dict(dims.sizes)
        stages = [(layers[0], len(layers)) for layers in dims.stage_layers(4, seen.coords["pp"])]
        assert result["layers"] == stages
        assert result["same_epoch"], "a step moves nothing"
    assert len({result["seen"].epoch for result in results}) == 4, "ranks are different processes"


def guarded(rank: int, source: Path) -> list[str]:
    from weight_sync_integrations.megatron.model import build
    from weight_sync_integrations.megatron.source import MegatronSource

    trainer = build(source, {"tp": 2})
    live = MegatronSource(trainer.chunks, trainer.optimizer)
    errors = []
    for act in (live.release, live.quiesce, live.quiesce, trainer.train_step, live.release, trainer.train_step):
        before = {name: tensor.clone() for name, tensor in live.tensors().items()}
        try:
            act()
            errors.append("")
        except SessionError as error:
            errors.append(str(error))
            assert all(tensor.equal(before[name]) for name, tensor in live.tensors().items())
    assert "step" not in vars(trainer.optimizer)
    return errors


def test_a_step_during_a_sync_is_refused_and_changes_nothing(
    checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]
) -> None:
    for rank, (early, quiet, twice, step, done, later) in enumerate(ranks(2, guarded, checkpoint("qwen3"))):
        assert "release() without quiesce()" in early
        assert quiet == done == later == ""
        assert "quiesce() during a sync" in twice
        assert f"trainer rank {rank}" in step
        assert "step() during a sync" in step


def overlapped(rank: int, source: Path, parallel: dict[str, int], overlap: bool, sync: bool) -> dict[str, Any]:
    from weight_sync_integrations.megatron.model import build
    from weight_sync_integrations.megatron.source import MegatronSource

    trainer = build(source, parallel, overlap_param_gather=overlap)
    live = MegatronSource(trainer.chunks, trainer.optimizer)
    stale, fresh, losses = [], [], []

    def values() -> dict[str, Any]:
        return {name: tensor.float().numpy().copy() for name, tensor in live.tensors().items()}

    for _ in range(3):
        losses.append(trainer.train_step())
        stale.append(values())
        if sync:
            live.quiesce()
            fresh.append(values())
            live.release()
    return {"stale": stale, "fresh": fresh, "losses": losses}


@pytest.mark.parametrize("parallel", [{}, {"pp": 2, "vpp": 2}], ids=["dp 2", "dp 2, virtual stages"])
def test_quiesce_gathers_parameters_that_an_overlapped_gather_left_stale(
    parallel: dict[str, int], checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]
) -> None:
    import numpy as np

    world = 2 * parallel.get("pp", 1)
    source = checkpoint("qwen3_moe")
    truth = ranks(world, overlapped, source, parallel, False, False)
    seen = ranks(world, overlapped, source, parallel, True, True)
    undisturbed = ranks(world, overlapped, source, parallel, True, False)

    def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
        return [name for name in a if not np.array_equal(a[name], b[name])]

    assert any(differing(seen[r]["stale"][0], truth[r]["stale"][0]) for r in range(world)), "nothing was stale: no test"
    for rank in range(world):
        for step in range(3):
            assert differing(seen[rank]["fresh"][step], truth[rank]["stale"][step]) == []
        assert seen[rank]["losses"] == undisturbed[rank]["losses"] == truth[rank]["losses"]


def refused(rank: int, source: Path) -> dict[str, str]:
    """One kind of unreadable parameter after another, made on a real model."""
    import torch
    from megatron.core.utils import unwrap_model

    from weight_sync_integrations.megatron.model import build
    from weight_sync_integrations.megatron.source import MegatronSource

    trainer = build(source, {}, optimizer="replicated")
    model = unwrap_model(trainer.chunks)[0]
    norm = model.decoder.final_layernorm
    plain = norm.weight
    said = {}

    def attempt(key: str, **kwargs: Any) -> None:
        with pytest.raises(BindError) as caught:
            MegatronSource(trainer.chunks, trainer.optimizer, **kwargs)
        said[key] = str(caught.value)

    class Float8Tensor(torch.Tensor):
        pass

    norm.weight = torch.nn.Parameter(plain.detach().clone().as_subclass(Float8Tensor), requires_grad=False)
    attempt("fp8")
    norm.weight = torch.nn.Parameter(torch.empty_like(plain, device="meta"))
    attempt("meta")
    norm.weight = torch.nn.Parameter(plain.detach().clone())
    norm.weight.data.untyped_storage().resize_(0)
    attempt("offloaded")
    norm.weight = plain
    norm.adapter = torch.nn.Linear(2, 2)
    attempt("lora")
    del norm.adapter
    trainer.chunks[0].ddp_config.reuse_grad_buf_for_mxfp8_param_ag = True
    attempt("mxfp8")
    trainer.chunks[0].ddp_config.reuse_grad_buf_for_mxfp8_param_ag = False
    MegatronSource(trainer.chunks, trainer.optimizer)
    return said


def test_parameters_that_cannot_be_read_in_place_are_refused_by_name(
    checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]
) -> None:
    (said,) = ranks(1, refused, checkpoint("qwen3"))
    for key, word in {"fp8": "Float8Tensor", "meta": "meta device", "offloaded": "empty storage"}.items():
        assert "decoder.final_layernorm.weight" in said[key]
        assert word in said[key]
    assert "decoder.final_layernorm.adapter" in said["lora"]
    assert "fp8 primary weights" in said["mxfp8"]


def wrong_order(rank: int, source: Path) -> str:
    from weight_sync_integrations.megatron.model import build
    from weight_sync_integrations.megatron.source import MegatronSource

    trainer = build(source, {"pp": 2})
    try:
        MegatronSource(trainer.chunks, trainer.optimizer, rank_order="tp-cp-ep-pp-dp")
    except BindError as error:
        return str(error)
    return ""


def test_a_rank_order_that_is_not_the_trainers_is_noticed(
    checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]
) -> None:
    said = ranks(4, wrong_order, checkpoint("qwen3"))
    assert said[0] == said[3] == "", "the first and the last rank sit at the same place in both orders"
    assert all("'tp-cp-ep-pp-dp'" in text and "mcore says" in text for text in said[1:3])


def moved(rank: int, source: Path) -> tuple[int, int, list[str]]:
    import torch
    from megatron.core.utils import unwrap_model

    from weight_sync_integrations.megatron.model import build
    from weight_sync_integrations.megatron.source import MegatronSource

    trainer = build(source, {}, optimizer="replicated")
    live = MegatronSource(trainer.chunks, trainer.optimizer)
    first = live.describe().epoch
    model = unwrap_model(trainer.chunks)[0]
    keep = model.decoder.final_layernorm.weight.data  # so that the allocator cannot hand the same place out again
    model.decoder.final_layernorm.weight.data = keep.clone()
    second = live.describe().epoch
    router = model.decoder.final_layernorm
    router.register_buffer("expert_bias", torch.ones(8))
    router.register_buffer("scratch", torch.ones(8), persistent=False)
    router.register_buffer("count", torch.ones(8, dtype=torch.int64))
    return first, second, [param.name for param in live.describe().params if "final_layernorm" in param.name]


def test_the_epoch_changes_when_a_parameter_moves_and_weight_buffers_are_described(
    checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]
) -> None:
    ((first, second, names),) = ranks(1, moved, checkpoint("qwen3"))
    assert first != second
    assert names == ["decoder.final_layernorm.weight", "decoder.final_layernorm.expert_bias"]
