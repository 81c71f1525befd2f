"""FSDP1 (torch's FullyShardedDataParallel) around a transformers model as the trainer side of a sync. Nothing is gathered.

FSDP1 joins the parameters of a wrapped module into one flat one and cuts that evenly, so a rank holds a stretch of a
parameter's elements that may begin and end in the middle of a row. A stretch is a few boxes (a part of a row, whole rows, a
part of a row), each contiguous in it, and boxes are what a plan takes.

Internals used, seen in torch 2.13: FSDP._handle.flat_param with _fqns, _shapes, _shard_param_infos, _local_shard, _param_infos.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weight_sync.errors import BindError, listed
from weight_sync.session.contracts import RankDescription
from weight_sync_integrations.fsdp.names import hf_views
from weight_sync_integrations.fsdp.source import shard_of
from weight_sync_integrations.live import StepGuard, rank_description, settle

if TYPE_CHECKING:
    import torch

Box = tuple[tuple[int, ...], tuple[int, ...]]
_WRAPPER = "_fsdp_wrapped_module"


@dataclass(frozen=True, slots=True)
class _Piece:
    """What this rank holds of one parameter: elements [first, first + count) of its row-major order; count may be 0.

    flat: the flat parameter it is in. start: its first element in this rank's part of the flat one.
    """

    flat: Any
    shape: tuple[int, ...]
    first: int
    start: int
    count: int

    def values(self) -> torch.Tensor:
        # FSDP keeps its shard aside from its first forward on; until then, the flat parameter is nothing else.
        shard = getattr(self.flat, "_local_shard", None)
        local = (self.flat.data if shard is None else shard).detach()
        return local[self.start : self.start + self.count]


class FlatSource:
    """TrainerSource over one rank of an FSDP1 model. Parameters keep the model's names; locally each is one-dimensional."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        """
        Args:
            model: FullyShardedDataParallel around a transformers model.
            optimizer: torch's. Its steps are refused during a sync. None: the caller keeps that promise.

        Raises: BindError for a model that is not wrapped so, parameters outside any wrapped module, LoRA adapters, offloaded
            parameters, and what transformers computes when it saves.
        """
        import torch
        from torch.distributed.fsdp import FullyShardedDataParallel

        self._model = model
        self._rank = torch.distributed.get_rank()
        self._guard = StepGuard(optimizer, rank=self._rank)
        if not isinstance(model, FullyShardedDataParallel):
            raise BindError(f"trainer rank {self._rank}: {type(model).__name__} is not FSDP1's FullyShardedDataParallel")
        pieces = self._pieces()
        if adapters := [name for name in pieces if "lora_" in name]:
            raise BindError(f"trainer rank {self._rank}: the model has LoRA adapters ({listed(adapters, 3)}); merge them first")
        # With use_orig_params the model's own parameters are views into the flat ones, else all that there are is flat.
        own = {id(p) for piece in pieces.values() for p in (piece.flat, *(getattr(piece.flat, "_params", None) or ()))}
        if loose := [name for name, parameter in model.named_parameters() if id(parameter) not in own]:
            raise BindError(f"trainer rank {self._rank}: FSDP does not manage {listed(loose, 3)}")
        shapes = {name: piece.shape for name, piece in pieces.items()}
        dtypes = {name: piece.flat.dtype for name, piece in pieces.items()}
        self._views = hf_views(model.module, shapes, dtypes)
        self.describe()

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's elements of every parameter that it holds any of, one-dimensional, without copying."""
        return {name: piece.values() for name, piece in self._pieces().items() if piece.count}

    def describe(self) -> RankDescription:
        """See TrainerSource. `shards` has an entry for each box of a checkpoint tensor that this rank holds."""
        description = rank_description(self.tensors(), rank=self._rank, coords={"dp": self._rank})
        pieces = self._pieces()
        shards: list[dict[str, Any]] = []
        for view in self._views:
            piece = pieces[view.param]
            for start, (offset, shape) in stretch(piece.shape, piece.first, piece.count):
                if (shard := shard_of(view, offset, shape)) is not None:
                    shards.append(shard | {"start": shard["start"] + start})
        return replace(description, shards=shards)

    def quiesce(self) -> None:
        """Wait for the device, and refuse optimiser steps. The local shards are always the real ones: what forward gathers is a
        copy. Raises SessionError if a sync is running already."""
        self._guard.close()
        settle()

    def release(self) -> None:
        """Steps are allowed again. Raises SessionError if no sync is running."""
        self._guard.open()

    def _pieces(self) -> dict[str, _Piece]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        found: dict[str, _Piece] = {}
        for path, module in self._model.named_modules():
            if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
                continue
            flat = module._handle.flat_param
            prefix = ".".join(part for part in path.split(".") if part and part != _WRAPPER)
            for name, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
                own = ".".join(part for part in (*prefix.split("."), *name.split(".")) if part and part != _WRAPPER)
                first, start, count = (
                    (info.intra_param_start_idx, info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0, 0)
                )
                found[own] = _Piece(flat, tuple(shape), first, start, count)
        if not found:
            raise BindError(f"trainer rank {self._rank}: no module of the model is wrapped by FSDP")
        return found


def stretch(shape: tuple[int, ...], first: int, count: int) -> Iterator[tuple[int, Box]]:
    """Elements [first, first + count) of a row-major array as boxes, in order: (where in the stretch, (offset, shape)).

    Each box is contiguous in the array, so also in the stretch. At most 2 * dims - 1 of them.
    """
    done = 0
    while done < count:
        at, left = first + done, count - done
        # The outermost dim along which a whole step fits here: everything inside of it is taken whole.
        dim, inner = len(shape) - 1, 1
        while dim > 0 and at % (inner * shape[dim]) == 0 and left >= inner * shape[dim]:
            inner *= shape[dim]
            dim -= 1
        index, rest = [], at
        for size in (math.prod(shape[k + 1 :]) for k in range(len(shape))):
            index.append(rest // size)
            rest %= size
        steps = min(left // inner, shape[dim] - index[dim])
        yield done, (tuple(index), (*(1,) * dim, steps, *shape[dim + 1 :]))
        done += steps * inner
