"""Staging memory that holds one wave after the other: whose bytes are digested, until when they stay, who finds them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from session_support import ALWAYS_DIRECT, NEVER_SHORT_RUNS, declared
from test_waves import Packing, loading, synced

from weight_sync.errors import BindError, RolloutError, VerifyError
from weight_sync.session.digests import HostDigests
from weight_sync.session.memory import Memory
from weight_sync.session.registry import ReplicaState
from weight_sync.session.session import WeightSync
from weight_sync.session.verify import Level


class Kept(HostDigests):
    """Digests that look at a group's views once and again at the same places when the group comes again, as on a GPU."""

    def __init__(self, kind: str, kept: dict[object, Any]) -> None:
        super().__init__(kind)
        self._kept = kept

    def whole(self, group: object, keys: Any, views: Callable[[], Any]) -> None:
        if group not in self._kept:
            self._kept[group] = views()
        super().whole(group, keys, lambda: self._kept[group])

    def pieces(self, group: object, keys: Any, first: Any, views: Any, odd: Any = ()) -> None:
        super().pieces(group, keys, first, self._kept.setdefault(group, list(views)), odd)


@pytest.mark.parametrize("level", [Level.DIGEST, Level.FULL, Level.CHECK_WEIGHT_EQUAL])
@pytest.mark.parametrize("costs", [ALWAYS_DIRECT, NEVER_SHORT_RUNS], ids=["direct", "packed and unpacked"])
def test_where_digests_keep_their_places_each_wave_has_its_own(level: Level, costs: Any, monkeypatch: Any) -> None:
    def digests(memory: Memory, kind: str) -> Kept:
        return Kept(kind, memory.__dict__.setdefault("kept", {}))

    monkeypatch.setattr(Memory, "digests", digests)
    world, _ = loading(costs=costs)
    for version in (1, 2):
        synced(world, version, level)
        world.step()
    assert len(world.sync._connection.schedule.waves) > 2


class Asked(Packing):
    """A loader that only asks for its work and returns, as one on a GPU does; `queue` is done when the memory settles."""

    queue: list[Callable[[], None]]

    def feed(self, tensors: Mapping[str, Any], first: bool, last: bool) -> None:
        self.queue.append(lambda: Packing.feed(self, tensors, first, last))


def test_what_a_loader_has_asked_of_its_device_is_done_before_the_next_wave_lies_in_its_place(monkeypatch: Any) -> None:
    queue: list[Callable[[], None]] = []

    def settle(_: Memory) -> None:
        while queue:
            queue.pop(0)()

    monkeypatch.setattr(Memory, "settle", settle)
    world, packing = loading(declared(rollout={"tp": 1}))
    for one in packing:
        one.__class__ = Asked
        one.queue = queue  # type: ignore[attr-defined]
    for version in (1, 2):
        synced(world, version)
        world.step()
    assert len(packing[0].fed) == 2 * len(world.sync._connection.schedule.waves) > 4


@pytest.mark.parametrize("moment", ["before", "while"])
def test_bytes_that_change_between_their_proof_and_the_end_of_loading_are_not_committed(moment: str) -> None:
    """A write of an earlier wave that comes again, late: the digests were compared already, the loader takes what is there."""
    world, packing = loading()
    synced(world, 1)
    world.step()

    def flip() -> None:
        packing[1].raw[0] ^= 1

    if moment == "before":
        world.traps.do("worker 1", "feed", lambda: None)
        world.traps.do("worker 1", "feed", flip)
    else:
        whole, left = packing[1].feed, [1]

        def feed(tensors: Mapping[str, Any], first: bool, last: bool) -> None:
            left[0] -= 1
            if left[0] < 0:
                flip()
            whole(tensors, first, last)

        packing[1].feed = feed  # type: ignore[method-assign]
    with pytest.raises(VerifyError, match=r"rollout rank 1: .*changed while the engine's own loader"):
        world.sync.sync(2)
    assert world.traps.sprung
    assert world.sync.version == 1
    assert [(e.version, e.serving) for e in world.engines] == [(1, False)] * 2
    assert {replica.state for replica in world.sync.replicas} == {ReplicaState.SUSPECT}
    packing[1].__dict__.pop("feed", None)
    synced(world, 2)


class Elsewhere(Packing):
    """A loader in whose hands the live tensors lie nowhere, as vLLM's on `meta`: nobody can describe them."""

    lost = False

    def feed(self, tensors: Mapping[str, Any], first: bool, last: bool) -> None:
        self.lost = True
        super().feed(tensors, first, last)
        self.lost = not last

    def abandon(self) -> None:
        self.lost = False


@pytest.mark.parametrize("recover", [False, True])
@pytest.mark.parametrize("waves", [0, 1], ids=["in the first wave", "after the second wave"])
def test_a_controller_that_dies_while_engines_load_is_followed_by_one_that_loads_everything(waves: int, recover: bool) -> None:
    world, packing = loading()
    for one, agent in zip(packing, world.target_agents, strict=True):
        one.__class__ = Elsewhere

        def tensors(one: Any = one, live: Any = agent._tensors) -> Any:
            if one.lost:
                raise BindError("on device meta")
            return live()

        agent._tensors = tensors
    synced(world, 1)
    world.step()
    old = world.sync
    old._fail = lambda *_: None  # type: ignore[method-assign] - it is dead: nothing is cleaned up
    for _ in range(waves):
        world.traps.do("worker 1", "feed", lambda: None, after=True)
    if waves:
        world.traps.at("worker 1", "feed", KeyboardInterrupt(), after=True)
    else:
        packing[1].error.append(RolloutError("as it died"))
    with pytest.raises((KeyboardInterrupt, RolloutError)):
        old.sync(2)
    assert packing[1].lost  # type: ignore[attr-defined]
    world.sync = WeightSync(world.trainers, world.engines, old._spec, timeouts=old._timeouts)
    if recover:
        assert (world.sync.recover().action, world.sync.version) == ("redo", 1)
    assert not any(engine.serving for engine in world.engines)
    assert world.sync.connect().by_loader
    synced(world, 2)
