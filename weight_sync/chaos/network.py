"""What lies between a controller and everybody else: processes that stop and die, messages that get lost, controllers that go.

Every call passes message() (from a controller) or inside() (within a process); there the faults of a run strike.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from weight_sync.chaos.clock import Clock
from weight_sync.errors import DeadlineExceeded
from weight_sync.ids import Deadline

Call = Callable[[], Any]


class Unreachable(ConnectionError):
    """No process listens there. No error of ours on purpose: what carries the calls has its own."""


class Unanswered(ConnectionError):
    """The process is stopped: whoever calls waits until its own deadline."""


class Killed(BaseException):
    """Unwinds a process that is no more. It cleans nothing up: its transports are dead before this is raised."""


class ControllerKilled(BaseException):
    """Raised by everything that a killed controller tries."""


class Process:
    """One process of the drill: running, stopped (SIGSTOP) in the middle of a call or between two, or dead."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = "running"
        self.stoppable = False
        """Whether a stop is to come: calls then run in a thread of their own, so that one can stay behind."""
        self._thread: threading.Thread | None = None
        self._parked = False
        self._depth = 0
        self._ours, self._its = threading.Semaphore(0), threading.Semaphore(0)

    def run(self, call: Call) -> Any:
        if self.state == "dead":
            raise Unreachable(f"{self.name}: connection refused")
        if self.state == "stopped":
            raise Unanswered(f"{self.name}: no answer")
        if not self.stoppable or self._thread is not None:
            return self._guarded(call)
        reply: list[Any] = []
        error: list[BaseException] = []

        def body() -> None:
            try:
                reply.append(self._counted(call))
            except BaseException as caught:  # noqa: BLE001 - raised below, if anybody still waits
                error.append(caught)
            self._ours.release()

        self._thread = threading.Thread(target=body, name=self.name, daemon=True)
        self._thread.start()
        self._ours.acquire()
        if not self._parked:
            self._join()
        if self.state == "stopped":  # or it was stopped while it waited for another process
            raise Unanswered(f"{self.name}: no answer")
        if error:
            return self._guarded(lambda: _raise(error[0]))
        return reply[0]

    @property
    def inside(self) -> bool:
        """Whether a call of this process is being made right now, and not left in the middle."""
        return self._depth > 0 and self.state != "stopped"

    def _counted(self, call: Call) -> Any:
        self._depth += 1
        try:
            return call()
        finally:
            self._depth -= 1

    def _guarded(self, call: Call) -> Any:
        try:
            return self._counted(call)
        except Killed:
            raise Unreachable(f"{self.name}: connection reset by peer") from None

    def stop(self) -> None:
        """From within a call of this process, it stays there until resume() or kill(); else between two calls."""
        if self.state != "running":
            return
        self.state = "stopped"
        if self._thread is threading.current_thread():
            self._parked = True
            self._ours.release()
            self._its.acquire()
            self._parked = False
            if self.state == "dead":
                raise Killed

    def resume(self) -> None:
        """SIGCONT: a call that was left in the middle goes on to its end. Nobody waits for its reply any more."""
        if self.state == "stopped":
            self.state = "running"
            self._finish()

    def kill(self) -> None:
        """SIGKILL. From within a call of this process, also raise Killed."""
        self.state = "dead"
        self._finish()

    def _finish(self) -> None:
        if self._parked:
            self._its.release()
            self._ours.acquire()
            self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _raise(error: BaseException) -> None:
    raise error


class Loss(StrEnum):
    """What happens to one request or its reply."""

    LOST_REQUEST = "lost request"
    LOST_REPLY = "lost reply"
    LATE_REQUEST = "late request"
    DOUBLED_REQUEST = "doubled request"
    REFUSED = "error before"
    BROKEN = "error after"
    FALSE_REPLY = "false reply"
    OTHER_REPLY = "reply of another"
    SWAPPED_REPLIES = "swapped replies"


@dataclass(slots=True)
class Event:
    """Something that happens once, at a place: fault names it, strike does it. when: before or after the call."""

    fault: str
    place: str
    verb: str
    when: str
    strike: Callable[[Any], None] | Loss
    """Called with who sent the message (None inside a process); or what becomes of the message."""


@dataclass(slots=True)
class Sender:
    """A controller as the network knows it."""

    name: str
    dead: bool = False

    def alive(self) -> None:
        if self.dead:
            raise ControllerKilled(self.name)


@dataclass(slots=True)
class Network:
    """See the module docstring. story: what happened, in order, or None to keep none."""

    clock: Clock
    story: list[str] | None = None
    events: list[Event] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    late: list[tuple[str, str, Call]] = field(default_factory=list)
    _replies: dict[tuple[str, str], Any] = field(default_factory=dict)

    def say(self, text: str) -> None:
        if self.story is not None:
            self.story.append(f"{self.clock.monotonic() - 1000:9.3f} s  {text}")

    def message(
        self, sender: Sender, place: str, verb: str, run: Call, deadline: Deadline, to: Callable[[], Process] | None = None
    ) -> Any:
        """One call of a controller: what it gets back, or the error of a call that did not come through.

        to: the process at the other end, as it is now.
        """
        self.clock.tick(1e-3)
        sender.alive()
        self.strike(place, verb, "before", sender)
        sender.alive()
        if deadline.remaining() <= 0:
            raise DeadlineExceeded(f"{place}: {verb}: no time left")
        loss = next((e for e in self.events if (e.place, e.verb) == (place, verb) and isinstance(e.strike, Loss)), None)
        try:
            if loss is None:
                reply = self._replies[place, verb] = run()
            else:
                self._fire(loss)
                assert isinstance(loss.strike, Loss)
                reply = self._lossy(loss.strike, place, verb, run, to)
        except Unanswered:
            self.say(f"{sender.name} -> {place}: {verb}: no answer")
            self.clock.tick(deadline.remaining())
            self.strike(place, verb, "after", sender)
            sender.alive()
            raise DeadlineExceeded(f"{place}: {verb}: no answer within {deadline.seconds:g} s") from None
        except Exception as error:
            self.say(f"{sender.name} -> {place}: {verb}: {type(error).__name__}")
            self.strike(place, verb, "after", sender)
            sender.alive()
            raise
        self.say(f"{sender.name} -> {place}: {verb}")
        self.strike(place, verb, "after", sender)
        sender.alive()
        return reply

    def _lossy(self, loss: Loss, place: str, verb: str, run: Call, to: Callable[[], Process] | None) -> Any:
        old = self._replies.get((place, verb))
        match loss:
            case Loss.LOST_REQUEST:
                raise Unanswered(verb)
            case Loss.LATE_REQUEST:
                if to is not None:
                    sent_to = to()
                    self.late.append((place, verb, lambda: run() if to() is sent_to else None))
                raise Unanswered(verb)
            case Loss.LOST_REPLY:
                run()
                raise Unanswered(verb)
            case Loss.DOUBLED_REQUEST:
                run()
                return run()
            case Loss.REFUSED:
                raise Unreachable(f"{place}: {verb}: connection refused")
            case Loss.BROKEN:
                run()
                raise Unreachable(f"{place}: {verb}: connection reset by peer")
            case Loss.FALSE_REPLY:
                # Nothing is done; what comes back is what this call last gave, as from a cache on the way.
                if old is None and place.startswith("trainer") and verb not in ("write", "bind", "plan", "describe"):
                    return {}
                if old is None and verb in ("write", "verify", "finish", "bind", "plan", "describe"):
                    raise Unreachable(f"{place}: {verb}: empty reply")
                return old
            case Loss.OTHER_REPLY:
                reply = run()
                side = place.split()[0]
                others = [v for (p, name), v in self._replies.items() if name == verb and p != place and p.startswith(side)]
                return others[-1] if others else reply
            case Loss.SWAPPED_REPLIES:
                reply = run()
                return swapped(reply) if isinstance(reply, dict) and all(type(k) is int for k in reply) else reply

    def deliver_late(self) -> None:
        """The requests that were held up on the way arrive now, where the process they went to is still there; nobody waits for
        their replies."""
        waiting, self.late = self.late, []
        for place, verb, run in waiting:
            self.say(f"a late {verb} arrives at {place}")
            try:
                run()
            except Exception as error:  # noqa: BLE001 - its sender is not there any more
                self.say(f"{place} answers the late {verb}: {type(error).__name__}: {error}")

    def inside(self, place: str, verb: str, run: Call) -> Any:
        """One step within a process, between two messages."""
        self.strike(place, verb, "before", None)
        reply = run()
        self.strike(place, verb, "after", None)
        return reply

    def strike(self, place: str, verb: str, when: str, sender: Sender | None) -> None:
        for event in [e for e in self.events if (e.place, e.verb, e.when) == (place, verb, when)]:
            if not isinstance(event.strike, Loss) and event in self.events:
                self._fire(event)
                event.strike(sender)

    def _fire(self, event: Event) -> None:
        self.events.remove(event)
        self.fired[event.fault] += 1
        self.say(f"** {event.fault} at {event.place}, {event.verb} ({event.when})")


def swapped(by_rank: dict[int, Any]) -> dict[int, Any]:
    """Each rank gets its neighbour's reply."""
    ranks = sorted(by_rank)
    return {rank: by_rank[other] for rank, other in zip(ranks, [*ranks[1:], *ranks[:1]], strict=True)}
