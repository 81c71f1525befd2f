"""The states of a session and the only transitions between them. ARCHITECTURE.md shows the same table."""

from __future__ import annotations

from enum import StrEnum

from weight_sync.errors import SessionError


class State(StrEnum):
    """IDLE: engines serve. PAUSED: engines stand, nothing written. WRITTEN: every write reported complete.

    VERIFIED: every digest equal on both sides. COMMITTED: every engine gave a receipt. FAILED: an engine that was paused stays
    paused, what was touched is suspect; only a complete sync leads back.
    """

    IDLE = "idle"
    PAUSED = "paused"
    WRITTEN = "written"
    VERIFIED = "verified"
    COMMITTED = "committed"
    FAILED = "failed"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.IDLE: frozenset({State.PAUSED, State.FAILED}),
    State.PAUSED: frozenset({State.WRITTEN, State.FAILED}),
    State.WRITTEN: frozenset({State.VERIFIED, State.FAILED}),
    State.VERIFIED: frozenset({State.COMMITTED, State.FAILED}),
    State.COMMITTED: frozenset({State.IDLE, State.FAILED}),
    State.FAILED: frozenset({State.PAUSED, State.FAILED}),
}


class Machine:
    """Holds the state; refuses every transition that is not in the table."""

    def __init__(self) -> None:
        self._state = State.IDLE

    @property
    def state(self) -> State:
        return self._state

    def to(self, state: State) -> None:
        if state not in TRANSITIONS[self._state]:
            legal = ", ".join(sorted(TRANSITIONS[self._state]))
            raise SessionError(f"session cannot go from {self._state} to {state}; legal: {legal}")
        self._state = state

    def require(self, *states: State) -> None:
        if self._state not in states:
            raise SessionError(f"session is {self._state}; this needs {' or '.join(states)}")
