"""HF tensors that an engine's own loader places: the worker's staging memory, and the order in which its waves are handed over.

For engines whose live tensors are no longer the checkpoint's (repacked, requantised, emptied), so that no byte may be written
into them. The worker takes whole HF tensors beside its weights, some waves after the other in the same memory; each wave is
handed to the loader once its bytes are verified, and only then. Everything else of a sync is as ever: a wave's tensors are the
parameters that a plan writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from weight_sync.errors import BindError, SessionError


class Loader(Protocol):
    """What an adapter brings: the engine's own loading, in the worker's process.

    allocate()   at bind, nothing is paused: staging memory. Raises BindError where the loader would not use exactly these
                 tensors, or would leave a parameter unfilled.
    feed()       one wave of a sync. The first begins a load, whatever was before; the last ends it, with post-processing,
                 once. Raises where the loader fails, and where it has not used what it was given.
    abandon()    a load that was begun will not be ended. May come at any time.
    settle()     after the last feed, before the commit: what depends on weights was made anew, the rest is untouched.
                 Returns what was proven.
    snapshot(), scramble(), compare()
                 of everything in this process that generation depends on, as those of TargetAgent: copy it; spoil what
                 loading must bring back; VerifyError unless it is as it was. Each returns bytes.
    """

    def allocate(self, nbytes: int, places: Mapping[str, tuple[list[int], str, int]]) -> Mapping[str, Any]:
        """places: HF name -> (shape, dtype, first byte). Returns a view of the memory for each."""
        ...

    def feed(self, tensors: Mapping[str, Any], first: bool, last: bool) -> None: ...

    def abandon(self) -> None: ...

    def settle(self) -> dict[str, int]: ...

    def snapshot(self) -> int: ...

    def scramble(self) -> int: ...

    def compare(self) -> int: ...


class Placing:
    """One binding's staging memory. table: `loader` and `expected` of a target_table. where: "rollout rank 3".

    loading: a load was begun and has not ended: the live weights are in the loader's hands, and may lie nowhere.
    """

    def __init__(self, loader: Loader, table: Mapping[str, Any], where: str) -> None:
        self.loader, self._where = loader, where
        self._places: dict[str, list[int]] = table["loader"]["places"]
        self._waves = int(table["loader"]["waves"])
        if self._places.keys() != table["expected"].keys():
            raise BindError(f"{where}: the plan names other HF tensors than it has places for")
        places = {name: (*table["expected"][name], first) for name, (_, first) in self._places.items()}
        self.tensors = loader.allocate(int(table["loader"]["bytes"]), places)
        self.loading = False
        self.begin()

    def begin(self) -> None:
        """A session begins: nothing was verified or handed over in it."""
        self._verified: int | None = None
        self._fed = 0
        self._snapshot = self._scrambled = False

    @property
    def loaded(self) -> bool:
        """All waves were handed over, and the loader has ended."""
        return self._fed == self._waves

    def verified(self, wave: int) -> None:
        """The controller is told the digests of a wave that has arrived (or wants none)."""
        self._verified = wave

    def feed(self, wave: int) -> dict[str, Any]:
        """Hand a wave to the loader. Raises SessionError unless it is the next one, and was looked at after it arrived.

        A load that has ended may be done again in the same session: wave 0 begins it.
        """
        following = 0 if self.loaded else self._fed
        if wave != following or self._verified != wave:
            seen = "none" if self._verified is None else self._verified
            raise SessionError(
                f"{self._where}: wave {wave} of {self._waves} cannot be loaded: next is {following}, verified last was {seen}"
            )
        self._verified, self._fed, self.loading = None, wave, True
        tensors = {name: self.tensors[name] for name, (number, _) in self._places.items() if number == wave}
        self.loader.feed(tensors, wave == 0, wave == self._waves - 1)
        self._fed = wave + 1
        self.loading = not self.loaded
        return {"tensors": len(tensors)}

    def check(self, step: str) -> dict[str, Any]:
        """snapshot, scramble or compare; see TargetAgent."""
        if step == "snapshot":
            if self._snapshot:
                raise SessionError(f"{self._where}: this session has a snapshot already")
            self._snapshot = True
            return {"bytes": self.loader.snapshot()}
        if not self._snapshot:
            raise SessionError(f"{self._where}: {step} without a snapshot: the weights would be lost")
        if step == "scramble":
            self._scrambled, self._fed = True, 0
            return {"bytes": self.loader.scramble()}
        if not self.loaded:
            raise SessionError(f"{self._where}: compare before the loader has ended")
        reply = {"bytes": self.loader.compare()}
        self._snapshot = self._scrambled = False
        return reply

    def end(self) -> None:
        """Raises SessionError unless everything of this session was loaded, and nothing is left scrambled."""
        if not self.loaded or self._scrambled:
            why = "weights were scrambled and not compared since" if self._scrambled else f"{self._fed} of {self._waves} waves"
            raise SessionError(f"{self._where}: the session cannot end: {why if self._scrambled else why + ' were loaded'}")
