"""Our weight-transfer engine inside a vLLM worker: the side of vLLM's weight-update protocol that one-sided writes need.

vLLM's protocol (worker: start_weight_update -> update_weights* -> finish_weight_update) lets each engine own what start
and finish do. Engines that stream checkpoint tensors start a layerwise reload there: live parameters go to the meta
device and come back rebuilt. A one-sided write must find the parameters where they are, so here start and finish leave
the model alone, and there is nothing to receive. What the protocol gives us is the worker's own record that an update
is active, its refusal of a second one, and the LoRA reset after it.

The object also owns the process's TargetAgent, so that vLLM's shutdown closes the transport with it.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weight_sync_integrations.inventory import Inventory
from weight_sync_integrations.vllm.tensors import live_tensors, models_of


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to exchange: peers are described through the worker extension."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """No update message exists: bytes arrive one-sided."""


class WeightSyncTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Registered as "weight_sync" by plugin.py; made by the worker once its model is loaded."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._agent: Any = None
        # Set by the worker extension: the open session, whether bytes may have changed since the last commit, why the
        # last session was aborted, and the receipt of the last commit.
        self.session = ""
        self.suspect = False
        self.aborted = ""
        self.committed: dict[str, Any] | None = None
        # Of the last bind: the parameters that its plan writes, and every other tensor with its proof.
        self.planned: frozenset[str] | None = None
        self.inventory: Inventory | None = None
        # vLLM's own loader, where a plan brings HF tensors for it.
        self.loader: Any = None

    def agent(self, worker: Any) -> Any:
        """This worker's TargetAgent, made at the first call. worker: vLLM's worker, which owns this engine."""
        if self._agent is None:
            from weight_sync.session.target import TargetAgent
            from weight_sync_integrations.vllm.transport import open_transport

            self._agent = TargetAgent(
                rank=worker.rank,
                host=socket.gethostname(),
                coords=coords(self.model, self.vllm_config),
                tensors=lambda: live_tensors(models_of(worker), self.planned),
                transport=open_transport,
                loader=lambda: self.own_loader(worker),
            )
        return self._agent

    def own_loader(self, worker: Any) -> Any:
        """vLLM's own loader for a new binding; see loader.py."""
        from weight_sync_integrations.vllm.loader import VllmLoader

        self.loader = VllmLoader(worker.model_runner.get_model(), worker.vllm_config, f"rollout rank {worker.rank}")
        return self.loader

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        return

    def start_weight_update(self) -> None:
        # Runs on every rank inside one collective call: raising here would leave the other ranks' replies unread and
        # shift every later reply. What may go wrong is checked before, through the worker extension.
        return

    def finish_weight_update(self) -> None:
        return

    def receive_weights(self, update_info: UpdateInfo) -> None:
        raise NotImplementedError("weight_sync writes one-sided into live parameters; /update_weights carries nothing")

    def shutdown(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.call("abort", {"reason": "vLLM shut its weight-transfer engine down"})  # closes the transport


def coords(model: torch.nn.Module, vllm_config: Any) -> dict[str, int]:
    """This worker's index on every engine axis. dp is the index of its data-parallel replica."""
    from vllm.distributed import get_pp_group, get_tp_group

    tensor = get_tp_group().rank_in_group
    experts = _experts(model)
    return {
        "tp": tensor,
        "pp": get_pp_group().rank_in_group,
        "dp": vllm_config.parallel_config.data_parallel_index,
        "attn_dp": 0,
        "attn_tp": tensor,
        "moe_ep": experts.ep_rank if experts is not None else 0,
        "moe_tp": experts.tp_rank if experts is not None else tensor,
    }


def sizes(model: torch.nn.Module, vllm_config: Any) -> dict[str, int]:
    """Size of every engine axis."""
    parallel = vllm_config.parallel_config
    experts = _experts(model)
    return {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dp": parallel.data_parallel_size,
        "attn_dp": 1,
        "attn_tp": parallel.tensor_parallel_size,
        "moe_ep": experts.ep_size if experts is not None else 1,
        "moe_tp": experts.tp_size if experts is not None else parallel.tensor_parallel_size,
    }


def _experts(model: torch.nn.Module) -> Any:
    """How this process's expert layers are cut (vLLM's FusedMoEParallelConfig), None without expert layers.

    Read from a built layer, because it folds dp, tp and expert parallelism into one flattened rank.
    """
    for module in model.modules():
        config = getattr(module, "moe_config", None)
        if config is not None and hasattr(config, "moe_parallel_config"):
            return config.moe_parallel_config
    return None
