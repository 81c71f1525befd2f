"""Stand-ins for the fp8 kernels that vLLM has for CPUs with AMX tiles only, so that quantised weights can be synced anywhere.

They multiply with what the live values and scales stand for: plain torch on the parameters as the checkpoint fills them. vLLM's
own AMX kernels pack the values while loading, which live.py reports and a sync refuses. Slow, and no statement about GPUs.
Written for vLLM 0.32.0, where they take the place of

    kernels.linear._POSSIBLE_FP8_BLOCK_KERNELS[CPU]   one kernel in front of vLLM's own
    experts.cpu_moe.CPUExpertsFp8                     any block instead of 128 by 128, no AMX, no packing, honours expert_map
    experts.cpu_moe.prepare_fp8_moe_layer_for_cpu     leaves the weights as they are
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MARK = "weight_sync_plain"


def apply() -> None:
    """Install the stand-ins in this process; safe to call again. Raises ConfigError when this vLLM lacks a seam."""
    _block_linear()
    _block_experts()


def dequantised(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """values [N, K] times scales [ceil(N / block[0]), ceil(K / block[1])], computed in float32."""
    import torch

    wide = scales.to(torch.float32).repeat_interleave(block[0], -2)[: values.shape[-2]]
    return (values.to(torch.float32) * wide.repeat_interleave(block[1], -1)[:, : values.shape[-1]]).to(dtype)


def _block_linear() -> None:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm import BlockScaledMMLinearKernel as module
    from vllm.platforms import PlatformEnum

    from weight_sync_integrations.vllm.cpu import seam

    kernels = seam(linear, "_POSSIBLE_FP8_BLOCK_KERNELS")[PlatformEnum.CPU]
    if any(getattr(kernel, _MARK, False) for kernel in kernels):
        return
    base: Any = seam(module, "Fp8BlockScaledMMLinearKernel")

    class StandInFp8BlockKernel(base):
        """What the values and scales stand for, times the unquantised activations."""

        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor) -> torch.Tensor:
            block = (int(self.weight_group_shape.row), int(self.weight_group_shape.col))
            return A @ dequantised(B, Bs, block, A.dtype).t()

    setattr(StandInFp8BlockKernel, _MARK, True)
    kernels.insert(0, StandInFp8BlockKernel)


def _block_experts() -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    from weight_sync_integrations.vllm.cpu import seam

    experts = seam(cpu_moe, "CPUExpertsFp8")
    if getattr(experts, _MARK, False):
        return
    for name in ("_supports_current_device", "_supports_quant_scheme", "apply"):
        seam(experts, name)
    seam(cpu_moe, "prepare_fp8_moe_layer_for_cpu")
    experts._supports_current_device = staticmethod(lambda: True)
    experts._supports_quant_scheme = staticmethod(_blocks)
    experts.apply = _apply_experts
    cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)
    setattr(experts, _MARK, True)


def _blocks(weight_key: Any, activation_key: Any) -> bool:
    """Whether weights are fp8 in blocks, of whatever size."""
    import torch

    if weight_key is None or weight_key.dtype != torch.float8_e4m3fn:
        return False
    return weight_key.scale.group_shape.row > 1 and weight_key.scale.group_shape.col > 1


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
    """One expert after the other, as the unquantised stand-in (cpu.py) does it, with what the values and scales stand for."""
    from weight_sync_integrations.vllm.cpu import loop_over_experts

    shape = self.quant_config._w1.shape  # block_shape speaks of the activations, which stay as they are
    block = (int(shape.row), int(shape.col))

    def matrices(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            dequantised(w1[expert], self.w1_scale[expert], block, hidden_states.dtype),
            dequantised(w2[expert], self.w2_scale[expert], block, hidden_states.dtype),
        )

    if self.w1_bias is not None or self.w2_bias is not None:
        raise NotImplementedError("the CPU stand-in for experts knows no expert biases")
    total = loop_over_experts(
        matrices, hidden_states, topk_weights, topk_ids, activation, expert_map, apply_router_weight_on_input
    )
    output.copy_(total)
