"""Engines that join, leave and are replaced between syncs: exact bytes for all, and nothing for those who were there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from failure_support import BOOM
from session_support import (
    DENSE,
    MOE,
    NEVER_SHORT_RUNS,
    Spare,
    World,
    admitted,
    build,
    declared,
    departed,
    fresh_target,
    spare,
)

from weight_sync.errors import BindError, PlanError, RolloutError, SessionError, TransportError, VerifyError
from weight_sync.plan.schedule import Budget
from weight_sync.session.registry import REPLICA_TRANSITIONS, Registry, Replica, ReplicaState
from weight_sync.session.state import State
from weight_sync.session.verify import Level


def world_of(engines: int = 2, config: Any = DENSE, **more: Any) -> World:
    """Trainer tp2 with two copies of everything, so that there is a choice of sources; strided pieces in rounds."""
    trainer = {"ranks": 4, "tp": 2} | ({"ep": 2} if config is MOE else {})
    sides = declared({**config, "num_hidden_layers": 1}, trainer=trainer, rollout={"tp": 3, "engines": engines})
    more = {"costs": NEVER_SHORT_RUNS, "budget": Budget(512, 512)} | more
    return build(sides, **more)


def states(world: World) -> dict[str, str]:
    return {replica.name: replica.text() for replica in world.sync.replicas}


def joined(world: World, name: str, **how: Any) -> Spare:
    one = spare(world, name)
    world.sync.join(one.engine, **how)
    admitted(world, one)
    return one


# -- the table of states -----------------------------------------------------------------------------------------------


def test_a_replica_goes_only_where_the_table_allows() -> None:
    engine = world_of(1).engines[0]
    for start in ReplicaState:
        for end in ReplicaState:
            replica = Replica(engine, start)
            version = 3 if end is ReplicaState.READY else None
            if end in REPLICA_TRANSITIONS[start]:
                replica.to(end, version=version)
                assert replica.state is end
            else:
                with pytest.raises(SessionError, match=f"replica e0 cannot go from {start} to {end}; legal: "):
                    replica.to(end, version=version)
                assert replica.state is start


def test_only_ready_has_a_version() -> None:
    engine = world_of(1).engines[0]
    with pytest.raises(SessionError, match="ready, and only ready, has one"):
        Replica(engine, ReplicaState.SYNCING).to(ReplicaState.READY)
    with pytest.raises(SessionError, match="ready, and only ready, has one"):
        Replica(engine, ReplicaState.JOINING).to(ReplicaState.SYNCING, version=1)


def test_the_lender_is_the_ready_replica_that_has_served_the_fewest_bytes() -> None:
    registry = Registry(world_of(3).engines)
    assert registry.lender(1) is None
    for replica, served in zip(registry.all, (5, 3, 3), strict=True):
        replica.to(ReplicaState.SYNCING)
        replica.to(ReplicaState.READY, version=1)
        replica.served = served
    assert [r.name for r in (registry.lender(1), registry.lender(1, registry.get("e1"))) if r] == ["e1", "e2"]
    assert registry.lender(2) is None
    registry.get("e1").to(ReplicaState.SUSPECT)
    lender = registry.lender(1)
    assert lender is not None
    assert lender.name == "e2"


def test_the_page_on_the_architecture_shows_the_tables_of_the_code() -> None:
    from pathlib import Path

    text = (Path(__file__).resolve().parents[2] / "ARCHITECTURE.md").read_text()
    for state, ends in REPLICA_TRANSITIONS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{state}` |"))
        assert {word.strip("` ") for word in row.split("|")[2].split(",")} - {"none"} == set(ends)


# -- joining -----------------------------------------------------------------------------------------------------------


def test_a_joiner_stands_until_the_next_sync_brings_it_to_its_version_and_no_other_replica_is_spoken_to() -> None:
    world = world_of()
    world.commit(1)
    world.traps.log.clear()
    one = spare(world, "e2")
    world.sync.join(one.engine)
    assert states(world) == {"e0": "ready(1)", "e1": "ready(1)", "e2": "joining"}
    assert not one.engine.serving
    spoken = {where for where, _ in world.traps.log}
    assert not spoken & {"engine e0", "engine e1", *(f"worker {r}" for r in range(6))}
    assert all(engine.serving for engine in world.engines)
    admitted(world, one)
    world.step()
    world.commit(2)
    assert states(world) == {"e0": "ready(2)", "e1": "ready(2)", "e2": "ready(2)"}
    world.step()
    world.commit(3)


def test_after_a_join_the_next_sync_plans_nothing() -> None:
    world = world_of()
    world.commit(1)
    joined(world, "e2")
    world.traps.log.clear()
    world.step()
    world.commit(2)
    assert not {verb for _, verb in world.traps.log} & {"plan", "extend", "bind", "describe"}


def test_a_trainer_rank_without_the_plan_computes_it_whole_and_agrees() -> None:
    world = world_of()
    world.commit(1)
    world.restart_trainer(1)
    joined(world, "e2")
    assert "plan" in world.traps.verbs("trainer 1")[-4:]
    assert world.traps.verbs("trainer 0").count("plan") == 1
    world.step()
    world.commit(2)


def test_engines_may_join_before_the_first_sync_and_after_a_failed_one() -> None:
    world = world_of(1)
    joined(world, "e1")
    world.commit(1)
    world.traps.at("engine e0", "verify", RolloutError(BOOM))
    world.step()
    with pytest.raises(RolloutError):
        world.sync.sync(2)
    joined(world, "e2")
    assert not any(engine.serving for engine in world.engines)
    world.commit(2)


@pytest.mark.parametrize("verb", ["describe", "record", "bind", "claim", "pause"])
def test_an_engine_that_fails_to_join_is_no_member_and_the_others_serve_on(verb: str) -> None:
    world = world_of()
    world.commit(1)
    one = spare(world, "e2")
    world.traps.at("engine e2", verb, RolloutError(BOOM))
    with pytest.raises(RolloutError, match=BOOM):
        world.sync.join(one.engine)
    assert one.engine.serving
    assert states(world) == {"e0": "ready(1)", "e1": "ready(1)"}
    assert all(engine.serving for engine in world.engines)
    world.step()
    world.commit(2)
    world.sync.join(one.engine)
    admitted(world, one)
    world.step()
    world.commit(3)


@pytest.mark.parametrize("verb", ["extend", "bind"])
def test_a_trainer_rank_that_fails_during_a_join_leaves_the_others_as_they_are(verb: str) -> None:
    world = world_of()
    world.commit(1)
    world.traps.at("trainer 2", verb, RolloutError(BOOM))
    with pytest.raises(RolloutError, match=BOOM):
        joined(world, "e2")
    assert states(world) == {"e0": "ready(1)", "e1": "ready(1)"}
    world.step()
    world.commit(2)


def test_a_trainer_rank_that_extends_to_another_plan_is_found() -> None:
    world = world_of()
    world.commit(1)
    agent = world.source_agents[1]
    original = agent._extend
    agent._extend = lambda payload: original(payload) | {"digest": "0" * 32}  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="extended the plan to another than the controller's"):
        joined(world, "e2")
    world.step()
    world.commit(2)


def test_a_leave_whose_plan_cannot_shrink_says_that_the_engine_has_left_all_the_same() -> None:
    world = world_of()
    world.commit(1)
    agent = world.source_agents[1]
    original = agent._extend
    agent._extend = lambda payload: original(payload) | {"digest": "0" * 32}  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="extended the plan to another than the controller's") as caught:
        world.sync.leave("e1")
    assert caught.value.__notes__ == ["engine e1 has left all the same; the next sync plans and binds everything anew"]
    assert states(world) == {"e0": "ready(1)"}
    assert world.sync.version == 1
    departed(world, "e1")
    world.step()
    world.commit(2)


def test_an_engine_unlike_the_others_is_refused_before_it_is_paused() -> None:
    world = world_of()
    world.commit(1)
    one = spare(world, "e2")
    one.engine._sizes["attn_dp"] = 2
    with pytest.raises(BindError, match="engine e2 runs with other parallel sizes: attn_dp=1 declared, 2 live"):
        world.sync.join(one.engine)
    other = spare(world, "e3")
    other.engine._model["hidden_size"] = 48
    with pytest.raises(BindError, match="engine e3 serves a model of other sizes"):
        world.sync.join(other.engine)
    third = spare(world, "e4")
    third.engine._recording[1]["shards"][0]["start"] += 1  # type: ignore[index]
    with pytest.raises(BindError):
        world.sync.join(third.engine)
    assert all(e.serving for e in (one.engine, other.engine, third.engine, *world.engines))


def test_a_name_that_is_here_already_is_refused() -> None:
    world = world_of()
    with pytest.raises(SessionError, match=r"a replica e1 is here already \(joining\); leave\(\) or replace\(\) it first"):
        world.sync.join(spare(world, "e1").engine)


# -- from a ready replica ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_a_joiner_reads_the_version_from_a_ready_replica_at_once(config: Any) -> None:
    world = world_of(config=config)
    world.commit(1)
    expected = [buffer.bytes.copy() for buffer in world.target]
    world.traps.log.clear()
    one = joined(world, "e2", pull=True)
    assert states(world) == {"e0": "ready(1)", "e1": "ready(1)", "e2": "ready(1)"}
    assert one.engine.serving
    assert one.engine.version == 1
    assert world.sync.version == 1
    for rank in range(6):
        assert np.array_equal(world.target[rank].bytes, expected[rank]), "a lender's memory changed"
    world.check([*expected, *world.expected()[6:]])
    assert not {"quiesce", "write"} & {verb for _, verb in world.traps.log}, "the trainer takes no part"
    assert not {"engine e0", "engine e1"} & {where for where, _ in world.traps.log}
    world.step()
    world.commit(2)


def test_lenders_take_turns_by_what_they_have_served() -> None:
    world = world_of()
    world.commit(1)
    for i in range(2, 5):
        joined(world, f"e{i}", pull=True)
    assert [replica.served > 0 for replica in world.sync.replicas] == [True, True, True, False, False]


def test_a_joiner_that_read_other_bytes_than_were_committed_is_not_resumed() -> None:
    world = world_of()
    world.commit(1)
    changed = world.target[1].arrays["model.layers.0.self_attn.qkv_proj.weight"].reshape(-1).view(np.uint8)
    changed[0] ^= 1  # of the lender, since the commit
    one = spare(world, "e2")
    with pytest.raises(VerifyError, match="transfers are not the committed bytes"):
        world.sync.join(one.engine, pull=True)
    assert not one.engine.serving
    assert one.engine.version == -1
    assert one.engine.reason is not None
    assert states(world)["e2"].startswith("suspect: VerifyError")
    assert [engine.serving for engine in world.engines] == [True, True]
    changed[0] ^= 1
    admitted(world, one)
    world.step()
    world.commit(2)


@pytest.mark.parametrize("verb", ["begin", "pull", "verify", "finish", "resume"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_pull_that_fails_at_any_step_leaves_the_joiner_suspect_and_the_next_sync_repairs(verb: str, after: bool) -> None:
    world = world_of()
    world.commit(1)
    one = spare(world, "e2")
    world.traps.at("engine e2", verb, RolloutError(BOOM), after=after)
    with pytest.raises(RolloutError, match=BOOM):
        world.sync.join(one.engine, pull=True)
    assert one.engine.serving == (verb == "resume" and after)  # it holds the version by then, verified
    assert states(world)["e2"].startswith("suspect")
    assert world.sync.state is State.IDLE
    assert [engine.serving for engine in world.engines] == [True, True]
    admitted(world, one)
    world.step()
    world.commit(2)


def test_a_lender_that_dies_while_it_is_read_from_leaves_the_joiner_suspect() -> None:
    world = world_of(1)
    world.commit(1)

    def die() -> None:
        for rank in range(3):
            transport = world.target_agents[rank]._transport
            assert transport is not None
            transport.close()
            fresh_target(world, rank)

    one = spare(world, "e1")
    world.traps.do("engine e1", "pull", die)
    with pytest.raises(TransportError, match="no open peer at this address"):
        world.sync.join(one.engine, pull=True)
    assert not one.engine.serving
    assert states(world)["e1"].startswith("suspect: TransportError")
    admitted(world, one)
    world.step()
    world.commit(2)


def test_an_engine_cannot_join_while_a_member_is_dead_and_is_not_touched() -> None:
    world = world_of(1)
    world.commit(1)
    for rank in range(3):
        world.target_agents[rank]._transport.close()  # type: ignore[union-attr]
        fresh_target(world, rank)
    one = spare(world, "e1")
    with pytest.raises(TransportError, match="no open peer at this address"):
        world.sync.join(one.engine)
    assert one.engine.serving
    assert list(states(world)) == ["e0"]
    world.sync.leave("e0", gone=True)
    departed(world, "e0")
    world.sync.join(one.engine)
    admitted(world, one)
    world.step()
    world.commit(2)


def test_there_must_be_something_to_pull() -> None:
    world = world_of()
    one = spare(world, "e2").engine
    with pytest.raises(SessionError, match="nothing to pull: no version is committed"):
        world.sync.join(one, pull=True)
    world.commit(1)
    world.traps.at("engine e0", "verify", RolloutError(BOOM))
    with pytest.raises(RolloutError):
        world.sync.sync(2)
    with pytest.raises(SessionError, match="nothing to pull: no replica is ready with it"):
        world.sync.join(one, pull=True)
    blind = world_of(level=Level.OFF)
    blind.sync.sync(1)
    with pytest.raises(SessionError, match="nothing to pull: no digests of it are known"):
        blind.sync.join(spare(blind, "e2").engine, pull=True)


# -- leaving and replacing ---------------------------------------------------------------------------------------------


def test_an_engine_leaves_and_the_others_are_not_spoken_to() -> None:
    world = world_of(3)
    world.commit(1)
    world.traps.log.clear()
    world.sync.leave("e1")
    assert not {"engine e0", "engine e2"} & {where for where, _ in world.traps.log}
    gone = departed(world, "e1")
    assert gone.engine.serving
    kept = [buffer.bytes.copy() for buffer in gone.buffers]
    world.step()
    world.commit(2)
    assert gone.engine.version == 1
    assert all(np.array_equal(a, b.bytes) for a, b in zip(kept, gone.buffers, strict=True)), "written to after it had left"


def test_an_engine_that_does_not_answer_leaves_only_when_it_is_said_to_be_gone() -> None:
    world = world_of()
    world.commit(1)
    world.traps.at("engine e1", "abort", RolloutError("no route"))
    with pytest.raises(RolloutError, match="no route"):
        world.sync.leave("e1")
    assert list(states(world)) == ["e0", "e1"]
    world.sync.leave("e1", gone=True)
    departed(world, "e1")
    world.step()
    world.commit(2)


def test_a_dead_engine_that_keeps_syncs_from_recovering_can_leave() -> None:
    world = world_of()
    world.commit(1)
    world.traps.at("engine e1", "verify", RolloutError(BOOM))
    world.traps.at("engine e1", "abort", RolloutError("no route"), times=2)
    world.step()
    for match in (BOOM, "no route"):
        with pytest.raises(RolloutError, match=match):
            world.sync.sync(2)
    world.sync.leave("e1", gone=True)
    dead = departed(world, "e1")
    world.commit(2)
    assert not dead.engine.serving


def test_when_all_have_left_a_sync_says_so_and_a_joiner_makes_it_possible_again() -> None:
    world = world_of(1)
    world.commit(1)
    world.sync.leave("e0")
    departed(world, "e0")
    with pytest.raises(SessionError, match="no engines to sync to: all have left"):
        world.sync.sync(2)
    joined(world, "new")
    world.step()
    world.commit(2)


def test_a_restarted_engine_replaces_itself_under_its_name_and_pulls() -> None:
    world = world_of()
    world.commit(1)
    again = spare(world, "e0")
    world.sync.replace("e0", again.engine, gone=True, pull=True)
    departed(world, "e0")
    admitted(world, again)
    assert states(world) == {"e1": "ready(1)", "e0": "ready(1)"}
    world.check([world.target[i].bytes for i in range(3)] + world.expected()[3:])
    world.step()
    world.commit(2)


def test_a_replacement_that_does_not_fit_is_refused_before_the_old_one_leaves() -> None:
    world = world_of()
    world.commit(1)
    other = spare(world, "e9")
    other.engine._sizes["attn_dp"] = 2
    with pytest.raises(BindError, match="engine e9 runs with other parallel sizes"):
        world.sync.replace("e1", other.engine)
    assert list(states(world)) == ["e0", "e1"]
    world.step()
    world.commit(2)


def test_many_joins_and_leaves_in_any_order_keep_every_byte_exact() -> None:
    world = world_of(2, costs=None, budget=None)
    rng = np.random.default_rng(3)
    for version in range(1, 9):
        world.step()
        world.commit(version)
        names = [engine.name for engine in world.engines]
        if len(names) > 1 and rng.random() < 0.5:
            name = str(rng.choice(names))
            world.sync.leave(name, gone=bool(rng.random() < 0.5))
            departed(world, name)
        else:
            joined(world, f"v{version}", pull=bool(rng.random() < 0.5))
    by_rank = np.bincount(world.sync.connect().plan.source_rank, minlength=4)
    assert (by_rank > 0).all()


def test_a_second_call_while_one_is_running_is_refused() -> None:
    world = world_of()
    refused: list[str] = []

    def meanwhile() -> None:
        for call in (lambda: world.sync.leave("e0"), lambda: world.sync.sync(9), world.sync.connect):
            with pytest.raises(SessionError, match="while another call of this WeightSync is running") as caught:
                call()
            refused.append(str(caught.value))

    world.traps.do("trainer 0", "write", meanwhile)
    world.commit(1)
    assert len(refused) == 3


def test_a_rank_keeps_its_transport_when_an_engine_joins_and_opens_another_once_one_it_spoke_to_is_gone() -> None:
    world = world_of(2)
    world.step()
    world.commit(1)
    agent = world.source_agents[0]
    first = agent._transport
    joined(world, "late")
    world.step()
    world.commit(2)
    assert agent._transport is first
    world.sync.leave("late")
    departed(world, "late")
    # A transport that has spoken to the one that left still knows it, and keeps sockets to it.
    second = agent._transport
    assert second is not first
    with pytest.raises((SessionError, TransportError, RuntimeError, ValueError)):
        first.describe()  # it was closed
    world.step()
    world.commit(3)
    assert agent._transport is second
