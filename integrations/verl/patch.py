"""The two methods of verl's two worker classes that our backend needs otherwise. For every other backend they do what they did.

execute_checkpoint_engine   tells our engine which worker it belongs to: verl gives the training engine to one backend only, by
                            that backend's name
update_weights              actor: hands over the training engine instead of a generator of whole tensors; rollout: nothing
                            arrives that verl would have to load
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "weight_sync_patched"


def rollout_worker(owner: type[Any]) -> None:
    """owner: CheckpointEngineWorker. Raises AttributeError where this verl has no such method."""
    original = owner.update_weights

    async def update_weights(self: Any, global_steps: int | None = None) -> Any:
        engine = self.checkpoint_engine
        if _ours(engine) and engine.direct:
            return None  # verl's would run the engine's post-processing a second time, on weights that are in place
        return await original(self, global_steps=global_steps)

    _put(owner, update_weights, original)
    _know_the_worker(owner)


def actor_worker(owner: type[Any]) -> None:
    """owner: ActorRolloutRefWorker. Raises AttributeError where this verl has no such method."""
    original = owner.update_weights

    async def update_weights(self: Any, global_steps: int | None = None, mode: str = "auto") -> Any:
        if mode != "naive" and _ours(getattr(self, "checkpoint_engine", None)):
            return await self.checkpoint_engine.send_weights(self.actor.engine, global_steps=global_steps)
        return await original(self, global_steps=global_steps, mode=mode)

    _put(owner, update_weights, original)
    _know_the_worker(owner)


def applied(owner: type[Any]) -> bool:
    return getattr(owner.update_weights, _MARK, False)


def _know_the_worker(owner: type[Any]) -> None:
    original = owner.execute_checkpoint_engine

    def execute_checkpoint_engine(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if _ours(self.checkpoint_engine):
            self.checkpoint_engine.attach(self)
        return original(self, method, *args, **kwargs)

    _put(owner, execute_checkpoint_engine, original)


def _put(owner: type[Any], function: Callable[..., Any], original: Any) -> None:
    functools.update_wrapper(function, original)  # takes verl's dispatch marks along
    setattr(function, _MARK, True)
    setattr(owner, function.__name__, function)


def _ours(engine: Any) -> bool:
    return getattr(engine, "is_weight_sync", False)
