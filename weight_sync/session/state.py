"""The states of a session and the only transitions between them. ARCHITECTURE.md shows the same table."""

from __future__ import annotations

from enum import StrEnum

from weight_sync.errors import SessionError


class State(StrEnum):
    """IDLE: engines serve. PAUSED: engines stand, nothing written. WRITTEN: every write reported complete.

    VERIFIED: every digest equal on both sides. COMMITTED: every engine gave a receipt. FAILED: engines stay paused, what was
    touched is suspect; only a complete sync leads back.
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
        self.state = State.IDLE

    def to(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            legal = ", ".join(sorted(TRANSITIONS[self.state]))
            raise SessionError(f"session cannot go from {self.state} to {state}; legal: {legal}")
        self.state = state

    def require(self, *states: State) -> None:
        if self.state not in states:
            raise SessionError(f"session is {self.state}; this needs {' or '.join(states)}")
