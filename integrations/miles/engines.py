"""miles's engine actors as engines of a session.

Rank 0 holds Ray handles of SGLangEngine actors, one for each engine (on its first node). What is asked of them goes through
`__ray_call__`, which every Ray actor has: a function of ours runs in the actor's process, next to its server. It finds the
server's own description and the files in which the workers announced themselves (sglang/settings.py). From then on the session
talks to the server over HTTP, as everywhere; the actor's own methods are not used, so their retries and logged-only errors are
not ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weight_sync.errors import DeadlineExceeded, RolloutError
from weight_sync.ids import Deadline
from weight_sync.session.calls import together
from weight_sync.session.contracts import EngineDescription
from weight_sync_integrations.server import quiet_client
from weight_sync_integrations.sglang.engine import SglangEngine
from weight_sync_integrations.sglang.launch import WorkerAddress
from weight_sync_integrations.sglang.plugin import MARKER
from weight_sync_integrations.sglang.settings import announced, complete, engine_key

_EMPTY = "gARdlC4="
"""An empty list, pickled and in base64: what /update_weights_from_tensor is given to load."""


def actor_id(handle: Any) -> str:
    """What tells one engine from the next that stands at the same address."""
    return handle._actor_id.hex()


def open_engine(handle: Any, transport: dict[str, Any], deadline: Deadline, **beside: Any) -> SglangEngine:
    """The RolloutEngine behind an engine actor. transport: what its workers shall open. beside: draft and declare.

    Raises RolloutError for an engine without our workers, naming what to add; DeadlineExceeded.
    """
    import ray

    try:
        found = ray.get(handle.__ray_call__.remote(locate, deadline.check("locate an engine")), timeout=deadline.remaining())
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineExceeded(f"engine actor {actor_id(handle)}: not located within {deadline.seconds:g} s") from error
    except ray.exceptions.RayTaskError as error:
        raise RolloutError(f"engine actor {actor_id(handle)}: {error.cause}") from error
    except ray.exceptions.RayError as error:
        raise RolloutError(f"engine actor {actor_id(handle)} is gone: {error}") from error
    places = found["workers"]
    if not complete(places, found["world"]):
        places = _on_all_nodes(found["key"], found["world"], deadline)
    workers = [WorkerAddress(p["rank"], p["host"], p["port"], p["token"]) for p in places]
    name = f"{found['url'].split('://')[1]}/{actor_id(handle)[:8]}"
    engine = SglangEngine(name, found["url"], workers, "", **beside)
    try:
        engine.call("transport", {"transport": transport}, deadline)
    except BaseException:
        engine.close()
        raise
    return engine


def open_engines(handles: Sequence[Any], transport: dict[str, Any], deadline: Deadline, **beside: Any) -> list[SglangEngine]:
    """Those of all handles, at once; none is left open if one fails."""
    opened: list[SglangEngine] = []

    def one(handle: Any) -> SglangEngine:
        engine = open_engine(handle, transport, deadline, **beside)
        opened.append(engine)
        return engine

    calls = {f"engine actor {actor_id(handle)}": (lambda handle=handle: one(handle)) for handle in handles}
    try:
        return list(together(calls, deadline).values())
    except BaseException:
        for engine in opened:
            engine.close()
        raise


def sizes_of(engine: SglangEngine, deadline: Deadline) -> tuple[EngineDescription, dict[str, int]]:
    """How one engine runs: what the plan of the job is declared with; every other engine is compared with it."""
    description = engine.describe(deadline)
    return description, {axis: int(description.sizes[axis]) for axis in ("tp", "pp", "attn_dp", "moe_ep")}


def locate(actor: Any, seconds: float) -> dict[str, Any]:
    """Runs in the engine actor's process. actor: miles's (or slime's) SGLangEngine.

    {"url", "key", "world", "workers": of this node, as settings.announced() gives them}. An SGLang without plug-ins is asked to
    call our entry; see sglang/entry.py.
    """
    deadline = Deadline.after(seconds)
    host, port = actor.server_host, actor.server_port
    url = f"http://{host}:{port}"
    with quiet_client(url) as client:
        info = _json(client, "GET", ("/server_info", "/get_server_info"), None, deadline)
        if MARKER not in (info.get("custom_weight_loader") or ()):
            raise RolloutError(
                f"engine {url} was started without weight_sync: add `sglang_custom_weight_loader: [{MARKER}]` to the "
                "--custom-config-path file (or to the arguments of an external engine: --custom-weight-loader)"
            )
        key = engine_key(info.get("dist_init_addr"), str(host).strip("[]"), int(port))
        world = int(info["tp_size"]) * int(info.get("pp_size") or 1)
        places = announced(key)
        if not places and "/begin_weight_update" not in _json(client, "GET", ("/openapi.json",), None, deadline)["paths"]:
            body = {"serialized_named_tensors": [_EMPTY] * int(info["tp_size"]), "load_format": MARKER, "flush_cache": False}
            _json(client, "POST", ("/update_weights_from_tensor",), body, deadline)
            places = announced(key)
    if not places:
        raise RolloutError(
            f"engine {url} names weight_sync in its arguments, but none of its workers announced itself: is weight_sync "
            "installed in the engine's environment, and is the plug-in not excluded by SGLANG_PLUGINS?"
        )
    return {"url": url, "key": key, "world": world, "workers": places}


def _on_all_nodes(key: str, world: int, deadline: Deadline) -> list[dict[str, Any]]:
    """An engine over several nodes: its workers' files are read where they are, by a Ray task on every node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(announced).options(num_cpus=0)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    found = [task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(key) for node in nodes]
    try:
        places = [place for here in ray.get(found, timeout=deadline.check("read announcements")) for place in here]
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineExceeded(f"engine {key}: announcements not read within {deadline.seconds:g} s") from error
    if not complete(places, world):
        raise RolloutError(
            f"engine {key} has {world} workers; ranks {sorted(place['rank'] for place in places)} announced themselves on "
            f"{len(nodes)} nodes. Is weight_sync installed on all of them?"
        )
    return sorted(places, key=lambda place: place["rank"])


def _json(client: Any, verb: str, paths: Sequence[str], body: dict[str, Any] | None, deadline: Deadline) -> dict[str, Any]:
    """The answer of the first of `paths` that the server has."""
    for path in paths:
        answer = client.request(verb, path, json=body, timeout=deadline.check(path))
        if answer.status_code == 404:
            continue
        content = answer.json() if answer.is_success else {}
        if not answer.is_success or content.get("success") is False:
            raise RolloutError(f"{client.base_url}{path} answered {answer.status_code}: {answer.text[:600]}")
        return content
    raise RolloutError(f"{client.base_url}: none of {', '.join(paths)} is there")
