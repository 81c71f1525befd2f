"""What the failure tests share: a world with two engines, and what must hold after a sync that failed."""

from __future__ import annotations

from typing import Any

import pytest
from session_support import DENSE, NEVER_SHORT_RUNS, World, build, declared

from weight_sync.errors import RolloutError
from weight_sync.plan.schedule import Budget
from weight_sync.session.state import State

BOOM = "the drill's own error"


def two_engines(**more: Any) -> World:
    """Two trainer ranks, two engines of three workers; strided pieces staged in rounds, so that place() is called."""
    sides = declared(DENSE | {"num_hidden_layers": 1}, rollout={"tp": 3, "engines": 2})
    return build(sides, costs=NEVER_SHORT_RUNS, budget=Budget(512, 512), **more)


def fail(world: World, version: int, kind: type[BaseException] = RolloutError, match: str = BOOM) -> BaseException:
    """A sync that must raise, after which nobody may believe in `version`."""
    before = world.sync.version
    with pytest.raises(kind, match=match) as caught:
        world.sync.sync(version)
    assert world.sync.version == before
    assert world.traps.sprung
    assert not any(source.quiet for source in world.sources), "the trainer is still held"
    return caught.value


def stands(world: World, *engines: int) -> None:
    """These engines (all by default) are paused, say why, and no transport is open any more."""
    for i in engines or range(len(world.engines)):
        engine = world.engines[i]
        assert not engine.serving
        assert engine.reason is not None
    assert world.sync.state is State.FAILED
    assert not world.hub._peers


def committed_before(world: World) -> int:
    world.commit(1)
    world.step()
    world.traps.log.clear()
    return 2


def raiser(error: BaseException) -> Any:
    def throw(*args: object, **named: object) -> Any:
        raise error

    return throw
