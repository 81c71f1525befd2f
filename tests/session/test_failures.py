"""A failure at every step: one error, no engine resumed, no version moved, and the next sync repairs everything."""

from __future__ import annotations

from typing import Any

import pytest
from failure_support import BOOM, committed_before, fail, raiser, stands, two_engines
from session_support import fresh_target

from weight_sync.errors import RolloutError, SessionError, TransportError, VerifyError, WeightSyncError
from weight_sync.ids import Deadline
from weight_sync.session.session import SilentObserver, Timeouts
from weight_sync.session.state import State

BEFORE_PAUSE = [
    ("trainer 1", "describe"), ("engine e1", "describe"), ("trainer 1", "plan"), ("engine e1", "record"),
    ("engine e1", "bind"), ("worker 4", "bind"), ("trainer 1", "bind"), ("trainer 1", "quiesce"),
]  # fmt: skip

AFTER_PAUSE = [
    ("engine e1", "pause"), ("engine e1", "begin"), ("worker 4", "begin"), ("trainer 1", "write"), ("engine e1", "place"),
    ("worker 4", "place"), ("engine e1", "verify"), ("worker 4", "verify"), ("engine e1", "finish"), ("worker 4", "end"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "verb"), BEFORE_PAUSE)
def test_a_failure_before_the_pause_touches_no_engine(where: str, verb: str) -> None:
    world = two_engines()
    world.traps.at(where, verb, RolloutError(BOOM), after=True)
    fail(world, 1)
    verbs = {v for w, v in world.traps.log if w.startswith("engine")}
    assert not verbs & {"pause", "begin", "finish", "resume", "abort"}
    assert world.sync.state is State.IDLE
    assert [(e.serving, e.version, e.reason) for e in world.engines] == [(True, -1, None)] * 2
    world.commit(1)


@pytest.mark.parametrize(("where", "verb"), AFTER_PAUSE)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_failure_after_the_pause_leaves_engines_paused_and_the_next_sync_repairs(where: str, verb: str, after: bool) -> None:
    world = two_engines()
    version = committed_before(world)
    world.traps.at(where, verb, RolloutError(BOOM), after=after)
    fail(world, version)
    if verb == "pause" and not after:
        stands(world, 0)
        assert world.engines[1].serving, "it was never paused and goes on serving the committed version"
    else:
        stands(world)
    assert not [entry for entry in world.traps.log if entry[1] == "resume"]
    if verb != "finish":
        assert world.engines[1].version == 1
    if verb not in ("finish", "end"):
        assert world.engines[0].version == 1
    world.commit(version)


def test_when_one_of_two_engines_fails_to_finish_nobody_is_resumed_and_the_version_stays() -> None:
    world = two_engines()
    version = committed_before(world)
    world.traps.at("engine e1", "finish", RolloutError(BOOM))
    fail(world, version)
    stands(world)
    assert [e.version for e in world.engines] == [2, 1]
    assert "resume" not in world.traps.verbs("engine e0")
    world.step()
    world.commit(version)


def test_a_receipt_of_a_sync_that_failed_elsewhere_resumes_nothing() -> None:
    world = two_engines()
    kept: list[Any] = []
    engine = world.engines[0]
    original = engine.finish
    engine.finish = lambda *a: kept.append(original(*a)) or kept[-1]  # type: ignore[method-assign]
    world.traps.at("engine e1", "finish", RolloutError(BOOM))
    fail(world, 1)
    with pytest.raises(RolloutError, match="stays paused"):
        engine.resume(kept[0], Deadline.after(5))
    assert not engine.serving


def test_a_receipt_for_something_else_is_not_a_commit() -> None:
    world = two_engines()
    engine = world.engines[1]
    original = engine.finish
    engine.finish = lambda session, version, digest, deadline: original(session, version - 1, digest, deadline)  # type: ignore[method-assign]
    fail(world, 5, SessionError, "engine e1 gave a receipt for something else")
    stands(world)
    engine.finish = original  # type: ignore[method-assign]
    world.commit(5)


def test_a_resume_that_fails_leaves_the_version_committed_and_says_so() -> None:
    world = two_engines()
    version = committed_before(world)
    expected = world.expected()
    world.traps.at("engine e1", "resume", RolloutError(BOOM))
    with pytest.raises(RolloutError, match=BOOM) as caught:
        world.sync.sync(version)
    assert any("version 2 is committed" in note for note in caught.value.__notes__)
    assert (world.sync.version, world.sync.state) == (2, State.FAILED)
    world.check(expected)  # who was resumed serves the version that is committed
    assert [(e.serving, e.version) for e in world.engines] == [(True, 2), (False, 2)]
    world.step()
    world.commit(3)


# -- cleaning up fails as well -----------------------------------------------------------------------------------------


def test_an_abort_that_fails_does_not_hide_the_first_error_and_is_made_up_before_the_next_sync() -> None:
    world = two_engines()
    version = committed_before(world)
    world.traps.at("trainer 0", "write", RolloutError(BOOM))
    world.traps.at("engine e1", "abort", RolloutError("no route to engine e1"), times=2)
    with pytest.raises(RolloutError, match=BOOM) as caught:
        world.sync.sync(version)
    assert any("no route to engine e1" in note for note in caught.value.__notes__)
    assert not any(source.quiet for source in world.sources)
    # Its old transport is open still: it must not be bound again before it was closed.
    seen = len(world.traps.log)
    with pytest.raises(RolloutError, match="no route to engine e1"):
        world.sync.sync(version)
    assert not {v for _, v in world.traps.log[seen:]} & {"describe", "bind", "quiesce", "pause"}
    assert world.sync.state is State.FAILED
    world.commit(version)
    assert world.traps.sprung


def test_an_abort_that_did_not_reach_one_engine_leaves_no_binding_of_before_in_use() -> None:
    world = two_engines()
    version = committed_before(world)
    before = world.sync.connect().epochs
    world.traps.at("trainer 0", "write", RolloutError(BOOM))
    world.traps.at("engine e1", "abort", RolloutError("lost"))
    with pytest.raises(RolloutError, match=BOOM):
        world.sync.sync(version)
    after = world.sync.connect().epochs
    assert not [1 for a, b in zip(before, after, strict=True) for rank in a if a[rank] == b[rank]]
    world.commit(version)


def test_a_fence_that_fails_keeps_the_trainer_from_stepping_until_it_is_up() -> None:
    world = two_engines()
    version = committed_before(world)
    # The write fails half-way, so that its bytes may still be under way.
    transport = world.source_agents[1]._transport
    assert transport is not None
    transport.wait = raiser(TransportError("gone", endpoint="e", tensor="t", byte_range=(0, 1), code=-1))  # type: ignore[method-assign]
    world.traps.at("trainer 1", "fence", SessionError("rank 1 does not answer"))
    with pytest.raises(TransportError, match="gone") as caught:
        world.sync.sync(version)
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1 does not answer" in notes
    assert "its parameters may still be read, so it must not step" in notes
    assert [source.quiet for source in world.sources] == [False, True]
    world.sync.connect()
    assert [source.quiet for source in world.sources] == [False, False]
    world.commit(version)


def test_the_trainer_is_released_only_after_all_transports_are_closed() -> None:
    world = two_engines()
    version = committed_before(world)
    open_at_release: list[int] = []
    for rank in (0, 1):
        world.traps.do(f"trainer {rank}", "release", lambda: open_at_release.append(len(world.hub._peers)))
    world.traps.at("engine e0", "verify", RolloutError(BOOM))
    fail(world, version)
    assert open_at_release == [0, 0]


def test_a_transport_that_does_not_close_bars_the_trainer_rank_until_its_process_ends() -> None:
    world = two_engines()
    version = committed_before(world)
    transport = world.source_agents[1]._transport
    assert transport is not None
    error = TransportError("gone", endpoint="e", tensor="t", byte_range=(0, 1), code=-1)
    transport.wait = transport.close = raiser(error)  # type: ignore[method-assign]
    with pytest.raises(TransportError):
        world.sync.sync(version)
    assert world.sources[1].quiet
    for _ in range(2):
        with pytest.raises(SessionError, match=r"trainer rank 1: a transport did not close .*; end this process"):
            world.sync.sync(version)
        assert world.sources[1].quiet
        assert not any(engine.serving for engine in world.engines)


def test_a_transport_that_does_not_close_bars_the_worker_until_its_process_ends() -> None:
    world = two_engines()
    version = committed_before(world)
    worker = world.target_agents[4]
    assert worker._transport is not None
    worker._transport.close = raiser(RuntimeError("still inside a call"))  # type: ignore[method-assign]
    world.traps.at("engine e0", "verify", RolloutError(BOOM))
    fail(world, version)
    with pytest.raises(SessionError, match=r"rollout rank 1: a transport did not close .*still inside a call.*; end this"):
        world.sync.sync(version)
    world.hub._peers.clear()  # the process ends
    fresh_target(world, 4)
    world.commit(version)


def test_a_release_that_fails_after_a_failure_does_not_hide_the_first_error() -> None:
    world = two_engines()
    world.traps.at("engine e1", "verify", VerifyError(BOOM))
    world.traps.at("trainer 0", "release", SessionError("rank 0 hangs"))
    with pytest.raises(VerifyError, match=BOOM) as caught:
        world.sync.sync(1)
    assert any("rank 0 hangs" in note for note in caught.value.__notes__)
    world.sources[1].release()
    world.commit(1)


def test_a_release_that_fails_after_the_commit_is_an_error_that_says_what_is_committed() -> None:
    world = two_engines()
    expected = world.expected()
    world.traps.at("trainer 0", "release", SessionError("rank 0 hangs"))
    with pytest.raises(SessionError, match="rank 0 hangs") as caught:
        world.sync.sync(1)
    assert any("version 1 is committed and served by every engine" in note for note in caught.value.__notes__)
    assert (world.sync.version, world.sync.state, world.engines[0].serving) == (1, State.IDLE, True)
    world.check(expected)
    assert [source.quiet for source in world.sources] == [True, False]
    world.sync.sync(2)  # the rank that was not released is released and made quiescent anew
    assert [source.quiet for source in world.sources] == [False, False]


# -- the controller ----------------------------------------------------------------------------------------------------


class Interrupting(SilentObserver):
    """An observer on whose watch the controller is interrupted (Ctrl-C) when a phase begins or ends."""

    def __init__(self, phase: str, after: bool) -> None:
        self.phase_, self.after, self.armed = phase, after, True

    def phase(self, name: str) -> Any:
        return _Phase(self, name)


class _Phase:
    def __init__(self, owner: Interrupting, name: str) -> None:
        self.owner, self.mine = owner, name == owner.phase_

    def _interrupt(self) -> None:
        if self.mine and self.owner.armed:
            self.owner.armed = False
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        if not self.owner.after:
            self._interrupt()

    def __exit__(self, *error: object) -> None:
        if self.owner.after and error[0] is None:
            self._interrupt()


@pytest.mark.parametrize("after", [False, True], ids=["entering", "leaving"])
@pytest.mark.parametrize("phase", ["plan", "pause", "write", "verify", "commit", "resume"])
def test_an_interrupted_controller_leaves_no_engine_serving_what_is_not_committed(phase: str, after: bool) -> None:
    world = two_engines(observer=Interrupting(phase, after))
    expected = world.expected()
    with pytest.raises(KeyboardInterrupt):
        world.sync.sync(1)
    serving = [engine.serving for engine in world.engines]
    steps = ["plan", "pause", "write", "verify", "commit", "resume"]
    done = steps.index(phase) + after
    if done < 2:  # plan done, pause not begun
        assert serving == [True, True]
        assert world.sync.version == -1
    elif done < 5:
        stands(world)
        assert world.sync.version == -1
    else:
        world.check(expected)
        assert world.sync.version == 1
    assert not any(source.quiet for source in world.sources)
    world.step()
    world.commit(2)


def test_an_interrupt_inside_a_worker_call_is_raised_and_handled_like_any_error() -> None:
    world = two_engines()
    world.traps.at("engine e1", "begin", KeyboardInterrupt(BOOM))
    fail(world, 1, KeyboardInterrupt)
    stands(world)
    world.commit(1)


def test_a_deadline_that_passes_in_the_middle_fails_the_sync() -> None:
    world = two_engines(timeouts=Timeouts(connect=60, sync=60, abort=30))
    world.sync.connect()
    world.sync._timeouts = Timeouts(connect=60, sync=0.0, abort=30)
    fail(world, 1, WeightSyncError, "deadline")
    world.sync._timeouts = Timeouts(connect=60, sync=60, abort=30)
    world.commit(1)
