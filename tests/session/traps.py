"""Failures that a test lays out beforehand, and a log of every call."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Traps:
    """Failures to come, and a log of every call. where: "trainer 0", "engine e1", "worker 1" (rollout rank) ...

    at(where, verb, error): raise it once, before the call; after=True: once the call is done. do(): run something instead.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self._traps: dict[tuple[str, str, bool], list[Callable[[], None]]] = {}
        self._lock = threading.Lock()

    def at(self, where: str, verb: str, error: BaseException, *, after: bool = False, times: int = 1) -> None:
        def throw() -> None:
            raise error

        for _ in range(times):
            self.do(where, verb, throw, after=after)

    def do(self, where: str, verb: str, action: Callable[[], None], *, after: bool = False) -> None:
        self._traps.setdefault((where, verb, after), []).append(action)

    def enter(self, where: str, verb: str) -> None:
        with self._lock:
            self.log.append((where, verb))
        self._spring(where, verb, after=False)

    def leave(self, where: str, verb: str) -> None:
        self._spring(where, verb, after=True)

    def _spring(self, where: str, verb: str, *, after: bool) -> None:
        waiting = self._traps.get((where, verb, after))
        if waiting:
            waiting.pop(0)()

    @property
    def sprung(self) -> bool:
        """Whether all traps were."""
        return not any(self._traps.values())

    def verbs(self, where: str) -> list[str]:
        return [verb for place, verb in self.log if place == where]
