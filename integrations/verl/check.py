"""What can be wrong with a verl config that asks for weight_sync, said before anything is started.

Called with the composed config of any verl entry point; a config that does not ask for us is left alone. Every message ends
with what to set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weight_sync.config import strategies, sync_from
from weight_sync.errors import ConfigError
from weight_sync_integrations.verl import seams
from weight_sync_integrations.verl.plugin import BACKEND

MODULE = "weight_sync_integrations.verl.backend"
_ROLLOUT = "actor_rollout_ref.rollout"
_ENGINE = f"{_ROLLOUT}.checkpoint_engine"


def check(config: Any) -> None:
    """Raise ConfigError unless this config can work; return at once if it does not ask for weight_sync."""
    group = _get(config, "weight_sync")
    backend = _get(config, f"{_ENGINE}.backend")
    if group is None and backend != BACKEND:
        return
    if group is None:
        raise ConfigError(
            f"{_ENGINE}.backend={BACKEND}, but no strategy is chosen: do not set the backend, add +weight_sync=NAME, which "
            f"sets it and all it needs; there are {', '.join(strategies())}"
        )
    if isinstance(group, str):
        raise ConfigError(
            f"weight_sync is the plain string {group!r}, not a config group: Hydra did not find the group on its search path. "
            f"Use +weight_sync=NAME with one of {', '.join(strategies())}. If that is what was given, weight_sync is not "
            "installed in this environment (pip install), so its search-path plug-in was not found"
        )
    conf = sync_from(group)
    if backend != BACKEND:
        raise ConfigError(
            f"+weight_sync={conf.strategy} and {_ENGINE}.backend={backend}: another override has taken the backend back; "
            "remove it"
        )
    seams.require(_get(config, f"{_ROLLOUT}.name"), _get(config, "actor_rollout_ref.actor.strategy"))
    if conf.failure.on_suspect.value == "drop":
        raise ConfigError(
            "weight_sync.failure.on_suspect=drop: verl resumes every replica, also one that was left out; use keep"
        )
    if conf.verify.trainer_witness and _get(config, "actor_rollout_ref.actor.strategy") == "fsdp":
        raise ConfigError(
            "weight_sync.verify.trainer_witness: verl's export of actor_rollout_ref.actor.strategy=fsdp moves the model; "
            "use fsdp2 or megatron, or leave the key at false"
        )
    scheme = conf.quant.scheme
    if scheme not in ("auto", "none", "bf16") and not fallback(config):
        raise ConfigError(
            f"weight_sync.quant.scheme={scheme}: {QUANTISED}. Use auto, or name a verl backend to step down to: {_FALLBACK}"
        )
    for find in (_mode, _sides, _features, _megatron, _sizes, _gpus):
        for problem in find(config):
            raise ConfigError(f"+weight_sync={conf.strategy}: {problem}")


def _mode(config: Any) -> Iterator[str]:
    """Trainers that put replicas into the actors' own processes force the backend `naive` without a word."""
    rollout_nodes = int(_get(config, f"{_ROLLOUT}.nnodes") or 0)
    own = _get(config, "async_training") is not None or int(_get(config, "rollout.nnodes") or 0) > 0
    if own:  # fully_async and one_step_off have rollout GPUs of their own
        return
    wanted = (
        "trainer.v1.trainer_mode=separate_async actor_rollout_ref.rollout.nnodes=N "
        "actor_rollout_ref.rollout.n_gpus_per_node=M, or use verl.experimental.fully_async_policy or one_step_off_policy"
    )
    if not _get(config, "trainer.use_v1"):
        yield f"trainer.use_v1=False runs rollout inside the actors, where verl's own copy is all there is. Set {wanted}"
    mode = _get(config, "trainer.v1.trainer_mode")
    if mode != "separate_async":
        yield f"trainer.v1.trainer_mode={mode} would silently replace the backend by naive. Set {wanted}"
    if rollout_nodes < 1:
        yield f"{_ROLLOUT}.nnodes={rollout_nodes}: rollout engines need GPUs of their own. Set {wanted}"


def _sides(config: Any) -> Iterator[str]:
    module = _get(config, f"{_ENGINE}.custom_backend_module")
    if module != MODULE:
        yield f"{_ENGINE}.custom_backend_module={module}: must be {MODULE}, or no worker knows the backend"
    manager = _get(config, f"{_ROLLOUT}.checkpoint_manager_class")
    if manager:
        yield f"{_ROLLOUT}.checkpoint_manager_class={manager}: only verl's own manager is known to call a backend as it must"
    kind = _get(config, f"{_ROLLOUT}.name")
    if kind not in ("vllm", "sglang"):
        yield f"{_ROLLOUT}.name={kind}: must be vllm or sglang"
    strategy = _get(config, "actor_rollout_ref.actor.strategy")
    if strategy not in ("fsdp", "fsdp2", "megatron") and not fallback(config):
        yield (
            f"actor_rollout_ref.actor.strategy={strategy}: must be fsdp, fsdp2 or megatron. Set it, or name a verl backend to "
            f"step down to: {_FALLBACK}"
        )


QUANTISED = (
    "quantised rollout is not supported in verl, where engines start with random weights and verl's own patches of their "
    "quantised layers, so that how they keep what is loaded was never seen (train.py supports it)"
)
_FALLBACK = f"{_ENGINE}.engine_kwargs.{BACKEND}.fallback=nccl"


def fallback(config: Any) -> str | None:
    return _get(config, f"{_ENGINE}.engine_kwargs.{BACKEND}.fallback")


def _features(config: Any) -> Iterator[str]:
    for key, want, why in (
        (
            "actor_rollout_ref.hybrid_engine",
            False,
            "replicas inside the actors share the rollout's settings and need sleep",
        ),
        (f"{_ROLLOUT}.free_cache_engine", False, "sleep discards weights and moves what comes back"),
        (f"{_ROLLOUT}.enable_sleep_mode", False, "weights would live in memory that a transport cannot register"),
        (f"{_ROLLOUT}.disaggregation.enabled", False, "prefill and decode servers of one replica are not planned for"),
    ):
        value = _get(config, key)
        if value is not None and bool(value) is not want:
            yield f"{key}={value}: {why}. It must be {want}"
    if fallback(config):
        return
    strategy = _get(config, "actor_rollout_ref.actor.strategy")
    block = "megatron" if strategy == "megatron" else "fsdp_config"
    rank = max(int(_get(config, f"actor_rollout_ref.model.{key}") or 0) for key in ("lora_rank", "lora.rank"))
    for key, value, why in (
        (f"actor_rollout_ref.actor.{block}.param_offload", None, "parameters are not on the device between steps"),
        (f"actor_rollout_ref.actor.{block}.offload_policy", None, "parameters are not on the device between steps"),
        ("actor_rollout_ref.model.lora_rank", rank or None, "adapters are not the weights that engines serve"),
        (f"{_ROLLOUT}.quantization", None, QUANTISED),
        ("actor_rollout_ref.actor.qat.enable", None, QUANTISED),
        (f"actor_rollout_ref.actor.{block}.qat.enable", None, QUANTISED),
    ):
        found = _get(config, key) if value is None else value
        if found:
            yield f"{key}={found}: {why}. Unset it, or name a verl backend to step down to: {_FALLBACK}"
    if method := _checkpoint_method(config):
        path = _get(config, "actor_rollout_ref.model.path")
        yield (
            f"actor_rollout_ref.model.path={path}: its config.json has quantization_config {method}: {QUANTISED}. Use a "
            f"checkpoint without, or name a verl backend to step down to: {_FALLBACK}"
        )


def _checkpoint_method(config: Any) -> str:
    """quant_method of the checkpoint, where its folder is here; "" if none. Of a name of the hub the controller says it."""
    file = Path(str(_get(config, "actor_rollout_ref.model.path") or "")) / "config.json"
    published = json.loads(file.read_text()).get("quantization_config") if file.is_file() else None
    return str(published.get("quant_method", "of no name")) if published else ""


def _megatron(config: Any) -> Iterator[str]:
    if _get(config, "actor_rollout_ref.actor.strategy") != "megatron" or fallback(config):
        return
    block = "actor_rollout_ref.actor.megatron"
    if _get(config, f"{block}.use_megatron_fsdp"):
        yield (
            f"{block}.use_megatron_fsdp=True: Megatron-FSDP's shards are not planned for. Set it to False, or name a verl "
            f"backend to step down to: {_FALLBACK}"
        )
    held, served = _get(config, f"{block}.dtype"), _get(config, f"{_ROLLOUT}.dtype")
    if held != served:
        yield f"{block}.dtype={held} and {_ROLLOUT}.dtype={served}: weights of Megatron actors are not cast. Make them equal"


def _sizes(config: Any) -> Iterator[str]:
    tp, pp, dp = (
        int(_get(config, f"{_ROLLOUT}.{key}_parallel_size") or 1) for key in ("tensor_model", "pipeline_model", "data")
    )
    if dp > 1 and _get(config, f"{_ROLLOUT}.name") == "vllm":
        yield (
            f"{_ROLLOUT}.data_parallel_size={dp}: vLLM hides such replicas behind one address, where only the first can be "
            "written to. Set it to 1; verl makes a replica of every tensor_model_parallel_size GPUs"
        )
    gpus = rollout_gpus(config)
    if gpus and gpus % (tp * pp * dp):
        yield (
            f"{gpus} rollout GPUs are no multiple of an engine's tp {tp} x pp {pp} x dp {dp} = {tp * pp * dp}; set "
            f"{_ROLLOUT}.nnodes, .n_gpus_per_node or .tensor_model_parallel_size"
        )
    if _get(config, "actor_rollout_ref.actor.strategy") == "megatron":
        megatron = "actor_rollout_ref.actor.megatron"
        keys = ("tensor_model", "pipeline_model", "context")
        cut = [int(_get(config, f"{megatron}.{key}_parallel_size") or 1) for key in keys]
        ranks = trainer_gpus(config)
        if ranks % (cut[0] * cut[1] * cut[2]):
            yield f"{ranks} trainer GPUs are no multiple of {megatron} tp {cut[0]} x pp {cut[1]} x cp {cut[2]}"


def _gpus(config: Any) -> Iterator[str]:
    """A job that starts Ray on this machine needs all its GPUs here. On a cluster, Ray places workers or says why not."""
    address = _get(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    import ray

    if address or ray.is_initialized():
        return
    import torch

    need, here = trainer_gpus(config) + rollout_gpus(config), torch.cuda.device_count()
    if here < need:
        yield (
            f"the trainer takes {trainer_gpus(config)} GPUs and rollout {rollout_gpus(config)}, in sum {need}; this machine "
            f"has {here}. Set trainer.nnodes, trainer.n_gpus_per_node and {_ROLLOUT}.nnodes, .n_gpus_per_node to what there "
            "is, or RAY_ADDRESS to a cluster that has them"
        )


def trainer_gpus(config: Any) -> int:
    return int(_get(config, "trainer.nnodes") or 1) * int(_get(config, "trainer.n_gpus_per_node") or 1)


def rollout_gpus(config: Any) -> int:
    block = "rollout" if int(_get(config, "rollout.nnodes") or 0) > 0 else _ROLLOUT
    return int(_get(config, f"{block}.nnodes") or 0) * int(_get(config, f"{block}.n_gpus_per_node") or 0)


def _get(config: Any, key: str) -> Any:
    """The value at a dotted key, None where a part is missing."""
    node = config
    for part in key.split("."):
        if node is None or isinstance(node, str):
            return None
        node = node.get(part)
    return node
