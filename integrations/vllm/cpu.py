"""Stand-ins that let a vLLM engine on a CPU keep its weights where a one-sided write can reach them.

Stock CPU kernels pack every weight into a private layout while loading and leave an empty or rearranged parameter
behind. That is right for serving and useless for exercising weight transfer. So, on CPU and only when a weight_sync job
started the engine, plain torch takes over: F.linear on the live parameter, and a loop over experts on the live stacked
tensors. These are stand-ins for CPU kernels, slow, and no statement about GPUs: on a GPU nothing here is used, vLLM
runs as it is, and live.py says which of its parameters are still as loaded.

What is replaced, all found in vLLM 0.32.0; a name that is gone raises ConfigError instead of serving packed weights:

    layers.utils.dispatch_cpu_unquantized_gemm      keep layer.weight, multiply with it
    experts.cpu_moe.CPUUnquantizedExperts           no prepacking; plain experts that honour expert_map (the stock CPU
                                                    kernel ignores it, so expert parallelism computed other experts)
    v1.worker.cpu_model_runner.CPUModelRunner       later pipeline stages get the receive buffers that only a warm-up
                                                    run makes, which CPU skips in eager mode
    device_communicators.cpu_communicator           shared-memory files lose their names once every rank has mapped
                                                    them (stock vLLM leaves 4 MiB of /dev/shm behind for each rank); and
                                                    gloo instead of them when WEIGHT_SYNC_VLLM_GLOO=1
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weight_sync.errors import ConfigError

if TYPE_CHECKING:
    import torch

GLOO_VARIABLE = "WEIGHT_SYNC_VLLM_GLOO"
"""Set to 1: tensor- and pipeline-parallel groups of a CPU engine use gloo, not vLLM's shared-memory kernels."""

STOCK_VARIABLE = "WEIGHT_SYNC_VLLM_STOCK"
"""Set to 1: vLLM's own CPU kernels, which pack weights; a sync then goes through vLLM's own loader (weight_sync.landing)."""

_MARK = "weight_sync_plain"


def apply() -> None:
    """Install the stand-ins in this process. Safe to call again. Raises ConfigError when this vLLM lacks a seam."""
    from weight_sync_integrations.vllm import cpu_fp8

    if os.environ.get(STOCK_VARIABLE) != "1":
        _plain_linear()
        _plain_experts()
        cpu_fp8.apply()
    _stage_buffers()
    _unlink_shared_memory()
    if os.environ.get(GLOO_VARIABLE) == "1":
        _gloo()


def seam(owner: Any, name: str) -> Any:
    """The attribute `name` of a vLLM module or class; ConfigError when it moved."""
    found = getattr(owner, name, None)
    if found is None:
        import vllm

        where = getattr(owner, "__qualname__", None) or owner.__name__
        raise ConfigError(
            f"vLLM {vllm.__version__} has no {name} in {where}, which the CPU stand-ins replace; "
            "they were written for 0.32.0. Without them a CPU engine packs its weights away and cannot be written to"
        )
    return found


def _plain_linear() -> None:
    import torch.nn.functional as functional
    from vllm.model_executor.layers import utils

    if getattr(seam(utils, "dispatch_cpu_unquantized_gemm"), _MARK, False):
        return

    def keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = functional.linear

    setattr(keep_weight, _MARK, True)
    # Both users import the function at the call, so replacing the module's attribute reaches them.
    utils.dispatch_cpu_unquantized_gemm = keep_weight


def _plain_experts() -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts = seam(cpu_moe, "CPUUnquantizedExperts")
    if getattr(experts, _MARK, False):
        return
    seam(experts, "process_weights_after_loading")
    seam(experts, "apply")

    def keep_experts(self: Any, layer: torch.nn.Module) -> None:
        self._use_zentorch = False

    experts.process_weights_after_loading = keep_experts
    experts.apply = _apply_experts
    setattr(experts, _MARK, True)


def _apply_experts(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    a1q_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None,
    workspace13: torch.Tensor,
    workspace2: torch.Tensor,
    expert_tokens_meta: Any,
    apply_router_weight_on_input: bool,
) -> None:
    """One expert after the other. w1: [local experts, gate rows then up rows, hidden]; w2: [local experts, hidden, I]."""
    if self.w1_bias is not None or self.w2_bias is not None:
        raise NotImplementedError("the CPU stand-in for experts knows no expert biases")
    output.copy_(
        loop_over_experts(
            lambda expert: (w1[expert], w2[expert]),
            hidden_states,
            topk_weights,
            topk_ids,
            activation,
            expert_map,
            apply_router_weight_on_input,
        )
    )


def loop_over_experts(
    matrices: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    expert_map: torch.Tensor | None,
    apply_router_weight_on_input: bool,
) -> torch.Tensor:
    """What this rank's experts make of the tokens, float32. matrices: local expert -> (gate rows then up rows, down).

    Sums in float32, so the result does not depend on the order of experts by more than the last rounding.
    """
    import torch

    if activation.value != "silu":
        raise NotImplementedError(f"the CPU stand-in for experts knows silu only, this model uses {activation.value}")
    local = topk_ids.long() if expert_map is None else expert_map.long()[topk_ids.long()]
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in local.unique().tolist():
        if expert < 0:  # held by another rank, which adds its share in the all-reduce
            continue
        w1, w2 = matrices(expert)
        token, choice = (local == expert).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(hidden_states[token], w1).chunk(2, dim=-1)
        result = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2).float()
        if not apply_router_weight_on_input:
            result = result * topk_weights[token, choice].unsqueeze(-1).float()
        total.index_add_(0, token, result)
    return total


def _stage_buffers() -> None:
    from vllm.distributed import get_pp_group
    from vllm.v1.worker import cpu_model_runner

    runner = seam(cpu_model_runner, "CPUModelRunner")
    load_model = seam(runner, "load_model")
    if getattr(load_model, _MARK, False):
        return

    def load_model_with_buffers(self: Any, *args: Any, **kwargs: Any) -> None:
        load_model(self, *args, **kwargs)
        if self.intermediate_tensors is None and not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    setattr(load_model_with_buffers, _MARK, True)
    runner.load_model = load_model_with_buffers


def _unlink_shared_memory() -> None:
    from vllm.distributed.device_communicators import cpu_communicator

    shared = seam(cpu_communicator, "_CPUSHMDistributed")
    initialise = seam(shared, "_init_cpu_shm")
    if getattr(initialise, _MARK, False):
        return

    def initialise_and_unlink(self: Any) -> int:
        handle = initialise(self)  # ends with a barrier after every rank has mapped every file
        Path("/dev/shm", f"{self.group_name}_{self.communicator.rank_in_group}").unlink(missing_ok=True)
        return handle

    setattr(initialise_and_unlink, _MARK, True)
    shared._init_cpu_shm = initialise_and_unlink


def _gloo() -> None:
    from vllm.distributed.device_communicators import cpu_communicator

    communicator = seam(cpu_communicator, "CpuCommunicator")
    seam(communicator, "_all_group_ranks_share_shm_group_name")
    communicator._all_group_ranks_share_shm_group_name = lambda self: False
