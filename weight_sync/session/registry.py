"""The replicas of one job: who is in, what each holds, and the only transitions between their states.

    joining   in the plan, holds nothing that was verified; stands still since it joined
    syncing   bytes may be changing under it
    ready     holds `version`, proved by its own digests, and was resumed with its own receipt
    suspect   touched by a session that failed: paused, or out of the serving set; a complete session brings it back
    left      gone; a replica that comes again is a new one

ARCHITECTURE.md shows the same table. A replica that is `out` is suspect and takes part in no sync until it joins again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from weight_sync.errors import BindError, SessionError, listed
from weight_sync.session.contracts import RolloutEngine


class ReplicaState(StrEnum):
    JOINING = "joining"
    SYNCING = "syncing"
    READY = "ready"
    SUSPECT = "suspect"
    LEFT = "left"


REPLICA_TRANSITIONS: dict[ReplicaState, frozenset[ReplicaState]] = {
    ReplicaState.JOINING: frozenset({ReplicaState.SYNCING, ReplicaState.SUSPECT, ReplicaState.LEFT}),
    ReplicaState.SYNCING: frozenset({ReplicaState.READY, ReplicaState.SUSPECT}),
    ReplicaState.READY: frozenset({ReplicaState.SYNCING, ReplicaState.SUSPECT, ReplicaState.LEFT}),
    ReplicaState.SUSPECT: frozenset({ReplicaState.SYNCING, ReplicaState.SUSPECT, ReplicaState.LEFT}),
    ReplicaState.LEFT: frozenset(),
}


@dataclass(slots=True, eq=False)
class Replica:
    """One engine as the registry knows it. version: what it was last ready with, -1 for nothing; kept while suspect.

    reason: why it is suspect. served: bytes that joiners have read from it. out: left out of syncs until it joins again.
    """

    engine: RolloutEngine
    state: ReplicaState = ReplicaState.JOINING
    version: int = -1
    reason: str = ""
    served: int = 0
    out: bool = False

    @property
    def name(self) -> str:
        return self.engine.name

    def to(self, state: ReplicaState, *, version: int | None = None, reason: str = "") -> None:
        """Raises SessionError for a transition that is not in the table, and for ready without a version."""
        if state not in REPLICA_TRANSITIONS[self.state]:
            legal = ", ".join(sorted(REPLICA_TRANSITIONS[self.state])) or "none"
            raise SessionError(f"replica {self.name} cannot go from {self.state} to {state}; legal: {legal}")
        if (state is ReplicaState.READY) != (version is not None):
            raise SessionError(f"replica {self.name}: {state} with version {version}; ready, and only ready, has one")
        self.state, self.reason = state, reason
        if version is not None:
            self.version = version

    def text(self) -> str:
        if self.state is ReplicaState.READY:
            return f"ready({self.version})"
        return f"{self.state}{': ' + self.reason if self.reason else ''}"


class Registry:
    """Replicas in the order of their engines in the plan. One controller thread uses it."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self._replicas: list[Replica] = [Replica(engine) for engine in engines]
        if len({r.name for r in self._replicas}) != len(self._replicas):
            raise BindError(f"engines need names of their own, got {listed(r.name for r in self._replicas)}")

    @property
    def all(self) -> tuple[Replica, ...]:
        return tuple(self._replicas)

    @property
    def members(self) -> list[Replica]:
        """Those that take part in the next sync, in the order of the plan."""
        return [replica for replica in self._replicas if not replica.out]

    def index(self, name: str) -> int:
        """A member's place in the plan."""
        return [replica.name for replica in self.members].index(name)

    def get(self, name: str) -> Replica:
        found = next((replica for replica in self._replicas if replica.name == name), None)
        if found is None:
            raise SessionError(f"no replica {name}; there are {listed(r.name for r in self._replicas) or 'none'}")
        return found

    def add(self, engine: RolloutEngine) -> Replica:
        """A new replica, joining, last in the plan. One that was left out may come again under its name."""
        known = next((replica for replica in self._replicas if replica.name == engine.name), None)
        if known is not None and not known.out:
            raise SessionError(f"a replica {engine.name} is here already ({known.text()}); leave() or replace() it first")
        if known is not None:
            self.remove(known.name)
        replica = Replica(engine)
        self._replicas.append(replica)
        return replica

    def remove(self, name: str) -> Replica:
        replica = self.get(name)
        replica.to(ReplicaState.LEFT)
        self._replicas.remove(replica)
        return replica

    def lender(self, version: int, but: Replica | None = None) -> Replica | None:
        """The ready replica of `version` that has served the fewest bytes to joiners; the first of several. but: not it."""
        ready = [r for r in self.members if r.state is ReplicaState.READY and r.version == version and r is not but]
        return min(ready, key=lambda replica: replica.served, default=None)
