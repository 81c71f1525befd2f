"""Pure-torch stand-ins for the Transformer Engine leaf modules of Megatron-Core. They are NOT Transformer Engine.

They carry TE's class names (Megatron-Bridge finds out by class name how a weight is cut), parameter names, shapes and
tensor-parallel attributes, so that the production ("transformer_engine") layer specs build on a CPU and every
parameter has the name, shape and cut it has on a GPU. Their arithmetic is plain torch: values after a training step
are those of a correct model, not bit for bit those of TE's kernels. Only cpu.install() uses this module.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models import backends
from megatron.core.models.gpt import experimental_attention_variant_module_specs, gpt_layer_specs, moe_module_specs
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import (
    mla_qk_norm_config,
    multi_latent_attention,
    multi_token_prediction,
    transformer_block,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.experimental_attention_variant import absorbed_mla
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP, TEGroupedMLP


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dim, computed in float32 as TE does, returned in x's dtype."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


class RMSNorm(torch.nn.Module):
    """weight: [hidden]. With zero-centred gamma the stored weight is gamma - 1, as in TE."""

    def __init__(self, hidden_size: int, eps: float, *, sequence_parallel: bool, zero_centered: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size) if zero_centered else torch.ones(hidden_size))
        self.weight.sequence_parallel = sequence_parallel
        self.eps = eps
        self.zero_centered = zero_centered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _rms_norm(x, self.weight + 1 if self.zero_centered else self.weight, self.eps)


class LayerNorm(torch.nn.LayerNorm):
    """torch's own, under the class name that the bridge knows as replicated."""


class TENorm:
    """Chooses the norm that the config asks for, as TE's wrapper of that name does."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: object) -> torch.nn.Module:
        if config.normalization == "LayerNorm":
            return LayerNorm(hidden_size, eps=eps)
        return RMSNorm(
            hidden_size,
            eps,
            sequence_parallel=config.sequence_parallel,
            zero_centered=config.layernorm_zero_centered_gamma,
        )


class TELinear(torch.nn.Module):
    """weight: [output_size, input_size], the same on every TP rank (parallel_mode "duplicated" or None)."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: Any,
        init_method: Any,
        bias: bool = False,
        **unused: object,
    ) -> None:
        super().__init__()
        self.config = config
        self.parallel_mode = parallel_mode
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel
        self.bias = torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype)) if bias else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight, self.bias), None


class TEColumnParallelLinear(ColumnParallelLinear):
    """weight: [output_size / tp, input_size]."""


class TERowParallelLinear(RowParallelLinear):
    """weight: [output_size, input_size / tp]."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **{"input_is_parallel": True, **kwargs})


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """weight: [output_size / tp, input_size]; layer_norm_weight: [input_size], replicated."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.zero_centered = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.zero_centered else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(start(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        weight = self.layer_norm_weight + 1 if self.zero_centered else self.layer_norm_weight
        return super().forward(_rms_norm(x, weight, self.eps), *args, **kwargs)


class _GroupedLinear(torch.nn.Module):
    """weight{i}: local expert i, [output_size / etp, input_size] (column) or [output_size, input_size / etp] (row)."""

    split_dim: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        pg_collection: Any,
        bias: bool = False,
        **unused: object,
    ) -> None:
        super().__init__()
        if bias:
            raise NotImplementedError("the CPU stand-in of TE's grouped linear has no bias; the model asks for one")
        self.config = config
        self.num_gemms = num_gemms
        etp = pg_collection.expt_tp.size()
        shape = [output_size, input_size]
        shape[self.split_dim] //= etp
        # As in mcore's wrapper: expert gradients are reduced over the expert data-parallel group exactly when that
        # group differs from the dense one.
        own_group = config.expert_model_parallel_size > 1 or (
            config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        for index in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            init_method(weight)
            set_tensor_model_parallel_attributes(weight, etp > 1, self.split_dim, 1)
            weight.allreduce = not own_group
            self.register_parameter(f"weight{index}", weight)

    def forward(self, x: torch.Tensor, tokens_per_expert: Any) -> tuple[torch.Tensor, None]:
        counts = tokens_per_expert.tolist() if torch.is_tensor(tokens_per_expert) else list(tokens_per_expert)
        parts = torch.split(x, counts)
        return torch.cat([F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)]), None


class TEColumnParallelGroupedLinear(_GroupedLinear):
    split_dim = 0


class TERowParallelGroupedLinear(_GroupedLinear):
    split_dim = 1


class TEDotProductAttention(DotProductAttention):
    """mcore's own attention; MLA passes separate key and value widths.

    Context parallelism is Transformer Engine's own to compute, and changes no weight: such a model can be built here, not run.
    """

    def __init__(
        self,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        **kwargs: Any,
    ) -> None:
        cut = config.context_parallel_size > 1
        if cut:
            config = copy.copy(config)
            config.context_parallel_size = 1
        super().__init__(config, *args, **kwargs)
        self._cut = cut
        if v_channels:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._cut:
            raise RuntimeError("context-parallel attention needs Transformer Engine: without it this model has weights only")
        return super().forward(*args, **kwargs)


class CpuSpecProvider(backends.LocalSpecProvider):
    """Answers the spec builders' questions as the production provider does, with the stand-ins above."""

    def linear(self) -> type:
        return TELinear

    def column_parallel_linear(self) -> type:
        return TEColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return TERowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return TELayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return TENorm

    def core_attention(self) -> type:
        return TEDotProductAttention

    def activation_func(self) -> None:
        return None

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        if moe_use_grouped_gemm:
            grouped = GroupedMLPSubmodules(
                linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear, activation_func=None
            )
            return partial(TEGroupedMLP, submodules=grouped)
        single = MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear, activation_func=None)
        return partial(SequentialMLP, submodules=single)


def install() -> None:
    """Put the stand-ins where the production spec builders look TE's classes up."""
    for module in (
        gpt_layer_specs,
        moe_module_specs,
        experimental_attention_variant_module_specs,
        multi_token_prediction,
    ):
        module.TESpecProvider = CpuSpecProvider
    for module in (gpt_layer_specs, multi_token_prediction, experimental_attention_variant_module_specs):
        module.HAVE_TE = True
    # MLA compares the submodule it was given with these names to know how it is cut.
    for module in (multi_latent_attention, absorbed_mla):
        module.TELinear = TELinear
        module.TEColumnParallelLinear = TEColumnParallelLinear
    multi_latent_attention.TELayerNormColumnParallelLinear = TELayerNormColumnParallelLinear
    choose = mla_qk_norm_config.get_backend
    mla_qk_norm_config.get_backend = lambda name: CpuSpecProvider() if name == "transformer_engine" else choose(name)
    gpt_layer_specs.TENorm = TENorm
    transformer_block.LayerNormImpl = TENorm
