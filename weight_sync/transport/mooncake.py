"""Mooncake TransferEngine as a transport: tcp, rdma or nvlink_intra, peer to peer, without a metadata server.

Mooncake moves bytes fast and promises little. What this module adds: one registration for each storage, bounded batches,
our own deadlines, and the rule that after one failed or late write or read the whole engine counts as still at it until
it is deleted by close(). It has no authentication: whoever reaches its two ports can read and write registered memory, and both
listen on all interfaces. Keep them inside a trusted network, and register nothing that the sync does not need.

A child forked while an engine is open inherits its sockets and keeps a dead peer's port alive: fork first, or spawn.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from weight_sync.errors import TransportError
from weight_sync.ids import Deadline
from weight_sync.transport import rdma
from weight_sync.transport.base import Batch, Completion, Endpoint, Region, Ticket
from weight_sync.transport.mooncake_engine import buffers_of, primary_host, protocol_of, published, start_engine
from weight_sync.transport.mooncake_pump import TUNING, Flight, Pump, Tuning
from weight_sync.transport.probe_area import AREA_BYTES, SCRATCH_OFFSET, new_epoch, pack_header, prove
from weight_sync.transport.regions import (
    RegionTable,
    check_local,
    check_remote,
    check_usable,
    failed_peer,
    failed_range,
    split,
)

CLOSE_SECONDS = 75.0
"""Longest time close() waits for a native call to come back: Mooncake gives up on a silent peer after 60 s."""
CLOSE_SECONDS_PER_DEVICE = 15.0
"""On top of it for each RDMA device: the engine waits 10 s for the queue pairs of each to end, one device after another, when
a write was left unanswered (by a peer that was killed, say)."""


class MooncakeTransport:
    """See the module docstring. Endpoint.address is "host:rpc_port", which Mooncake calls the session id.

    protocol: "tcp", "rdma" or "nvlink_intra"; ConfigError when this machine cannot have it, or when the engine turned out
    to use another. host: address peers reach this machine at; the one of the default route when None. devices: RDMA
    devices to use, comma separated, all when empty. poll_seconds: pause between looks at writes in flight.
    tuning: how writes are cut and fed; TUNING's, by protocol, when None. counters: whether a probe over rdma has to show in
    the packet counters of our devices (where the driver has any, and the peer is on another host); False only for a driver
    that is known not to count its traffic.
    """

    name = "mooncake"
    strided = False
    batch_bytes = 32 << 20

    def __init__(
        self,
        *,
        protocol: str,
        host: str | None = None,
        devices: str = "",
        poll_seconds: float = 0.0007,
        tuning: Tuning | None = None,
        counters: bool = True,
    ) -> None:
        self._pid = os.getpid()
        self._unusable: str | None = None
        self._protocol = protocol
        if protocol == "nvlink_intra":
            self.batch_bytes = 1 << 30  # each batch is one blocking call
        host = primary_host() if host is None else host
        engine, port, self._devices = start_engine(protocol, host, devices)
        self._host, self._address = host, f"{host}:{port}"
        self._counters = counters
        self.proofs: dict[Endpoint, dict[str, int]] = {}
        self._epoch = new_epoch()
        self._regions = RegionTable()
        self._peers: dict[Endpoint, RegionTable] = {}
        self._flights: dict[int, Flight] = {}
        self._tickets = itertools.count()
        self._area = _DeviceArea() if protocol == "nvlink_intra" else _HostArea()
        self._area.put(0, pack_header(self._epoch))
        self._tuning = TUNING[protocol] if tuning is None else tuning
        self._pump = Pump(engine, self._tuning, poll_seconds)
        # A daemon thread inside native code while the interpreter shuts down can abort the process.
        self._at_exit = weakref.finalize(self, Pump.stop, self._pump, 1.0)
        del engine
        self._register([Region(self._area.address, AREA_BYTES)])

    def register(self, regions: Sequence[Region]) -> None:
        """BindError when a region is empty or overlaps one registered before; TransportError when Mooncake refuses.

        nvlink_intra publishes the whole allocation around each region, as CUDA IPC does.
        """
        self._check_usable()
        self._regions.add(regions)
        self._register(regions)

    def describe(self) -> Endpoint:
        self._check_usable()
        return Endpoint(
            transport=self.name,
            protocol=self._protocol,
            address=self._address,
            epoch=self._epoch,
            probe=(self._area.address, AREA_BYTES),
        )

    def probe(self, endpoint: Endpoint, deadline: Deadline) -> None:
        """Four proofs: the peer's engine publishes the same protocol; a one-sided read finds this endpoint's epoch; a
        one-sided write is found there again; and over rdma all this is seen in the packet counters of our devices (kept in
        `proofs`: counter -> packets). A failure of the first leaves this transport usable, the others poison it.

        An endpoint without probe area (an engine opened by someone else) is read from only, and its epoch is not checked.
        """
        self._check_usable()
        if (endpoint.transport, endpoint.protocol) != (self.name, self._protocol):
            raise failed_peer(endpoint, f"this side is mooncake/{self._protocol}, the peer is not", "protocol")
        host, port = _split_address(endpoint)
        segment = published(host, port, deadline)
        if protocol_of(segment) != self._protocol:
            raise failed_peer(
                endpoint,
                f"the peer's engine really uses {protocol_of(segment)!r}, not {self._protocol!r} as it was described",
                "protocol",
            )
        buffers = buffers_of(segment)
        if not buffers:
            raise failed_peer(endpoint, "the peer has registered no memory", "nothing registered")
        before = self._packets()
        if endpoint.probe is None:
            self._read(endpoint, buffers[0][0], 8, deadline)
        else:
            table = RegionTable.published(buffers, in_parts=self._protocol == "rdma")
            at, size = (np.array([n], np.int64) for n in endpoint.probe)
            if table.first_outside(at, size) is not None:
                raise failed_peer(
                    endpoint, "stale endpoint: the engine there does not know its probe area; it was replaced", "stale epoch"
                )
            try:
                prove(
                    endpoint,
                    lambda address, nbytes: self._read(endpoint, address, nbytes, deadline),
                    lambda address, data: self._write(endpoint, address, data, deadline),
                )
            except TransportError as error:
                if error.code != "stale epoch":  # the read worked: nothing is in flight
                    self._unusable = f"a probe of {endpoint.address} failed with code {error.code}"
                raise
            buffers = [buffer for buffer in buffers if buffer != endpoint.probe]
        self._on_the_wire(endpoint, host, before, deadline)
        self._peers[endpoint] = RegionTable.published(buffers, in_parts=self._protocol == "rdma")

    def _packets(self) -> dict[str, int]:
        return rdma.sent_until_now(self._devices)

    def _on_the_wire(self, endpoint: Endpoint, host: str, before: dict[str, int], deadline: Deadline) -> None:
        """Raise unless our RDMA devices have sent packets since `before`.

        Not judged: devices whose driver counts none, and peers at our own address, whose packets need not leave the device.
        """
        if moved := rdma.seen_moving(self._devices, before, deadline):
            self.proofs[endpoint] = moved
            return
        if before and self._counters and host != self._host:
            self._unusable = f"a probe of {endpoint.address} was not seen on any RDMA device"
            raise failed_peer(
                endpoint,
                "the probe was answered, but no RDMA device of this side has sent a packet for it: rdma is not what is used "
                f"({', '.join(f'{name} {count}' for name, count in before.items())})",
                "not on the wire",
            )

    def write(self, batch: Batch) -> Ticket:
        return self._start(batch, reads=False)

    def read(self, batch: Batch) -> Ticket:
        return self._start(batch, reads=True)

    def _start(self, batch: Batch, *, reads: bool) -> Ticket:
        self._check_usable()
        if batch.endpoint not in self._peers:
            raise failed_peer(batch.endpoint, "this peer was never probed", "not probed")
        check_local(batch, self._regions)
        check_remote(batch, self._peers[batch.endpoint])
        local, remote, nbytes, parent = split(batch.local, batch.remote, batch.nbytes, self._tuning.piece)
        flight = Flight(batch.endpoint.address, local.tolist(), remote.tolist(), nbytes.tolist(), parent, reads=reads)
        ticket = Ticket(next(self._tickets), batch)
        self._flights[ticket.id] = flight
        self._pump.submit(flight)
        return ticket

    def wait(self, ticket: Ticket, deadline: Deadline) -> Completion:
        self._check_usable()
        flight = self._flights.pop(ticket.id, None)
        if flight is None:
            raise ValueError(f"ticket {ticket.id} is not in flight on this transport: each is waited for once")
        index, reason, code = self._outcome(flight, deadline)
        if index is not None:
            raise failed_range(ticket.batch, int(flight.parent[index]), reason, code)
        return Completion(nbytes=int(ticket.batch.nbytes.sum()), seconds=flight.seconds)

    def close(self) -> None:
        """Deletes the engine, poisoned or not; returns once nothing can leave this process through it any more.

        TransportError when a native call does not come back within CLOSE_SECONDS: then only ending the process is a fence.
        """
        if self._unusable == "closed":
            raise failed_peer(self._here, "the transport is closed", "closed")
        clean = self._unusable is None and not self._flights
        self._unusable = "closed"
        self._area.put(0, bytes(len(pack_header(0))))
        if clean:
            self._pump.engine.batch_unregister_memory([region.address for region in self._regions.regions])
        self._at_exit.detach()
        seconds = CLOSE_SECONDS + CLOSE_SECONDS_PER_DEVICE * len(self._devices)
        if not self._pump.stop(seconds):
            raise failed_peer(
                self._here, f"the engine is still inside a call after {seconds:g} s; end this process", "not closed"
            )

    @property
    def _here(self) -> str:
        return f"mooncake/{self._protocol} {self._address}"

    def _register(self, regions: Sequence[Region]) -> None:
        if not regions:
            return
        status = self._pump.engine.batch_register_memory([r.address for r in regions], [r.nbytes for r in regions])
        if status != 0:
            self._unusable = "a registration failed"
            raise failed_peer(
                self._here,
                f"Mooncake refused to register {len(regions)} regions, {sum(r.nbytes for r in regions)} bytes "
                "(rdma: is the memlock limit large enough? nvlink_intra: is it device memory?)",
                status,
            )

    def _read(self, endpoint: Endpoint, address: int, nbytes: int, deadline: Deadline) -> bytes:
        self._single(endpoint, address, nbytes, deadline, reads=True)
        return self._area.get(SCRATCH_OFFSET, nbytes)

    def _write(self, endpoint: Endpoint, address: int, data: bytes, deadline: Deadline) -> None:
        self._area.put(SCRATCH_OFFSET, data)
        self._single(endpoint, address, len(data), deadline, reads=False)

    def _single(self, endpoint: Endpoint, address: int, nbytes: int, deadline: Deadline, *, reads: bool) -> None:
        """One small transfer between the peer and our scratch."""
        here = self._area.address + SCRATCH_OFFSET
        flight = Flight(endpoint.address, [here], [address], [nbytes], np.zeros(1, np.int64), reads=reads)
        self._pump.submit(flight)
        index, reason, code = self._outcome(flight, deadline)
        if index is not None:
            raise failed_peer(endpoint, f"probe by one-sided {'read' if reads else 'write'}: {reason}", code)

    def _outcome(self, flight: Flight, deadline: Deadline) -> tuple[int | None, str, int | str]:
        """Wait for it. (None, ...) on success, else the piece, reason and code; any failure poisons this transport."""
        if not flight.finished.wait(deadline.remaining()):
            done_to = "read" if flight.reads else "written"
            index, reason, code = flight.done, f"not {done_to} within the deadline of {deadline.seconds:g} s", "deadline"
        elif flight.failed is not None:
            index, reason, code = flight.failed, "Mooncake reports a failed transfer", flight.code
        else:
            return None, "", 0
        self._unusable = (
            f"a {'read from' if flight.reads else 'write to'} {flight.session} failed with code {code} and may still go on"
        )
        return index, reason, code

    def _check_usable(self) -> None:
        check_usable(self._here, self._unusable, self._pid)


class _HostArea:
    """The probe area in anonymous host memory of its own pages."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, AREA_BYTES)
        self.address: int = np.frombuffer(self._memory, np.uint8).ctypes.data

    def put(self, offset: int, data: bytes) -> None:
        self._memory[offset : offset + len(data)] = data

    def get(self, offset: int, nbytes: int) -> bytes:
        return self._memory[offset : offset + nbytes]


class _DeviceArea:
    """The probe area on the current CUDA device: nvlink_intra registers nothing else."""

    def __init__(self) -> None:
        import torch  # pyright: ignore[reportMissingImports] - only where there is CUDA memory

        self._torch = torch
        self._memory: Any = torch.zeros(AREA_BYTES, dtype=torch.uint8, device="cuda")
        self.address: int = self._memory.data_ptr()

    def put(self, offset: int, data: bytes) -> None:
        host = self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)
        self._memory[offset : offset + len(data)].copy_(host)
        self._torch.cuda.synchronize()

    def get(self, offset: int, nbytes: int) -> bytes:
        return self._memory[offset : offset + nbytes].cpu().numpy().tobytes()


def _split_address(endpoint: Endpoint) -> tuple[str, int]:
    host, _, port = endpoint.address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise failed_peer(endpoint, 'not an address of the form "host:port"', "address")
    return host, int(port)
