"""The session: pause, write, verify, commit, resume; or an error, engines paused, version unchanged."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from weight_sync.errors import SessionError, VerifyError, WeightSyncError, listed
from weight_sync.ids import Deadline
from weight_sync.layout.table import Ints
from weight_sync.plan.plan import Plan
from weight_sync.session.connect import Connection, SyncSpec, connect, together
from weight_sync.session.contracts import Observer, PauseMode, Receipt, RolloutEngine, SyncObserver, TrainerGroup
from weight_sync.session.state import Machine, State
from weight_sync.session.tables import merge_digests


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. connect: describe, plan, witness and bind together. sync: one whole sync. abort: the clean-up after a failure."""

    connect: float = 300.0
    sync: float = 300.0
    abort: float = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One committed sync. bytes: written to engines. gathered_bytes: moved between trainer ranks (none here). digest: of all."""

    version: int
    session: str
    bytes: int
    gathered_bytes: int
    writes: int
    transfers: int
    seconds: float
    digest: str
    receipts: tuple[Receipt, ...]


class _Silent:
    """Watches nothing."""

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
    and serves that version, proved by digests; otherwise it raises, engines stay paused and `version` stays what it was.
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
        self._pause = pause
        self._timeouts = timeouts or Timeouts()
        self._observer: Observer = observer or _Silent()
        self._machine = Machine()
        self._connection: Connection | None = None
        self._version = -1

    @property
    def version(self) -> int:
        """The last committed version; -1 before the first."""
        return self._version

    @property
    def state(self) -> State:
        return self._machine.state

    def connect(self) -> Connection:
        """Plan and bind. Raises before anything is paused; see weight_sync.session.connect."""
        self._connection = connect(self._trainers, self._engines, self._spec, Deadline.after(self._timeouts.connect))
        return self._connection

    def sync(self, version: int) -> Outcome:
        """Bring every engine to the trainer's current weights as `version`, which must be above the committed one."""
        self._machine.require(State.IDLE, State.FAILED)
        if version <= self._version:
            raise SessionError(f"version {version} is not above the committed {self._version}")
        session = secrets.token_hex(8)
        known = None if self._connection is None else int(self._connection.plan.nbytes.sum())
        with self._observer.sync(version, session, nbytes=known) as watch:
            begun = time.monotonic()
            connection = self._connection
            if connection is None:
                with watch.phase("plan"):
                    connection = self.connect()
            deadline = Deadline.after(self._timeouts.sync)
            try:
                return self._run(connection, session, version, deadline, begun, watch)
            except BaseException as error:  # also KeyboardInterrupt: an engine must not be left half written and serving
                self._fail(session, error)
                raise
            finally:
                # Whatever happened, the trainer is let go only here, after the transports are closed if it failed.
                self._release()

    def _run(
        self, connection: Connection, session: str, version: int, deadline: Deadline, begun: float, watch: SyncObserver
    ) -> Outcome:
        plan, schedule = connection.plan, connection.schedule
        engines = dict(enumerate(self._engines))
        ranks = range(self._trainers.world)
        with watch.phase("pause"):
            self._trainers.call("quiesce", {rank: {} for rank in ranks}, deadline)
            together({e.name: (lambda e=e: e.pause(self._pause, deadline)) for e in self._engines})
            self._machine.to(State.PAUSED)
            together(
                {
                    e.name: (lambda i=i, e=e: e.begin(session, version, schedule.digest, connection.epochs[i], deadline))
                    for i, e in engines.items()
                }
            )
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
                    together({e.name: (lambda e=e, r=round_: e.place(session, r, deadline)) for e in self._engines})
            watch.count(bytes=moved, writes=writes, transfers=len(plan))
        self._machine.to(State.WRITTEN)
        with watch.phase("verify"):
            total = self._verify(connection, session, digests, deadline)
            watch.mark_verified()
        self._machine.to(State.VERIFIED)
        with watch.phase("commit"):
            receipts = together({i: (lambda e=e: e.finish(session, version, total, deadline)) for i, e in engines.items()})
            for i, receipt in receipts.items():
                if (receipt.session, receipt.version, receipt.digest) != (session, version, total):
                    raise SessionError(f"engine {engines[i].name} gave a receipt for something else: {receipt}")
            self._machine.to(State.COMMITTED)
            self._version = version
            watch.mark_committed()
        with watch.phase("resume"):
            together({e.name: (lambda i=i, e=e: e.resume(receipts[i], deadline)) for i, e in engines.items()})
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
        replies = together({i: (lambda e=e: e.verify(session, deadline)) for i, e in enumerate(self._engines)})
        width = plan.target_world // len(self._engines)
        target = {i * width + local: digests for i, by_rank in replies.items() for local, digests in by_rank.items()}
        ours = merge_digests(plan, source, plan.rows_from)
        theirs = merge_digests(plan, target, plan.rows_to)
        wrong = np.flatnonzero(ours != theirs)
        if len(wrong):
            raise VerifyError(
                f"{len(wrong)} of {len(plan)} transfers arrived with other bytes than were sent: "
                + listed(_transfer_text(plan, row, ours, theirs) for row in wrong.tolist())
            )
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(ours).data)

    def _fail(self, session: str, error: BaseException) -> None:
        """After any failure: nothing may still be written, engines stay paused and say why, bindings are void."""
        if self._machine.state is State.IDLE and not isinstance(error, WeightSyncError):
            error.add_note("the failure came before any engine was confirmed paused")
        self._machine.to(State.FAILED)
        self._connection = None
        deadline = Deadline.after(self._timeouts.abort)
        reason = f"{type(error).__name__}: {error}"
        clean_up = {e.name: (lambda e=e: e.abort(session, reason, deadline)) for e in self._engines}
        ranks = range(self._trainers.world)
        clean_up["trainers"] = lambda: self._trainers.call("fence", {r: {"reason": reason} for r in ranks}, deadline)
        try:
            together(clean_up)
        except Exception as also:  # noqa: BLE001 - the first error is the one to raise; this one goes with it
            error.add_note(f"while aborting: {type(also).__name__}: {also}")
            for note in getattr(also, "__notes__", []):
                error.add_note(f"while aborting: {note}")

    def _release(self) -> None:
        deadline = Deadline.after(self._timeouts.abort)
        self._trainers.call("release", {rank: {} for rank in range(self._trainers.world)}, deadline)


def _transfer_text(plan: Plan, row: int, ours: Ints, theirs: Ints) -> str:
    s, t = plan.source_params[int(plan.source[row])], plan.target_params[int(plan.target[row])]
    sent, found = (int(np.uint64(d[row : row + 1].view(np.uint64)[0])) for d in (ours, theirs))
    return (
        f"{plan.catalog.name(int(plan.tensor[row]))} from trainer rank {s.rank} ({s.name}) to rollout rank {t.rank} "
        f"({t.name}): sent {sent:016x}, found {found:016x}"
    )
