"""A trainer group that leaves a rank out and says nothing of it: what was not answered is not taken for done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from session_support import World, build

from weight_sync.errors import SessionError
from weight_sync.session.verify import Level


def without(world: World, verb: str, rank: int) -> None:
    """From now on the group does not ask this rank, and answers for the others only."""
    call = world.trainers.call

    def fewer(method: str, payloads: Mapping[int, Mapping[str, Any]], deadline: Any) -> dict[int, dict[str, Any]]:
        some = {r: payload for r, payload in payloads.items() if method != verb or r != rank}
        return call(method, some, deadline)

    world.trainers.call = fewer  # type: ignore[method-assign]


@pytest.mark.parametrize(("verb", "level"), [("write", Level.OFF), ("write", Level.DIGEST), ("compare", Level.FULL)])
def test_a_rank_that_did_not_write_or_read_back_ends_the_sync_at_every_level(verb: str, level: Level) -> None:
    world = build()
    world.commit(1)
    world.step()
    call = world.trainers.call
    without(world, verb, 1)
    with pytest.raises(SessionError, match=rf"trainer ranks \[0, 1\] were asked to {verb}, and .* replies of ranks \[0\]"):
        world.sync.sync(2, level=level)
    assert world.sync.version == 1
    assert [(e.version, e.serving) for e in world.engines] == [(1, False)]
    world.trainers.call = call  # type: ignore[method-assign]
    world.commit(2)


def test_after_a_failure_a_rank_that_did_not_close_its_transport_holds_everything_up() -> None:
    world = build()
    world.commit(1)
    world.step()
    call = world.trainers.call
    without(world, "fence", 1)
    world.traps.at("worker 1", "verify", SessionError("as it happens"))
    with pytest.raises(SessionError, match="as it happens") as caught:
        world.sync.sync(2)
    assert any("while cleaning up" in note and "asked to fence" in note for note in caught.value.__notes__)
    for verb in (world.sync.connect, lambda: world.sync.sync(2)):
        with pytest.raises(SessionError, match="asked to fence"):
            verb()
    assert world.sync.version == 1
    assert [(e.version, e.serving) for e in world.engines] == [(1, False)]
    world.trainers.call = call  # type: ignore[method-assign]
    world.commit(2)
