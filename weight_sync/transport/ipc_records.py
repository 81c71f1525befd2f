"""Who still has copies queued for a peer's memory: records that make a fence for copies that cannot look at one themselves.

A kernel reads the peer's epoch before every block. A copy engine does not, and a queued copy runs whatever became of the
process that queued it. So a sender says what it is about to queue before it looks at the epoch, and a peer that closes takes
its epoch away before it looks at what was said:

    sender: issued = n; is the epoch there? if not: nothing is queued. Else: queue copies, and behind them done = n
    peer:   the epoch goes; for every record: wait until done is issued

Each writes, then reads what the other wrote, in one memory: whichever is first is seen by the other. done is written by the
sender's GPU, in the order of its stream, also when the sender itself is stopped.

A sender that was killed loses its lock on a file beside its peer's, and its queued copies once its device files are closed.
Which of these comes first is not promised: Linux releases what a process had open last first, so mostly the lock. What is sure
is that a process that has ended has closed everything. So the file says which process it is, for those that see it; others
wait longer. A fork of a sender holds the lock, as it holds the device files: it counts as alive until both have ended.

A record: two int64 in the peer's device memory, issued and done. That memory is never used for anything else, also after its
owner closed: senders that do not know yet still write their records. Nothing here knows of CUDA.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SENDERS = 256
RECORD_BYTES = 16
ROUND = 1 << 12
"""issued counts from 1 and begins again here; fewer batches than that may be under way at a time."""
_POLL_SECONDS = 1e-3
_START = 19
"""When a process started, among the fields of /proc/<pid>/stat behind its name."""
_DEAD_SECONDS = 1.0
"""After a sender's process has ended: many times what the driver takes to stop a dead process's work."""
_UNSEEN_SECONDS = 5.0
"""After the lock is gone of a process that is not seen from here (another container's): it may still close its device files."""


@dataclass(slots=True)
class Sender:
    """A sender's record at one peer. at: place of the record there. last: what it issued last. owed: issued was said, and
    nothing is queued yet that would make done equal to it."""

    at: int
    path: Path
    descriptor: int
    last: int = 0
    owed: bool = False

    @classmethod
    def claim(cls, peer: Path) -> Sender | None:
        """A record that nobody has, or None where all are taken, none can be had or the peer closed. peer: the file that the
        peer published.

        A record is not taken again whose owner was killed: what it had queued would be forgotten.
        """
        for at in range(SENDERS):
            path = _path(peer, at)
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                continue
            except OSError:  # no space, a folder that is read only, too many open files
                return None
            sender = cls(at, path, descriptor)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.write(descriptor, _this_process().encode())
                if peer.exists():  # else it may have removed all such files before this one came
                    return sender
            sender.close()
            return None
        return None

    def issue(self, say: Callable[[int], None], there: Callable[[], bool]) -> int:
        """Say that a batch is about to be queued, then look at the epoch. The number to write behind the batch, or 0: queue
        nothing.

        say: writes issued, and returns when it stands in the peer's memory. there: whether the peer's epoch is.
        """
        before, self.last, self.owed = self.last, self.last % (ROUND - 1) + 1, True
        say(self.last)
        if there():
            return self.last
        self.last = before
        say(before)
        self.owed = False
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
        open_ = [at for at in open_ if now <= dead.get(at, now)]
        if not open_:
            return None
        if now > end:
            return f"{len(open_)} senders have copies queued for this memory since {seconds:g} s (records {open_[:4]})"
        for at in open_:
            if at not in dead and (after := _dead_after(_path(peer, at))) is not None:
                dead[at] = now + after
        time.sleep(_POLL_SECONDS)


def forget(peer: Path) -> None:
    """Remove the files of all senders; those that live keep theirs open."""
    for at in range(SENDERS):
        with suppress(OSError):  # another user's
            _path(peer, at).unlink(missing_ok=True)


def _path(peer: Path, at: int) -> Path:
    return peer.with_suffix(f".sender{at}")


def _dead_after(path: Path) -> float | None:
    """Seconds after which nothing is under way any more of a record's owner; None where it has not ended, or nothing is known:
    its file is gone where it closed in order, so that done comes to issued, and where somebody removed it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        who = os.read(descriptor, 256).decode()
    except OSError:
        return None
    finally:
        os.close(descriptor)
    space, _, process = who.partition(" ")
    if not process or space != _this_process().partition(" ")[0]:
        return _UNSEEN_SECONDS
    return None if _runs(*process.split()) else _DEAD_SECONDS


def _this_process() -> str:
    """Namespace of process numbers, number and start of this process; empty where it cannot be seen."""
    try:
        number, _, rest = Path("/proc/self/stat").read_text().partition(" ")
        return f"{os.readlink('/proc/self/ns/pid')} {number} {rest.rpartition(')')[2].split()[_START]}"
    except OSError:
        return ""


def _runs(number: str, start: str) -> bool:
    """Whether any thread of a process is left that may have files to close."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        threads = os.listdir(f"/proc/{number}/task")
    except OSError:
        return False
    return fields[_START] == start and not (fields[0] in "ZX" and len(threads) <= 1)
