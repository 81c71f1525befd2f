"""A controller dies or sleeps, another one takes over: what it finds, what it finishes, what it redoes, who is shut out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from failure_support import BOOM, two_engines
from session_support import World, admitted, spare

from weight_sync.errors import RolloutError, SessionError, WeightSyncError
from weight_sync.ids import Deadline
from weight_sync.session import takeover
from weight_sync.session.contracts import EngineState, Receipt
from weight_sync.session.gate import Gate, controller_of, generation_of, new_controller, new_session
from weight_sync.session.session import WeightSync
from weight_sync.session.state import State
from weight_sync.session.takeover import judge


class Killed(BaseException):
    """The controller's process ends here: nothing of it runs any more, no clean-up either."""


def kill(world: World, where: str, verb: str, *, after: bool = False, version: int = 1) -> None:
    """A sync whose controller dies at this call. Its own clean-up calls never happen, as in a process that is gone."""
    old = world.sync
    world.traps.at(where, verb, Killed(), after=after)
    old._fence.put_up = lambda: None  # type: ignore[method-assign]
    old._fence.release = lambda session, deadline: None  # type: ignore[method-assign]
    with pytest.raises(Killed):
        old.sync(version)
    world.sync = WeightSync(world.trainers, world.engines, old._spec, pause="retract", timeouts=old._timeouts)


# -- who may call ------------------------------------------------------------------------------------------------------


def test_names_say_the_generation() -> None:
    controller = new_controller(7)
    session = new_session(controller)
    assert (generation_of(controller), generation_of(session), controller_of(session)) == (7, 7, controller)
    assert new_session(controller, "beef").endswith("-beef")
    assert (generation_of("0123abcd"), controller_of("s1"), generation_of("")) == (0, "", 0)


def test_a_gate_lets_in_the_newest_controller_and_no_older_one() -> None:
    gate = Gate("here")
    gate.check("bind", {"controller": "2-a"})
    gate.check("begin", {"session": "2-a-1"})
    for name in ("1-b", "2-b", "s1"):
        for payload in ({"controller": name}, {"session": name}, {"controller": name, "session": "2-a-1"}):
            with pytest.raises(SessionError, match=r"here: begin by controller .* is refused: 2-a has taken over since"):
                gate.check("begin", payload)
    gate.check("release", {"controller": "3-c", "session": "2-a-1"})
    with pytest.raises(SessionError, match="3-c has taken over"):
        gate.check("verify", {"session": "2-a-1"})
    assert gate.generation == 3


def test_a_begin_that_comes_after_its_session_was_ended_is_refused() -> None:
    world = two_engines()
    world.commit(1)
    late: list[Any] = []
    engine, original = world.engines[1], world.engines[1].begin
    engine.begin = lambda *args: late.append(args)  # type: ignore[method-assign]
    world.step()
    with pytest.raises(WeightSyncError):
        world.sync.sync(2)
    with pytest.raises(SessionError, match="which has ended; it came too late"):
        original(*late[0])
    engine.begin = original  # type: ignore[method-assign]
    world.commit(2)


# -- judging -----------------------------------------------------------------------------------------------------------


def receipt(version: int, digest: str = "d") -> Receipt:
    return Receipt("e", "1-a-1", version, digest)


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        ([(EngineState(True, receipt=receipt(3)), 3)] * 2, ("resumed", 3)),
        ([(EngineState(True, receipt=receipt(3)), 3), (EngineState(False, receipt=receipt(3)), 3)], ("resumed", 3)),
        ([(EngineState(False, receipt=receipt(3)), 3)] * 2, ("serving", 3)),
        ([(EngineState(False), -1)] * 2, ("serving", -1)),
        ([(EngineState(False), 2)] * 2, ("serving", 2)),
        ([(EngineState(True, receipt=receipt(3)), 3), (EngineState(True, receipt=receipt(3, "x")), 3)], ("redo", 3)),
        ([(EngineState(True, receipt=receipt(3)), 3), (EngineState(True, receipt=receipt(2)), 2)], ("redo", 2)),
        ([(EngineState(True, receipt=receipt(3)), 3), (EngineState(True), 2)], ("redo", 2)),
        ([(EngineState(True, receipt=receipt(3)), 3), (EngineState(False), 3)], ("redo", 3)),
        ([(EngineState(True, receipt=receipt(3), session="1-a-2"), 3)] * 2, ("redo", 3)),
        ([(EngineState(True), 2)] * 2, ("redo", 2)),
        ([(EngineState(False), 2), (EngineState(False), 1)], ("redo", 1)),
    ],
)
def test_only_receipts_of_one_version_and_digest_on_all_engines_are_a_commit(states: Any, verdict: Any) -> None:
    assert judge({f"e{i}": state for i, state in enumerate(states)}) == verdict


def test_every_state_has_words() -> None:
    assert EngineState(True, "1-a-2").text() == "paused, session 1-a-2 was begun and not finished"
    assert EngineState(True, receipt=receipt(3)).text() == "paused, holds version 3, verified in session 1-a-1"
    assert EngineState(False, reason="left").text() == "serving, holds no receipt (left)"


# -- taking over -------------------------------------------------------------------------------------------------------

UNFINISHED = [
    ("trainer 1", "quiesce", True), ("engine e1", "pause", False), ("engine e0", "pause", True), ("engine e1", "begin", False),
    ("worker 4", "begin", True), ("trainer 1", "write", False), ("trainer 0", "write", True), ("engine e1", "place", True),
    ("engine e1", "verify", False), ("engine e0", "verify", True), ("engine e1", "finish", False),
]  # fmt: skip


@pytest.mark.parametrize(("where", "verb", "after"), UNFINISHED)
@pytest.mark.parametrize("recover", [True, False], ids=["recover", "sync at once"])
def test_a_sync_whose_controller_died_is_redone_by_the_next_one(where: str, verb: str, after: bool, recover: bool) -> None:
    world = two_engines()
    world.commit(1)
    world.step()
    kill(world, where, verb, after=after, version=2)
    stood = [engine.paused for engine in world.engines]
    if recover:
        found = world.sync.recover()
        assert world.sync.version == 1
        assert found.version == 1
        assert found.action == ("redo" if any(stood) else "serving")
        for engine, was in zip(world.engines, stood, strict=True):
            assert engine.paused == was, "nobody is resumed without a receipt of what all hold"
            if was:
                assert "took over" in str(engine.reason)
    assert not any(source.quiet for source in world.sources) or not recover
    world.commit(2)


@pytest.mark.parametrize(
    ("where", "verb", "after"), [("engine e1", "finish", True), ("engine e0", "resume", False), ("engine e1", "resume", True)]
)
def test_a_sync_that_was_verified_everywhere_is_finished_by_the_next_controller(where: str, verb: str, after: bool) -> None:
    world = two_engines()
    world.commit(1)
    world.step()
    expected = world.expected()
    old = world.sync
    kill(world, where, verb, after=after, version=2)
    world.check(expected)
    finished = all(engine.version == 2 for engine in world.engines)
    found = world.sync.recover()
    assert finished
    assert found.action in ("resumed", "serving")
    assert (found.version, world.sync.version, world.sync.state) == (2, 2, State.IDLE)
    assert [(engine.serving, engine.version) for engine in world.engines] == [(True, 2)] * 2
    world.check(expected)
    assert not any(source.quiet for source in world.sources)
    assert old is not world.sync
    world.step()
    world.commit(3)


def test_what_the_controller_that_died_left_behind_is_said_by_every_engine() -> None:
    world = two_engines()
    kill(world, "engine e1", "verify")
    found = world.sync.recover()
    assert found.action == "redo"
    for text in found.engines.values():
        assert text.startswith("paused, session 1-")
        assert "was begun and not finished" in text
    world.commit(1)


def test_engines_that_serve_one_version_are_adopted_and_versions_go_on_from_there() -> None:
    world = two_engines()
    world.commit(5)
    world.sync = WeightSync(world.trainers, world.engines, world.sync._spec, timeouts=world.sync._timeouts)
    assert world.sync.recover().action == "serving"
    assert world.sync.version == 5
    assert [replica.text() for replica in world.sync.replicas] == ["ready(5)"] * 2
    with pytest.raises(SessionError, match="version 5 is not an integer above the committed 5"):
        world.sync.sync(5)
    world.step()
    world.commit(6)


def before_the_claim(patch: pytest.MonkeyPatch, happens: Callable[[], Any]) -> None:
    """After the newer controller's first look and before it shuts the older one out."""
    real = takeover.claim

    def claim(*args: Any) -> str:
        patch.setattr(takeover, "claim", real)
        happens()
        return real(*args)

    patch.setattr(takeover, "claim", claim)


def test_what_an_older_controller_commits_before_it_is_shut_out_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = two_engines()
    world.commit(5)
    old = world.sync
    world.sync = WeightSync(world.trainers, world.engines, old._spec, timeouts=old._timeouts)
    world.step()
    before_the_claim(monkeypatch, lambda: old.sync(6))
    found = world.sync.recover()
    assert (found.action, found.version, world.sync.version) == ("serving", 6, 6)
    assert [(engine.serving, engine.version) for engine in world.engines] == [(True, 6)] * 2


def test_what_an_older_controller_leaves_half_done_before_it_is_shut_out_is_redone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = two_engines()
    world.commit(5)
    old = world.sync
    world.sync = WeightSync(world.trainers, world.engines, old._spec, timeouts=old._timeouts)
    world.step()

    def dies() -> None:
        world.traps.at("engine e1", "verify", Killed())
        old._fence.put_up = lambda: None  # type: ignore[method-assign]
        with pytest.raises(Killed):
            old.sync(6)

    before_the_claim(monkeypatch, dies)
    found = world.sync.recover()
    assert (found.action, found.version, world.sync.version, world.sync.state) == ("redo", 5, 5, State.FAILED)
    assert [(engine.serving, engine.version) for engine in world.engines] == [(False, 5)] * 2
    assert all(replica.text().startswith("suspect: paused") for replica in world.sync.replicas)
    world.commit(6)


def test_a_joiner_that_pulled_counts_as_holding_the_version() -> None:
    world = two_engines()
    world.commit(1)
    one = spare(world, "e2")
    world.sync.join(one.engine, pull=True)
    admitted(world, one)
    spec = world.sync._counted()
    world.sync = WeightSync(world.trainers, world.engines, spec, timeouts=world.sync._timeouts)
    assert world.sync.recover().action == "serving"
    assert world.sync.version == 1
    world.step()
    world.commit(2)


def test_recovering_is_for_a_controller_that_has_done_nothing_yet() -> None:
    world = two_engines()
    world.commit(1)
    with pytest.raises(SessionError, match=r"recover\(\) is for a controller that has done nothing yet"):
        world.sync.recover()


def test_engines_that_do_not_say_where_they_stand_cannot_be_recovered_from() -> None:
    world = two_engines()
    engine, original = world.engines[1], world.engines[1].describe
    import dataclasses

    engine.describe = lambda deadline: dataclasses.replace(original(deadline), state=None)  # type: ignore[method-assign]
    with pytest.raises(SessionError, match="engines e1 do not say where they stand"):
        world.sync.recover()
    world.commit(1)


# -- the stale one wakes up --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["quiesce", "pause", "begin", "write", "verify", "finish", "resume"])
def test_a_controller_that_sleeps_while_another_takes_over_can_do_nothing_when_it_wakes(step: str) -> None:
    world = two_engines()
    world.commit(1)
    world.step()
    old = world.sync
    newer = WeightSync(world.trainers, world.engines, old._spec, timeouts=old._timeouts)
    where = "trainer 0" if step in ("quiesce", "write") else "engine e0"
    seen: list[Any] = []

    def meanwhile() -> None:
        world.sync = newer
        newer.recover()
        world.step()
        seen.append(world.expected())
        world.commit(2 if newer.version < 2 else 3)

    world.traps.do(where, step, meanwhile)
    with pytest.raises(WeightSyncError) as caught:
        old.sync(2)
    text = f"{caught.value}\n" + "\n".join(getattr(caught.value, "__notes__", []))
    assert "has taken over" in text or step == "resume", text
    assert seen, "the other controller did not commit"
    world.check(seen[0])
    held = newer.version
    # What serves is what the newer one committed. A stale pause may have stopped an engine; it cannot have been resumed.
    assert [engine.version for engine in world.engines] == [held, held]
    with pytest.raises(SessionError, match="has taken over since; this controller is stale"):
        old.connect()
    world.step()
    world.commit(held + 1)


def test_a_receipt_of_an_older_controller_resumes_nothing() -> None:
    world = two_engines()
    outcome = world.commit(1)
    world.sync = WeightSync(world.trainers, world.engines, world.sync._spec, timeouts=world.sync._timeouts)
    world.traps.at("engine e1", "verify", RolloutError(BOOM))
    with pytest.raises(RolloutError):
        world.sync.sync(2)
    engine = world.engines[0]
    engine._receipt = copy.copy(outcome.receipts[0])  # an engine that still has it
    with pytest.raises(SessionError, match="has taken over since"):
        engine.resume(outcome.receipts[0], Deadline.after(5))
    assert not engine.serving
    world.commit(2)


def test_a_binding_made_by_another_controller_is_not_written_through() -> None:
    world = two_engines()
    world.commit(1)
    agent = world.source_agents[1]
    agent._bound_by = "0-other"
    world.step()
    with pytest.raises(WeightSyncError, match="its binding was made by controller 0-other"):
        world.sync.sync(2)
    assert all(engine.serving for engine in world.engines)
    world.commit(2)


def test_two_controllers_that_start_at_the_same_moment_do_not_both_go_on() -> None:
    world = two_engines()
    other = WeightSync(world.trainers, world.engines, world.sync._spec, timeouts=world.sync._timeouts)
    world.traps.do("engine e0", "claim", other.connect)
    with pytest.raises(SessionError, match="has taken over since"):
        world.sync.connect()
    world.sync = other
    world.commit(1)
