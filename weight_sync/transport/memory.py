"""In-process transport: peers that share a MemoryHub write into each other's registered memory by address.

For tests and fault drills. It is as strict as a good NIC and as unhelpful as a real one: unregistered local or remote
memory is an error, a write that fails leaves its destination alone while the rest of the batch lands, and bytes are read
from the source at any moment between write() and the end of wait(), so a caller that changes the source early is caught.
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
from weight_sync.transport.regions import RegionTable, check_deadline, check_source, failed_peer, failed_write, split

_EARLY_PIECE = 1 << 16


class MemoryHub:
    """The wire. One object for each set of peers that shall reach each other; there is no global one."""

    def __init__(self) -> None:
        self._peers: dict[str, MemoryTransport] = {}
        self._numbers = itertools.count()

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


@dataclass(slots=True)
class _Flight:
    batch: Batch
    first: int
    started: float
    landed: set[int] = field(default_factory=set)


class MemoryTransport:
    """See the module docstring.

    hub: the peers it can reach. address: its name there, invented when None. landing_seed: None lands all bytes in order
    inside wait(); a number lands a random part of each batch at once and the rest in random order inside wait().
    faults: what goes wrong, by write number.
    """

    name = "memory"

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
        self._late: list[tuple[int, int, int]] = []
        self._tickets = itertools.count()
        self._written = 0
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
        self._check_usable()
        self.settle()
        if batch.endpoint not in self._probed:
            raise failed_peer(batch.endpoint, "this peer was never probed", "not probed")
        self._hub._find(batch.endpoint)
        check_source(batch, self._regions)
        flight = _Flight(batch, first=self._written, started=time.monotonic())
        self._written += len(batch.nbytes)
        if self._random is not None:
            outside = self._hub._find(batch.endpoint)._regions.outside(batch.destination, batch.nbytes)
            for index in range(len(batch.nbytes)):
                if self._random.random() < 0.5 and not outside[index] and self._fault(flight, index) is None:
                    self._land(batch, index)
                    flight.landed.add(index)
        ticket = Ticket(next(self._tickets), batch)
        self._flights[ticket.id] = flight
        return ticket

    def wait(self, ticket: Ticket, deadline: Deadline) -> Completion:
        """TransportError naming the first write that failed; the others of the batch have landed all the same."""
        self._check_usable()
        self.settle()
        flight = self._flights.pop(ticket.id, None)
        if flight is None:
            raise ValueError(f"ticket {ticket.id} is not in flight on this transport: each is waited for once")
        batch = flight.batch
        failed: tuple[int, str, int | str] | None = None
        try:
            outside = self._hub._find(batch.endpoint)._regions.outside(batch.destination, batch.nbytes)
        except TransportError:
            self._unusable = "a batch failed because its peer went away"
            raise
        order = list(range(len(batch.nbytes)))
        if self._random is not None:
            self._random.shuffle(order)
        for index in order:
            if outside[index]:
                failed = failed or (index, "the destination lies in none of the peer's regions", "unregistered destination")
            elif index not in flight.landed:
                failed = self._deliver(flight, index, deadline) or failed
        if failed is not None:
            self._unusable = f"write {failed[0]} of an earlier batch failed with code {failed[2]}"
            raise failed_write(batch, *failed)
        return Completion(nbytes=int(batch.nbytes.sum()), seconds=time.monotonic() - flight.started)

    def settle(self) -> None:
        """Land what is still on the wire (delayed past its deadline, or duplicated), from what the source holds now."""
        for source, destination, nbytes in self._late:
            ctypes.memmove(destination, source, nbytes)
        self._late.clear()

    def close(self) -> None:
        """Leave the hub; whatever was still on the wire is gone."""
        if self._unusable == "closed":
            raise failed_peer(self._address, "the transport is closed", "closed")
        self._late.clear()
        self._flights.clear()
        self._unusable = "closed"
        self._hub._leave(self._address)

    def _check_usable(self) -> None:
        if self._unusable is not None:
            code = "closed" if self._unusable == "closed" else "poisoned"
            raise failed_peer(f"memory/memory {self._address}", f"the transport is {code}: {self._unusable}", code)

    def _fault(self, flight: _Flight, index: int) -> Fault | None:
        return None if self._faults is None else self._faults.fault(flight.first + index)

    def _deliver(self, flight: _Flight, index: int, deadline: Deadline) -> tuple[int, str, int | str] | None:
        """Land one write, or do to it what its fault says. Returns (index, reason, code) of a reported failure."""
        batch = flight.batch
        fault = self._fault(flight, index)
        source, destination, nbytes = (int(a[index]) for a in (batch.source, batch.destination, batch.nbytes))
        if fault is None:
            if deadline.remaining() <= 0:
                self._late.append((source, destination, nbytes))
                return index, f"not written within the deadline of {deadline.seconds:g} s", "deadline"
            self._land(batch, index)
            return None
        match fault.kind:
            case FaultKind.ERROR:
                return index, "the write failed", fault.code
            case FaultKind.DROP:
                return None
            case FaultKind.TRUNCATE:
                ctypes.memmove(destination, source, nbytes // 2)
            case FaultKind.CORRUPT:
                self._land(batch, index)
                flipped = ctypes.c_ubyte.from_address(destination + nbytes // 2)
                flipped.value ^= 0xFF
            case FaultKind.DUPLICATE:
                self._land(batch, index)
                self._late.append((source, destination, nbytes))
            case FaultKind.DELAY:
                time.sleep(min(fault.seconds, deadline.remaining()))
                if deadline.remaining() <= 0:
                    self._late.append((source, destination, nbytes))
                    return index, f"not written within the deadline of {deadline.seconds:g} s", "deadline"
                self._land(batch, index)
        return None

    def _land(self, batch: Batch, index: int) -> None:
        one = slice(index, index + 1)
        piece = _EARLY_PIECE if self._random is not None else int(batch.nbytes[index])
        sources, destinations, sizes, _ = split(batch.source[one], batch.destination[one], batch.nbytes[one], piece)
        order = np.arange(len(sizes))
        if self._random is not None:
            order = np.array(self._random.sample(range(len(sizes)), len(sizes)))
        for i in order:
            ctypes.memmove(int(destinations[i]), int(sources[i]), int(sizes[i]))
