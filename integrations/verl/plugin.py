"""verl's entry point for us (group `verl.plugins`): verl imports this module in every process that imports verl.

Nothing of verl is imported here, so that a machine which merely has weight_sync installed pays nothing. What is done, is done
when verl itself loads the module in question:

    verl.utils.device             auto_set_device, the first thing that every entry point calls, also checks the config
                                  (check.py): before Ray, before a model is read
    verl.checkpoint_engine.base, verl.workers.engine_workers
                                  update_weights and one more method of each worker class (patch.py). Here and not later: Ray
                                  keeps the functions that a class has when an actor starts
    verl.workers.rollout.replica  replicas whose config names our backend start our servers (servers.py)

verl swallows an exception of this module at debug level. So the backend, which verl imports by name and loudly, refuses to
work where nothing is patched (backend.py).
"""

from __future__ import annotations

from typing import Any

from wrapt import when_imported

from weight_sync_integrations.verl import patch

BACKEND = "weight_sync"
"""Our name in verl's checkpoint_engine.backend."""


def _check_first(module: Any) -> None:
    original = module.auto_set_device

    def auto_set_device(config: Any) -> None:
        from weight_sync.errors import WeightSyncError
        from weight_sync_integrations.verl.check import check

        try:
            check(config)
        except WeightSyncError as error:
            # verl's own message would be this one under two traces; the message is the diagnosis.
            raise SystemExit(f"{type(error).__name__}: {error}") from error
        original(config)

    module.auto_set_device = auto_set_device


def _replicas(module: Any) -> None:
    from weight_sync_integrations.verl.servers import sglang_replica, vllm_replica

    for name, wrap in (("vllm", vllm_replica), ("sglang", sglang_replica)):
        load = module.RolloutReplicaRegistry._registry[name]
        module.RolloutReplicaRegistry.register(name, lambda load=load, wrap=wrap: wrap(load()))


when_imported("verl.utils.device")(_check_first)
when_imported("verl.checkpoint_engine.base")(lambda module: patch.rollout_worker(module.CheckpointEngineWorker))
when_imported("verl.workers.engine_workers")(lambda module: patch.actor_worker(module.ActorRolloutRefWorker))
when_imported("verl.workers.rollout.replica")(_replicas)
