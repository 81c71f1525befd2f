"""What a trainer rank does in the tests: miles's own actor, with our updater in it because of the init hook alone."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import httpx


def actor_of(rank: int, world: int, port: int, file: str, address: str, changes: dict[str, Any]) -> tuple[Any, Any]:
    """(MegatronTrainRayActor after its own init(), the trainer that Megatron-Bridge built for it).

    file: the arguments as miles's parser made them. Only where miles builds its model (its provider wants Transformer Engine)
    is a model put in its place: a real GPTModel of the same names, see weight_sync_integrations.megatron.model.
    """
    import miles.backends.megatron_utils.actor as module
    import ray

    ray.init(address=address, namespace="miles", log_to_driver=False, logging_level="error")
    args = pickle.loads(Path(file).read_bytes())
    # What megatron-core 0.19 asks for and the parser of miles's own Megatron does not know.
    args.pad_vocab_size, args.inference_rng_tracker = True, True
    for name, value in changes.items():
        setattr(args, name, value)
    made: list[Any] = []

    def build(args: Any, role: str) -> tuple[Any, ...]:
        from megatron.core import parallel_state

        from weight_sync_integrations.megatron.model import build as make

        sizes = {
            a: getattr(args, f"{n}_model_parallel_size") for a, n in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"))
        }
        original = parallel_state.initialize_model_parallel
        parallel_state.initialize_model_parallel = lambda *_, **__: None  # miles has done it
        try:
            made.append(make(args.hf_checkpoint, sizes, learning_rate=0.05))
        finally:
            parallel_state.initialize_model_parallel = original
        return made[0].chunks, made[0].optimizer, None, 0

    module.initialize_model_and_optimizer = build
    actor = module.MegatronTrainRayActor(world, rank, "127.0.0.1", port)
    assert actor.init(args, "actor") == 1
    actor.set_rollout_manager(ray.get_actor("manager", namespace="miles"))
    return actor, made[0]


def three_syncs(rank: int, world: int, port: int, file: str, address: str, changes: dict[str, Any], urls: list[str],
                folder: str, check: bool) -> dict[str, Any]:  # fmt: skip
    """Three updates of a trainer that steps between them; after each, what the engines hold against a load of its export."""
    import miles.backends.megatron_utils.actor as module
    import ray
    from miles.utils import tracking_utils

    from weight_sync.session.session import WeightSync

    logged: list[dict[str, Any]] = []
    tracking_utils.log = lambda args, metrics, step_key: logged.append(dict(metrics))
    actor, trainer = actor_of(rank, world, port, file, address, changes)
    manager = ray.get_actor("manager", namespace="miles")
    levels, sync = list[str](), WeightSync.sync
    WeightSync.sync = lambda self, version, *, level=None: (levels.append(str(level)), sync(self, version, level=level))[1]
    updater = type(actor.weight_updater)
    result: dict[str, Any] = {"class": f"{updater.__module__}.{updater.__name__}", "versions": [], "held": [], "export": []}
    for version in (1, 2, 3):
        if version > 1:
            trainer.train_step()
        if version == 3 and check and rank == 0:
            ray.get(manager.check_weights.remote("snapshot"))
        actor.update_weights()
        result["versions"].append(actor.weight_updater.weight_version)
        module.log_perf_data(version, actor.args)
        if version == 1 and check and rank == 0:
            ray.get(manager.check_weights.remote("compare"))
        if version == 3 and check and rank == 0:  # of weights that have changed since
            result["compared"] = complaint(lambda: ray.get(manager.check_weights.remote("compare")))
        export = trainer.export_hf(Path(folder) / f"v{version}")
        if rank == 0:
            result["held"].append([checksums(url) for url in urls])
            result["export"].append([loaded(url, str(export)) for url in urls])
    return result | {"logged": logged, "levels": levels}


def engine_that_hangs(rank: int, world: int, port: int, file: str, address: str, changes: dict[str, Any], urls: list[str],
                      folder: str) -> dict[str, Any]:  # fmt: skip
    """One update; then an engine stops in the middle of the next; then miles replaces it, and the next one recovers."""
    import ray
    import torch.distributed as dist

    actor, trainer = actor_of(rank, world, port, file, address, changes)
    manager = ray.get_actor("manager", namespace="miles")
    actor.update_weights()
    trainer.train_step()
    if rank == 0:
        ray.get(manager.stop_second.remote())
    dist.barrier()
    error = ""
    try:
        actor.update_weights()
    except Exception as raised:  # noqa: BLE001 - that there is one, and which, is what is tested
        error = f"{type(raised).__name__}: {raised}"
    after = {"error": error, "version": actor.weight_updater.weight_version}
    if rank == 0:
        after |= {"paused": paused(urls[0]), "stamp": stamp(urls[0])}
        ray.get(manager.replace_second.remote())
    dist.barrier()
    actor.update_weights()
    result = {"failed": after, "version": actor.weight_updater.weight_version}
    export = trainer.export_hf(Path(folder) / "recovered")
    if rank == 0:
        new = [urls[0], urls[2]]
        result |= {"stamps": [stamp(url) for url in new], "paused": [paused(url) for url in new]}
        result |= {"members": sorted(r.name for r in actor.weight_updater._sync.replicas)}
        result |= {"held": [checksums(url) for url in new], "export": [loaded(url, str(export)) for url in new]}
    return result


def complaint(call: Any) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - its words are the result
        return str(error)
    return ""


def checksums(url: str) -> Any:
    """SGLang's own digest of every tensor of every rank of an engine."""
    answer = httpx.post(f"{url}/weights_checker", json={"action": "checksum"}, timeout=60)
    answer.raise_for_status()
    return [info["checksums"] for info in answer.json()["ranks"]]


def loaded(url: str, export: str) -> Any:
    """The same, once SGLang has loaded a checkpoint folder with its own loader."""
    body = {"model_path": export, "flush_cache": True, "abort_all_requests": False}
    httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=60).raise_for_status()
    return checksums(url)


def stamp(url: str) -> str:
    return httpx.get(f"{url}/model_info", timeout=10).json()["weight_version"]


def paused(url: str) -> bool:
    """Whether a request gets no answer."""
    body = {"input_ids": [3, 14, 15], "sampling_params": {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}}
    try:
        httpx.post(f"{url}/generate", json=body, timeout=4).raise_for_status()
    except httpx.TimeoutException:
        return True
    time.sleep(0.1)
    return False


def fsdp_update(rank: int, world: int, port: int, file: str, address: str, changes: dict[str, Any], urls: list[str],
                folder: str) -> dict[str, Any]:  # fmt: skip
    """miles's FSDP actor as its driver would start it after substitute(), over a real FSDP2 model; two updates.

    Its init() asks for a GPU, a tokenizer and flash attention; what it does with its updater is done here in its place.
    """
    import sys
    import types

    import ray
    import torch.distributed as dist
    from ray import cloudpickle

    ring = types.ModuleType("ring_flash_attn")  # wants flash_attn, and is for context parallelism only
    ring.update_ring_flash_attn_params = ring.substitute_hf_flash_attn = None  # type: ignore[attr-defined]
    sys.modules["ring_flash_attn"] = ring
    import miles.backends.experimental.fsdp_utils as package
    import miles.backends.experimental.fsdp_utils.actor as module
    from miles.utils.distributed_utils import init_gloo_group

    from weight_sync_integrations.fsdp.model import build
    from weight_sync_integrations.miles import fsdp

    base = package.FSDPTrainRayActor
    made = fsdp.substitute()
    ray.init(address=address, namespace="miles", log_to_driver=False, logging_level="error")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    init_gloo_group()
    args = pickle.loads(Path(file).read_bytes())
    args.train_backend = "fsdp"
    trainer = build(args.hf_checkpoint, learning_rate=0.05)

    def init(self: Any, args: Any, role: str) -> None:
        self.args, self.model = args, trainer.model
        self.weight_updater = module.UpdateWeightFromDistributed(self.args, self.model)

    base.init = init
    actor = object.__new__(made)
    actor.init(args, "actor")
    actor.rollout_manager = ray.get_actor("manager", namespace="miles")
    result: dict[str, Any] = {
        "substituted": package.FSDPTrainRayActor is made and issubclass(made, base),
        "pickled": cloudpickle.loads(cloudpickle.dumps(made)) is made and len(cloudpickle.dumps(made)) < 200,
        "class": type(actor.weight_updater).__name__,
    }
    for _ in range(2):
        trainer.train_step()
        actor.update_weights()
    export = trainer.export_hf(Path(folder) / "fsdp")
    result["version"] = actor.weight_updater.weight_version
    if rank == 0:
        result |= {"held": [checksums(url) for url in urls], "export": [loaded(url, str(export)) for url in urls]}
    return result
