"""Any rank of a vLLM engine's model, built in this process without workers or torch.distributed.

Like the SGLang replica: vLLM's own model class, constructed as one rank of given sizes. It is never run; what its
load_weights does is recorded. Written against vLLM 0.32.0, whose parallel groups are module globals: one at a time.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch


@dataclass(frozen=True, eq=False)
class VllmRank:
    """The model of one rank of an engine. Its loader must be called inside scope(), one rank at a time."""

    model: torch.nn.Module
    config: Any
    groups: dict[str, Any]

    @contextmanager
    def scope(self) -> Iterator[None]:
        with _as_rank(self.config, self.groups):
            yield

    def postprocess(self) -> None:
        """What vLLM's model loader does once load_weights has returned; nothing for an unquantised model on plain kernels.

        To be called inside scope(). Kernels that a CPU lacks are stand-ins (weight_sync_integrations.vllm.cpu_fp8).
        """
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        if self.config.quant_config is not None:
            process_weights_after_loading(self.model, self.config.model_config, torch.device("cpu"))


def build_rank(checkpoint: Path, tp: int, pp: int, ep: bool, rank: int) -> VllmRank:
    """Rank `rank` (tp fastest) of an engine of tp x pp workers. ep: experts are owned by the tp ranks."""
    from vllm.distributed import parallel_state as state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import utils as model_utils
    from vllm.platforms.cpu import CpuPlatform

    stage, local = divmod(rank, tp)
    config = EngineArgs(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        enable_expert_parallel=ep,
        kv_cache_memory_bytes=32 << 20,
        distributed_executor_backend="mp",
        compilation_config={"custom_ops": ["-rotary_embedding"]},
    ).create_engine_config()
    config.parallel_config.rank = rank
    groups = {
        "_WORLD": group(rank, tp * pp),
        "_TP": group(local, tp),
        "_PP": group(stage, pp),
        "_EP": group(local, tp),
        **{name: group(0, 1) for name in ("_DP", "_DCP", "_PCP", "_ETP") if hasattr(state, name)},
    }
    model_utils._model_to_pp_missing_layer_names.clear()  # by id(model), which a new model may have from an old one
    with _as_rank(config, groups), patch.object(CpuPlatform, "get_attn_backend_cls", classmethod(_dense)):
        return VllmRank(initialize_model(config), config, groups)


@contextmanager
def vllm_rank(checkpoint: Path, tp: int, pp: int, ep: bool, rank: int) -> Iterator[torch.nn.Module]:
    """build_rank(), its model inside its scope."""
    built = build_rank(checkpoint, tp, pp, ep, rank)
    with built.scope():
        yield built.model


@contextmanager
def _as_rank(config: Any, groups: dict[str, Any]) -> Iterator[None]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state as state
    from vllm.utils.torch_utils import set_default_torch_dtype

    saved = {name: getattr(state, name) for name in groups}
    try:
        for name, value in groups.items():
            setattr(state, name, value)
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            yield
    finally:
        for name, value in saved.items():
            setattr(state, name, value)


def _dense(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
    """Attention that is never run: a CPU has no sparse one, and the model's parameters do not depend on it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return (AttentionBackendEnum.CPU_MLA if attn_selector_config.use_mla else AttentionBackendEnum.CPU_ATTN).get_path()


def group(rank: int, size: int) -> Any:
    """What model constructors read of a process group. It cannot communicate."""
    handle = types.SimpleNamespace(size=lambda: size, rank=lambda: rank)
    return types.SimpleNamespace(
        rank=rank,
        rank_in_group=rank,
        local_rank=rank,
        world_size=size,
        ranks=list(range(size)),
        first_rank=0,
        last_rank=size - 1,
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        device_group=handle,
        cpu_group=handle,
        device_communicator=None,
        unique_name="replica",
    )
