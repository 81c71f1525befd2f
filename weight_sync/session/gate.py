"""Which controller may call: both agents let only the newest one in.

A controller is named `<generation>-<nonce>`, a session `<generation>-<nonce>-<nonce>`. A controller that starts takes a
generation above all that it finds on trainer ranks and engines, and claims them. One that sleeps through this (a stopped
process, a lost network) and wakes up later is refused by name wherever it calls; it can neither begin, write, finish nor
resume.
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Mapping
from typing import Any

from weight_sync.errors import SessionError

_REMEMBERED = 64
"""Sessions that ended: a request of an older one cannot be on its way any more."""

_NAME = re.compile(r"(\d+)-([0-9a-f]+)(?:-[0-9a-f]+)?")


def new_controller(generation: int) -> str:
    return f"{generation}-{secrets.token_hex(4)}"


def new_session(controller: str, label: str = "") -> str:
    """label: hex digits to call it by; "" for new ones."""
    return f"{controller}-{label or secrets.token_hex(8)}"


def controller_of(name: str) -> str:
    """The controller that a session (or controller) name belongs to; "" for names of another form."""
    match = _NAME.fullmatch(name)
    return f"{match[1]}-{match[2]}" if match else ""


def generation_of(name: str) -> int:
    """0 for names of another form."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0


class Gate:
    """One agent's door. where: "rollout rank 3", for errors."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._controller = ""
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)

    @property
    def generation(self) -> int:
        return generation_of(self._controller)

    def check(self, method: str, payload: Mapping[str, Any]) -> None:
        """Refuse a request that names a session or controller older than the newest seen; a newer one becomes the newest.

        Two controllers that took the same generation at the same moment: the first to come has it.
        """
        session = str(payload.get("session") or "")
        name = str(payload.get("controller") or "") or session  # who calls; a new controller may speak of an old one's session
        if name:
            controller, generation = controller_of(name), generation_of(name)
            if generation < self.generation or (generation == self.generation and controller != self._controller):
                raise SessionError(
                    f"{self._where}: {method} by controller {controller or name} is refused: {self._controller} has taken over "
                    "since; this controller is stale and can do nothing more"
                )
            self._controller = controller
        if session and session in self._ended and method in ("begin", "quiesce"):
            raise SessionError(f"{self._where}: {method} of session {session}, which has ended; it came too late")

    def end(self, session: str) -> None:
        """From here on a begin or quiesce of this session is one that was delayed on its way, and is refused."""
        self._ended.append(session)
