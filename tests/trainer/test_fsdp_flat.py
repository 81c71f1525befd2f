"""FlatSource: what FSDP1 ranks report rebuilds every tensor of the checkpoint, cut anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.errors import BindError, SessionError


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_stretch_is_cut_into_few_contiguous_boxes_that_are_exactly_it(data: st.DataObject, shape: list[int]) -> None:
    from weight_sync_integrations.fsdp.flat import stretch

    numbers = np.arange(np.prod(shape)).reshape(shape)
    first = data.draw(st.integers(0, numbers.size))
    count = data.draw(st.integers(0, numbers.size - first))
    boxes = list(stretch(tuple(shape), first, count))
    assert len(boxes) <= 2 * len(shape) - 1
    seen: list[int] = []
    for start, (offset, size) in boxes:
        assert start == len(seen)
        seen += numbers[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))].reshape(-1).tolist()
    assert seen == list(range(first, first + count))


def flat(rank: int, source: Path, options: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers import AutoModelForCausalLM

    from weight_sync_integrations.fsdp.flat import FlatSource

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    live = FlatSource(wrapped, optimizer)
    epoch = live.describe().epoch
    tokens = torch.randint(0, 200, (2, 16), generator=torch.Generator().manual_seed(rank))
    wrapped(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    live.quiesce()
    refused = ""
    try:
        optimizer.step()
    except SessionError as error:
        refused = str(error)
    tensors = live.tensors()
    seen = live.describe()
    values = []
    for shard in seen.shards or []:
        local = tensors[shard["param"]]  # as_strided counts from the start of the storage
        part = torch.as_strided(local, shard["shape"], shard["strides"], local.storage_offset() + shard["start"])
        values.append((shard["tensor"], shard["offset"], part.numpy().copy()))
    live.release()
    with FullyShardedDataParallel.summon_full_params(wrapped):
        whole = {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in wrapped.named_parameters()}
    return {"values": values, "whole": whole, "moved": seen.epoch != epoch, "refused": refused}


@pytest.mark.parametrize(
    ("kind", "sizes", "world", "options"),
    [
        pytest.param("qwen3", {"vocab_size": 200, "hidden_size": 96}, 3, {"use_orig_params": False}, id="rows cut anywhere"),
        pytest.param("qwen3", {"tie_word_embeddings": True}, 2, {"use_orig_params": True}, id="tied, original parameters"),
    ],
)
def test_shards_rebuild_every_checkpoint_tensor_exactly(
    kind: str,
    sizes: dict[str, Any],
    world: int,
    options: dict[str, Any],
    checkpoint: Callable[..., Path],
    ranks: Callable[..., list[Any]],
) -> None:
    results = ranks(world, flat, checkpoint(kind, **sizes), options)
    whole = {name: tensor.numpy() for name, tensor in results[0]["whole"].items()}
    covered = {name: np.zeros(array.shape, int) for name, array in whole.items()}
    for result in results:
        assert not result["moved"]
        assert "optimizer.step() during a sync" in result["refused"]
        for name, offset, values in result["values"]:
            box = tuple(slice(low, low + size) for low, size in zip(offset, values.shape, strict=True))
            assert np.array_equal(whole[name][box], values), name
            covered[name][box] += 1
    assert [name for name, count in covered.items() if (count != 1).any()] == []


def unwrapped(rank: int, source: Path) -> str:
    from transformers import AutoModelForCausalLM

    from weight_sync_integrations.fsdp.flat import FlatSource

    try:
        FlatSource(AutoModelForCausalLM.from_pretrained(source), None)
    except BindError as error:
        return str(error)
    return ""


def test_a_model_that_fsdp1_does_not_wrap_is_refused(checkpoint: Callable[..., Path], ranks: Callable[..., list[Any]]) -> None:
    assert "is not FSDP1's" in ranks(1, unwrapped, checkpoint("qwen3"))[0]
