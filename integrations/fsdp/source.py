"""FSDP2 (torch's fully_shard) around a transformers model as the trainer side of a sync. Nothing is gathered.

The layout is read from the live DTensors instead of being declared: every local shard is reported as boxes of checkpoint
tensors (RankDescription.shards).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weight_sync.errors import BindError, listed
from weight_sync.session.contracts import RankDescription
from weight_sync_integrations.fsdp.names import HfView, hf_views
from weight_sync_integrations.live import StepGuard, rank_description, settle

if TYPE_CHECKING:
    import torch


class FsdpSource:
    """TrainerSource over one rank of an FSDP2, HSDP or FSDP2 x TP model.

    Parameters keep the model's names. Their dtype is the live one (often float32 masters under bfloat16 compute): it is
    reported, never cast.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        """
        Args:
            model: a transformers model after fully_shard.
            optimizer: torch's. Its steps are refused during a sync. None: the caller keeps that promise.

        Raises: BindError for LoRA adapters, quantised or offloaded parameters, tensors that transformers computes when
            it saves, and shards that are not boxes.
        """
        import torch

        self._model = model
        self._rank = torch.distributed.get_rank()
        self._guard = StepGuard(optimizer, rank=self._rank)
        adapters = [name for name, _ in model.named_parameters() if "lora_" in name]
        if adapters:
            raise BindError(
                f"trainer rank {self._rank}: the model has LoRA adapters ({listed(adapters, 3)}); their weights are not "
                "those of the served model. Merge them before a sync"
            )
        full = dict(self._full())
        shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
        self._views = hf_views(model, shapes, {name: tensor.dtype for name, tensor in full.items()})
        self.describe()

    def parallel_sizes(self) -> dict[str, int]:
        """Size of every dim of the device meshes in use, by its name ("dp_shard", ...); "dim0" where it has none."""
        return {axis: size for axis, size, _ in self._mesh_dims()}

    def coords(self) -> dict[str, int]:
        """This rank's index on each of them."""
        return {axis: index for axis, _, index in self._mesh_dims()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter and persistent floating-point buffer by name: its local part, without copying. Only what this
        rank holds anything of: with more ranks than rows some hold nothing of it."""
        import torch
        from torch.distributed.tensor import DTensor

        # Asked for several times in each sync: without gradients to_local() is an attribute, after detach() it is a dispatch.
        with torch.no_grad():
            parts = ((name, t.to_local() if isinstance(t, DTensor) else t.detach()) for name, t in self._live())
            return {name: part for name, part in parts if part.numel()}

    def describe(self) -> RankDescription:
        """See TrainerSource. `shards` has an entry for each checkpoint tensor that this rank holds a part of."""
        tensors = self.tensors()
        description = rank_description(tensors, rank=self._rank, coords=self.coords())
        boxes = {name: local_box(name, tensor) for name, tensor in self._full()}
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != boxes[name][1]:
                raise BindError(
                    f"trainer rank {self._rank}: {name} has local shape {list(tensor.shape)}, but its placements say "
                    f"{list(boxes[name][1])}"
                )
        shards = [shard for view in self._views if (shard := shard_of(view, *boxes[view.param]))]
        return replace(description, shards=shards)

    def quiesce(self) -> None:
        """Drop gathered parameters, wait for the device, and refuse optimiser steps.

        Raises: SessionError if a sync is running already.
        """
        self._guard.close()
        try:
            self._reshard()
            settle()
        except BaseException:
            self._guard.open()
            raise

    def release(self) -> None:
        """Steps are allowed again. Raises SessionError if no sync is running."""
        self._guard.open()

    def _reshard(self) -> None:
        """After a forward without backward FSDP keeps whole parameters on the root; the shards are the real ones."""
        from torch.distributed.fsdp import FSDPModule

        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Detached DTensors (or plain tensors where FSDP does not manage one), tied ones once, and weight buffers."""
        return ((name, tensor.detach()) for name, tensor in self._live())

    def _live(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._reshard()
        yield from self._model.named_parameters()
        for module_name, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                    yield f"{module_name}.{name}".lstrip("."), buffer

    def _mesh_dims(self) -> list[tuple[str, int, int]]:
        from torch.distributed.tensor import DTensor

        found: dict[str, tuple[int, int]] = {}
        for name, tensor in self._full():
            if not isinstance(tensor, DTensor):
                continue
            mesh = tensor.device_mesh
            names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
            for dim, axis in enumerate(names):
                here = (mesh.size(dim), mesh.get_local_rank(dim))
                if found.setdefault(axis, here) != here:
                    raise BindError(
                        f"trainer rank {self._rank}: {name} is on a mesh whose dim {axis} has (size, index) {here}, others "
                        f"have {found[axis]}; give the dims of different meshes different names"
                    )
        return [(axis, *value) for axis, value in found.items()]


def local_box(name: str, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, shape) of this rank's part of a DTensor in the global tensor; a plain tensor is whole.

    Raises: BindError for partial sums, and for strided shards that are not one box.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise BindError(f"{name} holds partial sums ({placements}); there is no single value to send")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    shape, offset = list(shape), list(offset)
    for dim in {p.dim for p in placements if type(p).__name__ == "_StridedShard"}:
        indices = _indices_along(tensor, dim)
        if len(indices) and int(indices[-1] - indices[0]) != len(indices) - 1:
            raise BindError(
                f"{name}: rank {mesh.get_coordinate()} of mesh {tuple(mesh.shape)} holds separate pieces of dim {dim} "
                f"({placements}); only shards that are one box can be sent. Apply tensor parallelism before fully_shard"
            )
        shape[dim] = len(indices)
        offset[dim] = int(indices[0]) if len(indices) else 0
    return tuple(offset), tuple(shape)


def _indices_along(tensor: Any, dim: int) -> torch.Tensor:
    """Global indices along `dim` that this rank holds, found by cutting the numbers themselves as DTensor cuts data."""
    import torch

    indices = torch.arange(tensor.shape[dim])
    coordinate = tensor.device_mesh.get_coordinate()
    for mesh_dim, placement in enumerate(tensor.placements):
        if getattr(placement, "dim", None) != dim:
            continue
        # A shard of dim `dim` of the tensor is a shard of dim 0 of the numbers.
        if type(placement).__name__ == "_StridedShard":
            cut = type(placement)(0, split_factor=placement.split_factor)
        else:
            cut = type(placement)(0)
        pieces, _ = cut._split_tensor(indices, tensor.device_mesh.size(mesh_dim), with_padding=False)
        indices = pieces[coordinate[mesh_dim]]
    return indices


def shard_of(view: HfView, offset: tuple[int, ...], shape: tuple[int, ...]) -> dict[str, Any] | None:
    """The part of a checkpoint tensor that lies in a local box of its parameter, as RankDescription.shards has it.

    offset, shape: the local box in the global parameter. None when nothing of the tensor is here. start and strides count
    elements of the local part in row-major order.
    """
    if 0 in shape:
        return None
    pitch = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        pitch[dim] = pitch[dim + 1] * shape[dim + 1]
    low, size, strides = [], [], []
    run = {own for own in view.dims if own is not None}
    start = 0
    for dim, index in enumerate(view.first):
        if dim in run:
            continue
        if not offset[dim] <= index < offset[dim] + shape[dim]:
            return None
        start += (index - offset[dim]) * pitch[dim]
    for count, dim in zip(view.shape, view.dims, strict=True):
        if dim is None:
            low.append(0)
            size.append(1)
            strides.append(0)
            continue
        begin = max(0, offset[dim] - view.first[dim])
        end = min(count, offset[dim] + shape[dim] - view.first[dim])
        if begin >= end:
            return None
        start += (view.first[dim] + begin - offset[dim]) * pitch[dim]
        low.append(begin)
        size.append(end - begin)
        strides.append(pitch[dim])
    return {
        "tensor": view.tensor,
        "offset": low,
        "shape": size,
        "param": view.param,
        "start": start,
        "strides": strides,
    }
