"""Our part of an SGLang scheduler process: what this worker holds, and the calls a controller may make to it.

How the controller reaches every worker. SGLang's own fan-out (/weights_checker and the like) sends a request to all
schedulers, but gathers answers inside one tensor-parallel group only: with pipeline parallelism the second stage's are
lost, its reply type holds strings alone, and every request is pickled through the tokenizer and broadcast among ranks.
So each worker opens its own endpoint (endpoint.py) on a free port and announces it as a file in the rendezvous folder
named by the environment; launch.py collects them. This works alike for tp, pp, ep, attention-DP, plain DP and several
engines on one host. An engine over several nodes is started node by node, each with its own folder and a bind address
that the controller can reach.

Which thread runs a call. The scheduler's own, between two steps: a hook behind process_input_requests, which every
event loop of SGLang runs each turn, takes queued calls. So no forward pass is under way while a call reads, digests or
unpacks weights, and `paused` is a fact, not a race. Calls that touch weights are refused unless the engine is quiet.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weight_sync.errors import ConfigError, SessionError
from weight_sync_integrations.sglang.endpoint import WorkerEndpoint
from weight_sync_integrations.sglang.plugin import TOKEN_VARIABLE

if TYPE_CHECKING:
    import torch

RENDEZVOUS_VARIABLE = "WEIGHT_SYNC_RENDEZVOUS"
"""Folder into which each worker writes rank-<n>.json: {"rank", "host", "port", "pid"}."""

BIND_VARIABLE = "WEIGHT_SYNC_BIND"
"""Address the worker endpoints listen on and announce."""

TRANSPORT_VARIABLE = "WEIGHT_SYNC_TRANSPORT"
"""JSON {"name": a registered transport, further keys: its options}; absent when only describe and record are wanted."""

_SIZES = ("tp", "pp", "attn_tp", "attn_dp", "moe_ep", "moe_tp")
_NEED_QUIET = frozenset({"begin", "place", "verify", "end"})
_PAUSED_WAIT = 0.002  # seconds a paused scheduler waits for a call instead of spinning


class Worker:
    """One for each scheduler process, made at the end of Scheduler.__init__."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._coords, self._sizes = _placement()
        self._suspect = False
        self._aborted = ""
        self._session = ""
        self._committed: dict[str, Any] | None = None
        self._agent: Any = None
        self._endpoint = WorkerEndpoint(_variable(TOKEN_VARIABLE), os.environ.get(BIND_VARIABLE, "127.0.0.1"), self._serve_one)
        self._relaxed = scheduler.device == "cpu"

    def start(self) -> None:
        """Open the endpoint and announce it. The file appears complete or not at all."""
        folder = Path(_variable(RENDEZVOUS_VARIABLE))
        self._endpoint.start()
        place = {"host": self._endpoint.host, "port": self._endpoint.port, "pid": os.getpid()}
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            json.dump({"rank": self._coords["rank"], **place}, file)
        os.replace(file.name, folder / f"rank-{self._coords['rank']:05d}.json")

    def serve(self) -> None:
        """Called by the scheduler's thread once each turn of its loop."""
        paused = self._scheduler._engine_paused
        # On a CPU the idle loop would take a core that the trainer on the same machine needs.
        wait = _PAUSED_WAIT if paused or (self._relaxed and self._scheduler.is_fully_idle()) else 0.0
        self._endpoint.run_pending(wait)

    # -- calls -----------------------------------------------------------------------------------------------------

    def _serve_one(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        if method in _NEED_QUIET:
            self._require_quiet(method)
        own = {"state": self.state, "identity": self.identity, "record": self.record, "commit": self.commit}
        own |= {"abort": self.abort, "begin": self.begin, "forget": self.forget}
        if method in own:
            return own[method](payload)
        return self.agent().call(method, payload)

    def agent(self) -> Any:
        """The generic half of a worker (weight_sync.session.target), made at the first call that needs it."""
        if self._agent is None:
            from weight_sync.session.target import TargetAgent

            self._agent = TargetAgent(
                rank=self._coords["rank"],
                host=socket.gethostname(),
                coords=self._coords,
                tensors=self.tensors,
                transport=_open_transport,
            )
        return self._agent

    def tensors(self) -> dict[str, torch.Tensor]:
        """Live parameters and weight buffers by name."""
        return live_tensors(self._models())

    def state(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Where this worker stands. quiet: no forward pass can run until the engine is told to continue."""
        update = getattr(getattr(self._scheduler, "weight_updater", None), "_session", None)
        return {
            "rank": self._coords["rank"],
            "paused": self._scheduler._engine_paused,
            "quiet": self.quiet(),
            "idle": self._scheduler.is_fully_idle(),
            "update_open": update is not None,
            "session": self._session,
            "suspect": self._suspect,
            "aborted": self._aborted,
            "committed": self._committed,
        }

    def identity(self, payload: dict[str, Any]) -> dict[str, Any]:
        """What is served and how it is cut. aliases: other names of tensors that tensors() lists once."""
        from importlib.metadata import version

        return {
            "model": self._model_config(),
            "coords": self._coords,
            "sizes": self._sizes,
            "aliases": live_aliases(self._models()),
            "software": {name: version(name) for name in ("sglang", "torch")},
        }

    def begin(self, payload: dict[str, Any]) -> dict[str, Any]:
        """From here on bytes may change under us, so the weights are suspect until commit()."""
        answer = self.agent().call("begin", payload)
        self._suspect, self._session, self._aborted, self._committed = True, payload["session"], "", None
        return answer

    def commit(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The engine finished {session, version, digest}; only this clears `suspect`."""
        if payload["session"] != self._session:
            raise SessionError(f"commit of session {payload['session']!r} while {self._session or 'none'!r} is open")
        self._committed = {key: payload[key] for key in ("session", "version", "digest")}
        self._suspect, self._session = False, ""
        return self.state({})

    def abort(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The session {session, reason} is over without commit. Suspect weights stay suspect."""
        if self._agent is not None:
            self._agent.call("abort", payload)  # closes the transport: what is still under way cannot land any more
        self._session, self._aborted = "", payload["reason"]
        return self.state({})

    def forget(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The weights were replaced from elsewhere: the last committed version is no longer what is served."""
        self._committed = None
        return self.state({})

    def record(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Dry run of the model's own load_weights. payload: {"tensors": {HF name: {"shape", "dtype"}}}.

        Answers the fields of recorder.Recording. Changes nothing, and is allowed while the engine serves: it runs
        between two steps.
        """
        import dataclasses

        import torch

        from weight_sync_integrations.recorder import record

        specs = {n: (tuple(t["shape"]), getattr(torch, t["dtype"])) for n, t in payload["tensors"].items()}
        model = dict(self._models())["target"]

        def load(weights: Any) -> None:
            # What it derives from parameters (absorbed MLA matrices) is not part of where HF tensors go.
            if hasattr(model, "post_load_weights"):
                model.post_load_weights = lambda *args, **kwargs: None
            model.load_weights(weights)

        return dataclasses.asdict(record(model, specs, load))

    # -- the engine around us --------------------------------------------------------------------------------------

    def quiet(self) -> bool:
        """True when no forward pass can start or be under way.

        Schedulers of a pipeline do not look at the paused flag (0.5.16 to 0.5.23), so with pp only an idle engine is
        quiet; the controller pauses it in mode "abort", which holds new requests back before they reach a scheduler.
        """
        if self._sizes["pp"] == 1 and self._scheduler._engine_paused:
            return True
        return self._scheduler.is_fully_idle()

    def _require_quiet(self, method: str) -> None:
        if not self.quiet():
            raise SessionError(
                f"{method} refused by rollout rank {self._coords['rank']}: the engine is generating; pause it first"
            )
        import torch

        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # an in_place pause may leave the last launched batch running on the GPU

    def _models(self) -> list[tuple[str, torch.nn.Module]]:
        """(role, model) of every model with weights in this process: the target and, if any, drafts."""
        scheduler = self._scheduler
        models = [("target", scheduler.tp_worker.model_runner.model)]
        draft = scheduler.draft_worker
        if draft is None:
            return models
        if hasattr(draft, "weight_update_runners"):
            runners = draft.weight_update_runners()
        else:  # SGLang 0.5.16
            from sglang.srt.managers.scheduler_components.weight_updater import _get_draft_model_runner

            runner = _get_draft_model_runner(draft)
            runners = [] if runner is None else [("draft", runner)]
        return models + [(f"draft{i}" if i else "draft", runner.model) for i, (_, runner) in enumerate(runners)]

    def _model_config(self) -> dict[str, Any]:
        """config.json as the checkpoint has it; transformers' reading of it where the model came from elsewhere."""
        config = self._scheduler.model_config
        file = Path(config.model_path) / "config.json"
        return json.loads(file.read_text()) if file.is_file() else json.loads(config.hf_config.to_json_string())


def live_tensors(models: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, those of drafts prefixed with their role. One memory region has one name."""
    return _walk(models)[0]


def live_aliases(models: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, list[str]]:
    """Other names of the tensors in live_tensors(): tied weights and what a draft shares with its target."""
    return _walk(models)[1]


def _walk(models: Iterable[tuple[str, torch.nn.Module]]) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, list[str]] = {}
    first: dict[tuple[Any, ...], str] = {}
    for role, model in models:
        prefix = "" if role == "target" else f"{role}."
        paths = _paths(model)
        for module, names in paths.items():
            own = [*module._parameters.items()]
            # Buffers that no checkpoint has (rotary tables) are not weights.
            own += [pair for pair in module._buffers.items() if pair[0] not in module._non_persistent_buffers_set]
            for leaf, tensor in own:
                if tensor is None or tensor.numel() == 0:
                    continue
                storage = tensor.untyped_storage()._cdata
                key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
                for path in names:
                    name = prefix + (f"{path}.{leaf}" if path else leaf)
                    known = first.setdefault(key, name)
                    if known == name:
                        tensors[name] = tensor.detach()
                    else:
                        aliases.setdefault(known, []).append(name)
    return tensors, aliases


def _paths(model: torch.nn.Module) -> dict[torch.nn.Module, list[str]]:
    """Every module with the paths by which its parents hold it, in named_modules() order.

    SGLang's layers refer to their neighbours' modules, so walking all paths would take exponentially long.
    """
    first = {module: path for path, module in model.named_modules()}
    paths = {module: [path] for module, path in first.items()}
    for parent, path in first.items():
        for name, child in parent._modules.items():
            here = f"{path}.{name}" if path else name
            if child is not None and here != first[child]:
                paths[child].append(here)
    return paths


def _placement() -> tuple[dict[str, int], dict[str, int]]:
    """This process's coordinates and the engine's sizes. rank: tp fastest, then pp, then plain data parallelism."""
    from sglang.srt.runtime_context import get_parallel, get_server_args

    parallel, args = get_parallel(), get_server_args()
    sizes = {name: int(getattr(parallel, f"{name}_size")) for name in _SIZES}
    coords = {name: int(getattr(parallel, f"{name}_rank")) for name in _SIZES}
    # Attention-DP schedulers carry a dp_rank too, but they are tp ranks of one world and counted there.
    sizes["dp"] = 1 if sizes["attn_dp"] > 1 else int(args.dp_size)
    coords["dp"] = 0 if sizes["dp"] == 1 else int(parallel.dp_rank)
    coords["rank"] = (coords["dp"] * sizes["pp"] + coords["pp"]) * sizes["tp"] + coords["tp"]
    return coords, sizes


def _open_transport() -> Any:
    text = os.environ.get(TRANSPORT_VARIABLE)
    if not text:
        raise ConfigError(f"this SGLang server was started without {TRANSPORT_VARIABLE}: give ServerSpec.transport")
    from weight_sync.transport.registry import create

    options = json.loads(text)
    return create(options.pop("name"), **options)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"the environment of this SGLang server lacks {name}; launch.environment() sets it")
    return value
