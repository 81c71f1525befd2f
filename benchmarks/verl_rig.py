"""verl's own parts on a CPU, for tests/verl and benchmarks/verl_side_by_side.py: nothing of verl is replaced.
verl_inside.py has what is run inside its processes.

What runs: main_ppo's config composed by Hydra with +weight_sync=NAME; ActorRolloutRefWorker ranks on Ray with verl's FSDP2
engine around a tiny model; LLMServerManager's standalone vLLM or SGLang replicas with their CheckpointEngineWorkers; and
CheckpointEngineManager.
What is not verl's: the platform "cpu" (weight_sync_integrations.verl.cpu, with Megatron also cpu_megatron), what SGLang lacks
on a CPU (sglang/cpu_site), and Ray counts GPUs that do not exist.

    prepare()                                    # before verl is imported
    with started([*cpu_overrides(folder), "+weight_sync=p2p_tcp"]) as rig:
        rig.manager.update_weights(1)
"""

from __future__ import annotations

import base64
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from benchmarks import verl_inside as inside

ROOT = Path(__file__).resolve().parents[1]


@cache
def rollouts() -> list[str]:
    """The inference engines that this environment has. SGLang puts an empty module named vllm in place, hence asked once."""
    return [name for name in ("vllm", "sglang") if find_spec(name) is not None]


def prepare() -> None:
    """Make verl importable in this process on a CPU. Workers get the same through Ray, actors what their strategy needs too."""
    os.environ.update(environment())
    if "sglang" in rollouts():
        from weight_sync_integrations.sglang.replica import prepare_cpu

        prepare_cpu()


def environment(strategy: str = "fsdp2") -> dict[str, str]:
    """strategy: of the actors whose processes these variables are for."""
    from weight_sync_integrations.sglang.launch import cpu_environment
    from weight_sync_integrations.vllm.launch import _CPU_ENVIRONMENT

    own = _CPU_ENVIRONMENT
    if "sglang" in rollouts():
        inherited = cpu_environment()
        own = own | inherited | {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    stand_ins = ["weight_sync_integrations.verl.cpu"]
    if strategy == "megatron":
        stand_ins.append("weight_sync_integrations.verl.cpu_megatron")
    return {
        "VERL_USE_EXTERNAL_MODULES": ",".join(stand_ins),
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # the engine classes registered for GPUs are those; verl's own override
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the test reads live weights by a function that it sends to workers
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **own,
    }


def make_model(folder: Path, *, dtype: str = "bfloat16", kind: str = "qwen3", **sizes: Any) -> Path:
    """A tiny random checkpoint with a tokenizer of one word for each number, which verl wants to see."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from weight_sync_integrations.checkpoints import make_checkpoint

    path = make_checkpoint(folder, kind, dtype=dtype, **sizes)
    words = {f"t{i}": i for i in range(sizes.get("vocab_size", 256))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="t1", eos_token="t2", pad_token="t0", unk_token="t3")
    fast.save_pretrained(path)
    return path


def compose_config(overrides: Sequence[str], name: str = "ppo_trainer", folder: str = "trainer") -> Any:
    """The config of one of verl's entry points (main_ppo's) with these overrides, as its Hydra would compose it."""
    import verl
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(Path(verl.__file__).parent / folder / "config"), version_base=None):
        return compose(name, overrides=list(overrides))


def cpu_overrides(
    model: Path,
    *,
    ranks: int = 2,
    tp: int = 1,
    replicas: int = 1,
    dtype: str = "float32",
    bucket: int = 8,
    actor: str = "fsdp2",
    kind: str = "vllm",
) -> list[str]:
    """For a tiny model: `ranks` actor ranks, `replicas` servers of tp workers.

    bucket: MiB, of verl's own backends. actor: its strategy; a megatron one has the sizes that its own keys say, 1 by default.
    kind: of servers, vllm or sglang.
    """
    rollout = "actor_rollout_ref.rollout"
    own = {
        "vllm": {"kv_cache_memory_bytes": 16 << 20, "block_size": 32, "mm_processor_cache_gb": 0},
        "sglang": {
            "device": "cpu",
            "attention_backend": "torch_native",
            "max_total_tokens": 2048,
            "custom_weight_loader": [inside.DUMP],
        },
    }[kind]
    megatron = [
        "model_engine=megatron",
        "actor_rollout_ref.actor.optim.total_training_steps=9",
        "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=False",  # a kernel of TE's
    ]
    return [
        *(megatron if actor == "megatron" else []),
        f"actor_rollout_ref.model.path={model}",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"actor_rollout_ref.actor.strategy={actor}",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=1",
        f"{rollout}.name={kind}",
        f"{rollout}.dtype={dtype}",
        f"{rollout}.tensor_model_parallel_size={tp}",
        f"{rollout}.nnodes=1",
        f"{rollout}.n_gpus_per_node={tp * replicas}",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.max_model_len=128",
        f"{rollout}.max_num_batched_tokens=128",
        f"{rollout}.max_num_seqs=4",
        f"{rollout}.prompt_length=64",
        f"{rollout}.response_length=64",
        f"{rollout}.gpu_memory_utilization=0.2",
        *(f"+{rollout}.engine_kwargs.{kind}.{key}={value}" for key, value in own.items()),
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes={bucket}",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={ranks}",
        "trainer.device=cpu",
        "trainer.v1.trainer_mode=separate_async",
    ]


@dataclass
class Rig:
    """config: all of it, composed. actors: RayWorkerGroup. servers: LLMServerManager. manager: CheckpointEngineManager."""

    config: Any
    actors: Any
    servers: Any
    manager: Any
    dumps: Path

    @property
    def bucket(self) -> int:
        """Bytes, of verl's own backends."""
        return self.manager.config.update_weights_bucket_megabytes << 20

    @property
    def kind(self) -> str:
        return self.config.actor_rollout_ref.rollout.name

    def url(self, replica: int = 0) -> str:
        return f"http://{self.servers.server_addresses[replica]}"

    def change(self, seed: int) -> None:
        """Other weights on every actor rank, as an optimiser step would leave them."""
        import ray

        ray.get([worker.__ray_call__.remote(inside.change, seed) for worker in self.actors.workers])

    def expected(self) -> dict[str, Any]:
        """The actors' weights as whole tensors by HF name: verl's own full-tensor export, not ours."""
        import ray
        from safetensors.torch import load

        return load(ray.get([worker.__ray_call__.remote(inside.full) for worker in self.actors.workers])[0])

    def live(self, replica: int = 0) -> list[dict[str, Any]]:
        """Every live parameter of every worker of a replica, read by a function run inside the workers, not by our code."""
        import ray
        from safetensors.torch import load_file

        for old in self.dumps.glob("*.safetensors"):
            old.unlink()
        if self.kind == "vllm":
            ray.get(self.servers.server_handles[replica].collective_rpc.remote(inside.dump_for_vllm, args=(str(self.dumps),)))
        else:
            ranks = self.config.actor_rollout_ref.rollout.tensor_model_parallel_size
            nothing = [base64.b64encode(pickle.dumps([])).decode()] * ranks
            load = {"serialized_named_tensors": nothing, "load_format": inside.DUMP, "flush_cache": False}
            for path, body in ("/begin_weight_update", {}), ("/update_weights_from_tensor", load), ("/end_weight_update", {}):
                answer = httpx.post(self.url(replica) + path, json=body, timeout=60, trust_env=False)
                if not answer.is_success:
                    raise RuntimeError(f"{path}: {answer.text}")
        return [load_file(file) for file in sorted(self.dumps.glob("*.safetensors"))]

    def differing(self, replica: int = 0) -> list[str]:
        """Live tensors of a replica's workers that are not, bit for bit, the actors' weights in the rollout's dtype."""
        import torch

        live, whole = self.live(replica), self.expected()
        dtype = getattr(torch, self.config.actor_rollout_ref.rollout.dtype)
        found: list[str] = []
        for rank, tensors in enumerate(live):
            expected = inside.cut(whole, self.kind, len(live), rank)
            found += [f"worker {rank}: {name} on one side only" for name in sorted(tensors.keys() ^ expected.keys())]
            same = sorted(tensors.keys() & expected.keys())
            found += [f"worker {rank}: {name}" for name in same if not torch.equal(tensors[name], expected[name].to(dtype))]
        return found

    def generate(self, prompt: Sequence[int], count: int, replica: int = 0, timeout: float = 60.0) -> Any:
        """TokenOutput of verl's own generate(), greedy."""
        import ray

        server = self.servers.server_handles[replica]
        sampling = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True}
        request = f"request-{os.urandom(4).hex()}"
        return ray.get(server.generate.remote(list(prompt), sampling, request), timeout=timeout)

    def cached(self, prompt: Sequence[int]) -> int:
        """Tokens of the prompt that the first replica took from its prefix cache, for a request made now."""
        if self.kind == "vllm":
            return self.generate(prompt, 1).extra_fields["num_cached_tokens"]
        body = {"input_ids": list(prompt), "sampling_params": {"temperature": 0.0, "max_new_tokens": 1}}
        answer = httpx.post(f"{self.url()}/generate", json=body, timeout=60, trust_env=False)
        return answer.json()["meta_info"]["cached_tokens"]

    def paused(self) -> bool:
        """What the first replica's own server says."""
        import ray

        if self.kind == "vllm":
            return self._get("/is_paused")["is_paused"]
        return ray.get(self.servers.server_handles[0].__ray_call__.remote(inside.sglang_paused), timeout=60)

    def version(self) -> str:
        """What the first replica's own server says of its weights."""
        return self._get("/weight_info" if self.kind == "vllm" else "/model_info")["weight_version"]

    def _get(self, path: str) -> dict[str, Any]:
        return httpx.get(self.url() + path, timeout=30, trust_env=False).json()


@contextmanager
def started(overrides: Sequence[str], *, gpus: int = 8) -> Iterator[Rig]:
    """Ray, actors and servers, all ended with the block. Call after prepare()."""
    import ray

    folder = tempfile.TemporaryDirectory(prefix="verl-")
    variables = environment() | {inside.DUMPS: folder.name}
    inherited = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), inherited]))  # this module, in workers
    ray.init(
        num_cpus=64, num_gpus=gpus, include_dashboard=False, object_store_memory=256 << 20, configure_logging=False,
        runtime_env={"env_vars": variables}, log_to_driver=bool(os.environ.get("RIG_LOG")), logging_level="error",
    )  # fmt: skip
    try:
        dumps = Path(folder.name)
        yield _start(compose_config(overrides), dumps)
    finally:
        ray.shutdown()
        folder.cleanup()


def _start(config: Any, dumps: Path) -> Rig:
    import ray
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, create_colocated_worker_cls
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.rollout.llm_server import LLMServerManager

    from weight_sync_integrations.server import free_port

    pool = RayResourcePool([config.trainer.n_gpus_per_node], use_gpu=True, max_colocate_count=1, name_prefix="actor")
    init = RayClassWithInitArgs(cls=ray.remote(ActorRolloutRefWorker), config=config.actor_rollout_ref, role="actor")
    fused = create_colocated_worker_cls(class_dict={"actor": init})  # as verl's trainers make them: roles in one process
    own = environment(config.actor_rollout_ref.actor.strategy)
    port = free_port("127.0.0.1")  # verl takes one that outgoing connections may take before the ranks have started
    group = RayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=fused, device_name="cpu", worker_env=own, master_port_range=[port, port + 100]
    )
    joined = [worker.__ray_call__.remote(inside.join_group) for worker in group.workers]
    actors = group.spawn(prefix_set=["actor"])["actor"]
    with ThreadPoolExecutor(1) as beside:  # both are slow, mostly by importing
        launched = beside.submit(LLMServerManager.create, config=config)
        ray.get(joined)
        actors.init_model()
        servers = launched.result()
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    manager = CheckpointEngineManager(config=engine, actor_wg=actors, replicas=servers.get_replicas())
    return Rig(config, actors, servers, manager, dumps)
