"""One attempt at one version: pause, write, verify, commit, resume, over one binding. Whatever fails here is raised at once.

What an attempt leaves behind when it fails is the session's to clean up (session.py): this file opens, never closes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from weight_sync.errors import SessionError
from weight_sync.ids import Deadline
from weight_sync.quant.kernel import Stats
from weight_sync.session.calls import on_each, settled
from weight_sync.session.connect import Connection
from weight_sync.session.contracts import PauseMode, Receipt, RolloutEngine, SyncObserver, TrainerGroup
from weight_sync.session.quantise import magnitudes
from weight_sync.session.registry import Replica, ReplicaState
from weight_sync.session.state import Machine, State
from weight_sync.session.verify import Level, Verified, before_write, verify

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One committed sync. bytes: written to engines. gathered_bytes: told between trainer ranks: of quantised weights whose
    groups lie on several ranks, four for each group and rank, else none. digest: of all.

    attempts: how many it took. left_out: replicas that were not part of it; they are suspect and were not resumed.
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


@dataclass(slots=True, eq=False)
class Attempt:
    """members: the replicas of the plan, in its order. touched: engines were asked to pause, so they are suspect if this fails.

    verified: what was found equal, once it was. magnitudes: where weights are quantised, what each trainer rank is told of
    groups that lie on several. made: what quantising them cost. gathered: bytes that trainer ranks told each other.
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
    magnitudes: dict[int, list[float]] | None = None
    made: Stats | None = None

    def run(self, on_commit: Callable[[Attempt], None]) -> None:
        """Everything from pause to resume. on_commit: called at the one moment from which on the version is committed."""
        plan, watch = self.connection.plan, self.watch
        if plan.made.any():
            with watch.phase("quantise"):
                self._quiesce()
                self._scan()
        with watch.phase("pause"):
            if self.magnitudes is None:
                self._quiesce()
            self.touched = True
            for replica in self.members:
                replica.to(ReplicaState.SYNCING)
            self._each(lambda _, e: e.pause(self.pause, self.deadline))
            self.machine.to(State.PAUSED)
            self._each(self._begin)
            before_write(self.level, [replica.engine for replica in self.members], self.session, self.deadline)
        with watch.phase("write"):
            sent = self._write()
            watch.count(bytes=self.moved, gathered_bytes=self.gathered, writes=self.writes, transfers=len(plan))
            if self.made is not None:
                watch.figures({f"quant/{name}": value for name, value in self.made.to_json().items()})
        self.machine.to(State.WRITTEN)
        with watch.phase("verify"):
            engines = [replica.engine for replica in self.members]
            self.verified = verify(
                self.level,
                plan,
                self.trainers,
                engines,
                self.session,
                sent,
                self.deadline,
                again=self._again,
            )
            if self.verified.verified:
                watch.mark_verified()
        self.machine.to(State.VERIFIED)
        with watch.phase("commit"):
            receipts = self.receipts = self._commit(self.verified.digest)
            self.machine.to(State.COMMITTED)
            on_commit(self)
            watch.mark_committed()
        with watch.phase("resume"):
            self._resume(receipts)
        self.machine.to(State.IDLE)

    def _each(self, call: Callable[[int, RolloutEngine], V]) -> dict[int, V]:
        return on_each([replica.engine for replica in self.members], call, self.deadline)

    def _quiesce(self) -> None:
        payload = {"session": self.session, "plan": self.connection.schedule.digest}
        self.trainers.call("quiesce", dict.fromkeys(range(self.trainers.world), payload), self.deadline)

    def _scan(self) -> None:
        """Before anything is paused: look at every weight that is quantised, and settle on groups that several ranks hold."""
        payload = {"session": self.session, "finite": self.connection.finite}
        replies = self.trainers.call("scan", dict.fromkeys(range(self.trainers.world), payload), self.deadline)
        for rank, reply in replies.items():
            if reply["session"] != self.session:
                raise SessionError(
                    f"trainer rank {rank} answered scan of session {self.session} with that of {reply['session']}"
                )
            self.watch.add_spans(f"trainer {rank}", reply["spans"])
        straddles = self.connection.schedule.straddles
        said = {rank: reply["magnitudes"] for rank, reply in replies.items()}
        self.magnitudes = magnitudes(said, straddles.of_rank, len(straddles))
        self.gathered = straddles.nbytes

    def _begin(self, place: int, engine: RolloutEngine) -> None:
        connection = self.connection
        engine.begin(self.session, self.version, connection.labels[place], connection.epochs[place], self.deadline)

    def _write(self) -> dict[int, list[str]]:
        """Write everything, round by round. Returns the trainer ranks' digests of what they wrote."""
        schedule = self.connection.schedule
        digests: dict[int, list[str]] = {}
        made: Stats | None = None
        for round_ in range(schedule.rounds):
            payload = {
                "session": self.session,
                "round": round_,
                "digests": self.level is not Level.OFF,
                "seconds": self.deadline.check("write"),
            }
            by_rank = dict.fromkeys(range(self.trainers.world), payload)
            if round_ == 0 and self.magnitudes is not None:
                by_rank = {rank: payload | {"magnitudes": self.magnitudes[rank]} for rank in by_rank}
            replies = self.trainers.call("write", by_rank, self.deadline)
            for rank, reply in replies.items():
                if (reply["session"], reply["round"]) != (self.session, round_):
                    raise SessionError(
                        f"trainer rank {rank} answered write of session {self.session}, round {round_}, with that of session "
                        f"{reply['session']}, round {reply['round']}"
                    )
                self.moved, self.writes = self.moved + reply["bytes"], self.writes + reply["writes"]
                self.watch.add_spans(f"trainer {rank}", reply["spans"])
                if reply["digests"] is not None:
                    digests[rank] = reply["digests"]
                if reply.get("made") is not None:
                    made = (made or Stats()).merged(Stats.from_json(reply["made"]))
            if schedule.stage_bytes:
                self._each(lambda i, e, r=round_: self._place(i, e, r))
        self.made = made
        return digests

    def _again(self) -> dict[int, list[str]]:
        """A second write of the same sync, after a second look at the weights: scales must come out the same."""
        if self.magnitudes is not None:
            self._scan()
        return self._write()

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
        )


def check_receipt(receipt: Any, engine: str, session: str, version: int, digest: str) -> None:
    if receipt != Receipt(engine, session, version, digest):
        raise SessionError(f"engine {engine} gave a receipt for something else: {receipt}")
