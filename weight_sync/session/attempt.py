"""One attempt at one version: pause, write, verify, commit, resume, over one binding. Whatever fails here is raised at once.

What an attempt leaves behind when it fails is the session's to clean up (session.py): this file opens, never closes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from weight_sync.errors import SessionError
from weight_sync.ids import Deadline
from weight_sync.plan.schedule import Schedule
from weight_sync.quant.kernel import Stats
from weight_sync.session.calls import on_each, settled
from weight_sync.session.connect import Connection
from weight_sync.session.contracts import PauseMode, Receipt, RolloutEngine, SyncObserver, TrainerGroup
from weight_sync.session.delta import DeltaReport, Deltas, Offer
from weight_sync.session.quantise import magnitudes
from weight_sync.session.registry import Replica, ReplicaState
from weight_sync.session.state import Machine, State
from weight_sync.session.verify import Level, Verified, before_write, verify
from weight_sync.session.waves import load

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One committed sync. bytes: written to engines. gathered_bytes: told between trainer ranks: of quantised weights whose
    groups lie on several ranks, four for each group and rank, else none. digest: of all.

    attempts: how many it took. left_out: replicas that were not part of it; they are suspect and were not resumed. delta: where
    deltas are on, what changed, or why it was a complete session (bytes are then those of all).
    """

    version: int
    session: str
    bytes: int
    gathered_bytes: int
    writes: int
    transfers: int
    seconds: float
    digest: str
    receipts: tuple[Receipt, ...]
    attempts: int = 1
    left_out: tuple[str, ...] = ()
    delta: DeltaReport | None = None


@dataclass(slots=True, eq=False)
class Attempt:
    """members: the replicas of the plan, in its order. touched: engines were asked to pause, so they are suspect if this fails.

    verified: what was found equal, once it was. scanned: where weights are quantised, what each trainer rank is told of groups
    that lie on several, by wave. made: what quantising them cost. gathered: bytes that trainer ranks told each other.
    deltas: those of the session object; delta, offer: what came of them here (delta.py). quiet: the trainer was quiesced.
    """

    trainers: TrainerGroup
    members: list[Replica]
    connection: Connection
    session: str
    version: int
    level: Level
    pause: PauseMode
    deadline: Deadline
    watch: SyncObserver
    machine: Machine
    touched: bool = False
    verified: Verified | None = None
    receipts: tuple[Receipt, ...] = ()
    moved: int = 0
    writes: int = 0
    gathered: int = 0
    scanned: dict[int, dict[int, list[float]]] = field(default_factory=dict[int, dict[int, list[float]]])
    made: Stats | None = None
    deltas: Deltas = field(default_factory=Deltas)
    delta: DeltaReport | None = None
    offer: Offer | None = None
    quiet: bool = False

    def run(self, on_commit: Callable[[Attempt], None]) -> None:
        """Everything from pause to resume. on_commit: called at the one moment from which on the version is committed."""
        plan, watch = self.connection.plan, self.watch
        if plan.made.any():
            with watch.phase("quantise"):
                self.quiesce()
                self._scan()
        self.deltas.encode(self)
        with watch.phase("pause"):
            self.quiesce()
            self.touched = True
            for replica in self.members:
                replica.to(ReplicaState.SYNCING)
            self._each(lambda _, e: e.pause(self.pause, self.deadline))
            self.machine.to(State.PAUSED)
            self._each(self._begin)
            before_write(self.level, [replica.engine for replica in self.members], self.session, self.deadline)
        self.verified = self._written() if self.connection.schedule.beside is None else load(self)
        with watch.phase("commit"):
            receipts = self.receipts = self._commit(self.verified.digest)
            self.machine.to(State.COMMITTED)
            on_commit(self)
            watch.mark_committed()
        with watch.phase("resume"):
            self._resume(receipts)
        self.machine.to(State.IDLE)
        self.deltas.keep(self)

    def _written(self) -> Verified:
        """Everything written into live parameters, and what was found equal."""
        plan, watch = self.connection.plan, self.watch
        with watch.phase("write"):
            sent = self.write() if self.offer is None else self.deltas.send(self)
            self.count_written()
        self.machine.to(State.WRITTEN)
        with watch.phase("verify"):
            engines = [replica.engine for replica in self.members]
            verified = verify(
                self.level, plan, self.trainers, engines, self.session, sent, self.deadline, again=self._again
            )  # fmt: skip
            if verified.verified:
                watch.mark_verified()
        self.machine.to(State.VERIFIED)
        return verified

    def count_written(self) -> None:
        """Tell the observer what was written so far."""
        self.watch.count(
            bytes=self.moved, gathered_bytes=self.gathered, writes=self.writes, transfers=len(self.connection.plan)
        )
        if self.made is not None:
            self.watch.figures({f"quant/{name}": value for name, value in self.made.to_json().items()})

    @property
    def magnitudes(self) -> dict[int, list[float]] | None:
        """What trainer ranks are told of the only wave."""
        return self.scanned.get(0)

    def _each(self, call: Callable[[int, RolloutEngine], V]) -> dict[int, V]:
        return on_each([replica.engine for replica in self.members], call, self.deadline)

    def quiesce(self) -> None:
        if self.quiet:
            return
        payload = {"session": self.session, "plan": self.connection.schedule.digest}
        self.trainers.call("quiesce", dict.fromkeys(range(self.trainers.world), payload), self.deadline)
        self.quiet = True

    def _scan(self) -> None:
        """Before anything is paused: look at every weight that is quantised, and settle on groups that several ranks hold."""
        self.gathered = 0
        for wave, part in enumerate(self.connection.schedule.waves):
            self._scan_wave(wave, part)

    def _scan_wave(self, wave: int, part: Schedule) -> None:
        payload = {"session": self.session, "finite": self.connection.finite, "wave": wave}
        replies = self.trainers.call("scan", dict.fromkeys(range(self.trainers.world), payload), self.deadline)
        for rank, reply in replies.items():
            if reply["session"] != self.session:
                raise SessionError(
                    f"trainer rank {rank} answered scan of session {self.session} with that of {reply['session']}"
                )
            self.watch.add_spans(f"trainer {rank}", reply["spans"])
        straddles = part.straddles
        said = {rank: reply["magnitudes"] for rank, reply in replies.items()}
        self.scanned[wave] = magnitudes(said, straddles.of_rank, len(straddles))
        self.gathered += straddles.nbytes

    def _begin(self, place: int, engine: RolloutEngine) -> None:
        connection = self.connection
        engine.begin(self.session, self.version, connection.labels[place], connection.epochs[place], self.deadline)

    def write(self, wave: int = 0) -> dict[int, str]:
        """Write a wave (everything, where there is but one), round by round. Returns the trainer ranks' digests of it."""
        waves = self.connection.schedule.waves
        schedule, before = waves[wave], sum(part.rounds for part in waves[:wave])
        digests: dict[int, str] = {}
        made: Stats | None = self.made if wave else None
        for round_ in range(schedule.rounds):
            payload = {
                "session": self.session,
                "round": round_,
                "wave": wave,
                "digests": self.level is not Level.OFF,
                "seconds": self.deadline.check("write"),
            }
            by_rank = dict.fromkeys(range(self.trainers.world), payload)
            if round_ == 0 and wave in self.scanned:
                by_rank = {rank: payload | {"magnitudes": self.scanned[wave][rank]} for rank in by_rank}
            replies = self.trainers.call("write", by_rank, self.deadline)
            for rank, reply in replies.items():
                if (reply["session"], reply["round"], reply["wave"]) != (self.session, round_, wave):
                    raise SessionError(
                        f"trainer rank {rank} answered write of session {self.session}, wave {wave}, round {round_}, with that "
                        f"of session {reply['session']}, wave {reply['wave']}, round {reply['round']}"
                    )
                self.moved, self.writes = self.moved + reply["bytes"], self.writes + reply["writes"]
                self.watch.add_spans(f"trainer {rank}", reply["spans"])
                if reply["digests"] is not None:
                    digests[rank] = reply["digests"]
                if reply.get("made") is not None:
                    made = (made or Stats()).merged(Stats.from_json(reply["made"]))
            if schedule.stage_bytes:
                self._each(lambda i, e, r=before + round_: self._place(i, e, r))
        self.made = made
        return digests

    def _again(self) -> dict[int, str]:
        """A second write of the same sync, after a second look at the weights: scales must come out the same."""
        self.rescan()
        return self.write()

    def rescan(self) -> None:
        """Look at the weights once more, where they are quantised."""
        if self.scanned:
            self._scan()

    def _place(self, place: int, engine: RolloutEngine, round_: int) -> None:
        if round_ < self.connection.rounds[place]:
            engine.place(self.session, round_, self.deadline)

    def _commit(self, digest: str) -> tuple[Receipt, ...]:
        receipts = self._each(lambda _, e: e.finish(self.session, self.version, digest, self.deadline))
        for i, receipt in receipts.items():
            check_receipt(receipt, self.members[i].name, self.session, self.version, digest)
        return tuple(receipts[i] for i in sorted(receipts))

    def _resume(self, receipts: tuple[Receipt, ...]) -> None:
        """Each with its own receipt. Those that were resumed are ready, whatever happens to the others."""
        calls = {
            replica.name: (lambda e=replica.engine, r=receipt: e.resume(r, self.deadline))
            for replica, receipt in zip(self.members, receipts, strict=True)
        }
        done, failed = settled(calls, self.deadline)
        for replica in self.members:
            if replica.name in done:
                replica.to(ReplicaState.READY, version=self.version)
        if failed:
            (_, error), *others = failed.items()
            for name, other in others:
                error.add_note(f"also engine {name}: {type(other).__name__}: {other}")
            raise error

    def outcome(self, begun: float, attempts: int, left_out: tuple[str, ...]) -> Outcome:
        assert self.verified is not None
        return Outcome(
            version=self.version,
            session=self.session,
            bytes=self.moved,
            gathered_bytes=self.gathered,
            writes=self.writes,
            transfers=len(self.connection.plan),
            seconds=time.monotonic() - begun,
            digest=self.verified.digest,
            receipts=self.receipts,
            attempts=attempts,
            left_out=left_out,
            delta=self.delta,
        )


def check_receipt(receipt: Any, engine: str, session: str, version: int, digest: str) -> None:
    if receipt != Receipt(engine, session, version, digest):
        raise SessionError(f"engine {engine} gave a receipt for something else: {receipt}")
