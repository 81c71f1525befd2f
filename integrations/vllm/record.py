"""The second witness for vLLM: what its own load_weights writes where, recorded on the live model of one worker.

load_weights is never compiled, and the wrappers that defer loading (layerwise reload) are put on only inside an update or a
reload of vLLM's own, during which recording is refused by the session. Two things need care. Which tensors count: attention
registers scale buffers that no checkpoint fills, so coverage is reported for the tensors live.py reports, no others. And
parameters of quantised layers: post-processing replaces them by plain ones, which vLLM's loaders cannot fill any more (see
loadable()).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch

from weight_sync.errors import BindError, listed
from weight_sync_integrations.recorder_roles import record_roles
from weight_sync_integrations.vllm import live
from weight_sync_integrations.vllm.loader import published, rehearse
from weight_sync_integrations.vllm.tensors import live_tensors


@contextmanager
def loadable(model: torch.nn.Module) -> Iterator[None]:
    """Inside, parameters are again of the kind that vLLM's loaders can fill, in the same memory.

    vLLM keeps what they were for its own reload (model_loader.reload of 0.32.0). For models whose parameters stay as loaded.
    """
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    swapped: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    try:
        for layer in model.modules():
            for name, before in get_layerwise_info(layer).restore_metadata[0].items():
                now = layer._parameters.get(name)
                if now is None or type(now) is type(before):
                    continue
                fillable: Any = now.data
                fillable.__class__, fillable.__dict__ = before.__class__, dict(before.__dict__)
                fillable = restore_layer_refs(fillable, layer)
                if hasattr(fillable, "weight_loader"):  # after a reload it is still wrapped, to put loading off
                    fillable.weight_loader = _get_original_loader(fillable)
                swapped.append((layer, name, now))
                layer._parameters[name] = fillable
        yield
    finally:
        for layer, name, now in swapped:
            layer._parameters[name] = now


def record(models: list[tuple[str, torch.nn.Module]], payload: dict[str, Any], config: Any) -> dict[str, Any]:
    """Record one load of payload["tensors"]: {HF name: [shape, dtype name]}. -> a recorder Recording as a dict.

    models: (role, model) of the target and of the drafts that are synced. config: vLLM's whole config.
    Where parameters do not stay as loaded, those that vLLM keeps for its own reload are recorded (loader.py).
    Raises: BindError where that is not possible (the loaders then expect tensors that are gone).
    """
    stuck = {f"{role} {name}": why for role, model in models for name, why in live.inspect(model).not_writable.items()}
    tensors = {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in payload["tensors"].items()}
    if stuck:
        reason = "it runs a draft model" if len(models) > 1 else live.no_loader(models[0][1])
        if reason:
            lines = listed(f"{name}: {why}" for name, why in stuck.items())
            raise BindError(f"cannot record loading ({reason}): {lines}")
        return asdict(rehearse(models[0][1], tensors, published(config)))
    with ExitStack() as stack:
        for _, model in models:
            stack.enter_context(loadable(model))
        recording = record_roles(models, tensors, lambda model: model.load_weights)
    names = live_tensors(models, all_of_them=True)
    recording.uncovered = {name: count for name, count in recording.uncovered.items() if name in names}
    return asdict(recording)
