"""Who still has copies queued for a peer's memory: records that make a fence for copies that cannot look at one themselves.

A kernel reads the peer's epoch before every block. A copy engine does not, and a queued copy runs whatever became of the
process that queued it. So a sender says what it is about to queue before it looks at the epoch, and a peer that closes takes
its epoch away before it looks at what was said:

    sender: issued = n; is the epoch there? if not: nothing is queued. Else: queue copies, and behind them done = n
    peer:   the epoch goes; for every record: wait until done is issued

Each writes, then reads what the other wrote, in one memory: whichever is first is seen by the other. done is written by the
sender's GPU, in the order of its stream, also when the sender itself is stopped. A sender that was killed loses its lock on a
file beside its peer's: the kernel closes a process's files in the order in which they were opened, the GPU's, which takes its
queued copies along, before this one.

A record: two int64 in the peer's device memory, issued and done. Nothing here knows of CUDA.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SENDERS = 256
RECORD_BYTES = 16
ROUND = 1 << 12
"""issued counts from 1 and begins again here; fewer batches than that may be under way at a time."""
_POLL_SECONDS = 1e-3
_DEAD_SECONDS = 1.0
"""After a sender's lock is gone: many times what the driver takes to stop a dead process's work."""


@dataclass(slots=True)
class Sender:
    """A sender's record at one peer. at: place of the record there. last: what it issued last."""

    at: int
    path: Path
    descriptor: int
    last: int = 0

    @classmethod
    def claim(cls, peer: Path) -> Sender | None:
        """A record that nobody had before, or None where all are taken. peer: the file that the peer published.

        A record is never taken again, though its owner may be gone: what it had queued would be forgotten.
        """
        for at in range(SENDERS):
            path = _path(peer, at)
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return cls(at, path, descriptor)
        return None

    def issue(self, say: Callable[[int], None], there: Callable[[], bool]) -> int:
        """Say that a batch is about to be queued, then look at the epoch. The number to write behind the batch, or 0: queue
        nothing.

        say: writes issued, and returns when it stands in the peer's memory. there: whether the peer's epoch is.
        """
        before, self.last = self.last, self.last % (ROUND - 1) + 1
        say(self.last)
        if there():
            return self.last
        self.last = before
        say(before)
        return 0

    def close(self) -> None:
        """Once everything that was issued is done."""
        self.path.unlink(missing_ok=True)  # the record is free again; its two numbers are equal
        os.close(self.descriptor)


def drain(peer: Path, records: Callable[[], list[tuple[int, int]]], seconds: float) -> str | None:
    """After the epoch is gone: wait until nothing is queued for this memory. None, or why that cannot be said.

    records: (issued, done) of every record, as they stand now.
    """
    end, dead = time.monotonic() + seconds, dict[int, float]()
    while True:
        now = time.monotonic()
        open_ = [at for at, (issued, done) in enumerate(records()) if issued != done]
        open_ = [at for at in open_ if not (at in dead and now - dead[at] > _DEAD_SECONDS)]
        if not open_:
            return None
        if now > end:
            return f"{len(open_)} senders have copies queued for this memory since {seconds:g} s (records {open_[:4]})"
        for at in open_:
            if at not in dead and _gone(_path(peer, at)):
                dead[at] = now
        time.sleep(_POLL_SECONDS)


def forget(peer: Path) -> None:
    """Remove the files of all senders; those that live keep theirs open."""
    for at in range(SENDERS):
        _path(peer, at).unlink(missing_ok=True)


def _path(peer: Path, at: int) -> Path:
    return peer.with_suffix(f".sender{at}")


def _gone(path: Path) -> bool:
    """Whether the owner of a record has ended: nobody holds its lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # it closed in order, so done comes to issued, or another removed its file: then nothing is known
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
