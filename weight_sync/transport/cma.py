"""Cross memory attach: one-sided writes and reads of another process of the same host, process_vm_writev(2) and readv.

The peer takes no part in it, not even a stopped one: the kernel copies straight between its pages and ours. What the kernel
does not know is registration, so a peer publishes its regions in its own memory and the other side respects them.
Needs the same user and permission to trace the peer (see ptrace(2), "ptrace access mode checking").
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from weight_sync.errors import ConfigError, TransportError
from weight_sync.ids import Deadline
from weight_sync.transport.base import Batch, Completion, Endpoint, Region, Ticket
from weight_sync.transport.probe_area import AREA_BYTES, HEADER, Header, header_of, new_epoch, pack_header, prove
from weight_sync.transport.regions import (
    RegionTable,
    check_deadline,
    check_local,
    check_remote,
    check_usable,
    failed_peer,
    failed_range,
    split,
)

_IOV_MAX = 1024
_CALL_BYTES = 64 << 20
"""Most bytes of one system call: some 10 ms, so that the deadline is looked at often enough."""
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot; with the pid it names one process for ever.

    Raises ProcessLookupError when there is none (a zombie counts as none).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, f"no process {pid}") from None
    fields = text[text.rindex(")") + 2 :].split()  # the command name before it may hold spaces and parentheses
    if fields[0] in "ZX":
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")
    return int(fields[19])


def _here() -> str:
    """Identifies this boot of this host and this pid namespace: pids mean nothing elsewhere."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


class CmaTransport:
    """See the module docstring. Endpoint.address is "pid:start@boot/namespace".

    any_tracer: let any process of this user write here. Needed on the receiving side where
    /proc/sys/kernel/yama/ptrace_scope is 1 and the writer is not an ancestor of this process.
    """

    name = "cma"
    strided = False
    batch_bytes = 32 << 20

    def __init__(self, *, any_tracer: bool = False) -> None:
        try:
            self._libc = ctypes.CDLL(None, use_errno=True)
            for call in (self._libc.process_vm_writev, self._libc.process_vm_readv):
                call.restype = ctypes.c_ssize_t
                call.argtypes = [
                    ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
                ]  # fmt: skip
        except AttributeError as error:
            raise ConfigError("transport cma needs Linux: the C library here has no process_vm_writev") from error
        # EINVAL: the kernel has no Yama, so nothing needs to be opened.
        if any_tracer and self._libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0) != 0:
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise ConfigError(f"transport cma: prctl(PR_SET_PTRACER) was refused: {os.strerror(code)}")
        self._epoch = new_epoch()
        self._pid = os.getpid()
        self._host = _here()
        self._regions = RegionTable()
        self._area = mmap.mmap(-1, AREA_BYTES)
        self._area_address = np.frombuffer(self._area, np.uint8).ctypes.data
        self._table = np.empty(0, np.int64)
        self._publish()
        self._peers: dict[Endpoint, tuple[int, RegionTable]] = {}
        self._flights: dict[int, tuple[float, bool]] = {}
        self._tickets = itertools.count()
        self._unusable: str | None = None

    def register(self, regions: Sequence[Region]) -> None:
        """BindError when a region is empty or overlaps one registered before."""
        self._check_usable()
        self._regions.add(regions)
        self._publish()

    def describe(self) -> Endpoint:
        self._check_usable()
        return Endpoint(
            transport=self.name,
            protocol="cma",
            address=f"{self._pid}:{process_start(self._pid)}@{self._host}",
            epoch=self._epoch,
            probe=(self._area_address, AREA_BYTES),
        )

    def probe(self, endpoint: Endpoint, deadline: Deadline) -> None:
        self._check_usable()
        check_deadline(endpoint, deadline, "probe")
        if (endpoint.transport, endpoint.protocol) != (self.name, "cma"):
            raise failed_peer(endpoint, "the peer is not on the cma transport", "protocol")
        pid = self._process(endpoint)
        header = self._prove(endpoint, pid)
        table = np.frombuffer(self._read(endpoint, pid, header.table, 16 * header.regions), np.int64).reshape(-1, 2)
        self._peers[endpoint] = (pid, RegionTable.published([(int(a), int(n)) for a, n in table]))

    def write(self, batch: Batch) -> Ticket:
        """Only checks: the copy is done by the calling thread inside wait()."""
        return self._start(batch, reads=False)

    def read(self, batch: Batch) -> Ticket:
        """As write(): the copy is done inside wait()."""
        return self._start(batch, reads=True)

    def _start(self, batch: Batch, *, reads: bool) -> Ticket:
        self._check_usable()
        if batch.endpoint not in self._peers:
            raise failed_peer(batch.endpoint, "this peer was never probed", "not probed")
        check_local(batch, self._regions)
        check_remote(batch, self._peers[batch.endpoint][1])
        ticket = Ticket(next(self._tickets), batch)
        self._flights[ticket.id] = time.monotonic(), reads
        return ticket

    def wait(self, ticket: Ticket, deadline: Deadline) -> Completion:
        self._check_usable()
        started, reads = self._flights.pop(ticket.id, (None, False))
        if started is None:
            raise ValueError(f"ticket {ticket.id} is not in flight on this transport: each is waited for once")
        batch = ticket.batch
        try:
            self._copy(batch, deadline, reads=reads)
        except TransportError as error:
            self._unusable = f"an earlier batch failed with code {error.code}"
            raise
        return Completion(nbytes=int(batch.nbytes.sum()), seconds=time.monotonic() - started)

    def close(self) -> None:
        """Nothing of ours is ever in flight outside wait(), so the fence is immediate.

        A peer that is writing here finds out before its next system call; the one it is in, at most _CALL_BYTES, ends first.
        """
        if self._unusable == "closed":
            raise failed_peer(f"cma/cma {self._pid}", "the transport is closed", "closed")
        self._area[: len(pack_header(0))] = bytes(len(pack_header(0)))
        self._unusable = "closed"

    def _publish(self) -> None:
        """Table first, then the header that points to it: a reader in between sees the old state whole."""
        table = np.array([(r.address, r.nbytes) for r in self._regions.regions], np.int64).reshape(-1)
        header = pack_header(self._epoch, table.ctypes.data if len(table) else 0, len(self._regions))
        self._area[: len(header)] = header
        self._table = table

    def _process(self, endpoint: Endpoint) -> int:
        """The peer's pid, once it is certain that it still is the process that described itself."""
        try:
            process, _, host = endpoint.address.partition("@")
            pid, start = (int(part) for part in process.split(":"))
        except ValueError:
            raise failed_peer(endpoint, 'not an address of the form "pid:start@boot/namespace"', "address") from None
        if host != self._host:
            raise failed_peer(
                endpoint,
                f"cma reaches processes of the same host and pid namespace only; the peer is in {host}, this is {self._host}",
                "other host",
            )
        try:
            found = process_start(pid)
        except ProcessLookupError as error:
            raise failed_peer(endpoint, f"the peer is gone ({error.strerror})", "unknown peer") from None
        if found != start:
            raise failed_peer(endpoint, f"pid {pid} is another process now (started at {found}, was {start})", "stale epoch")
        return pid

    def _prove(self, endpoint: Endpoint, pid: int) -> Header:
        def write(address: int, data: bytes) -> None:
            moved = self._call(self._libc.process_vm_writev, pid, np.frombuffer(data, np.uint8).ctypes.data, address, len(data))
            if moved != len(data):
                self._refused(endpoint, "write to")

        return prove(endpoint, lambda address, nbytes: self._read(endpoint, pid, address, nbytes), write)

    def _still_open(self, endpoint: Endpoint, pid: int) -> None:
        """Raise if the peer has closed since it was proved. One small read."""
        assert endpoint.probe is not None
        header_of(endpoint, self._read(endpoint, pid, endpoint.probe[0], HEADER.size))

    def _read(self, endpoint: Endpoint, pid: int, address: int, nbytes: int) -> bytes:
        if nbytes == 0:
            return b""
        here = np.empty(nbytes, np.uint8)
        if self._call(self._libc.process_vm_readv, pid, here.ctypes.data, address, nbytes) != nbytes:
            self._refused(endpoint, "read from")
        return here.tobytes()

    def _call(self, function: Callable[..., int], pid: int, local: int, remote: int, nbytes: int) -> int:
        vectors = np.array([[local, nbytes], [remote, nbytes]], np.int64)
        return function(pid, vectors.ctypes.data, 1, vectors.ctypes.data + 16, 1, 0)

    def _refused(self, endpoint: Endpoint, what: str) -> NoReturn:
        code = ctypes.get_errno()
        raise failed_peer(endpoint, f"the kernel did not let us {what} the peer: {explain(code)}", errno_name(code))

    def _copy(self, batch: Batch, deadline: Deadline, *, reads: bool) -> None:
        endpoint = batch.endpoint
        function, name = (
            (self._libc.process_vm_readv, "process_vm_readv") if reads else (self._libc.process_vm_writev, "process_vm_writev")
        )
        pid = self._process(endpoint)
        self._prove(endpoint, pid)  # a peer that closed or changed since the probe is left alone
        here, there, sizes, parent = split(batch.local, batch.remote, batch.nbytes, _CALL_BYTES)
        sizes = sizes.copy()
        local = np.ascontiguousarray(np.stack([here, sizes], axis=1))
        remote = np.ascontiguousarray(np.stack([there, sizes], axis=1))
        ends = np.cumsum(sizes)
        at = 0
        while at < len(sizes):
            if deadline.remaining() <= 0:
                done_to = "read" if reads else "written"
                raise failed_range(
                    batch, int(parent[at]), f"not {done_to} within the deadline of {deadline.seconds:g} s", "deadline"
                )
            if at:
                self._still_open(endpoint, pid)
            before = int(ends[at] - sizes[at])
            stop = min(at + _IOV_MAX, max(at + 1, int(np.searchsorted(ends, before + _CALL_BYTES, side="right"))))
            moved = function(pid, local[at:].ctypes.data, stop - at, remote[at:].ctypes.data, stop - at, 0)
            if moved <= 0:
                code = ctypes.get_errno() if moved < 0 else errno.EIO
                raise failed_range(batch, int(parent[at]), f"{name}, pid {pid}: {explain(code)}", errno_name(code))
            # A short count is not an error yet: go on behind it, and the next call says what stands in the way.
            done = int(np.searchsorted(ends, before + moved, side="right"))
            rest = before + moved - int(ends[done] - sizes[done]) if done < len(sizes) else 0
            if rest:
                for vectors in (local, remote):
                    vectors[done, 0] += rest
                    vectors[done, 1] -= rest
                sizes[done] -= rest
            at = done

    def _check_usable(self) -> None:
        check_usable(f"cma/cma {self._pid}", self._unusable, self._pid)


def errno_name(code: int) -> str:
    return errno.errorcode.get(code, str(code))


def explain(code: int) -> str:
    """The system's text for an errno of process_vm_*, and what to do about it."""
    text = os.strerror(code)
    if code == errno.EPERM:
        try:
            scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
        except FileNotFoundError:
            scope = "absent"
        return (
            f"{text}. Both processes must belong to one user and be dumpable; yama/ptrace_scope here is {scope} "
            "(1: open the receiver with any_tracer=True, 2 or 3: needs CAP_SYS_PTRACE); a container may need SYS_PTRACE"
        )
    if code == errno.ESRCH:
        return f"{text}. The peer has ended"
    if code == errno.EFAULT:
        return f"{text}. A range is no longer mapped (writable, where it is written to), in the peer or here"
    return text
