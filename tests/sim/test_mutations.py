"""The drills can fail: each mistake, made in the real session on purpose, is found within the stated number of seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from weight_sync.chaos import drill
from weight_sync.chaos.faults import FAULTS
from weight_sync.errors import TransportError
from weight_sync.ids import Deadline, Side
from weight_sync.session import membership, verify
from weight_sync.session.attempt import Attempt
from weight_sync.session.fence import Fence
from weight_sync.session.inprocess import InProcessEngine
from weight_sync.session.memory import Memory
from weight_sync.session.source import SourceAgent
from weight_sync.session.target import TargetAgent
from weight_sync.session.verify import Level
from weight_sync.transport.base import Completion
from weight_sync.transport.memory import MemoryTransport

Patch = pytest.MonkeyPatch


def swallow_transport_errors(patch: Patch) -> None:
    wait = MemoryTransport.wait

    def calm(self: MemoryTransport, ticket: Any, deadline: Any) -> Completion:
        try:
            return wait(self, ticket, deadline)
        except TransportError:
            self._unusable = None
            return Completion(nbytes=int(ticket.batch.nbytes.sum()), seconds=0.0)

    patch.setattr(MemoryTransport, "wait", calm)


def advance_the_version_early(patch: Patch) -> None:
    run = Attempt.run

    def early(self: Attempt, on_commit: Callable[[Attempt], None]) -> None:
        on_commit(self)
        run(self, on_commit)

    patch.setattr(Attempt, "run", early)


def skip_a_third_of_the_digests(patch: Patch) -> None:
    merge = verify.merge_digests
    seen: list[Any] = []

    def merged(plan: Any, side: str, parts: Any, rows_of: Any) -> Any:
        result = merge(plan, side, parts, rows_of)
        if side == Side.TRAINER:
            seen[:] = [result]
        else:
            result[::3] = seen[0][::3]
        return result

    patch.setattr(verify, "merge_digests", merged)


def verify_only_the_first_engine(patch: Patch) -> None:
    merge = verify.merge_digests
    seen: list[Any] = []

    def merged(plan: Any, side: str, parts: Any, rows_of: Any) -> Any:
        result = merge(plan, side, parts, rows_of)
        if side == Side.TRAINER:
            seen[:] = [result]
        else:
            late = plan.target_rank * 2 >= plan.target_world
            result[late] = seen[0][late]
        return result

    patch.setattr(verify, "merge_digests", merged)


def resume_whatever_happened(patch: Patch) -> None:
    put_up = Fence.put_up

    def generous(self: Fence) -> None:
        try:
            put_up(self)
        finally:
            for replica in self._registry.members:
                replica.engine.resume(None, Deadline.after(1))  # type: ignore[arg-type]

    patch.setattr(Fence, "put_up", generous)
    patch.setattr(InProcessEngine, "resume", lambda self, receipt, deadline: setattr(self, "paused", False))


def resume_before_all_have_finished(patch: Patch) -> None:
    finish = InProcessEngine.finish

    def eager(self: InProcessEngine, session: str, version: int, digest: str, deadline: Deadline) -> Any:
        receipt = finish(self, session, version, digest, deadline)
        self.resume(receipt, deadline)
        return receipt

    patch.setattr(InProcessEngine, "finish", eager)


def release_the_trainer_before_the_fence(patch: Patch) -> None:
    put_up = Fence.put_up

    def hasty(self: Fence) -> None:
        assert self._down is not None
        self.release(self._down[0], Deadline.after(1))
        put_up(self)

    release = SourceAgent._release

    def lenient(self: SourceAgent, payload: Mapping[str, Any]) -> dict[str, Any]:
        self._writing = False
        return release(self, payload)

    patch.setattr(Fence, "put_up", hasty)
    patch.setattr(SourceAgent, "_release", lenient)


def release_the_trainer_before_it_was_read(patch: Patch) -> None:
    quiesce = SourceAgent._quiesce

    def short(self: SourceAgent, payload: Mapping[str, Any]) -> dict[str, Any]:
        reply = quiesce(self, payload)
        self._source.release()
        return reply

    patch.setattr(SourceAgent, "_quiesce", short)


def let_the_engine_end_stay_open_after_a_failure(patch: Patch) -> None:
    def forgiving(self: TargetAgent, payload: Mapping[str, Any]) -> dict[str, Any]:
        self._session, self._reason = None, str(payload["reason"])
        return {}

    patch.setattr(TargetAgent, "_abort", forgiving)


def accept_memory_that_moved(patch: Patch) -> None:
    patch.setattr(Memory, "moved", lambda self, tensors: None)
    patch.setattr(Memory, "epoch", property(lambda self: 0))


def take_an_old_reply_for_a_new_one(patch: Patch) -> None:
    class Any_:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    write = SourceAgent._write
    patch.setattr(SourceAgent, "_write", lambda self, payload: write(self, payload) | {"session": Any_(), "round": Any_()})


def let_the_trainer_step_when_a_quiesce_comes_twice(patch: Patch) -> None:
    quiesce = SourceAgent._quiesce

    def again(self: SourceAgent, payload: Mapping[str, Any]) -> dict[str, Any]:
        if self._session == payload["session"]:
            self._release(payload)
        return quiesce(self, payload)

    patch.setattr(SourceAgent, "_quiesce", again)


def do_not_verify_who_joins(patch: Patch) -> None:
    patch.setattr(membership, "check_joiner", lambda *args: None)


def measure_deadlines_by_the_wall_clock(patch: Patch) -> None:
    from weight_sync import ids

    def after(seconds: float) -> Deadline:
        return Deadline(at=ids.time.time() + seconds, seconds=seconds)

    patch.setattr(Deadline, "after", staticmethod(after))
    patch.setattr(Deadline, "remaining", lambda self: max(0.0, self.at - ids.time.time()))
    patch.setattr(Deadline, "check", lambda self, what: max(1e-9, self.at - ids.time.time()))


@dataclass(frozen=True)
class Mutation:
    """seeds: within how many, from `first`, it must be found. faults: those to draw from (all by default). level: of
    verification, None as drills draw it."""

    make: Callable[[Patch], None]
    seeds: int
    faults: Sequence[str] = tuple(FAULTS)
    level: Level | None = None
    first: int = 0


LIES = ("write drop", "write corrupt", "write truncate")
MUTATIONS = [
    # Digests would catch it: what a transport's error is worth by itself shows where nothing is compared.
    Mutation(swallow_transport_errors, 20, ("write error",), Level.OFF),
    Mutation(advance_the_version_early, 20),
    Mutation(skip_a_third_of_the_digests, 60, LIES),
    Mutation(verify_only_the_first_engine, 60, LIES),
    Mutation(resume_whatever_happened, 60),
    Mutation(resume_before_all_have_finished, 60),
    Mutation(release_the_trainer_before_the_fence, 60, ("write ghost", "write error")),
    Mutation(release_the_trainer_before_it_was_read, 20),
    Mutation(let_the_engine_end_stay_open_after_a_failure, 100, ("write early", "trainer rank killed", "write ghost")),
    Mutation(accept_memory_that_moved, 60, ("engine memory moved",)),
    Mutation(take_an_old_reply_for_a_new_one, 100, ("message stale digests",)),
    Mutation(let_the_trainer_step_when_a_quiesce_comes_twice, 100, ("message doubled request",)),
    Mutation(do_not_verify_who_joins, 40, LIES, first=60),  # few drills have an engine that pulls
    Mutation(measure_deadlines_by_the_wall_clock, 60, ("wall clock jumps",)),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.make.__name__)
def test_a_mistake_in_the_session_is_found(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.make(monkeypatch)
    for seed in range(mutation.first, mutation.first + mutation.seeds):
        one = drill.run(seed, faults=mutation.faults, level=mutation.level)
        if one.wrong or one.hung:
            return
    pytest.fail(f"not found in {mutation.seeds} seeds")


def test_swallowed_transport_errors_serve_nothing_wrong_where_digests_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    swallow_transport_errors(monkeypatch)
    _, bad = drill.many(range(20), faults=("write error",))
    assert not bad


def test_without_verification_a_transport_that_lies_is_believed() -> None:
    assert any(drill.run(seed, faults=("write drop",), level=Level.OFF).wrong for seed in range(20))
