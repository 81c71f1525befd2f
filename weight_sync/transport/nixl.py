"""NIXL as a transport: one-sided writes and reads through UCX, over tcp or RDMA verbs. Host memory only.

What is promised, and by whom. NIXL's UCX backend ends every transfer with a flush of the connection and reports it done only
when that is done (nixlUcxEngine::sendXferRange in NIXL's src/plugins/ucx/ucx_backend.cpp). Of ucp_ep_flush_nbx UCX says that
operations issued before it "are completed both at the origin and at the target" when it is (ucp.h). So a transfer that is
reported done has arrived. UCX is asked for this with every transfer, and nobody checks it; the session's digests do.

What this module adds: our own deadlines (NIXL has none), checks of both sides' ranges before anything is sent, the epoch, and
the rule that after one failed or late transfer the whole agent counts as still at it until it is deleted by close(). NIXL's
release of a transfer in flight does not stop it.

How peers find each other. An endpoint carries what reaches one small area of the peer: its UCX address and the key of that
area. Everything else, the list of registered regions and their keys, is read there by probe(), one-sided and behind the epoch;
so it is never older than the probe. Nothing listens but UCX (tcp: on every network interface in use; docs/security.md).
"""

from __future__ import annotations

import base64
import binascii
import itertools
import mmap
import os
import struct
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from weight_sync.errors import BindError
from weight_sync.ids import Deadline
from weight_sync.transport import rdma
from weight_sync.transport.base import Batch, Completion, Endpoint, Region, Ticket
from weight_sync.transport.mooncake_engine import primary_host
from weight_sync.transport.nixl_agent import Agent, NixlFailure, start_agent, unreadable
from weight_sync.transport.probe_area import AREA_BYTES, Header, new_epoch, pack_header, prove
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

PART_BYTES = 64 << 20
PART_RANGES = 4096
"""Most of one NIXL transfer. Posting takes time (about 13 us a range over tcp), during which no deadline is looked at."""
PARTS_AHEAD = 2
"""Transfers of one batch that are in flight at once, so that the connection has work while we look."""

# Our area, registered as one: what every transport's probe area is (probe_area), places where one-sided reads of peers' areas
# land (and nonces leave from), and what we publish: each time whole, behind what was published before.
_PLACE_BYTES, _PLACES = 16 << 10, 64
_PLACES_AT = -(-AREA_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
_PUBLISHED_AT = _PLACES_AT + _PLACE_BYTES * _PLACES
_PUBLISHED_BYTES = 8 << 20
_AREA_TOTAL = _PUBLISHED_AT + _PUBLISHED_BYTES
_PUBLICATION = struct.Struct("<QQ")
"""Bytes of the region table (int64 address and bytes of each) and of NIXL's metadata, which follow in this order."""


class NixlTransport:
    """See the module docstring. Endpoint.address is "host:pid:epoch", a name; `connection` is what reaches it.

    protocol: "tcp" or "rdma"; ConfigError when this machine cannot have it. UCX may use nothing else, so it cannot fall back.
    devices: RDMA devices (rdma) or network interfaces (tcp) to use, comma separated, all when empty. host: what this machine is
    called in messages, the address of the default route when None; peers that say the same count as being on this host.
    poll_seconds: pause between looks at transfers in flight. counters: whether a probe over rdma has to show in the packet
    counters of our devices (where the driver has any, and the peer is on another host).
    """

    name = "nixl"
    strided = False
    batch_bytes = 32 << 20

    def __init__(
        self,
        *,
        protocol: str,
        devices: str = "",
        host: str | None = None,
        poll_seconds: float = 0.0003,
        counters: bool = True,
    ) -> None:
        self._pid = os.getpid()
        self._unusable: str | None = None
        self._protocol, self._counters, self._poll = protocol, counters, poll_seconds
        self._epoch = new_epoch()
        self._host = primary_host() if host is None else host
        self._address = f"{self._host}:{self._pid}:{self._epoch:x}"
        self._agent, self._devices = start_agent(protocol, devices, self._address)
        # UCX's libraries end before Python's last objects do: an agent that is left to those can crash the process.
        self._at_exit = weakref.finalize(self, Agent.close, self._agent)
        self.proofs: dict[Endpoint, dict[str, int]] = {}
        self._regions = RegionTable()
        self._peers: dict[Endpoint, _Peer] = {}
        self._flights: dict[int, _Flight] = {}
        self._tickets = itertools.count()
        self._idle: list[int] = []
        self._memory = mmap.mmap(-1, _AREA_TOTAL)
        self._base: int = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._places = deque(range(_PLACES_AT, _PUBLISHED_AT, _PLACE_BYTES))
        self._published = _PUBLISHED_AT
        area = [(self._base, _AREA_TOTAL)]
        self._register(area)
        self._connection = base64.b64encode(self._agent.metadata(area, connection=True)).decode()
        self._memory[: len(pack_header(0))] = pack_header(self._epoch)

    def register(self, regions: Sequence[Region]) -> None:
        """BindError when a region is empty, overlaps one registered before, or is not host memory; TransportError when NIXL
        refuses.
        """
        self._check_usable()
        ranges = [(region.address, region.nbytes) for region in regions]
        if (bad := unreadable(ranges)) is not None:
            raise BindError(
                f"transport nixl: [{bad[0]:#x}, {bad[0] + bad[1]:#x}) is not host memory of this process. For GPU memory: "
                "+weight_sync=p2p_ipc or p2p_nvlink on one host, p2p_rdma between hosts"
            )
        self._regions.add(regions)
        self._register(ranges)
        self._publish()

    def describe(self) -> Endpoint:
        self._check_usable()
        return Endpoint(
            transport=self.name,
            protocol=self._protocol,
            address=self._address,
            epoch=self._epoch,
            probe=(self._base, AREA_BYTES),
            connection=self._connection,
        )

    def probe(self, endpoint: Endpoint, deadline: Deadline) -> None:
        """Three proofs: a one-sided read finds this endpoint's epoch; a one-sided write is found there again; over rdma all
        this is seen in the packet counters of our devices (kept in `proofs`: counter -> packets). Only the last, failing,
        poisons this transport: the reads of a failed probe land in places that are not used again.
        """
        self._check_usable()
        check_deadline(endpoint, deadline, "probe")
        if (endpoint.transport, endpoint.protocol) != (self.name, self._protocol):
            raise failed_peer(endpoint, f"this side is nixl/{self._protocol}, the peer is not", "protocol")
        before = rdma.sent_until_now(self._devices)
        try:
            name = self._agent.load(base64.b64decode(endpoint.connection, validate=True))
        except binascii.Error:
            raise failed_peer(endpoint, "the endpoint carries no NIXL metadata", "address") from None
        except NixlFailure as error:
            raise failed_peer(endpoint, f"the peer cannot be reached: NIXL reports {error.code}", error.code) from error
        if name != endpoint.address:
            raise failed_peer(endpoint, f"the endpoint's metadata is of another agent, {name}", "address")
        header = prove(
            endpoint,
            lambda address, nbytes: self._read(endpoint, address, nbytes, deadline),
            lambda address, data: self._write(endpoint, address, data, deadline),
        )
        table, metadata = self._publication(endpoint, header, deadline)
        try:
            if metadata:
                self._agent.load(metadata)
        except NixlFailure as error:
            raise failed_peer(endpoint, f"NIXL refuses the peer's metadata: {error.code}", error.code) from error
        self._on_the_wire(endpoint, before, deadline)
        self._peers[endpoint] = _Peer(RegionTable.published([(int(a), int(n)) for a, n in table]))

    def write(self, batch: Batch) -> Ticket:
        return self._start(batch, reads=False)

    def read(self, batch: Batch) -> Ticket:
        return self._start(batch, reads=True)

    def wait(self, ticket: Ticket, deadline: Deadline) -> Completion:
        self._check_usable()
        flight = self._flights.get(ticket.id)
        if flight is None:
            raise ValueError(f"ticket {ticket.id} is not in flight on this transport: each is waited for once")
        while True:
            for other in self._flights.values():
                self._advance(other)
            if flight.over:
                break
            if not (left := deadline.remaining()):
                done_to = "read" if flight.reads else "written"
                flight.failure = f"not {done_to} within the deadline of {deadline.seconds:g} s", "deadline"
                break
            time.sleep(min(self._poll, left))
        del self._flights[ticket.id]
        if flight.failure is not None:
            reason, code = flight.failure
            self._unusable = (
                f"a {'read from' if flight.reads else 'write to'} {ticket.batch.endpoint.address} failed with code {code} and "
                "may still go on"
            )
            raise failed_range(ticket.batch, flight.prepared.parts[flight.done].first, reason, code)
        return Completion(nbytes=int(ticket.batch.nbytes.sum()), seconds=flight.seconds)

    def close(self) -> None:
        """Deletes the agent, poisoned or not; then nothing leaves this process through it any more. It waits for no peer.

        TransportError when something still holds the agent: then only ending the process is a fence.
        """
        if self._unusable == "closed":
            raise failed_peer(self._here, "the transport is closed", "closed")
        self._unusable = "closed"
        self._memory[: len(pack_header(0))] = bytes(len(pack_header(0)))
        self._at_exit.detach()
        if not self._agent.close():
            raise failed_peer(self._here, "something still holds the NIXL agent; end this process", "not closed")

    @property
    def _here(self) -> str:
        return f"nixl/{self._protocol} {self._address}"

    def _register(self, ranges: list[tuple[int, int]]) -> None:
        if not ranges:
            return
        try:
            self._agent.register(ranges)
        except NixlFailure as error:
            self._unusable = "a registration failed"
            total = sum(nbytes for _, nbytes in ranges)
            reason = f"NIXL refused to register {len(ranges)} regions, {total} bytes (rdma: is the memlock limit large enough?)"
            raise failed_peer(self._here, reason, error.code) from error

    def _publish(self) -> None:
        """What is registered now, behind what was published before; then the header that points to it: a reader in between
        sees the old state whole.
        """
        ranges = [(region.address, region.nbytes) for region in self._regions.regions]
        table = np.array(ranges, np.int64).tobytes()
        metadata = self._agent.metadata(ranges, connection=False) if ranges else b""
        data = _PUBLICATION.pack(len(table), len(metadata)) + table + metadata
        at, end = self._published, self._published + len(data)
        if end > _AREA_TOTAL:
            self._unusable = "a registration failed"
            raise BindError(
                f"transport nixl: the keys of {len(ranges)} regions take {len(data)} bytes, {_AREA_TOTAL - at} are left of "
                f"{_PUBLISHED_BYTES}: register fewer and larger storages, at once"
            )
        self._memory[at:end] = data
        self._published = end + -end % 64
        header = pack_header(self._epoch, self._base + at, len(ranges))
        self._memory[: len(header)] = header

    def _publication(self, endpoint: Endpoint, header: Header, deadline: Deadline) -> tuple[np.ndarray, bytes]:
        """What the peer registered: int64 [regions, 2] of addresses and bytes, and NIXL's metadata of them."""
        if not header.table:
            raise failed_peer(endpoint, "the peer has registered no memory", "nothing registered")
        assert endpoint.probe is not None
        end = endpoint.probe[0] + _AREA_TOTAL
        sizes = _PUBLICATION.unpack(self._read(endpoint, header.table, _PUBLICATION.size, deadline))
        if sizes[0] != 16 * header.regions or header.table + _PUBLICATION.size + sum(sizes) > end:
            raise failed_peer(endpoint, f"the peer publishes {header.regions} regions in {sizes} bytes", "bad answer")
        data = self._read(endpoint, header.table + _PUBLICATION.size, sum(sizes), deadline)
        return np.frombuffer(data[: sizes[0]], np.int64).reshape(-1, 2), data[sizes[0] :]

    def _on_the_wire(self, endpoint: Endpoint, before: dict[str, int], deadline: Deadline) -> None:
        """As MooncakeTransport's: not judged are devices whose driver counts nothing, and peers at our own address."""
        if moved := rdma.seen_moving(self._devices, before, deadline):
            self.proofs[endpoint] = moved
        elif before and self._counters and endpoint.address.partition(":")[0] != self._host:
            self._unusable = f"a probe of {endpoint.address} was not seen on any RDMA device"
            raise failed_peer(
                endpoint,
                "the probe was answered, but no RDMA device of this side has sent a packet for it: rdma is not what is used "
                f"({', '.join(f'{name} {count}' for name, count in before.items())})",
                "not on the wire",
            )

    def _read(self, endpoint: Endpoint, address: int, nbytes: int, deadline: Deadline) -> bytes:
        parts = [
            self._move(endpoint, address + at, None, min(_PLACE_BYTES, nbytes - at), deadline)
            for at in range(0, nbytes, _PLACE_BYTES)
        ]
        return b"".join(parts)

    def _write(self, endpoint: Endpoint, address: int, data: bytes, deadline: Deadline) -> None:
        self._move(endpoint, address, data, len(data), deadline)

    def _move(self, endpoint: Endpoint, address: int, data: bytes | None, nbytes: int, deadline: Deadline) -> bytes:
        """One small transfer between the peer's area and a place in ours: a write of `data`, or a read if that is None.

        A place that a failed one was to fill, or to leave from, is never used again.
        """
        what = f"probe by one-sided {'read' if data is None else 'write'}"
        if not self._places:
            self._unusable = f"{_PLACES} probes have failed"
            self._check_usable()
        place = self._places.popleft()
        if data is not None:
            self._memory[place : place + nbytes] = data
        here, there, size = (np.array([n], np.int64) for n in (self._base + place, address, nbytes))
        try:
            transfer = self._agent.prepare(endpoint.address, reads=data is None, local=here, remote=there, nbytes=size)
            complete = self._agent.post(transfer)
            while not complete:
                time.sleep(min(self._poll, check_deadline(endpoint, deadline, what)))
                complete = self._agent.complete(transfer)
            self._agent.release(transfer)
        except NixlFailure as error:
            raise failed_peer(endpoint, f"{what}: NIXL reports {error.code}", error.code) from error
        self._places.append(place)
        return self._memory[place : place + nbytes]

    def _start(self, batch: Batch, *, reads: bool) -> Ticket:
        self._check_usable()
        peer = self._peers.get(batch.endpoint)
        if peer is None:
            raise failed_peer(batch.endpoint, "this peer was never probed", "not probed")
        check_local(batch, self._regions)
        check_remote(batch, peer.table)
        for transfer in [self._idle.pop() for _ in range(len(self._idle))]:
            self._agent.release(transfer)
        known = peer.reads if reads else peer.writes
        prepared = known.get(batch)
        if prepared is None or any(flight.prepared is prepared for flight in self._flights.values()):
            # The same batch twice at once: a NIXL transfer is in flight once.
            prepared = known[batch] = self._prepare(batch, reads=reads)
        ticket = Ticket(next(self._tickets), batch)
        flight = _Flight(prepared, reads)
        self._flights[ticket.id] = flight
        self._advance(flight)
        return ticket

    def _prepare(self, batch: Batch, *, reads: bool) -> _Prepared:
        """The transfers that carry a batch. They are kept for as long as the batch is: a plan that stays is prepared once."""
        local, remote, nbytes, parent = split(batch.local, batch.remote, batch.nbytes, PART_BYTES)
        ends, parts, at = np.cumsum(nbytes), [], 0
        while at < len(nbytes):
            before = int(ends[at] - nbytes[at])
            stop = min(at + PART_RANGES, max(at + 1, int(np.searchsorted(ends, before + PART_BYTES, side="right"))))
            cut = slice(at, stop)
            try:
                transfer = self._agent.prepare(
                    batch.endpoint.address, reads=reads, local=local[cut], remote=remote[cut], nbytes=nbytes[cut]
                )
            except NixlFailure as error:
                self._idle += [part.transfer for part in parts]
                raise failed_peer(
                    batch.endpoint, f"NIXL does not take the batch, nothing was sent: {error.code}", error.code
                ) from error
            parts.append(_Part(transfer, int(parent[at])))
            at = stop
        prepared = _Prepared(tuple(parts))
        # Not before nobody waits for it any more: a flight keeps what it flies with.
        weakref.finalize(prepared, self._idle.extend, [part.transfer for part in parts]).atexit = False
        return prepared

    def _advance(self, flight: _Flight) -> None:
        """Look at what is in flight, oldest first, and post what may follow."""
        if flight.over:
            return
        try:
            while not flight.over:
                if flight.posted < min(flight.done + PARTS_AHEAD, len(flight.prepared.parts)):
                    complete = self._agent.post(flight.prepared.parts[flight.posted].transfer)
                    flight.posted += 1
                    if complete and flight.posted == flight.done + 1:
                        flight.done += 1
                elif self._agent.complete(flight.prepared.parts[flight.done].transfer):
                    flight.done += 1
                else:
                    return
        except NixlFailure as error:
            flight.failure = f"NIXL reports {error.code}", error.code
        flight.seconds = time.monotonic() - flight.started

    def _check_usable(self) -> None:
        check_usable(self._here, self._unusable, self._pid)


@dataclass(frozen=True, slots=True)
class _Part:
    """One NIXL transfer, and the number of the batch's range that it begins with."""

    transfer: int
    first: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Prepared:
    parts: tuple[_Part, ...]


@dataclass(slots=True)
class _Peer:
    """A peer that was probed: its regions, and the batches that were prepared for it."""

    table: RegionTable
    writes: weakref.WeakKeyDictionary[Batch, _Prepared] = field(default_factory=weakref.WeakKeyDictionary)
    reads: weakref.WeakKeyDictionary[Batch, _Prepared] = field(default_factory=weakref.WeakKeyDictionary)


@dataclass(slots=True)
class _Flight:
    """posted, done: parts, from the first on. failure: (reason, code) once it has failed; parts[done] is where."""

    prepared: _Prepared
    reads: bool
    posted: int = 0
    done: int = 0
    failure: tuple[str, str] | None = None
    seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        return self.failure is not None or self.done == len(self.prepared.parts)
