"""The fence after a failed session: both ends' transports closed, engines told why they stand, the trainer released last.

Until it is up nothing else happens: bytes of the failed session may still be on their way, so the trainer's parameters must not
change and no engine is bound anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from weight_sync.ids import Deadline
from weight_sync.session.calls import add_error, settled
from weight_sync.session.contracts import TrainerGroup
from weight_sync.session.registry import Registry


class Fence:
    """One for a session object. seconds: for putting it up. Down, not up, is the state that needs work.

    unreached: engines that have not confirmed yet that nothing of the failed session can land on them. hurt: trainer ranks
    whose own write failed in the last session that failed, as they said when they closed.
    """

    def __init__(self, trainers: TrainerGroup, registry: Registry, seconds: float) -> None:
        self._trainers, self._registry, self._seconds = trainers, registry, seconds
        self._down: tuple[str, str] | None = None
        self.unreached: set[str] = set()
        self.hurt: set[int] = set()

    @property
    def down(self) -> bool:
        return self._down is not None

    def fell(self, session: str, reason: str, engines: set[str]) -> None:
        """A session failed. engines: those it had touched."""
        self._down, self.unreached, self.hurt = (session, reason), set(engines), set()

    def forget(self, name: str) -> None:
        """An engine that is no longer written to by anybody need not be reached: the writers' own ends are closed."""
        self.unreached.discard(name)

    def put_up(self) -> None:
        """Close every transport that took part and let the trainer step again. Raises when somebody was not reached.

        The trainer is released last, and its ranks refuse it where a write failed and the transport could not be closed.
        """
        assert self._down is not None
        session, reason = self._down
        deadline = Deadline.after(self._seconds)
        payload = {"reason": reason, "session": session}
        calls: dict[str, Callable[[], Any]] = {
            "trainers": partial(self._trainers.call, "fence", dict.fromkeys(range(self._trainers.world), payload), deadline)
        }
        for name in sorted(self.unreached):
            calls[f"engine {name}"] = partial(self._registry.get(name).engine.abort, session, reason, deadline)
        done, failed = settled(calls, deadline)
        self.unreached -= {key.removeprefix("engine ") for key in done}
        self.hurt |= {rank for rank, reply in done.get("trainers", {}).items() if reply.get("failed")}
        errors = list(failed.items())
        try:
            self.release(session, deadline)
        except Exception as error:  # noqa: BLE001 - raised below, or with the first
            errors.append(("release", error))
        if errors:
            (_, first), *others = errors
            for what, other in others:
                add_error(first, what, other)
            raise first
        self._down = None

    def release(self, session: str, deadline: Deadline) -> None:
        """Let the trainer step again."""
        payload = {"session": session}
        self._trainers.call("release", dict.fromkeys(range(self._trainers.world), payload), deadline)
