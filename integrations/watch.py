"""An observer for training loops with charts of their own: it keeps the last sync's record and says aloud what a person should
read. Nothing is written to disk or to wandb."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from weight_sync.observe.recorder import Recorder
from weight_sync.observe.records import SyncRecord

_log = logging.getLogger("weight_sync")


class LastRecord:
    """A weight_sync.session.contracts.Observer. last: of the sync that ended last, also if it failed; None before the first."""

    def __init__(self, limit: float | None = None) -> None:
        """limit: bytes per second the wire can do, None if unknown."""
        self._limit = limit
        self.last: SyncRecord | None = None

    @contextmanager
    def sync(self, version: int, session: str, *, nbytes: int | None = None) -> Iterator[Recorder]:
        recorder = Recorder(version, session, limit=self._limit, on_say=lambda text: _log.warning("%s", text))
        try:
            with recorder:
                yield recorder
        finally:
            self.last = recorder.record()
