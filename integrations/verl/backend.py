"""The checkpoint engine "weight_sync" of verl. verl imports this module, by checkpoint_engine.custom_backend_module, in the
process of its manager, in every actor rank and in every rollout worker.

Who does what in one CheckpointEngineManager.update_weights(step), none of which is changed:

    abort, release_kv_cache    verl's
    prepare                    every worker says who it is; actor ranks also whether their parameters can be published
    build_topology             in the manager's process: actor rank 0 plans and binds (controller.py) if nothing is bound or
                               something has moved. It is here that a job steps down the ladder to a backend of verl's own
    update_weights             actor rank 0 drives the session; other actor ranks and rollout workers have nothing to do: their
                               parts are asked of them by rank 0. After stepping down: that backend's send and receive
    finalize, resume_kv_cache, resume_generation    verl's, and only after every engine holds the version

An error anywhere is raised where verl gathers results, so its driver sees it; verl then leaves servers aborted and its gates
closed, and the session leaves engines paused. The next update_weights begins anew.

Two classes of verl are patched for it, see patch.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from verl.checkpoint_engine import base

from weight_sync.errors import BindError, ConfigError
from weight_sync_integrations.verl import patch, plugin
from weight_sync_integrations.verl.job import Settings, settings_from

log = logging.getLogger("weight_sync")

_DIRECT, _DOWN = "direct", "down"


@base.CheckpointEngineRegistry.register(plugin.BACKEND)
class WeightSyncEngine(base.CheckpointEngine):
    """One in each actor rank and each rollout worker. Keyword arguments: engine_kwargs.weight_sync, see job.py."""

    is_weight_sync = True  # what patch.py looks for

    def __init__(self, bucket_size: int, is_master: bool | None = None, **kwargs: Any) -> None:
        """is_master: given to actor ranks only. Raises ConfigError for a block that +weight_sync=NAME did not make, or a
        transport that this machine does not have."""
        _require_plugin()
        from weight_sync.transport import preflight

        self.settings = settings_from(kwargs)
        transport = self.settings.sync.transport
        strategy = preflight.strategy_for(transport.name, transport.options)
        if strategy is not None:
            preflight.require(strategy)
        self._bucket_size, self._is_master = bucket_size, is_master
        self._worker: Any = None
        self._below: base.CheckpointEngine | None = None
        self._strategy = _DIRECT

    # -- verl's contract -------------------------------------------------------------------------------------------

    @property
    def wire_format(self) -> str:
        """How the rollout worker reads what comes; only asked after stepping down."""
        return "named_tensors" if self._below is None else self._below.wire_format

    def prepare(self) -> dict[str, Any]:
        """Who this is. "refused": why this actor rank's parameters cannot be published, "" if they can."""
        import ray

        me = ray.get_runtime_context()
        who = {"handle": me.current_actor, "id": me.get_actor_id()}
        if self._is_master is None:
            from weight_sync_integrations.verl.servers import address

            replica = int(self._worker.server_adapter.replica_rank)
            seconds = self.settings.sync.timeouts.connect
            return {**who, "replica": replica, "server": address(self.settings.rollout["name"], replica, seconds)}
        from weight_sync_integrations.verl import actor

        refused = ""
        try:
            actor.open_side(self._worker.actor.engine, self.settings)
        except (BindError, ConfigError) as error:
            refused = f"{type(error).__name__}: {error}"
        return {**who, "refused": refused, "settings": self.settings}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Connect (on actor rank 0), or step down. Raises what connecting raises, with nothing written."""
        import ray

        from weight_sync_integrations.verl import controller

        actors, rollouts = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        handles = {entry["id"]: entry["handle"] for entry in actors}
        refused = [f"actor rank {rank}: {entry['refused']}" for rank, entry in enumerate(actors) if entry["refused"]]
        replicas = {entry["replica"]: (entry["server"], entry["handle"]) for entry in reversed(rollouts)}
        settings: Settings = actors[0]["settings"]
        seconds = 2.5 * settings.sync.timeouts.connect  # the controller watches two of them, and says more
        answer = ray.get(
            actors[0]["handle"].__ray_call__.remote(controller.connect, handles, replicas, refused), timeout=seconds
        )
        sizes = actor_wg_world_size, rollout_world_size
        if answer == "":
            return {"strategy": [_DIRECT] * sizes[0]}, {"strategy": [_DIRECT] * sizes[1]}
        log.warning("stepping down from shard to shard to verl's backend %s: %s", settings.fallback, answer)
        below = ray.get([entry["handle"].__ray_call__.remote(_prepare_below) for entry in metadata], timeout=seconds)
        actor, rollout = base.CheckpointEngineRegistry.get(settings.fallback).build_topology(*sizes, below)
        return {"strategy": [_DOWN] * sizes[0], **actor}, {"strategy": [_DOWN] * sizes[1], **rollout}

    def init_process_group(self, strategy: str, **kwargs: Any) -> None:
        self._strategy = strategy
        if strategy == _DOWN:
            self.below().init_process_group(**kwargs)

    def finalize(self) -> None:
        """Bindings live on to the next sync; only a backend below has something to give back."""
        if self._strategy == _DOWN:
            self.below().finalize()

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        """weights: verl's training engine, not a generator (patch.py). Returns metrics, on rank 0 only: verl merges
        the ranks' dicts by overwriting."""
        from weight_sync_integrations.verl import controller

        if self._strategy == _DOWN:
            full, _ = weights.get_per_tensor_param()
            metrics = await self.below().send_weights(full, global_steps=global_steps)  # type: ignore[func-returns-value]
            return {**(metrics or {}), "weight_sync/stepped_down": 1}
        if not self._is_master:
            return {}
        # A thread: this process's event loop must stay free for what the controller asks of its other roles.
        return await asyncio.to_thread(controller.sync, global_steps)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Any], None]:  # type: ignore[override]
        from verl.workers.rollout.utils import ensure_async_iterator

        async for item in ensure_async_iterator(self.below().receive_weights(global_steps=global_steps)):
            yield item

    # -- ours ------------------------------------------------------------------------------------------------------

    def attach(self, worker: Any) -> None:
        """Know whose engine this is. Called before every call that verl makes."""
        self._worker = worker

    @property
    def direct(self) -> bool:
        """Whether this sync writes into live weights: then there is nothing to send or receive for verl."""
        return self._strategy == _DIRECT

    def below(self) -> base.CheckpointEngine:
        """The backend of verl's own that is stepped down to, made at first use."""
        if self._below is None:
            name = self.settings.fallback
            master = {} if self._is_master is None else {"is_master": self._is_master}
            self._below = base.CheckpointEngineRegistry.new(
                name, bucket_size=self._bucket_size, **master, **self.settings.fallback_kwargs
            )
        return self._below


def _prepare_below(worker: Any) -> Any:
    return worker_engine(worker).below().prepare()


def worker_engine(worker: Any) -> WeightSyncEngine:
    """Our engine in a Ray actor of verl's: the worker itself, or one of several roles fused into one process."""
    fused = [role for name in ("worker_dict", "fused_worker_dict") for role in getattr(worker, name, {}).values()]
    for role in (worker, *fused):
        engine = getattr(role, "checkpoint_engine", None)
        if isinstance(engine, WeightSyncEngine):
            return engine
    raise ConfigError(f"{type(worker).__name__} holds no weight_sync engine")


def _require_plugin() -> None:
    """verl hides a plug-in that failed or was switched off; then servers would start without us. Raises ConfigError."""
    import os
    from importlib.metadata import entry_points

    found = [point for point in entry_points(group="verl.plugins") if point.value == plugin.__name__]
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    allowed = policy == "auto" or any(point.name in {name.strip() for name in policy.split(",")} for point in found)
    if not found:
        raise ConfigError(
            f"the entry point {plugin.__name__} (group verl.plugins) is not installed: pip install weight_sync in this "
            "environment; build leftovers (an old *.egg-info) in the working directory hide it too"
        )
    if not allowed:
        raise ConfigError(
            f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading our plug-in {found[0].name}, so that engines would "
            "start without a way to be written to; unset it, or add weight_sync to it"
        )
    if not patch.applied(base.CheckpointEngineWorker):
        raise ConfigError(
            "verl has not loaded our plug-in in this process, and says why only at debug level. Try "
            f"python -c 'import {plugin.__name__}'"
        )
