"""Processes and memory that change behind the session's back, and answers that are not what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from failure_support import committed_before, fail, stands, two_engines
from session_support import TrappedEngine, World, fresh_target, moved

from weight_sync.errors import BindError, RolloutError, VerifyError
from weight_sync.ids import Deadline
from weight_sync.session import source
from weight_sync.session.digests import split_digests

# -- whose memory and processes change ---------------------------------------------------------------------------------


def test_a_trainer_rank_that_restarted_since_the_plan_is_found_before_anything_is_paused() -> None:
    world = two_engines()
    version = committed_before(world)
    world.restart_trainer(1)
    fail(world, version, BindError, "trainer rank 1: has no binding of plan .* restarted since")
    assert [(e.serving, e.version) for e in world.engines] == [(True, 1)] * 2
    assert "abort" not in world.traps.verbs("engine e0")
    world.commit(version)


def test_trainer_parameters_that_moved_are_found_before_anything_is_paused() -> None:
    world = two_engines()
    version = committed_before(world)
    world.source[0] = moved(world.source[0], list(world.layouts[0].rank_params(0)))
    world.sources[0].arrays = world.source[0].arrays
    fail(world, version, BindError, "trainer rank 0: parameters moved since they were bound: .*; connect again")
    assert [e.serving for e in world.engines] == [True, True]
    world.commit(version)


def test_trainer_parameters_that_change_places_inside_one_storage_are_found_too() -> None:
    world = two_engines()
    version = committed_before(world)
    arrays = dict(world.sources[0].arrays)
    a, b = [n for n in arrays if n.endswith("layer_norm_weight")]
    arrays[a], arrays[b] = arrays[b], arrays[a]
    world.sources[0].arrays = arrays
    fail(world, version, BindError, "parameters moved since they were bound: .*layer_norm_weight, .*layer_norm_weight")


def test_parameters_that_move_while_the_engines_are_paused_are_not_written_from() -> None:
    world = two_engines()
    version = committed_before(world)

    def move() -> None:
        world.source[1] = moved(world.source[1], list(world.layouts[0].rank_params(1)))
        world.sources[1].arrays = world.source[1].arrays

    world.traps.do("engine e0", "begin", move)
    fail(world, version, BindError, "trainer rank 1: parameters moved")
    stands(world)
    world.commit(version)


def test_parameters_that_move_while_they_are_written_end_the_sync() -> None:
    world = two_engines()
    version = committed_before(world)
    real, turns = source.write_pieces, []

    def write_pieces(transport: Any, bound: Any, round_: int, deadline: Deadline) -> Any:
        if bound.memory.where == "trainer rank 1" and round_ == bound.schedule.rounds - 1:  # no later round looks again
            turns.append(round_)
            world.source[1] = moved(world.source[1], list(world.layouts[0].rank_params(1)))
            world.sources[1].arrays = world.source[1].arrays
        return real(transport, bound, round_, deadline)

    source.write_pieces = write_pieces
    try:
        fail(world, version, BindError, "trainer rank 1: parameters moved")
    finally:
        source.write_pieces = real
    assert len(turns) == 1
    stands(world)
    world.commit(version)


def test_an_engine_that_restarted_is_refused_at_begin_and_bound_anew_by_the_next_sync() -> None:
    world = two_engines()
    version = committed_before(world)
    fresh_target(world, 3)
    fail(world, version, BindError, "rollout rank 0: no binding for plan")
    assert not [v for w, v in world.traps.log if v == "write"]
    world.hub._peers.clear()  # what the old process had open is gone with it
    world.commit(version)


def test_engine_memory_that_moved_since_bind_is_never_written_to() -> None:
    world = two_engines()
    version = committed_before(world)
    old = world.target[4]
    world.target[4] = moved(old, list(world.layouts[1].rank_params(4)))
    kept = old.bytes.copy()
    fail(world, version, BindError, "rollout rank 1: memory moved since it was bound")
    assert not [v for w, v in world.traps.log if v == "write"]
    assert (old.bytes == kept).all()
    world.commit(version)


def test_engine_memory_that_moves_between_begin_and_verify_is_not_taken_for_verified() -> None:
    world = two_engines()
    version = committed_before(world)

    def move() -> None:
        world.target[4] = moved(world.target[4], list(world.layouts[1].rank_params(4)))

    world.traps.do("engine e1", "verify", move)
    fail(world, version, BindError, "rollout rank 1: memory moved")
    stands(world)
    world.commit(version)


def test_a_worker_that_another_controller_bound_to_another_plan_is_refused_at_begin() -> None:
    world = two_engines()
    version = committed_before(world)
    table = dict(world.target_agents[1]._table or {}) | {"plan": "another"}
    world.target_agents[1].call("bind", table)
    fail(world, version, BindError, "rollout rank 1: no binding for plan")
    world.commit(version)


def test_a_worker_whose_binding_was_replaced_by_one_of_the_same_plan_is_refused_at_begin() -> None:
    world = two_engines()
    version = committed_before(world)
    agent = world.target_agents[1]
    table = dict(agent._table or {})
    agent.call("abort", {"reason": "somebody else"})
    agent.call("bind", table)
    fail(world, version, BindError, "the binding of epoch .* was replaced")
    world.commit(version)


def test_engines_that_change_places_are_bound_to_the_transfers_of_their_new_place() -> None:
    world = two_engines()
    world.commit(1)
    width, (first, second) = 3, world.engines
    world.sync.leave("e0")
    world.sync.join(first)
    world.target = world.target[width:] + world.target[:width]
    world.engines = [second, first]
    world.step()
    world.commit(2)
    world.sync.connect()
    world.step()
    world.commit(3)


# -- what the engines answer -------------------------------------------------------------------------------------------


def _answer(world: World, engine: int, change: Any) -> None:
    original = TrappedEngine.verify

    def verify(session: str, deadline: Deadline) -> dict[int, str]:
        digests = original(world.engines[engine], session, deadline)
        world.engines[engine].verify = original.__get__(world.engines[engine])  # type: ignore[method-assign]
        return change(digests)

    world.engines[engine].verify = verify  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: {**d, 1: d[1][:-16] + "0" * 16}, r"1 of \d+ transfers arrived with other bytes.*rollout rank 4"),
        (lambda d: {**d, 1: "".join(split_digests(d[1])[::-1])}, "transfers arrived with other bytes"),
        (lambda d: {**d, 1: d[1][:-16]}, r"rollout rank 4 reported \d+ hex digits for its \d+ transfers"),
        (lambda d: {**d, 1: d[1] + d[1][:16]}, r"rollout rank 4 reported \d+ hex digits for its \d+ transfers"),
        (lambda d: {**d, 1: d[2], 2: d[1]}, "transfers arrived with other bytes|hex digits for its"),
        (lambda d: {r: v for r, v in d.items() if r != 1}, r"engine e1: workers \[0, 2\] of 3 sent digests"),
        (lambda d: {**d, 3: d[0]}, r"engine e1: workers \[0, 1, 2, 3\] of 3 sent digests"),
        (lambda d: {**d, 1: "-" + d[1][1:]}, "16 hex digits"),
        (lambda d: {**d, 1: d[1] + "0"}, "hex digits for its"),
        (lambda d: {**d, 1: ""}, "0 hex digits for its"),
    ],
    ids=["wrong", "reordered", "one short", "one more", "ranks swapped", "rank missing", "rank more", "sign", "long", "empty"],
)
def test_digests_that_are_not_exactly_those_of_the_source_fail_the_sync(change: Any, match: str) -> None:
    world = two_engines()
    _answer(world, 1, change)
    fail(world, 1, VerifyError, match)
    stands(world)
    assert [e.version for e in world.engines] == [-1, -1]
    world.commit(1)


def test_a_trainer_rank_that_sends_no_digests_fails_the_sync() -> None:
    world = two_engines()
    agent = world.source_agents[1]
    original = agent._write
    agent._write = lambda payload: original(payload) | {"digests": None}  # type: ignore[method-assign]
    fail(world, 1, VerifyError, r"\d+ of \d+ transfers have no digest: trainer ranks 1 sent none")
    stands(world)


def test_errors_of_several_engines_and_ranks_are_all_told() -> None:
    world = two_engines()
    for where, text in (("worker 1", "one"), ("worker 2", "two"), ("worker 4", "four"), ("worker 5", "five")):
        world.traps.at(where, "begin", RolloutError(text))
    with pytest.raises(RolloutError, match="one") as caught:
        world.sync.sync(1)
    notes = "\n".join(caught.value.__notes__)
    assert all(text in notes for text in ("two", "four", "five", "engine e1"))
