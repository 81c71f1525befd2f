"""The controller of a verl job's syncs: one WeightSync, in the process of actor rank 0, kept from sync to sync.

connect() is called by the backend's build_topology through Ray, sync() by rank 0's update_weights. Engines are verl's own
servers (servers.py), reached over HTTP; trainer ranks through actor.VerlRanks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from weight_sync.config import failure_policy
from weight_sync.errors import BindError, ConfigError, PlanError, RolloutError, listed
from weight_sync.ids import Deadline
from weight_sync.observe.metrics import metrics as flat
from weight_sync.observe.records import SyncRecord
from weight_sync.session.calls import together
from weight_sync.session.connect import Connection
from weight_sync.session.session import Timeouts, WeightSync
from weight_sync.session.verify import Level
from weight_sync_integrations.job import pause_mode, resolve_early
from weight_sync_integrations.ray.engine import connect_engine
from weight_sync_integrations.verl.actor import ActorSide, VerlRanks, side
from weight_sync_integrations.verl.check import QUANTISED
from weight_sync_integrations.verl.job import job_for, served_config
from weight_sync_integrations.verl.servers import tell_step
from weight_sync_integrations.watch import LastRecord

log = logging.getLogger("weight_sync")

T = TypeVar("T")
Replicas = Mapping[int, tuple[Mapping[str, Any], Any]]
"""By verl's number of the replica: where its server is (servers.address), and the Ray actor of one of its rollout workers."""


class Controller:
    """See the module docstring. One call at a time; verl's manager makes no others."""

    def __init__(self, own: ActorSide) -> None:
        self._own = own
        self._settings = own.settings
        self._ranks = VerlRanks(own, [])
        self._ids: list[str] = []
        self._watch = LastRecord(self._settings.sync.observe.limit)
        self._engines: dict[str, Any] = {}
        self._servers: dict[str, Mapping[str, Any]] = {}
        self._tell: list[tuple[Any, str, int]] = []
        self._sync: WeightSync | None = None
        self._connection: Connection | None = None
        self._trainer_epochs: dict[int, int] = {}
        self._down = ""
        self._committed = False

    def of(self, own: ActorSide) -> bool:
        return self._own is own

    @property
    def seconds(self) -> float:
        """For connect(): looking for what is stale, and connecting, which watches its own limit."""
        return 2 * self._settings.sync.timeouts.connect

    def connect(self, handles: Mapping[str, Any], replicas: Replicas) -> str:
        """Plan and bind, where nothing is bound or something has moved. Returns "" or why the job steps down the ladder.

        handles: Ray actors of all actor ranks in order, by Ray's id. replicas: those there are now. Raises what
        WeightSync.connect() raises where no step is allowed: no fallback was named, or a version was committed shard to shard.
        """
        if self._down:
            return self._down
        try:
            self._connect(handles, replicas)
        except (BindError, ConfigError, PlanError) as error:
            if not self.may_step_down:
                raise
            self._down = f"{type(error).__name__}: {error}"
        return self._down

    @property
    def may_step_down(self) -> bool:
        return self._settings.fallback is not None and not self._committed

    def _connect(self, handles: Mapping[str, Any], replicas: Replicas) -> None:
        moved, self._ids = list(handles) != self._ids, list(handles)
        self._ranks.handles = list(handles.values())
        changed = self._members(replicas)
        if self._sync is None:
            self._sync = self._session()
        if self._connection is not None and not moved and not changed:
            stale = self._stale(self._connection)
            if not stale:
                return
            log.warning("addresses are stale and are published anew: %s", listed(stale))
        self._connection = None
        self._connection = self._sync.connect()
        self._trainer_epochs = self._epochs()

    def _session(self) -> WeightSync:
        conf = self._settings.sync
        built = None
        if self._settings.trainer["strategy"] == "megatron":
            from weight_sync_integrations.verl import megatron

            built = megatron.built(self._own.engine)
        job = job_for(self._settings, self._ranks.world, len(self._engines), built)
        model = self._own.engine.model_config.hf_config.to_dict()
        if published := model.get("quantization_config"):
            raise ConfigError(f"the model's config has quantization_config {published.get('quant_method')}: {QUANTISED}")
        engines = list(self._engines.values())
        return WeightSync(
            self._ranks,
            engines,
            resolve_early(job, served_config(model, job.rollout.dtype or "bfloat16")),
            pause=pause_mode(job, engines),
            timeouts=Timeouts(**asdict(conf.timeouts)),
            observer=self._watch,
            failure=failure_policy(conf),
            level=Level(conf.verify.level.value),
        )

    def _members(self, replicas: Replicas) -> bool:
        """Take in replicas that verl has added or restarted, let go those it has removed. True when any changed."""
        kind, conf = self._settings.rollout["name"], self._settings.sync
        wanted = {server["name"]: server for server, _ in replicas.values()}
        self._tell = [(handle, kind, replica) for replica, (_, handle) in replicas.items()]
        gone = sorted(set(self._engines) - set(wanted))
        fresh = [name for name, server in wanted.items() if self._servers.get(name) != server]
        for name in fresh:
            beside = {"draft": conf.draft.value, "declare": dict(conf.declare)}
            engine = connect_engine(kind, wanted[name], wanted[name]["token"], **beside)
            if self._sync is not None:
                if name in self._engines:
                    self._sync.replace(name, engine, gone=True)
                else:
                    self._sync.join(engine)
            if name in self._engines:
                self._engines[name].close()
            self._engines[name], self._servers[name] = engine, wanted[name]
        for name in gone:
            if self._sync is not None:
                self._sync.leave(name, gone=True)
            self._engines.pop(name).close()
            del self._servers[name]
        return bool(gone or fresh)

    def _stale(self, connection: Connection) -> list[str]:
        """Who has moved since the connection was made: sleep that discarded weights, a restart, parameters built anew."""
        assert self._sync is not None
        deadline = Deadline.after(self._settings.sync.timeouts.connect)
        found = [
            f"{replica.name} worker {rank.rank}"
            for replica, epochs in zip((r for r in self._sync.replicas if not r.out), connection.epochs, strict=True)
            for rank in replica.engine.describe(deadline).ranks
            if epochs[rank.rank] != rank.epoch
        ]
        now = self._epochs()
        return found + [f"trainer rank {rank}" for rank in now if now[rank] != self._trainer_epochs.get(rank)]

    def _epochs(self) -> dict[int, int]:
        return self._ranks.epochs(Deadline.after(self._settings.sync.timeouts.connect))

    def sync(self, global_steps: int | None) -> dict[str, Any]:
        """One sync, and verl told of its step once it is committed. Returns metrics. After an error nothing counts as bound."""
        import ray

        if self._sync is None or self._connection is None:
            raise RolloutError("nothing is bound: verl did not build the topology before update_weights")
        last = self._sync.version
        version = last + 1 if global_steps is None or global_steps <= last else int(global_steps)
        if global_steps is not None and version != global_steps:
            log.warning("step %d is not above the committed version %d: this sync is version %d", global_steps, last, version)
        try:
            self._sync.sync(version)
        except BaseException:
            self._connection = None
            raise
        self._committed = True
        if global_steps is not None:  # from here on verl marks what is generated as of this step
            seconds = self._settings.sync.timeouts.abort
            told = [worker.__ray_call__.remote(tell_step, kind, n, global_steps, seconds) for worker, kind, n in self._tell]
            ray.get(told, timeout=seconds)
        assert self._watch.last is not None
        return verl_metrics(self._watch.last)


def verl_metrics(record: SyncRecord) -> dict[str, Any]:
    """What verl's trainer logs beside its own timing_s/update_weights (which also spans abort and resume).

    Slowest rank and skew are of all actor ranks: they are reduced before verl merges the ranks' dicts by overwriting.
    """
    found: dict[str, Any] = flat(record, "verl")
    del found["timing_s/update_weights"]
    found["checkpoint_engine/seconds"] = record.seconds
    found["weight_sync/stepped_down"] = 0
    if record.rank_stats is not None:
        found["weight_sync/rank_seconds_slowest"] = int(record.rank_stats.slowest.rpartition(" ")[2])
    return found


_controller: Controller | None = None


def connect(worker: Any, handles: Mapping[str, Any], replicas: Replicas, refused: Sequence[str]) -> str:
    """Controller.connect, in this process, which is actor rank 0's (Ray's __ray_call__).

    refused: actor ranks that cannot publish their parameters, with the reason; this rank may have no side at all then.
    """
    global _controller
    if refused:
        from weight_sync_integrations.verl.backend import worker_engine

        lower = _controller.may_step_down if _controller else worker_engine(worker).settings.fallback is not None
        if not lower:
            raise BindError(f"{listed(refused, 4)}. engine_kwargs.weight_sync.fallback names a verl backend to step down to")
        return listed(refused, 4)
    if _controller is None or not _controller.of(side()):  # a new training engine has another side
        _controller = Controller(side())
    controller = _controller
    return _in_thread(lambda: controller.connect(handles, replicas), controller.seconds)


def sync(global_steps: int | None) -> Mapping[str, Any]:
    if _controller is None:
        raise RolloutError("this process is not the controller's: verl did not build the topology before update_weights")
    return _controller.sync(global_steps)


def _in_thread(call: Callable[[], T], seconds: float) -> T:
    """Ray forbids waiting for other actors on an async actor's own thread; on another it is allowed."""
    return together({"connect": call}, Deadline.after(seconds))["connect"]
