"""Where every element of a live mcore parameter comes from, according to Megatron-Bridge. For tests, on tiny models.

Our own layout is written down in closed form; this is the second opinion. Every HF tensor is replaced by an array of
consecutive numbers (element ids), and the bridge's own load mapping is run on it with the communication taken out. What
arrives in a parameter says which HF element sits at which local element. It shares no code with weight_sync.layout.

Internals of megatron-bridge 0.6.2 are used (mappings' tp_rank and scatter_to_tp_ranks).
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.errors import BindError, listed

Ids = NDArray[np.int64]
Table = dict[str, tuple[int, tuple[int, ...]]]
"""HF name -> (id of its first element, shape). Ids count from 1 in row-major order; 0 is padding."""


def element_ids(shapes: Mapping[str, tuple[int, ...]]) -> Table:
    """Number all elements of a checkpoint, tensors in the order of their names."""
    table: Table = {}
    first = 1
    for name in sorted(shapes):
        table[name] = (first, tuple(shapes[name]))
        first += prod(shapes[name])
    return table


def oracle_ids(chunks: list[Any], bridge: Any, table: Table) -> dict[str, Ids]:
    """Element ids of every parameter of this rank, [local shape], by the names of MegatronSource. A collective.

    A tied output layer of the last stage is a copy of the embedding; the bridge loads no name for it and it holds the
    embedding's ids.

    Raises: BindError for a parameter the bridge has no mapping for.
    """
    from megatron.core.utils import unwrap_model

    unwrapped = unwrap_model(chunks)
    many = len(unwrapped) > 1
    found: dict[str, Ids] = {}
    for task in bridge._model_bridge.build_conversion_tasks(bridge.hf_pretrained, chunks):
        if task is None or task.param_weight is None:
            continue  # held by another stage
        name = f"vp{task.vp_stage}.{task.param_name}" if many else task.param_name
        found[name] = _mapped(task.mapping, task.megatron_module, tuple(task.param_weight.shape), table)
    missing = []
    for index, chunk in enumerate(unwrapped):
        for name, param in chunk.named_parameters():
            key = f"vp{index}.{name}" if many else name
            if key in found:
                continue
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                mapping = bridge._model_bridge.mapping_registry().megatron_to_hf_lookup("embedding.word_embeddings.weight")
                found[key] = _mapped(mapping, chunk.output_layer, tuple(param.shape), table)
            else:
                missing.append(key)
    if missing:
        raise BindError(f"megatron-bridge has no mapping for {len(missing)} parameters: {listed(missing)}")
    return found


def ids_of_shards(shards: Iterable[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]], table: Table) -> dict[str, Ids]:
    """The same arrays from a layout's shards (as Layout.rank_to_json or RankDescription.shards write them).

    Args:
        shards: of one rank; box coordinates i sit at local element start + sum((i - offset) * strides), row-major.
        shapes: local shape of every parameter of the rank. Elements that no shard covers stay 0.

    Raises: BindError where a shard leaves its parameter, or two shards claim one element.
    """
    found = {name: np.zeros(prod(shape), np.int64) for name, shape in shapes.items()}
    for shard in shards:
        first, shape = table[shard["tensor"]]
        local = np.asarray(shard["start"], np.int64)
        ids = np.asarray(first, np.int64)
        pitch = np.cumprod([1, *shape[:0:-1]])[::-1]  # row-major strides of the HF tensor
        for size, offset, stride, step in zip(shard["shape"], shard["offset"], shard["strides"], pitch.tolist(), strict=True):
            index = np.arange(size, dtype=np.int64)
            local = local[..., None] + index * stride
            ids = ids[..., None] + (index + offset) * step
        target = found[shard["param"]]
        if local.min() < 0 or local.max() >= target.size:
            raise BindError(f"{shard['tensor']} leaves {shard['param']} ({target.size} elements): {dict(shard)}")
        flat = local.ravel()
        if target[flat].any() or np.unique(flat).size != flat.size:
            raise BindError(f"{shard['tensor']} claims elements of {shard['param']} that are taken: {dict(shard)}")
        target[flat] = ids.ravel()
    return {name: found[name].reshape(shape) for name, shape in shapes.items()}


def _mapped(mapping: Any, module: torch.nn.Module, shape: tuple[int, ...], table: Table) -> Ids:
    """Run one load mapping on ids, as this rank of its tensor-parallel group."""
    names = {"": mapping.hf_param} if isinstance(mapping.hf_param, str) else dict(mapping.hf_param)
    ids = {}
    for part, name in names.items():
        first, full = table[name]
        ids[part] = torch.arange(first, first + prod(full), dtype=torch.int64).view(full)
    mapping = copy.copy(mapping)
    if getattr(mapping, "_mapping", None) is not None:
        mapping._mapping = None  # AutoMapping caches what it found out about the real module
    target = _look_alike(mapping, module, shape)
    with _no_communication(mapping):
        result = mapping.hf_to_megatron(ids[""] if isinstance(mapping.hf_param, str) else ids, target)
    array = result.contiguous().numpy()
    if array.shape != shape and array.shape[1:] == shape[1:]:  # the bridge pads the vocabulary while it cuts, so not at tp 1
        array = np.concatenate([array, np.zeros((shape[0] - array.shape[0], *shape[1:]), np.int64)])
    if array.shape != shape:
        raise BindError(f"{mapping.megatron_param}: the bridge's mapping gives {array.shape}, the live parameter has {shape}")
    return array


def _look_alike(mapping: Any, module: torch.nn.Module, shape: tuple[int, ...]) -> torch.nn.Module:
    """A module of the same class name whose parameter holds int64 (mappings cast to it) and no memory."""
    fake = type(type(module).__name__, (torch.nn.Module,), {})()
    fake.config = module.config
    if hasattr(module, "parallel_mode"):
        fake.parallel_mode = module.parallel_mode
    last = re.sub(r"\d+$", "0", mapping.megatron_param.rsplit(".", 1)[1])  # the bridge looks experts up as expert 0
    fake.register_parameter(last, torch.nn.Parameter(torch.empty(1, dtype=torch.int64).expand(shape), requires_grad=False))
    return fake


@contextlib.contextmanager
def _no_communication(mapping: Any) -> Iterator[None]:
    """The mapping believes to be tensor rank 0, which cuts, and receives the piece of the rank it really is."""
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping as Base
    from megatron.core.utils import get_pg_rank

    names = ("tp_rank", "scatter_to_tp_ranks", "broadcast_tensor_to_tp_ranks")
    saved = {name: Base.__dict__[name] for name in names}
    Base.tp_rank = property(lambda self: 0)
    Base.scatter_to_tp_ranks = lambda self, splits, *args, **kwargs: splits[get_pg_rank(self.tp_group)]
    Base.broadcast_tensor_to_tp_ranks = lambda self, tensor, src_rank=0: tensor
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(Base, name, value)
