"""The worker extension: what the controller can ask of every vLLM worker process (--worker-extension-cls).

vLLM mixes this class into its worker, so `self` is the worker. One method is added, because vLLM refuses extensions
whose names clash with its own: weight_sync_call(token, request) -> reply, both JSON text. It is reached by
collective_rpc, which calls it on every rank and returns every rank's reply in rank order, over HTTP too
(/collective_rpc passes text through unchanged; other results than dict, list and None it turns into str()).

    request  {"method": name, "payload": {...}, "by_rank": {"0": {...}, ...}}
             by_rank[rank] is merged over payload: collective_rpc sends the same text to every rank.
    reply    {"rank": r, "ok": true, "reply": {...}}
             {"rank": r, "ok": false, "error": {"type": class name, "message": text, "trace": text or null}}

It never raises. collective_rpc stops reading replies at the first rank that raised; what the other ranks answered would
then be taken for the answer to the next call (MultiprocExecutor.collective_rpc in 0.32.0).

Methods: those of the TargetAgent (bind, begin, place, verify, end, abort, describe), some with additions of ours; and
state, commit, record, load, inventory.
"""

from __future__ import annotations

import hmac
import json
import os
import traceback
from typing import Any

from weight_sync.errors import BindError, RolloutError, SessionError, WeightSyncError, listed
from weight_sync_integrations.inventory import Inventory, Policy, plain
from weight_sync_integrations.vllm import tensors
from weight_sync_integrations.vllm.plugin import BACKEND, TOKEN_VARIABLE

MAX_REQUEST = 256 << 20
"""Characters of one request: the transfer tables of a large model are tens of MB. vLLM's own server bounds nothing."""


class WeightSyncWorkerExtension:
    """Mixed into vLLM's Worker. Only weight_sync_call may be a public name here."""

    def weight_sync_call(self, token: str, request: str) -> str:
        """Answer one request; see the module docstring. Never raises."""
        rank = getattr(self, "rank", -1)
        try:
            _check_token(token)
            if len(request) > MAX_REQUEST:
                raise RolloutError(f"a request of {len(request)} characters; at most {MAX_REQUEST} are accepted")
            message = json.loads(request)
            payload = {**message.get("payload", {}), **message.get("by_rank", {}).get(str(rank), {})}
            reply = _answer(self, message["method"], payload)
        except Exception as error:  # noqa: BLE001 - carried to the controller, which raises it (see module docstring)
            known = isinstance(error, WeightSyncError)
            return json.dumps(
                {
                    "rank": rank,
                    "ok": False,
                    "error": {
                        "type": type(error).__name__,
                        "message": str(error),
                        "trace": None if known else traceback.format_exc(),
                    },
                }
            )
        return json.dumps({"rank": rank, "ok": True, "reply": reply})


def _check_token(token: str) -> None:
    expected = os.environ.get(TOKEN_VARIABLE, "")
    if not expected:
        raise RolloutError(f"this engine was started without {TOKEN_VARIABLE}: it takes part in no weight_sync job")
    if not hmac.compare_digest(expected.encode(), str(token).encode()):
        raise RolloutError("wrong token: this engine belongs to another weight_sync job")


def _answer(worker: Any, method: str, payload: dict[str, Any]) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config

    own = {
        "describe": _describe,
        "record": _record,
        "state": _state,
        "inventory": _inventory,
        "bind": _bind,
        "begin": _begin,
        "end": _end,
        "commit": _commit,
        "abort": _abort,
        "load": _load,
    }
    with set_current_vllm_config(worker.vllm_config):
        if method in own:
            return own[method](worker, payload)
        return _engine(worker).agent(worker).call(method, payload)


def _state(worker: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """Where this worker stands. suspect: bytes may have been written that no commit vouches for."""
    engine = _engine(worker)
    return {
        "update_active": bool(worker._weight_update_active),
        "kv_connector": worker.vllm_config.kv_transfer_config is not None,
        "session": engine.session,
        "suspect": engine.suspect,
        "aborted": engine.aborted,
        "committed": engine.committed,
    }


def _inventory(worker: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """{"expected": names that the plan writes, "draft", "declare"} -> {"entries": Entry as a dict}.

    expected may be left out: then every parameter and persistent buffer of the target counts as planned.
    """
    return {"entries": [plain(entry) for entry in _judged(worker, payload).entries]}


def _judged(worker: Any, payload: dict[str, Any]) -> Inventory:
    expected = payload.get("expected")
    planned = tensors.live_tensors(tensors.models_of(worker), None if expected is None else frozenset(expected))
    draft, declare = payload.get("draft", "refuse"), payload.get("declare", {})
    policy = Policy(tensors.RULES, draft, declare, tensors.RECOMPUTES, _captures(worker))
    where = f"rollout rank {worker.rank}"
    return Inventory(lambda: tensors.find_all(tensors.models_of(worker)), planned.values(), policy, where)


def _captures(worker: Any) -> bool:
    """Whether CUDA graphs read the weights, by the addresses that they had when they were captured."""
    return worker.device.type == "cuda" and not worker.vllm_config.model_config.enforce_eager


def _bind(worker: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """The agent's bind, once every tensor is accounted for. payload: a target_table, and what inventory takes."""
    from weight_sync_integrations.vllm import live

    engine = _engine(worker)
    if reasons := tensors.refusals(worker):
        raise BindError(f"rollout rank {worker.rank}: {'; '.join(reasons)}")
    if payload.get("loader"):
        return _bind_loader(worker, payload)
    engine.loader = None
    for role, model in tensors.models_of(worker)[1:]:
        stuck = {f"{role}.{name}": why for name, why in live.inspect(model).not_writable.items()}
        if planned := sorted(stuck.keys() & set(payload["expected"])):
            raise BindError(f"rollout rank {worker.rank}: {listed(f'{name}: {stuck[name]}' for name in planned)}")
    if not _captures(worker):  # captured graphs would go on reading what they were captured with: the inventory refuses
        tensors.rebuild_kernels(tensors.models_of(worker))
    inventory = _judged(worker, payload)
    if set(payload["expected"]) <= set(tensors.live_tensors(tensors.models_of(worker), all_of_them=True)):
        inventory.require_all()  # else the plan is of another layout, and the agent says so better
    before, engine.planned = engine.planned, frozenset(payload["expected"])
    try:
        answer = engine.agent(worker).call("bind", payload)
    except BaseException:
        engine.planned = before
        raise
    inventory.seal()
    engine.inventory = inventory
    return answer


def _bind_loader(worker: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """bind, where HF tensors are put beside the weights for vLLM's own loader, which then accounts for every tensor."""
    engine = _engine(worker)
    if reason := _no_loader(worker):
        raise BindError(f"rollout rank {worker.rank}: vLLM's own loader cannot take the weights: {reason}")
    engine.planned = None
    answer = engine.agent(worker).call("bind", payload)  # makes engine.loader, unless this very plan is bound already
    engine.inventory = engine.loader.account(payload.get("declare", {}), _captures(worker))
    return answer


def _no_loader(worker: Any) -> str:
    from weight_sync_integrations.vllm import live

    if drafts := [role for role, _ in tensors.models_of(worker)[1:]]:
        return f"it runs a draft model ({listed(drafts)}), which is written in place only"
    return live.no_loader(_model(worker))


def _end(worker: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """The session's bytes are verified: derived tensors are made anew, and all that is due is proven. -> {"proven": ...}.

    Raises VerifyError when a constant or frozen tensor has changed, or a derived one was not recomputed.
    """
    engine = _engine(worker)
    engine.agent(worker).call("end", payload)
    if engine.inventory is None:
        raise SessionError(f"rollout rank {worker.rank}: no plan is bound")
    if engine.loader is not None:
        return {"proven": engine.loader.settle()}
    engine.inventory.spoil()
    dtype = worker.vllm_config.model_config.dtype
    tensors.recompute(tensors.models_of(worker), engine.inventory.names("derived"), dtype)
    return {"proven": engine.inventory.check()}


def _begin(worker: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """From here on bytes may change under us, so the weights are suspect until commit."""
    engine = _engine(worker)
    answer = engine.agent(worker).call("begin", payload)
    engine.suspect, engine.session, engine.aborted, engine.committed = True, payload["session"], "", None
    return answer


def _commit(worker: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """The engine finished {session, version, digest}. Only this clears `suspect`."""
    engine = _engine(worker)
    if not engine.session or payload["session"] != engine.session:
        raise SessionError(f"commit of session {payload['session']!r} while {engine.session or 'none'!r} is open")
    engine.committed = {key: payload[key] for key in ("session", "version", "digest")}
    engine.suspect, engine.session = False, ""
    return _state(worker, {})


def _abort(worker: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """The session {session, reason} is over without commit. Suspect weights stay suspect."""
    engine = _engine(worker)
    engine.agent(worker).call("abort", payload)  # closes the transport: what is still under way cannot land any more
    engine.session, engine.aborted = "", payload["reason"]
    return _state(worker, {})


def _record(worker: Any, payload: dict[str, Any]) -> dict[str, Any]:
    from weight_sync_integrations.vllm.record import record

    models = tensors.models_of(worker)
    return record(models if payload.get("draft") == "sync" else models[:1], payload, worker.vllm_config)


def _model(worker: Any) -> Any:
    return worker.model_runner.get_model()


def _engine(worker: Any) -> Any:
    from weight_sync_integrations.vllm.transfer import WeightSyncTransferEngine

    engine = worker.weight_transfer_engine
    if not isinstance(engine, WeightSyncTransferEngine):
        found = "none" if engine is None else type(engine).__name__
        raise RolloutError(
            f"the engine's weight-transfer engine is {found}; start vLLM with "
            f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\''
        )
    return engine


def _describe(worker: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """The agent's description plus what only this adapter knows.

    Added keys: aliases {name: name in params}, not_writable {name: reason}, no_loader (why vLLM's own loader cannot be used
    instead, or ""), sizes {axis: size}, model (the HF config as
    loaded), software, layers [first, one past last] of this pipeline stage, internal_dp (bool), state (as `state` answers).
    """
    import torch
    import vllm

    from weight_sync_integrations.vllm import live
    from weight_sync_integrations.vllm.transfer import sizes

    model = _model(worker)
    found = live.inspect(model)
    reply = dict(_engine(worker).agent(worker).call("describe", payload))
    config = worker.vllm_config.model_config.hf_text_config
    parallel = worker.vllm_config.parallel_config
    reply |= {
        "aliases": found.aliases,
        "not_writable": found.not_writable,
        "no_loader": _no_loader(worker),
        "sizes": sizes(model, worker.vllm_config),
        "model": json.loads(config.to_json_string(use_diff=False)),
        "software": {"vllm": vllm.__version__, "torch": torch.__version__, "device": worker.device.type},
        "layers": list(_stage_layers(worker)),
        "drafts": [role for role, _ in tensors.models_of(worker)[1:]],
        "refusals": tensors.refusals(worker),
        "internal_dp": parallel.data_parallel_size > 1 and not parallel.data_parallel_external_lb,
        "state": _state(worker, {}),
    }
    return reply


def _stage_layers(worker: Any) -> tuple[int, int]:
    from vllm.distributed import get_pp_group
    from vllm.distributed.utils import get_pp_indices

    config = worker.vllm_config.model_config.hf_text_config
    stages = get_pp_group()
    return get_pp_indices(config.num_hidden_layers, stages.rank_in_group, stages.world_size)


def _load(worker: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """Load the checkpoint folder payload["path"] with the model's own load_weights, in place.

    Only for models whose parameters all stay as loaded (live.py): then load_weights alone is a complete reload. This is
    the oracle that a sync is compared with, so nothing of ours sits between the files and vLLM's loaders.
    """
    import torch

    from weight_sync_integrations.vllm import live
    from weight_sync_integrations.vllm.record import loadable

    engine = _engine(worker)
    if engine.session:
        raise SessionError(f"load while session {engine.session} is open")
    model = _model(worker)
    found = live.inspect(model)
    if found.not_writable:
        raise BindError("cannot load in place: " + listed(f"{name}: {reason}" for name, reason in found.not_writable.items()))
    was_suspect, engine.suspect, engine.committed = engine.suspect, True, None
    with torch.no_grad(), loadable(model):
        loaded = model.load_weights(_checkpoint(payload["path"]))
    missing = sorted(set(found.tensors) - set(loaded))
    if missing:
        raise BindError(f"the checkpoint {payload['path']} holds nothing for: {listed(missing)}")
    engine.suspect = was_suspect
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return {"loaded": len(loaded)}


def _checkpoint(path: str) -> Any:
    """(name, tensor) of every *.safetensors file in a folder, file after file."""
    from pathlib import Path

    from safetensors import safe_open

    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise BindError(f"no *.safetensors in {path}")
    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                yield name, handle.get_tensor(name)
