"""The catalogue: everything that can go wrong in a drill, each as a function that arms it at a drawn point of the next sync.

All choices come from `luck`. A fault that is armed at a point the sync never comes to (an abort of a sync that succeeds) does
not strike, and is not counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weight_sync.chaos.engine import DrillEngine, Worker
from weight_sync.chaos.job import Job
from weight_sync.chaos.network import Event, Killed, Loss, Sender
from weight_sync.chaos.trainer import Trainer
from weight_sync.transport.faults import FaultKind

CONNECT = {
    "trainer": ("describe", "claim", "plan", "extend", "bind"),
    "engine": ("describe", "claim", "bind"),
    "worker": ("describe", "bind"),
}
SYNC = {
    "trainer": ("quiesce", "write", "write", "release"),
    "engine": ("pause", "begin", "place", "verify", "finish", "resume", "pull"),
    "worker": ("admit", "begin", "place", "verify", "end", "pull"),
}
DELTA = {
    "trainer": ("encode", "encode", "send", "keep"),
    "engine": ("describe", "patch"),
    "worker": ("describe", "patch", "patch"),
}
"""Beside those of SYNC, where syncs send what changed."""
CLEAN = {"trainer": ("fence", "release"), "engine": ("abort",), "worker": ("abort",)}


@dataclass(slots=True)
class Arm:
    """One fault that is being armed. connecting: the next sync will begin with connect(). joining: an engine comes or goes."""

    job: Job
    luck: random.Random
    fault: str
    connecting: bool
    joining: bool = False

    def verb(self, side: str) -> str:
        draw = self.luck.random()
        table = CONNECT if draw < (0.3 if self.connecting else 0.03) else CLEAN if draw < 0.4 else SYNC
        if table is SYNC and self.job.deltas and not self.connecting and draw < 0.75:
            table = DELTA
        return self.luck.choice(table[side])

    def trainer(self) -> Trainer:
        return self.luck.choice(self.job.trainers)

    def engine(self) -> DrillEngine:
        return self.luck.choice(self.job.engines)

    def worker(self) -> Worker:
        return self.luck.choice(self.job.workers)

    def at(self, place: str, verb: str, when: str, strike: Callable[[Any], None] | Loss) -> None:
        self.job.network.events.append(Event(self.fault, place, verb, when, strike))

    def message(self) -> tuple[str, str]:
        """A message from the controller: to a trainer rank or to an engine."""
        side = self.luck.choice(("trainer", "engine"))
        place = self.trainer().place if side == "trainer" else f"engine {self.engine().name}"
        return place, self.verb(side)

    def anywhere(self, strike: Callable[[Any], None]) -> None:
        """At a message, or inside a process: between two writes, between two steps of a worker."""
        kind = self.luck.random()
        when = self.luck.choice(("before", "after"))
        if kind < 0.5:
            self.at(*self.message(), when, strike)
        elif kind < 0.8:
            self.at(self.trainer().place, self.luck.choice(("wire write", "wire wait")), when, strike)
        else:
            self.at(self.worker().place, self.verb("worker"), when, strike)


def _wire(kind: FaultKind) -> Callable[[Arm], None]:
    def arm(a: Arm) -> None:
        seconds = a.luck.choice((0.01, 5.0, 1e4))
        place = (a.worker() if a.joining else a.trainer()).place  # who joins reads
        a.job.wire.setdefault(place, []).append((a.luck.randrange(20), kind, seconds))
        if kind in (FaultKind.GHOST, FaultKind.EARLY, FaultKind.DELAY) and a.luck.random() < 0.6:
            a.anywhere(lambda _: a.job.settle())

    return arm


def _loss(loss: Loss) -> Callable[[Arm], None]:
    def arm(a: Arm) -> None:
        place, verb = a.message()
        a.at(place, verb, "before", loss)
        if loss is Loss.LATE_REQUEST:
            a.at(*a.message(), "after", lambda _: a.job.network.deliver_late())

    return arm


def _swapped(a: Arm) -> None:
    if a.luck.random() < 0.5:
        verb = a.luck.choice(("describe", "plan", "bind") if a.connecting else ("write",))
        a.at("trainers", verb, "before", Loss.SWAPPED_REPLIES)
    else:
        verb = "bind" if a.connecting and a.luck.random() < 0.5 else "verify"
        a.at(f"engine {a.engine().name}", verb, "before", a.luck.choice((Loss.SWAPPED_REPLIES, Loss.OTHER_REPLY)))


def _stale_digests(a: Arm) -> None:
    place, verb = (a.trainer().place, "write") if a.luck.random() < 0.5 else (f"engine {a.engine().name}", "verify")
    a.at(place, verb, "before", Loss.FALSE_REPLY)


def _trainer_killed(a: Arm) -> None:
    trainer = a.trainer()

    def strike(_: Sender | None) -> None:
        within = trainer.process.inside
        trainer.kill()
        if within:
            raise Killed

    if a.luck.random() < 0.4:
        a.at(trainer.place, "wire wait", "before", strike)  # what it has written is on its way
    else:
        a.anywhere(strike)
    if a.luck.random() < 0.4:
        a.anywhere(lambda _: a.job.settle())


def _trainer_restarted(a: Arm) -> None:
    """Between two messages: the new process is there at once."""
    trainer = a.trainer()

    def strike(_: Sender | None) -> None:
        trainer.kill()
        trainer.boot()

    a.at(*a.message(), a.luck.choice(("before", "after")), strike)


def _engine_killed(a: Arm) -> None:
    engine = a.engine()

    def strike(_: Sender | None) -> None:
        within = engine.inside
        engine.kill()
        if within:
            raise Killed

    a.anywhere(strike)


def _engine_restarted(a: Arm) -> None:
    engine = a.engine()

    def strike(_: Sender | None) -> None:
        engine.kill()
        engine.boot()

    a.at(*a.message(), a.luck.choice(("before", "after")), strike)


def _trainer_stopped(a: Arm) -> None:
    trainer = a.trainer()
    trainer.process.stoppable = True
    if a.luck.random() < 0.7:
        verb, when = a.luck.choice(("wire write", "wire wait")), a.luck.choice(("before", "after"))
        a.at(trainer.place, verb, when, lambda _: trainer.process.stop())
    else:
        a.at(*a.message(), "before", lambda _: trainer.process.stop())
    if a.luck.random() < 0.6:
        a.at(*a.message(), "after", lambda _: trainer.process.resume())


def _engine_stopped(a: Arm) -> None:
    worker = a.worker()
    process = worker.process if a.luck.random() < 0.6 else a.job.engine_of(worker).process
    process.stoppable = True
    if a.luck.random() < 0.6:
        a.at(worker.place, a.verb("worker"), a.luck.choice(("before", "after")), lambda _: process.stop())
    else:
        a.at(*a.message(), "before", lambda _: process.stop())
    if a.luck.random() < 0.6:
        a.at(*a.message(), "after", lambda _: process.resume())


def _controller_killed(a: Arm) -> None:
    def strike(sender: Sender | None) -> None:
        (sender or a.job.controller.sender).dead = True

    a.anywhere(strike)


def _controller_stopped(a: Arm) -> None:
    """It wakes up when another one has taken over and made a sync of its own, and goes on where it was."""

    recover = a.luck.random() < 0.5

    def strike(_: Sender | None) -> None:
        begun = a.job.clock.monotonic()
        a.job.attempt(a.job.takeover(recover))
        a.job.clock.jumped += a.job.clock.monotonic() - begun  # it was not running: its deadlines pass, it is not to blame

    a.at(*a.message(), a.luck.choice(("before", "after")), strike)


def _trainer_moved(a: Arm) -> None:
    trainer = a.trainer()
    a.anywhere(lambda _: trainer.move())


def _engine_moved(a: Arm) -> None:
    """With its content; or, from an engine that stands in the middle of a sync, without."""
    worker = a.worker()
    engine = a.job.engine_of(worker)
    empty = a.luck.random() < 0.5
    a.anywhere(lambda _: worker.move(empty=empty and engine.paused and worker.agent._session is not None))


def _reloaded(a: Arm) -> None:
    """Its version is another than the controller believes; in the middle of a sync, its bytes change under it."""
    engine = a.engine()
    a.at(a.trainer().place, a.luck.choice(("quiesce", "write")), a.luck.choice(("before", "after")), lambda _: engine.reload())


def _wall_jumps(a: Arm) -> None:
    def strike(_: Sender | None) -> None:
        a.job.clock.offset += a.luck.choice((-1e7, -3600.0, 3600.0, 1e7))

    a.anywhere(strike)
    if a.luck.random() < 0.5:
        place, verb = a.message()
        a.at(place, verb, "before", Loss.LOST_REQUEST)


def _time_passes(a: Arm) -> None:
    """The whole host stands still for longer than any deadline."""
    a.anywhere(lambda _: a.job.clock.jump(1e4))


def _does_not_close(a: Arm) -> None:
    owner = a.luck.choice((a.trainer(), a.worker()))

    def strike(_: Sender | None) -> None:
        for transport in owner.transports[-1:]:
            transport.stuck = True

    a.at(*a.message(), "before", strike)
    _wire(FaultKind.ERROR)(a)


def _other_plan(a: Arm) -> None:
    """A rank, or a worker, that works on another plan than the others: another version of the program, another config."""
    if a.luck.random() < 0.5:
        trainer = a.trainer()
        verb = a.luck.choice(("plan", "plan", "bind")) if a.connecting else a.luck.choice(("quiesce", "write"))
        other = {"costs": {"seconds_per_write": 0.5, "wire": 1e3, "copy": 1e3}, "budget": {"source": 128, "target": 256}}

        def strike(_: Sender | None) -> None:
            trainer.twist = lambda method, payload: {**payload, **other} if method == "plan" else payload

        a.at(trainer.place, verb, "before", strike)
    else:
        worker = a.worker()

        def twist(_: Sender | None) -> None:
            worker.twist = lambda method, payload: {**payload, "plan": "0" * 32} if method == "bind" else payload

        a.at(f"engine {a.job.engine_of(worker).name}", "bind", "before", twist)


FAULTS: dict[str, Callable[[Arm], None]] = {
    **{f"write {kind}": _wire(kind) for kind in FaultKind},
    **{f"message {loss}": _loss(loss) for loss in Loss if loss not in (Loss.SWAPPED_REPLIES, Loss.OTHER_REPLY)},
    "message swapped replies": _swapped,
    "message stale digests": _stale_digests,
    "trainer rank killed": _trainer_killed,
    "trainer rank restarted": _trainer_restarted,
    "trainer rank stopped": _trainer_stopped,
    "trainer memory moved": _trainer_moved,
    "engine killed": _engine_killed,
    "engine restarted": _engine_restarted,
    "engine stopped": _engine_stopped,
    "engine memory moved": _engine_moved,
    "engine reloaded from disk": _reloaded,
    "controller killed": _controller_killed,
    "controller stopped and continued": _controller_stopped,
    "wall clock jumps": _wall_jumps,
    "time passes": _time_passes,
    "transport does not close": _does_not_close,
    "another plan": _other_plan,
}
"""By name, as the summary counts them."""
