"""Stand-ins that let verl run on a machine without accelerators, for tests and benchmarks; nothing here is used on a GPU.

A platform whose device is the CPU: verl has none and takes such a machine for one of NVIDIA's. Loaded by
VERL_USE_EXTERNAL_MODULES=weight_sync_integrations.verl.cpu and chosen by VERL_PLATFORM=cpu, both of them verl's own hooks. Ray
still counts GPUs, which are then numbers only: ray.init(num_gpus=...).

FSDP1's check that parameters are on a GPU before rank 0's values are broadcast: gloo broadcasts them from where they are.

AsyncLLM.pause_generation(wait_for_inflight_requests=...): verl 0.9.1 was written for vLLM 0.24; 0.32, which runs beside
the CPU trainer here, has the same under another name.

Megatron is hidden, as if it were not installed, unless cpu_megatron.py is loaded too: verl imports it for whatever engine is
used, which without a GPU takes seconds, fails half-way and leaves its ways of pickling tensors behind.

dataclasses.fields(ServerArgs): verl 0.9.1 was written for SGLang 0.5.12; in 0.5.23 that is an ordinary class.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import os
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_base import PlatformBase
from wrapt import when_imported


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """What verl asks of a device, answered for the CPU."""

    device_name = "cpu"
    vendor_name = "cpu"

    @property
    def device_module(self) -> ModuleType:
        for name in ("empty_cache", "ipc_collect"):
            if not hasattr(torch.cpu, name):
                setattr(torch.cpu, name, lambda: None)
        for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
            if not hasattr(torch.cpu, name):
                setattr(torch.cpu, name, lambda *_: 0)
        if not hasattr(torch.cpu, "mem_get_info"):
            torch.cpu.mem_get_info = lambda *_: (0, 1)  # type: ignore[attr-defined]
        return torch.cpu

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def get_device_uuid(self, device_id: Any) -> str:
        return "cpu"

    def apply_model_patches(self, model_type: str) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {}

    def get_collective_module(self) -> Any:
        return None

    def cudart(self) -> Any:
        return None


class _NoMegatron(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "megatron":
            raise ModuleNotFoundError(f"{__name__} hides Megatron; load {__name__}_megatron as well to use it", name=fullname)


if f"{__name__}_megatron" not in os.environ.get("VERL_USE_EXTERNAL_MODULES", "") and "megatron" not in sys.modules:
    sys.meta_path.insert(0, _NoMegatron())


@when_imported("vllm.v1.engine.async_llm")
def _old_pause(module: Any) -> None:
    import inspect

    original = module.AsyncLLM.pause_generation
    if "wait_for_inflight_requests" in inspect.signature(original).parameters:
        return

    async def pause_generation(self: Any, *, wait_for_inflight_requests: bool | None = None, **kwargs: Any) -> None:
        if wait_for_inflight_requests is not None:
            kwargs["mode"] = "wait" if wait_for_inflight_requests else "abort"
        await original(self, **kwargs)

    module.AsyncLLM.pause_generation = pause_generation


@when_imported("torch.distributed.fsdp._init_utils")
def _broadcast_on_cpu(module: Any) -> None:
    module._check_module_states_for_sync_module_states = lambda states: None


@when_imported("verl.workers.rollout.sglang_rollout.async_sglang_server")
def _arguments_of_a_server(module: Any) -> None:
    import inspect

    if not hasattr(module.ServerArgs, "__dataclass_fields__"):
        fields = [SimpleNamespace(name=name) for name in inspect.signature(module.ServerArgs).parameters]
        module.dataclasses = SimpleNamespace(fields=lambda owner: fields)
