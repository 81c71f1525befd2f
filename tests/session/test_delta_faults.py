"""What goes wrong in and around delta sessions: nothing wrong is served, the version stays, the next sync is complete."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from delta_support import SMALL, complete, delta, nudge, settled
from session_support import DENSE, NEVER_SHORT_RUNS, World, declared, fresh_target, moved

from weight_sync.errors import BindError, DeltaError, RolloutError, SessionError, TransportError, VerifyError, WeightSyncError
from weight_sync.plan.schedule import Budget
from weight_sync.session.delta import Reason
from weight_sync.session.session import WeightSync
from weight_sync.session.state import State
from weight_sync.transport.faults import Fault, FaultKind
from weight_sync.transport.memory import MemoryHub, MemoryTransport

TWO = declared(DENSE | {"num_hidden_layers": 1}, rollout={"tp": 3, "engines": 2})
STAGED = {"costs": NEVER_SHORT_RUNS, "budget": Budget(512, 512)}
BOOM = "the drill's own error"


class Armed:
    """A FaultPlan that does nothing until it is armed; then the n-th range from now on goes wrong, once."""

    def __init__(self) -> None:
        self.left, self.kind = -1, FaultKind.DROP
        self.struck = False
        self.seen = 0

    def arm(self, kind: FaultKind, after: int = 0) -> None:
        self.left, self.kind, self.struck = after, kind, False

    def fault(self, index: int) -> Fault | None:
        self.seen = max(self.seen, index + 1)
        if self.left < 0:
            return None
        self.left -= 1
        if self.left >= 0:
            return None
        self.struck = True
        return Fault(self.kind, seconds=0.0)


def armed_world(**more: Any) -> tuple[World, Armed]:
    faults = Armed()

    def transport(side: str, rank: int, hub: MemoryHub) -> MemoryTransport:
        return MemoryTransport(hub, faults=faults if (side, rank) == ("trainer", 1) else None)

    return settled(sides=TWO, transport=transport, **more), faults


def refused(world: World, kind: type[BaseException] = WeightSyncError, match: str = "", version: int = 3) -> BaseException:
    """A sync that must raise after engines were paused: nobody serves, nobody holds `version`, everybody may go on."""
    before = world.sync.version
    with pytest.raises(kind, match=match) as caught:
        world.sync.sync(version)
    assert (world.sync.version, world.sync.state) == (before, State.FAILED)
    assert [(e.serving, e.version) for e in world.engines] == [(False, before)] * len(world.engines)
    assert not any(source.quiet for source in world.sources)
    assert world.traps.sprung
    return caught.value


def repaired(world: World, version: int = 3, reason: Reason = Reason.BOUND) -> None:
    """The next sync is complete, the one after it a delta again."""
    nudge(world, 0.01)
    complete(world, version, reason)
    nudge(world, 0.01)
    delta(world, version + 1)


# -- the wire ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.CORRUPT, FaultKind.TRUNCATE])
def test_a_message_that_did_not_arrive_as_it_was_sent_is_not_applied(kind: FaultKind, after: int) -> None:
    world, faults = armed_world()
    faults.arm(kind, after)
    live = [buffer.bytes.copy() for buffer in world.target]
    refused(world, DeltaError, r"delta from trainer rank 1 in session")
    assert faults.struck
    # Other workers may have applied theirs; each applied all of a round or nothing.
    assert any(np.array_equal(a, b.bytes) for a, b in zip(live, world.target, strict=True))
    repaired(world)


def test_a_message_that_arrives_after_it_was_reported_done_is_not_waited_for_and_not_applied_later() -> None:
    _, counted = (twin := armed_world())
    before = counted.seen
    delta(twin[0], 3)
    world, faults = armed_world()
    faults.arm(FaultKind.EARLY, counted.seen - before - 1)  # the last one: nothing after it takes it off the wire
    refused(world, DeltaError, r"delta from trainer rank 1 in session")
    assert faults.struck
    live = [buffer.bytes.copy() for buffer in world.target]
    world.hub.settle()
    assert all(np.array_equal(a, b.bytes) for a, b in zip(live, world.target, strict=True))
    repaired(world)


@pytest.mark.parametrize("kind", [FaultKind.ERROR, FaultKind.GHOST])
def test_a_write_that_fails_ends_the_sync_and_what_lands_later_changes_no_weight(kind: FaultKind) -> None:
    world, faults = armed_world()
    faults.arm(kind)
    refused(world, TransportError, "what changed, session")
    assert faults.struck
    live = [buffer.bytes.copy() for buffer in world.target]
    world.hub.settle()
    assert all(np.array_equal(a, b.bytes) for a, b in zip(live, world.target, strict=True))
    repaired(world)


def test_a_message_that_comes_twice_changes_nothing() -> None:
    world, faults = armed_world()
    faults.arm(FaultKind.DUPLICATE)
    delta(world, 3)
    assert faults.struck
    nudge(world, 0.01)
    delta(world, 4)


def test_a_round_of_an_earlier_session_is_not_taken_for_this_one() -> None:
    """Both syncs write at the same places; the second one's bytes are lost, so the first one's still lie there."""
    world, faults = armed_world(spec=SMALL)
    delta(world, 3)
    nudge(world, 0.02)
    faults.arm(FaultKind.DROP)
    refused(world, DeltaError, r"another (session|number of records|size)|not those that were sent", version=4)
    repaired(world, version=4)


# -- a base that is not what is believed -------------------------------------------------------------------------------


def test_a_word_that_changed_in_an_engine_since_the_base_is_found_though_nobody_sends_it() -> None:
    world = settled(sides=TWO)
    buffer = world.target[4]
    name = "model.layers.0.self_attn.qkv_proj.weight"
    buffer.arrays[name].reshape(-1)[7] ^= np.uint16(1)
    refused(world, VerifyError, rf"1 of \d+ transfers arrived with other bytes.*to rollout rank 4 \({name}\)")
    repaired(world)


def test_a_snapshot_that_is_not_what_was_sent_is_found() -> None:
    world = settled(sides=TWO)
    agent = world.source_agents[0]
    held = agent._delta._held
    name = "model.norm.weight"
    world.hf[name][3] ^= np.uint16(1)
    for rank, buffer in enumerate(world.source):
        world._fill(world.layouts[0], rank, buffer, buffer.bytes)
    for each in world.source_agents:  # as if what now changes had been sent before
        for region, row in enumerate(each._delta._regions.first.tolist()):  # type: ignore[union-attr]
            at = int(each._delta._regions.start[region])  # type: ignore[union-attr]
            for words in each._delta._parts.of(row):
                at += each._delta._snapshot.store(at, words)
    assert agent._delta._held == held
    refused(world, VerifyError, "arrived with other bytes than were sent")
    repaired(world)


def test_an_engine_that_was_restarted_in_between_gets_a_complete_session() -> None:
    world = settled(sides=TWO)
    fresh_target(world, 4)
    refused(world, BindError, "no binding for plan")
    repaired(world)


def test_a_worker_whose_last_session_was_another_one_applies_nothing() -> None:
    world = settled(sides=TWO)
    agent = world.target_agents[4]
    agent._held = agent._held[0], 1  # type: ignore[index]
    live = world.target[4].bytes.copy()
    refused(world, DeltaError, r"holds version 1 of session .*, the delta applies to version 2 of session")
    assert np.array_equal(live, world.target[4].bytes)
    repaired(world)


def test_a_trainer_rank_that_was_restarted_is_followed_by_a_complete_session() -> None:
    world = settled(sides=TWO)
    world.restart_trainer(1)
    with pytest.raises(BindError, match="has no binding of plan"):
        world.sync.sync(3)
    assert (world.sync.version, [e.version for e in world.engines]) == (2, [2, 2])
    repaired(world)


@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_memory_that_moved_is_followed_by_a_complete_session(side: str) -> None:
    world = settled(sides=TWO)
    if side == "trainer":
        world.source[0] = moved(world.source[0], list(world.layouts[0].rank_params(0)))
        world.sources[0].arrays = world.source[0].arrays
    else:
        world.target[1] = moved(world.target[1], list(world.layouts[1].rank_params(1)))
    with pytest.raises(BindError, match="moved since"):
        world.sync.sync(3)
    assert world.sync.version == 2
    repaired(world)


@pytest.mark.parametrize("recover", [False, True])
def test_a_new_controller_begins_with_a_complete_session(recover: bool) -> None:
    world = settled(sides=TWO)
    old = world.sync
    world.sync = WeightSync(world.trainers, world.engines, old._spec, timeouts=old._timeouts)
    if recover:
        assert world.sync.recover().version == 2
    repaired(world, reason=Reason.FIRST)
    with pytest.raises(SessionError, match="has taken over since"):
        old.sync(9)


def test_a_session_that_another_controller_committed_in_between_is_no_base_of_ours() -> None:
    """Two controllers that do not know of each other's commits: the engines' receipts tell."""
    world = settled(sides=TWO)
    for engine in world.engines:
        assert engine._receipt is not None
        engine._receipt = replace(engine._receipt, session="1-beef")
    complete(world, 3, Reason.RECEIPT)


# -- failures in the middle --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("where", "verb"), [("trainer 1", "encode"), ("engine e1", "describe")])
def test_a_failure_before_the_pause_touches_no_engine_and_ends_the_snapshot(where: str, verb: str, after: bool) -> None:
    world = settled(sides=TWO)
    world.traps.at(where, verb, RolloutError(BOOM), after=after)
    with pytest.raises(RolloutError, match=BOOM):
        world.sync.sync(3)
    assert [(e.serving, e.version) for e in world.engines] == [(True, 2)] * 2
    assert world.sync.version == 2
    assert all(agent._delta._held is None for agent in world.source_agents)
    repaired(world)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("where", "verb"),
    [("worker 4", "begin"), ("trainer 1", "send"), ("engine e1", "patch"), ("worker 4", "patch"),
     ("worker 4", "verify"), ("worker 4", "end"), ("engine e1", "finish")],
)  # fmt: skip
def test_a_failure_after_the_pause_leaves_engines_paused_and_the_next_sync_is_complete(
    where: str, verb: str, after: bool
) -> None:
    world = settled(sides=TWO, **STAGED)
    world.traps.at(where, verb, RolloutError(BOOM), after=after)
    before = world.sync.version
    with pytest.raises(RolloutError, match=BOOM):
        world.sync.sync(3)
    assert world.sync.version == before
    assert not any(engine.serving for engine in world.engines)
    assert all(agent._delta._held is None for agent in world.source_agents)
    repaired(world)


def test_a_worker_that_fails_in_the_middle_of_applying_is_repaired() -> None:
    world = settled(sides=TWO)
    from weight_sync.session import delta_target

    whole, left = delta_target._scatter, [3]

    def breaks(*arguments: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise MemoryError(BOOM)
        whole(*arguments)

    delta_target._scatter = breaks
    try:
        refused(world, MemoryError, BOOM)
    finally:
        delta_target._scatter = whole
    repaired(world)


@pytest.mark.parametrize("after", [False, True])
def test_a_snapshot_that_cannot_be_kept_is_an_error_that_says_what_is_committed(after: bool) -> None:
    world = settled(sides=TWO)
    world.traps.at("trainer 1", "keep", MemoryError(BOOM), after=after)
    with pytest.raises(MemoryError, match=BOOM) as caught:
        world.sync.sync(3)
    assert any("version 3 is committed and served by every engine" in note for note in caught.value.__notes__)
    assert world.sync.version == 3
    assert [(e.serving, e.version) for e in world.engines] == [(True, 3)] * 2
    assert not any(source.quiet for source in world.sources)
    repaired(world, version=4)


def test_another_attempt_of_the_same_sync_is_complete() -> None:
    from weight_sync.session.failure import FailurePolicy

    world = settled(sides=TWO, failure=FailurePolicy(attempts=2))
    world.traps.at("worker 4", "patch", RolloutError(BOOM))
    outcome = complete(world, 3, Reason.BOUND)
    assert outcome.attempts == 2
    nudge(world, 0.01)
    delta(world, 4)


# -- requests that do not belong here ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message", "says"),
    [
        ({}, [0, SMALL.staging - 8, 64], r"bytes \[\d+, \d+\) of a staging buffer of 4096 bytes"),
        ({}, [0, -8, 64], "staging buffer"),
        ({}, [0, 0, 8], "8 bytes, a header alone has 144"),
        ({"version": 1}, [0, 0, 256], "the delta applies to version 1"),
        ({"session": "1-beef"}, [0, 0, 256], "session 1-beef"),
        ({"digest": "0" * 32}, [0, 0, 256], "another (number of records|base digest|size|session)"),
    ],
)
def test_a_worker_refuses_what_is_not_in_its_buffer_and_a_base_that_it_does_not_hold(
    wrong: dict[str, Any], message: list[int], says: str
) -> None:
    world = settled(sides=TWO)
    last, agent = world.sync._deltas._last, world.target_agents[0]
    assert last is not None
    base = last.base.to_json() | wrong
    found: list[BaseException] = []

    def act() -> None:
        try:
            agent.call("patch", {"session": agent._session, "base": base, "messages": [message]})
        except DeltaError as error:
            found.append(error)

    world.traps.do("engine e0", "patch", act)  # in the middle of a session, before anything of it is applied
    delta(world, 3)
    (error,) = found
    with pytest.raises(DeltaError, match=says):
        raise error


def test_encoding_sending_and_keeping_need_their_session() -> None:
    world = settled(sides=TWO)
    last = world.sync._deltas._last
    assert last is not None
    base = last.base.to_json()
    agent = world.source_agents[0]
    for method in ("encode", "send", "keep"):
        payload = {"session": "1-beef", "base": base, "encoded": True, "messages": [], "round": 0, "seconds": 1.0}
        with pytest.raises(SessionError, match=f"{method} for session 1-beef, which is not open here|is refused"):
            agent.call(method, payload)
    delta(world, 3)
