"""Stand-ins that let verl's Megatron engine run on a machine without accelerators, for tests and benchmarks; see cpu.py.

Loaded by VERL_USE_EXTERNAL_MODULES=weight_sync_integrations.verl.cpu,weight_sync_integrations.verl.cpu_megatron. The engine,
the bridge's model and weights, mcore's DDP and distributed optimizer are the real ones; not verl's or NVIDIA's are:

    megatron/cpu.py                      Transformer Engine's leaf modules and what mcore takes from torch.cuda; put in place
                                         before megatron.core is first imported, in whatever process does that
    mcore's CUDA random number tracker   another of mcore's own trackers, which forks nothing
    device="cuda"                        means the CPU while verl builds model and optimizer
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from wrapt import when_imported

from weight_sync_integrations.megatron import cpu

_FIRST = "megatron.core"


class _BeforeMegatron(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """First on sys.meta_path: acts once, when megatron.core is looked for, and hands out what cpu.install() has imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _FIRST:
            return None
        sys.meta_path.remove(self)
        cpu.install()
        _no_cuda_tracker()
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return sys.modules[_FIRST]

    def exec_module(self, module: ModuleType) -> None: ...


def _no_cuda_tracker() -> None:
    from megatron.core import tensor_parallel

    def seed(*args: Any, **kwargs: Any) -> None:
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)

    tensor_parallel.model_parallel_cuda_manual_seed = seed


@when_imported("verl.workers.engine.megatron.transformer_impl")
def _build_on_cpu(module: Any) -> None:
    original = module.MegatronEngine.initialize

    def initialize(self: Any) -> None:
        with cpu.device_mode():
            original(self)

    module.MegatronEngine.initialize = initialize


if _FIRST not in sys.modules and cpu.needed():
    sys.meta_path.insert(0, _BeforeMegatron())
