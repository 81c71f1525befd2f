"""In-process transport: peers that share a MemoryHub write and read each other's registered memory by address.

For tests and fault drills. It is as strict as a good NIC and as unhelpful as a real one: unregistered local or remote
memory is an error, a range that fails is left alone while the rest of the batch lands, and bytes are fetched at any moment
between write() or read() and the end of wait(), so a caller that changes them early is caught.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from weight_sync.errors import BindError, TransportError
from weight_sync.ids import Deadline
from weight_sync.transport.base import Batch, Completion, Endpoint, Region, Ticket
from weight_sync.transport.faults import Fault, FaultKind, FaultPlan
from weight_sync.transport.probe_area import new_epoch
from weight_sync.transport.regions import (
    Array,
    RegionTable,
    check_deadline,
    check_local,
    check_usable,
    failed_peer,
    failed_range,
    split,
)

_EARLY_PIECE = 1 << 16


class MemoryHub:
    """The wire. One object for each set of peers that shall reach each other; there is no global one."""

    def __init__(self) -> None:
        self._peers: dict[str, MemoryTransport] = {}
        self._numbers = itertools.count()
        self._wire: list[_Sent] = []

    def settle(self) -> None:
        """Land what can still land between two calls: all that was sent, and ranges of transports that reported a failure.

        A transport whose batches were all reported done reads nothing any more; its doubled ranges wait for its next call.
        """
        self._arrive(list(self._wire))
        for transport in list(self._peers.values()):
            if transport._unusable is not None:
                transport.settle()

    def _arrive(self, sent: Sequence[_Sent]) -> None:
        for packet in sent:
            self._wire.remove(packet)
            if self._open(packet.endpoint):
                ctypes.memmove(packet.to, packet.content, len(packet.content))

    def _open(self, endpoint: Endpoint) -> bool:
        """Whether bytes on their way to this peer still get in: not once it closed, or is another one at the same address."""
        peer = self._peers.get(endpoint.address)
        return peer is not None and peer.epoch == endpoint.epoch

    def _join(self, transport: MemoryTransport, address: str | None) -> str:
        address = f"peer{next(self._numbers)}" if address is None else address
        if address in self._peers:
            raise BindError(f"memory transport address {address!r} is in use; close the transport that holds it first")
        self._peers[address] = transport
        return address

    def _leave(self, address: str) -> None:
        del self._peers[address]

    def _find(self, endpoint: Endpoint) -> MemoryTransport:
        peer = self._peers.get(endpoint.address)
        if peer is None:
            raise failed_peer(endpoint, "no open peer at this address", "unknown peer")
        if peer.epoch != endpoint.epoch:
            raise failed_peer(
                endpoint,
                f"stale endpoint: it was described at epoch {endpoint.epoch}, the peer is at {peer.epoch}",
                "stale epoch",
            )
        return peer


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """Bytes that have left their sender: they arrive even if it is gone, as long as the peer is there."""

    sender: MemoryTransport
    endpoint: Endpoint
    to: int
    content: bytes


@dataclass(frozen=True, slots=True)
class _Late:
    """A range that is still to be moved, from whatever `from_` holds by then."""

    endpoint: Endpoint
    from_: int
    to: int
    nbytes: int


@dataclass(slots=True)
class _Flight:
    batch: Batch
    reads: bool
    first: int
    started: float
    landed: set[int] = field(default_factory=set)


class MemoryTransport:
    """See the module docstring.

    hub: the peers it can reach. address: its name there, invented when None. landing_seed: None lands all bytes in order
    inside wait(); a number lands a random part of each batch at once and the rest in random order inside wait().
    faults: what goes wrong, by the number of the range; writes and reads count alike.
    """

    name = "memory"
    strided = False
    batch_bytes = 32 << 20

    def __init__(
        self,
        hub: MemoryHub,
        *,
        address: str | None = None,
        landing_seed: int | None = None,
        faults: FaultPlan | None = None,
    ) -> None:
        self.epoch = new_epoch()
        self._hub = hub
        self._random = None if landing_seed is None else random.Random(landing_seed)
        self._faults = faults
        self._regions = RegionTable()
        self._probed: set[Endpoint] = set()
        self._flights: dict[int, _Flight] = {}
        self._late: list[_Late] = []
        self._tickets = itertools.count()
        self._moved = 0
        self._unusable: str | None = None
        self._address = hub._join(self, address)

    def register(self, regions: Sequence[Region]) -> None:
        """BindError when a region is empty or overlaps one registered before."""
        self._check_usable()
        self._regions.add(regions)

    def describe(self) -> Endpoint:
        self._check_usable()
        return Endpoint(transport=self.name, protocol="memory", address=self._address, epoch=self.epoch)

    def probe(self, endpoint: Endpoint, deadline: Deadline) -> None:
        self._check_usable()
        check_deadline(endpoint, deadline, "probe")
        if (endpoint.transport, endpoint.protocol) != (self.name, "memory"):
            raise failed_peer(endpoint, "the peer is not on the memory transport", "protocol")
        self._hub._find(endpoint)
        self._probed.add(endpoint)

    def write(self, batch: Batch) -> Ticket:
        return self._start(batch, reads=False)

    def read(self, batch: Batch) -> Ticket:
        return self._start(batch, reads=True)

    def _start(self, batch: Batch, *, reads: bool) -> Ticket:
        self._check_usable()
        self.settle()
        if batch.endpoint not in self._probed:
            raise failed_peer(batch.endpoint, "this peer was never probed", "not probed")
        self._hub._find(batch.endpoint)
        check_local(batch, self._regions)
        flight = _Flight(batch, reads, first=self._moved, started=time.monotonic())
        self._moved += len(batch.nbytes)
        if self._random is not None:
            outside = self._hub._find(batch.endpoint)._regions.outside(batch.remote, batch.nbytes)
            for index in range(len(batch.nbytes)):
                if self._random.random() < 0.5 and not outside[index] and self._fault(flight, index) is None:
                    self._land(flight, index)
                    flight.landed.add(index)
        ticket = Ticket(next(self._tickets), batch)
        self._flights[ticket.id] = flight
        return ticket

    def wait(self, ticket: Ticket, deadline: Deadline) -> Completion:
        """TransportError naming the first range that failed; the others of the batch have landed all the same."""
        self._check_usable()
        self.settle()
        flight = self._flights.pop(ticket.id, None)
        if flight is None:
            raise ValueError(f"ticket {ticket.id} is not in flight on this transport: each is waited for once")
        batch = flight.batch
        failed: tuple[int, str, int | str] | None = None
        try:
            outside = self._hub._find(batch.endpoint)._regions.outside(batch.remote, batch.nbytes)
        except TransportError:
            self._unusable = "a batch failed because its peer went away"
            raise
        order = list(range(len(batch.nbytes)))
        if self._random is not None:
            self._random.shuffle(order)
        for index in order:
            if outside[index]:
                failed = failed or (index, "these bytes lie in none of the peer's regions", "unregistered remote")
            elif index not in flight.landed:
                failed = self._deliver(flight, index, deadline) or failed
        if failed is not None:
            self._unusable = f"range {failed[0]} of an earlier batch failed with code {failed[2]}"
            raise failed_range(batch, *failed)
        return Completion(nbytes=int(batch.nbytes.sum()), seconds=time.monotonic() - flight.started)

    def settle(self) -> None:
        """Land what this side still has on the wire (late, or doubled), as its source is now; not on a peer that closed."""
        self._hub._arrive([packet for packet in self._hub._wire if packet.sender is self])
        for late in self._late:
            if self._hub._open(late.endpoint):
                ctypes.memmove(late.to, late.from_, late.nbytes)
        self._late.clear()

    def die(self) -> None:
        """What a killed process leaves: no fence. Writes that were not reported done have left it, and arrive while the peer's
        transport is open; as do those that failed."""
        if self._unusable == "closed":
            return
        left = self._late if self._unusable is not None else []
        for flight in self._flights.values():
            batch = flight.batch
            rows = zip(batch.local.tolist(), batch.remote.tolist(), batch.nbytes.tolist(), strict=True)
            left += [_Late(batch.endpoint, *row) for i, row in enumerate(rows) if not flight.reads and i not in flight.landed]
        for late in left:
            self._hub._wire.append(_Sent(self, late.endpoint, late.to, ctypes.string_at(late.from_, late.nbytes)))
        self.close()

    def close(self) -> None:
        """Leave the hub; nothing more is taken from this side's memory. What was sent (see _Sent) still arrives."""
        if self._unusable == "closed":
            raise failed_peer(self._address, "the transport is closed", "closed")
        self._late.clear()
        self._flights.clear()
        self._unusable = "closed"
        self._hub._leave(self._address)

    def _check_usable(self) -> None:
        check_usable(f"memory/memory {self._address}", self._unusable)

    def _fault(self, flight: _Flight, index: int) -> Fault | None:
        return None if self._faults is None else self._faults.fault(flight.first + index)

    def _deliver(self, flight: _Flight, index: int, deadline: Deadline) -> tuple[int, str, int | str] | None:
        """Land one range, or do to it what its fault says. Returns (index, reason, code) of a reported failure."""
        fault = self._fault(flight, index)
        done_to = "read" if flight.reads else "written"
        late = index, f"not {done_to} within the deadline of {deadline.seconds:g} s", "deadline"
        from_, to = (int(addresses[index]) for addresses in _direction(flight))
        nbytes = int(flight.batch.nbytes[index])
        again = _Late(flight.batch.endpoint, from_, to, nbytes)
        if fault is None:
            if deadline.remaining() <= 0:
                self._late.append(again)
                return late
            self._land(flight, index)
            return None
        match fault.kind:
            case FaultKind.ERROR:
                return index, f"not {done_to}: the transport reports an error", fault.code
            case FaultKind.GHOST:
                self._late.append(again)
                return index, f"not {done_to}: the transport reports an error", fault.code
            case FaultKind.EARLY:
                self._hub._wire.append(_Sent(self, flight.batch.endpoint, to, ctypes.string_at(from_, nbytes)))
            case FaultKind.DROP:
                return None
            case FaultKind.TRUNCATE:
                ctypes.memmove(to, from_, nbytes // 2)
            case FaultKind.CORRUPT:
                self._land(flight, index)
                flipped = ctypes.c_ubyte.from_address(to + nbytes // 2)
                flipped.value ^= 0xFF
            case FaultKind.DUPLICATE:
                self._land(flight, index)
                self._late.append(again)
            case FaultKind.DELAY:
                time.sleep(min(fault.seconds, deadline.remaining()))
                if deadline.remaining() <= 0:
                    self._late.append(again)
                    return late
                self._land(flight, index)
        return None

    def _land(self, flight: _Flight, index: int) -> None:
        one = slice(index, index + 1)
        nbytes = flight.batch.nbytes[one]
        piece = _EARLY_PIECE if self._random is not None else int(nbytes[0])
        from_, to = _direction(flight)
        sources, destinations, sizes, _ = split(from_[one], to[one], nbytes, piece)
        order = np.arange(len(sizes))
        if self._random is not None:
            order = np.array(self._random.sample(range(len(sizes)), len(sizes)))
        for i in order:
            ctypes.memmove(int(destinations[i]), int(sources[i]), int(sizes[i]))


def _direction(flight: _Flight) -> tuple[Array, Array]:
    """(addresses that bytes come from, addresses they go to)."""
    batch = flight.batch
    return (batch.remote, batch.local) if flight.reads else (batch.local, batch.remote)
