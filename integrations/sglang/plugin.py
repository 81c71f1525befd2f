"""Entry point of group `sglang.srt.plugins`: SGLang calls activate() in each of its processes before it builds anything.

With WEIGHT_SYNC_TOKEN in the environment the scheduler processes (one for each GPU) get our worker endpoint, see worker.py.
Without it two hooks look, once each, whether the server was started with MARKER (settings.py): when weights are loaded, which
is then observed (live.py), and at the end of Scheduler.__init__. If it was not, nothing happens: a machine that merely has
weight_sync installed runs an untouched SGLang.

SGLang logs and ignores a plugin that fails; then no worker announces itself, and launch.start() says so with the log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

TOKEN_VARIABLE = "WEIGHT_SYNC_TOKEN"

MARKER = "weight_sync_integrations.sglang.entry.activate"
"""What `--custom-weight-loader` of a server has to name that takes part without having the variables."""

_SCHEDULER = "sglang.srt.managers.scheduler"


def activate() -> None:
    """Register the hooks. Only where the scheduler is already imported: elsewhere resolving them would import it."""
    if _SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _load_model, HookType.AROUND)
    if os.environ.get(TOKEN_VARIABLE):
        HookRegistry.register(f"{_SCHEDULER}.Scheduler.__init__", _after_init, HookType.AFTER)
        HookRegistry.register(f"{_SCHEDULER}.Scheduler.process_input_requests", _after_requests, HookType.AFTER)
    else:
        HookRegistry.register(f"{_SCHEDULER}.Scheduler.__init__", _if_marked, HookType.AFTER)
        if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
            return
    # Two places of SGLang (0.5.23) assume a GPU; both hooks look at the tensors and leave GPU ones to SGLang.
    for module, name, hook in (
        ("sglang.srt.model_executor.model_runner_components.remote_instance_weight_transporter",
         "register_memory_region", _register_memory_region),
        ("sglang.srt.utils.weight_checker_comparator", "RawComparable.iter_chunks", _iter_chunks),
    ):  # fmt: skip
        if find_spec(module) is not None:
            HookRegistry.register(f"{module}.{name}", hook, HookType.AROUND)


def _load_model(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    if not os.environ.get(TOKEN_VARIABLE) and not _marked(runner.server_args):
        return original(runner, *args, **kwargs)
    from weight_sync_integrations.sglang import live

    with live.watched():
        return original(runner, *args, **kwargs)


def _marked(server_args: Any) -> bool:
    return MARKER in (getattr(server_args, "custom_weight_loader", None) or ())


def _if_marked(result: None, scheduler: Any, *args: object, **kwargs: object) -> None:
    if _marked(scheduler.server_args):
        from weight_sync_integrations.sglang.entry import attach

        attach(scheduler)


def _after_init(result: None, scheduler: Any, *args: object, **kwargs: object) -> None:
    from weight_sync_integrations.sglang.worker import Worker

    scheduler.weight_sync_worker = Worker(scheduler)
    scheduler.weight_sync_worker.start()


def _after_requests(result: None, scheduler: Any, *args: object, **kwargs: object) -> None:
    scheduler.weight_sync_worker.serve()


def _register_memory_region(original: Callable[..., Any], model: Any, transfer_engine: Any) -> Any:
    """SGLang's second version reads the CUDA allocator; its first registers tensor by tensor and works on a CPU."""
    if next(model.parameters()).is_cuda:
        return original(model, transfer_engine)
    from sglang.srt.model_loader.remote_instance_weight_loader_utils import register_memory_region_v1

    return register_memory_region_v1(model, transfer_engine)


def _iter_chunks(original: Callable[..., Any], comparable: Any) -> Any:
    """SGLang's weight checker moves what it compares to the GPU; a CPU tensor is its own single chunk."""
    if comparable.tensor.is_cuda:
        return original(comparable)
    return iter([(comparable.tensor.reshape(-1), None)])
