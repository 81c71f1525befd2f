"""Transports by name. A name maps to "module:Class"; the module is imported only when a transport of it is made."""

from __future__ import annotations

import importlib
from typing import Any

from weight_sync.errors import ConfigError, listed
from weight_sync.transport.base import Transport

_KNOWN: dict[str, str] = {}


def register(name: str, target: str) -> None:
    """Make `target` ("package.module:Class") available under `name`; a third party calls this for its own transport.

    Raises ConfigError for a name already taken by another target, and for a target that is not "module:Class".
    """
    module, colon, attribute = target.partition(":")
    if not (colon and module and attribute):
        raise ConfigError(f'transport {name!r}: target {target!r} is not of the form "package.module:Class"')
    if _KNOWN.setdefault(name, target) != target:
        raise ConfigError(f"transport {name!r} is already registered as {_KNOWN[name]!r}; refused: {target!r}")


def names() -> tuple[str, ...]:
    """All known names, sorted."""
    return tuple(sorted(_KNOWN))


def resolve(name: str) -> type[Transport]:
    """Import and return the class behind `name`. Raises ConfigError when the name or its class is unknown."""
    if name not in _KNOWN:
        raise ConfigError(f"unknown transport {name!r}; known: {listed(names(), limit=32)}")
    module, _, attribute = _KNOWN[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"transport {name!r} is registered as {_KNOWN[name]!r}, which does not load: {error}") from error


def create(name: str, **options: Any) -> Transport:
    """A new transport. `options` are its constructor's keyword arguments; ConfigError for one that it does not take."""
    made_by = resolve(name)
    try:
        return made_by(**options)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # from inside the constructor: a bug there, not a wrong option
        raise ConfigError(f"transport {name!r}: options {sorted(options)} are not what it takes: {error}") from error


register("memory", "weight_sync.transport.memory:MemoryTransport")
register("mooncake", "weight_sync.transport.mooncake:MooncakeTransport")
register("nixl", "weight_sync.transport.nixl:NixlTransport")
register("cma", "weight_sync.transport.cma:CmaTransport")
register("cuda_ipc", "weight_sync.transport.cuda_ipc:CudaIpcTransport")
