"""The updater that miles's (and slime's) trainer actors hold: their contract, our session.

miles's contract, called on every rank of the trainer at once:

    __init__(args, model, weights_getter, *, model_name, quantization_config, is_lora)
    connect_rollout_engines(engines, lock, engine_gpu_counts=, engine_gpu_offsets=)    engines came, went or were replaced
    update_weights()            returns when every engine serves the trainer's weights
    weight_version              of the last update; engines report the same number
    is_rollout_engines_fresh(), mark_engine_connection_stale(), pop_metrics()          the main branch and, in part, slime
    disconnect_rollout_engines()                                                       slime

The controller is in rank 0 (spmd.py). What miles does with all_gather, a CPU replica of the engine and a pause without a way
back is one WeightSync here: every rank's live parameters are written into the engines' live parameters by plan, and only
verified engines are resumed. After an error every rank raises, the engines of the failed sync stay paused and weight_version
stays; the next update_weights() brings all of them back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from weight_sync.config import failure_policy
from weight_sync.errors import BindError, listed
from weight_sync.ids import Deadline
from weight_sync.observe.metrics import metrics
from weight_sync.session.session import Timeouts, WeightSync
from weight_sync.session.source import SourceAgent
from weight_sync.session.verify import Level
from weight_sync.transport import registry
from weight_sync_integrations.job import resolve_early
from weight_sync_integrations.miles import engines as reached
from weight_sync_integrations.miles.job import block_of, first_level, hf_config_of, job_of, pause_choice, refuse
from weight_sync_integrations.spmd import Ranks
from weight_sync_integrations.watch import LastRecord

_log = logging.getLogger("weight_sync")

_TIMERS = {
    "perf/update_weights_implementation_time": "update_weights_implementation",
    "perf/finalize_and_resume_engines_time": "finalize_and_resume_engines",
}
"""miles's own timers inside an update, by the key under which it logs them. update_weights itself is timed by the actor."""


class Updater:
    """One for each trainer rank. See the module docstring. latest: the one that was made last in this process."""

    latest: ClassVar[Updater | None] = None

    def __init__(
        self,
        args: Any,
        model: Any,
        weights_getter: Callable[[], Mapping[str, Any]] | None = None,
        *,
        model_name: str = "",
        quantization_config: Mapping[str, Any] | None = None,
        is_lora: bool = False,
    ) -> None:
        """A collective. weights_getter, model_name and quantization_config are not used: nothing is converted here.

        Raises ConfigError for what a sync cannot do, BindError for parameters that cannot be read in place.
        """
        import torch.distributed as dist

        refuse(args, is_lora=is_lora)
        self.args = args
        self.weight_version = 0
        self.rollout_engines: Sequence[Any] | None = None
        self._stale = False
        self._conf = block_of(args)
        self._metrics: dict[str, float] = {}
        source = self._source(model)
        transport = {"name": self._conf.transport.name, **self._conf.transport.options}
        self._transport = transport
        options = {key: value for key, value in transport.items() if key != "name"}
        agent = SourceAgent(source, lambda: registry.create(transport["name"], **options))
        self._ranks = Ranks(dist.get_rank(), dist.get_world_size(), agent.call, _node_address(), _gather)
        self._layers = self._pipeline(source)
        self._watch = LastRecord(self._conf.observe.limit)
        self._sync: WeightSync | None = None
        self._members: dict[str, Any] = {}
        Updater.latest = self

    def _source(self, model: Any) -> Any:
        from weight_sync_integrations.megatron.source import MegatronSource

        order = "tp-cp-ep-pp-dp" if getattr(self.args, "use_tp_pp_dp_mapping", False) else "tp-cp-ep-dp-pp"
        # No optimizer: miles calls update_weights() between two train() of the same actor, never beside one.
        return MegatronSource(model, None, rank_order=order)

    def _pipeline(self, source: Any) -> list[list[int]]:
        """Decoder layers of each chunk, for each pipeline rank, as they are built."""
        told = _gather((source.coords()["pp"], [count for _, count in source.layers()]))
        by_stage = dict(told)
        return [by_stage[stage] for stage in sorted(by_stage)]

    # -- the contract ----------------------------------------------------------------------------------------------

    def is_rollout_engines_fresh(self) -> bool:
        return self.rollout_engines is not None and not self._stale

    def mark_engine_connection_stale(self) -> None:
        """The next connect_rollout_engines() begins from nothing: another controller may have spoken to the engines."""
        self._stale = True

    def connect_rollout_engines(
        self,
        rollout_engines: Sequence[Any],
        rollout_engine_lock: Any,
        engine_gpu_counts: Sequence[int] | None = None,
        engine_gpu_offsets: Sequence[int] | None = None,
        engine_parallel_configs: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Take note of the engines there are now. Nobody is spoken to: the next update_weights() compares them with those it
        knew, and joins, leaves or replaces before it pauses anything. The lock guards NCCL broadcasts; there are none.

        Raises BindError for engines of different sizes.
        """
        here = [engine for engine in rollout_engines if engine is not None]  # None: an engine that died and was not restarted
        if not here:
            raise BindError("connect_rollout_engines: no engine is alive")
        if engine_gpu_counts is not None and len(set(engine_gpu_counts)) > 1:
            raise BindError(f"engines of different sizes ({listed(engine_gpu_counts)} GPUs) cannot be synced by one plan")
        self.rollout_engines, self.rollout_engine_lock = here, rollout_engine_lock
        if self._stale:
            self._forget()
        self._stale = False

    def disconnect_rollout_engines(self) -> None:
        self._forget()
        self.rollout_engines = None

    def update_weights(self) -> None:
        """A collective. Raises the session's error on rank 0, SessionError with its words on the others."""
        if self.rollout_engines is None:
            raise BindError("update_weights() before connect_rollout_engines()")
        timeouts = self._conf.timeouts
        if self._ranks.rank == 0:
            with self._ranks.leading(timeouts.abort) as group:
                group.result = self._lead(self.weight_version + 1)
            result = group.result
        else:
            attempts, abort = self._conf.failure.attempts, timeouts.abort
            # As long as rank 0 may take: plan and bind, and every attempt with its fence.
            seconds = 2 * timeouts.connect + attempts * (timeouts.connect + timeouts.sync + abort) + abort
            result = self._ranks.follow(Deadline.after(seconds))
        self.weight_version = int(result["version"])
        self._metrics = dict(result["metrics"])
        self._tell_timers(self._metrics)

    def pop_metrics(self) -> dict[str, float]:
        """What the last update measured, once: weight_sync/*. The same on every rank, for miles decides which one logs."""
        found, self._metrics = self._metrics, {}
        return {key: value for key, value in found.items() if key.startswith("weight_sync/")}

    # -- rank 0 ----------------------------------------------------------------------------------------------------

    def _lead(self, version: int) -> dict[str, Any]:
        sync = self._connected()
        level = first_level(self.args, self._conf) if sync.version < 0 else self._conf.verify.level
        sync.sync(version, level=Level(level.value))
        record = self._watch.last
        assert record is not None
        return {"version": sync.version, "metrics": metrics(record, "miles")}

    def _connected(self) -> WeightSync:
        """The session over the engines that miles has now. Raises before anything is paused, and leaves what it was."""
        assert self.rollout_engines is not None
        deadline = Deadline.after(self._conf.timeouts.connect)
        wanted = {reached.actor_id(handle): handle for handle in self.rollout_engines}
        new = [name for name in wanted if name not in self._members]
        beside = {"draft": self._conf.draft.value, "declare": dict(self._conf.declare)}
        engines = reached.open_engines([wanted[name] for name in new], self._transport, deadline, **beside)
        opened = dict(zip(new, engines, strict=True))
        try:
            if self._sync is None:
                self._sync = self._begin(engines, deadline)
                self._members = opened
                return self._sync
            for name in [name for name in self._members if name not in wanted]:
                engine = self._members[name]
                self._sync.leave(engine.name, gone=True)  # miles took it out because it does not answer
                del self._members[name]
                engine.close()
                _log.warning("engine %s has left: miles does not list it any more", engine.name)
            for name, engine in opened.items():
                self._sync.join(engine)
                self._members[name] = engine
                _log.warning("engine %s has joined; it serves nothing until this update is committed", engine.name)
        except BaseException:
            for name, engine in opened.items():
                if name not in self._members:
                    engine.close()
            raise
        return self._sync

    def _begin(self, engines: list[Any], deadline: Deadline) -> WeightSync:
        _, rollout = reached.sizes_of(engines[0], deadline)
        job = job_of(self.args, self._conf, self._ranks.world, len(engines), rollout, self._layers)
        pause: Any = pause_choice(self.args, self._conf)
        return WeightSync(
            self._ranks,
            engines,
            resolve_early(job, hf_config_of(self.args)),
            pause=pause,
            timeouts=Timeouts(**asdict(self._conf.timeouts)),
            observer=self._watch,
            failure=failure_policy(self._conf),
            level=Level(self._conf.verify.level.value),
        )

    def _forget(self) -> None:
        for engine in self._members.values():
            engine.close()
        self._sync, self._members = None, {}

    def _tell_timers(self, measured: Mapping[str, float]) -> None:
        """On every rank, as miles's own `timer` blocks would: it logs those of one rank with the next train step."""
        timer = _timer()
        for key, name in _TIMERS.items():
            timer.add(name, measured[key])


class FsdpUpdater(Updater):
    """For the FSDP actor, which makes its updater of (args, model)."""

    def _source(self, model: Any) -> Any:
        from weight_sync_integrations.fsdp.source import FsdpSource

        return FsdpSource(model, None)

    def _pipeline(self, source: Any) -> list[list[int]]:
        return [[0]]


_TIMER_MODULES = ("miles.utils.timer", "slime.observability.timer")


def _timer() -> Any:
    """The Timer of the framework that this process runs: its actor has imported it."""
    import sys

    return next(sys.modules[name] for name in _TIMER_MODULES if name in sys.modules).Timer()


def _node_address() -> str:
    import ray

    return ray.util.get_node_ip_address()


def _gather(value: Any) -> list[Any]:
    """all_gather_object over a gloo group: miles's own where it made one (the default group may be NCCL, which has no CPU)."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=_gloo())
    return found


def _gloo() -> Any:
    import sys

    for name in ("miles", "slime"):
        module = sys.modules.get(f"{name}.utils.distributed_utils")
        if module is not None and getattr(module, "GLOO_GROUP", None) is not None:
            return module.get_gloo_group()
    return None
