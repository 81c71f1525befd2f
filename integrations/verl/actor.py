"""The trainer's side inside one actor rank: verl's training engine as a TrainerSource, its SourceAgent, and how rank 0 reaches
the agents of all ranks (a TrainerGroup over Ray).

One process is one actor rank, so what it holds is kept here, at module level: it outlives single syncs and is found by calls
that come through Ray without going through verl.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from weight_sync.errors import BindError, ConfigError, SessionError
from weight_sync.ids import Deadline
from weight_sync.session.calls import together
from weight_sync.session.memory import describe, epoch_of
from weight_sync.session.places import Places
from weight_sync.session.source import SourceAgent
from weight_sync.transport import registry
from weight_sync_integrations.ray.trainer import gather
from weight_sync_integrations.verl.job import Settings

V = TypeVar("V")


class ActorSide:
    """engine: verl's training engine (FSDPEngine or MegatronEngine) of this rank."""

    def __init__(self, engine: Any, settings: Settings) -> None:
        """Raises BindError where the parameters cannot be read in place."""
        self.engine, self.settings = engine, settings
        self.source = source_of(engine, settings)
        options = dict(settings.transport)
        name = options.pop("name")
        # verl's own export of whole tensors; FSDP1's moves the model away from where it is bound.
        export = None if settings.trainer["strategy"] == "fsdp" else lambda: engine.get_per_tensor_param()[0]
        self.agent = SourceAgent(self.source, lambda: registry.create(name, **options), export)
        self._device = next((t.device for t in self.source.tensors().values()), None)
        self._seen: tuple[Places, int] | None = None

    @property
    def rank(self) -> int:
        return self.agent.rank

    def call(self, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """SourceAgent.call, on whatever thread it comes."""
        import torch

        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # CUDA's current device belongs to a thread
        return self.agent.call(method, payload)

    def epoch(self) -> int:
        """RankDescription's, without the rest of a description: before every sync that would cost more than the sync itself
        (0.7 s on a CPU for the 19,000 checkpoint tensors of Qwen3-30B-A3B). The one before, where nothing has moved since."""
        held = {name: tensor for name, tensor in self.source.tensors().items() if tensor.numel()}
        if self._seen is None or not self._seen[0].same(held):
            self._seen = Places(held), epoch_of(describe(held, f"trainer rank {self.rank}")[1])
        return self._seen[1]


_side: ActorSide | None = None
_lock = threading.Lock()


def open_side(engine: Any, settings: Settings) -> ActorSide:
    """This process's side, made at the first call; made anew when verl has built another training engine."""
    global _side
    with _lock:
        if _side is None or _side.engine is not engine:
            _side = ActorSide(engine, settings)
        return _side


def side() -> ActorSide:
    if _side is None:
        raise SessionError("this process is no actor rank, or verl has not prepared its checkpoint engine yet")
    return _side


def call_side(worker: Any, method: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """What other processes run here (Ray's __ray_call__, whose first argument is the actor's own object)."""
    return side().call(method, payload)


def epoch_here(worker: Any) -> int:
    """As call_side, for ActorSide.epoch."""
    return side().epoch()


def source_of(engine: Any, settings: Settings) -> Any:
    """The TrainerSource over a training engine.

    Raises ConfigError for a kind of engine that publishes no shards; BindError for offloaded parameters, adapters, and
    whatever the adapters refuse.
    """
    strategy = settings.trainer["strategy"]
    if getattr(engine, "is_param_offload_enabled", False):
        raise BindError(f"actor strategy {strategy}: parameters are offloaded between steps; set param_offload=False")
    if strategy == "fsdp2":
        from weight_sync_integrations.fsdp.source import FsdpSource

        return FsdpSource(engine.module, engine.optimizer)
    if strategy == "fsdp":
        from weight_sync_integrations.fsdp.flat import FlatSource

        return FlatSource(engine.module, engine.optimizer)
    if strategy == "megatron":
        from weight_sync_integrations.megatron.source import MegatronSource

        return MegatronSource(engine.module, engine.optimizer)
    raise ConfigError(f"actor strategy {strategy}: must be fsdp, fsdp2 or megatron")


class VerlRanks:
    """TrainerGroup over verl's actor ranks. For rank 0's process: its own agent is called here, the others through Ray."""

    def __init__(self, own: ActorSide, handles: Sequence[Any]) -> None:
        self._own = own
        self.handles = list(handles)

    @property
    def world(self) -> int:
        return len(self.handles)

    def call(self, method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Deadline) -> dict[int, dict[str, Any]]:
        return self._all(
            payloads,
            lambda rank: self._own.call(method, payloads[rank]),
            lambda rank: self.handles[rank].__ray_call__.remote(call_side, method, dict(payloads[rank])),
            method,
            deadline,
        )

    def epochs(self, deadline: Deadline) -> dict[int, int]:
        """ActorSide.epoch of every rank."""
        every = range(self.world)
        here, there = lambda _: self._own.epoch(), lambda rank: self.handles[rank].__ray_call__.remote(epoch_here)
        return self._all(every, here, there, "epoch", deadline)

    def _all(
        self, ranks: Collection[int], here: Callable[[int], V], there: Callable[[int], Any], what: str, deadline: Deadline
    ) -> dict[int, V]:
        """Answers by rank: `here` gives this rank's, `there` Ray's reference to another's."""
        own, others = self._own.rank, [rank for rank in ranks if rank != self._own.rank]
        calls: dict[str, Callable[[], dict[int, V]]] = {}
        if own in ranks:
            calls[f"trainer rank {own}"] = lambda: {own: here(own)}
        if others:
            # Started now, together with ours: a method may be a collective of all ranks.
            calls["other trainer ranks"] = lambda: gather({rank: there(rank) for rank in others}, deadline, what)
        answers = together(calls, deadline)
        return {rank: answer for part in answers.values() for rank, answer in part.items()}
