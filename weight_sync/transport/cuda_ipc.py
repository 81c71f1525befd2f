"""CUDA IPC: this GPU writes straight into another process's device memory, over NVLink or PCIe, inside one host.

Long ranges are the copy engines'. All others are one launch of a kernel, which walks strides itself, so nothing is packed and
a short run costs what a long one does. The peer takes no part. What a peer registered stands in a file of its own in shared
memory (mode 0600: only the same user finds it) with the handles of its allocations.

The fence is on the device: every thread block of a launch first reads the peer's epoch from the peer's memory and copies
nothing when it is gone. Queued copies cannot; who queues them says so where the peer looks when it closes (ipc_records), so
that close() returns when none is left.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from weight_sync.device.tables import Tables, pair
from weight_sync.errors import BindError, ConfigError, TransportError
from weight_sync.ids import Deadline
from weight_sync.transport.base import Batch, Completion, Endpoint, Region, Ticket
from weight_sync.transport.ipc_copies import AREA_BYTES as RECORDS_BYTES
from weight_sync.transport.ipc_copies import NOT_FROM, CopyEngine, Meeting, long_ranges
from weight_sync.transport.ipc_records import PROTOCOL, SENDERS, Gate
from weight_sync.transport.probe_area import AREA_BYTES, SCRATCH_OFFSET, new_epoch, pack_header, prove
from weight_sync.transport.regions import (
    RegionTable,
    check_deadline,
    check_local,
    check_remote,
    check_usable,
    failed_peer,
    failed_range,
)

_POLL_SECONDS = 50e-6
_SETTLE_SECONDS = 0.1
"""After the epoch is gone from the device: the thread blocks that had read it before finish within microseconds, unless their
GPU was given to another process in between; this is many times a scheduler's time slice. Over PCIe a record's last word may
also overtake the bytes before it by as little."""
_DRAIN_SECONDS = 20.0
"""How long close() waits for copies that its peers had queued before; whole models take tenths of a second."""
_NONCE = secrets.token_hex(16)
"""With the pid it names this process: two containers that share /dev/shm may have one pid, a fork has its parent's nonce."""
_EPOCH_AT = 8
"""Byte of the epoch in the probe area's header (probe_area.HEADER)."""
_AREAS: list[Any] = []
"""Of all transports of this process, also those that closed (72 KB each): a peer that does not know yet looks for the epoch
there, and one that probes may write its nonce just after; that must not be memory of others."""
_RECORDS = [PROTOCOL, SENDERS, AREA_BYTES]
"""Published: a peer's records and where done lies behind its probe area, as this version of the library has them."""


@dataclass(slots=True, eq=False)
class _Peer:
    """regions: what it had registered when probed. shift: to add to its addresses, by allocation. opened: mapped here.

    epoch_at: where its epoch is mapped. meeting: our record there, with which copy engines may be used; None: the kernel does
    all.
    """

    regions: RegionTable
    bases: Any
    shifts: Any
    opened: list[int]
    epoch_at: int
    meeting: Meeting | None = None

    def here(self, remote: Any) -> Any:
        """Addresses of the peer as addresses of this process."""
        return _mapped(self.bases, self.shifts, remote)


def _said(error: BaseException) -> str:
    return f"the gate's file: {error}" if isinstance(error, OSError) else f"CUDA reports: {error}"


def _code(error: BaseException) -> str:
    return "gate" if isinstance(error, OSError) else "cuda"


def _mapped(bases: Any, shifts: Any, remote: Any) -> Any:
    """Addresses of a peer's allocations, which begin at `bases`, as addresses of this process."""
    return remote + shifts[np.searchsorted(bases, remote, side="right") - 1]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A batch as the device takes it. kernel: tables of here and there, blocks, bytes of a word. copies: of long ranges.

    missed: counts thread blocks that found the peer's epoch gone. One that did not end well is the last of its transport, so it
    is never set back.
    """

    kernel: tuple[Any, Any, Any, int] | None
    copies: Any
    missed: Any


@dataclass(frozen=True, slots=True)
class _Flight:
    """missed: see _Prepared; None where no kernel was asked for. refused: the peer had closed before copies were queued."""

    batch: Batch
    events: tuple[Any, ...]
    missed: Any
    refused: bool
    started: float


class CudaIpcTransport:
    """See the module docstring. Endpoint.address is "<file>@<boot id>".

    device: CUDA device of this rank's memory, the current one when None. copy_engines: whether they may take long ranges; None:
    on GPUs before Blackwell. ConfigError without CUDA.
    """

    name = "cuda_ipc"
    strided = True
    batch_bytes = 1 << 30

    def __init__(self, *, device: int | None = None, copy_engines: bool | None = None) -> None:
        try:
            import torch  # pyright: ignore[reportMissingImports]

            from weight_sync.device import ipc, kernels
        except ImportError as error:
            raise ConfigError(f"transport cuda_ipc needs torch and triton: {error}") from error
        if not torch.cuda.is_available():
            raise ConfigError("transport cuda_ipc needs a CUDA device; torch finds none here. On CPUs: cma or mooncake tcp")
        self._torch, self._ipc, self._kernels = torch, ipc, kernels
        self._pid = os.getpid()
        self._process = f"{self._pid}-{_NONCE}"
        self._device = torch.device("cuda", torch.cuda.current_device() if device is None else device)
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._epoch = new_epoch()
        self._regions = RegionTable()
        self._exported: dict[int, tuple[int, str]] = {}
        self._peers: dict[Endpoint, _Peer] = {}
        self._prepared: WeakKeyDictionary[Batch, dict[bool, _Prepared]] = WeakKeyDictionary()
        self._flights: dict[int, _Flight] = {}
        self._tickets = count()
        self._unusable: str | None = None
        with torch.cuda.device(self._device):
            self._area = torch.zeros(AREA_BYTES + RECORDS_BYTES, dtype=torch.uint8, device=self._device)
            _AREAS.append(self._area)
            # Above the caller's kernels: else its blocks wait for those of a kernel that fills the next staging buffer.
            self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._engine = CopyEngine(torch, ipc, self._device)
        new = torch.cuda.get_device_capability(self._device)[0] >= NOT_FROM
        self._copies = not new if copy_engines is None else copy_engines
        self._put(self._area.data_ptr(), pack_header(self._epoch))
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        descriptor, name = tempfile.mkstemp(prefix="weight_sync-ipc-", dir=folder)
        os.close(descriptor)
        self._file = Path(name)
        try:
            self._gate = Gate(self._file)
        except OSError:
            self._file.unlink()
            raise
        self._publish()

    def register(self, regions: Sequence[Region]) -> None:
        """BindError when a region is empty, overlaps one registered before, or lies in memory that CUDA IPC cannot share."""
        self._check_usable()
        self._torch.cuda.synchronize(self._device)  # gives this thread the device's context
        self._regions.add(regions)
        for region in regions:
            self._export(region.address, region.nbytes)
        self._publish()

    def describe(self) -> Endpoint:
        self._check_usable()
        address = f"{self._file}@{self._boot}"
        return Endpoint(self.name, "cuda_ipc", address, self._epoch, (self._area.data_ptr(), AREA_BYTES))

    def probe(self, endpoint: Endpoint, deadline: Deadline) -> None:
        """Opens the peer's handles, then reads its epoch and writes and reads back a nonce through its device memory."""
        self._check_usable()
        check_deadline(endpoint, deadline, "probe")
        if (endpoint.transport, endpoint.protocol) != (self.name, "cuda_ipc"):
            raise failed_peer(endpoint, "the peer is not on the cuda_ipc transport", "protocol")
        self._torch.cuda.synchronize(self._device)  # gives this thread the device's context, which the driver's calls need
        content = self._read_file(endpoint)
        peer = self._open(endpoint, content)
        area = self._area.data_ptr() + SCRATCH_OFFSET

        def read(address: int, nbytes: int) -> bytes:
            self._move(area, int(peer.here(np.asarray([address]))[0]), nbytes)
            return self._get(area, nbytes)

        def write(address: int, data: bytes) -> None:
            self._put(int(peer.here(np.asarray([address]))[0]), data)

        try:
            prove(endpoint, read, write)
            if endpoint in self._peers:
                self._close_peer(self._peers[endpoint])
                del self._peers[endpoint]
            if self._copies and content.get("records") == _RECORDS:  # else it is of another version, and waits for none
                records = peer.epoch_at - _EPOCH_AT + AREA_BYTES
                peer.meeting = self._engine.meet(Path(endpoint.address.rpartition("@")[0]), records)
        except BaseException:
            self._close_peer(peer)
            raise
        self._peers[endpoint] = peer
        for batch in [batch for batch in self._prepared if batch.endpoint == endpoint]:
            del self._prepared[batch]

    def write(self, batch: Batch) -> Ticket:
        return self._start(batch, reads=False)

    def read(self, batch: Batch) -> Ticket:
        return self._start(batch, reads=True)

    def follow(self, ticket: Ticket) -> None:
        self._check_usable()
        if ticket.id not in self._flights:
            raise ValueError(f"ticket {ticket.id} is not in flight on this transport")
        for event in self._flights[ticket.id].events:
            self._torch.cuda.current_stream(self._device).wait_event(event)

    def wait(self, ticket: Ticket, deadline: Deadline) -> Completion:
        self._check_usable()
        if ticket.id not in self._flights:
            raise ValueError(f"ticket {ticket.id} is not in flight on this transport: each is waited for once")
        # One that fails stays in _flights until close() has waited for it: its launch may still be reading the batch's tables.
        flight = self._flights[ticket.id]
        batch = flight.batch
        try:
            while not all(event.query() for event in flight.events):
                if deadline.remaining() <= 0:
                    reason = f"not done within the deadline of {deadline.seconds:g} s"
                    raise failed_range(batch, 0, reason, "deadline")
                time.sleep(_POLL_SECONDS)
            if flight.refused:
                raise failed_range(batch, 0, "the peer closed before copies were queued", "closed peer")
            if flight.missed is not None and (programs := int(flight.missed.item())):
                raise failed_range(batch, 0, f"the peer closed: {programs} thread blocks found its epoch gone", "closed peer")
        except TransportError as error:
            self._unusable = f"an earlier batch failed with code {error.code}"
            raise
        except RuntimeError as error:  # how torch reports a CUDA error, which no later call of this process survives
            self._unusable = f"a CUDA error: {error}"
            raise failed_range(batch, 0, f"CUDA reports: {error}", "cuda") from error
        del self._flights[ticket.id]
        return Completion(int(batch.nbytes.sum()), time.monotonic() - flight.started)

    def close(self) -> None:
        """Takes this side's epoch off the device, waits for what this side launched and for copies that peers had queued for
        its memory, and unmaps its peers."""
        # One that is poisoned is to be closed all the same.
        check_usable(self._here, "closed" if self._unusable == "closed" else None, self._pid)
        self._unusable = "closed"
        try:
            self._gate.shut()  # before anything that may fail
            self._file.unlink(missing_ok=True)
            self._put(self._area.data_ptr(), bytes(len(pack_header(0))))
            self._stream.synchronize()
            self._engine.stream.synchronize()
            reason = self._gate.drain(self._done, _DRAIN_SECONDS)
        except (RuntimeError, BindError, OSError) as error:
            raise failed_peer(self._here, f"{_said(error)}; end this process", _code(error)) from error
        if reason:
            raise failed_peer(self._here, f"{reason}; end this process", "not drained")
        if len(self._regions):
            time.sleep(_SETTLE_SECONDS)
        self._gate.forget()
        failed: list[Exception] = []
        for peer in self._peers.values():
            try:
                self._close_peer(peer)
            except (RuntimeError, BindError, OSError) as error:
                failed.append(error)
        self._peers.clear()
        self._prepared.clear()
        self._flights.clear()
        if failed:
            raise failed_peer(self._here, f"{_said(failed[0])}; end this process", _code(failed[0])) from failed[0]

    def _start(self, batch: Batch, *, reads: bool) -> Ticket:
        self._check_usable()
        if batch.endpoint not in self._peers:
            raise failed_peer(batch.endpoint, "this peer was never probed", "not probed")
        peer = self._peers[batch.endpoint]
        made = self._made(batch, peer, reads)
        caller = self._torch.cuda.current_stream(self._device)
        events, refused = [], False
        try:
            with self._torch.cuda.device(self._device):
                # What the caller's stream still does to the local bytes comes first.
                before = [stream.record_event() for stream in {self._torch.cuda.default_stream(self._device), caller}]
                if made.copies is not None:
                    assert peer.meeting is not None
                    refused = not self._engine.queue(peer.meeting, made.copies, before)
                    events.append(self._engine.stream.record_event())
                if made.kernel is not None:
                    local, remote, blocks, word = made.kernel
                    with self._torch.cuda.stream(self._stream):
                        for event in before:
                            self._stream.wait_event(event)
                        source, target = (remote, local) if reads else (local, remote)
                        fence = peer.epoch_at, batch.endpoint.epoch, made.missed
                        self._kernels.launch_copy(source, target, blocks, word, fence)
                        events.append(self._stream.record_event())
        except BaseException as error:
            self._unusable = f"a batch could not be queued: {error}"  # as a whole; some of it may be under way
            if isinstance(error, (BindError, RuntimeError, OSError)):
                raise failed_range(batch, 0, f"cannot be queued: {error}", _code(error)) from error
            raise
        ticket = Ticket(next(self._tickets), batch)
        self._flights[ticket.id] = _Flight(batch, tuple(events), made.missed, refused, time.monotonic())
        return ticket

    def _made(self, batch: Batch, peer: _Peer, reads: bool) -> _Prepared:
        """The batch as tables and lists. Made, and checked, once for a batch that is written again and again."""
        both = self._prepared.setdefault(batch, {})
        if reads not in both:
            both[reads] = self._prepare(batch, peer, reads)
        return both[reads]

    def _prepare(self, batch: Batch, peer: _Peer, reads: bool) -> _Prepared:
        # Extents, not payloads: a strided box must lie in registered memory as a whole.
        boxes = batch.boxes
        local, remote = (batch.nbytes, batch.nbytes) if boxes is None else map(
            boxes.extents, (boxes.local_strides, boxes.remote_strides)
        )  # fmt: skip
        check_local(replace(batch, nbytes=local, boxes=None), self._regions)
        check_remote(replace(batch, nbytes=remote, boxes=None), peer.regions)
        mapped = peer.here(batch.remote)
        # Reads are the kernel's: whoever closes may not know who reads there, and need not.
        long = long_ranges(batch) if peer.meeting is not None and not reads else np.zeros(len(batch.nbytes), np.bool_)
        copies = self._engine.prepare(mapped[long], batch.local[long], batch.nbytes[long]) if long.any() else None
        rest = np.flatnonzero(~long)
        if not len(rest):
            return _Prepared(None, copies, None)
        missed = self._torch.zeros(1, dtype=self._torch.int64, device=self._device)
        return _Prepared(self._tables(batch, mapped, rest), copies, missed)

    def _tables(self, batch: Batch, mapped: Any, rest: Any) -> tuple[Any, Any, Any, int]:
        """Entries `rest` of the batch, whose remote addresses are `mapped` here."""
        boxes, starts, nbytes = batch.boxes, (batch.local[rest], mapped[rest]), batch.nbytes[rest]
        if boxes is None:
            word = int(np.gcd.reduce(np.concatenate([*starts, nbytes, [8]])))
            here, there = (Tables.of_ranges(at, nbytes, word) for at in starts)
        else:
            strides = boxes.local_strides[rest], boxes.remote_strides[rest]
            here, there = pair(*(
                [(int(a), 1, s, n) for a, s, n in zip(at, steps.tolist(), boxes.shape[rest].tolist(), strict=True)]
                for at, steps in zip(starts, strides, strict=True)
            ))  # fmt: skip
        made, blocks = here.on(self._device, self._kernels.PER_PROGRAM)
        other, _ = there.on(self._device, self._kernels.PER_PROGRAM)
        return made, other, blocks, here.word

    def _done(self) -> list[int]:
        raw = self._get(self._area.data_ptr() + AREA_BYTES, RECORDS_BYTES)
        done: list[int] = np.frombuffer(raw, np.int64).tolist()
        return done

    def _export(self, address: int, nbytes: int) -> None:
        """Handles for every allocation that [address, address + nbytes) touches: a torch storage lies in one."""
        base, size, handle = self._ipc.export(address)
        if address + nbytes > base + size:
            raise BindError(f"the region [{address:#x}, {address + nbytes:#x}) leaves its allocation of {size} bytes")
        self._exported[base] = size, handle

    def _publish(self) -> None:
        if not self._exported:
            self._export(self._area.data_ptr(), AREA_BYTES + RECORDS_BYTES)
        content = {
            "process": self._process,
            "epoch": self._epoch,
            "records": _RECORDS,
            "allocations": [[base, size, handle] for base, (size, handle) in sorted(self._exported.items())],
            "regions": [[r.address, r.nbytes] for r in self._regions.regions],
        }
        new = self._file.with_suffix(".new")
        new.touch(0o600)
        new.write_text(json.dumps(content))
        new.replace(self._file)  # in one step: a reader sees the old or the new

    def _read_file(self, endpoint: Endpoint) -> dict[str, Any]:
        path, _, boot = endpoint.address.rpartition("@")
        if boot != self._boot:
            raise failed_peer(endpoint, "cuda_ipc reaches processes of the same host only", "other host")
        try:
            content = json.loads(Path(path).read_text())
        except OSError as error:
            reason = f"the peer's file cannot be read ({error}): it closed, or lives in another container"
            raise failed_peer(endpoint, reason, "closed peer") from None
        if content["epoch"] != endpoint.epoch:
            raise failed_peer(
                endpoint,
                f"stale endpoint: it was described at epoch {endpoint.epoch}, the peer is at {content['epoch']}",
                "stale epoch",
            )
        return content

    def _open(self, endpoint: Endpoint, content: dict[str, Any]) -> _Peer:
        if endpoint.probe is None:
            raise failed_peer(endpoint, "the endpoint names no probe area", "no probe area")
        regions = RegionTable.published([(a, n) for a, n in content["regions"]])
        bases, shifts, opened = [], [], []
        with self._torch.cuda.device(self._device):
            try:
                for base, _, handle in content["allocations"]:
                    here = base
                    if content["process"] != self._process:  # CUDA does not open a handle in the process that made it
                        here = self._ipc.open_handle(handle)
                        opened.append(here)
                    bases.append(base)
                    shifts.append(here - base)
            except BaseException:
                for here in opened:
                    with suppress(BindError):
                        self._ipc.close_handle(here)
                raise
        both = np.asarray(bases, np.int64), np.asarray(shifts, np.int64)
        epoch_at = int(_mapped(*both, np.asarray([endpoint.probe[0] + _EPOCH_AT]))[0])
        return _Peer(regions, *both, opened, epoch_at)

    def _close_peer(self, peer: _Peer) -> None:
        with self._torch.cuda.device(self._device):
            if peer.meeting is not None:
                self._engine.part(peer.meeting)
                peer.meeting = None
            while peer.opened:
                self._ipc.close_handle(peer.opened.pop())

    def _put(self, address: int, data: bytes) -> None:
        host = self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)
        self._ipc.copy(address, host.data_ptr(), len(data), self._device)

    def _get(self, address: int, nbytes: int) -> bytes:
        host = self._torch.empty(nbytes, dtype=self._torch.uint8)
        self._ipc.copy(host.data_ptr(), address, nbytes, self._device)
        return host.numpy().tobytes()

    def _move(self, to: int, from_: int, nbytes: int) -> None:
        self._ipc.copy(to, from_, nbytes, self._device)

    @property
    def _here(self) -> str:
        return f"cuda_ipc {self._file.name}"

    def _check_usable(self) -> None:
        check_usable(self._here, self._unusable, self._pid)
