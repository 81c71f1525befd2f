"""The session: pause, write, verify, commit, resume; or an error, engines paused, version unchanged."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from weight_sync.errors import SessionError
from weight_sync.ids import Deadline
from weight_sync.session.attempt import Attempt, Outcome
from weight_sync.session.calls import Answered, add_error
from weight_sync.session.connect import Connection, SyncSpec, connect
from weight_sync.session.contracts import (
    EngineDescription,
    Observer,
    PauseMode,
    RolloutEngine,
    SyncObserver,
    TrainerGroup,
)
from weight_sync.session.delta import Deltas
from weight_sync.session.failure import FailurePolicy, Lessons, worth_retrying
from weight_sync.session.fence import Fence
from weight_sync.session.gate import new_session
from weight_sync.session.membership import Committed, check_engine, committed_by, grow, pull_version, shrink
from weight_sync.session.registry import Registry, Replica, ReplicaState
from weight_sync.session.silent import SilentObserver as SilentObserver
from weight_sync.session.state import Machine, State
from weight_sync.session.takeover import Recovery, claim, end_leftovers, survey, survey_of, take_over
from weight_sync.session.verify import Level, warn_if_off


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. connect: describe, plan, witness and bind together. sync: one attempt. abort: cleaning up after a failure."""

    connect: float = 300.0
    sync: float = 300.0
    abort: float = 60.0


class WeightSync:
    """Keeps engines at the trainer's weights. One object for the whole job, on the controller; one call at a time.

    connect() first (sync() does it when needed, and again after a failure). sync(version) returns only when every engine holds
    and serves that version, proved by digests; otherwise it raises and no engine is resumed that does not hold it. `version`
    moves at the commit: after an error it is what it was, unless only resuming or releasing failed (a note says so).

    join(), leave() and replace() change who takes part, between syncs. recover() is for a controller that was restarted. A
    WeightSync that starts shuts out every older one on the same engines and trainer ranks.
    """

    def __init__(
        self,
        trainers: TrainerGroup,
        engines: Sequence[RolloutEngine],
        spec: SyncSpec,
        *,
        pause: PauseMode = "retract",
        timeouts: Timeouts | None = None,
        observer: Observer | None = None,
        failure: FailurePolicy | None = None,
        level: Level = Level.DIGEST,
    ) -> None:
        if not engines:
            raise SessionError("no engines to sync to")
        self._trainers, self._spec = Answered(trainers), spec
        self._pause: PauseMode = pause
        self._timeouts = timeouts or Timeouts()
        self._observer: Observer = observer or SilentObserver()
        self._failure = failure or FailurePolicy()
        self._level = level
        self._machine = Machine()
        self._registry = Registry(engines)
        self._expected = int(spec.rollout.dims.get("engines", 1))
        self._controller = ""
        self._connection: Connection | None = None
        self._committed: Committed | None = None
        self._deltas = Deltas(spec.delta)
        self._version = -1
        self._fence = Fence(self._trainers, self._registry, self._timeouts.abort)
        self._busy = threading.Lock()

    @property
    def version(self) -> int:
        """The last committed version; -1 before the first."""
        return self._version

    @property
    def state(self) -> State:
        return self._machine.state

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Every replica that has not left, with its state. To be read, not changed."""
        return self._registry.all

    # -- syncing ---------------------------------------------------------------------------------------------------

    def connect(self) -> Connection:
        """Plan and bind. Raises before anything is paused; see weight_sync.session.connect.

        Where cleaning up after a failed sync did not reach everybody, that is done first, and must succeed: until then an old
        transport could still write. Sessions that another controller, or a call that came late, left open are ended.
        """
        with self._alone("connect"):
            self._machine.require(State.IDLE, State.FAILED)
            return self._connect()

    def sync(self, version: int, *, level: Level | None = None) -> Outcome:
        """Bring every engine to the trainer's current weights as `version`, which must be above the committed one.

        Takes as many attempts as FailurePolicy says; the error raised is the last one's, with notes of those before.
        level: for this sync only, in place of the session's own.
        """
        with self._alone("sync"), self._at(level):
            self._machine.require(State.IDLE, State.FAILED)
            if type(version) is not int or version <= self._version:
                raise SessionError(f"version {version!r} is not an integer above the committed {self._version}")
            warn_if_off(self._level, version)
            label = secrets.token_hex(8)
            known = None if self._connection is None else int(self._connection.plan.nbytes.sum())
            with self._observer.sync(version, label, nbytes=known) as watch:
                attempt, outcome = self._attempts(version, label, watch)
                try:
                    self._fence.release(attempt.session, Deadline.after(self._timeouts.abort))
                except BaseException as error:
                    error.add_note(f"version {version} is committed and served by every engine; the trainer was not released")
                    raise
                return outcome

    def check_weight_equal(self, version: int) -> Outcome:
        """A sync that must leave every engine as it is: for the first one, when trainer and engines loaded the same weights.

        Every live byte is snapshot, what the plan covers is scrambled, written, and everything compared with the snapshot.
        One attempt only, and not after a failure: a second one would compare with what the first wrote. Raises VerifyError when
        they differ; then, as after any failed sync, engines stay paused until a sync succeeds.
        """
        self._machine.require(State.IDLE)
        level, failure = self._level, self._failure
        self._level, self._failure = Level.AGAINST_HELD, FailurePolicy()
        try:
            return self.sync(version)
        finally:
            self._level, self._failure = level, failure

    def _attempts(self, version: int, label: str, watch: SyncObserver) -> tuple[Attempt, Outcome]:
        begun, policy, lessons = time.monotonic(), self._failure, Lessons(self._failure)
        limit = Deadline.after(policy.seconds)
        earlier: list[BaseException] = []
        while True:
            number, members = len(earlier) + 1, self._registry.members
            connection = self._connection
            try:
                if connection is None:
                    with watch.phase("plan"):
                        connection = self._connect(lessons.avoid)
                    if connection.witnessed:
                        watch.say(connection.witnessed)
                session = new_session(self._controller, label if number == 1 else "")
                attempt = self._attempt(version, connection, session, watch)
                left_out = tuple(replica.name for replica in self._registry.all if replica.out)
                return attempt, attempt.outcome(begun, number, left_out)
            except BaseException as error:
                last = number == policy.attempts or limit.remaining() <= 0
                if last or self._version == version or not worth_retrying(error):
                    for i, other in enumerate(earlier, 1):
                        add_error(error, f"attempt {i}", other)
                    raise
                earlier.append(error)
                out, changes = lessons.learn(error, connection, [replica.name for replica in members], self._fence)
                for name in out:
                    self._leave_out(self._registry.get(name), f"{type(error).__name__}: {error}")
                watch.count(retries=1)
                watch.say(
                    f"version {version}: attempt {number} of {policy.attempts} failed, trying again{changes}: "
                    f"{type(error).__name__}: {error}"
                )

    def _attempt(self, version: int, connection: Connection, session: str, watch: SyncObserver) -> Attempt:
        attempt = Attempt(
            self._trainers, self._registry.members, connection, session, version, self._level, self._pause,
            Deadline.after(self._timeouts.sync), watch, self._machine, deltas=self._deltas,
        )  # fmt: skip
        try:
            attempt.run(self._on_commit)
        except BaseException as error:  # also KeyboardInterrupt: an engine must not be left half written and serving
            self._fail(attempt, error)
            raise
        return attempt

    def _on_commit(self, attempt: Attempt) -> None:
        self._version, self._committed = attempt.version, committed_by(attempt)

    def _connect(self, avoid: Sequence[int] | set[int] = ()) -> Connection:
        self._connection = None
        members = self._registry.members
        if not members:
            raise SessionError("no engines to sync to: all have left or were left out")
        if self._fence.down:
            self._fence.put_up()
        deadline = Deadline.after(self._timeouts.connect)
        engines = [replica.engine for replica in members]
        found = survey(self._trainers, engines, deadline)
        newcomer = not self._controller
        self._controller = claim(self._trainers, engines, found, self._controller, deadline)
        if newcomer:  # an older controller may have opened a session after the look and before the claim
            found = survey(self._trainers, engines, deadline)
        if end_leftovers(self._trainers, engines, found, self._controller, deadline):
            found = survey(self._trainers, engines, deadline)
        self._connection = connect(
            self._trainers, engines, self._counted(), deadline,
            pause=self._pause, controller=self._controller, avoid=sorted(avoid), found=found,
        )  # fmt: skip
        return self._connection

    def _counted(self) -> SyncSpec:
        """The spec with as many engines as there should be: those declared, and who came and went since."""
        rollout = self._spec.rollout
        return replace(self._spec, rollout=replace(rollout, dims={**rollout.dims, "engines": self._expected}))

    # -- after a failure -------------------------------------------------------------------------------------------

    def _fail(self, attempt: Attempt, error: BaseException) -> None:
        """After any failure: nothing may still be written, engines stay paused and say why, bindings are void."""
        reason = f"{type(error).__name__}: {error}"
        self._connection = None
        self._deltas.forget()
        if self._machine.state is State.COMMITTED:
            error.add_note(
                f"version {attempt.version} is committed: every engine holds it, verified; not every engine was resumed"
            )
        suspects: set[str] = set()
        for replica in attempt.members:
            if replica.state is ReplicaState.SYNCING:
                replica.to(ReplicaState.SUSPECT, reason=reason)
                suspects.add(replica.name)
        self._fence.fell(attempt.session, reason, suspects)
        if attempt.touched:
            self._machine.to(State.FAILED)
        else:
            error.add_note("no engine was asked for anything: each stands or serves as it did before")
        try:
            self._fence.put_up()
        except Exception as also:  # noqa: BLE001 - the first error is the one to raise; this one goes with it
            add_error(error, "while cleaning up", also)

    def _leave_out(self, replica: Replica, reason: str) -> None:
        replica.to(ReplicaState.SUSPECT, reason=reason)
        replica.out = True
        self._expected -= 1
        self._fence.forget(replica.name)

    # -- who takes part --------------------------------------------------------------------------------------------

    def join(self, engine: RolloutEngine, *, pull: bool = False) -> Replica:
        """Take one more engine in. No other replica is spoken to; those that are ready go on serving.

        It is paused here and serves nothing until it was brought to a version with its own digests and its own receipt: by the
        next sync, or at once (pull) out of the live memory of the ready replica that has served joiners the least. If joining
        fails the engine is no member, and was not paused; if only the pull fails it is one, suspect, and waits for the sync.

        Raises SessionError where there is nothing to pull from, BindError for an engine that is not like the others.
        """
        with self._alone("join"):
            self._machine.require(State.IDLE, State.FAILED)
            return self._join(engine, self._check(engine, pull), pull)

    def leave(self, name: str, *, gone: bool = False) -> None:
        """A replica takes part no more. Its transports are closed; nothing else of it changes: who serves, serves on.

        gone: its process has ended or does not answer; it is not called. Without it, an engine that cannot be reached raises
        and stays a member.
        """
        with self._alone("leave"):
            self._machine.require(State.IDLE, State.FAILED)
            self._leave(name, gone)

    def replace(self, name: str, engine: RolloutEngine, *, gone: bool = False, pull: bool = False) -> Replica:
        """leave(name) and join(engine), which may have the same name. The new engine is looked at before the old one leaves."""
        with self._alone("replace"):
            self._machine.require(State.IDLE, State.FAILED)
            old = self._registry.get(name)
            server = self._check(engine, pull, instead=old)
            self._leave(name, gone)
            return self._join(engine, server, pull)

    def _check(self, engine: RolloutEngine, pull: bool, instead: Replica | None = None) -> EngineDescription:
        known = [replica for replica in self._registry.all if replica.name == engine.name and not replica.out]
        if known and known[0] is not instead:
            raise SessionError(f"a replica {engine.name} is here already ({known[0].text()}); leave() or replace() it first")
        if pull:
            self._lender(instead)
        return check_engine(engine, self._spec, self._pause, Deadline.after(self._timeouts.connect))

    def _lender(self, instead: Replica | None = None) -> tuple[Replica, Committed]:
        """The replica to pull from, and what must arrive."""
        if self._connection is not None and self._connection.by_loader:
            raise SessionError(
                "nothing to pull: engines place what they receive with their own loaders, so live memory does not hold what "
                f"was verified ({self._connection.by_loader}); join without pull, the next sync brings the engine along"
            )
        committed, lender = self._committed, self._registry.lender(self._version, instead)
        if committed is None or lender is None or self._connection is None:
            why = "no version is committed" if self._version < 0 else "no digests of it are known" if committed is None else (
                "no replica is ready with it" if lender is None else "the last sync failed, so nothing is bound"
            )  # fmt: skip
            raise SessionError(f"nothing to pull: {why}; join without pull, the next sync brings the engine to its version")
        return lender, committed

    def _join(self, engine: RolloutEngine, server: EngineDescription, pull: bool) -> Replica:
        deadline = Deadline.after(self._timeouts.connect)
        before, self._connection = self._connection, None  # if this fails, the next sync plans and binds everything anew
        if before is not None:
            alone = survey_of(server)
            claim(None, [engine], alone, self._controller, deadline)
            if end_leftovers(None, [engine], alone, self._controller, deadline):
                server = check_engine(engine, self._spec, self._pause, deadline)
            before = grow(self._trainers, before, self._spec, engine, server, self._controller, deadline)
        engine.pause(self._pause, deadline)
        replica = self._registry.add(engine)
        self._expected += 1
        self._connection = before
        if pull:
            self._pull(replica)
        return replica

    def _pull(self, replica: Replica) -> None:
        lender, committed = self._lender()
        connection, session = self._connection, new_session(self._controller)
        assert connection is not None
        deadline = Deadline.after(self._timeouts.sync)
        replica.to(ReplicaState.SYNCING)
        try:
            place = self._registry.index(lender.name)
            lender.served += pull_version(connection, replica, place, committed, session, deadline)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            replica.to(ReplicaState.SUSPECT, reason=reason)
            self._connection = None
            self._fence.fell(session, reason, {replica.name})
            try:
                self._fence.put_up()
            except Exception as also:  # noqa: BLE001 - goes with the first
                add_error(error, "while cleaning up", also)
            raise
        replica.to(ReplicaState.READY, version=committed.version)

    def _leave(self, name: str, gone: bool) -> None:
        replica = self._registry.get(name)
        if not gone:
            replica.engine.abort(self._controller, "it has left the job", Deadline.after(self._timeouts.abort))
        place = None if replica.out else self._registry.index(name)
        self._registry.remove(name)
        self._fence.forget(name)
        if place is None:
            return
        self._expected -= 1
        before, self._connection = self._connection, None
        if before is not None and len(before.bindings) > 1:
            deadline = Deadline.after(self._timeouts.connect)
            try:
                self._connection = shrink(self._trainers, before, place, self._controller, deadline)
            except Exception as error:
                error.add_note(f"engine {name} has left all the same; the next sync plans and binds everything anew")
                raise

    # -- a controller that was restarted ---------------------------------------------------------------------------

    def recover(self) -> Recovery:
        """Find out what engines and trainer ranks hold after another controller died, and finish or prepare to redo its work.

        For a new WeightSync, before anything else. Where every engine holds one verified version, those that still stand are
        resumed and `version` is that one. Otherwise what is left open is ended, engines that stand say why, and the next sync
        brings all of them back; `version` is then what all hold at least. The trainer may step afterwards. Not calling it is
        safe too: sync() ends what was left open, but counts versions from -1 again.
        """
        with self._alone("recover"):
            if self._controller or self._version >= 0:
                raise SessionError("recover() is for a controller that has done nothing yet")
            deadline = Deadline.after(self._timeouts.connect)
            members = self._registry.members
            self._controller, recovery = take_over(self._trainers, [r.engine for r in members], deadline)
            self._version = recovery.version
            if recovery.action == "redo":
                self._machine.to(State.FAILED)
            for replica in members:
                if recovery.action == "redo":
                    replica.to(ReplicaState.SUSPECT, reason=recovery.engines[replica.name])
                elif recovery.version >= 0:
                    replica.to(ReplicaState.SYNCING)
                    replica.to(ReplicaState.READY, version=recovery.version)
            return recovery

    @contextmanager
    def _at(self, level: Level | None) -> Iterator[None]:
        before = self._level
        self._level = before if level is None else level
        try:
            yield
        finally:
            self._level = before

    @contextmanager
    def _alone(self, verb: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise SessionError(f"{verb}() while another call of this WeightSync is running")
        try:
            yield
        finally:
            self._busy.release()
