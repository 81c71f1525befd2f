"""The session: pause, write, verify, commit, resume; or an error, engines paused, version unchanged."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xxhash

from weight_sync.errors import SessionError, VerifyError, listed
from weight_sync.ids import Deadline, Side
from weight_sync.layout.table import Ints
from weight_sync.plan.plan import Plan
from weight_sync.session.connect import Connection, SyncSpec, add_error, connect, on_each, together
from weight_sync.session.contracts import Observer, PauseMode, Receipt, RolloutEngine, SyncObserver, TrainerGroup
from weight_sync.session.state import Machine, State
from weight_sync.session.tables import merge_digests


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. connect: describe, plan, witness and bind together. sync: one whole sync. abort: cleaning up after a failure."""

    connect: float = 300.0
    sync: float = 300.0
    abort: float = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One committed sync. bytes: written to engines. gathered_bytes: moved between trainer ranks (none). digest: of all."""

    version: int
    session: str
    bytes: int
    gathered_bytes: int
    writes: int
    transfers: int
    seconds: float
    digest: str
    receipts: tuple[Receipt, ...]


class SilentObserver:
    """Watches nothing: the default, and a base for observers that care about one thing."""

    def sync(self, version: int, session: str, *, nbytes: int | None = None) -> Any:
        return nullcontext(self)

    def phase(self, name: Any) -> Any:
        return nullcontext()

    def add_spans(self, rank: str, spans: Any) -> None:
        return

    def count(self, **counts: Any) -> None:
        return

    def mark_verified(self) -> None:
        return

    def mark_committed(self) -> None:
        return


class WeightSync:
    """Keeps engines at the trainer's weights. One object for the whole job, on the controller.

    connect() first (sync() does it when needed, and again after a failure). sync(version) returns only when every engine holds
    and serves that version, proved by digests; otherwise it raises and no engine is resumed that does not hold it. `version`
    moves at the commit: after an error it is what it was, unless only resuming or releasing failed (a note says so).
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
    ) -> None:
        if not engines:
            raise SessionError("no engines to sync to")
        self._trainers, self._engines, self._spec = trainers, list(engines), spec
        self._pause: PauseMode = pause
        self._timeouts = timeouts or Timeouts()
        self._observer: Observer = observer or SilentObserver()
        self._machine = Machine()
        self._connection: Connection | None = None
        self._version = -1
        self._touched = False
        self._unclean: tuple[str, str] | None = None

    @property
    def version(self) -> int:
        """The last committed version; -1 before the first."""
        return self._version

    @property
    def state(self) -> State:
        return self._machine.state

    def connect(self) -> Connection:
        """Plan and bind. Raises before anything is paused; see weight_sync.session.connect.

        Where cleaning up after a failed sync did not reach everybody, that is done first, and must succeed: until then an old
        transport could still write.
        """
        self._machine.require(State.IDLE, State.FAILED)
        self._connection = None
        if self._unclean is not None:
            self._clean_up()
        deadline = Deadline.after(self._timeouts.connect)
        self._connection = connect(self._trainers, self._engines, self._spec, deadline, pause=self._pause)
        return self._connection

    def sync(self, version: int) -> Outcome:
        """Bring every engine to the trainer's current weights as `version`, which must be above the committed one."""
        self._machine.require(State.IDLE, State.FAILED)
        if type(version) is not int or version <= self._version:
            raise SessionError(f"version {version!r} is not an integer above the committed {self._version}")
        session = secrets.token_hex(8)
        known = None if self._connection is None else int(self._connection.plan.nbytes.sum())
        with self._observer.sync(version, session, nbytes=known) as watch:
            begun = time.monotonic()
            connection = self._connection
            if connection is None:
                with watch.phase("plan"):
                    connection = self.connect()
            self._touched = False
            try:
                outcome = self._run(connection, session, version, Deadline.after(self._timeouts.sync), begun, watch)
            except BaseException as error:  # also KeyboardInterrupt: an engine must not be left half written and serving
                self._fail(session, version, error)
                raise
            try:
                self._release(session, Deadline.after(self._timeouts.abort))
            except BaseException as error:
                error.add_note(f"version {version} is committed and served by every engine; the trainer was not released")
                raise
            return outcome

    def _run(
        self, connection: Connection, session: str, version: int, deadline: Deadline, begun: float, watch: SyncObserver
    ) -> Outcome:
        plan, schedule = connection.plan, connection.schedule
        engines, ranks = self._engines, range(self._trainers.world)
        with watch.phase("pause"):
            quiesce = {"session": session, "plan": schedule.digest}
            self._trainers.call("quiesce", dict.fromkeys(ranks, quiesce), deadline)
            self._touched = True
            on_each(engines, lambda _, e: e.pause(self._pause, deadline))
            self._machine.to(State.PAUSED)
            on_each(engines, lambda i, e: e.begin(session, version, schedule.digest, connection.epochs[i], deadline))
        moved, writes = 0, 0
        digests: dict[int, list[str]] = {}
        with watch.phase("write"):
            for round_ in range(schedule.rounds):
                payload = {"session": session, "round": round_, "seconds": deadline.check("write")}
                for rank, reply in self._trainers.call("write", dict.fromkeys(ranks, payload), deadline).items():
                    moved, writes = moved + reply["bytes"], writes + reply["writes"]
                    watch.add_spans(f"trainer {rank}", reply["spans"])
                    if reply["digests"] is not None:
                        digests[rank] = reply["digests"]
                if schedule.stage_bytes:
                    on_each(engines, lambda _, e, r=round_: e.place(session, r, deadline))
            watch.count(bytes=moved, writes=writes, transfers=len(plan))
        self._machine.to(State.WRITTEN)
        with watch.phase("verify"):
            total = self._verify(connection, session, digests, deadline)
            watch.mark_verified()
        self._machine.to(State.VERIFIED)
        with watch.phase("commit"):
            receipts = on_each(engines, lambda _, e: e.finish(session, version, total, deadline))
            for i, receipt in receipts.items():
                if receipt != Receipt(engines[i].name, session, version, total):
                    raise SessionError(f"engine {engines[i].name} gave a receipt for something else: {receipt}")
            self._machine.to(State.COMMITTED)
            self._version = version
            watch.mark_committed()
        with watch.phase("resume"):
            on_each(engines, lambda i, e: e.resume(receipts[i], deadline))
        self._machine.to(State.IDLE)
        return Outcome(
            version=version,
            session=session,
            bytes=moved,
            gathered_bytes=0,
            writes=writes,
            transfers=len(plan),
            seconds=time.monotonic() - begun,
            digest=total,
            receipts=tuple(receipts[i] for i in sorted(receipts)),
        )

    def _verify(self, connection: Connection, session: str, source: dict[int, list[str]], deadline: Deadline) -> str:
        """Compare every transfer's digest, source against live destination. Returns the digest of all."""
        plan = connection.plan
        replies = on_each(self._engines, lambda _, e: e.verify(session, deadline))
        width = plan.target_world // len(self._engines)
        for i, by_rank in replies.items():
            if sorted(by_rank) != list(range(width)):
                raise VerifyError(f"engine {self._engines[i].name}: workers {sorted(by_rank)} of {width} sent digests")
        target = {i * width + local: digests for i, by_rank in replies.items() for local, digests in by_rank.items()}
        ours = merge_digests(plan, Side.TRAINER, source, plan.rows_from)
        theirs = merge_digests(plan, Side.ROLLOUT, target, plan.rows_to)
        wrong = np.flatnonzero(ours != theirs)
        if len(wrong):
            raise VerifyError(
                f"{len(wrong)} of {len(plan)} transfers arrived with other bytes than were sent: "
                + listed(_transfer_text(plan, row, ours, theirs) for row in wrong.tolist())
            )
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(ours).data)

    def _fail(self, session: str, version: int, error: BaseException) -> None:
        """After any failure: nothing may still be written, engines stay paused and say why, bindings are void."""
        self._unclean = session, f"{type(error).__name__}: {error}"
        self._connection = None
        if self._machine.state is State.COMMITTED:
            error.add_note(f"version {version} is committed: every engine holds it, verified; not every engine was resumed")
        if self._touched:
            self._machine.to(State.FAILED)
        else:
            error.add_note("no engine was asked for anything: each stands or serves as it did before")
        try:
            self._clean_up()
        except Exception as also:  # noqa: BLE001 - the first error is the one to raise; this one goes with it
            add_error(error, "while cleaning up", also)

    def _clean_up(self) -> None:
        """Close every transport that took part and let the trainer step again. Raises when somebody was not reached.

        The trainer is released last, and its ranks refuse it where a write failed and the transport could not be closed.
        """
        assert self._unclean is not None
        session, reason = self._unclean
        deadline = Deadline.after(self._timeouts.abort)
        ranks = range(self._trainers.world)
        calls: dict[str, Callable[[], Any]] = {
            "trainers": partial(self._trainers.call, "fence", {r: {"reason": reason} for r in ranks}, deadline)
        }
        if self._touched:
            calls |= {f"engine {e.name}": partial(e.abort, session, reason, deadline) for e in self._engines}
        try:
            together(calls)
        except Exception as error:
            try:
                self._release(session, deadline)
            except Exception as also:  # noqa: BLE001 - goes with the first
                add_error(error, "release", also)
            raise
        self._release(session, deadline)
        self._unclean = None

    def _release(self, session: str, deadline: Deadline) -> None:
        self._trainers.call("release", {rank: {"session": session} for rank in range(self._trainers.world)}, deadline)


def _transfer_text(plan: Plan, row: int, ours: Ints, theirs: Ints) -> str:
    s, t = plan.source_params[int(plan.source[row])], plan.target_params[int(plan.target[row])]
    sent, found = (int(np.uint64(d[row : row + 1].view(np.uint64)[0])) for d in (ours, theirs))
    return (
        f"{plan.catalog.name(int(plan.tensor[row]))} from trainer rank {s.rank} ({s.name}) to rollout rank {t.rank} "
        f"({t.name}): sent {sent:016x}, found {found:016x}"
    )
