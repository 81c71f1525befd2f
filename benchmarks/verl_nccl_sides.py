"""The trainer's side of verl_nccl.py, and what its driver calls in both sides' processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine_workers import ActorRolloutRefWorker

from benchmarks.verl_nccl_server import stand_in
from benchmarks.verl_nccl_weights import machine, synchronize, values


class Engine(FSDPEngine):
    """verl's FSDP2 engine around a transformers model whose weights are put in place: get_per_tensor_param() is verl's.

    FSDPEngine.__init__ is not run: it reads a checkpoint and makes an optimiser, three times the weights in float32.
    """

    def __init__(self, config: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        device = get_device_name()
        mesh = init_device_mesh(device, (1,), mesh_dim_names=("fsdp",))
        with torch.device("meta"):
            self.module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for layer in self.module.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.module.to_empty(device=device)
        self.model_config = SimpleNamespace(hf_config=config, lora={})
        self.optimizer = None
        self._uses_fsdp2_cpu_offload_policy = self._is_offload_param = self._qat_enabled = False

    @torch.no_grad()
    def change(self, version: int) -> None:
        """Other weights, in place, as an optimiser step leaves them."""
        for name, parameter in self.module.named_parameters():
            local = parameter.detach().to_local()
            for tensor, part in _hf_parts(name, local):
                part.view(torch.int16).copy_(values(tensor, part.numel(), version, str(part.device)).view(part.shape))
        synchronize()


def _hf_parts(name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """HF tensors in a parameter of transformers 5, which stacks a layer's experts and joins gate and up."""
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith(".mlp.experts"):
        yield name, parameter
        return
    for expert, whole in enumerate(parameter):
        parts = {"gate_proj": whole.chunk(2)[0], "up_proj": whole.chunk(2)[1]} if kind == "gate_up_proj" else {kind: whole}
        for part, tensor in parts.items():
            yield f"{prefix}.{expert}.{part}.weight", tensor


class Trainer(ActorRolloutRefWorker):
    """verl's actor worker: its update_weights and execute_checkpoint_engine, with our patch of them, and an Engine in it."""

    def __init__(self, config: Any, cpu: bool) -> None:
        from verl.single_controller.base import Worker
        from verl.utils.config import omega_conf_to_dataclass

        Worker.__init__(self)
        initialize_global_process_group_ray(timeout_second=None, backend="cpu:gloo" if cpu else None)
        self.config = config
        self._conf = omega_conf_to_dataclass(config.rollout.checkpoint_engine)

    def build(self) -> dict[str, Any]:
        """The model, and a checkpoint engine of each kind, as init_model makes them. Returns what both came to."""
        from transformers import AutoConfig

        self.actor = SimpleNamespace(engine=Engine(AutoConfig.from_pretrained(self.config.model.path)))
        give_engines(self, self._conf, is_master=True)
        from weight_sync_integrations.verl import controller

        controller.connect_engine = stand_in  # type: ignore[assignment]
        parameters = list(self.actor.engine.module.parameters())
        return {"tensors": len(parameters), "bytes": sum(p.numel() * p.element_size() for p in parameters), **machine()}


def give_engines(worker: Any, conf: Any, **options: Any) -> None:
    """A worker's checkpoint engines: verl's `nccl` beside ours, made as verl's workers make the one that they have."""
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.utils.import_utils import import_external_libs

    import_external_libs(conf.custom_backend_module)
    size = conf.update_weights_bucket_megabytes << 20
    ours = CheckpointEngineRegistry.new("weight_sync", bucket_size=size, **conf.engine_kwargs["weight_sync"], **options)
    worker.engines = {"ours": ours, "verl": CheckpointEngineRegistry.new("nccl", bucket_size=size, **options)}


def use(worker: Any, kind: str) -> None:
    worker.checkpoint_engine = worker.engines[kind]


def build(worker: Any, conf: Any, transport: Mapping[str, Any]) -> dict[str, Any]:
    give_engines(worker, conf)
    return worker.server_adapter.build(transport)


def change(worker: Any, version: int) -> None:
    worker.actor.engine.change(version)


def scramble(worker: Any) -> None:
    worker.server_adapter.scramble()


def wrong(worker: Any, version: int) -> list[str]:
    return worker.server_adapter.wrong(version)


def last(worker: Any) -> dict[str, float]:
    return worker.server_adapter.last
