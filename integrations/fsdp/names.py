"""Which checkpoint tensor sits where in a transformers parameter.

transformers 5 stores some parameters otherwise than the checkpoint does (all experts of a layer stacked in one tensor, gate
and up joined, prefixes renamed) and turns them back when it saves. Its own save conversion is run here on meta tensors: they
have no data, but every slice of one keeps its storage, offset and strides, and these say exactly where a checkpoint tensor
sits. So there is no table of model families here. Internals used: transformers.core_model_loading.revert_weight_conversion.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weight_sync.errors import BindError, listed

if TYPE_CHECKING:
    import torch
    from torch.overrides import TorchFunctionMode

_WRAPPERS = re.compile(r"(^|\.)(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class HfView:
    """One checkpoint tensor as a view of one parameter (global, unsharded, row-major).

    param: the parameter's name in the model. shape: of the checkpoint tensor. first: global index, for each dim of the
    parameter, of the view's element 0. dims: for each dim of the checkpoint tensor, the dim of the parameter it runs
    along; None for dims of size 1.
    """

    tensor: str
    param: str
    shape: tuple[int, ...]
    first: tuple[int, ...]
    dims: tuple[int | None, ...]


def hf_views(model: Any, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]) -> list[HfView]:
    """Every tensor of the checkpoint that `model.save_pretrained` would write, as a view of a parameter.

    Args:
        model: a transformers model, sharded or not.
        shapes, dtypes: global shape and dtype of each parameter and persistent buffer, by its name in the model, tied
            ones once.

    Raises: BindError for tensors that transformers computes or copies when it saves, and for parameters it does not save.
    """
    import torch

    plain = {_WRAPPERS.sub("", name).lstrip("."): name for name in shapes}
    state = {name: torch.empty(shapes[own], dtype=dtypes[own], device="meta") for name, own in plain.items()}
    # An address cannot tell meta tensors apart (it is 0); the storage object can, as long as `state` keeps it alive.
    owner = {tensor.untyped_storage()._cdata: plain[name] for name, tensor in state.items()}
    saved = _saved_form(model, dict(state))
    views: list[HfView] = []
    copied: list[str] = []
    for name, tensor in saved.items():
        param = owner.get(tensor.untyped_storage()._cdata)
        view = None if param is None else _as_view(name, param, tensor, shapes[param])
        if view is None:
            copied.append(name)
        else:
            views.append(view)
    if copied:
        raise BindError(
            f"transformers does more than slice and rename when it saves {len(copied)} tensors of "
            f"{type(model).__name__} ({listed(copied)}); their bytes are not in the live parameters as they are"
        )
    unused = sorted(set(shapes) - {view.param for view in views})
    if unused:
        raise BindError(f"transformers does not save {len(unused)} parameters of {type(model).__name__}: {listed(unused)}")
    return views


def _saved_form(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise BindError(
            "transformers.core_model_loading.revert_weight_conversion is missing: the FSDP trainer needs transformers 5"
        ) from error
    with _no_copies():
        try:
            return dict(revert_weight_conversion(model, state))
        except (RuntimeError, ValueError) as error:
            raise BindError(
                f"transformers' save conversion of {type(model).__name__} does not run on views: {error}"
            ) from error


def _no_copies() -> TorchFunctionMode:
    """Inside, contiguous() and clone() return the tensor itself: they move bytes, but say nothing about which is which."""
    import torch
    from torch.overrides import TorchFunctionMode

    class NoCopies(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.Tensor.contiguous, torch.Tensor.clone, torch.clone):
                return args[0]
            return func(*args, **(kwargs or {}))

    return NoCopies()


def _as_view(name: str, param: str, tensor: torch.Tensor, full: tuple[int, ...]) -> HfView | None:
    """Read a strided view back as whole dims of the parameter, each fixed at an index or run through; None if it is not."""
    strides = [1] * len(full)
    for dim in range(len(full) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * full[dim + 1]
    rest, first = tensor.storage_offset(), []
    for stride in strides:
        first.append(rest // stride)
        rest %= stride
    dims: list[int | None] = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 1:
            dims.append(None)
            continue
        found = [dim for dim, own in enumerate(strides) if own == stride and full[dim] > 1 and dim not in dims]
        if not found or first[found[0]] + size > full[found[0]]:
            return None
        dims.append(found[0])
    return HfView(tensor=name, param=param, shape=tuple(tensor.shape), first=tuple(first), dims=tuple(dims))
