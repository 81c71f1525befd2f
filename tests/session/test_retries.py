"""Attempts: what is tried again, with whom, after which fence; and that nobody who was left out is ever believed in."""

from __future__ import annotations

import re
from typing import Any

import pytest
from failure_support import BOOM
from session_support import DENSE, NEVER_SHORT_RUNS, World, admitted, build, declared, departed

from weight_sync.errors import ConfigError, PlanError, RolloutError, SessionError, TransportError, VerifyError, WitnessError
from weight_sync.plan.schedule import Budget
from weight_sync.session.failure import FailurePolicy
from weight_sync.session.registry import ReplicaState
from weight_sync.session.silent import SilentObserver
from weight_sync.session.state import State
from weight_sync.transport.faults import Fault, FaultKind, ScriptedFaults
from weight_sync.transport.memory import MemoryHub, MemoryTransport

TWICE = FailurePolicy(attempts=2)
DROP = FailurePolicy(attempts=2, on_suspect="drop")
OTHER = FailurePolicy(attempts=2, other_source=True)


class Listening(SilentObserver):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.retries = 0

    def say(self, text: str) -> None:
        self.said.append(text)

    def count(self, **counts: Any) -> None:
        self.retries += counts.get("retries", 0)


def world_of(failure: FailurePolicy, **more: Any) -> tuple[World, Listening]:
    """Four trainer ranks, tp2, so that every byte has two holders; two engines of three workers."""
    sides = declared(DENSE | {"num_hidden_layers": 1}, trainer={"ranks": 4, "tp": 2}, rollout={"tp": 3, "engines": 2})
    watch = Listening()
    world = build(sides, costs=NEVER_SHORT_RUNS, budget=Budget(512, 512), failure=failure, observer=watch, **more)
    return world, watch


# -- the policy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"attempts": 0}, "failure.attempts=0: must be an integer of at least 1"),
        ({"attempts": 1.5}, r"failure.attempts=1.5"),
        ({"seconds": 0}, "failure.seconds=0: must be above 0"),
        ({"attempts": 2, "on_suspect": "resume"}, "failure.on_suspect='resume': must be keep or drop"),
        ({"on_suspect": "drop"}, "with failure.attempts=1: .*give attempts of at least 2"),
        ({"other_source": True}, "with failure.attempts=1"),
    ],
)
def test_a_policy_that_says_nothing_is_refused(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        FailurePolicy(**wrong)


# -- trying again ------------------------------------------------------------------------------------------------------

STEPS = [
    ("trainer 1", "quiesce"), ("engine e1", "pause"), ("worker 4", "begin"), ("trainer 1", "write"), ("engine e1", "place"),
    ("engine e1", "verify"), ("engine e1", "finish"), ("trainer 1", "bind"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "verb"), STEPS)
def test_a_second_attempt_commits_and_is_printed_and_counted(where: str, verb: str) -> None:
    world, watch = world_of(TWICE)
    world.traps.at(where, verb, RolloutError(BOOM))
    outcome = world.commit(1)
    assert outcome.attempts == 2
    assert watch.retries == 1
    assert watch.said == [f"version 1: attempt 1 of 2 failed, trying again: RolloutError: {BOOM}"]


def test_between_attempts_all_transports_are_closed_and_replaced_and_epochs_are_new() -> None:
    world, _ = world_of(TWICE)
    world.commit(1)
    epochs: list[Any] = []
    old = [agent._transport for agent in (*world.source_agents, *world.target_agents)]
    seen = world.sync.connect().epochs

    def look() -> None:
        assert not world.hub._peers, "a transport is open when the second attempt begins to plan"
        epochs.append(seen)

    world.traps.at("engine e0", "verify", RolloutError(BOOM))
    world.step()
    world.traps.do("trainer 0", "plan", look)
    world.commit(2)
    assert epochs
    assert not {id(t) for t in old} & {id(a._transport) for a in (*world.source_agents, *world.target_agents)}
    after = world.sync.connect().epochs
    assert not [1 for a, b in zip(seen, after, strict=True) for rank in a if a[rank] == b[rank]]


def test_without_the_fence_there_is_no_second_attempt() -> None:
    world, _ = world_of(TWICE)
    world.commit(1)
    world.step()
    world.traps.at("engine e0", "verify", VerifyError(BOOM))
    world.traps.at("trainer 2", "fence", SessionError("rank 2 hangs"), times=2)
    with pytest.raises(SessionError, match="rank 2 hangs") as caught:
        world.sync.sync(2)
    assert any(f"attempt 1: VerifyError: {BOOM}" in note for note in caught.value.__notes__)
    assert world.traps.verbs("engine e0").count("begin") == 2
    assert world.sync.version == 1
    assert not any(engine.serving for engine in world.engines)


def test_the_last_attempts_error_is_raised_with_those_before_as_notes() -> None:
    world, watch = world_of(FailurePolicy(attempts=3))
    for i in range(3):
        world.traps.at("engine e1", "verify", RolloutError(f"{BOOM} {i}"))
    with pytest.raises(RolloutError, match=f"{BOOM} 2") as caught:
        world.sync.sync(1)
    notes = "\n".join(caught.value.__notes__)
    assert f"attempt 1: RolloutError: {BOOM} 0" in notes
    assert f"attempt 2: RolloutError: {BOOM} 1" in notes
    assert watch.retries == 2
    assert world.sync.version == -1
    assert not any(engine.serving for engine in world.engines)
    assert {replica.state for replica in world.sync.replicas} == {ReplicaState.SUSPECT}
    world.commit(1)


@pytest.mark.parametrize("error", [KeyboardInterrupt(BOOM), PlanError(BOOM), ConfigError(BOOM), WitnessError(BOOM)])
def test_what_another_attempt_cannot_change_is_not_tried_again(error: BaseException) -> None:
    world, watch = world_of(TWICE)
    world.traps.at("engine e1", "begin", error)
    with pytest.raises(type(error)):
        world.sync.sync(1)
    assert watch.retries == 0
    world.commit(1)


def test_what_is_committed_is_not_tried_again() -> None:
    world, watch = world_of(TWICE)
    world.traps.at("engine e1", "resume", RolloutError(BOOM))
    with pytest.raises(RolloutError, match=BOOM):
        world.sync.sync(1)
    assert watch.retries == 0
    assert world.sync.version == 1
    assert [replica.text() for replica in world.sync.replicas] == ["ready(1)", f"suspect: RolloutError: {BOOM}"]
    world.step()
    world.commit(2)


def test_no_attempt_begins_after_the_policys_deadline() -> None:
    world, watch = world_of(FailurePolicy(attempts=5, seconds=1e-9))
    world.traps.at("engine e1", "verify", RolloutError(BOOM))
    with pytest.raises(RolloutError, match=BOOM):
        world.sync.sync(1)
    assert watch.retries == 0


def test_exactly_the_touched_replicas_are_suspect() -> None:
    world, _ = world_of(FailurePolicy())
    world.commit(1)
    world.traps.at("trainer 0", "quiesce", RolloutError(BOOM))
    with pytest.raises(RolloutError):
        world.sync.sync(2)
    assert [replica.text() for replica in world.sync.replicas] == ["ready(1)", "ready(1)"]
    world.traps.at("trainer 0", "write", RolloutError(BOOM))
    with pytest.raises(RolloutError):
        world.sync.sync(2)
    assert [replica.text() for replica in world.sync.replicas] == [f"suspect: RolloutError: {BOOM}"] * 2


# -- leaving replicas out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["describe", "pause", "begin", "place", "verify", "finish"])
def test_a_replica_that_fails_is_left_out_and_the_others_commit_unanimously(verb: str) -> None:
    world, watch = world_of(DROP)
    world.commit(1)
    world.sync._connection = None
    world.step()
    world.traps.at("engine e1", verb, RolloutError(BOOM), times=3)
    world.traps.at("engine e1", "abort", RolloutError("no route"), times=3)
    broken = departed(world, "e1")
    outcome = world.commit(2)
    assert outcome.left_out == ("e1",)
    assert outcome.attempts == 2
    assert [receipt.engine for receipt in outcome.receipts] == ["e0"]
    assert "without e1, which stay out until they join again" in watch.said[0]
    assert world.sync.replicas[1].text() == f"suspect: RolloutError: {BOOM}"
    # It is never resumed with the new version: it stands, or, where it was not reached at all, serves what it held.
    assert broken.engine.version == 1
    assert broken.engine.serving == (verb in ("describe", "pause"))
    world.step()
    assert world.commit(3).left_out == ("e1",)
    world.traps._traps.clear()
    world.sync.join(broken.engine)
    admitted(world, broken)
    world.step()
    assert world.commit(4).left_out == ()


def test_a_replica_whose_bytes_are_wrong_is_left_out_and_stays_paused() -> None:
    world, _ = world_of(DROP)
    world.commit(1)
    world.step()
    engine, original = world.engines[1], world.engines[1].verify

    def lie(session: str, deadline: Any, digests: bool = True) -> Any:
        found = original(session, deadline)
        found[1] = "0" * 16 + found[1][16:]
        return found

    engine.verify = lie  # type: ignore[method-assign]
    broken = departed(world, "e1")
    assert world.commit(2).left_out == ("e1",)
    assert not broken.engine.serving
    assert broken.engine.version == 1
    assert "VerifyError" in str(broken.engine.reason)


def test_when_all_replicas_fail_nobody_is_left_out() -> None:
    world, _ = world_of(DROP)
    for engine in ("engine e0", "engine e1"):
        world.traps.at(engine, "begin", RolloutError(BOOM), times=2)
    with pytest.raises(RolloutError, match=BOOM):
        world.sync.sync(1)
    assert not [replica for replica in world.sync.replicas if replica.out]
    assert world.sync.state is State.FAILED
    world.commit(1)


def test_keep_fails_everything_for_one_replica() -> None:
    world, _ = world_of(TWICE)
    world.traps.at("engine e1", "begin", RolloutError(BOOM), times=2)
    with pytest.raises(RolloutError, match=BOOM):
        world.sync.sync(1)
    assert not any(engine.serving for engine in world.engines)
    world.commit(1)


# -- other sources -----------------------------------------------------------------------------------------------------


def broken_rank(side: str, rank: int, hub: MemoryHub) -> MemoryTransport:
    """Every write of trainer rank 1 fails, on every transport it opens."""
    faults = ScriptedFaults(dict.fromkeys(range(10_000), Fault(FaultKind.ERROR, code=-1)))
    return MemoryTransport(hub, faults=faults if side == "trainer" and rank == 1 else None)


def lost(batch: Any) -> TransportError:
    where = f"memory/memory {batch.endpoint.address}"
    return TransportError("unreachable", endpoint=where, tensor="t", byte_range=(0, 1), code=-1)


def test_a_rank_whose_writes_fail_is_avoided_where_another_holds_the_same_bytes() -> None:
    world, watch = world_of(OTHER, transport=broken_rank)
    assert world.commit(1).attempts == 2
    assert "trying again, without trainer ranks [1] where another holds the same bytes" in watch.said[0]
    plan = world.sync._connection.plan  # type: ignore[union-attr]
    assert 1 not in plan.source_rank
    world.step()
    assert world.commit(2).attempts == 1, "the binding that works is kept"
    assert world.sync.connect().inputs.avoid == [], "planning anew gives the rank another chance"


def test_a_rank_that_alone_holds_bytes_is_used_all_the_same() -> None:
    sides = declared(DENSE | {"num_hidden_layers": 1}, trainer={"ranks": 2, "tp": 2}, rollout={"tp": 3, "engines": 2})
    world = build(sides, failure=OTHER, transport=broken_rank)
    with pytest.raises(TransportError) as caught:
        world.sync.sync(1)
    assert any("attempt 1: TransportError" in note for note in caught.value.__notes__)
    assert world.sync.version == -1
    assert not any(engine.serving for engine in world.engines)


def test_a_write_that_fails_to_one_engine_leaves_that_engine_out() -> None:
    world, watch = world_of(DROP)
    world.commit(1)
    world.step()
    for agent in world.source_agents:
        original = agent._open

        def poisoned(original: Any = original) -> Any:
            transport = original()
            write = transport.write

            def refuse(batch: Any) -> Any:
                if batch.endpoint.address in {a._transport._address for a in world.target_agents[3:6] if a._transport}:
                    raise lost(batch)
                return write(batch)

            transport.write = refuse
            return transport

        agent._open = poisoned
    world.sync.connect()
    for agent in world.source_agents:
        agent.call("fence", {"reason": "so that the next transport is the poisoned one"})
    world.sync._connection = None
    agents = world.target_agents
    broken = departed(world, "e1")
    world.target_agents = agents
    assert world.commit(2).left_out == ("e1",)
    assert not broken.engine.serving
    assert re.search("without e1, which stay out", watch.said[0])


def test_a_first_failure_tells_against_the_source_and_the_next_against_the_engine() -> None:
    world, watch = world_of(FailurePolicy(attempts=3, on_suspect="drop", other_source=True))
    target = world.engines[1]
    wait = MemoryTransport.wait

    def failing(self: MemoryTransport, ticket: Any, deadline: Any) -> Any:
        if ticket.batch.endpoint.address in {a._transport._address for a in target._agents.values() if a._transport}:
            raise lost(ticket.batch)
        return wait(self, ticket, deadline)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryTransport, "wait", failing)
        broken = departed(world, "e1")
        outcome = world.sync.sync(1)
    assert outcome.left_out == ("e1",)
    assert outcome.attempts == 3
    assert "without trainer ranks" in watch.said[0]
    assert "without e1" in watch.said[1]
    assert not broken.engine.serving
