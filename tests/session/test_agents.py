"""The two agents on their own, called as a confused, restarted or second controller might call them."""

from __future__ import annotations

from typing import Any

import pytest
from session_support import DENSE, NEVER_SHORT_RUNS, World, build, declared

from weight_sync.errors import BindError, SessionError, TransportError
from weight_sync.ids import Deadline
from weight_sync.plan.schedule import Budget
from weight_sync.transport.base import Region
from weight_sync.transport.memory import MemoryHub, MemoryTransport


@pytest.fixture
def world() -> World:
    """Connected, nothing paused. Three workers, strided pieces in rounds."""
    world = build(declared(DENSE, rollout={"tp": 3}), costs=NEVER_SHORT_RUNS, budget=Budget(512, 512))
    world.sync._controller = "1-a"
    world.sync.connect()
    return world


def begun(world: World, session: str = "1-a-1") -> dict[str, Any]:
    plan = world.sync.connect().schedule.digest
    for rank, agent in enumerate(world.target_agents):
        epoch = world.sync._connection.epochs[0][rank]  # type: ignore[union-attr]
        agent.call("begin", {"session": session, "version": 1, "plan": plan, "epoch": epoch})
    for agent in world.source_agents:
        agent.call("quiesce", {"session": session, "plan": plan})
    return {"session": session, "round": 0, "seconds": 30.0}


# -- the engine's side -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["source", "target"])
def test_an_unknown_method_is_refused_with_the_known_ones(world: World, side: str) -> None:
    agent = (world.source_agents if side == "source" else world.target_agents)[0]
    with pytest.raises(SessionError, match=r"unknown method 'resume'; known: describe, "):
        agent.call("resume", {})


@pytest.mark.parametrize("method", ["place", "verify", "end"])
def test_nothing_of_a_session_that_is_not_open_is_done(world: World, method: str) -> None:
    agent = world.target_agents[0]
    with pytest.raises(SessionError, match=r"session 1-a-1 is not open here \(open: None\)"):
        agent.call(method, {"session": "1-a-1", "round": 0})
    begun(world, "1-a-1")
    with pytest.raises(SessionError, match=r"session 1-a-0 is not open here \(open: 1-a-1"):
        agent.call(method, {"session": "1-a-0", "round": 0})
    agent.call("abort", {"session": "1-a-1", "reason": "the drill"})
    with pytest.raises(SessionError, match=r"open: None; the last one was aborted: the drill"):
        agent.call(method, {"session": "1-a-1", "round": 0})


def test_a_worker_takes_one_session_at_a_time_and_is_not_bound_during_it(world: World) -> None:
    begun(world, "1-a-1")
    agent = world.target_agents[0]
    with pytest.raises(SessionError, match="session 1-a-1 is still open"):
        agent.call("begin", {"session": "1-a-2", "version": 2, "plan": "p", "epoch": 0})
    with pytest.raises(SessionError, match="bind during session 1-a-1; abort it first"):
        agent.call("bind", agent._table or {})


def test_an_aborted_binding_is_void_and_its_endpoint_is_gone(world: World) -> None:
    agent = world.target_agents[0]
    table = agent._table
    assert table is not None
    old = agent.call("bind", table)
    assert agent.call("bind", table) == old, "an unchanged table keeps its binding"
    agent.call("abort", {"reason": "the drill"})
    with pytest.raises(BindError, match="no binding for plan"):
        agent.call("begin", {"session": "1-a-5", "version": 1, "plan": table["plan"], "epoch": old["epoch"]})
    new = agent.call("bind", table)
    assert new["epoch"] != old["epoch"]
    assert new["endpoint"]["address"] != old["endpoint"]["address"]


def test_another_table_of_the_same_plan_is_another_binding(world: World) -> None:
    agent = world.target_agents[0]
    table = agent._table
    assert table is not None
    old = agent.call("bind", table)
    order = list(reversed(range(len(table["params"]))))
    other = {**table, **{k: [table[k][i] for i in order] for k in ("tensors", "params", "start", "strides", "shape")}}
    assert agent.call("bind", other)["epoch"] != old["epoch"]
    assert agent._table == other


def test_a_worker_that_cannot_register_its_memory_leaves_no_transport_open() -> None:
    hub = MemoryHub()

    class Refusing(MemoryTransport):
        def register(self, regions: Any) -> None:
            raise BindError("no more memory may be pinned")

    world = build(transport=lambda side, rank, _: (Refusing if side == "rollout" else MemoryTransport)(hub))
    with pytest.raises(BindError, match="no more memory may be pinned"):
        world.sync.connect()
    assert not hub._peers


def test_a_closed_worker_transport_lets_nothing_in(world: World) -> None:
    begun(world)
    target = world.target_agents[0]
    assert target._transport is not None
    endpoint = target._transport.describe()
    target.call("abort", {"reason": "the drill"})
    writer = MemoryTransport(world.hub)
    writer.register([Region(int(world.source[0].bytes.ctypes.data), world.source[0].bytes.nbytes)])
    with pytest.raises(TransportError, match="no open peer"):
        writer.probe(endpoint, Deadline.after(5))


def test_a_session_that_ended_cannot_be_begun_again_by_a_request_that_comes_twice(world: World) -> None:
    begun(world, "1-a-1")
    target = world.target_agents[0]
    target.call("end", {"session": "1-a-1"})
    assert target._table is not None
    epoch = world.sync._connection.epochs[0][0]  # type: ignore[union-attr]
    again = {"session": "1-a-1", "version": 1, "plan": target._table["plan"], "epoch": epoch}
    with pytest.raises(SessionError, match="begin of session 1-a-1, which has ended; it came too late"):
        target.call("begin", again)
    target.call("begin", again | {"session": "1-a-2"})


def test_a_second_snapshot_does_not_take_the_place_of_the_first(world: World) -> None:
    begun(world, "1-a-1")
    target = world.target_agents[0]
    target.call("snapshot", {"session": "1-a-1"})
    with pytest.raises(SessionError, match="session 1-a-1 has a snapshot already"):
        target.call("snapshot", {"session": "1-a-1"})
    target.call("compare", {"session": "1-a-1"})
    target.call("snapshot", {"session": "1-a-1"})


def test_a_worker_whose_pull_failed_can_still_be_described(world: World) -> None:
    begun(world, "1-a-1")
    target = world.target_agents[0]
    assert target._transport is not None
    target._filling, target._transport._unusable = True, "a read failed"  # type: ignore[attr-defined]
    described = target.call("describe", {})
    assert (described["session"], described["endpoint"]) == ("1-a-1", None)
    target.call("abort", {"session": "1-a-1", "reason": "the drill"})


# -- the trainer's side ------------------------------------------------------------------------------------------------


def test_a_write_needs_the_session_that_was_quiesced_and_a_binding(world: World) -> None:
    agent = world.source_agents[0]
    with pytest.raises(SessionError, match="nothing was quiesced: parameters may still change"):
        agent.call("write", {"session": "1-a-1", "round": 0, "seconds": 5})
    payload = begun(world, "1-a-1")
    with pytest.raises(SessionError, match="write for session 1-a-0, but session 1-a-1 is open"):
        agent.call("write", payload | {"session": "1-a-0"})
    agent.call("fence", {"reason": "the drill"})
    with pytest.raises(SessionError, match="write without a binding"):
        agent.call("write", payload)


def test_a_plan_that_was_not_computed_here_is_not_bound(world: World) -> None:
    with pytest.raises(BindError, match="asked to bind plan another, has computed another"):
        world.source_agents[0].call("bind", {"plan": "another", "targets": {}, "seconds": 5})


def test_a_bind_that_fails_leaves_no_older_binding_to_write_with(world: World) -> None:
    agent = world.source_agents[0]
    plan = world.sync.connect().schedule.digest
    with pytest.raises(BindError, match="no binding of rollout ranks"):
        agent.call("bind", {"plan": plan, "targets": {}, "seconds": 5})
    with pytest.raises(BindError, match="has no binding of plan"):
        agent.call("quiesce", {"session": "1-a-1", "plan": plan})


def test_a_release_for_another_session_releases_nothing(world: World) -> None:
    begun(world, "1-a-2")
    agent, source = world.source_agents[0], world.sources[0]
    agent.call("release", {"session": "1-a-1"})
    assert source.quiet
    agent.call("release", {"session": "1-a-2"})
    assert not source.quiet
    agent.call("release", {"session": "1-a-2"})


def test_between_a_failed_write_and_its_fence_a_rank_is_not_released(world: World) -> None:
    payload = begun(world)
    agent, source = world.source_agents[0], world.sources[0]
    for target in world.target_agents:
        target.call("abort", {"reason": "the drill"})
    with pytest.raises(TransportError):
        agent.call("write", payload)
    with pytest.raises(SessionError, match="fence first: its parameters may still be read, so it must not step"):
        agent.call("release", {"session": "1-a-1"})
    assert source.quiet
    agent.call("fence", {"reason": "the drill"})
    agent.call("release", {"session": "1-a-1"})
    assert not source.quiet


def test_after_a_failed_write_a_new_binding_gets_a_new_transport(world: World) -> None:
    payload = begun(world)
    agent = world.source_agents[0]
    for target in world.target_agents:
        target.call("abort", {"reason": "the drill"})
    with pytest.raises(TransportError):
        agent.call("write", payload)
    poisoned = agent._transport
    world.sync.connect()  # a controller that knows nothing of the failure
    assert agent._transport is not poisoned
    assert poisoned is not None
    with pytest.raises(TransportError, match="closed"):
        poisoned.describe()
    world.commit(1)


def test_only_peers_that_a_rank_writes_to_are_probed() -> None:
    world = build(declared(DENSE, {"ranks": 2, "pp": 2}, {"tp": 1, "pp": 2}))
    plan = world.sync.connect().plan
    for rank, agent in enumerate(world.source_agents):
        assert isinstance(agent._transport, MemoryTransport)
        wanted = set(plan.target_rank[plan.rows_from(rank)].tolist())
        assert len(agent._transport._probed) == len(wanted)
    assert len(set(plan.target_rank[plan.rows_from(1)].tolist())) == 1, "a case in which it matters"
