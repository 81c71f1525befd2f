"""The job of verl_nccl.py: verl's workers and managers on Ray. verl is imported in functions only: after the environment of all
processes is set, and not at all in the one that stands in for a server."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

MODEL = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
TINY = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256,
    "vocab_size": 8192, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip
STRATEGIES = {"cuda_ipc": "p2p_ipc", "cma": "p2p_cma", "tcp": "p2p_tcp"}


class StandInServer:
    """STAND-IN for the Ray actor of verl's vLLM server: says where it is and takes the step, serves nothing."""

    def __init__(self, worker: str) -> None:
        """worker: Ray's name of the rollout worker."""
        self._worker, self.step = worker, -1

    def weight_sync_address(self) -> dict[str, Any]:
        return {"name": "vllm-0", "url": "", "workers": [], "token": "", "nodes": 1}

    def worker(self) -> str:
        return self._worker

    def set_global_steps(self, step: int) -> None:
        self.step = step


class Replica:
    """STAND-IN for verl's RolloutReplica: there is no server, so nothing to abort, to free or to resume."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    async def abort_all_requests(self, reject_request: bool = False) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def resume_generation(self) -> None: ...


@dataclass
class Rig:
    """trainer, rollout, server: Ray actors. managers: verl's, one for each backend, over the same actors."""

    trainer: Any
    rollout: Any
    server: Any
    managers: Mapping[str, Any]
    facts: dict[str, Any]

    def both(self, function: Any, *arguments: Any) -> list[Any]:
        import ray

        return ray.get([worker.__ray_call__.remote(function, *arguments) for worker in (self.trainer, self.rollout)])

    def on(self, worker: Any, function: Any, *arguments: Any) -> Any:
        import ray

        return ray.get(worker.__ray_call__.remote(function, *arguments))


def environment(cpu: bool, folder: Path) -> dict[str, str]:
    """For all processes. NCCL's and Ray's own variables are inherited as they are."""
    modules = ["weight_sync_integrations.verl.plugin"]  # found by its entry point too, where the package is installed
    found = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "RAY_memory_monitor_refresh_ms": "0",  # memory of a machine may grow with its use: what Ray takes for all is not
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if cpu:
        modules += ["weight_sync_integrations.verl.cpu", "benchmarks.verl_nccl_cpu"]
        found |= {
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "WEIGHT_SYNC_BENCHMARK_STORE": str(folder / "group"),
            "OMP_NUM_THREADS": "1",
        }
    return found | {"VERL_USE_EXTERNAL_MODULES": ",".join(modules)}


@contextmanager
def started(device: str, transport: str, layers: int, bucket: int, folder: Path) -> Iterator[Rig]:
    """Ray, both actors with their weights in place and both managers; ended with the block."""
    cpu = device == "cpu"
    variables = environment(cpu, folder)
    os.environ.update(variables)
    import ray

    sizes = {**(TINY if cpu else MODEL), "num_hidden_layers": layers}
    make_config(folder, sizes)
    ray.init(
        num_cpus=16, num_gpus=2, include_dashboard=False, object_store_memory=256 << 20, configure_logging=False,
        log_to_driver=bool(os.environ.get("RIG_LOG")), logging_level="error", runtime_env=runtime_env(variables),
    )  # fmt: skip
    try:
        yield _start(overrides(folder, transport, bucket), sizes, cpu)
    finally:
        ray.shutdown()


def make_config(folder: Path, sizes: Mapping[str, Any]) -> None:
    """A folder with an HF config and no weights."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        **sizes, norm_topk_prob=True, tie_word_embeddings=False, dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"]
    )
    config.save_pretrained(folder)


def runtime_env(variables: Mapping[str, str]) -> dict[str, Any]:
    """As verl's main_ppo has it, and ours."""
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    found = get_ppo_ray_runtime_env()
    return {"env_vars": {**found["env_vars"], **variables}}


def overrides(folder: Path, transport: str, bucket: int) -> list[str]:
    rollout = "actor_rollout_ref.rollout"
    return [
        f"+weight_sync={STRATEGIES[transport]}",
        "weight_sync.verify.witness=false",  # the second witness is an engine's own loader, which a stand-in has not
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.actor.strategy=fsdp2",
        f"{rollout}.name=vllm",
        f"{rollout}.dtype=bfloat16",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.nnodes=1",
        f"{rollout}.n_gpus_per_node=1",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes={bucket}",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "trainer.v1.trainer_mode=separate_async",
    ]


def _start(words: list[str], sizes: Mapping[str, Any], cpu: bool) -> Rig:
    import ray
    from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineWorker
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils.config import omega_conf_to_dataclass

    from benchmarks import verl_nccl_sides as sides
    from benchmarks.verl_nccl_server import LiveServer
    from benchmarks.verl_rig import compose_config
    from weight_sync_integrations.server import free_port

    config = compose_config(words).actor_rollout_ref
    engine = omega_conf_to_dataclass(config.rollout.checkpoint_engine)

    def group(name: str, cls: Any, **arguments: Any) -> Any:
        port = free_port("127.0.0.1")  # verl takes one that outgoing connections may take before the ranks have started
        return RayWorkerGroup(
            resource_pool=RayResourcePool([1], use_gpu=True, max_colocate_count=1, name_prefix=name),
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(cls), **arguments),
            device_name="cpu" if cpu else "cuda",
            name_prefix=name,
            master_port_range=[port, port + 100],
        )

    actors = group("trainer", sides.Trainer, config=config, cpu=cpu)
    rollouts = group(
        "rollout",
        CheckpointEngineWorker,
        rollout_config=omega_conf_to_dataclass(config.rollout),
        model_config=None,
        server_adapter=LiveServer(sizes),
    )
    trainer, rollout = actors.workers[0], rollouts.workers[0]
    transport = engine.engine_kwargs["weight_sync"]["sync"]["transport"]
    options = {"name": transport["name"], **transport["options"]}
    server = ray.remote(StandInServer).options(name="vllm_server_0_0", num_cpus=0).remote(rollouts.worker_names[0])
    built = [trainer.__ray_call__.remote(sides.Trainer.build), rollout.__ray_call__.remote(sides.build, engine, options)]
    facts = dict(zip(("trainer", "rollout"), ray.get(built), strict=True))
    ray.get(server.set_global_steps.remote(0))  # it is there
    replica = Replica([rollout])
    managers = {
        kind: CheckpointEngineManager(config=dataclasses.replace(engine, backend=backend), actor_wg=actors, replicas=[replica])
        for kind, backend in (("verl", "nccl"), ("ours", "weight_sync"))
    }
    facts |= {
        "layers": sizes["num_hidden_layers"],
        "bucket": engine.update_weights_bucket_megabytes << 20,
        "transport": options["name"],
        "cpu": cpu,
    }
    return Rig(trainer, rollout, server, managers, facts)
