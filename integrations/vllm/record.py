"""The second witness for vLLM: what its own load_weights writes where, recorded on the live model of one worker.

vLLM's loaders need no special care here. Parameters keep their weight_loader through post-processing, load_weights is
never compiled, and the wrappers that defer loading (layerwise reload) are put on only inside an update or a reload of
vLLM's own, during which recording is refused by the session. What does need care is which tensors count: attention
registers scale buffers that no checkpoint fills, so coverage is reported for the tensors live.py reports, no others.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from weight_sync.errors import BindError, listed
from weight_sync_integrations.recorder_roles import record_roles
from weight_sync_integrations.vllm import live
from weight_sync_integrations.vllm.tensors import live_tensors


def record(models: list[tuple[str, torch.nn.Module]], payload: dict[str, Any]) -> dict[str, Any]:
    """Record one load of payload["tensors"]: {HF name: [shape, dtype name]}. -> a recorder Recording as a dict.

    models: (role, model) of the target and of the drafts that are synced.
    Raises: BindError when parameters do not stay as loaded (the loaders then expect tensors that are gone).
    """
    stuck = {f"{role} {name}": why for role, model in models for name, why in live.inspect(model).not_writable.items()}
    if stuck:
        raise BindError("cannot record loading: " + listed(f"{name}: {why}" for name, why in stuck.items()))
    tensors = {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in payload["tensors"].items()}
    recording = record_roles(models, tensors, lambda model: model.load_weights)
    names = live_tensors(models, all_of_them=True)
    recording.uncovered = {name: count for name, count in recording.uncovered.items() if name in names}
    return asdict(recording)
