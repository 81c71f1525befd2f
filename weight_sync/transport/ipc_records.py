"""Who still has copies queued for a peer's memory: records that make a fence for copies that cannot look at one themselves.

A kernel reads the peer's epoch before every block. A copy engine does not, and a queued copy runs whatever became of the
process that queued it. So a sender says what it queues, and where a peer that closes finds it:

    sender, inside the peer's gate: issued = n; closed? then that is taken back. Else: queue copies, and behind them done = n
    peer:   closed; wait until nobody is inside the gate; for every record: wait until done is issued

The gate is a lock that the kernel keeps (flock), which senders share and the peer takes alone: who was inside before it has
said what it queued, and who comes after it finds that it closed. Where a lock is not shared (kernels of several guests over one
file) each still writes before it reads what the other wrote.

issued and closed stand in a file of the peer, done in the peer's device memory, where the sender's GPU writes it in the order
of its stream, also when the sender itself is stopped. That memory is never used for anything else, also after its owner closed.

A sender that was killed loses its lock on a file beside its peer's, and its queued copies once its device files are closed.
Which of these comes first is not promised: Linux releases what a process had open last first, so mostly the lock. What is sure
is that a process that has ended has closed everything. So the file says which process it is, for those that see it; others
wait longer. A fork of a sender holds the lock, as it holds the device files: it counts as alive until both have ended.

Nothing here knows of CUDA.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROTOCOL = 2
"""Of these records: a peer with others is not written to by copy engines."""
SENDERS = 256
RECORD_BYTES = 8
"""Of done, in device memory."""
ROUND = 1 << 12
"""issued counts from 1 and begins again here; fewer batches than that may be under way at a time."""
_WORD = struct.Struct("<q")
_POLL_SECONDS = 1e-3
_START = 19
"""When a process started, among the fields of /proc/<pid>/stat behind its name."""
_DEAD_SECONDS = 1.0
"""After a sender's process has ended: many times what the driver takes to stop a dead process's work."""
_UNSEEN_SECONDS = 5.0
"""After the lock is gone of a process that is not seen from here (another container's): it may still close its device files."""


class Gate:
    """A peer's own file: closed (a word that is 0 until then), and of every record issued."""

    def __init__(self, peer: Path) -> None:
        """peer: the file that the peer publishes."""
        self._peer = peer
        self._descriptor = os.open(_gate(peer), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:  # now, while it is no harm that there is no space
            os.pwrite(self._descriptor, bytes(_WORD.size * (1 + SENDERS)), 0)
        except OSError:
            self.forget()
            raise

    def shut(self) -> None:
        """From now on nothing is queued by who comes to the gate. Also where something else fails before drain()."""
        os.pwrite(self._descriptor, _WORD.pack(1), 0)

    def drain(self, done: Callable[[], list[int]], seconds: float) -> str | None:
        """Shut, and wait until nothing is queued for this memory. None, or why that cannot be said.

        done: of every record, as it stands now in device memory.
        """
        end, dead = time.monotonic() + seconds, dict[int, float]()
        self.shut()
        while not _locked(self._descriptor, fcntl.LOCK_EX):
            if time.monotonic() > end:
                return f"a sender that may queue copies for this memory has not gone on since {seconds:g} s"
            time.sleep(_POLL_SECONDS)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        while True:
            now = time.monotonic()
            open_ = [at for at, (i, d) in enumerate(zip(self.issued(), done(), strict=True)) if i != d]
            open_ = [at for at in open_ if now <= dead.get(at, now)]
            if not open_:
                return None
            if now > end:
                return f"{len(open_)} senders have copies queued for this memory since {seconds:g} s (records {open_[:4]})"
            for at in open_:
                if at not in dead and (after := _dead_after(_path(self._peer, at))) is not None:
                    dead[at] = now + after
            time.sleep(_POLL_SECONDS)

    def issued(self) -> list[int]:
        """Of every record."""
        raw = os.pread(self._descriptor, _WORD.size * SENDERS, _WORD.size)
        return [number for (number,) in _WORD.iter_unpack(raw)]

    def forget(self) -> None:
        """Remove the files, senders' too; those that live keep theirs open."""
        for path in (_gate(self._peer), *(_path(self._peer, at) for at in range(SENDERS))):
            with suppress(OSError):  # another user's
                path.unlink(missing_ok=True)
        os.close(self._descriptor)


@dataclass(slots=True)
class Sender:
    """A sender's record at one peer. at: number of the record. last: what it issued last. owed: issued was said, and it may be
    that nothing is queued that makes done equal to it."""

    at: int
    path: Path
    descriptor: int
    gate: int
    last: int = 0
    owed: bool = False

    @classmethod
    def claim(cls, peer: Path) -> Sender | None:
        """A record that nobody has, or None where all are taken, none can be had or the peer closed. peer: the file that the
        peer published.

        A record is not taken again whose owner was killed: what it had queued would be forgotten.
        """
        try:
            gate = os.open(_gate(peer), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        for at in range(SENDERS):
            path = _path(peer, at)
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                continue
            except OSError:  # no space, a folder that is read only, too many open files
                break
            sender = cls(at, path, descriptor, gate)
            with suppress(OSError):
                mine = _locked(descriptor, fcntl.LOCK_EX)  # else a peer that closes looks at who had it before
                os.write(descriptor, _this_process().encode())
                (sender.last,) = _WORD.unpack(os.pread(gate, _WORD.size, sender._place))
                if mine and peer.exists():  # else it may have removed all such files before this one came
                    return sender
            sender.close()
            return None
        os.close(gate)
        return None

    @property
    def _place(self) -> int:
        return _WORD.size * (1 + self.at)

    def issue(self, queue: Callable[[int], None]) -> bool:
        """Queue copies unless the peer has closed. Returns whether they were.

        queue: is given the number that is to be done behind them. What it raises is passed on; then issued stays as it was
        said, for some of it may be queued.
        """
        before = self.last
        try:
            inside = _locked(self.gate, fcntl.LOCK_SH)  # else the peer has it for itself, which it takes only to close
            self.last, self.owed = self.next, True
            self.say(self.last)
            if not inside or _WORD.unpack(os.pread(self.gate, _WORD.size, 0)) != (0,):
                self.say(before)
                self.last, self.owed = before, False
                return False
            queue(self.last)
            self.owed = False
            return True
        finally:
            fcntl.flock(self.gate, fcntl.LOCK_UN)

    @property
    def next(self) -> int:
        return self.last % (ROUND - 1) + 1

    def say(self, number: int) -> None:
        """issued. Outside issue(): what done is, once nothing is queued any more."""
        os.pwrite(self.gate, _WORD.pack(number), self._place)

    def close(self) -> None:
        """Once everything that was issued is done."""
        self.path.unlink(missing_ok=True)  # the record is free again; its two numbers are equal
        os.close(self.descriptor)
        os.close(self.gate)


def _locked(descriptor: int, how: int) -> bool:
    """Whether the lock was to be had at once."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _gate(peer: Path) -> Path:
    return peer.with_suffix(".gate")


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
