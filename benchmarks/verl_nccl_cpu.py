"""Stand-ins that let verl's `nccl` checkpoint engine run where there is no GPU, for `verl_nccl.py --device cpu` and its test.

verl imports this module in every process (VERL_USE_EXTERNAL_MODULES). What stands in for what:

    cupy                   the four names that the engine uses, as torch tensors in host memory
    ray.util.collective    the five calls that the engine makes, by torch's gloo; Ray's own take GPUs only
    torch, in that module  zeros(device="cuda") is made on the CPU; cuda.synchronize and cuda.empty_cache do nothing

The engine's own code (topology, buckets, ZeroMQ, the order of broadcasts) is verl's. vLLM and SGLang are hidden, as on a host
that has neither: verl would import them in every process.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from wrapt import when_imported

STORE = "WEIGHT_SYNC_BENCHMARK_STORE"
"""Where the processes of a group meet: the first part of a file's path."""
_SECONDS = 120.0


def _cupy() -> ModuleType:
    module = ModuleType("cupy")
    module.uint8 = torch.uint8  # type: ignore[attr-defined]
    module.ndarray = torch.Tensor  # type: ignore[attr-defined]
    module.zeros = torch.zeros  # type: ignore[attr-defined]
    module.asarray = lambda tensor: tensor  # type: ignore[attr-defined]
    return module


class _Gloo:
    """ray.util.collective, for groups with one process for each rank."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}

    def is_group_initialized(self, group_name: str) -> bool:
        return group_name in self._groups

    def init_collective_group(self, world_size: int, rank: int, backend: str, group_name: str) -> None:
        store = torch.distributed.FileStore(f"{os.environ[STORE]}-{group_name}", world_size)
        self._groups[group_name] = torch.distributed.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=_SECONDS))

    def destroy_collective_group(self, group_name: str) -> None:
        del self._groups[group_name]

    def barrier(self, group_name: str) -> None:
        self._groups[group_name].barrier().wait()

    def broadcast(self, tensor: torch.Tensor, src_rank: int, group_name: str) -> None:
        self._groups[group_name].broadcast(tensor, src_rank).wait()


class _Torch:
    """torch, but for what needs a GPU."""

    cuda = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: str, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, **options)


class _NoEngines(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname in ("vllm", "sglang"):
            raise ModuleNotFoundError(f"{__name__} hides {fullname}", name=fullname)


@when_imported("verl.checkpoint_engine.nccl_checkpoint_engine")
def _stand_in(module: Any) -> None:
    module.collective = _Gloo()
    module.torch = _Torch()


sys.modules["cupy"] = _cupy()
sys.meta_path.insert(0, _NoEngines())
