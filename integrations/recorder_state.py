"""Puts a model back exactly as it was: every attribute, flag and tensor binding that a weight loader may touch.

Values in memory are protected by the recorder itself, which does not carry out writes; this file protects everything
that is not an element of a tensor: which tensor a name is bound to, flags on parameters and modules, lists and dicts
that loaders append to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_HELPERS = ("quant_method", "scheme", "moe_runner_config")
"""Attributes of modules that hold per-layer objects in which loaders keep flags."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """named_tensors: parameters and persistent buffers, each storage region once. protected: name by storage identity."""

    named_tensors: dict[str, torch.Tensor]
    protected: dict[int, str]
    bindings: list[tuple[str, torch.Tensor, torch.Tensor, int]]

    def rebound(self) -> list[str]:
        """Names of parameters whose memory is another than at the start."""
        return [name for name, tensor, _, address in self.bindings if tensor.data_ptr() != address]


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[ModelState]:
    """Yield the state of `model`; on leaving, restore attributes, containers and bindings of all its modules."""
    modules = list(model.named_modules())
    holders: list[Any] = [module for _, module in modules]
    for _, module in modules:
        holders += [vars(module)[name] for name in _HELPERS if hasattr(vars(module).get(name), "__dict__")]
        holders += [param for param in module._parameters.values() if param is not None]
    seen: dict[int, Any] = {id(holder): holder for holder in holders}
    saved = [(holder, dict(vars(holder)), _containers(vars(holder))) for holder in seen.values()]
    state = ModelState(_named_tensors(modules), _protected(modules), _bindings(modules))
    try:
        yield state
    finally:
        for _, tensor, data, address in state.bindings:
            if tensor.data_ptr() != address:
                tensor.data = data
        for holder, attributes, containers in saved:
            vars(holder).clear()
            vars(holder).update(attributes)
            for container, content in containers:
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)


def _containers(attributes: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(value, value.copy()) for value in attributes.values() if type(value) in (dict, list, set)]


def _named_tensors(modules: list[tuple[str, torch.nn.Module]]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers; of names for one and the same memory only the first."""
    found: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, int, torch.Size, torch.dtype]] = set()
    for prefix, module in modules:
        own = [*module._parameters.items()]
        own += [item for item in module._buffers.items() if item[0] not in module._non_persistent_buffers_set]
        for name, tensor in own:
            if tensor is None or not tensor.numel():
                continue
            key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.dtype)
            if key not in seen:
                seen.add(key)
                found[f"{prefix}.{name}" if prefix else name] = tensor.detach()
    return found


def _protected(modules: list[tuple[str, torch.nn.Module]]) -> dict[int, str]:
    """Every storage reachable from a module, also through plain attributes, lists and dicts."""
    found: dict[int, str] = {}
    for prefix, module in modules:
        for key, value in {**module._parameters, **module._buffers, **vars(module)}.items():
            if isinstance(value, dict):
                values = list(value.values())
            else:
                values = list(value) if isinstance(value, list | tuple) else [value]
            for tensor in values:
                if isinstance(tensor, torch.Tensor):
                    found.setdefault(tensor.untyped_storage()._cdata, f"{prefix}.{key}" if prefix else key)
    return found


def _bindings(modules: list[tuple[str, torch.nn.Module]]) -> list[tuple[str, torch.Tensor, torch.Tensor, int]]:
    return [
        (f"{prefix}.{name}" if prefix else name, tensor, tensor.data, tensor.data_ptr())
        for prefix, module in modules
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
    ]
