"""Megatron-Core as the trainer side of a sync: live model chunks in, plain descriptions out. Nothing is gathered.

Works on any mcore trainer: give it the model chunks of the rank (wrapped in DDP, Float16Module, or not) and the
optimiser. mcore's parallel state must be initialised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from weight_sync.errors import BindError, listed
from weight_sync.layout.parallel import TRAINER_ORDERS, TrainerDims
from weight_sync.session.contracts import RankDescription
from weight_sync_integrations.live import StepGuard, rank_description, settle

if TYPE_CHECKING:
    import torch

_ADAPTER = re.compile(r"(^|\.)(adapter|adapters|to_wrap|lora_[A-Za-z]+)(\.|$)")


class MegatronSource:
    """TrainerSource over one rank's model chunks.

    Names are mcore's own, as on this rank: `decoder.layers.N...` where N restarts at 0 on every pipeline stage. With
    more than one chunk (virtual pipeline) each name is prefixed by `vp{chunk}.`, and N restarts in every chunk.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, *, rank_order: str = TRAINER_ORDERS[0]) -> None:
        """
        Args:
            chunks: as mcore's forward-backward function takes them, one for each virtual pipeline stage of this rank.
            optimizer: mcore's or torch's. Its steps are refused during a sync. None: the caller keeps that promise.
            rank_order: the `order` that parallel state was initialised with; checked against this rank's coordinates.

        Raises: BindError for a model whose parameters are not plain resident tensors: fp8 or other quantised primary
            weights, LoRA adapters, offloaded parameters, Megatron-FSDP, sharded (remat) weights.
        """
        import torch

        self._chunks = list(chunks)
        self._rank = torch.distributed.get_rank()
        self._rank_order = rank_order
        self._guard = StepGuard(optimizer, rank=self._rank)
        self._refuse_unsupported()
        self._check_rank_order()
        self.describe()

    @property
    def rank_order(self) -> str:
        """The axes from fastest to slowest: "tp-cp-ep-dp-pp" unless the trainer chose another."""
        return self._rank_order

    def parallel_sizes(self) -> dict[str, int]:
        """Size of every axis: tp, cp, dp, pp, vpp, ep, etp, edp. vpp is 1 without a virtual pipeline."""
        from megatron.core import parallel_state as state

        return {
            "tp": state.get_tensor_model_parallel_world_size(),
            "cp": state.get_context_parallel_world_size(),
            "dp": state.get_data_parallel_world_size(),
            "pp": state.get_pipeline_model_parallel_world_size(),
            "vpp": len(self._chunks),
            "ep": state.get_expert_model_parallel_world_size(),
            "etp": state.get_expert_tensor_parallel_world_size(),
            "edp": state.get_expert_data_parallel_world_size(),
        }

    def coords(self) -> dict[str, int]:
        """This rank's index on tp, cp, dp, pp, ep, etp, edp."""
        from megatron.core import parallel_state as state

        return {
            "tp": state.get_tensor_model_parallel_rank(),
            "cp": state.get_context_parallel_rank(),
            "dp": state.get_data_parallel_rank(),
            "pp": state.get_pipeline_model_parallel_rank(),
            "ep": state.get_expert_model_parallel_rank(),
            "etp": state.get_expert_tensor_parallel_rank(),
            "edp": state.get_expert_data_parallel_rank(),
        }

    def layers(self) -> list[tuple[int, int]]:
        """For each chunk, its first decoder layer (counted from 0 over the whole model) and how many it holds."""
        found = []
        for chunk in self._unwrapped():
            numbers = [layer.layer_number for layer in chunk.decoder.layers]  # mcore counts from 1, over all stages
            found.append((numbers[0] - 1, len(numbers)) if numbers else (0, 0))
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter and every persistent floating-point buffer (a router's expert_bias) by name, without copying."""
        return dict(self._named())

    def describe(self) -> RankDescription:
        """See TrainerSource. Raises BindError where a parameter cannot be read in place (see describe_tensors)."""
        return rank_description(self.tensors(), rank=self._rank, coords=self.coords())

    def quiesce(self) -> None:
        """Finish the step: gather parameters whose all-gather was to overlap with the next forward, wait for the
        device, and refuse further steps. A collective over the data-parallel ranks; every rank calls it.

        Raises: SessionError if a sync is running already.
        """
        import torch

        self._guard.close()
        try:
            with torch.no_grad():
                for chunk in self._chunks:
                    if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
                        chunk.start_param_sync(force_sync=True)
            settle()
        except BaseException:
            self._guard.open()
            raise

    def release(self) -> None:
        """Steps are allowed again. Raises SessionError if no sync is running."""
        self._guard.open()

    def _unwrapped(self) -> list[Any]:
        from megatron.core.utils import unwrap_model

        return list(unwrap_model(self._chunks))

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        chunks = self._unwrapped()
        for index, chunk in enumerate(chunks):
            prefix = f"vp{index}." if len(chunks) > 1 else ""
            for name, param in chunk.named_parameters():
                yield prefix + name, param.detach()
            for module_name, module in chunk.named_modules():
                for name, buffer in module.named_buffers(recurse=False):
                    if name not in module._non_persistent_buffers_set and buffer.is_floating_point():
                        yield f"{prefix}{module_name}.{name}".replace("..", "."), buffer.detach()

    def _refuse_unsupported(self) -> None:
        from megatron.core import parallel_state as state

        adapters = [name for name, _ in self._named() if _ADAPTER.search(name)]
        if adapters:
            raise BindError(
                f"trainer rank {self._rank}: the model has LoRA adapters ({listed(adapters, 3)}); their weights are not "
                "those of the served model. Merge them before a sync"
            )
        for chunk in self._chunks:
            kind = type(chunk).__name__
            if "FullyShardedDataParallel" in kind or "FSDP" in kind:
                raise BindError(
                    f"trainer rank {self._rank}: model chunks are wrapped in {kind}; Megatron-FSDP shards parameters "
                    "and is not supported. Use mcore's DistributedDataParallel, or the FSDP2 trainer"
                )
            if getattr(getattr(chunk, "ddp_config", None), "reuse_grad_buf_for_mxfp8_param_ag", False):
                raise BindError(
                    f"trainer rank {self._rank}: reuse_grad_buf_for_mxfp8_param_ag keeps fp8 primary weights, whose "
                    "bytes are not those of the checkpoint; train with bf16 primary weights (fp8_param off)"
                )
        for name in ("get_gtp_weight_remat_world_size", "get_expert_gtp_weight_remat_world_size"):
            size = getattr(state, name, lambda: 1)()
            if size > 1:
                raise BindError(f"trainer rank {self._rank}: weights are cut over {size} ranks by remat ({name[4:-11]})")

    def _check_rank_order(self) -> None:
        """The planner computes every rank's coordinates from sizes and order; they must be the real ones here."""
        import torch

        sizes = self.parallel_sizes()
        dims = TrainerDims(
            ranks=torch.distributed.get_world_size(),
            order=self._rank_order,
            **{axis: sizes[axis] for axis in ("tp", "pp", "vpp", "ep", "etp", "cp")},
        )
        expected, found = dict(dims.coords(self._rank)), self.coords()
        if found != expected:
            raise BindError(
                f"trainer rank {self._rank}: order {self._rank_order!r} puts it at {expected}, but mcore says {found}; "
                "pass the order that initialize_model_parallel was given"
            )
