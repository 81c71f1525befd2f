"""verl's rollout replicas with servers of ours: subclasses of verl's, chosen by the plug-in where the config names our backend.

A server's process gets the job's token and transport through its environment, as in the stand-alone job; they reach the workers
that it starts, and no command line or log.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from weight_sync.errors import ConfigError, SessionError, listed
from weight_sync_integrations.verl.plugin import BACKEND


def vllm_replica(replica: type[Any]) -> type[Any]:
    """verl's vLLMReplica, starting WeightSyncVllmServer."""

    class WeightSyncVllmReplica(replica):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if is_ours(self):
                from weight_sync_integrations.verl.vllm_server import WeightSyncVllmServer

                self.server_class = remote_class(WeightSyncVllmServer)

    return WeightSyncVllmReplica


def sglang_replica(replica: type[Any]) -> type[Any]:
    """verl's SGLangReplica, starting WeightSyncSglangServer."""

    class WeightSyncSglangReplica(replica):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if is_ours(self):
                from weight_sync_integrations.verl.sglang_server import WeightSyncSglangServer

                self.server_class = remote_class(WeightSyncSglangServer)

    return WeightSyncSglangReplica


def is_ours(replica: Any) -> bool:
    """Reward and teacher models keep their weights, whatever backend their config has inherited."""
    return replica.config.checkpoint_engine.backend == BACKEND and not (replica.is_reward_model or replica.is_teacher_model)


def remote_class(server: type[Any]) -> Any:
    """A Ray class with a fresh token, one for all nodes of a replica: its workers answer only calls that carry it."""
    import ray

    return ray.remote(type(server.__name__, (server,), {"weight_sync_token": secrets.token_urlsafe(32)}))


def address(kind: str, replica: int, seconds: float) -> dict[str, Any]:
    """Where a replica's server is: {"name", "url", "workers", "token"}. Asked in a rollout worker, whose process knows the
    server's class already; loading it costs seconds.

    Raises ConfigError when the server is verl's own.
    """
    import ray

    first = ray.get_actor(f"{kind}_server_{replica}_0")
    if not hasattr(first, "weight_sync_address"):
        raise ConfigError(
            f"replica {replica}: verl started its own {kind} server, not ours: in the process that made it the plug-in "
            "weight_sync (group verl.plugins) was not loaded. Is VERL_USE_EXTERNAL_PLUGINS set?"
        )
    found: dict[str, Any] = ray.get(first.weight_sync_address.remote(), timeout=seconds)
    others = [ray.get_actor(f"{kind}_server_{replica}_{node}") for node in range(1, found.pop("nodes"))]
    for part in ray.get([server.weight_sync_address.remote() for server in others], timeout=seconds):
        found["workers"] += part["workers"]
    return found


def require_verified(replica: int, states: Sequence[Mapping[str, Any]]) -> None:
    """Before a replica is resumed by anybody: its workers must hold no unverified bytes. Whoever catches the error of a failed
    sync and resumes all replicas would serve a mixture of two versions.

    states: of every worker {"rank", "suspect", "aborted"}. Raises SessionError.
    """
    if suspect := [f"{state['rank']}" for state in states if state["suspect"]]:
        why = "; ".join(sorted({state["aborted"] for state in states} - {""}))
        raise SessionError(
            f"replica {replica} is not resumed: workers {listed(suspect)} hold weights of a sync that failed"
            f"{f' ({why})' if why else ''}; the next complete sync resumes it"
        )


def tell_step(worker: Any, kind: str, replica: int, step: int, seconds: float) -> None:
    """What this replica generates from now on comes from weights of this step (runs in a rollout worker)."""
    import ray

    ray.get(ray.get_actor(f"{kind}_server_{replica}_0").set_global_steps.remote(step), timeout=seconds)


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
