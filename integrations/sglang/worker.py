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
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weight_sync.errors import BindError, ConfigError, SessionError, listed
from weight_sync_integrations.inventory import Inventory, Policy, plain
from weight_sync_integrations.sglang import tensors as known
from weight_sync_integrations.sglang.endpoint import WorkerEndpoint
from weight_sync_integrations.sglang.settings import BIND_VARIABLE as BIND_VARIABLE
from weight_sync_integrations.sglang.settings import RENDEZVOUS_VARIABLE as RENDEZVOUS_VARIABLE
from weight_sync_integrations.sglang.settings import TRANSPORT_VARIABLE as TRANSPORT_VARIABLE
from weight_sync_integrations.sglang.settings import Settings, from_environment

if TYPE_CHECKING:
    import torch

_SIZES = ("tp", "pp", "attn_tp", "attn_dp", "moe_ep", "moe_tp")
_NEED_QUIET = frozenset(
    {"begin", "place", "patch", "pull", "verify", "feed", "snapshot", "scramble", "compare", "end", "settle"}
)
_PAUSED_WAIT = 0.002  # seconds a paused scheduler waits for a call instead of spinning


class Worker:
    """One for each scheduler process, made at the end of Scheduler.__init__ (of a server that is marked: see settings.py)."""

    def __init__(self, scheduler: Any, settings: Settings | None = None) -> None:
        """settings: those of the environment by default."""
        self._scheduler = scheduler
        self._settings = settings or from_environment()
        self._transport = None if self._settings.transport is None else dict(self._settings.transport)
        self._coords, self._sizes = _placement(scheduler)
        self._suspect = False
        self._aborted = ""
        self._session = ""
        self._committed: dict[str, Any] | None = None
        self._agent: Any = None
        self._inventory: Inventory | None = None
        self._planned: frozenset[str] | None = None
        self._loader: Any = None
        self._endpoint = WorkerEndpoint(self._settings.token, self._settings.bind, self._serve_one)
        self._relaxed = scheduler.device == "cpu"
        self._captured = self._addresses() if known.captures(scheduler) else {}

    def start(self) -> None:
        """Open the endpoint and announce it. The file appears complete or not at all."""
        self._endpoint.start()
        self._settings.announce(self._coords["rank"], self._endpoint.host, self._endpoint.port)

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
        own |= {"abort": self.abort, "begin": self.begin, "forget": self.forget, "bind": self.bind, "end": self.end}
        own |= {"settle": self.settle, "inventory": self.inventory, "transport": self.transport}
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
                transport=self._open_transport,
                loader=self._own_loader,
            )
        return self._agent

    def _own_loader(self) -> Any:
        """SGLang's own loader, for a new binding (loader.py)."""
        from weight_sync_integrations.sglang.loader import SglangLoader

        model, where = known.models_of(self._scheduler)[0][1], f"rollout rank {self._coords['rank']}"
        quantization = self._model_config().get("quantization_config")
        self._loader = SglangLoader(model, where, quantization, known.captures(self._scheduler))
        return self._loader

    def transport(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The controller says {"transport": {"name", options}} to a worker whose server was started without one."""
        self._transport = dict(payload["transport"])
        return {}

    def _open_transport(self) -> Any:
        if self._transport is None:
            raise ConfigError(
                f"this SGLang server was started without {TRANSPORT_VARIABLE} (ServerSpec.transport), and nobody said since "
                "which transport to open"
            )
        from weight_sync.transport.registry import create

        options = dict(self._transport)
        return create(options.pop("name"), **options)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Live parameters and weight buffers by name: those of the plan once one is bound, else all of the target's."""
        if self._planned is not None:
            return {
                name: t for name, t in known.live_tensors(known.models_of(self._scheduler)).items() if name in self._planned
            }
        return known.live_tensors(known.models_of(self._scheduler)[:1])

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
            "aliases": known.live_aliases(known.models_of(self._scheduler)),
            "drafts": [role for role, _ in known.models_of(self._scheduler)[1:]],
            "refusals": known.refusals(self._scheduler),
            "not_writable": known.not_writable(self._scheduler),
            "no_loader": known.no_loader(self._scheduler),
            "keeps_prefixes": known.keeps_prefixes(self._scheduler),
            "software": {name: version(name) for name in ("sglang", "torch")},
        }

    def inventory(self, payload: dict[str, Any]) -> dict[str, Any]:
        """{"expected": names that the plan writes, "draft", "declare", "update_routes"} -> {"entries": Entry as a dict}.

        expected may be left out: then every parameter and persistent buffer of the target counts as planned.
        """
        return {"entries": [plain(entry) for entry in self._judged(payload).entries]}

    def _judged(self, payload: dict[str, Any]) -> Inventory:
        models = known.models_of(self._scheduler)
        expected = payload.get("expected")
        live = known.live_tensors(models if expected is not None else models[:1])
        planned = live.values() if expected is None else [live[name] for name in expected if name in live]
        policy = Policy(
            known.RULES,
            payload.get("draft", "refuse"),
            payload.get("declare", {}),
            known.RECOMPUTES if payload.get("update_routes", True) else None,
            known.captures(self._scheduler),
        )
        where = f"rollout rank {self._coords['rank']}"
        return Inventory(lambda: known.find_all(known.models_of(self._scheduler)), planned, policy, where)

    def bind(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The agent's bind, once every tensor is accounted for. payload: a target_table, and what inventory() takes."""
        where = f"rollout rank {self._coords['rank']}"
        if reasons := known.refusals(self._scheduler):
            raise BindError(f"{where}: {'; '.join(reasons)}")
        if payload.get("loader"):
            return self._bind_loader(payload)
        stuck = known.not_writable(self._scheduler)
        if planned := sorted(stuck.keys() & set(payload["expected"])):
            raise BindError(f"{where}: nothing may be written into {listed(f'{name}: {stuck[name]}' for name in planned)}")
        inventory = self._judged(payload)
        if set(payload["expected"]) <= set(known.live_tensors(known.models_of(self._scheduler))):
            inventory.require_all()  # else the plan is of another layout, and the agent says so better
        before = self._planned
        self._planned = frozenset(payload["expected"])
        try:
            answer = self.agent().call("bind", payload)
        except BaseException:
            self._planned = before
            raise
        inventory.seal()
        self._inventory, self._loader = inventory, None
        return answer

    def _bind_loader(self, payload: dict[str, Any]) -> dict[str, Any]:
        """bind, where HF tensors are put beside the weights for SGLang's own loader, which then accounts for every tensor."""
        if reason := known.no_loader(self._scheduler):
            raise BindError(f"rollout rank {self._coords['rank']}: SGLang's own loader cannot take the weights: {reason}")
        now = self._addresses() if self._captured else {}
        if moved := sorted(n for n in now.keys() | self._captured.keys() if now.get(n) != self._captured.get(n)):
            raise BindError(
                f"rollout rank {self._coords['rank']}: {listed(moved)}: no longer where CUDA graphs were captured when the "
                "server started (an update of SGLang's own has post-processed them once more?); restart this server"
            )
        before, self._planned = self._planned, None
        try:
            answer = self.agent().call("bind", payload)  # makes self._loader, unless this very plan is bound already
        except BaseException:
            self._planned = before
            raise
        self._inventory = self._loader.account(payload.get("declare", {}))
        return answer

    def _addresses(self) -> dict[str, int]:
        """Of the target's parameters and persistent buffers."""
        return {n: t.data_ptr() for n, t in known.live_tensors(known.models_of(self._scheduler)[:1]).items()}

    def end(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The session's bytes are verified: derived tensors are spoilt, so that the engine has to make them anew.

        Answers also how many there are: {"derived"}. What SGLang's own loader has loaded is complete, and stays as it is.
        """
        answer = self.agent().call("end", payload)
        if self._loader is not None:
            return answer | {"derived": 0}
        self._bound_inventory().spoil()
        return answer | {"derived": len(self._bound_inventory().names("derived"))}

    def settle(self, payload: dict[str, Any]) -> dict[str, Any]:
        """After the engine's post-processing, before the commit: {"proven": {class: tensors}}. VerifyError when not right."""
        if payload["session"] != self._session:
            raise SessionError(f"settle of session {payload['session']!r} while {self._session or 'none'!r} is open")
        inventory = self._bound_inventory()
        return {"proven": inventory.check() if self._loader is None else self._loader.settle()}

    def _bound_inventory(self) -> Inventory:
        if self._inventory is None:
            raise SessionError(f"rollout rank {self._coords['rank']}: no plan is bound")
        return self._inventory

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
        """The session {session, reason} is over without commit. Suspect weights stay suspect.

        Answers also {"in_update"}: a session was open here whose weights were written within an update of SGLang's.
        """
        in_update = bool(self._session) and self._loader is None
        if self._agent is not None:
            self._agent.call("abort", payload)  # closes the transport: what is still under way cannot land any more
        self._session, self._aborted = "", payload["reason"]
        return self.state({}) | {"in_update": in_update}

    def forget(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The weights were replaced from elsewhere: the last committed version is no longer what is served."""
        self._committed = None
        return self.state({})

    def record(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Dry run of the models' own load_weights. payload: {"tensors": {HF name: {"shape", "dtype"}}, "draft"}.

        Answers the fields of recorder.Recording; drafts are in it where they are synced (draft "sync"). Where parameters did
        not stay as loaded, it is a load into what they were (loader.py). Changes nothing, and is allowed while the engine
        serves: it runs between two steps.
        """
        import dataclasses

        import torch

        from weight_sync_integrations.recorder_roles import record_roles
        from weight_sync_integrations.sglang import live

        specs = {n: (tuple(t["shape"]), getattr(torch, t["dtype"])) for n, t in payload["tensors"].items()}
        models = known.models_of(self._scheduler)[: None if payload.get("draft") == "sync" else 1]
        if any(live.not_writable(model) for _, model in models):
            from weight_sync_integrations.loader import Published
            from weight_sync_integrations.sglang.loader import rehearse

            if reason := known.no_loader(self._scheduler):
                raise BindError(f"rollout rank {self._coords['rank']}: loading cannot be recorded: {reason}")
            published = Published(self._model_config().get("quantization_config"))
            return dataclasses.asdict(rehearse(models[0][1], specs, published))
        return dataclasses.asdict(record_roles(models, specs, known.loader))

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

    def _model_config(self) -> dict[str, Any]:
        """config.json as the checkpoint has it; transformers' reading of it where the model came from elsewhere."""
        config = self._scheduler.model_config
        file = Path(config.model_path) / "config.json"
        return json.loads(file.read_text()) if file.is_file() else json.loads(config.hf_config.to_json_string())


def _placement(scheduler: Any) -> tuple[dict[str, int], dict[str, int]]:
    """This process's coordinates and the engine's sizes. rank: tp fastest, then pp, then plain data parallelism."""
    try:
        from sglang.srt.runtime_context import get_parallel, get_server_args
    except ImportError:  # before 0.5.16; the fork inside miles-rl 0.0.2
        return _placement_of(scheduler)
    parallel, args = get_parallel(), get_server_args()
    sizes = {name: int(getattr(parallel, f"{name}_size")) for name in _SIZES}
    coords = {name: int(getattr(parallel, f"{name}_rank")) for name in _SIZES}
    # Attention-DP schedulers carry a dp_rank too, but they are tp ranks of one world and counted there.
    sizes["dp"] = 1 if sizes["attn_dp"] > 1 else int(args.dp_size)
    coords["dp"] = 0 if sizes["dp"] == 1 else int(parallel.dp_rank)
    coords["rank"] = (coords["dp"] * sizes["pp"] + coords["pp"]) * sizes["tp"] + coords["tp"]
    return coords, sizes


def _placement_of(scheduler: Any) -> tuple[dict[str, int], dict[str, int]]:
    """The same from the server's arguments and the scheduler's own ranks."""
    args = scheduler.server_args
    tp, pp, ep = int(args.tp_size), int(args.pp_size), int(args.ep_size)
    attn_dp = int(args.dp_size) if args.enable_dp_attention else 1
    sizes = {"tp": tp, "pp": pp, "attn_tp": tp // attn_dp, "attn_dp": attn_dp, "moe_ep": ep, "moe_tp": tp // ep}
    rank = int(scheduler.tp_rank)
    coords = {"tp": rank, "pp": int(scheduler.pp_rank), "attn_tp": rank % sizes["attn_tp"], "attn_dp": rank // sizes["attn_tp"]}
    coords |= {"moe_ep": rank // sizes["moe_tp"], "moe_tp": rank % sizes["moe_tp"]}
    sizes["dp"] = 1 if attn_dp > 1 else int(args.dp_size)
    coords["dp"] = 0 if sizes["dp"] == 1 else int(scheduler.dp_rank)
    coords["rank"] = (coords["dp"] * pp + coords["pp"]) * tp + coords["tp"]
    return coords, sizes
