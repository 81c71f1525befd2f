"""What every trainer adapter needs: live torch tensors as plain data, an epoch, and a lock on optimiser steps."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from weight_sync.errors import BindError, SessionError
from weight_sync.ids import ITEMSIZE
from weight_sync.session.contracts import LiveParam, LiveStorage, RankDescription
from weight_sync.session.memory import describe, device_of, dtype_name, epoch_of

if TYPE_CHECKING:
    import torch

__all__ = ["StepGuard", "describe_tensors", "rank_description", "settle", "why_not_live"]


def describe_tensors(
    tensors: Mapping[str, torch.Tensor], *, rank: int
) -> tuple[tuple[LiveParam, ...], tuple[LiveStorage, ...]]:
    """Describe local tensors and the distinct storages they live in, in order of first use.

    A storage is listed whole, also where tensors cover only a part of it: that is what a transport registers. Tensors
    without elements are left out; they have no address.

    Raises: BindError naming each tensor that cannot be read in place, and why.
    """
    refused = {name: reason for name, tensor in tensors.items() if (reason := why_not_live(tensor))}
    devices = {tensor.device.type for tensor in tensors.values() if not tensor.is_meta}
    if len(devices) > 1:
        odd = {name: "is on the CPU while others are on a device: offloaded" for name, t in tensors.items() if t.is_cpu}
        refused = {**odd, **refused}
    if refused:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in list(refused.items())[:8])
        more = f"\n  (and {len(refused) - 8} more)" if len(refused) > 8 else ""
        raise BindError(
            f"trainer rank {rank}: {len(refused)} of {len(tensors)} parameters cannot be read in place; "
            f"only plain tensors that are resident on the training device can be sent{lines}{more}"
        )
    return describe({name: tensor for name, tensor in tensors.items() if tensor.numel()}, f"trainer rank {rank}")


def rank_description(tensors: Mapping[str, torch.Tensor], *, rank: int, coords: Mapping[str, int]) -> RankDescription:
    """What a TrainerSource says of its rank, without shards. Raises BindError as describe_tensors does."""
    params, storages = describe_tensors(tensors, rank=rank)
    return RankDescription(
        rank=rank,
        host=socket.gethostname(),
        coords=dict(coords),
        epoch=epoch_of(storages),
        params=params,
        storages=storages,
        device=device_of(tensors),
    )


def settle() -> None:
    """Return once the device has done what was asked of it: a finished optimiser step is in the parameters then."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def why_not_live(tensor: torch.Tensor) -> str | None:
    """Why the bytes of `tensor` are not a plain array in this process's memory now; None when they are."""
    import torch

    kinds = (torch.Tensor, torch.nn.Parameter)
    for value in (tensor, tensor.data):
        if type(value) not in kinds and not isinstance(value, torch.nn.Buffer):
            return f"is a {type(value).__module__}.{type(value).__name__} (quantised or distributed tensor class)"
    if tensor.is_meta:
        return "is on the meta device and holds no bytes"
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}"
    if dtype_name(tensor) not in ITEMSIZE:
        return f"has dtype {dtype_name(tensor)}; known are {', '.join(ITEMSIZE)}"
    if tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        return f"has {tensor.numel()} elements but an empty storage: offloaded or freed"
    return None


class StepGuard:
    """Refuses optimiser steps between close() and open().

    torch optimisers have a hook for it; mcore's optimisers do not, so their bound `step` is shadowed on the object
    while the guard is closed. An optimiser's `step` that somebody bound earlier is not seen in the second case.
    """

    def __init__(self, optimizer: Any, *, rank: int) -> None:
        self._optimizer = optimizer
        self._rank = rank
        self._undo: Callable[[], None] | None = None

    @property
    def closed(self) -> bool:
        return self._undo is not None

    def close(self) -> None:
        """Raises SessionError if it is closed already: two syncs would share one set of parameters."""
        import torch

        if self.closed:
            raise SessionError(f"trainer rank {self._rank}: quiesce() during a sync; release() the running one first")
        if self._optimizer is None:
            self._undo = lambda: None
        elif isinstance(self._optimizer, torch.optim.Optimizer):
            self._undo = self._optimizer.register_step_pre_hook(self._refuse).remove
        else:
            self._undo = self._shadow_step()

    def open(self) -> None:
        """Raises SessionError if no sync is running."""
        if self._undo is None:
            raise SessionError(f"trainer rank {self._rank}: release() without quiesce()")
        self._undo()
        self._undo = None

    def _shadow_step(self) -> Callable[[], None]:
        optimizer, attributes = self._optimizer, vars(self._optimizer)
        had, previous = "step" in attributes, attributes.get("step")
        optimizer.step = self._refuse

        def undo() -> None:
            if had:
                optimizer.step = previous
            else:
                del optimizer.step

        return undo

    def _refuse(self, *args: object, **kwargs: object) -> None:
        raise SessionError(
            f"trainer rank {self._rank}: optimizer.step() during a sync would change weights that are being sent; "
            "step again after release()"
        )
